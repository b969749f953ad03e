"""Rotary position embedding (RoFormer, arXiv:2104.09864), in the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvlab.config import ModelConfig, RopeScaling


class Rope(nn.Module):
    """Tables of cosines and sines, one row a position.

    They stay float32 when the model is cast: bfloat16 has 8 bits of fraction, so positions 256 and 257 would share
    their angles. They are computed in float64, because a float32 angle at position 100,000 is off by 0.004.

    Args:
        config: the model's shape.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        cos, sin = angles(config, torch.arange(config.max_seq_len, device="cpu"))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Follow the model to another device, never to another dtype."""
        for name in ("cos", "sin"):
            table = getattr(self, name)
            setattr(self, name, table.to(fn(table).device))
        return self

    def forward(self, positions: Int[Tensor, "batch time"]) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions, [batch, 1, time, head_dim / 2]; padding gets position 0's."""
        at = positions.clamp(min=0)
        return self.cos[at][:, None], self.sin[at][:, None]


def angles(config: ModelConfig, positions: Int[Tensor, "*at"]) -> tuple[Tensor, Tensor]:
    """Cosines and sines of any positions, also beyond the model's context: float32, ``[*at, head_dim / 2]``.

    Args:
        config: the model's shape.
        positions: on the CPU, for the angles are taken in float64; a negative one turns backwards.
    """
    turned = positions[..., None].double() * frequencies(config)
    return turned.cos().float(), turned.sin().float()


def frequencies(config: ModelConfig) -> Float[Tensor, "half"]:
    """Radians per token of each pair of dimensions, float64.

    Args:
        config: the model's shape; its ``rope_scaling`` is applied.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device="cpu") / config.head_dim
    plain = config.rope_theta**-exponent
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    return plain / scaling.factor if scaling.kind == "linear" else _llama3(plain, scaling)


def _llama3(plain: Float[Tensor, "half"], scaling: RopeScaling) -> Float[Tensor, "half"]:
    """Fast frequencies stay, slow ones are divided by the factor, those between are blended."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_seq_len * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / scaling.factor


def rotate(
    x: Float[Tensor, "*rows heads time head_dim"],
    cos: Float[Tensor, "#batch 1 #time half"],
    sin: Float[Tensor, "#batch 1 #time half"],
) -> Float[Tensor, "*rows heads time head_dim"]:
    """Turn each pair (x[i], x[i + head_dim / 2]) by its angle, in float32 at least.

    Args:
        x: queries or keys.
        cos: from :class:`Rope`.
        sin: from :class:`Rope`.
    """
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def unpermute(weight: Any, n_head: int) -> Any:
    """Rows of a query or key projection from the interleaved layout, pairs (2i, 2i + 1), to the half-split one.

    GGUF files of the Llama family hold the interleaved layout (llama.cpp ``convert_hf_to_gguf.py``, ``permute``).

    Args:
        weight: [heads * head_dim, ...], a tensor or an array.
        n_head: heads in it.
    """
    rows = weight.shape[0]
    pairs = weight.reshape(n_head, rows // n_head // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
