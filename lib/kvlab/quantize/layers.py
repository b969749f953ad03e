"""Layers whose matrix product is chosen by the number of rows, over wide weights or over codes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvlab.devices import dtype_name
from kvlab.kernels import KERNEL_DTYPES, code_linear, ready, wide_linear
from kvlab.packing import Quantized
from kvlab.quantize.packed import PackedInt4, PackedInt8
from kvlab.quantize.routes import RULE_OF_THUMB, Product, routes_for


class RowAwareLinear(nn.Module):
    """A linear layer that knows several ways to multiply, and takes the fastest for the rows at hand.

    One row is bound by the bytes of the weights, hundreds by arithmetic: no single kernel is good at both.

    Args:
        in_features: inputs.
        out_features: outputs.
        bias: added to the product, or None.
    """

    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("bias", bias)
        self._ready_for: torch.dtype | None = None
        self._routes, self._products = RULE_OF_THUMB, dict[str, Product]()

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the weights are."""

    @property
    @abstractmethod
    def format(self) -> str:
        """What the weights are stored as, in a word: routes are measured for each format."""

    @abstractmethod
    def products(self, dtype: torch.dtype) -> dict[str, Product]:
        """The ways that this layer has on its device, by name; each takes [rows, in] to [rows, out] without bias.

        Args:
            dtype: of the activations.
        """

    def route(self, rows: int, dtype: torch.dtype) -> str:
        """The name of the product for a number of rows.

        Args:
            rows: of the activations.
            dtype: of the activations.
        """
        if self._ready_for != dtype:
            self._routes, self._products = routes_for(self.device, self.format, dtype), self.products(dtype)
            self._ready_for = dtype
        return self._routes.choose(rows, self._products)

    def forward(self, x: Float[Tensor, "*rows in_features"]) -> Float[Tensor, "*rows out_features"]:
        """Multiply by the route that the number of rows calls for."""
        rows = x.reshape(-1, self.in_features)
        name = self.route(len(rows), x.dtype)  # which also makes the products ready for this dtype
        out = self._products[name](rows)
        out = out if self.bias is None else out + self.bias
        return out.view(*x.shape[:-1], self.out_features)

    def __getstate__(self) -> dict[str, Any]:
        """A copy makes products of its own: those of the original multiply by the original's weights."""
        return {**self.__dict__, "_ready_for": None, "_products": {}}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Another device or dtype has other routes."""
        self._ready_for = None
        return super()._apply(fn, recurse)


class WideLinear(RowAwareLinear):
    """The weights as they are, and the fastest product for the rows at hand.

    Args:
        linear: whose weight and bias are shared, not copied.
    """

    weight: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, None if linear.bias is None else linear.bias.data)
        self.weight = linear.weight

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weight.device

    @property
    def format(self) -> str:
        """The dtype of the weights."""
        return dtype_name(self.weight.dtype)

    def products(self, dtype: torch.dtype) -> dict[str, Product]:
        """torch's product; on a CPU also widened to float32 first (it may have no units for 16 bits), and our kernel.

        Args:
            dtype: of the activations.
        """
        ways: dict[str, Product] = {"torch": lambda x: F.linear(x, self.weight.to(dtype))}
        if self.device.type == "cpu" and {dtype, self.weight.dtype} <= KERNEL_DTYPES:
            if self.weight.dtype != torch.float32:
                ways["widened"] = lambda x: F.linear(x.float(), self.weight.float()).to(dtype)
            if ready(self.in_features, 32):
                ways["kernel"] = lambda x: wide_linear(x, self.weight)
        return ways


class LowBitLinear(RowAwareLinear):
    """Codes and scales in place of a matrix.

    The codes are the truth: they are saved, and every product is made from them. A layout that some kernel wants is
    packed from them on the device, when it is first needed.

    Args:
        weight: codes of the matrix [out, in].
        bias: added to the product, or None.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None

    def __init__(self, weight: Quantized, bias: Tensor | None = None) -> None:
        super().__init__(weight.columns, weight.codes.shape[0], bias)
        self.grid = weight.grid
        self.register_buffer("codes", weight.codes)
        self.register_buffer("scale", weight.scale)
        self.register_buffer("minimum", weight.minimum)
        self._packed: PackedInt8 | PackedInt4 | None = None

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.codes.device

    @property
    def quantized(self) -> Quantized:
        """The codes with their scales."""
        return Quantized(self.codes, self.scale, self.minimum, self.grid)

    @property
    def format(self) -> str:
        """Bits and group."""
        return f"int{self.grid.bits}-g{self.in_features // self.scale.shape[1]}"

    def products(self, dtype: torch.dtype) -> dict[str, Product]:
        """Dequantize and multiply, on any device; on a CPU also torch's packed operators and our kernel.

        Args:
            dtype: of the activations.
        """
        ways: dict[str, Product] = {"dequantize": self._dequantized}
        if self.device.type == "cpu" and dtype in KERNEL_DTYPES:
            if kind := next((k for k in (PackedInt8, PackedInt4) if k.takes(self.quantized, dtype)), None):
                ways["packed"] = lambda x: self._packed_as(kind, x)
            if self.grid.bits > 2 and ready(self.in_features, self.in_features // self.scale.shape[1]):
                ways["kernel"] = lambda x: code_linear(x, self.codes, self.scale, self.minimum, self.grid.bits)
        return ways

    def _dequantized(self, x: Float[Tensor, "rows in_features"]) -> Float[Tensor, "rows out_features"]:
        """In float32 on a CPU, which has units for it always, and in the dtype of ``x`` elsewhere."""
        wide = torch.promote_types(x.dtype, torch.float32) if x.device.type == "cpu" else x.dtype
        weight = self.quantized.dequantize(wide) if wide == torch.float64 else self.quantized.widen(wide)
        return F.linear(x.to(wide), weight).to(x.dtype)

    def _packed_as(
        self, kind: type[PackedInt8 | PackedInt4], x: Float[Tensor, "rows in_features"]
    ) -> Float[Tensor, "rows out_features"]:
        if self._packed is None or self._packed.dtype != x.dtype:
            self._packed = kind.pack(self.quantized, x.dtype)
        return self._packed.linear(x)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Other codes: what was packed from the old ones is void."""
        self._packed, self._ready_for = None, None
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Follow the model to another device. Codes and scales keep their dtype: they are what was rounded to."""
        self._packed, self._ready_for = None, None
        for name, tensor in self._buffers.items():
            if tensor is not None:
                moved = fn(tensor)
                self._buffers[name] = moved if name == "bias" else tensor.to(moved.device)
        return self


class LowBitEmbedding(nn.Module):
    """Rows of an embedding, widened as they are looked up. A tied head multiplies with the same codes.

    Args:
        table: shares its codes.
        dtype: of the rows that come out, the residual stream's.
    """

    def __init__(self, table: LowBitLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.table, self.dtype = table, dtype

    def forward(self, tokens: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time hidden_size"]:
        """The rows of the tokens."""
        table = self.table
        minimum = None if table.minimum is None else table.minimum[tokens]
        return Quantized(table.codes[tokens], table.scale[tokens], minimum, table.grid).dequantize(self.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Take over a cast of the model."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return super()._apply(fn, recurse)
