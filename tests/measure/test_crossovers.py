"""Crossovers between products: which are timed, on what, and what is made of the times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvlab.measure import crossovers as module
from kvlab.measure.crossovers import crossovers
from kvlab.model import GPT
from kvlab.quantize import Int4, Int8, linears, measured, quantize, remember, routes_for, row_aware

SHAPE: dict[str, object] = {
    "hidden_size": 64, "intermediate_size": 96, "n_head": 4, "n_kv_head": 2, "head_dim": 16, "tie_embeddings": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    routes_for.cache_clear()
    yield
    routes_for.cache_clear()


@pytest.fixture
def make(make_model: Callable[..., GPT]) -> Callable[[], GPT]:
    return lambda: quantize(make_model(torch.float32, **SHAPE), Int4(32), head=Int8())


def test_every_format_of_a_model_gets_routes_of_products_that_it_has(make: Callable[[], GPT]) -> None:
    model, told = make(), []
    found = crossovers(model, rows=(1, 4), tell=told.append)
    assert set(found) == {"cpu/int4-g32/float32", "cpu/int8-g64/float32"}
    assert len(told) == 2
    layers = {f"cpu/{layer.format}/float32": layer for _, layer in linears(model)}
    for name, routes in found.items():
        there = layers[name].products(torch.float32)
        assert {route for _, route in routes.steps} <= there.keys()
        assert routes.steps[-1][0] is None
        line = next(line for line in told if line.startswith(layers[name].format))
        assert all(product in line for product in there)


def test_the_fastest_product_wins_at_each_number_of_rows(
    make: Callable[[], GPT], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With times that are made up: one product is best for few rows, another for many."""
    ran: list[dict[str, int]] = []

    def timed(works: dict[str, Callable[[], None]], clock: object, repeats: int) -> dict[str, Any]:
        ran.append({name: work() or 1 for name, work in works.items()})
        rows = (1, 16, 256)[len(ran) % 3 - 1]
        medians = {name: (1.0 if rows > 16 else 9.0) if name == "dequantize" else 5.0 for name in works}
        return {name: SimpleNamespace(median=seconds) for name, seconds in medians.items()}

    monkeypatch.setattr(module, "interleave", timed)
    found = crossovers(make(), rows=(1, 16, 256))
    several = [routes for routes in found.values() if len(routes.steps) > 1]
    assert several
    for routes in several:
        assert [limit for limit, _ in routes.steps] == [16, None]
        assert routes.steps[-1][1] == "dequantize"
        assert routes.steps[0][1] != "dequantize"
    assert len(ran) == 3 * len(found)


def test_what_was_found_and_remembered_makes_a_model_measured(make: Callable[[], GPT]) -> None:
    model = make()
    assert not measured(model)
    remember(crossovers(model, rows=(1,)))
    assert measured(model)
    assert not measured(make().to(torch.bfloat16))


def test_a_model_without_row_aware_layers_has_no_crossovers(make_model: Callable[..., GPT]) -> None:
    plain = make_model(torch.float32, **SHAPE)
    assert crossovers(plain, rows=(1,)) == {}
    assert set(crossovers(row_aware(plain), rows=(1,))) == {"cpu/float32/float32"}
