"""Decode steps compiled ahead of time: the logits of the plain step, for any length, and clear refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlab.errors import DeviceError
from kvlab.generation import CompiledDecode, compile_step, package
from kvlab.model import GPT
from kvlab.quantize import Int4, Int8, Routes, quantize, remember, routes_for, row_aware
from kvlab.quantize.routes import key

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def found(compiled_kernels: Path) -> dict[str, Any]:
    """Two steps of one layer, compiled in a process of its own: one wide row, and three rows over four-bit codes."""
    script = Path(__file__).with_name("steps_ahead.py")
    environment = os.environ | {"KVLAB_CACHE": str(compiled_kernels), "PYTHONPATH": str(script.parents[1])}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("walk", ["one row", "short cache", "long cache", "ragged rows", "even rows", "twin", "blocks"])
def test_every_step_equals_the_plain_one_across_buckets(found: dict[str, Any], walk: str) -> None:
    """Logits, keys and values, and how far each row has come; over wide weights and over codes."""
    assert found["kernels"]
    case = found[walk]
    assert case["seen"] == case["plain"]
    assert case["size"] > 1
    assert case["off"] < 2e-4 * case["size"]
    assert case["stored"] < 1e-4


def test_a_package_holds_no_weights(found: dict[str, Any]) -> None:
    """Two models of one shape use one package side by side, each with its own weights."""
    assert found["after the twin"]["off"] < 2e-4 * found["after the twin"]["size"]


def test_answers_are_those_of_plain_decode(found: dict[str, Any]) -> None:
    assert found["answers"]


def test_an_engine_answers_the_same_by_a_compiled_step(found: dict[str, Any]) -> None:
    assert found["served"]


def test_a_step_is_compiled_once(found: dict[str, Any]) -> None:
    assert found["again"]


def test_a_full_cache_is_refused_and_nothing_changes(found: dict[str, Any]) -> None:
    assert found["full"].startswith("CacheFull: all 6 slots are taken")
    assert found["full changed nothing"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("missing", "DeviceError: no step of 1 row(s) is compiled for small; run: kvlab compile"),
        ("batch", "ConfigError: the step was compiled for 1 row(s), the cache has 2"),
        ("dtype", "ConfigError: the step was compiled for small in float32, the cache is for small in bfloat16"),
        ("shape", "ConfigError: the step was compiled for small in float32, the cache is for another shape"),
        ("context", "PromptError: 301 tokens are more than the context of small, 300"),
        ("no blocks", "DeviceError: no step of 3 request(s) over blocks of 4 tokens is compiled for small; run: kvlab"),
        ("long span", "ConfigError: the step feeds one token of up to 3 requests, not [2]"),
        ("kind", "ConfigError: a compiled step works on a contiguous cache, not on a QuantizedCache"),
    ],
)
def test_what_the_step_was_not_made_for_is_refused(found: dict[str, Any], what: str, message: str) -> None:
    assert found[what].startswith(message)


@pytest.fixture
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    routes_for.cache_clear()
    yield tmp_path
    routes_for.cache_clear()


def test_a_package_is_for_a_shape_formats_and_rows_and_for_any_weights(
    private_cache: Path, make_model: Callable[..., GPT]
) -> None:
    def of(model: GPT, rows: int = 1) -> Path:
        return package(model, rows)

    wide = {"dtype": torch.float32, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "n_head": 4}
    plain = of(row_aware(make_model(**wide)))
    assert plain == of(row_aware(make_model(**wide, seed=7)))
    assert plain == of(row_aware(make_model(**wide, name="small")))
    assert plain.is_relative_to(private_cache)
    others = [
        of(row_aware(make_model(**wide)), rows=2),
        of(make_model(**wide)),  # layers that take no routes
        of(row_aware(make_model(**wide | {"dtype": torch.bfloat16}))),
        of(row_aware(make_model(**wide, n_layer=1))),
        of(row_aware(make_model(**wide, windows=(8, None)))),
        of(row_aware(make_model(**wide, rope_theta=500.0))),
        of(row_aware(make_model(**wide, tie_embeddings=True))),
        of(quantize(make_model(**wide), Int8())),
        of(quantize(make_model(**wide), Int4(32))),
        of(quantize(make_model(**wide), Int4(32), head=None)),
        of(quantize(make_model(**wide), Int4(32, symmetric=True))),
    ]
    assert len({plain, *others}) == 1 + len(others)


def test_other_crossovers_are_another_package(
    compiled_kernels: Path, private_cache: Path, make_model: Callable[..., GPT]
) -> None:
    def found() -> Path:
        return package(row_aware(make_model(torch.float32, hidden_size=64, intermediate_size=96, head_dim=32)), 1)

    before = found()
    remember({key(CPU, "float32", torch.float32): Routes(((None, "torch"),))})
    assert found() != before


def test_a_model_elsewhere_is_refused(private_cache: Path, make_model: Callable[..., GPT]) -> None:
    with pytest.raises(DeviceError, match="the model is on meta; packages are for a CPU"):
        compile_step(row_aware(make_model(torch.float32)).to("meta"))


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    private_cache: Path, make_model: Callable[..., GPT], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any, **named: Any) -> None:
        raise RuntimeError("no C++ compiler\nwas found")

    monkeypatch.setattr(torch.export, "export", broken)
    model = row_aware(make_model(torch.float32))
    with pytest.raises(DeviceError, match=r"the step of small cannot be compiled here: no C\+\+ compiler was found"):
        compile_step(model)
    assert list((private_cache / "steps").iterdir()) == []
    with pytest.raises(DeviceError, match="run: kvlab compile"):
        CompiledDecode(model, 1)
