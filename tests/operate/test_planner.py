"""The planner: memory that adds up, start-up figures of real servers, replicas that a longer look confirms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.config import preset_names, shape_of
from kvlab.cost import (
    GIB,
    Link,
    ParallelTimes,
    Pool,
    Row,
    StepTimes,
    all_reduce_seconds,
    clamp_max_tokens,
    hardware_of,
    kv_bytes,
    link_of,
    pool_bytes,
    shard,
    weight_bytes,
)
from kvlab.errors import ConfigError
from kvlab.operate import traffic
from kvlab.operate.plan import CapacityPlan, Deployment, Goal, plan
from kvlab.operate.sizing import Instance, fitting, instance, largest, layouts
from kvlab.operate.traffic import Search, Split, Trial, judged
from kvlab.operate.vllm import default_max_num_seqs, default_token_budget
from kvlab.serving import Arrival, SimulatedRequest

MIB = 2**20
NETWORK = Link("a network", 50e9, 0.0)
CHAT = Goal(prompt_tokens=1000, output_tokens=200, rate=30, ttft=0.5, tpot=0.02)


@pytest.fixture(scope="module")
def planned() -> dict[str, Any]:
    """What the plans of `plan_cases.py` came to."""
    script = Path(__file__).with_name("plan_cases.py")
    library = str(Path(traffic.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=True,
        env=os.environ | {"PYTHONPATH": library},
    )  # fmt: skip
    return json.loads(done.stdout)


def on_h100(model: str = "llama-3.1-8b", **given: object) -> Deployment:
    return Deployment(model=model, hardware="h100-sxm", **given)  # type: ignore[arg-type]


# --- start-up figures that people reported ---


def test_b11_378_blocks_hold_no_8192_tokens() -> None:
    """OpenRLHF 336, SubgraphRAG 19: max seq len is larger than what the pool can store."""
    assert (Pool(378).tokens, Pool(378).holds(8192)) == (6048, False)
    room = kv_bytes("llama-3.1-8b", 39_024)
    assert Pool.of("llama-3.1-8b", room).tokens == 39_024
    assert not Pool.of("llama-3.1-8b", room).holds(131_072)


def test_b11_the_plan_says_so_and_offers_what_fits() -> None:
    """The pool of an L4 beside Llama-3.1-8B holds less than the context: shorter requests, or narrower formats."""
    asked = Deployment(model="llama-3.1-8b", hardware="l4", gpus=1)
    found = plan(asked, Goal(prompt_tokens=100_000, output_tokens=100, rate=0.1))
    held = instance(asked, 1, 1).pool.tokens  # type: ignore[union-attr]
    assert not found.fits
    assert f"the KV pool holds {held:,} tokens, and one request needs 100,100" in found.verdict
    assert f"--max-model-len {held}" in {remedy.change for remedy in found.remedies}


def test_b13_the_pool_is_preallocated_whatever_the_model() -> None:
    """vllm 4253, 4723: a model of 0.5B "needs" 73,728 of 81,920 MiB."""
    for model in ("qwen2.5-0.5b", "llama-3.1-8b"):
        ledger = instance(on_h100(model, utilization=0.9), 1, 1).ledger
        assert ledger.device - ledger.unclaimed == 73_728 * MIB


def test_b14_at_1_nothing_is_left_for_what_was_not_profiled() -> None:
    """vllm 1298, 736: 1.0 ends in an out of memory error, and the default is 0.92 now."""
    assert instance(on_h100(utilization=1.0), 1, 1).ledger.unclaimed == 0
    assert instance(on_h100(), 1, 1).ledger.unclaimed == pytest.approx(0.08 * 80 * GIB, abs=1)


def test_b15_two_ooms_with_opposite_fixes() -> None:
    """80 GB, weights 60: at 0.70 the start fails by 4, at 0.90 there are 12, and 8 outside for the activations."""
    assert [pool_bytes(80, fraction, 60) for fraction in (0.70, 0.90)] == [-4, 12]
    at = {share: instance(on_h100("qwen2.5-7b", utilization=share), 1, 1).ledger for share in (0.7, 0.9)}
    assert at[0.9].kv_pool > at[0.7].kv_pool
    assert at[0.9].unclaimed < at[0.7].unclaimed


def test_b16_maximum_concurrency_is_the_pool_over_max_model_len(planned: dict[str, Any]) -> None:
    """vllm 8031: 1381 x 16 / 2048 = 10.79."""
    assert round(Pool(1381).concurrency(2048), 2) == 10.79
    report = planned["chat"]["replica"]
    assert report["max_model_len"] == 2048
    assert report["concurrency_at_max_model_len"] == report["kv_pool"]["tokens"] / 2048


def test_b17_a_plan_runs_no_more_than_the_pool_holds(planned: dict[str, Any]) -> None:
    """LIMO 29, vllm 16832: a pool that is exhausted preempts. Two cards hold 16 requests of Llama-3-70B, not 1,024."""
    found = planned["crowded"]
    assert found["max_num_seqs"] == 16
    assert found["planned"] == found["capped"] == 0
    assert found["careless"] > 0


def test_b22_prompt_and_answer_must_fit_the_context() -> None:
    """gpustack 929: 12 + 8,192 > 8,192."""
    assert clamp_max_tokens(12, 8192, 8192) == 8180
    with pytest.raises(ConfigError, match="12 prompt tokens and 8192 of the answer are 8204, and llama-3-8b has"):
        plan(on_h100("llama-3-8b"), Goal(prompt_tokens=12, output_tokens=8192, rate=1))
    assert fitting(on_h100("llama-3-8b"), Goal(prompt_tokens=12, output_tokens=8180, rate=0.01))


@pytest.mark.parametrize(("ranks", "weights", "available", "off"), [(1, 14.96, 53.29, 0.01), (2, 7.48, 58.97, 0.02)])
def test_the_start_up_log_of_a_real_server(ranks: int, weights: float, available: float, off: float) -> None:
    """vllm PR 10511: Llama-3-8B on cards of 79.22 GiB at 0.90. What is left of it is within a hundredth."""
    card = replace(hardware_of("h100-sxm"), memory_bytes=round(79.22 * GIB))
    asked = Deployment(model="llama-3-8b", hardware=card, utilization=0.9)
    ledger = Instance(asked, ranks, 1, 8192, 256).ledger
    assert round(ledger.weights / GIB, 2) == weights
    assert (ledger.device - ledger.unclaimed) / GIB == pytest.approx(71.29, abs=0.01)
    assert ledger.kv_pool / GIB == pytest.approx(available, rel=off)


# --- what one card of several holds ---


@pytest.mark.parametrize("model", preset_names())
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_cards_of_a_group_hold_the_model_between_them(model: str, ranks: int) -> None:
    """Its cache is that of `kv_bytes`; its weights are a share, and the more the more is copied (norms, KV heads)."""
    try:
        part = shard(model, ranks)
    except ConfigError:
        config = shape_of(model)
        assert config.n_head % ranks or (config.n_kv_head % ranks and ranks % config.n_kv_head)
        return
    assert kv_bytes(part, 777) == kv_bytes(model, 777, tensor_parallel=ranks)
    assert 1 <= ranks * weight_bytes(part) / weight_bytes(model) < 1.05


def test_copied_kv_heads_and_the_stage_that_holds_most() -> None:
    assert shard("llama-3-70b", 16).n_kv_head == 1
    last = shard("deepseek-v3", 8, 2)
    assert (last.n_layer, last.moe.n_dense_layers if last.moe else None) == (31, 0)
    assert shard("gemma-3-27b", 1, 2).windows == shape_of("gemma-3-27b").windows[-31:]
    assert shard("llama-3-8b") == shape_of("llama-3-8b")


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (("smollm2-135m", 2), "tensor_parallel is 2 for 3 KV heads"),
        (("falcon-7b", 2), "tensor_parallel is 2; n_head of falcon-7b is 71"),
        (("llama-3-8b", 1, 33), "pipeline_parallel is 33; llama-3-8b has 32 layers"),
        (("llama-3-8b", 0), "tensor_parallel is 0"),
    ],
)
def test_what_cannot_be_shared_is_refused(cut: tuple[object, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shard(*cut)  # type: ignore[arg-type]


def test_all_reduces_by_hand() -> None:
    """Llama-3-70B: 80 layers, 8,192 wide. Eight cards send 2 x 7/8 of 100 x 8,192 x 2 bytes, 160 times."""
    link = Link("NVLink", 450e9, 8e-6)
    by_hand = 160 * (2 * 7 / 8 * 100 * 8192 * 2 / 450e9 + 8e-6)
    assert all_reduce_seconds("llama-3-70b", 100, 8, link) == pytest.approx(by_hand)
    assert all_reduce_seconds("llama-3-70b", 100, 1, link) == 0
    assert link_of("l4").bytes_per_second == 32e9


def test_steps_of_several_cards() -> None:
    """One card alone is `StepTimes`; eight take an eighth of the bytes and the all-reduces; stages only hand on."""
    alone, rows = StepTimes("llama-3-70b", "h100-sxm"), (7, 7000, [Row(100)])
    one = ParallelTimes("llama-3-70b", "h100-sxm", network=NETWORK)
    assert one.seconds(*rows) == alone.seconds(*rows)
    eight = ParallelTimes("llama-3-70b", "h100-sxm", tensor_parallel=8, network=NETWORK)
    agree = all_reduce_seconds("llama-3-70b", 7, 8, link_of("h100-sxm"))
    assert eight.seconds(7, 7000) - agree == pytest.approx(alone.seconds(7, 7000) / 8, rel=0.01)
    piped = ParallelTimes("llama-3-70b", "h100-sxm", pipeline_parallel=3, network=NETWORK)
    assert piped.seconds(*rows) - one.seconds(*rows) == pytest.approx(2 * 107 * 8192 * 2 / 50e9)


@pytest.mark.parametrize("numbers", [(0.0, 0.0), (1e9, -1.0)])
def test_links_that_move_nothing_are_refused(numbers: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="must be above 0, the second 0 or more"):
        Link("a wire", *numbers)


# --- memory and batches ---


@given(
    st.sampled_from(["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "gemma-3-27b", "smollm2-135m"]),
    st.sampled_from(["t4", "a100-80gb", "h100-sxm", "h200-sxm"]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([0.5, 0.92, 1.0]),
)
@settings(max_examples=60)
def test_the_ledger_adds_up_to_the_card(model: str, card: str, ranks: int, stages: int, claimed: float) -> None:
    asked = Deployment(model=model, hardware=card, utilization=claimed)
    try:
        replica = instance(asked, ranks, stages)
        ledger = replica.ledger
    except ConfigError:  # the heads do not divide
        return
    entries = asdict(ledger)
    assert entries.pop("device") == sum(entries.values()) == hardware_of(card).memory_bytes
    if replica.pool is not None:
        config = shape_of(model)
        layers = -(-config.n_layer // stages)
        part = kv_bytes(config, 16, asked.kv_format, honour_windows=False, tensor_parallel=ranks) * layers
        assert replica.pool.blocks * part / config.n_layer <= ledger.kv_pool
        assert (replica.pool.blocks + 1) * part / config.n_layer > ledger.kv_pool - part


def test_the_largest_batch_is_the_last_that_keeps_the_promise() -> None:
    replica = instance(on_h100(), 1, 1)
    batch = replica.batch_in_time(CHAT, 1024)
    assert replica.tpot(CHAT, batch) <= 0.02 < replica.tpot(CHAT, batch + 1)
    assert replica.batch_in_time(replace(CHAT, tpot=None), 1024) == 1024
    full = replica.batch_in_memory(CHAT)
    assert replica.pool is not None
    assert full * replica.pool.blocks_of(1200) <= replica.pool.blocks < (full + 1) * replica.pool.blocks_of(1200)


def test_groups_of_cards_divide_the_heads_and_the_machine() -> None:
    """GPT-2 has 12 heads: in machines of 8 the groups are 1, 2 and 4, in machines of 6 also 3; stages come last."""
    for machine, groups in ((8, [1, 2, 4]), (6, [1, 2, 3, 6]), (1, [1])):
        asked = Deployment(model="gpt-2-small", hardware="t4", gpus=12, gpus_per_node=machine)
        found = list(layouts(asked))
        assert [ranks for ranks, stages in found if stages == 1] == groups
        assert found[len(groups) :] == [(groups[-1], stages) for stages in range(2, 12 // groups[-1] + 1)]


@given(st.integers(0, 50), st.integers(1, 50))
def test_bisection_finds_the_edge(edge: int, most: int) -> None:
    assert largest(lambda number: number <= edge, most) == min(edge, most)


def test_defaults_depend_on_the_card_as_those_of_vllm_do() -> None:
    expected = {"t4": (2048, 256), "a100-80gb": (2048, 256), "h100-sxm": (8192, 1024), "mi300x": (16_384, 1024)}
    for card, defaults in expected.items():
        hardware = hardware_of(card)
        assert (default_token_budget(hardware), default_max_num_seqs(hardware)) == defaults


# --- traffic ---


def test_one_replica_stands_for_all_of_them(planned: dict[str, Any]) -> None:
    """Every third arrival of a Poisson process goes to it: three replicas that are all simulated give the same."""
    found = planned["alike"]
    for figure in ("ttft_s", "tpot_s", "e2e_s"):
        assert found["one"][figure]["mean"] == pytest.approx(found["all"][figure]["mean"], rel=0.01)
    assert found["one"]["running_mean"] == pytest.approx(found["all"]["running_mean"], rel=0.03)


def test_who_came_first_is_served_and_not_judged() -> None:
    replica = instance(on_h100(), 1, 1)
    summary = traffic.Settled(since=5.0)
    sent = [Arrival(float(second), 20, 4, second) for second in range(8)]
    coming = [(each.time, SimulatedRequest.of(each.session, each)) for each in sent]
    traffic.lane(replica).serve(coming, summary)
    assert (summary.finished.total(), len(summary.ttft)) == (3, 3)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 400))
@settings(max_examples=80)
def test_a_search_ends_at_the_fewest_from_any_guess(enough: int, guess: int, most: int) -> None:
    search = Search(instance(on_h100(), 1, 1), CHAT, most)

    class Simulated(dict):  # type: ignore[type-arg]
        def __contains__(self, _: object) -> bool:
            return True

        def __getitem__(self, replicas: int) -> Trial:
            return Trial(replicas, 1.0, 1.0 if replicas >= enough else 0.5, {})

    search.known = Simulated()
    assert search.fewest(guess) == (enough if enough <= most else None)


def test_a_longer_run_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three seem enough in a short run; their queue grows, and a long one shows it. Four it is."""

    def served(replica: Instance, goal: Goal, replicas: int, length: int = 1) -> Trial:
        return Trial(replicas, goal.rate / replicas, float(replicas >= (4 if length > 1 else 3)), {})

    monkeypatch.setattr(traffic, "load", served)
    search = Search(instance(on_h100(), 1, 1), CHAT, 10)
    assert search.fewest(1) == 3
    assert search.confirm(3).replicas == 4
    assert not search.keeps(3)
    short_of = replace(search, most=3, known={})
    assert short_of.confirm(3).kept == 0.0


