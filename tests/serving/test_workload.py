"""Workloads: lengths as measured, arrivals at their rate, and blocks that are equal where their tokens are."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from statistics import correlation, fmean, pstdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.errors import ConfigError
from kvlab.resources import resource
from kvlab.serving.workload import Arrival, Lengths, Workload, arrivals, workload

TRACES = json.loads(resource("workloads.json").read_text("utf8"))
SMALL = Workload("small", Lengths.uniform(1, 9), Lengths.uniform(1, 9))


def drawn(found: Workload, requests: int = 20_000, rate: float = 5.0, seed: int = 0) -> list[Arrival]:
    return list(arrivals(found, rate=rate, requests=requests, seed=seed))


def gaps(found: Workload, requests: int, rate: float) -> list[float]:
    return [later.time - earlier.time for earlier, later in pairwise(drawn(found, requests, rate))]


# Lengths.


@pytest.mark.parametrize("name", ["azure-code", "azure-conv"])
@pytest.mark.parametrize("of", ["prompt_tokens", "output_tokens"])
def test_samples_have_the_quantiles_that_were_measured(name: str, of: str) -> None:
    """At each tabulated length, within four standard errors of the fraction that is tabulated."""
    lengths = [getattr(arrival, of) for arrival in drawn(workload(name))]
    for fraction, tokens in zip(TRACES["fractions"], TRACES[name][of], strict=True):
        error = 4 * math.sqrt(fraction * (1 - fraction) / len(lengths))
        below, up_to = (sum(test(n) for n in lengths) / len(lengths) for test in (tokens.__gt__, tokens.__ge__))
        assert below - error <= fraction <= up_to + error, (fraction, tokens)


def test_quantiles_are_those_of_the_table_exactly() -> None:
    found = workload("azure-code").outputs
    assert [found.at(fraction) for fraction in TRACES["fractions"]] == TRACES["azure-code"]["output_tokens"]
    assert found.at(0.85) == 42  # halfway from 29 at 0.8 to 55 at 0.9
    assert [found.at(f) for f in (0.8 - 1e-9, 0.8, 0.8 + 1e-9)] == [29, 29, 29]


def test_means_lie_near_the_recorded_ones() -> None:
    """Except for answers to code, whose last hundredth a straight line draws too long, as the docstring says."""
    off = {
        (name, of): getattr(workload(name), f"{of}s").mean / TRACES[name][f"{of}_mean"] - 1
        for name in ("azure-code", "azure-conv")
        for of in ("prompt", "output")
    }
    assert off.pop(("azure-code", "output")) == pytest.approx(0.274, abs=0.001)
    assert all(0 < excess < 0.035 for excess in off.values())


@pytest.mark.parametrize("name", ["azure-code", "azure-conv", "uniform:3-90/7-7", "fixed:5/6"])
def test_samples_have_the_mean_of_their_lengths(name: str) -> None:
    found, sampled = workload(name), drawn(workload(name))
    assert fmean(arrival.prompt_tokens for arrival in sampled) == pytest.approx(found.prompts.mean, rel=0.02)
    assert fmean(arrival.output_tokens for arrival in sampled) == pytest.approx(found.outputs.mean, rel=0.04)


def test_prompt_and_answer_are_drawn_independently() -> None:
    sampled = drawn(workload("azure-conv"))
    assert abs(correlation([a.prompt_tokens for a in sampled], [a.output_tokens for a in sampled])) < 0.03


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_a_range_has_both_ends_and_nothing_beyond(low: int, width: int) -> None:
    found = Lengths.uniform(low, low + width)
    assert (found.at(0), found.at(1)) == (low, low + width)
    assert found.mean == pytest.approx(low + width / 2)


def test_every_number_of_a_range_is_as_likely() -> None:
    seen = Counter(arrival.prompt_tokens for arrival in drawn(workload("uniform:3-6/1-1")))
    assert sorted(seen) == [3, 4, 5, 6]
    assert all(n == pytest.approx(5000, abs=250) for n in seen.values())


def test_the_source_and_the_licence_travel_with_the_figures() -> None:
    assert "Azure LLM inference trace 2023" in TRACES["source"]
    assert "Splitwise, ISCA 2024" in TRACES["source"]
    assert TRACES["licence"].startswith("CC-BY 4.0")


# Arrivals.


def test_poisson_arrivals_come_at_their_rate_and_without_memory() -> None:
    waits = gaps(SMALL, 40_000, rate=8.0)
    assert fmean(waits) == pytest.approx(1 / 8, rel=0.02)
    assert pstdev(waits) / fmean(waits) == pytest.approx(1, abs=0.02)
    for times in (0.5, 1, 2):
        assert sum(wait > times / 8 for wait in waits) / len(waits) == pytest.approx(math.exp(-times), abs=0.01)


@pytest.mark.parametrize("cv", [0.25, 2.0, 4.0])
def test_bursts_come_at_the_rate_with_the_variation_asked_for(cv: float) -> None:
    waits = gaps(replace(SMALL, gap_cv=cv), 60_000, rate=8.0)
    assert fmean(waits) == pytest.approx(1 / 8, rel=0.05)
    assert pstdev(waits) / fmean(waits) == pytest.approx(cv, rel=0.05)


NAMES = ["azure-code", "azure-conv", "fixed:10/5", "uniform:1-5/2-9", "shared-prefix", "multi-turn"]


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_makes_the_same_arrivals_again_in_order_of_time(name: str) -> None:
    found = workload(name)
    assert found.name == name
    first = drawn(found, 2000, seed=3)
    assert first == drawn(found, 2000, seed=3)
    assert first[:500] == drawn(found, 500, seed=3)
    assert first != drawn(found, 2000, seed=4)
    assert all(earlier.time <= later.time for earlier, later in pairwise(first))
    assert first[0].time >= 0
    assert len(first) == 2000


def test_arrivals_are_made_as_they_are_asked_for() -> None:
    endless = arrivals(workload("multi-turn"), rate=10.0, requests=10**15)
    assert isinstance(endless, Iterator)
    assert next(endless).time < next(endless).time
    assert drawn(SMALL, 0) == []


def test_requests_without_conversation_are_all_different() -> None:
    sessions = [arrival.session for arrival in drawn(SMALL, 1000)]
    assert len(set(sessions)) == 1000


# Conversations.


def test_a_prompt_has_the_whole_history() -> None:
    conversations = defaultdict(list)
    for arrival in drawn(workload("multi-turn"), 20_000):
        conversations[arrival.session].append(arrival)
    assert {len(turns) for turns in conversations.values()} == {1, 2, 3, 4, 5}
    assert Counter(len(turns) for turns in conversations.values()).most_common(1)[0][0] == 5
    for turns in conversations.values():
        for turn, following in pairwise(turns):
            assert 16 <= following.prompt_tokens - turn.prompt_tokens - turn.output_tokens <= 256
            assert 15 <= following.time - turn.time <= 45


def test_whoever_came_before_time_zero_brings_a_history() -> None:
    early = [arrival.prompt_tokens for arrival in drawn(workload("multi-turn"), 200, rate=100.0)]
    late = [arrival.prompt_tokens for arrival in drawn(workload("multi-turn"), 20_000, rate=100.0)[-2000:]]
    assert fmean(early) == pytest.approx(fmean(late), rel=0.15)


def test_the_rate_counts_turns_and_is_there_from_the_first_second() -> None:
    times = [arrival.time for arrival in drawn(workload("multi-turn"), 60_000, rate=1000.0)]
    assert all(sum(at <= t < at + 1 for t in times) == pytest.approx(1000, rel=0.15) for at in (0, 10, 20, 50))
    assert len(times) / times[-1] == pytest.approx(1000, rel=0.02)


# Shared prefixes.


def test_system_prompts_follow_zipf_or_come_equally_often() -> None:
    zipf = Counter(arrival.system for arrival in drawn(workload("shared-prefix")))
    harmonic = sum(1 / rank for rank in range(1, 9))
    for rank in range(1, 9):
        assert zipf[rank - 1] / 20_000 == pytest.approx(1 / rank / harmonic, rel=0.1)
    even = Counter(arrival.system for arrival in drawn(replace(workload("shared-prefix"), skew=0.0)))
    assert all(even[system] / 20_000 == pytest.approx(1 / 8, rel=0.1) for system in range(8))


def test_a_prompt_is_longer_than_its_system_prompt() -> None:
    for arrival in drawn(workload("shared-prefix"), 500):
        assert arrival.system_tokens == 1024
        assert 1024 + 32 <= arrival.prompt_tokens <= 1024 + 256


def text(arrival: Arrival) -> list[tuple[str, int, int]]:
    """Prompt and answer, token by token: a system prompt's own, then the conversation's own."""
    own = arrival.prompt_tokens + arrival.output_tokens - arrival.system_tokens
    system = [("system", arrival.system, position) for position in range(arrival.system_tokens)]
    return system + [("session", arrival.session, position) for position in range(own)]


@given(
    st.integers(1, 4),
    st.sampled_from([(0, 0), (1, 1), (1, 8), (2, 12), (3, 21)]),
    st.integers(1, 9),
    st.integers(0, 10**6),
)
def test_blocks_are_equal_where_their_tokens_are(
    turns: int, systems: tuple[int, int], block_size: int, seed: int
) -> None:
    """Brute force over every pair of full blocks of prompts and answers."""
    found = replace(SMALL, turns=turns, think_s=1.0, systems=systems[0], system_tokens=systems[1])
    keys, contents = [], []
    for arrival in drawn(found, 12, rate=3.0, seed=seed):
        tokens = text(arrival)
        for index in range(len(tokens) // block_size):
            keys.append(arrival.block_key(index, block_size))
            contents.append(tuple(tokens[index * block_size : (index + 1) * block_size]))
    alike: dict[Any, set[Any]] = defaultdict(set)
    for key, content in zip(keys, contents, strict=True):
        alike[key].add(content)
    assert all(len(found) == 1 for found in alike.values())
    assert len(alike) == len(set(contents))


def test_two_prompts_share_the_full_blocks_of_their_system_prompt() -> None:
    """100 tokens in blocks of 16: six blocks; the seventh has 4 tokens of it and 12 of each user's own."""
    one, other = (Arrival(0.0, 200, 10, session, 3, 100) for session in (1, 2))
    same = [one.block_key(index, 16) == other.block_key(index, 16) for index in range(12)]
    assert same == [True] * 6 + [False] * 6
    assert one.block_key(0, 16) != Arrival(0.0, 200, 10, 5, 4, 100).block_key(0, 16)


