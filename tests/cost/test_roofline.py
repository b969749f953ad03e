"""The roofline: what operators do and move, what a pass takes at the peaks, and with curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.config import MLA, ModelConfig, MoE
from kvlab.cost import (
    Calibration,
    Curve,
    Format,
    Hardware,
    Kernels,
    Operator,
    Row,
    Timed,
    cache_bytes_read,
    chunks,
    critical_batch,
    decode_pass,
    flops,
    hardware_of,
    mbu,
    mfu,
    operators,
    parameters,
    pass_time,
    prefill_pass,
    step_bytes,
    weight_bytes,
    weight_bytes_read,
    weight_read_seconds,
)
from kvlab.errors import ConfigError
from toys import small_config

#: A data sheet on which a figure is its number of bytes or of operations.
SHEET = Hardware("sheet", "A sheet", "imagined", 2**30, 1.0, {"float16": 1.0, "float32": 1.0}, "a test")


def milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 1)


# What practitioners and the statements say, on real cards.


def test_step_time_creeps_up_with_the_length() -> None:
    """Statement 19: Llama-2-7B in bfloat16 on an A100-80."""
    times = [step_bytes("llama-2-7b", n) / hardware_of("a100-80gb").bandwidth for n in (128, 4096, 32_768)]
    assert [milliseconds(t) for t in times] == [6.5, 7.5, 14.9]


@pytest.mark.parametrize(("card", "tokens"), [("a100-80gb", 153), ("h100-sxm", 295), ("l4", 403), ("rtx-4090", 164)])
def test_ridge_in_tokens(card: str, tokens: int) -> None:
    """Statement 23, B33: so a batch of 4 on a 4090 is not bound by arithmetic (club-3090 697)."""
    assert round(critical_batch(card, "float16")) == tokens


def test_a_prompt_shorter_than_the_ridge_is_bound_by_bandwidth() -> None:
    """Statement 23: and a batch of steps beyond it by arithmetic."""
    bounds = {}
    for name, rows in {"short": prefill_pass(64), "long": prefill_pass(512), "steps": decode_pass(0, 512)}.items():
        timed = pass_time("llama-2-7b", rows, "a100-80gb").operators
        bounds[name] = {t.bound for t in timed if t.operator.part == "linear"}
    assert bounds == {"short": {"bandwidth"}, "long": {"compute"}, "steps": {"compute"}}


def test_a_step_reads_all_weights_too() -> None:
    """Statement 24: Llama-2-7B at 4K, 13.2 GB of weights and 2.1 GB of KV."""
    weights, cache = weight_bytes_read("llama-2-7b"), cache_bytes_read("llama-2-7b", decode_pass(4095))
    assert (round(weights / 1e9, 1), round(cache / 1e9, 1)) == (13.2, 2.1)
    assert step_bytes("llama-2-7b", 4095) == weights + cache
    assert cache == 4096 * 524_288


def test_cost_of_a_step_grows_by_16_percent_over_4096_tokens() -> None:
    """ggllm.cpp 6: a + b t, and b x 4096 / a is 16 % for a 7B with as many KV heads as heads."""
    first, last = (step_bytes("llama-2-7b", n) for n in (0, 4096))
    assert round(last / first - 1, 2) == 0.16


def test_floor_of_a_step() -> None:
    """Statement 63: 13.5 GB on an A100-80, 6.6 ms with the embedding, of which one row is read."""
    assert milliseconds(weight_bytes("llama-2-7b") / 2039e9) == 6.6
    assert milliseconds(weight_read_seconds("llama-2-7b", "a100-80gb")) == 6.5


@pytest.mark.parametrize(("card", "floor"), [("a100-80gb", 12.8), ("rtx-3090", 27.8)])
def test_first_token_takes_60_ms_even_for_8_tokens(card: str, floor: float) -> None:
    """vllm 770: a 13B in float16 is read once, for 1 token, for 8, for 30; the rest was the host."""
    assert milliseconds(weight_bytes("llama-2-13b") / hardware_of(card).bandwidth) == floor
    times = [pass_time("llama-2-13b", prefill_pass(n), card, "float16").seconds for n in (1, 8, 30)]
    assert times == pytest.approx([weight_read_seconds("llama-2-13b", card)] * 3, rel=0.02)
    assert pass_time("llama-2-13b", prefill_pass(2048), card, "float16").seconds > 8 * times[0]


def test_tpot_rises_with_the_batch_and_so_does_throughput() -> None:
    """vllm 17598: each stream slower, all together faster."""
    batches = (1, 4, 16, 64, 256)
    steps = [pass_time("llama-3-8b", decode_pass(1000, b), "h100-sxm").seconds for b in batches]
    total = [b / step for b, step in zip(batches, steps, strict=True)]
    assert steps == sorted(steps)
    assert total == sorted(total)
    assert steps[0] < steps[-1] < 256 * steps[0]


def test_throughput_levels_off() -> None:
    """vllm 5567: 55 tok/s at 1 and 1,275 at 256 is 23 times, 9 % of linear. Reading caches alone forbids linear."""
    assert round(1275 / 55.2) == 23
    assert round(1275 / 55.2 / 256, 2) == 0.09
    one, many = (pass_time("llama-2-7b", decode_pass(1000, b), "a100-80gb").seconds for b in (1, 256))
    assert 256 * one / many < 0.5 * 256


@pytest.mark.parametrize(
    ("bandwidth", "nbytes", "speed"),
    [(40e9, 32e9, 1.25), (hardware_of("server-cpu-epyc").bandwidth, weight_bytes("llama-3.1-70b"), 5.81)],
)
def test_under_10_tokens_a_second_on_a_cpu_is_no_bug(bandwidth: float, nbytes: float, speed: float) -> None:
    """vllm 7379, llama.cpp 11744: bandwidth over the bytes of the weights. 4.31 were measured of 5.81."""
    assert round(bandwidth / nbytes, 2) == speed
    assert round(4.31 / 5.81, 2) == 0.74


@pytest.mark.parametrize(("card", "percent"), [("a100-80gb", 0.65), ("h100-sxm", 0.34)])
def test_full_utilisation_at_a_fraction_of_the_peak(card: str, percent: float) -> None:
    """ollama 8850: at batch 1 the utilisation of arithmetic is one over the ridge."""
    step = decode_pass(0)
    seconds = weight_read_seconds("llama-2-7b", card)
    assert round(100 * mfu("llama-2-7b", step, seconds, card), 2) == percent
    assert mbu("llama-2-7b", step, seconds, card) == pytest.approx(1, rel=1e-4)
    assert mbu("llama-2-7b", step, 2 * seconds, card) == pytest.approx(0.5, rel=1e-4)


def test_int4_weights_reach_the_ridge_at_a_quarter_of_the_batch() -> None:
    """AutoAWQ 106, 645: about 38 on an A100-80 with 16-bit arithmetic. Past the ridge narrow weights win nothing."""
    assert round(critical_batch("a100-80gb", weights=Format(4))) == 38
    assert critical_batch("a100-80gb", weights="int4") == pytest.approx(153 * 0.53125 / 2, rel=1e-3)
    assert round(hardware_of("a100-40gb").bandwidth / 10.57e9) == 147
    seconds = {
        (weights, batch): pass_time("llama-3-8b", decode_pass(0, batch), "a100-80gb", weights=weights).seconds
        for weights in ("bfloat16", "int4")
        for batch in (1, 512)
    }
    assert seconds["bfloat16", 1] / seconds["int4", 1] > 3.5
    assert seconds["bfloat16", 512] / seconds["int4", 512] == pytest.approx(1, rel=0.02)


def test_more_bandwidth_helps_decode_and_not_prefill() -> None:
    """Statement 88: an H200 is an H100 with 1.43 times the bandwidth."""
    long, step = prefill_pass(4096), decode_pass(4096)
    prefill = [pass_time("llama-3-8b", long, card).seconds for card in ("h100-sxm", "h200-sxm")]
    decode = [pass_time("llama-3-8b", step, card).seconds for card in ("h100-sxm", "h200-sxm")]
    assert prefill[0] == pytest.approx(prefill[1], rel=0.01)
    assert decode[0] / decode[1] == pytest.approx(4800 / 3350, rel=0.01)


def test_chunks_read_the_weights_once_each() -> None:
    """B31: weight passes are the number of chunks; the time grows although no operation is added."""
    pieces = chunks(8192, 512)
    whole = pass_time("llama-3-8b", prefill_pass(8192), "h100-sxm").seconds
    split = sum(pass_time("llama-3-8b", [row], "h100-sxm").seconds for row in pieces)
    assert len(pieces) == 16
    assert whole < split < 1.5 * whole


def test_int8_weights_leave_the_cache_in_16_bits() -> None:
    """B1 once more: a format of the weights is none of the cache."""
    for weights in ("int8", "int4", "fp8"):
        cache = step_bytes("llama-3-8b", 1000, 4, weights) - weight_bytes_read("llama-3-8b", weights, 4)
        assert cache == 4 * 1001 * 131_072
    assert step_bytes("llama-3-8b", 1000, 4, "int8", "fp8") == weight_bytes_read("llama-3-8b", "int8", 4) + (
        4 * 1001 * 65_536
    )
    assert step_bytes("llama-3-8b", 9, weights="float32") == weight_bytes_read("llama-3-8b", "float32") + 10 * 262_144
    narrow, wide = (mbu("llama-3-8b", decode_pass(1000), 1.0, "t4", w) for w in ("int8", "bfloat16"))
    fewer = weight_bytes_read("llama-3-8b") - weight_bytes_read("llama-3-8b", "int8")
    assert (wide - narrow) * 320e9 == pytest.approx(fewer)


# What operators do and move.


def by_name(found: Sequence[Operator]) -> dict[str, Operator]:
    return {operator.name: operator for operator in found}


def test_operators_of_a_small_decoder_by_hand() -> None:
    """Two layers; 6 query and 2 KV heads of 8; hidden 24, MLP 40, vocabulary 61. Three tokens after four, float16."""
    found = by_name(operators(small_config(windows=(None, 5)), [Row(3, 4)], "float16"))
    want = {
        "qkv": (2, 2 * 2 * 3 * 24 * 80, 2 * (24 * 80 * 2 + 3 * (24 + 80) * 2)),
        "out": (2, 2 * 2 * 3 * 48 * 24, 2 * (48 * 24 * 2 + 3 * (48 + 24) * 2)),
        "gate_up": (2, 2 * 2 * 3 * 24 * 80, 2 * (24 * 80 * 2 + 3 * (24 + 80) * 2)),
        "down": (2, 2 * 2 * 3 * 40 * 24, 2 * (40 * 24 * 2 + 3 * (40 + 24) * 2)),
        "attention": (1, 4 * 48 * (5 + 6 + 7), 7 * 32 * 2 + 3 * 2 * 48 * 2),
        "attention(5)": (1, 4 * 48 * (5 + 5 + 5), 7 * 32 * 2 + 3 * 2 * 48 * 2),
        "head": (1, 2 * 61 * 24, 61 * 24 * 2 + (24 + 61) * 2),
    }
    for name, figures in want.items():
        operator = found[name]
        assert (operator.calls, operator.flops, operator.bytes) == figures, name
    assert found["attention"].keys == found["attention(5)"].keys == 7
    assert found["qkv"].rows == 3
    assert found["qkv"].intensity == found["qkv"].flops / found["qkv"].bytes


def test_a_windowed_step_reads_its_window() -> None:
    config = small_config(windows=(None, 5))
    assert cache_bytes_read(config, decode_pass(99)) == (100 + 5) * 32 * 2
    assert cache_bytes_read(config, [Row(3, 99)]) == (102 + 7) * 32 * 2
    assert cache_bytes_read(config, [Row(3, 1)]) == (4 + 4) * 32 * 2


def test_a_pass_without_logits_has_no_head() -> None:
    found = operators("llama-3-8b", [Row(8, 0, 0)])
    assert all(operator.part != "head" and operator.bytes > 0 for operator in found)


@pytest.mark.parametrize(
    ("tied", "weights", "each"), [(True, "fp8", 2), (False, "fp8", 1), (True, "float32", 4), (False, "float32", 4)]
)
def test_a_tied_head_has_the_format_of_the_embedding(tied: bool, weights: str, each: int) -> None:
    config = small_config(tie_embeddings=tied)
    head = by_name(operators(config, [Row(1)], "float16", weights=weights))["head"]
    assert head.bytes == 61 * 24 * each + (24 + 61) * 2


LATENT = MLA(kv_lora_rank=16, rope_head_dim=4, v_head_dim=8, q_lora_rank=12)
EXPERTS = MoE(n_experts=8, experts_per_token=2, intermediate_size=16, n_shared_experts=1, n_dense_layers=1)


def test_projections_of_latent_attention_by_hand() -> None:
    """Activations once in and once out of each matrix, not once a weight."""
    found = by_name(operators(small_config(mla=LATENT), [Row(5)], "float16"))
    shapes = {"q_down": (24, 12), "q_up": (12, 48), "kv_down": (24, 20), "kv_up": (16, 6 * (4 + 8)), "out": (48, 24)}
    for name, (inputs, outputs) in shapes.items():
        assert found[name].bytes == 2 * (inputs * outputs * 2 + 5 * (inputs + outputs) * 2), name
    direct = by_name(operators(small_config(mla=replace(LATENT, q_lora_rank=None)), [Row(5)]))
    assert "q_down" not in direct
    assert direct["q"].flops == 2 * 2 * 5 * 24 * 48


def test_each_touched_expert_sees_its_share_of_the_tokens() -> None:
    found = by_name(operators("mixtral-8x7b-v0.1", decode_pass(0, 1)))["experts"]
    assert found.rows == 1
    assert by_name(operators("mixtral-8x7b-v0.1", decode_pass(0, 800)))["experts"].rows == pytest.approx(200)
    assert found.bytes == pytest.approx(32 * (2 * 3 * 4096 * 14_336 + 8 * 4096) * 2, rel=1e-3)


@st.composite
def shapes(draw: st.DrawFn) -> ModelConfig:
    """Any of the kinds of block that are counted."""
    n_layer = draw(st.integers(1, 4))
    mla = draw(st.sampled_from([None, None, LATENT]))
    windows = (None,) if mla else (None, None, 1, 3, 9)
    changes: dict[str, Any] = {
        "n_layer": n_layer,
        "n_kv_head": 6 if mla else draw(st.sampled_from([1, 2, 3, 6])),
        "windows": tuple(draw(st.lists(st.sampled_from(windows), min_size=n_layer, max_size=n_layer))),
        "tie_embeddings": draw(st.booleans()),
        "position": draw(st.sampled_from(["rope", "learned"])),
        "gated_mlp": draw(st.booleans()),
        "mla": mla,
        **{name: draw(st.booleans()) for name in ("qkv_bias", "out_bias", "mlp_bias", "qk_norm")},
    }
    if draw(st.booleans()):
        dense = draw(st.integers(0, n_layer - 1))
        changes |= {"gated_mlp": True, "mlp_bias": False, "moe": replace(EXPERTS, n_dense_layers=dense)}
    return small_config(**changes)


passes = st.lists(
    st.builds(lambda new, past, logits: Row(new, past, min(logits, new)), *[st.integers(n, 40) for n in (1, 0, 0)]),
    min_size=1,
    max_size=4,
)


@given(shapes(), passes)
def test_operators_add_up(config: ModelConfig, rows: list[Row]) -> None:
    """FLOPs to flops(); matrices to weight_bytes_read(); keys and values to cache_bytes_read()."""
    found, total = operators(config, rows), flops(config, rows)
    for part in ("linear", "attention", "head"):
        assert sum(o.flops for o in found if o.part == part) == pytest.approx(getattr(total, part))

    def extra(**formats: str) -> float:
        """Bytes that two more an element add: twice the elements that have this format."""
        return sum(o.bytes for o in operators(config, rows, **formats)) - sum(o.bytes for o in found)

    assert extra(kv="float32") == pytest.approx(cache_bytes_read(config, rows))
    if any(row.logits for row in rows):
        tokens = sum(row.new for row in rows)
        looked_up = 0 if config.tie_embeddings else min(tokens, config.vocab_size)
        looked_up += min(tokens, config.max_seq_len) if config.position == "learned" else 0
        beside = parameters(config).vectors + looked_up * config.hidden_size
        assert extra(weights="float32") == pytest.approx(weight_bytes_read(config, tokens=tokens) - 2 * beside, abs=1)


# Time.


@given(shapes(), passes)
def test_a_pass_at_the_peak_is_the_sum_of_its_slower_sides(config: ModelConfig, rows: list[Row]) -> None:
    timed = pass_time(config, rows, SHEET, "float16")
    found = [o for o in operators(config, rows, "float16") if o.part != "elementwise"]
    assert timed.seconds == pytest.approx(sum(max(o.flops, o.bytes) for o in found))
    assert timed.seconds >= flops(config, rows).total
    assert sum(timed.share(part) for part in ("linear", "attention", "head", "elementwise", "overhead")) == (
        pytest.approx(1)
    )
    assert timed.share("overhead") == 0


@pytest.mark.parametrize(
    ("seconds", "bound"), [((3.0, 2.0, 1.0), "compute"), ((1.0, 3.0, 2.0), "bandwidth"), ((1.0, 2.0, 3.0), "launch")]
)
def test_what_an_operator_is_bound_by(seconds: tuple[float, float, float], bound: str) -> None:
    operator = operators("llama-3-8b", [Row(1)])[0]
    assert Timed(operator, *seconds).bound == bound


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("llama-3-8b", [], "h100-sxm"), "a pass has no rows"),
        (("llama-3-8b", [Row(1)], "h100"), "no hardware is called 'h100'; the nearest are h100-sxm"),
        (("llama-9-8b", [Row(1)], "h100-sxm"), "no preset is called 'llama-9-8b'"),
        (("llama-3-8b", [Row(1)], "t4"), "no bfloat16 peak of t4 is known"),
        (("llama-3-8b", [Row(1)], "h100-sxm", "int3"), "no storage format is called 'int3'"),
    ],
)
def test_passes_that_cannot_be_timed_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pass_time(*arguments)


def test_groups_that_do_not_divide_are_refused_wherever_a_format_is_given() -> None:
    config = small_config()
    for call in (
        lambda: operators(config, [Row(1)], weights="int8"),
        lambda: operators(config, [Row(1)], kv="q8_0"),
        lambda: cache_bytes_read(config, [Row(1)], "q8_0"),
        lambda: step_bytes(config, 1, kv="q8_0"),
        lambda: mbu(config, [Row(1)], 1.0, SHEET, kv="q8_0"),
    ):
        with pytest.raises(ConfigError, match=r"groups of (128|32) do not divide (hidden_size|head_dim)"):
            call()
    with pytest.raises(ConfigError, match="a pass has no rows"):
        mbu(config, [], 1.0, SHEET)


def calibrated(asynchronous: bool, launch: float = 1e-3, outside: float = 0.5) -> Hardware:
    """A device on which every curve is level: 1,000 operations and 100 bytes a second."""
    level, bytes_a_second = Curve((1.0,), (1000.0,)), Curve((1.0,), (100.0,))
    kinds = ("norm", "rotate", "copy", "activation", "add")
    kernels = Kernels(
        linear=((1.0, level),),
        prefill_attention=level,
        decode_attention=bytes_a_second,
        elementwise=dict.fromkeys(kinds, bytes_a_second),
        launch_s=launch,
        pass_s=outside,
    )
    found = Calibration({"float32": kernels}, Curve((1.0,), (1e12,)), asynchronous, noise=0.0)
    return Hardware("level", "Level", "test", 2**30, 100.0, {"float32": 1000.0}, "a test", calibration=found)


def test_host_time_adds_up_on_a_cpu_and_hides_on_a_gpu() -> None:
    config, rows = small_config(), prefill_pass(5)
    found = operators(config, rows, "float32")
    kernels = sum(op.flops / 1000 if op.flops else op.bytes / 100 for op in found)
    host = 0.5 + 1e-3 * sum(op.calls * op.launches for op in found)
    assert pass_time(config, rows, calibrated(asynchronous=False), "float32").seconds == pytest.approx(kernels + host)
    assert pass_time(config, rows, calibrated(asynchronous=True), "float32").seconds == pytest.approx(kernels)
    slow_host = calibrated(asynchronous=True, outside=2 * kernels)
    assert pass_time(config, rows, slow_host, "float32").seconds == pytest.approx(2 * kernels + host - 0.5)


def test_the_shares_of_a_pass_add_up_to_one() -> None:
    for asynchronous in (False, True):
        found = pass_time(small_config(), decode_pass(5, 2), calibrated(asynchronous), "float32")
        parts = ("linear", "attention", "head", "elementwise", "overhead")
        assert sum(found.share(part) for part in parts) == pytest.approx(1)  # type: ignore[arg-type]


def test_in_a_mixed_pass_prompts_and_steps_run_their_own_kernels() -> None:
    """A step reads its cache at the rate of a step, whatever prompt is beside it."""
    config, device = small_config(windows=(4, None)), calibrated(asynchronous=False)

    def attention(rows: Sequence[Row]) -> float:
        return sum(
            timed.kernel_s
            for timed in pass_time(config, rows, device, "float32").operators
            if timed.operator.part == "attention"
        )

    prompts, steps = [Row(7, 2), Row(3)], [Row(1, 9), Row(1, 20)]
    assert attention(prompts + steps) == pytest.approx(attention(prompts) + attention(steps))


def test_a_dtype_that_was_not_calibrated_is_refused() -> None:
    with pytest.raises(ConfigError, match="calibrated for float32, not for bfloat16"):
        pass_time(small_config(), decode_pass(1), calibrated(asynchronous=False))
