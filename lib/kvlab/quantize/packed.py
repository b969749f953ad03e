"""The low-bit matrix products that torch ships for a CPU, each over a layout of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from kvlab.errors import DeviceError
from kvlab.kernels import instruction_set
from kvlab.packing import Quantized, unpack

#: Group sizes that the four-bit operator has.
INT4_GROUPS = (32, 64, 128, 256)


def layout_here() -> str:
    """The name of the layout that torch packs to on this machine; it depends on the instruction set."""
    return f"cpu-{instruction_set()}"


@dataclass(frozen=True)
class _Packed(ABC):
    """Weights in the layout of one operator on one kind of machine.

    Args:
        weights: as the operator wants them.
        scales: as the operator wants them.
        group: inputs that share a scale.
        layout: what the weights were packed for.
    """

    weights: Shaped[Tensor, "..."]
    scales: Float[Tensor, "..."]
    group: int
    layout: str

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations that these scales go with."""
        return self.scales.dtype

    def linear(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        """The product, where the layout means what the operator takes it for.

        Args:
            x: activations.

        Raises:
            DeviceError: they are on a device that the weights were not packed for.
        """
        here = layout_here() if x.device.type == "cpu" else x.device.type
        if self.layout != here:
            raise DeviceError(
                f"the weights are packed for {self.layout}, the activations are on {here}; pack the codes again there"
            )
        return self._product(x)

    @abstractmethod
    def _product(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        """What torch's operator makes of it."""


class PackedInt8(_Packed):
    """``torch._weight_int8pack_mm``: a scale a row."""

    @staticmethod
    def takes(weight: Quantized, dtype: torch.dtype) -> bool:
        """Whether the operator has a product for this grid and activations of this dtype."""
        return weight.grid.bits == 8 and weight.grid.symmetric and weight.scale.shape[1] == 1

    @classmethod
    def pack(cls, weight: Quantized, dtype: torch.dtype) -> PackedInt8:
        """Signed codes.

        Args:
            weight: the codes.
            dtype: of the activations.
        """
        signed = (weight.codes.to(torch.int16) - 128).to(torch.int8)
        return cls(signed, weight.scale[:, 0].to(dtype), weight.columns, layout_here())

    def _product(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        return torch.ops.aten._weight_int8pack_mm(x, self.weights, self.scales)


class PackedInt4(_Packed):
    """``torch._weight_int4pack_mm_for_cpu``: a scale and a zero point a group."""

    @staticmethod
    def takes(weight: Quantized, dtype: torch.dtype) -> bool:
        """Whether the operator has a fast product for this grid and activations of this dtype: bfloat16 alone."""
        group = weight.columns // weight.scale.shape[1]
        return (
            dtype == torch.bfloat16
            and weight.grid.bits == 4
            and group in INT4_GROUPS
            and weight.codes.shape[0] % 16 == 0
        )

    @classmethod
    def pack(cls, weight: Quantized, dtype: torch.dtype) -> PackedInt4:
        """Codes in blocks; the operator has ``value = scale * (code - 8) + zero``.

        Args:
            weight: the codes.
            dtype: of the activations.
        """
        codes = unpack(weight.codes, 4).to(torch.int32)
        scale = weight.scale.float()
        zero = torch.zeros_like(scale) if weight.minimum is None else weight.minimum.float() + 8 * scale
        # With scales in another dtype than bfloat16 the operator falls back to a loop that is 20 times slower.
        scales = torch.stack((scale, zero), dim=-1).transpose(0, 1).contiguous().to(dtype)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        return cls(packed, scales, weight.columns // weight.scale.shape[1], layout_here())

    def _product(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.weights, self.group, self.scales)
