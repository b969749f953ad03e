"""What is kept of a run: all of it, or a summary that says the same."""

from __future__ import annotations

import json
import math
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_cluster import HELD_S, RUNS, STEP_S, TOKEN_S, TRACES, asked, engine, serve

from kvlab.errors import MeasureError
from kvlab.serving import EventLog, Histogram, Lifetime, Served, Summary
from kvlab.timing import RequestTimes, goodput, pooled_itl


def known(values: Any) -> list[float]:
    return sorted(value for value in values if not math.isnan(value))


def ranked(values: list[float], percent: float) -> float:
    """The value itself that has so many per cent below it."""
    return sorted(values)[int(percent / 100 * (len(values) - 1))]


@settings(max_examples=300)
@given(trace=TRACES, run=RUNS)
def test_a_summary_says_what_the_whole_log_says(trace: list[tuple[float, int, int]], run: dict[str, Any]) -> None:
    log, summary = EventLog(), Summary()
    serve(trace, log, summary, **run)
    times = list(log.times().values())
    assert len(times) == len(trace)
    assert known(summary.ttft) == pytest.approx(sorted(each.ttft for each in times))
    assert known(summary.e2e) == pytest.approx(sorted(each.e2e for each in times))
    assert known(summary.tpot) == pytest.approx(sorted(each.tpot for each in times if each.tpot is not None))
    gaps = pooled_itl(times)
    assert summary.itl.total == len(gaps)
    assert summary.itl.sum == pytest.approx(sum(gaps))
    for percent in (0, 50, 90, 99, 100):
        if gaps:
            assert summary.itl.percentile(percent) == pytest.approx(ranked(gaps, percent), rel=0.0051)
    assert summary.tokens_in == sum(prompt for _, prompt, _ in trace)
    assert summary.tokens_out == sum(output for _, _, output in trace) == sum(len(each.tokens) for each in times)
    assert summary.preemptions == sum(event.kind == "preempted" for event in log.events)
    assert summary.finished == {"length": len(trace)}
    assert summary.steps == sum(record.repeats for record in log.steps)
    assert summary.start == trace[0][0]
    assert summary.end == log.steps[-1].end
    report = summary.report(ttft=0.1, tpot=0.02)
    assert report["goodput_per_s"] == pytest.approx(goodput(times, summary.seconds, ttft=0.1, tpot=0.02))
    busy = [(record.end - record.start, record) for record in log.steps]
    held = sum(took * record.kv_usage for took, record in busy) / sum(took for took, _ in busy)
    assert report["kv_usage"] == {
        "mean": pytest.approx(held), "peak": max(record.kv_usage for record in log.steps)
    }  # fmt: skip
    ran = sum(took * len(record.fed) for took, record in busy) / sum(took for took, _ in busy)
    assert report["running_mean"] == pytest.approx(ran)


@settings(max_examples=150)
@given(trace=TRACES, run=RUNS)
def test_equal_steps_taken_in_one_give_the_figures_of_single_steps(
    trace: list[tuple[float, int, int]], run: dict[str, Any]
) -> None:
    found = list[Summary]()
    for repeats in (True, False):
        found.append(Summary())
        serve(trace, found[-1], **run | {"repeats": repeats})
    together, apart = found
    # Somebody who arrives during a step waits for its end, and half a token of the mean length may be rounded.
    for name in ("ttft", "tpot", "e2e"):
        assert known(getattr(together, name)) == pytest.approx(known(getattr(apart, name)), rel=1e-3, abs=1e-4)
    assert together.itl.sum == pytest.approx(apart.itl.sum, rel=1e-3)
    for name in ("steps", "tokens_in", "tokens_out", "tokens_fed", "preemptions"):
        assert getattr(together, name) == getattr(apart, name), name


