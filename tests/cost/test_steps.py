"""Step times for a simulator: those of a whole pass, for a fraction of the work."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.config import MLA, ModelConfig, MoE
from kvlab.cost import (
    Calibration,
    Curve,
    Hardware,
    Kernels,
    Row,
    StepTimes,
    decode_pass,
    hardware_of,
    kv_bytes,
    pass_time,
    transfer_seconds,
)
from kvlab.errors import ConfigError
from kvlab.resources import resource
from toys import small_config


def bent(asynchronous: bool) -> Hardware:
    """A device on which no curve is level, and where host and kernels take about as long as each other."""
    x = (1.0, 64.0, 4096.0, 1e7)
    kernels = Kernels(
        linear=((1e3, Curve(x, (1e9, 5e9, 9e9, 8e9))), (1e6, Curve(x, (3e8, 2e9, 7e9, 8e9)))),
        prefill_attention=Curve(x, (1e8, 4e8, 3e9, 2e9)),
        decode_attention=Curve(x, (1e7, 2e8, 5e9, 3e9)),
        elementwise={
            kind: Curve(x, (1e7 * n, 1e8 * n, 1e9, 2e9))
            for n, kind in enumerate(("norm", "rotate", "copy", "activation", "add"), 1)
        },
        launch_s=1e-6,
        pass_s=2e-5,
    )
    found = Calibration({"bfloat16": kernels}, Curve(x, (1e10, 9e9, 5e9, 1e9)), asynchronous, noise=0.0)
    return Hardware("bent", "Bent", "test", 2**30, 1e9, {"bfloat16": 1e10}, "a test", calibration=found)


def this_cpu() -> Hardware:
    return Hardware.from_json(json.loads(resource("results", "cpu-2-threads.json").read_text("utf8"))["hardware"])


LATENT = MLA(kv_lora_rank=16, rope_head_dim=4, v_head_dim=8, q_lora_rank=12)
EXPERTS = MoE(n_experts=8, experts_per_token=2, intermediate_size=16, n_shared_experts=1, n_dense_layers=1)
MODELS: list[str | ModelConfig] = [
    "gpt-2-small", "llama-2-7b", "llama-3-8b", "mistral-7b-v0.1", "gemma-3-1b", "mixtral-8x7b-v0.1", "deepseek-v2",
    small_config(windows=(3, None)), small_config(n_layer=3, windows=(1, 9, 9), moe=EXPERTS),
    small_config(n_kv_head=6, mla=LATENT),
]  # fmt: skip
DEVICES = [hardware_of("h100-sxm"), hardware_of("l4"), bent(False), bent(True), this_cpu()]
#: Step times are made once: what they keep from one case must not change the next.
TIMES = {(m, d): StepTimes(model, device) for m, model in enumerate(MODELS) for d, device in enumerate(DEVICES)}

prompts = st.lists(
    st.builds(
        lambda new, past, logits: Row(new, past, min(logits, new)),
        st.one_of(st.integers(1, 3), st.integers(1, 3000)),
        st.one_of(st.integers(0, 3), st.integers(0, 9000)),
        st.integers(0, 6),
    ),
    max_size=4,
)
pairs = st.sampled_from(sorted(TIMES))


def even(decodes: int, held: int) -> list[Row]:
    """Decode rows as equal as whole tokens allow, one by one."""
    return [Row(1, held // decodes + (row < held % decodes)) for row in range(decodes)]


@settings(max_examples=400)
@given(pairs, st.integers(0, 40), st.one_of(st.integers(0, 60), st.integers(0, 200_000)), prompts)
def test_a_step_takes_what_its_pass_takes(pair: tuple[int, int], decodes: int, held: int, rows: list[Row]) -> None:
    held = held if decodes else 0
    decodes = decodes or int(not rows)
    expected = pass_time(MODELS[pair[0]], even(decodes, held) + rows if decodes else rows, DEVICES[pair[1]])
    assert TIMES[pair].seconds(decodes, held, rows) == pytest.approx(expected.seconds, rel=1e-9, abs=0)


@given(
    st.sampled_from(sorted(pair for pair in TIMES if MODELS[pair[0]] in ("gpt-2-small", "llama-3-8b"))),
    st.lists(st.integers(0, 9000), min_size=1, max_size=20),
    prompts,
)
def test_where_all_is_seen_only_the_sum_of_the_lengths_counts(
    pair: tuple[int, int], lengths: list[int], rows: list[Row]
) -> None:
    uneven = pass_time(MODELS[pair[0]], [Row(1, past) for past in lengths] + rows, DEVICES[pair[1]]).seconds
    assert TIMES[pair].seconds(len(lengths), sum(lengths), rows) == pytest.approx(uneven, rel=1e-9, abs=0)


@given(st.sampled_from(range(len(MODELS))), st.lists(st.integers(0, 9000), min_size=1, max_size=20))
def test_uneven_rows_take_no_longer(model: int, lengths: list[int]) -> None:
    """Windows and latents: rows of equal length read the most. At the peaks, less work is less time."""
    uneven = pass_time(MODELS[model], [Row(1, past) for past in lengths], DEVICES[0]).seconds
    assert TIMES[model, 0].seconds(len(lengths), sum(lengths)) >= uneven * (1 - 1e-9)


def test_uneven_rows_read_less_than_a_window_each() -> None:
    """A cache of 8,000 and one of 0 beside each other: Mistral's window of 4,096 lets the first read half."""
    even_s = StepTimes("mistral-7b-v0.1", "h100-sxm").seconds(2, 8000)
    assert even_s == pass_time("mistral-7b-v0.1", decode_pass(4000, 2), "h100-sxm").seconds
    assert even_s > pass_time("mistral-7b-v0.1", [Row(1, 8000), Row(1, 0)], "h100-sxm").seconds


