"""Matrix products of a few rows and attention to blocks, in C++: what decode spends its time on, at memory's speed.

torch's own matrix product reads bfloat16 weights at half of the memory's bandwidth when there is one row, and has no
product for most low-bit formats; its attention needs keys that lie in one piece, so blocks would be copied in every
step. ``linear.cpp`` and ``attention.cpp`` have these; they are compiled once, by ``kvlab compile``, and without them
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
    paged_attention,
    ready,
    wide_linear,
)

__all__ = [
    "KERNEL_DTYPES", "build", "built", "code_linear", "code_unpack", "direct_calls", "enable", "enabled",
    "instruction_set", "library", "paged_attention", "ready", "require_compiler", "wide_linear",
]  # fmt: skip
