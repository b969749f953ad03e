"""Matrix products of a few rows, in C++: what decode spends its time on, at the speed of the memory.

torch's own matrix product reads bfloat16 weights at half of the memory's bandwidth when there is one row, and has no
product for most low-bit formats. ``linear.cpp`` has both; it is compiled once, by ``kvlab compile``, and without it
everything runs by torch's operators.
"""

from kvlab.kernels.compiler import build, built, instruction_set, library, require_compiler
from kvlab.kernels.operators import (
    KERNEL_DTYPES,
    code_linear,
    code_unpack,
    direct_calls,
    enable,
    enabled,
    ready,
    wide_linear,
)

__all__ = [
    "KERNEL_DTYPES", "build", "built", "code_linear", "code_unpack", "direct_calls", "enable", "enabled",
    "instruction_set", "library", "ready", "require_compiler", "wide_linear",
]  # fmt: skip