def test_formats_and_dtypes_are_those_of_the_pass() -> None:
    rows = [Row(300, 20), Row(1, 7, 0), Row(5, 900, 5)]
    for formats in ({}, {"weights": "int4"}, {"kv": "fp8"}, {"weights": "fp8", "kv": "q8_0"}):
        settings: dict[str, Any] = {"dtype": "float16", **formats}
        expected = pass_time("llama-3-8b", [*decode_pass(1000, 8), *rows], "a100-80gb", **settings).seconds
        found = StepTimes("llama-3-8b", "a100-80gb", **settings).seconds(8, 8000, rows)
        assert found == pytest.approx(expected, rel=1e-12)


def test_operators_are_built_once_for_a_number_of_tokens_and_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    times = StepTimes("smollm2-135m", "h100-sxm")
    monkeypatch.setattr("kvlab.cost.roofline.operators", lambda *a, **k: built.append(a) or [])
    for held in range(0, 4000, 40):
        times.seconds(4, held)
        times.seconds(4, held, [Row(60, held, 0)])
        times.seconds(4, held, [Row(60, held, 1)])
    assert len(built) == 3


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ((0, 0), "a pass has no rows"),
        ((-1, 5), "decodes is -1; it must be 0 or more"),
        ((3, -1), "held is -1; it must be 0 or more"),
        ((0, 7, [Row(4)]), "held is 7 with no decode row"),
    ],
)
def test_steps_that_cannot_be_are_refused(step: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StepTimes("smollm2-135m", "h100-sxm").seconds(*step)


def test_what_a_pass_refuses_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="no bfloat16 peak of t4 is known"):
        StepTimes("llama-3-8b", "t4")
    with pytest.raises(ConfigError, match="calibrated for bfloat16, not for float16"):
        StepTimes("llama-3-8b", bent(False), "float16")
    with pytest.raises(ConfigError, match="groups of 32 do not divide head_dim"):
        StepTimes(small_config(), "h100-sxm", kv="q8_0")


# The link between a device that reads prompts and one that decodes.


def test_a_cache_over_a_link() -> None:
    """Llama-3-8B, 2,048 tokens: 268 MB, and 5.4 ms over 400 Gbit/s."""
    assert transfer_seconds("llama-3-8b", 2048, 50e9) == 2048 * 131_072 / 50e9
    assert transfer_seconds("llama-3-8b", 2048, 50e9, "fp8") == 2048 * 65_536 / 50e9
    assert transfer_seconds("llama-3-8b", 0, 50e9) == 0


def test_a_windowed_layer_sends_its_window() -> None:
    assert transfer_seconds("mistral-7b-v0.1", 9000, 1.0) == kv_bytes("mistral-7b-v0.1", 4096)


def test_a_link_that_moves_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="bytes_per_second is 0; a link moves more than 0"):
        transfer_seconds("llama-3-8b", 9, 0)
    with pytest.raises(ConfigError, match="tokens is -1"):
        transfer_seconds("llama-3-8b", -1, 1e9)
