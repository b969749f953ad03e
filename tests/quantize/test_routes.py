"""Which product for how many rows: what was measured, remembered, and taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.quantize import Routes, remember, routes, routes_for, routes_from
from kvlab.quantize.routes import RULE_OF_THUMB, key, known

CPU = torch.device("cpu")
NAMES = ["kernel", "packed", "dequantize", "torch"]


@settings(max_examples=200)
@given(st.data())
def test_the_best_product_is_taken_at_every_number_of_rows_that_was_measured(data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(1, 600), min_size=1, max_size=7, unique=True))
    names = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    seconds = {name: {count: data.draw(st.floats(1e-6, 1.0)) for count in rows} for name in names}
    found = routes_from(seconds)
    for count in rows:
        taken = found.choose(count, names)
        assert seconds[taken][count] == min(seconds[name][count] for name in names)
    limits = [limit for limit, _ in found.steps]
    assert limits[-1] is None
    assert limits[:-1] == sorted(limits[:-1])
    assert found.choose(10**6, names) == found.choose(max(rows), names)
    assert all(one[1] != two[1] for one, two in zip(found.steps, found.steps[1:], strict=False))


def test_between_two_measurements_the_upper_one_decides() -> None:
    found = routes_from({"few": {1: 1.0, 16: 1.0, 64: 9.0}, "many": {1: 5.0, 16: 5.0, 64: 5.0}})
    assert found.steps == ((16, "few"), (None, "many"))
    assert [found.choose(rows, ["few", "many"]) for rows in (1, 16, 17, 64)] == ["few", "few", "many", "many"]


def test_a_product_that_the_layer_does_not_have_is_never_taken() -> None:
    found = Routes(((8, "packed"), (64, "kernel"), (None, "dequantize")))
    assert found.choose(1, ["dequantize", "kernel"]) == "kernel"
    assert found.choose(1, ["dequantize"]) == "dequantize"
    assert found.choose(100, ["kernel", "packed"]) == "kernel"
    assert found.choose(1, {"torch": None}) == "torch"


@pytest.mark.parametrize(
    ("rows", "there", "taken"),
    [
        (1, ["dequantize", "packed", "kernel"], "kernel"),
        (1, ["dequantize", "packed"], "packed"),
        (512, ["dequantize", "packed", "kernel"], "dequantize"),
        (512, ["torch", "widened", "kernel"], "torch"),
        (1, ["torch", "widened"], "torch"),
    ],
)
def test_a_rule_of_thumb_until_something_was_measured(rows: int, there: list[str], taken: str) -> None:
    assert routes_for(CPU, "int8-g32", torch.float32) is RULE_OF_THUMB
    assert not known(CPU, "int8-g32", torch.float32)
    assert RULE_OF_THUMB.choose(rows, there) == taken


def test_what_is_remembered_is_known_by_device_format_and_dtype(private_cache: Path) -> None:
    mine, other = Routes(((4, "kernel"), (None, "dequantize"))), Routes(((None, "packed"),))
    assert routes_for(CPU, "int8-g32", torch.float32) is RULE_OF_THUMB  # and that is not remembered
    where = remember({key(CPU, "int8-g32", torch.float32): mine})
    assert where.is_relative_to(private_cache)
    assert routes_for(CPU, "int8-g32", torch.float32) == mine
    assert known(CPU, "int8-g32", torch.float32)
    assert not known(CPU, "int8-g32", torch.bfloat16)
    assert not known(CPU, "int8-g64", torch.float32)
    assert not known(torch.device("cuda"), "int8-g32", torch.float32)
    remember({key(CPU, "int4-g32", torch.bfloat16): other})
    assert routes_for(CPU, "int8-g32", torch.float32) == mine
    assert routes_for(CPU, "int4-g32", torch.bfloat16) == other
    assert [path.name for path in where.parent.iterdir()] == [where.name]


def test_another_number_of_threads_has_other_crossovers(monkeypatch: pytest.MonkeyPatch) -> None:
    remember({key(CPU, "int8-g32", torch.float32): Routes(((None, "dequantize"),))})
    monkeypatch.setattr(routes.torch, "get_num_threads", lambda: 99)
    routes_for.cache_clear()
    assert not known(CPU, "int8-g32", torch.float32)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"cpu/int8-g32/float32": 7}', '{"cpu/int8-g32/float32": [[1]]}']
)
def test_a_damaged_file_is_as_none_and_can_be_written_again(content: str) -> None:
    name = key(CPU, "int8-g32", torch.float32)
    where = remember({name: Routes(((None, "dequantize"),))})
    where.write_text(content)
    routes_for.cache_clear()
    assert routes_for(CPU, "int8-g32", torch.float32) is RULE_OF_THUMB
    remember({name: Routes(((None, "packed"),))})
    assert routes_for(CPU, "int8-g32", torch.float32) == Routes(((None, "packed"),))
