"""A cluster on a virtual clock: against arithmetic, queueing theory, and what Orca and Sarathi-Serve found."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from toy_cluster import asked

from kvlab.cost import Row, StepTimes, kv_bytes, pass_time, transfer_seconds
from kvlab.errors import ConfigError
from kvlab.serving import (
    EventLog,
    Lengths,
    Replica,
    SimulatedRequest,
    Summary,
    Workload,
    arrivals,
    simulate,
    simulate_disaggregated,
    workload,
)
from kvlab.timing import pooled_itl

MODEL, DEVICE = "llama-3-8b", "h100-sxm"
REPLICA = Replica(model=MODEL, hardware=DEVICE)


def known(values: Sequence[float]) -> list[float]:
    return sorted(value for value in values if not math.isnan(value))


def served(replica: Replica, *requests: tuple[float, int, int]) -> EventLog:
    """Requests as (time, prompt, output)."""
    log = EventLog()
    replica.serve(((time, asked(n, time, *rest)) for n, (time, *rest) in enumerate(requests)), log)
    return log


# Against arithmetic.


@pytest.mark.parametrize("policy", ["static", "continuous", "chunked"])
def test_a_request_alone_takes_the_time_of_its_passes(policy: str) -> None:
    (times,) = served(replace(REPLICA, policy=policy), (1.0, 1000, 50)).times().values()
    assert times.ttft == pytest.approx(pass_time(MODEL, [Row(1000)], DEVICE).seconds)
    steps = [pass_time(MODEL, [Row(1, 1000 + index)], DEVICE).seconds for index in range(49)]
    assert times.tpot == pytest.approx(sum(steps) / 49)


def test_a_user_who_comes_during_a_step_waits_from_then_on() -> None:
    """Coordinated omission: the wait does not begin when the engine has time to look."""
    prompt = pass_time(MODEL, [Row(1000)], DEVICE).seconds
    first, second = (
        served(replace(REPLICA, policy="continuous"), (0.0, 1000, 1), (prompt / 4, 1000, 1)).times().values()
    )
    assert second.sent == prompt / 4
    assert second.ttft == pytest.approx(0.75 * prompt + prompt)
    assert first.ttft == pytest.approx(prompt)


def test_a_prompt_beyond_the_budget_is_read_in_pieces() -> None:
    (times,) = served(replace(REPLICA, token_budget=512), (0.0, 1200, 1)).times().values()
    pieces = [Row(512, 0, 0), Row(512, 512, 0), Row(176, 1024)]
    assert times.ttft == pytest.approx(sum(pass_time(MODEL, [piece], DEVICE).seconds for piece in pieces))


def test_formats_and_dtypes_reach_the_clock_and_the_pool() -> None:
    narrow = replace(REPLICA, weights="int4", kv="fp8")
    (times,) = served(narrow, (0.0, 1000, 2)).times().values()
    assert times.tpot == pytest.approx(pass_time(MODEL, [Row(1, 1000)], DEVICE, weights="int4", kv="fp8").seconds)
    assert narrow.n_blocks > 2 * REPLICA.n_blocks
    assert replace(REPLICA, block_size=32).n_blocks == REPLICA.n_blocks // 2


def test_the_pool_is_what_fits_and_no_more() -> None:
    held = REPLICA.n_blocks * kv_bytes(MODEL, 16)
    assert 0.9 * 80 * 2**30 - 16.1e9 - 1e9 < held < 0.9 * 80 * 2**30 - 16e9


def test_the_budget_by_default_reads_any_prompt_that_must_be_read_whole() -> None:
    assert REPLICA.budget == 2048
    assert replace(REPLICA, policy="continuous").budget == replace(REPLICA, policy="static").budget == 8192
    assert replace(REPLICA, token_budget=77).budget == 77


@pytest.mark.parametrize("rho", [0.4, 0.7])
def test_the_wait_in_a_queue_of_equal_services_is_that_of_theory(rho: float) -> None:
    """Each wait by Lindley's recursion, their mean by Pollaczek and Khinchine: rho / (2 (1 - rho)) services (M/D/1)."""
    service = pass_time(MODEL, [Row(512)], DEVICE).seconds
    one_at_a_time = replace(REPLICA, max_running=1, blocks=2, block_size=512)
    queue: dict[str, Any] = {"rate": rho / service, "requests": 6000}
    found = simulate(one_at_a_time, workload("fixed:512/1"), **queue)
    waits, free_at = list[float](), 0.0
    for arrival in arrivals(workload("fixed:512/1"), **queue):
        begun = max(arrival.time, free_at)
        waits.append(begun - arrival.time)
        free_at = begun + service
    assert list(found.ttft) == pytest.approx([wait + service for wait in waits])
    assert sum(waits) / len(waits) / service == pytest.approx(rho / (2 * (1 - rho)), rel=0.1)
    assert not known(found.tpot)


