"""Round to a grid, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from kvlab.errors import ConfigError
from kvlab.kernels import code_unpack, ready
from kvlab.packing.nibbles import pack, unpack


@dataclass(frozen=True)
class Grid:
    """Where rounded values may lie.

    Args:
        bits: of a code: 2, 4 or 8.
        group: elements along the last dimension that share a scale; None for all of them.
        symmetric: codes around zero with a scale alone; False adds a minimum, so that the whole range is used.

    Raises:
        ConfigError: a number is impossible.
    """

    bits: int
    group: int | None = None
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise ConfigError(f"bits is {self.bits}; codes have 2, 4 or 8")
        if self.group is not None and self.group < 1:
            raise ConfigError(f"group is {self.group}; it must be 1 or more, or None for a whole row")

    @property
    def top(self) -> int:
        """The largest code: of a symmetric grid the largest magnitude."""
        return 2 ** (self.bits - 1) - 1 if self.symmetric else 2**self.bits - 1

    def group_of(self, width: int, name: str) -> int:
        """Elements of a group in rows of this width.

        Args:
            width: elements of a row.
            name: of the tensor, for the message.

        Raises:
            ConfigError: the groups do not divide the row.
        """
        group = self.group or width
        if width % group:
            raise ConfigError(
                f"{name} has rows of {width} = {width // group} x {group} + {width % group}; "
                f"groups of {group} do not divide them, choose a group size that does"
            )
        return group


@dataclass(frozen=True)
class Quantized:
    """Codes with their scales.

    Args:
        codes: packed, the codes of a row side by side; signed ones are shifted up by ``top + 1``.
        scale: one a group.
        minimum: one a group in an asymmetric grid; None in a symmetric one.
        grid: what they were rounded to.
    """

    codes: UInt8[Tensor, "*rows packed"]
    scale: Float[Tensor, "*rows groups"]
    minimum: Float[Tensor, "*rows groups"] | None
    grid: Grid

    @property
    def columns(self) -> int:
        """Values of a row."""
        return self.codes.shape[-1] * 8 // self.grid.bits

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scale.nbytes + (0 if self.minimum is None else self.minimum.nbytes)

    def map(self, change: Callable[[Tensor], Tensor]) -> Quantized:
        """The same change to codes, scales and minima: a slice, a copy.

        Args:
            change: of one tensor; it must leave the last dimension alone.
        """
        minimum = None if self.minimum is None else change(self.minimum)
        return Quantized(change(self.codes), change(self.scale), minimum, self.grid)

    def copy_(self, other: Quantized) -> None:
        """Overwrite in place.

        Args:
            other: of the same shape and grid.
        """
        self.codes.copy_(other.codes)
        self.scale.copy_(other.scale)
        if self.minimum is not None and other.minimum is not None:
            self.minimum.copy_(other.minimum)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "*rows columns"]:
        """The values that the codes stand for.

        Args:
            dtype: of the values; they are computed in float32.
        """
        codes = self.codes if self.grid.bits == 8 else unpack(self.codes, self.grid.bits)
        values = codes.unflatten(-1, (self.scale.shape[-1], -1)).float()
        scale = self.scale.float()[..., None]
        if self.minimum is None:
            values.sub_(self.grid.top + 1).mul_(scale)
        else:
            values.mul_(scale).add_(self.minimum.float()[..., None])
        return values.flatten(-2).to(dtype)

    def widen(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "*rows columns"]:
        """:meth:`dequantize` as fast as this machine can; a value may differ in its last bit.

        Args:
            dtype: of the values.
        """
        group = self.columns // self.scale.shape[-1]
        if self.codes.device.type != "cpu" or self.grid.bits == 2 or not ready(self.columns, group):
            return self.dequantize(dtype)
        flat = self.map(lambda tensor: tensor.flatten(end_dim=-2))
        wide = code_unpack(flat.codes, flat.scale, flat.minimum, self.grid.bits)
        return wide.view(*self.codes.shape[:-1], self.columns).to(dtype)


#: Integers as wide as a floating point number: one more is the next number away from zero.
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _at_most(values: Float[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """Values in another dtype, rounded down."""
    kept = values.to(dtype)
    bits = kept.view(_BITS[dtype.itemsize])
    return torch.where(kept.float() > values, torch.where(kept > 0, bits - 1, bits + 1).view(dtype), kept)


def quantize(
    values: Float[Tensor, "*rows columns"],
    grid: Grid,
    name: str = "the tensor",
    scale_dtype: torch.dtype = torch.float32,
) -> Quantized:
    """Round to the nearest point of a grid.

    A group of zeros stays zero, a constant group stays itself.

    Args:
        values: what to round.
        grid: where to.
        name: of the tensor, for messages.
        scale_dtype: what scales are kept in; values are rounded to the kept scales.

    Raises:
        ConfigError: the groups do not divide the rows, or a value is not finite.
    """
    if not torch.isfinite(values).all():
        raise ConfigError(f"{name} holds NaN or infinity; nothing finite can stand for it")
    groups = values.float().unflatten(-1, (-1, grid.group_of(values.shape[-1], name)))
    # The minimum is rounded down and the scale up: no value lies outside the grid, so none is off by more than half a
    # step, however coarse the dtype of scales is at their magnitude.
    minimum = None if grid.symmetric else _at_most(groups.amin(-1, keepdim=True), scale_dtype)
    shifted = groups if minimum is None else groups - minimum.float()
    reach = shifted.abs().amax(-1, keepdim=True)
    # A scale of zero would divide by zero; any other leaves the code of an empty range at zero.
    exact = torch.where(reach > 0, (reach / grid.top).clamp(min=torch.finfo(torch.float32).tiny), 1.0)
    scale = -_at_most(-exact, scale_dtype)
    if not torch.isfinite(scale).all():
        raise ConfigError(f"{name} reaches {reach.max().item():.3g}, more than scales in {scale_dtype} can stand for")
    codes = (shifted / scale.float()).round().clamp(-grid.top if minimum is None else 0, grid.top)
    if minimum is None:
        codes = codes + (grid.top + 1)
    packed = pack(codes.flatten(-2).to(torch.uint8), grid.bits)
    return Quantized(packed, scale.squeeze(-1), None if minimum is None else minimum.squeeze(-1), grid)
