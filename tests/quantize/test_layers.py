"""Every product of a layer is the product with what its codes stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from kvlab.errors import DeviceError
from kvlab.packing import Grid, Quantized, quantize
from kvlab.quantize import LowBitEmbedding, LowBitLinear, Routes, WideLinear, layers
from kvlab.quantize.packed import PackedInt4, PackedInt8, layout_here

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Outputs are rounded to the dtype; torch's packed operators also round the scales to it.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
GRIDS = [Grid(8), Grid(8, 32), Grid(4, 32), Grid(4, 32, symmetric=False), Grid(4, 64, symmetric=False), Grid(2, 16)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def coded(grid: Grid, outputs: int = 48, columns: int = 128) -> Quantized:
    return quantize(draw(outputs, columns), grid, scale_dtype=torch.float16)


def off(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=str)
def test_every_product_over_codes_is_the_same_product(compiled_kernels: Path, grid: Grid, dtype: torch.dtype) -> None:
    layer = LowBitLinear(coded(grid))
    ways = layer.products(dtype)
    assert "dequantize" in ways
    assert ("kernel" in ways) == (grid.bits > 2 and dtype != torch.float64)
    for rows in (1, 3, 17, 65):
        x = draw(rows, 128, seed=rows).to(dtype)
        want = x.double() @ layer.quantized.dequantize(torch.float64).T
        for name, product in ways.items():
            got = product(x)
            assert got.dtype == dtype
            assert off(got, want) < TOLERANCE[dtype], (name, rows)


@pytest.mark.parametrize("weights", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_product_over_wide_weights_is_the_same_product(
    compiled_kernels: Path, weights: torch.dtype, dtype: torch.dtype
) -> None:
    layer = WideLinear(nn.Linear(64, 40, bias=False, dtype=weights).requires_grad_(False))
    ways = layer.products(dtype)
    assert {"torch", "kernel"} <= ways.keys()
    assert ("widened" in ways) == (weights != torch.float32)
    for rows in (1, 5, 33):
        x = draw(rows, 64, seed=rows).to(dtype)
        want = x.double() @ layer.weight.double().T
        for name, product in ways.items():
            assert product(x).dtype == dtype
            assert off(product(x), want) < TOLERANCE[dtype] + (weights != dtype) * TOLERANCE[weights], name


def test_without_the_compiled_kernels_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "ready", lambda width, group: False)
    layer = LowBitLinear(coded(Grid(8)), bias=draw(48))
    assert set(layer.products(torch.float32)) == {"dequantize", "packed"}
    x = draw(2, 3, 128)
    want = x.double() @ layer.quantized.dequantize(torch.float64).T + layer.bias.double()
    got = layer(x)
    assert got.shape == (2, 3, 48)
    assert off(got, want) < 1e-5


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("shape", [(128,), (1, 1, 128), (2, 5, 128), (0, 128)])
def test_a_layer_takes_any_number_of_rows_and_adds_its_bias(grid: Grid, shape: tuple[int, ...]) -> None:
    layer = LowBitLinear(coded(grid), bias=draw(48, seed=4))
    x = draw(*shape)
    got = layer(x)
    assert got.shape == (*shape[:-1], 48)
    if x.numel():
        want = x.double() @ layer.quantized.dequantize(torch.float64).T + layer.bias.double()
        assert off(got, want) < 1e-5


@pytest.mark.parametrize(
    ("kind", "grid", "dtype"), [(PackedInt8, Grid(8), torch.float32), (PackedInt4, Grid(4, 32), torch.bfloat16)]
)
def test_weights_packed_for_one_device_are_refused_on_another(
    kind: type[PackedInt8 | PackedInt4], grid: Grid, dtype: torch.dtype
) -> None:
    """gpt-fast 159: int4 weights packed for a GPU gave nonsense on a CPU, silently."""
    packed = kind.pack(coded(grid), dtype)
    x = draw(2, 128).to(dtype)
    assert packed.layout == layout_here()
    assert torch.isfinite(packed.linear(x)).all()
    for layout in ("cuda", "cpu-x86_64-AVX9"):
        with pytest.raises(DeviceError, match=f"packed for {layout}, the activations are on {layout_here()}"):
            replace(packed, layout=layout).linear(x)
    with pytest.raises(DeviceError, match="the activations are on meta; pack the codes again there"):
        packed.linear(x.to("meta"))


def test_other_codes_are_packed_anew() -> None:
    layer = LowBitLinear(coded(Grid(8)))
    other = LowBitLinear(quantize(draw(48, 128, seed=9), Grid(8), scale_dtype=torch.float16))
    x = draw(3, 128)
    layer.products(x.dtype)["packed"](x)
    layer.load_state_dict(other.state_dict())
    want = x.double() @ other.quantized.dequantize(torch.float64).T
    assert off(layer.products(x.dtype)["packed"](x), want) < TOLERANCE[x.dtype]


def test_what_the_packed_operators_do_not_take_they_are_not_given() -> None:
    assert not PackedInt8.takes(coded(Grid(8, 32)), torch.float32)
    assert not PackedInt8.takes(coded(Grid(8, symmetric=False)), torch.float32)
    assert not PackedInt4.takes(coded(Grid(4, 16)), torch.bfloat16)
    assert not PackedInt4.takes(coded(Grid(4, 32), outputs=40), torch.bfloat16)
    assert not PackedInt4.takes(coded(Grid(8)), torch.bfloat16)
    assert not PackedInt4.takes(coded(Grid(4, 32)), torch.float32)


def test_a_packed_layout_is_made_again_for_another_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LowBitLinear(coded(Grid(8)))
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        x = draw(2, 128).to(dtype)
        got = layer.products(dtype)["packed"](x)
        assert got.dtype == dtype
        assert off(got, x.double() @ layer.quantized.dequantize(torch.float64).T) < TOLERANCE[dtype]


@pytest.mark.parametrize("make", [lambda: LowBitLinear(coded(Grid(8))), lambda: WideLinear(nn.Linear(128, 48))])
def test_the_route_is_that_of_the_rows(
    make: Callable[[], LowBitLinear | WideLinear], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of all sequences together: a batch of one token each is as many rows."""
    layer, taken = make(), []
    names = list(layer.products(torch.float32))[:2]
    steps = Routes(((4, names[0]), (None, names[-1])))
    monkeypatch.setattr(layers, "routes_for", lambda device, format, dtype: steps)
    plain = type(layer).products

    def spied(self: LowBitLinear | WideLinear, dtype: torch.dtype) -> dict[str, Callable[[Tensor], Tensor]]:
        def spy(name: str, product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda x: (taken.append((name, len(x))), product(x))[1]

        return {name: spy(name, product) for name, product in plain(self, dtype).items()}

    monkeypatch.setattr(type(layer), "products", spied)
    with torch.no_grad():
        for shape in ((1, 1, 128), (4, 1, 128), (5, 1, 128), (2, 3, 128), (1, 4, 128)):
            layer(torch.zeros(shape))
    assert taken == [(names[0], 1), (names[0], 4), (names[-1], 5), (names[-1], 6), (names[0], 4)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_embedding_of_codes_looks_up_rows(grid: Grid, dtype: torch.dtype) -> None:
    table = LowBitLinear(coded(grid))
    got = LowBitEmbedding(table, dtype)(torch.tensor([[3, 47], [0, 3]]))
    assert torch.equal(got, table.quantized.dequantize(dtype)[[3, 47, 0, 3]].view(2, 2, 128))
