"""The labs: each fault makes its symptom, is named first by the diagnosis, and is gone with the remedy."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import pytest

from kvlab.cost import Row, StepTimes
from kvlab.errors import ConfigError
from kvlab.operate.causes import CAUSES
from kvlab.operate.diagnose import NOTHING_IS_WRONG
from kvlab.operate.labs import LABS, Outcome, Scene, lab, observe, run_lab
from kvlab.operate.schedule import Load
from kvlab.serving import Replica

#: What shows each symptom, and how many times better it is with the remedy, at least.
CURES: dict[str, dict[str, float]] = {
    "queue": {"ttft_s.p50": 20, "ttft_s.p99": 20},
    "long-prompt": {"ttft_s.p50": 8, "e2e_s.p50": 1.3},
    "burst": {"ttft_s.p50": 2},
    "stutter": {"pause_s": 4, "itl_s.p99": 4},
    "large-batch": {"tpot_s.p50": 1.7},
    "small-pool": {"itl_s.max": 10, "ttft_s.p99": 5},
    "past-the-context": {},
    "cold-start": {"ttft_s.max": 100},
    "proxy": {"ttft_s.p50": 10, "pause_s": 10},
    "slow-client": {"tpot_s.p50": 2, "e2e_s.p50": 2},
    "busy-client": {"ttft_s.p50": 10},
    "leaking-cache": {"ttft_s.p99": 20, "itl_s.max": 10},
    "slow-host": {"tpot_s.p50": 6, "ttft_s.p50": 6},
}

#: What must be the same within a fifth: the complaint is not about it, or the remedy leaves it alone.
UNTOUCHED: dict[str, Sequence[str]] = {
    "queue": ["tpot_s.p50"],
    "long-prompt": ["tpot_s.p50"],
    "stutter": ["ttft_s.p50"],
    "cold-start": ["ttft_s.p50"],
    "slow-client": ["ttft_s.p50"],
}

#: Readings that are nothing with the remedy, and were much before; or the other way round.
GONE = {"burst": "failed", "past-the-context": "failed", "small-pool": "preemptions", "leaking-cache": "preemptions"}
BACK = {"large-batch": "goodput_per_s"}

names = pytest.mark.parametrize("name", [each.name for each in LABS])


@cache
def outcome(name: str) -> Outcome:
    return run_lab(lab(name))


@names
def test_the_first_cause_is_the_right_one_and_after_the_cure_nothing_is_wrong(name: str) -> None:
    found = outcome(name)
    assert found.before.diagnosis.first == found.lab.cause
    assert found.before.diagnosis.causes[0].evidence
    assert found.after.diagnosis.causes == ()
    assert found.after.diagnosis.verdict == NOTHING_IS_WRONG


@names
def test_the_symptom_is_plain_and_the_remedy_cures_it(name: str) -> None:
    readings = outcome(name).readings()
    for reading, times in CURES[name].items():
        before, after = readings[reading]
        assert before >= times * after > 0, reading
    for reading in UNTOUCHED.get(name, ()):
        before, after = readings[reading]
        assert before == pytest.approx(after, rel=0.2), reading
    assert name not in GONE or readings[GONE[name]][0] >= 5
    assert name not in GONE or readings[GONE[name]][1] == 0
    assert name not in BACK or (readings[BACK[name]][0] < 0.1 * readings[BACK[name]][1])


@names
def test_with_the_remedy_everybody_is_served(name: str) -> None:
    report = outcome(name).after.result.report()
    assert report["completed"] == report["requests"]


@names
def test_a_lab_says_what_it_is_about(name: str) -> None:
    of = lab(name)
    assert of.cause in {each.id for each in CAUSES}
    assert of.symptom.endswith(".")
    assert of.question.endswith("?")
    assert of.shows
    assert of.before != of.after
    assert len([each for each in LABS if each.name == name]) == 1


def test_every_fault_that_is_promised_has_its_lab() -> None:
    assert {each.cause for each in LABS} >= {
        "queueing", "long-prefill", "admission-limit", "decode-batch-growth", "preemption", "context-overflow",
        "cold-start", "buffering-proxy", "slow-client", "prefix-cache-leak",
    }  # fmt: skip
    assert set(CURES) == {each.name for each in LABS}


def test_labs_are_the_same_every_time() -> None:
    again = observe(lab("busy-client").before)
    assert again.result.report() == outcome("busy-client").before.result.report()
    assert again.diagnosis == outcome("busy-client").before.diagnosis


def test_a_scene_can_be_played_where_an_event_loop_runs() -> None:
    """As in a notebook."""
    scene = Scene(
        server=Replica(model="llama-3-8b", hardware="h100-sxm"),
        load=Load(workload="fixed:64/8", requests=3, rate=1, warmup=0),
    )

    async def cell() -> float:
        return observe(scene).reading("completed")

    assert asyncio.run(cell()) == 3


def test_a_long_prompt_takes_what_the_cost_model_says() -> None:
    """7,000 tokens in steps of 2,048: the first token comes when the fourth is over."""
    times = StepTimes("llama-3-8b", "h100-sxm")
    starts = [0, 2048, 4096, 6144, 7000]
    steps = [Row(end - start, start, int(end == 7000)) for start, end in pairwise(starts)]
    alone = sum(times.seconds(0, 0, [row]) for row in steps)
    first = outcome("long-prompt").before.result.records[0]
    assert first.ttft == pytest.approx(alone, rel=1e-9)


def test_answers_past_the_context_are_cut_or_refused_by_the_length_of_their_prompts() -> None:
    for record in outcome("past-the-context").before.result.records:
        room = 8192 - record.asked_prompt_tokens
        if room < 1:
            assert record.error is not None
            assert record.error.kind == "http-400"
        else:
            assert record.output_tokens == min(room, 256)
            assert record.finish_reason == "length"


def test_a_leak_costs_the_prefixes_first() -> None:
    before, after = outcome("leaking-cache").before, outcome("leaking-cache").after
    assert before.reading("hit_rate") < 0.8 * after.reading("hit_rate")


def test_a_lab_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match="no lab is called 'leak'; the nearest are leaking-cache"):
        lab("leak")


def test_a_figure_that_does_not_exist_reads_as_nothing() -> None:
    """Of a run in which nobody got two tokens, there is no gap."""
    scene = Scene(
        server=Replica(model="llama-3-8b", hardware="h100-sxm"),
        load=Load(workload="fixed:64/1", requests=2, rate=1, warmup=0),
    )
    seen = observe(scene)
    assert seen.reading("tpot_s.p50") == seen.reading("pause_s") == 0
    assert seen.reading("ttft_s.p50") > 0