def test_times_by_hand() -> None:
    """Five prompt tokens and three answers: 15 ms to the first, then 11 ms and a microsecond for each token held."""
    log = EventLog()
    serve([(2.0, 5, 3)], log)
    (times,) = log.times().values()
    first = 2 + STEP_S + 5 * TOKEN_S
    second = first + STEP_S + TOKEN_S + 5 * HELD_S
    assert times.sent == 2
    assert times.tokens == pytest.approx([first, second, second + STEP_S + TOKEN_S + 6 * HELD_S])
    assert [event.kind for event in log.events] == ["queued", "scheduled", "first_token", "finished"]


@given(sent=st.floats(0, 9), gaps=st.lists(st.floats(0.001, 9), min_size=1, max_size=9))
def test_a_lifetime_has_the_figures_of_all_times(sent: float, gaps: list[float]) -> None:
    times = list(accumulate(gaps, initial=sent))[1:]
    whole = RequestTimes(sent, times)
    brief = Lifetime(7, sent, sent, times[0], times[-1], len(times))
    assert (brief.ttft, brief.tpot, brief.e2e) == (whole.ttft, whole.tpot, whole.e2e)


def test_a_lifetime_that_has_not_begun_has_no_figures() -> None:
    life = Lifetime(7, 1.0)
    assert (life.ttft, life.tpot, life.e2e) == (None, None, None)
    assert (RequestTimes(1.0).ttft, RequestTimes(1.0).tpot, RequestTimes(1.0).e2e) == (None, None, None)