# Bad input.


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("azure-cod", "no workload is called 'azure-cod'; the nearest are azure-code"),
        ("fixd:5/6", "no workload is called 'fixd:5/6'; the nearest are fixed:PROMPT/OUTPUT"),
        ("azure-code:5", "no workload is called 'azure-code:5'"),
        ("fixed", "workload 'fixed': write fixed:PROMPT/OUTPUT"),
        ("fixed:5", "workload 'fixed:5': write fixed:PROMPT/OUTPUT"),
        ("fixed:5/-6", "workload 'fixed:5/-6': write"),
        ("fixed:0/6", "the shortest length is 0 tokens; it must be 1 or more"),
        ("uniform:5/6", "workload 'uniform:5/6': write uniform:LOW-HIGH/LOW-HIGH"),
        ("uniform:9-5/6-7", "lengths from 9 to 5"),
        ("uniform:0-5/6-7", "lengths from 0 to 5"),
    ],
)
def test_names_that_mean_nothing_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        workload(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gap_cv": 0.0}, "gap_cv is 0.0; it must be above 0"),
        ({"gap_cv": math.nan}, "gap_cv is nan"),
        ({"turns": 0}, "turns is 0; it must be 1 or more"),
        ({"systems": -1}, "systems is -1"),
        ({"systems": 2}, "2 system prompts of 0 tokens: give both"),
        ({"system_tokens": 9}, "0 system prompts of 9 tokens: give both"),
        ({"systems": 2, "system_tokens": -9}, "2 system prompts of -9 tokens"),
        ({"skew": -1.0}, "skew is -1.0 and think_s is 0.0; both must be 0 or more"),
        ({"think_s": math.inf}, "skew is 0.0 and think_s is inf"),
    ],
)
def test_impossible_workloads_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SMALL, **changes)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (((0, 1), (5, 4)), "fractions rise from 0 to 1, tokens never fall"),
        (((0, 0.5), (5, 6)), "fractions rise from 0 to 1"),
        (((0, 0.5, 0.5, 1), (5, 6, 7, 8)), "fractions rise from 0 to 1"),
        (((0, 1), (5, 6, 7)), "fractions rise from 0 to 1"),
        (((), ()), "fractions rise from 0 to 1"),
        (((0, 1), (0.4, 6)), "the shortest length is 0.4 tokens"),
    ],
)
def test_tables_that_are_no_distribution_are_refused(table: tuple[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Lengths(*table)


def test_impossible_numbers_of_requests_are_refused_at_once() -> None:
    """Before anything is asked of the iterator."""
    for rate in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="requests per second; it must be above 0"):
            arrivals(SMALL, rate=rate, requests=1)
    with pytest.raises(ConfigError, match="requests is -1; it must be 0 or more"):
        arrivals(SMALL, rate=1.0, requests=-1)
