"""Small floating point formats, to set beside integers: fp8 and fp4, each with a scale a group.

A float spends bits on an exponent, so its points lie close together near zero and far apart at the top. OCP's
Microscaling specification (MX v1.0, 2023) defines both formats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvlab.errors import ConfigError


@dataclass(frozen=True)
class FloatFormat:
    """A small float: sign, exponent and fraction, no infinities.

    Args:
        exponent_bits: of a number.
        fraction_bits: of a number.
        largest: the largest value.

    Raises:
        ConfigError: a format needs an exponent.
    """

    exponent_bits: int
    fraction_bits: int
    largest: float

    def __post_init__(self) -> None:
        if self.exponent_bits < 1 or self.fraction_bits < 0 or self.largest <= 0:
            raise ConfigError(f"{self} is no floating point format: it needs an exponent and a largest value above 0")

    @property
    def bits(self) -> int:
        """Bits of a number, the sign among them."""
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def smallest_exponent(self) -> int:
        """Exponent of the smallest normal number; subnormal ones keep its spacing."""
        return 2 - 2 ** (self.exponent_bits - 1)

    def round(self, values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The nearest numbers of the format, ties to even; what is too large becomes the largest.

        Args:
            values: any; computed in float32.
        """
        wide = values.float()
        exponent = torch.frexp(wide).exponent - 1
        step = torch.exp2(exponent.clamp(min=self.smallest_exponent).float() - self.fraction_bits)
        return ((wide / step).round() * step).clamp(-self.largest, self.largest)

    def round_scaled(self, values: Float[Tensor, "*rows columns"], group: int | None = None) -> Float[Tensor, "..."]:
        """The nearest numbers with a scale for each group, which puts its largest magnitude on the format's largest.

        Args:
            values: what to round.
            group: elements along the last dimension that share a scale; None for all of them.

        Raises:
            ConfigError: the groups do not divide the rows.
        """
        width = group or values.shape[-1]
        if values.shape[-1] % width:
            raise ConfigError(f"groups of {width} do not divide rows of {values.shape[-1]}; choose a size that does")
        groups = values.float().unflatten(-1, (-1, width))
        reach = groups.abs().amax(-1, keepdim=True)
        scale = torch.where(reach > 0, reach / self.largest, 1.0)
        return (self.round(groups / scale) * scale).flatten(-2)


#: Four exponent bits, three of fraction: weights, activations and KV caches (H100, Ada and newer multiply it).
E4M3 = FloatFormat(4, 3, 448.0)
#: Five exponent bits, two of fraction: more range, coarser.
E5M2 = FloatFormat(5, 2, 57344.0)
#: Two exponent bits, one of fraction: 0, 0.5, 1, 1.5, 2, 3, 4, 6 (Blackwell multiplies it).
E2M1 = FloatFormat(2, 1, 6.0)
