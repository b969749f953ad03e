"""Weights in fewer bits: round them, keep the codes, and multiply by the kernel that fits the rows at hand."""

from kvlab.quantize.apply import is_quantized, linears, measured, put, quantize, row_aware, weight_storage_bytes
from kvlab.quantize.awq import Scaled, awq, clip_ranges, scale_channels
from kvlab.quantize.layers import LowBitEmbedding, LowBitLinear, RowAwareLinear, WideLinear
from kvlab.quantize.methods import Int4, Int8, Method
from kvlab.quantize.routes import Routes, remember, routes_for, routes_from

__all__ = [
    "Int4", "Int8", "LowBitEmbedding", "LowBitLinear", "Method", "Routes", "RowAwareLinear", "Scaled", "WideLinear",
    "awq", "clip_ranges", "is_quantized", "linears", "measured", "put", "quantize", "remember", "routes_for",
    "routes_from", "row_aware", "scale_channels", "weight_storage_bytes",
]  # fmt: skip