def test_without_a_promise_no_queue_may_grow_without_end(planned: dict[str, Any]) -> None:
    replica = instance(on_h100(), 1, 1)
    free = replace(CHAT, ttft=None, tpot=None)
    assert judged(replica, free).ttft == pytest.approx(replica.e2e(free))
    assert judged(replica, replace(free, output_tokens=1)).ttft == pytest.approx(10 * replica.ttft(free))
    assert judged(replica, CHAT) == CHAT
    found = planned["free"]
    assert found["alone"] < 0.99
    assert found["planned"]["replicas"] == 2
    assert any("No TTFT was promised" in note for note in found["notes"])


# --- plans ---


def test_a_plan_keeps_its_promises_and_one_replica_less_does_not(planned: dict[str, Any]) -> None:
    found = planned["chat"]
    served, less = found["planned"], found["one_less"]
    assert found["reaches"]
    assert served["ttft_s"]["p99"] <= 0.5
    assert served["tpot_s"]["p99"] <= 0.02
    assert (less["replicas"], served["replicas"]) == (2, 3)
    assert less["kept"] < 0.99 <= served["kept"]
    assert found["verdict"] == "3 cards (3 replicas of 1 card) serve 100 requests/s; 100.0% keep the promises."
    assert found["said"][0] == "simulating 3 replicas in steps of 8192 tokens"
    assert found["again"] == pytest.approx(1)  # three replicas that are all simulated