# What was found with real engines.


def worst_itl(log: EventLog, many: int) -> float:
    """Of the first requests."""
    return max(gap for times in list(log.times().values())[:many] for gap in times.itl)


@pytest.mark.parametrize("budget", [512, 1024, 2048, 4096])
def test_the_worst_itl_under_a_long_prompt_falls_with_the_budget(budget: int) -> None:
    """Sarathi-Serve (arXiv:2403.02310): a decode stalls for a chunk instead of for a prompt."""
    prompt, users = 32_768, 16
    requests = [*((0.0, 32, 2000) for _ in range(users)), (1.0, prompt, 8)]
    long = replace(REPLICA, model="llama-3.1-8b")
    whole = worst_itl(served(replace(long, policy="continuous"), *requests), users)
    chunked = worst_itl(served(replace(long, token_budget=budget), *requests), users)
    # A chunk reads the weights again, and the last one attends to all that came before.
    assert budget / prompt < chunked / whole < 2 * budget / prompt + 0.005
    assert whole > pass_time("llama-3.1-8b", [Row(prompt)], DEVICE).seconds


def test_a_long_prompt_itself_has_its_first_token_no_sooner_in_chunks() -> None:
    requests = [*((0.0, 32, 2000) for _ in range(16)), (1.0, 32_768, 8)]
    long = replace(REPLICA, model="llama-3.1-8b")
    first = {}
    for name, replica in (("whole", replace(long, policy="continuous")), ("512", replace(long, token_budget=512))):
        first[name] = list(served(replica, *requests).times().values())[-1].ttft or 0
    assert first["512"] > first["whole"]


def test_continuous_batching_gains_with_the_spread_of_lengths() -> None:
    """Orca (OSDI 2022): a batch that waits for its longest answer computes for those that are done."""
    gains, users = [], 16
    for name in ("fixed:64/128", "uniform:64-64/64-192", "uniform:64-64/1-255"):
        rates = {}
        for policy in ("static", "continuous"):
            replica = replace(REPLICA, policy=policy, max_running=users, token_budget=4096)
            found = simulate(replica, workload(name), rate=1e6, requests=30 * users)
            rates[policy] = found.tokens_out / found.seconds
        gains.append(rates["continuous"] / rates["static"])
    # A static batch takes as many steps as its longest answer has tokens; a place in it is needed for 128 of them.
    longest = 255 * users / (users + 1)
    assert gains[0] == pytest.approx(1, abs=0.05)
    assert gains[0] + 0.2 < gains[1] < gains[2]
    assert gains[2] == pytest.approx(longest / 128, rel=0.15)


# Nothing is lost.


@pytest.mark.parametrize("policy", ["static", "continuous", "chunked"])
@pytest.mark.parametrize("name", ["azure-conv", "multi-turn", "shared-prefix"])
def test_what_goes_in_comes_out(policy: str, name: str) -> None:
    replica = replace(REPLICA, policy=policy, blocks=1200, max_running=24)
    coming = list(arrivals(workload(name), rate=20, requests=300))
    found = simulate(replica, workload(name), rate=20, requests=300, replicas=2)
    whole = [each for each in coming if each.prompt_tokens + each.output_tokens <= 8192]
    assert found.refused.total() == 300 - len(whole)
    assert found.finished.total() == len(whole)
    assert found.tokens_in == sum(each.prompt_tokens for each in whole)
    assert found.tokens_out == sum(each.output_tokens for each in whole)
    assert found.itl.total == found.tokens_out - len(whole)
    assert found.kv_peak <= 1
    if not found.preemptions:
        assert found.tokens_fed <= found.tokens_in + found.tokens_out - len(whole)


