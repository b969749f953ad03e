"""Low-bit codes and their scales: rounding, packing and unpacking, for weights and for caches.

One rule everywhere: ``value = scale * code + minimum``. Symmetric grids have no minimum and signed codes; asymmetric
ones have unsigned codes. A group is a run of elements along the last dimension that share a scale.
"""

from kvlab.packing.codes import Grid, Quantized, quantize
from kvlab.packing.floats import E2M1, E4M3, E5M2, FloatFormat
from kvlab.packing.nibbles import pack, unpack

__all__ = ["E2M1", "E4M3", "E5M2", "FloatFormat", "Grid", "Quantized", "pack", "quantize", "unpack"]
