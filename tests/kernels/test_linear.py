"""The compiled kernels against plain matrix products in float64, in every format and number of rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvlab import kernels
from kvlab.packing import Grid, Quantized, quantize

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Epsilon of what comes out; the sums are made in float32.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}

pytestmark = pytest.mark.usefixtures("compiled_kernels")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def coded(rows: int, columns: int, grid: Grid, scales: torch.dtype = torch.float16) -> Quantized:
    return quantize(draw(rows, columns) + 0.1, grid, scale_dtype=scales)


def product(x: Tensor, made: Quantized) -> Tensor:
    return kernels.code_linear(x, made.codes, made.scale, made.minimum, made.grid.bits)


def assert_product(got: Tensor, x: Tensor, weight: Tensor) -> None:
    """Equal to the product in float64, up to the rounding of sums of this size and of what comes out."""
    assert got.dtype == x.dtype
    wide_x, wide_weight = x.double(), weight.double()
    size = wide_x.abs() @ wide_weight.abs().T
    off = (got.double() - wide_x @ wide_weight.T).abs()
    assert (off <= TOLERANCE[x.dtype] * (wide_x @ wide_weight.T).abs() + 1e-6 * size).all(), (off / size).max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weights", DTYPES, ids=str)
def test_wide_weights_with_1_to_33_rows(dtype: torch.dtype, weights: torch.dtype) -> None:
    for outputs, columns in ((37, 96), (1, 32), (64, 160)):
        weight = draw(outputs, columns).to(weights)
        for rows in range(1, 34):
            x = draw(rows, columns, seed=rows).to(dtype)
            assert_product(kernels.wide_linear(x, weight), x, weight)


@pytest.mark.parametrize(("outputs", "columns"), [(32, 32), (96, 64), (64, 608)])
def test_whole_tiles_of_bfloat16(outputs: int, columns: int) -> None:
    """Where the processor has a matrix unit, products of these shapes run on it; elsewhere as all others do."""
    weight = draw(outputs, columns).bfloat16()
    for rows in (1, 2, 15, 16, 17, 31, 32, 33, 48, 70):
        x = draw(rows, columns, seed=rows).bfloat16()
        assert_product(kernels.wide_linear(x, weight), x, weight)
        assert_product(kernels.wide_linear(x[:, :], weight[: outputs - 1]), x, weight[: outputs - 1])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64, None])
def test_codes_with_1_to_33_rows(bits: int, symmetric: bool, group: int | None) -> None:
    for outputs, columns in ((37, 192), (1, 64), (6, 640)):
        made = coded(outputs, columns, Grid(bits, group, symmetric))
        weight = made.dequantize(torch.float64)
        for rows in range(1, 34):
            x = draw(rows, columns, seed=rows)
            assert_product(product(x, made), x, weight)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scales", DTYPES, ids=str)
def test_codes_with_scales_and_activations_of_every_dtype(bits: int, dtype: torch.dtype, scales: torch.dtype) -> None:
    for symmetric in (True, False):
        made = coded(35, 96, Grid(bits, 32, symmetric), scales)
        assert made.scale.dtype == scales
        for rows in (1, 2, 3, 4, 5, 9):
            x = draw(rows, 96, seed=rows).to(dtype)
            assert_product(product(x, made), x, made.dequantize(torch.float64))


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_matrices_that_are_shared_among_threads(rows: int) -> None:
    """Large enough that rows of weights are divided, at places that are no multiple of any tile."""
    made, x = coded(1021, 576, Grid(4, 32, symmetric=False)), draw(rows, 576)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert_product(product(x, made), x, made.dequantize(torch.float64))
        wide = made.dequantize(torch.bfloat16)
        assert_product(kernels.wide_linear(x, wide), x, wide)
        torch.testing.assert_close(unpacked(made), made.dequantize(), rtol=1e-6, atol=1e-6)
    finally:
        torch.set_num_threads(threads)


def unpacked(made: Quantized) -> Tensor:
    return kernels.code_unpack(made.codes, made.scale, made.minimum, made.grid.bits)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64, None])
@pytest.mark.parametrize("scales", DTYPES, ids=str)
def test_unpacking_is_dequantizing(bits: int, symmetric: bool, group: int | None, scales: torch.dtype) -> None:
    """In the order of the columns; the multiplication and the addition may be one instruction."""
    made = coded(33, 192, Grid(bits, group, symmetric), scales)
    got, want = unpacked(made), made.dequantize()
    reach = (made.scale.float().abs().amax() * 256).item()
    torch.testing.assert_close(got, want, rtol=0, atol=reach * 2**-23)


def test_every_code_stands_for_its_value() -> None:
    """All 256 codes of eight bits and all 256 pairs of four, through a product with unit vectors."""
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    scale, minimum = torch.full((8, 1), 0.5), torch.full((8, 1), -3.0)
    for bits, columns in ((8, 32), (4, 64)):
        for made in (
            Quantized(codes, scale, None, Grid(bits)),
            Quantized(codes, scale, minimum, Grid(bits, symmetric=False)),
        ):
            assert torch.equal(product(torch.eye(columns), made).T, made.dequantize())
            assert torch.equal(unpacked(made), made.dequantize())


@pytest.mark.parametrize("rows", [1, 5])
def test_no_rows_and_slices_of_rows(rows: int) -> None:
    weight, made = draw(5, 64), coded(5, 64, Grid(8, 32))
    wider = draw(2 * rows, 128)
    x = wider[::2, :64]
    assert not x.is_contiguous() or rows == 1
    assert_product(kernels.wide_linear(x, weight), x, weight)
    assert_product(product(x, made), x, made.dequantize(torch.float64))
    assert kernels.wide_linear(x[:0], weight).shape == (0, 5)
    assert product(x[:0], made).shape == (0, 5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("rows", [1, 6])
def test_nan_in_comes_out_as_nan_in_its_own_row(bad: float, rows: int) -> None:
    """-ffast-math would let the compiler assume that there is none."""
    made, x = coded(7, 64, Grid(4, 32, symmetric=False)), draw(rows, 64)
    x[0, 33] = bad
    for got in (product(x, made), kernels.wide_linear(x, made.dequantize())):
        assert not torch.isfinite(got[0]).any()
        assert torch.isfinite(got[1:]).all()
        if bad != bad:
            assert got[0].isnan().all()


def test_the_process_keeps_its_subnormal_numbers() -> None:
    """A library linked with -ffast-math turns them off for everybody who loads it."""
    smallest, tensor = float.fromhex("0x1p-1074"), torch.tensor([1e-42])
    assert smallest * 1.0 > 0
    assert (tensor * torch.ones(1)).item() > 0
    weight = torch.zeros(1, 32)
    weight[0, 0] = 1.0
    x = torch.zeros(1, 32)
    x[0, 0] = 1e-42
    assert kernels.wide_linear(x, weight).item() > 0


def _wide(change: str) -> tuple[Tensor, Tensor]:
    x, weight = draw(2, 64), draw(5, 64)
    return {
        "another width": (x[:, :32].contiguous(), weight),
        "three dimensions": (x[None], weight),
        "one dimension": (x[0], weight),
        "a weight of three dimensions": (x, weight[None]),
        "integers": (x.long(), weight),
        "weights of integers": (x, weight.long()),
        "float64": (x.double(), weight),
        "weights in float64": (x, weight.double()),
        "weights not contiguous": (x, draw(64, 5).T),
        "no multiple of 32": (draw(2, 48), draw(5, 48)),
        "no columns": (draw(2, 0), draw(5, 0)),
    }[change]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("another width", "x has rows of 32, the weights of 64; they must agree"),
        ("three dimensions", "x has 3 dimensions; it must have 2"),
        ("one dimension", "x has 1 dimensions; it must have 2"),
        ("a weight of three dimensions", "weight has 3 dimensions"),
        ("integers", "x is Long; it must be float32, float16 or bfloat16"),
        ("weights of integers", "weight is Long"),
        ("float64", "x is Double"),
        ("weights in float64", "weight is Double"),
        ("weights not contiguous", "weight is not contiguous"),
        ("no multiple of 32", "a group must be a multiple of 32"),
        ("no columns", "a group must be a multiple of 32"),
    ],
)
def test_bad_wide_operands_raise(change: str, message: str) -> None:
    # By the operator itself: the shape checks of the tests would refuse some of these before it could.
    with pytest.raises(RuntimeError, match=message):
        torch.ops.kvlab.wide_linear(*_wide(change))


CODED = {
    "scales of other rows": ({"scale": draw(4, 2)}, "scale has 4 rows, codes 5; they must agree"),
    "scales that do not divide": ({"scale": draw(5, 3)}, "a group must be a multiple of 32"),
    "groups of 16": ({"scale": draw(5, 4)}, "a group must be a multiple of 32"),
    "no scales": ({"scale": draw(5, 0)}, "a group must be a multiple of 32"),
    "minima of another shape": ({"minimum": draw(5, 1)}, "minimum and scale differ in shape"),
    "integer scales": ({"scale": torch.ones(5, 2).long()}, "scale is Long"),
    "scales of one dimension": ({"scale": draw(5)}, "scale has 1 dimensions"),
    "scales not contiguous": ({"scale": draw(2, 5).T}, "scale is not contiguous"),
    "minima not contiguous": ({"minimum": draw(2, 5).T}, "minimum is not contiguous"),
    "signed codes": ({"codes": torch.zeros(5, 64, dtype=torch.int8)}, "codes is Char; it must be uint8"),
    "codes not contiguous": ({"codes": torch.zeros(64, 5, dtype=torch.uint8).T}, "codes is not contiguous"),
    "two bits": ({"bits": 2}, "bits is 2; it must be 8 or 4"),
    "activations of another width": ({"x": draw(2, 96)}, "x has rows of 96, the weights of 64"),
}


@pytest.mark.parametrize("change", CODED)
def test_bad_codes_raise(change: str) -> None:
    changes, message = CODED[change]
    operands = {
        "x": draw(2, 64), "codes": torch.zeros(5, 64, dtype=torch.uint8), "scale": torch.ones(5, 2), "minimum": None,
        "bits": 8,
    }  # fmt: skip
    operands |= changes
    with pytest.raises(RuntimeError, match=message):
        torch.ops.kvlab.code_linear(*operands.values())
    if "x" not in changes:
        with pytest.raises(RuntimeError, match=message):
            torch.ops.kvlab.code_unpack(*list(operands.values())[1:])


def test_weights_on_another_device_raise() -> None:
    with pytest.raises(RuntimeError, match="x is on cpu, the weights are on meta"):
        kernels.wide_linear(draw(2, 64), draw(5, 64).to("meta"))
    made = coded(5, 64, Grid(8, 32)).map(lambda tensor: tensor.to("meta"))
    with pytest.raises(RuntimeError, match="x is on cpu, the weights are on meta"):
        product(draw(2, 64), made)


def test_ready_says_what_the_kernels_take() -> None:
    assert kernels.enabled()
    assert kernels.ready(576, 64)
    assert not kernels.ready(48, 16)
    assert not kernels.ready(576, 36)


def test_a_process_without_the_library_says_so_and_runs(tmp_path: Path) -> None:
    code = (
        "import torch, kvlab, kvlab.kernels as k, kvlab.quantize as q; m = kvlab.load('tiny', weights='int4').model; "
        "print(k.built(), k.enable(), k.enabled(), torch.isfinite(m(torch.tensor([[1, 2, 3]]))).all().item())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env=os.environ | {"KVLAB_CACHE": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout.split() == ["False", "False", "False", "True"]
