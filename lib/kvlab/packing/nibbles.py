"""Two or four codes in a byte."""

from __future__ import annotations

import torch
from jaxtyping import UInt8
from torch import Tensor

from kvlab.errors import ConfigError


def pack(codes: UInt8[Tensor, "*rows columns"], bits: int) -> UInt8[Tensor, "*rows packed"]:
    """Codes side by side in bytes, the first in the lowest bits.

    Args:
        codes: each below ``2**bits``.
        bits: of a code: 2, 4 or 8.

    Raises:
        ConfigError: the codes do not fill whole bytes.
    """
    each = _codes_a_byte(bits)
    if codes.shape[-1] % each:
        raise ConfigError(f"{codes.shape[-1]} codes of {bits} bits do not fill whole bytes; give a multiple of {each}")
    parts = codes.unflatten(-1, (-1, each))
    packed = torch.zeros_like(parts[..., 0])
    for place in range(each):
        packed |= parts[..., place] << (bits * place)
    return packed


def unpack(packed: UInt8[Tensor, "*rows packed"], bits: int) -> UInt8[Tensor, "*rows columns"]:
    """The codes that :func:`pack` put into bytes.

    Args:
        packed: bytes.
        bits: of a code: 2, 4 or 8.

    Raises:
        ConfigError: no code has so many bits.
    """
    each, mask = _codes_a_byte(bits), 2**bits - 1
    return torch.stack([(packed >> (bits * place)) & mask for place in range(each)], dim=-1).flatten(-2)


def _codes_a_byte(bits: int) -> int:
    if bits not in (2, 4, 8):
        raise ConfigError(f"bits is {bits}; codes have 2, 4 or 8")
    return 8 // bits
