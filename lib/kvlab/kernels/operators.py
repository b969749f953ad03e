"""The compiled operators, as Python has them."""

from __future__ import annotations

import ctypes

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from kvlab.kernels.compiler import built, library

#: What activations and wide weights may be.
KERNEL_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def enable() -> bool:
    """Load the compiled kernels if they are there.

    Returns:
        Whether they can be used.
    """
    if enabled() or not built():
        return enabled()
    # First for everybody: compiled steps call by name what is in it.
    ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(library()))
    # Shapes of the results, for torch.export.
    torch.library.register_fake("kvlab::wide_linear", _product)
    torch.library.register_fake("kvlab::code_linear", lambda x, codes, *_: _product(x, codes))
    torch.library.register_fake(
        "kvlab::code_unpack",
        lambda codes, scale, minimum, bits: scale.new_empty(
            len(codes), codes.shape[1] * 8 // bits, dtype=torch.float32
        ),
    )
    torch.library.register_fake("kvlab::paged_attention", lambda q, *_: q.new_empty(q.shape))
    return True


def direct_calls() -> dict[torch._ops.OpOverload, list[str]]:
    """What a step compiled ahead calls instead of the operators: C functions of the library, as their declarations."""
    if not enabled():
        return {}
    tensor, error = "AtenTensorHandle", "AOTITorchError"
    wide = f"{error} aoti_torch_cpu_wide_linear({tensor}, {tensor}, {tensor}*)"
    code = f"{error} aoti_torch_cpu_code_linear({tensor}, {tensor}, {tensor}, {tensor}*, int64_t, {tensor}*)"
    paged = f"{error} aoti_torch_cpu_paged_attention({', '.join([tensor] * 6)}, int64_t, int64_t, {tensor}*)"
    kernels = torch.ops.kvlab
    return {
        kernels.wide_linear.default: [wide],
        kernels.code_linear.default: [code],
        kernels.paged_attention.default: [paged],
    }


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """A product without its numbers."""
    torch._check(x.device == weight.device, lambda: f"x is on {x.device}, the weights are on {weight.device}")
    return x.new_empty(len(x), len(weight))


def enabled() -> bool:
    """Whether the kernels have been loaded into this process."""
    return hasattr(torch.ops.kvlab, "wide_linear")


def ready(width: int, group: int) -> bool:
    """Whether the kernels are loaded, and take rows of this width in groups of this size.

    Args:
        width: elements of a row.
        group: elements that share a scale.
    """
    return enabled() and width % 32 == 0 and group % 32 == 0


def wide_linear(x: Float[Tensor, "rows inputs"], weight: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "rows out"]:
    """``x @ weight.T``, for few rows.

    Args:
        x: activations.
        weight: float32, bfloat16 or float16, contiguous.
    """
    return torch.ops.kvlab.wide_linear(x, weight)


def code_linear(
    x: Float[Tensor, "rows inputs"],
    codes: UInt8[Tensor, "outputs packed"],
    scale: Float[Tensor, "outputs groups"],
    minimum: Float[Tensor, "outputs groups"] | None,
    bits: int,
) -> Float[Tensor, "rows outputs"]:
    """``x @ dequantized.T``, for few rows; the codes are widened in registers.

    Args:
        x: activations; they stay wide.
        codes: as :func:`kvlab.packing.pack` has them.
        scale: one a group.
        minimum: one a group, or None in a symmetric grid.
        bits: 8 or 4.
    """
    return torch.ops.kvlab.code_linear(x, codes, scale, minimum, bits)


def code_unpack(
    codes: UInt8[Tensor, "outputs packed"],
    scale: Float[Tensor, "outputs groups"],
    minimum: Float[Tensor, "outputs groups"] | None,
    bits: int,
) -> Float[Tensor, "outputs inputs"]:
    """The weights that codes stand for, in float32: for many rows, where a matrix product pays for it.

    Args:
        codes: as :func:`kvlab.packing.pack` has them.
        scale: one a group.
        minimum: one a group, or None in a symmetric grid.
        bits: 8 or 4.
    """
    return torch.ops.kvlab.code_unpack(codes, scale, minimum, bits)


def paged_attention(
    q: Float[Tensor, "queries n_head head_dim"],
    keys: Float[Tensor, "n_kv_head slots head_dim"],
    values: Float[Tensor, "n_kv_head slots head_dim"],
    tables: Int64[Tensor, "requests max_blocks"],
    rows: Int64[Tensor, " queries"],
    lengths: Int64[Tensor, " queries"],
    block_size: int,
    window: int = 0,
) -> Float[Tensor, "queries n_head head_dim"]:
    """``softmax(q k / sqrt(head_dim)) v`` for one query each, over keys and values that lie in blocks.

    Sums are float32. The result for a query does not depend on the queries beside it, nor on the number of threads. A
    slot beyond a length, a table entry that no length reaches, and the row of a query of length 0 are never read.

    Args:
        q: the queries; float32, bfloat16 or float16, their last dimension contiguous.
        keys: of all requests, in the dtype of the queries; block b has the slots from ``b * block_size``. The last
            dimension is contiguous.
        values: like keys.
        tables: the blocks of each request, in order.
        rows: the table that each query reads.
        lengths: the keys that each query sees: positions 0 to length - 1 of its request. A query of length 0 is
            padding: its output is zero.
        block_size: tokens of a block.
        window: only the last ``window`` of these positions are seen; 0: all.

    Raises:
        RuntimeError: shapes or dtypes do not fit, or a length, a row or a block does not exist.

    Sources: paged attention, arXiv:2309.06180; the pieces of a long request as in Flash-Decoding (Dao et al., 2023).
    """
    return torch.ops.kvlab.paged_attention(q, keys, values, tables, rows, lengths, block_size, window)
