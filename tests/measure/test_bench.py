"""A case is warmed up, repeated, and set beside its prediction."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvlab.cost import Hardware, kv_bytes, predict
from kvlab.errors import MeasureError, PromptError
from kvlab.measure import Bench, Case, bench, report
from kvlab.model import GPT
from kvlab.timing import Clock
from toys import random_gpt, small_config

CARD = Hardware("card", "Card", "test", 2**30, 1e9, {"float32": 1e12}, "none")


def seconds_each(*ticks: float) -> Clock:
    """A clock that moves on by these ticks, one a reading, over and over."""
    moments = itertools.accumulate(itertools.cycle(ticks))
    return Clock(read=lambda: next(moments))


@pytest.fixture
def model() -> GPT:
    return random_gpt(small_config(), torch.float32)


def test_ttft_and_tpot_come_from_the_clock(model: GPT) -> None:
    """Readings: the start, the first token, and one for each of the three others."""
    found = bench(model, Case(8, 4, 2), repeats=2, clock=seconds_each(100.0, 2.0, 0.5, 0.5, 0.5))
    assert found.ttft.seconds == (2.0, 2.0)
    assert found.tpot.seconds == (0.5, 0.5)


def test_the_first_call_is_not_counted(model: GPT) -> None:
    """vllm-ascend 7193: compiling and allocating happen on first use; a benchmark drops it."""
    slow_first = itertools.accumulate([0.0, 90.0, 1.0, *[0.0, 3.0, 1.0] * 9])
    found = bench(model, Case(8, 2), repeats=2, clock=Clock(read=lambda: next(slow_first)))
    assert found.ttft.seconds == (3.0, 3.0)


def test_the_cache_holds_what_the_formula_says(model: GPT) -> None:
    found = bench(model, Case(8, 5, 3), repeats=1)
    assert found.kv_bytes == 3 * kv_bytes(model.config, 8 + 5 - 1, "float32")


def test_the_same_case_has_the_same_prompts(model: GPT) -> None:
    assert Bench(model, Case(8, 2, 2))._prompts == Bench(model, Case(8, 2, 2))._prompts


def test_the_report_has_every_field_and_its_figures_agree(model: GPT) -> None:
    found = report(model, "toy", bench(model, Case(8, 4, 2), clock=seconds_each(9.0, 2.0, 0.5, 0.5, 0.5)), CARD)
    for name in (
        "prefill_tok_s", "decode_tok_s", "ttft_s", "tpot_s", "predicted_ttft_s", "predicted_tpot_s", "weight_bytes",
        "kv_bytes", "mbu", "mfu", "device", "dtype", "versions", "commit", "command", "machine",
    ):  # fmt: skip
        assert name in found
    assert found["prefill_tok_s"] == 2 * 8 / 2.0
    assert found["decode_tok_s"] == 2 / 0.5
    foreseen = predict(model.config, CARD, prompt_tokens=8, new_tokens=4, batch=2, dtype="float32")
    assert (found["predicted_ttft_s"], found["predicted_tpot_s"]) == (foreseen.ttft, foreseen.tpot)
    assert found["weight_bytes"] == sum(p.numel() * 4 for p in model.parameters())
    assert found["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("numbers", [(0, 4, 1), (8, 1, 1), (8, 4, 0)])
def test_impossible_cases_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(MeasureError, match="a case has 1 prompt token, 2 new tokens"):
        Case(*numbers)


def test_a_case_beyond_the_context_and_no_repeats_are_refused(model: GPT) -> None:
    with pytest.raises(PromptError):
        bench(model, Case(100, 4))
    with pytest.raises(MeasureError, match="repeats is 0"):
        bench(model, Case(8, 4), repeats=0)