@given(st.lists(st.floats(1e-9, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_a_histogram_has_every_percentile_within_half_a_per_cent(values: list[float], percent: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    assert histogram.total == len(values)
    assert histogram.percentile(percent) == pytest.approx(ranked(values, percent), rel=0.0051)
    assert histogram.sum == pytest.approx(math.fsum(values))


@given(
    st.lists(st.tuples(st.floats(1e-9, 1e3), st.integers(1, 9)), max_size=20),
    st.lists(st.tuples(st.floats(1e-9, 1e3), st.integers(1, 9)), max_size=20),
)
def test_merged_histograms_are_one(mine: list[tuple[float, int]], theirs: list[tuple[float, int]]) -> None:
    one, other, both = Histogram(), Histogram(), Histogram()
    for histogram, pairs in ((one, mine), (other, theirs), (both, mine + theirs)):
        for value, times in pairs:
            histogram.add(value, times)
    kept = other.total
    one.merge(other)
    assert one.counts == both.counts
    assert one.sum == pytest.approx(both.sum)
    assert other.total == kept


def test_a_gap_of_no_time_is_counted() -> None:
    histogram = Histogram()
    histogram.add(0.0, 3)
    assert histogram.total == 3
    assert histogram.percentile(50) == pytest.approx(1e-9, rel=0.01)


@pytest.mark.parametrize("percent", [-1, 101, math.nan])
def test_percentiles_outside_their_range_are_refused(percent: float) -> None:
    histogram = Histogram()
    histogram.add(1.0)
    with pytest.raises(MeasureError, match="give 0 to 100"):
        histogram.percentile(percent)


def test_a_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(MeasureError, match="of 0 durations"):
        Histogram().percentile(50)


@settings(max_examples=50)
@given(mine=TRACES, theirs=TRACES, run=RUNS)
def test_merged_summaries_are_those_of_both(
    mine: list[tuple[float, int, int]], theirs: list[tuple[float, int, int]], run: dict[str, Any]
) -> None:
    logs, summaries = (EventLog(), EventLog()), (Summary(), Summary())
    for trace, log, summary in zip((mine, theirs), logs, summaries, strict=True):
        serve(trace, log, summary, **run)
    total = Summary()
    for summary in summaries:
        total.merge(summary)
    times = [each for log in logs for each in log.times().values()]
    assert known(total.ttft) == pytest.approx(sorted(each.ttft for each in times))
    assert known(total.e2e) == pytest.approx(sorted(each.e2e for each in times))
    assert len(total.tpot) == len(times)
    assert total.itl.sum == pytest.approx(sum(pooled_itl(times)))
    assert total.seconds == pytest.approx(max(log.steps[-1].end for log in logs) - min(each.sent for each in times))
    for name in ("tokens_in", "tokens_out", "tokens_fed", "steps", "preemptions"):
        assert getattr(total, name) == sum(getattr(summary, name) for summary in summaries), name
    assert total.kv_peak == max(summary.kv_peak for summary in summaries)
    assert total.report()["running_mean"] == pytest.approx(
        sum(summary._running_seconds for summary in summaries) / sum(summary._busy_s for summary in summaries)
    )


def test_an_answer_that_was_cut_off_counts_its_tokens_and_no_latency() -> None:
    summary = Summary()
    made = engine(summary)
    for number in range(3):
        made.add_request(asked(number, 0, 4, 9))
    for _ in range(3):
        made.step(until=made.clock.now() + 1e-9)
    made.abort(1)
    for _ in made.run():
        pass
    assert summary.finished == {"length": 2, "abort": 1}
    assert len(summary.ttft) == len(summary.served()) == 2
    assert summary.tokens_in == 3 * 4
    assert summary.tokens_out == 2 * 9 + 3
    report = summary.report()
    assert report["goodput_per_s"] == pytest.approx(2 / summary.seconds)


def test_one_aborted_before_its_first_token_leaves_no_figure() -> None:
    summary = Summary()
    made = engine(summary)
    made.add_request(asked(0, 0, 4, 9))
    made.abort(0)
    assert summary.finished == {"abort": 1}
    assert (summary.tokens_in, summary.tokens_out, len(summary.ttft)) == (0, 0, 0)


def test_refusals_are_counted_by_their_reason_with_an_example() -> None:
    summary, other = Summary(), Summary()
    scheduler = engine(blocks=10, block_size=4, max_len=50).scheduler
    for prompt, output in ((48, 9), (47, 8), (30, 20)):
        summary.refuse(scheduler.refusal(asked(0, 0, prompt, output)) or "")
    other.refuse("48 prompt tokens and up to 9 new ones are more than max_len 50; shorten the prompt or ask for fewer")
    summary.merge(other)
    report = summary.report()
    assert report["refused"] == report["requests"] == 4
    assert list(report["refusals"].values()) == [3, 1]
    assert [text.partition(";")[0] for text in report["refusals"]] == [
        "48 prompt tokens and up to 9 new ones are more than max_len 50",
        "its cache may come to 49 tokens, 13 blocks of 4, and the pool has 10",
    ]


def test_a_report_of_nothing_has_no_latencies_and_is_still_json() -> None:
    report = Summary().report(ttft=1.0)
    assert report["ttft_s"] is report["itl_s"] is report["tpot_s"] is report["e2e_s"] is None
    assert report["requests_per_s"] == report["goodput_per_s"] == report["seconds"] == 0
    json.dumps(report, allow_nan=False)


def test_a_report_of_something_is_json_and_its_figures_are_ordered() -> None:
    summary = Summary()
    serve([(number / 20, 10 + number % 7, 1 + number % 5) for number in range(50)], summary)
    report = json.loads(json.dumps(summary.report(ttft=0.1), allow_nan=False))
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        values = [report[name][each] for each in ("p50", "p90", "p95", "p99", "max")]
        assert all(low <= high for low, high in pairwise(values)), name
    assert report["ttft_s"]["mean"] == pytest.approx(fmean(summary.ttft))
    assert report["output_tokens_per_s"] == pytest.approx(summary.tokens_out / summary.seconds)
    assert report["prompt_tokens_per_s"] == pytest.approx(summary.tokens_in / summary.seconds)


def test_a_single_token_has_no_tpot_to_break() -> None:
    summary = Summary()
    serve([(0.0, 4, 1)], summary)
    assert summary.served() == [Served(pytest.approx(STEP_S + 4 * TOKEN_S), None)]
    assert summary.report(tpot=1e-9)["goodput_per_s"] == pytest.approx(1 / summary.seconds)