def test_answers_end_at_the_cap_or_where_they_end() -> None:
    lengths = workload("uniform:10-10/1-40")
    found = simulate(replace(REPLICA, max_new_tokens=20), lengths, rate=50, requests=400)
    outputs = [each.output_tokens for each in arrivals(lengths, rate=50, requests=400)]
    assert found.finished["length"] == sum(output >= 20 for output in outputs)
    assert found.finished["stop"] == sum(output < 20 for output in outputs)
    assert found.tokens_out == sum(min(output, 20) for output in outputs)


def test_refusals_say_why() -> None:
    found = simulate(replace(REPLICA, blocks=20), workload("fixed:400/8"), rate=5, requests=7)
    assert found.refused.total() == found.report()["requests"] == 7
    (reason,) = found.report()["refusals"]
    assert reason.startswith("its cache may come to 407 tokens, 26 blocks of 16, and the pool has 20")
    full = simulate(replace(REPLICA, max_running=1, max_waiting=2), workload("fixed:400/99"), rate=1e6, requests=9)
    assert full.refused.total() == 9 - full.finished.total() > 0
    assert "2 requests wait already" in next(iter(full.report()["refusals"]))


# Replicas, seeds, processes.


def test_replicas_deal_out_conversations() -> None:
    """Each replica serves whole conversations, so that a turn finds the history of the turn before."""
    chat = workload("multi-turn")
    total, fed = Summary(), list[int]()
    for index in range(3):
        mine = [each for each in arrivals(chat, rate=3, requests=300, seed=4) if each.session % 3 == index]
        alone = Summary()
        REPLICA.serve(((each.time, SimulatedRequest.of(n, each)) for n, each in enumerate(mine)), alone)
        fed.append(alone.tokens_fed)
        total.merge(alone)
    found = simulate(REPLICA, chat, rate=3, requests=300, replicas=3, seed=4)
    assert found.report() == total.report()
    assert min(fed) > 0
    assert found.tokens_fed < 0.8 * (found.tokens_in + found.tokens_out)


def test_a_seed_repeats_a_run_and_another_does_not() -> None:
    run: dict[str, Any] = {"rate": 20, "requests": 200}
    one, again, other = (simulate(REPLICA, workload("azure-conv"), **run, seed=seed) for seed in (1, 1, 2))
    assert one.report() == again.report()
    assert one.ttft == again.ttft != other.ttft


