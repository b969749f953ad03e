"""The diagnosis: every captured state, and every cause on other hardware, is named right as the first one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_pages import State, captured, loadtest, of_bench, of_run, page_of_delta, request

from kvlab.errors import ConfigError, MeasureError
from kvlab.operate.causes import CAUSES
from kvlab.operate.client import facts_of_loadtest
from kvlab.operate.diagnose import NOTHING_IS_WRONG, Diagnosis, diagnose
from kvlab.operate.facts import facts, together, with_hardware
from kvlab.operate.prometheus import read_page
from kvlab.serving import Metrics, Replica, SimulatedRequest, arrivals, workload

CHAPTERS = Path(__file__).parents[2] / "chapters"


def seen(after: str, before: str | None = None) -> Diagnosis:
    return diagnose(facts(None if before is None else read_page(before), read_page(after), 10.0))


# --- captured from real servers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "first"),
    [
        (None, "vllm_idle_fresh", None),
        ("vllm_idle_fresh", "vllm_idle_fresh", None),
        (None, "vllm_after_errors", "server-errors"),
        ("vllm_idle_fresh", "vllm_after_errors", "server-errors"),
        (None, "vllm_load32_during", "queueing"),
        ("vllm_idle_fresh", "vllm_load32_during", "queueing"),
        ("vllm_after_errors", "vllm_load32_during", "queueing"),
        ("vllm_load32_during", "vllm_load32_during", "queueing"),
        ("vllm_load32_during", "vllm_load32_after", "queueing"),
        (None, "vllm_load32_after", "queueing"),
        (None, "vllm_tinykv_preempt_during", "preemption"),
        ("vllm_tinykv_preempt_during", "vllm_tinykv_preempt_during", "preemption"),
        (None, "vllm_tinykv_preempt_after", "preemption"),
        ("vllm_tinykv_preempt_during", "vllm_tinykv_preempt_after", "preemption"),
        ("vllm_prefix_shared_before", "vllm_prefix_shared_after", None),
        (None, "llama_idle", None),
        (None, "llama_load8_during", "queueing"),
        ("llama_idle", "llama_load8_during", "queueing"),
        ("llama_load8_during", "llama_load8_after", None),
    ],
)
def test_every_captured_page_is_named(before: str | None, after: str, first: str | None) -> None:
    found = seen(captured(after), before and captured(before))
    assert found.first == first
    assert (found.verdict == NOTHING_IS_WRONG) == (first is None)


@pytest.mark.parametrize(
    ("run", "first"),
    [
        ("bench_rate1", None), ("bench_rate2", None), ("bench_rate4", None), ("bench_closed8", None),
        ("bench_rate12", "queueing"), ("load32", "queueing"), ("preempt", "preemption"), ("preempt_control", None),
        ("prefix_shared", None), ("prefix_none", "prefix-cache-useless"), ("cancelmix", None),
        ("interf_b2048", "prefill-interference"), ("interf_none", None),
        ("two_seats", "queueing"), ("two_seats_live", "queueing"), ("budget128_live", "queueing"),
        ("batch16", None), ("batch16_live", None), ("chat4", None), ("hang_up", None), ("speculation_wins", None),
        ("long_alone", "long-prefill"), ("cache_off_shared", "prefix-cache-off"), ("too_long", "server-errors"),
    ],
)  # fmt: skip
def test_every_captured_run_is_named(run: str, first: str | None) -> None:
    assert seen(page_of_delta(run)).first == first


def test_answers_that_clients_broke_off_are_remarked_though_no_counter_shows_them() -> None:
    assert any("10 of 24 answers began and did not end" in note for note in seen(page_of_delta("cancelmix")).notes)
    assert not any("did not end" in note for note in seen(page_of_delta("bench_rate1")).notes)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("rate1", None), ("rate4", None), ("closed8", None), ("rate12", "queueing"), ("vllm_load32", "queueing"),
        ("vllm_interf_none", None), ("vllm_interf_b2048", "prefill-interference"), ("vllm_prefix_shared", None),
        ("vllm_prefix_none", "prefill-interference"), ("vllm_cancel_mix", None),
        ("vllm_queue_reject", "admission-limit"), ("vllm_tinykv_preempt", "preemption"),
    ],
)  # fmt: skip
def test_what_a_client_saw_of_the_same_runs_is_named(name: str, first: str | None) -> None:
    result = of_run(name) if name.startswith("vllm") else of_bench(name)
    assert diagnose(facts_of_loadtest(result)).first == first


def test_with_the_page_beside_it_a_load_test_is_told_what_the_cache_did() -> None:
    both = together(facts(None, read_page(page_of_delta("prefix_none"))), facts_of_loadtest(of_run("vllm_prefix_none")))
    assert diagnose(both).first == "prefix-cache-useless"
    assert len(diagnose(both).sources) == 2


# --- every cause, at the speed of a data centre card ------------------------------------------------------------

# An 8B model on an H100: 8 ms a token, prompts of 600 tokens in 30 ms, eight streams.
HEALTHY = State(
    ttft=[(0.035, 150), (0.055, 50)],
    itl=[(0.008, 24_000), (0.016, 600)],
    queue=[(0.0005, 200)],
    prefill=[(0.035, 200)],
    e2e=[(1.2, 200)],
    prompts=[(600, 200)],
    answers=[(124, 200)],
    running=8,
    kv=0.1,
    steps=3000,
)
IDLE = replace(HEALTHY, running=0, kv=0.0)
# The same server under a load that it cannot serve.
QUEUE = replace(HEALTHY, ttft=[(9.0, 200)], queue=[(8.9, 200)], waiting=50, running=64)
STATES: dict[str, State] = {
    "queueing": QUEUE,
    "admission-limit": replace(QUEUE, counters={"admission_rejections_total": 40}),
    "long-prefill": replace(
        HEALTHY, ttft=[(1.6, 50)], prefill=[(1.55, 50)], queue=[(0.01, 50)], prompts=[(30_000, 50)]
    ),
    "prefill-interference": replace(
        HEALTHY, itl=[(0.008, 24_000), (0.18, 600)], prefill=[(0.09, 200)], ttft=[(0.09, 200)]
    ),
    "preemption": replace(HEALTHY, counters={"num_preemptions_total": 60}, itl=[(0.008, 24_000), (4.0, 40)]),
    "kv-pool-nearly-full": replace(HEALTHY, kv=0.96),
    "cold-start": replace(
        HEALTHY, ttft=[(0.035, 10), (12.0, 2)], prefill=[(0.035, 10), (12.0, 2)], prompts=[(600, 12)],
        queue=[(0.0, 12)], e2e=[(1.2, 10), (13.0, 2)], answers=[(124, 12)], itl=[(0.008, 1400)], steps=200,
    ),
    "prefix-cache-off": replace(
        HEALTHY, caching=False, ttft=[(0.35, 200)], prefill=[(0.34, 200)], prompts=[(1800, 200)]
    ),
    "prefix-cache-useless": replace(HEALTHY, ttft=[(0.45, 200)], prefill=[(0.44, 200)], prompts=[(1800, 200)]),
    "prefix-cache-leak": replace(HEALTHY, running=0, kv=0.4),
    "speculation-loses": replace(
        HEALTHY,
        counters={
            "spec_decode_num_drafts_total": 9000,
            "spec_decode_num_draft_tokens_total": 27_000,
            "spec_decode_num_accepted_tokens_total": 4000,
        },
    ),
    "server-errors": replace(HEALTHY, counters={"http_5xx": 20}),
}  # fmt: skip


def page(state: State, **how: object) -> str:
    """Its page; HTTP statuses carry no prefix."""
    failed = state.counters.get("http_5xx", 0)
    plain = replace(state, counters={key: value for key, value in state.counters.items() if key != "http_5xx"})
    posts = f'http_requests_total{{handler="/v1/completions",method="POST",status="5xx"}} {failed}\n'
    good = 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 200\n'
    return plain.text(**how) + good + (posts if failed else "")  # type: ignore[arg-type]


def test_stalls_count_as_far_as_reading_explains_them() -> None:
    """Something else on the machine stalls the streams as well, as it was seen with vLLM on two cores."""
    half = replace(STATES["prefill-interference"], itl=[(0.008, 24_000), (0.18, 2400)])
    (found,) = seen(page(half)).causes
    assert found.cause == "prefill-interference"
    alone = seen(page(STATES["prefill-interference"])).causes[0]
    assert alone.strength < found.strength < 0.6  # 432 of 624 s are stalls, 221 of them can be reading
    little = replace(half, prefill=[(0.01, 200)])
    assert "prefill-interference" not in [each.cause for each in seen(page(little)).causes]


def test_one_slow_step_is_no_stutter() -> None:
    """Ten clients of vLLM that came at once and hung up after ten tokens: one step of twelve read prompts."""
    short = replace(HEALTHY, ttft=[(0.035, 8)], prefill=[(0.035, 8)], queue=[(0.0, 8)], prompts=[(600, 8)], steps=12)
    for slow, named in ((8, False), (16, True)):
        causes = [each.cause for each in seen(page(replace(short, itl=[(0.008, 80), (0.03, slow)]))).causes]
        assert ("prefill-interference" in causes) == named


def test_a_healthy_server_is_healthy() -> None:
    assert seen(page(HEALTHY)).causes == ()
    assert seen(page(IDLE)).causes == ()


@pytest.mark.parametrize("cause", STATES)
def test_every_state_is_named_first(cause: str) -> None:
    assert seen(page(STATES[cause])).first == cause


@pytest.mark.parametrize("cause", STATES)
@pytest.mark.parametrize("scale", [0.02, 0.5, 30.0])
def test_thresholds_are_ratios_so_a_slower_card_changes_nothing(cause: str, scale: float) -> None:
    slow, normal = seen(page(STATES[cause], scale=scale)), seen(page(STATES[cause]))
    assert [finding.cause for finding in slow.causes] == [finding.cause for finding in normal.causes]


@pytest.mark.parametrize("state", [*STATES.values(), HEALTHY], ids=[*STATES, "healthy"])
def test_the_order_of_lines_and_metrics_of_others_change_nothing(state: State) -> None:
    lines = page(state).splitlines()
    random.Random(0).shuffle(lines)
    noise = [
        "# HELP node_load1 1m load",
        "# TYPE node_load1 gauge",
        "node_load1 7.3",
        'python_gc_total{generation="0"} 9.0',
    ]
    shuffled = "\n".join([*noise, *lines, "process_resident_memory_bytes 1e9"]) + "\n"
    assert seen(shuffled).causes == seen(page(state)).causes


@pytest.mark.parametrize("cause", STATES)
def test_data_parallel_engines_are_added_up(cause: str) -> None:
    two = seen(page(STATES[cause], engines=2))
    assert two.first == cause
    assert any("2 engines" in note for note in two.notes)


@pytest.mark.parametrize("cause", [cause for cause in STATES if cause != "server-errors"])
def test_our_own_engine_shows_the_same_under_its_prefix(cause: str) -> None:
    assert seen(page(STATES[cause], kind="kvlab")).first == cause


def test_one_full_pool_of_several_counts_however_empty_the_others_are() -> None:
    lines = page(replace(HEALTHY, answers=[(20_000, 200)]), engines=2).splitlines()
    full = [
        line.replace("0.1", "0.97") if "kv_cache_usage" in line and 'engine="1"' in line else line for line in lines
    ]
    assert seen("\n".join(full) + "\n").first == "kv-pool-nearly-full"


def test_created_stamps_are_no_data() -> None:
    with_stamps = page(HEALTHY)
    assert "_created" in with_stamps
    without = "\n".join(line for line in with_stamps.splitlines() if "_created" not in line) + "\n"
    assert facts(None, read_page(with_stamps)) == facts(None, read_page(without))


def test_the_same_server_without_the_fault_is_not_blamed() -> None:
    cured = {
        "queueing": replace(QUEUE, ttft=HEALTHY.ttft, queue=HEALTHY.queue, waiting=0),
        "long-prefill": replace(STATES["long-prefill"], ttft=[(0.05, 50)], prefill=[(0.05, 50)], prompts=[(900, 50)]),
        "prefill-interference": replace(STATES["prefill-interference"], itl=HEALTHY.itl),
        "preemption": replace(STATES["preemption"], counters={}, itl=HEALTHY.itl),
        "prefix-cache-off": replace(STATES["prefix-cache-off"], prompts=[(40, 200)]),
        "prefix-cache-useless": replace(
            STATES["prefix-cache-useless"], counters={"prefix_cache_hits_total": 1700 * 200}
        ),
        "speculation-loses": replace(
            STATES["speculation-loses"],
            counters=dict(STATES["speculation-loses"].counters) | {"spec_decode_num_accepted_tokens_total": 22_000},
        ),
    }
    for cause, state in cured.items():
        assert cause not in {finding.cause for finding in seen(page(state)).causes}, cause


# --- traps of vLLM's metrics ------------------------------------------------------------------------------------


def test_a_live_preemption_is_seen_before_its_counter_moves() -> None:
    before = replace(HEALTHY, running=12, waiting=4, kv=0.97)
    after = replace(
        before, running=6, waiting=10, kv=0.85, itl=[*HEALTHY.itl, (0.008, 900)], ttft=[*HEALTHY.ttft, (0.04, 0)]
    )
    # 200 first tokens, 184 ends: 16 have begun, 6 run.
    begun = [replace(state, e2e=[(1.2, 184)]) for state in (before, after)]
    found = seen(page(begun[1]), page(begun[0]))
    assert found.first == "preemption"
    assert "10 of those who wait had begun" in " ".join(found.causes[0].evidence)


def test_waiting_for_a_full_pool_without_having_begun_is_no_preemption() -> None:
    full = replace(HEALTHY, running=16, waiting=10, kv=0.97, e2e=[(1.2, 184)], answers=[(20_000, 184)])
    assert seen(page(full)).first == "kv-pool-nearly-full"


def test_a_queue_time_that_moves_only_at_the_end_does_not_hide_a_new_queue() -> None:
    new = replace(HEALTHY, waiting=40, running=16)
    assert seen(page(new), page(IDLE)).first == "queueing"
    assert seen(page(new), page(new)).first == "queueing"


def test_a_queue_that_is_gone_by_the_second_read_is_no_queue_now() -> None:
    assert seen(page(HEALTHY), page(replace(HEALTHY, waiting=3))).causes == ()


def test_seats_that_are_the_limit_are_told_from_memory_that_is() -> None:
    seats = replace(HEALTHY, waiting=40, running=16, kv=0.04)
    assert "--max-num-seqs" in " ".join(seen(page(seats), page(seats)).causes[0].evidence)


def test_bad_requests_are_seen_though_no_counter_of_the_engine_moves() -> None:
    lines = page(HEALTHY) + 'http_requests_total{handler="/v1/completions",method="POST",status="4xx"} 80\n'
    found = seen(lines)
    assert found.first == "server-errors"
    assert "80 4xx" in found.causes[0].evidence[0]
    few = page(HEALTHY) + 'http_requests_total{handler="/v1/completions",method="POST",status="4xx"} 3\n'
    assert seen(few).causes == ()


def test_scrapes_and_health_checks_that_fail_are_no_failed_requests() -> None:
    assert seen(page(HEALTHY) + 'http_requests_total{handler="none",method="GET",status="4xx"} 500\n').causes == ()


def test_the_checks_of_a_load_balancer_do_not_thin_out_the_failures() -> None:
    checks = 'http_requests_total{handler="/health",method="GET",status="2xx"} 100000\n'
    found = seen(page(STATES["server-errors"]) + checks)
    assert found.first == "server-errors"
    assert found.causes[0].strength == 20 / 220


def test_slow_first_tokens_of_a_server_that_has_long_been_up_are_no_cold_start() -> None:
    old = replace(HEALTHY, ttft=[*HEALTHY.ttft, (0.035, 10), (12.0, 2)], itl=[(0.008, 26_000), (0.016, 600)])
    assert "cold-start" not in {finding.cause for finding in seen(page(old), page(HEALTHY)).causes}


def test_streams_that_lose_more_than_the_readers_are_the_trouble_though_no_prefix_is_found() -> None:
    stuttering = replace(
        HEALTHY, itl=[(0.008, 24_000), (0.25, 1600)], prefill=[(0.4, 200)], ttft=[(0.41, 200)], prompts=[(1500, 200)]
    )
    assert seen(page(stuttering)).first == "prefill-interference"


def test_a_server_that_was_started_again_between_the_reads_is_named() -> None:
    young = replace(HEALTHY, ttft=[(0.04, 20)], itl=[(0.008, 2400)], prompts=[(600, 20)], e2e=[(1.2, 20)], steps=300,
                    queue=[(0.0, 20)], prefill=[(0.035, 20)], answers=[(124, 20)])  # fmt: skip
    found = facts(read_page(page(HEALTHY)), read_page(page(young)), 10.0)
    assert found.restarted
    assert found.begun == 20
    assert any("started again" in note for note in diagnose(found).notes)
    assert diagnose(found).causes == ()


def test_growth_of_the_batch_needs_something_to_compare_with() -> None:
    quiet = replace(HEALTHY, itl=[(0.008, 6000)], steps=3000)
    busy = replace(quiet, itl=[(0.008, 6000), (0.03, 64_000)], steps=4000, running=64)
    assert seen(page(busy), page(quiet)).first == "decode-batch-growth"
    assert seen(page(busy)).causes == ()


def test_a_falling_hit_rate_and_more_blocks_than_requests_is_a_leak() -> None:
    before = replace(HEALTHY, kv=0.5, counters={"prefix_cache_hits_total": 600 * 160})
    after = replace(before, kv=0.6, prompts=[(600, 300)], ttft=[*HEALTHY.ttft, (0.04, 100)])
    found = seen(page(after), page(before))
    assert found.first == "prefix-cache-leak"
    assert "fell from 80% to 0%" in " ".join(found.causes[0].evidence)


def test_host_overhead_is_judged_by_the_bytes_of_a_step() -> None:
    known = facts(None, read_page(page(replace(HEALTHY, itl=[(0.08, 24_000)]))))
    assert diagnose(with_hardware(known, "llama-3-8b", "h100-sxm")).first == "host-overhead"
    assert diagnose(known).causes == ()
    small = facts(None, read_page(page(HEALTHY)))
    assert diagnose(with_hardware(small, "llama-3.2-1b", "h100-sxm")).first == "host-overhead"
    fast = facts(None, read_page(page(replace(HEALTHY, itl=[(0.012, 24_000)]))))
    assert diagnose(with_hardware(fast, "llama-3-8b", "h100-sxm")).causes == ()
    with pytest.raises(ConfigError, match="nothing decoded"):
        with_hardware(facts(None, read_page(captured("vllm_idle_fresh"))), "llama-3-8b", "h100-sxm")


# --- what is missing, and what is added ---------------------------------------------------------------------------

NAMES = sorted({line.split("{")[0] for line in captured("vllm_tinykv_preempt_after").splitlines() if line[0] != "#"})


@settings(max_examples=40)
@given(gone=st.sets(st.sampled_from(NAMES), max_size=len(NAMES)))
def test_a_metric_that_is_missing_is_no_crash(gone: set[str]) -> None:
    kept = [
        line
        for line in captured("vllm_tinykv_preempt_after").splitlines()
        if line[0] == "#" or line.split("{")[0] not in gone
    ]
    try:
        found = seen("\n".join(kept) + "\n")
    except MeasureError as failure:
        assert "metrics page of" in str(failure)  # noqa: PT017
    else:
        assert found.report()["verdict"]


@pytest.mark.parametrize("part", [0.2, 0.5, 0.8, 0.97])
def test_a_page_that_was_cut_is_said_to_be(part: float) -> None:
    whole = captured("vllm_tinykv_preempt_after")
    found = seen(whole[: int(len(whole) * part)].rstrip("\n"))
    assert any("may have been cut" in note for note in found.notes)


def test_two_pages_of_two_engines_are_refused() -> None:
    with pytest.raises(MeasureError, match="one page is of llamacpp and one of vllm"):
        seen(captured("vllm_idle_fresh"), captured("llama_idle"))


# --- the client and what lies between -----------------------------------------------------------------------------


def streams(
    n: int, *, ttft: float = 0.05, gap: float = 0.01, tokens: int = 60, every: float = 0.2
) -> list[list[float]]:
    """Chunks of requests that come one after the other, with their sending times first."""
    return [[each * every, *(each * every + ttft + gap * token for token in range(tokens))] for each in range(n)]


def judged(chunks: Sequence[Sequence[float]], **other: object) -> Diagnosis:
    requests = [request(id, row[0], row[1:], prompt_tokens=100) for id, row in enumerate(chunks)]
    return diagnose(facts_of_loadtest(loadtest(requests, **other)))


def test_a_healthy_load_test_is_healthy() -> None:
    assert judged(streams(40)).causes == ()


def test_a_proxy_that_holds_streams_back_is_named_first() -> None:
    bursts = [[row[0], *(row[1 + 20 * (token // 20 + 1) - 1] for token in range(60))] for row in streams(40)]
    assert judged(bursts).first == "buffering-proxy"
    at_once = [[row[0], *[row[-1] + 1e-5 * token for token in range(60)]] for row in streams(40)]
    assert judged(at_once).first == "buffering-proxy"


def test_a_server_that_bundles_tokens_keeps_a_rhythm_and_is_no_proxy() -> None:
    chunks = streams(40, gap=0.04, tokens=15)
    requests = [request(id, row[0], row[1:], output_tokens=60) for id, row in enumerate(chunks)]
    assert diagnose(facts_of_loadtest(loadtest(requests))).causes == ()


def test_a_client_that_sends_late_is_named_before_the_queue_that_it_looks_like() -> None:
    requests = [
        request(id, row[0], [time + 0.1 * id for time in row[1:]]) | {"sent_s": row[0] + 0.1 * id}
        for id, row in enumerate(streams(40))
    ]
    assert diagnose(facts_of_loadtest(loadtest(requests))).first == "client-lag"


def test_a_client_that_sends_late_and_so_reads_in_bursts_is_no_proxy() -> None:
    """Of long answers the lag is a small part: it is the bursts that cost, and they are the client's own."""
    bursts = [[row[0], *(row[1 + 20 * (token // 20 + 1) - 1] for token in range(60))] for row in streams(40)]
    requests = [
        request(id, row[0], [time + 0.3 for time in row[1:]]) | {"sent_s": row[0] + 0.3}
        for id, row in enumerate(bursts)
    ]
    found = diagnose(facts_of_loadtest(loadtest(requests)))
    assert [each.cause for each in found.causes] == ["client-lag"]
    assert "bursts" in " ".join(found.causes[0].evidence)


def test_a_client_that_reads_slowly_shows_only_beside_the_server() -> None:
    client = facts_of_loadtest(loadtest([request(id, row[0], row[1:]) for id, row in enumerate(streams(40, gap=0.03))]))
    assert diagnose(client).causes == ()
    server = facts(None, read_page(page(HEALTHY)))
    assert diagnose(together(server, client)).first == "slow-client"
    brisk = facts_of_loadtest(loadtest([request(id, row[0], row[1:]) for id, row in enumerate(streams(40))]))
    assert diagnose(together(server, brisk)).causes == ()


def test_first_tokens_that_come_late_between_server_and_client_are_no_fault_of_the_server() -> None:
    late = facts_of_loadtest(
        loadtest([request(id, row[0], row[1:]) for id, row in enumerate(streams(40, ttft=0.9, gap=0.008))])
    )
    assert diagnose(together(facts(None, read_page(page(HEALTHY))), late)).first == "client-lag"


def test_the_first_requests_of_a_run_without_warm_up_are_a_cold_start() -> None:
    chunks = streams(3, ttft=3.0) + streams(40)[3:]
    assert judged(chunks, settings={"warmup": 0}).first == "cold-start"
    # Whoever warmed up has seen something else.
    assert "cold-start" not in {finding.cause for finding in judged(chunks, settings={"warmup": 3}).causes}


def test_failed_requests_are_named_by_what_they_say() -> None:
    fine = [request(id, row[0], row[1:]) for id, row in enumerate(streams(30))]
    words = "This model's maximum context length is 2048 tokens. However, your prompt contains 2100 input tokens"
    too_long = [
        request(30 + id, 7.0, [], error={"kind": "http-400", "message": words}, status=400, finish_reason=None)
        for id in range(10)
    ]
    found = diagnose(facts_of_loadtest(loadtest(fine + too_long)))
    assert [finding.cause for finding in found.causes] == ["context-overflow"]
    assert found.causes[0].strength == 0.25
    broken = [
        request(30 + id, 7.0, [], error={"kind": "closed", "message": ""}, finish_reason=None) for id in range(10)
    ]
    assert diagnose(facts_of_loadtest(loadtest(fine + broken))).first == "server-errors"
    ours = [request(30 + id, 7.0, [], error={"kind": "cancelled", "message": ""}) for id in range(10)]
    assert diagnose(facts_of_loadtest(loadtest(fine + ours))).causes == ()


def test_answers_that_were_capped_in_silence_are_named() -> None:
    warned = [{"kind": "capped", "message": "10 answers were cut"}]
    found = judged(streams(40), warnings=warned, settings={"warmup": 2, "output_tokens": 100})
    assert found.first == "context-overflow"


def test_a_promise_that_half_of_the_answers_break_is_the_batch_where_nothing_stalls() -> None:
    slo = {"slo": {"ttft_s": None, "tpot_s": 0.02}}
    assert judged(streams(40, gap=0.05), figures=slo).first == "decode-batch-growth"
    assert judged(streams(40, gap=0.015), figures=slo).causes == ()


def test_an_interrupted_run_says_so() -> None:
    assert any("interrupted" in note for note in judged(streams(40), interrupted=True).notes)


@pytest.mark.parametrize("wrong", [{}, [], {"kind": "kvlab-bench"}])
def test_another_json_is_refused(wrong: object) -> None:
    with pytest.raises(MeasureError, match="no result of a load test"):
        facts_of_loadtest(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", ["requests", "figures", "settings"])
def test_a_damaged_result_is_refused(damage: str) -> None:
    result = loadtest([request(0, 0.0, [1.0, 2.0])])
    del result[damage]
    with pytest.raises(MeasureError, match="damaged"):
        facts_of_loadtest(result)


def test_answers_before_their_questions_are_refused() -> None:
    with pytest.raises(MeasureError, match="answered before it was sent"):
        facts_of_loadtest(loadtest([request(0, 5.0, [1.0, 2.0])]))


def test_a_run_in_which_nothing_was_answered_is_still_a_diagnosis() -> None:
    refused = {"kind": "refused", "message": "All connection attempts failed"}
    dead = [request(id, 0.0, [], error=refused, status=None, sent_s=None, finish_reason=None) for id in range(5)]
    found = diagnose(facts_of_loadtest(loadtest(dead)))
    assert found.first == "server-errors"
    assert "Nobody listens" in found.causes[0].remedy


# --- our engine, at the speed that the cost model gives it --------------------------------------------------------


def served(rate: float, requests: int, spec: str, at: Sequence[float], **how: int | bool) -> list[str]:
    """Pages of an engine with a cost model, read at some times of its virtual clock."""
    engine = Replica(model="llama-3-8b", hardware="h100-sxm", **how).engine()  # type: ignore[arg-type]
    metrics, pages, times = Metrics(engine.scheduler, "m"), [], list(at)
    engine.listeners = (metrics,)
    coming = arrivals(workload(spec), rate=rate, requests=requests)
    for _ in engine.run((each.time, SimulatedRequest.of(n, each)) for n, each in enumerate(coming)):
        while times and engine.clock.now() >= times[0]:
            pages.append(metrics.page())
            times.pop(0)
    return [*pages, metrics.page()]


@pytest.mark.parametrize(
    ("rate", "requests", "spec", "how", "first"),
    [
        (4, 60, "fixed:512/128", {}, None),
        (40, 200, "fixed:512/128", {"max_running": 8}, "queueing"),
        (20, 150, "fixed:256/512", {"blocks": 600}, "preemption"),
        (1, 30, "fixed:7000/64", {}, "long-prefill"),
        (8, 60, "shared-prefix", {}, None),
    ],
)
def test_a_simulated_h100_is_diagnosed_in_the_middle_and_at_the_end(
    rate: float, requests: int, spec: str, how: dict[str, int], first: str | None
) -> None:
    middle, later, end = served(rate, requests, spec, (2.0, 4.0), **how)
    assert seen(later, middle).first == first
    assert seen(end).first == first


# --- the table itself -----------------------------------------------------------------------------------------------

# Ids that the labs and chapters use.
PROMISED = [
    "queueing",
    "admission-limit",
    "long-prefill",
    "prefill-interference",
    "decode-batch-growth",
    "kv-pool-nearly-full",
    "preemption",
    "cold-start",
    "prefix-cache-off",
    "prefix-cache-useless",
    "prefix-cache-leak",
    "speculation-loses",
    "host-overhead",
    "client-lag",
    "buffering-proxy",
    "slow-client",
    "weights-out-of-memory",
    "activations-out-of-memory",
    "max-model-len-over-pool",
    "context-overflow",
    "quantization-flag",
    "server-errors",
]

# Of `vllm serve --help=all`, 0.32.0: those that a remedy may name.
FLAGS = [
    "--max-model-len",
    "--gpu-memory-utilization",
    "--kv-cache-dtype",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--port",
    "--dtype",
    "--long-prefill-token-threshold",
    "--block-size",
    "--enable-prefix-caching",
    "--no-enable-prefix-caching",
    "--watermark",
    "--max-num-queued-reqs",
    "--max-num-queued-tokens",
    "--async-scheduling",
    "--stream-interval",
    "--optimization-level",
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--data-parallel-size",
    "--api-server-count",
    "--quantization",
    "--speculative-config",
    "--spec-tokens",
    "--kv-transfer-config",
    "--served-model-name",
    "--sse-keep-alive-interval",
    "--enable-log-requests",
]

COMING = {"19_engines", "20_load_testing", "21_observability", "22_troubleshooting", "23_capacity_planning"}


def test_the_table_has_every_cause_once_and_names_real_flags_and_chapters() -> None:
    ids = [cause.id for cause in CAUSES]
    assert len(set(ids)) == len(ids)
    assert set(PROMISED) <= set(ids)
    chapters = {path.stem for path in CHAPTERS.glob("[0-9]*.md")} | COMING
    for cause in CAUSES:
        assert set(cause.flags) <= set(FLAGS), cause.id
        assert cause.chapter in chapters, cause.id
        assert set(cause.makes) <= set(ids) - {cause.id}, cause.id
        assert cause.check.endswith((".", "?")), cause.id
        assert cause.remedy.endswith("."), cause.id


def test_a_maker_is_named_before_what_it_makes_and_otherwise_the_stronger_first() -> None:
    found = seen(page_of_delta("preempt")).causes
    made = {cause.id: cause.makes for cause in CAUSES}
    for earlier, later in pairwise(found):
        assert later.cause in made[earlier.cause] or earlier.strength >= later.strength
    assert [finding.cause for finding in found] == ["preemption", "queueing"]


def test_a_strength_is_a_part() -> None:
    for state in STATES.values():
        assert all(0 <= finding.strength <= 1 for finding in seen(page(state)).causes)


def test_a_report_says_everything_in_plain_values() -> None:
    report = seen(captured("vllm_load32_during")).report()
    assert report["kind"] == "kvlab-diagnosis"
    assert report["verdict"] == "Requests wait in the queue before their prompt is read"
    assert set(report["causes"][0]) == {
        "cause", "title", "strength", "evidence", "check", "remedy", "flags", "chapter",
    }  # fmt: skip