def test_the_group_of_cards_with_the_fewest_cards_in_all_is_taken(planned: dict[str, Any]) -> None:
    """Llama-3.1-70B fits two cards, but only 16 requests beside it: 7 such pairs serve what 2 groups of four do."""
    found = planned["seventy"]
    assert (found["replica"]["tensor_parallel"], found["planned"]["cards"]) == (4, 8)
    goal = Goal(prompt_tokens=1000, output_tokens=200, rate=20, ttft=1, tpot=0.05)
    assert fitting(on_h100("llama-3.1-70b"), goal)[0].tensor_parallel == 2


def test_a_model_larger_than_a_machine_gets_a_pipeline(planned: dict[str, Any]) -> None:
    """Two stages have two batches under way: each has half the pool and half the places."""
    found = planned["pipeline"]
    replica = found["replica"]
    assert (replica["tensor_parallel"], replica["pipeline_parallel"], found["planned"]["cards"]) == (8, 2, 16)
    assert found["lane"] == [replica["kv_pool"]["blocks"] // 2, found["seqs"] // 2]
    assert found["disaggregated"] is None


def test_what_does_not_fit_comes_with_changes_that_do() -> None:
    """Each remedy is tried: the plan with it fits."""
    goal = Goal(prompt_tokens=1000, output_tokens=200, rate=1)
    found = plan(on_h100("llama-3-70b", gpus=1), goal)
    assert not found.fits
    assert found.load is None
    assert "weights take 141.1 GB" in found.problems[0]
    changes = {remedy.change for remedy in found.remedies}
    assert changes == {"--weights fp8", "--weights int4", "--weights fp8 --kv-dtype fp8", "--gpus 2"}
    for remedy in found.remedies:
        words = remedy.change.replace("--", "").replace("kv-dtype", "kv").split()
        options = dict(zip(words[::2], words[1::2], strict=True))
        changed = {name: int(value) if name == "gpus" else value for name, value in options.items()}
        assert fitting(on_h100("llama-3-70b", **{"gpus": 1, **changed}), goal), remedy
    assert not fitting(on_h100("llama-3-70b", gpus=1, kv="fp8"), goal)


def test_a_promise_below_the_floor_names_the_part_and_the_nearest() -> None:
    asked = Deployment(model="llama-3-8b", hardware="l4", gpus=1)
    goal = Goal(prompt_tokens=1000, output_tokens=200, rate=2, ttft=0.1, tpot=0.02)
    found = plan(asked, goal)
    assert found.fits
    assert not found.reaches
    assert found.replica is not None
    prefill, weights = found.problems
    assert "prefill alone takes 0.121 s on 1 card, and a TTFT of 0.1 s is promised" in prefill
    assert "reading the weights alone takes 0.05 s on 1 card, and a TPOT of 0.02 s is promised" in weights
    assert f"above {found.replica.ttft(goal):.3g} s" in prefill
    assert f"above {found.replica.tpot(goal):.3g} s" in weights
    (remedy,) = found.remedies
    assert remedy.change == "--gpus 4"
    helped = instance(replace(asked, gpus=4), 4, 1)
    assert helped.ttft(goal) <= 0.1
    assert helped.tpot(goal) <= 0.02
    with pytest.raises(ConfigError, match="there is nothing to start: prefill alone takes"):
        found.emit("vllm")


def test_a_step_that_is_too_long_only_with_its_cache() -> None:
    """The weights are read in time, the cache of a long prompt is what takes too long."""
    goal = Goal(prompt_tokens=100_000, output_tokens=10, rate=0.1, tpot=0.0046)
    found = plan(on_h100(gpus=1), goal)
    assert "one step takes 0.00" in found.problems[0]


def test_too_few_cards_serve_a_part_of_the_rate(planned: dict[str, Any]) -> None:
    found = planned["few"]
    assert found["fits"]
    assert not found["reaches"]
    assert 0 < found["reachable_rate"] < 1000
    at, above = found["kept"]
    assert at >= 0.99 > above
    assert f"they serve {found['reachable_rate']:.3g} of 1000 requests/s" in found["verdict"]
    cards = int(found["remedies"][-1]["change"].removeprefix("--gpus "))
    assert 0.8 * cards < 1000 / found["reachable_rate"] < 1.5 * cards


def test_half_the_peaks_take_twice_the_time() -> None:
    whole, half = (instance(on_h100(efficiency=share), 1, 1) for share in (1.0, 0.5))
    assert half.ttft(CHAT) == pytest.approx(2 * whole.ttft(CHAT))
    assert half.tpot(CHAT) == pytest.approx(2 * whole.tpot(CHAT))
    assert half.weights_read_s == pytest.approx(2 * whole.weights_read_s)
    assert half.ledger == whole.ledger
    notes = [next(CapacityPlan(deployment=each.deployment, goal=CHAT).notes()) for each in (half, whole)]
    assert notes[0].startswith("Times are estimates: 0.5 of the peaks")
    assert notes[1].startswith("Times are limits: the peaks of NVIDIA H100 SXM")


def test_two_pools_pay_where_prompts_disturb_a_tight_tpot(planned: dict[str, Any]) -> None:
    found = planned["pools"]
    split = found["disaggregated"]
    assert split["pays"]
    assert split["prefill"] + split["decode"] == found["planned"]["replicas"] - 1
    assert split["kept"] >= 0.99 > split["together"]
    assert not planned["chat"]["disaggregated"]["pays"]


@pytest.mark.parametrize(("kept", "together", "pays"), [(0.995, 0.9, True), (0.98, 0.5, False), (1.0, 0.99, False)])
def test_two_pools_pay_only_where_they_keep_what_others_break(kept: float, together: float, pays: bool) -> None:
    assert Split(1, 2, kept, together, 3).pays(0.99) is pays


def test_a_price(planned: dict[str, Any]) -> None:
    """Three cards at 3.60 an hour are 0.003 a second; 100 requests of 200 tokens are 20,000 tokens."""
    assert planned["chat"]["cost_per_million_output_tokens"] == pytest.approx(0.003 / 20_000 * 1e6)
    assert planned["free"]["cost_per_million_output_tokens"] is None


def test_models_of_every_kind_can_be_planned(planned: dict[str, Any]) -> None:
    assert all(found["reaches"] for found in planned["kinds"])
    assert len(planned["kinds"]) == 5
    assert any("no bfloat16: float16" in note for note in planned["kinds"][-1]["notes"])
    assert any("Layers with a window count" in note for note in planned["kinds"][2]["notes"])


@pytest.mark.parametrize(
    ("asked", "goal", "message"),
    [
        ({"model": "lama-3-8b"}, {}, "lama-3-8b"),
        ({"hardware": "h100"}, {}, "no hardware is called 'h100'; the nearest are h100-"),
        ({"gpus": 0}, {}, "gpus is 0; it must be 1 or more"),
        ({"gpus_per_node": 0}, {}, "gpus_per_node is 0"),
        ({"utilization": 1.2}, {}, "utilization is 1.2; it must be above 0 and at most 1"),
        ({"efficiency": 0.0}, {}, "efficiency is 0.0"),
        ({"weights": "int3"}, {}, "no storage format is called 'int3'"),
        ({"weights": "q4_0"}, {}, "vLLM 0.32 has no q4_0 for weights; choose one of bfloat16"),
        ({"kv": "q8_0"}, {}, "vLLM 0.32 has no q8_0 for a KV cache"),
        ({"max_model_len": 200_000}, {}, "max_model_len is 200000; llama-3.1-8b has a context of 131072"),
        ({"max_model_len": 1000}, {}, "are 1200, and max_model_len is 1000"),
        ({"price_per_hour": -1.0}, {}, "price_per_hour is -1.0"),
        ({}, {"rate": 0.0}, "rate is 0.0 requests per second; it must be above 0"),
        ({}, {"rate": float("nan")}, "rate is nan"),
        ({}, {"prompt_tokens": 0}, "prompt_tokens is 0"),
        ({}, {"output_tokens": -1}, "output_tokens is -1"),
        ({}, {"ttft": -0.5}, "the promised TTFT is -0.5 s; it must be above 0"),
        ({}, {"tpot": 0.0}, "the promised TPOT is 0.0 s"),
        ({}, {"attainment": 1.5}, "attainment is 1.5"),
        ({}, {"prompt_tokens": 131_072}, "131272, and llama-3.1-8b has a context of 131072"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(asked: dict[str, object], goal: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(
            Deployment(**{"model": "llama-3.1-8b", "hardware": "h100-sxm", **asked}),  # type: ignore[arg-type]
            Goal(**{"prompt_tokens": 1000, "output_tokens": 200, "rate": 1.0, **goal}),  # type: ignore[arg-type]
        )
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_more_efficiency_or_fewer_tokens_never_need_more_cards() -> None:
    """By even arrivals, over a grid: less work, no more cards."""

    def rate(tokens: int, efficiency: float) -> float:
        goal = Goal(prompt_tokens=tokens, output_tokens=tokens // 4, rate=1, tpot=0.05)
        return instance(on_h100(efficiency=efficiency), 1, 1).fluid_rate(goal)

    rates = {(tokens, share): rate(tokens, share) for tokens, share in product((400, 1600, 6400), (0.4, 0.7, 1.0))}
    for (tokens, share), found in rates.items():
        assert all(other <= found for (more, less), other in rates.items() if more >= tokens and less <= share)