def test_processes_give_what_one_process_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    run: dict[str, Any] = {"rate": 40, "requests": 200, "replicas": 3, "seed": 3}
    said = list[str]()
    alone = simulate(REPLICA, workload("azure-conv"), **run)
    monkeypatch.setattr(sys.modules["kvlab.serving.simulate"], "_MANY", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    together = simulate(REPLICA, workload("azure-conv"), **run, tell=said.append)
    assert together.report() == alone.report()
    assert together.ttft == alone.ttft
    assert said == ["1 of 3 replicas", "2 of 3 replicas", "3 of 3 replicas"]
    # What goes wrong in a process is said as it would be without one.
    broken = replace(REPLICA)
    object.__setattr__(broken, "policy", "guess")
    with pytest.raises(ConfigError, match=r"^policy is 'guess'; it must be one of static, continuous, chunked$"):
        simulate(broken, workload("azure-conv"), **run)


def test_one_replica_tells_how_far_it_is() -> None:
    said = list[str]()
    simulate(REPLICA, workload("fixed:16/1"), rate=100, requests=2500, tell=said.append)
    assert said == ["1,000 of 2,500 requests of a replica", "2,000 of 2,500 requests of a replica", "1 of 1 replicas"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"requests": 0}, "requests is 0"),
        ({"replicas": 0}, "replicas is 0"),
        ({"rate": 0}, "rate is 0 requests per second"),
    ],
)
def test_impossible_runs_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(REPLICA, workload("azure-conv"), **{"rate": 1, "requests": 1} | wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": "llama-3-70b"}, r"weights of 2 bytes an element take 141\.1 GB.* and 77\.3 GB may be used"),
        ({"policy": "guess"}, "policy is 'guess'"),
        ({"order": "random"}, "order is 'random'"),
        ({"token_budget": 0}, "token_budget is 0"),
        ({"max_running": 0}, "max_running is 0"),
        ({"blocks": 0}, "blocks is 0"),
        ({"block_size": 0}, "block_size"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"hardware": "abacus"}, "no hardware is called 'abacus'"),
        ({"hardware": "t4", "weights": "int4"}, "no bfloat16 peak"),
    ],
)
def test_impossible_replicas_are_refused_when_they_are_made(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(REPLICA, **wrong)


# Prefill and decode on machines of their own.


def split(name: str, requests: int, **settings: Any) -> Summary:
    asked: dict[str, Any] = {"rate": 20, "bytes_per_second": 1e18} | settings
    prefill, decode = asked.pop("prefill", REPLICA), asked.pop("decode", REPLICA)
    return simulate_disaggregated(prefill, decode, workload(name), requests=requests, **asked)


def test_decode_does_not_touch_the_first_token() -> None:
    long, short = split("fixed:800/400", 150), split("fixed:800/2", 150)
    assert known(long.ttft) == known(short.ttft)
    mixed = [simulate(REPLICA, workload(f"fixed:800/{n}"), rate=20, requests=150) for n in (400, 2)]
    assert sum(mixed[0].ttft) > 1.1 * sum(mixed[1].ttft)


def test_prompts_do_not_touch_decode() -> None:
    """A token waits for one step of everybody who decodes, and the second one for the step under way too."""
    apart, mixed = split("fixed:1500/100", 200), simulate(REPLICA, workload("fixed:1500/100"), rate=20, requests=200)
    most = StepTimes(MODEL, DEVICE).seconds(200, 200 * 1600)
    assert apart.itl.percentile(100) < 2 * most
    assert mixed.itl.percentile(99) > 3 * apart.itl.percentile(99)


def test_a_slow_link_shows_in_the_second_token_and_only_there() -> None:
    fast, slow = split("fixed:1000/50", 1), split("fixed:1000/50", 1, bytes_per_second=1e9)
    moved = transfer_seconds(MODEL, 1000, 1e9)
    assert moved == pytest.approx(0.131, abs=0.001)
    assert slow.ttft == fast.ttft
    assert slow.e2e[0] - fast.e2e[0] == pytest.approx(moved)
    assert slow.itl.percentile(100) == pytest.approx(moved, rel=0.05)
    assert slow.itl.percentile(95) == fast.itl.percentile(95)
    assert slow.seconds == pytest.approx(fast.seconds + moved)


def test_the_cache_comes_along_and_is_not_computed_again() -> None:
    found = split("fixed:1000/50", 20)
    assert found.tokens_fed == 20 * (1000 + 49)
    assert (found.tokens_in, found.tokens_out) == (20 * 1000, 20 * 50)
    (times,) = served(REPLICA, (0.0, 1000, 50)).times().values()
    alone = split("fixed:1000/50", 1)
    assert alone.ttft[0] == pytest.approx(times.ttft)
    assert alone.e2e[0] == pytest.approx(times.e2e, rel=1e-4)  # half a token is rounded


def test_caches_share_a_link_one_after_another() -> None:
    """Ten caches that are ready nearly at once arrive one transfer apart."""
    found = split("fixed:1000/2", 10, rate=1e6, bytes_per_second=1e9)
    moved, gaps = transfer_seconds(MODEL, 1000, 1e9), known(found.tpot)
    assert gaps[-1] - gaps[0] == pytest.approx(9 * moved, rel=0.2)
    two = split("fixed:1000/2", 10, rate=1e6, bytes_per_second=1e9, prefill_replicas=2)
    assert known(two.tpot)[-1] == pytest.approx(5 * moved, rel=0.2)


@pytest.mark.parametrize("settings", [{"name": "fixed:100/1"}, {"name": "fixed:100/9", "cap": 1}])
def test_one_token_answers_never_leave_the_prefill_pool(settings: dict[str, Any]) -> None:
    capped = replace(REPLICA, max_new_tokens=settings.get("cap"))
    found = split(settings["name"], 30, bytes_per_second=1.0, decode=capped)
    assert found.finished == {"length": 30}
    assert found.tokens_out == 30
    assert len(found.ttft) == 30
    assert not known(found.tpot)
    assert not found.itl.total
    assert found.tokens_fed == 30 * 100
    assert 0 < found.seconds < 10


def test_whoever_is_preempted_in_the_decode_pool_is_computed_there() -> None:
    small = replace(REPLICA, blocks=100)
    found = split("fixed:200/400", 30, rate=200, decode=small)
    assert found.preemptions > 0
    assert found.finished == {"length": 30}
    assert (found.tokens_in, found.tokens_out) == (30 * 200, 30 * 400)
    assert found.tokens_fed >= 30 * (200 + 399) + 200
    roomy = split("fixed:200/400", 30, rate=200)
    assert known(found.ttft) == known(roomy.ttft)


def test_a_cap_counts_the_first_token_too() -> None:
    found = split("uniform:10-10/1-40", 200, decode=replace(REPLICA, max_new_tokens=20))
    outputs = [each.output_tokens for each in arrivals(workload("uniform:10-10/1-40"), rate=20, requests=200)]
    assert found.tokens_out == sum(min(output, 20) for output in outputs)
    assert found.finished.total() == 200


def test_what_the_decode_pool_cannot_hold_is_refused_before_it_is_read() -> None:
    mixed = Workload("mixed", Lengths.uniform(100, 500), Lengths.uniform(1, 100))
    found = simulate_disaggregated(
        REPLICA, replace(REPLICA, blocks=30), mixed, rate=20, requests=200, bytes_per_second=1e12
    )
    coming = list(arrivals(mixed, rate=20, requests=200))
    held = [each for each in coming if each.output_tokens == 1 or each.prompt_tokens + each.output_tokens <= 481]
    assert found.finished.total() == len(held)
    assert found.refused.total() == 200 - len(held) > 0
    assert found.tokens_in == sum(each.prompt_tokens for each in held)
    assert found.tokens_fed >= sum(each.prompt_tokens + each.output_tokens - 1 for each in held)


def test_what_the_prefill_pool_cannot_read_is_refused_and_counted() -> None:
    found = split("fixed:900/5", 12, prefill=replace(REPLICA, policy="continuous", token_budget=512))
    assert found.refused.total() == found.report()["requests"] == 12
    assert "the budget is 512" in next(iter(found.report()["refusals"]))


def test_a_full_queue_of_the_decode_pool_refuses_too() -> None:
    found = split("fixed:100/300", 40, rate=1e4, decode=replace(REPLICA, max_running=2, max_waiting=3))
    assert found.refused.total() > 0
    assert found.refused.total() + found.finished.total() == 40


def test_disaggregated_runs_repeat_and_tell() -> None:
    said = list[str]()
    pools: dict[str, Any] = {"prefill_replicas": 2, "decode_replicas": 3, "bytes_per_second": 5e10, "seed": 5}
    one, again = (split("azure-conv", 120, **pools, tell=said.append) for _ in range(2))
    assert one.report() == again.report()
    assert said[:5] == [
        "1 of 2 prefill replicas", "2 of 2 prefill replicas", "1 of 3 decode replicas", "2 of 3 decode replicas",
        "3 of 3 decode replicas",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bytes_per_second": 0}, "bytes_per_second is 0"),
        ({"prefill_replicas": 0}, "prefill_replicas is 0"),
        ({"decode_replicas": 0}, "decode_replicas is 0"),
    ],
)
def test_impossible_pools_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split("fixed:9/9", 5, **wrong)


def test_the_log_of_a_run_has_its_gaps() -> None:
    """What the figures above rest on: the worst gap of all is that of the whole log."""
    log, summary = EventLog(), Summary()
    coming = list(arrivals(workload("azure-conv"), rate=25, requests=60))
    REPLICA.serve(((each.time, SimulatedRequest.of(n, each)) for n, each in enumerate(coming)), log, summary)
    assert summary.itl.percentile(100) == pytest.approx(max(pooled_itl(list(log.times().values()))), rel=0.0051)
