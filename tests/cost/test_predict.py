"""What a request will cost: the parts put together."""

from __future__ import annotations

from typing import Any

import pytest

from kvlab.cost import (
    GIB,
    Row,
    activation_bytes,
    decode_pass,
    kv_bytes,
    largest_batch,
    pass_time,
    predict,
    prefill_pass,
    tokens_per_verification,
    weight_bytes,
)
from kvlab.errors import ConfigError


def test_a_prediction_is_a_prefill_and_a_step_in_the_middle() -> None:
    """Prompt 1,000, answer 101: a hundred steps over caches of 1,000 to 1,099 tokens."""
    found = predict("llama-3-8b", "h100-sxm", prompt_tokens=1000, new_tokens=101, batch=4)
    prefill = pass_time("llama-3-8b", prefill_pass(1000, 4), "h100-sxm").seconds
    steps = [pass_time("llama-3-8b", decode_pass(past, 4), "h100-sxm").seconds for past in range(1000, 1100)]
    assert found.ttft == prefill
    assert found.tpot == pytest.approx(sum(steps) / 100, rel=1e-3)
    assert found.e2e == pytest.approx(prefill + sum(steps), rel=1e-3)
    assert found.decode_tokens_per_second == 4 / found.tpot


def test_prefill_throughput_counts_prompt_tokens() -> None:
    """TGI 849 divided the batch by the latency: 2 x 10 tokens in 1 s are 20 tok/s."""
    found = predict("llama-3-8b", "h100-sxm", prompt_tokens=10, batch=2)
    assert found.prefill_tokens_per_second == pytest.approx(20 / found.ttft)


def test_an_answer_of_one_token_is_the_prefill() -> None:
    found = predict("llama-3-8b", "h100-sxm", prompt_tokens=100, new_tokens=1)
    assert found.e2e == found.ttft
    assert found.memory.kv == 100 * 131_072


def test_after_m_sampled_tokens_the_cache_holds_n_plus_m_minus_1() -> None:
    """Statement 50."""
    found = predict("llama-3-8b", "h100-sxm", prompt_tokens=100, new_tokens=28, batch=3)
    assert found.memory.kv == 3 * 127 * 131_072


def test_memory_has_three_parts() -> None:
    """Statement 66: weights and cache, and what a pass computes."""
    memory = predict("llama-2-7b", "a10", prompt_tokens=3968, new_tokens=129, batch=4, dtype="float16").memory
    assert memory.weights == weight_bytes("llama-2-7b", "float16") == 2 * 6_738_415_616
    assert memory.kv == 8 * GIB
    assert memory.activations == activation_bytes("llama-2-7b", prefill_pass(3968, 4), "float16")
    assert memory.total == memory.weights + memory.kv + memory.activations
    assert (memory.device, memory.fits) == (24 * GIB, memory.total <= 24 * GIB)


@pytest.mark.parametrize(("card", "fits"), [("t4", False), ("l4", True)])
def test_what_fits(card: str, fits: bool) -> None:
    """13.5 GB of weights and two caches of 2.1 GB: not on 16 GiB."""
    found = predict("llama-2-7b", card, prompt_tokens=3000, new_tokens=1000, batch=2, dtype="float16")
    assert found.memory.fits is fits


def test_formats_of_weights_and_cache_go_their_own_ways() -> None:
    plain = predict("llama-3-8b", "h100-sxm", prompt_tokens=1000)
    narrow = predict("llama-3-8b", "h100-sxm", prompt_tokens=1000, weights="int4")
    both = predict("llama-3-8b", "h100-sxm", prompt_tokens=1000, weights="int4", kv="fp8")
    assert narrow.memory.kv == plain.memory.kv == 2 * both.memory.kv
    assert narrow.memory.weights == both.memory.weights == weight_bytes("llama-3-8b", "int4")
    assert plain.tpot > 3 * narrow.tpot > 3 * both.tpot
    assert plain.ttft == pytest.approx(narrow.ttft, rel=0.03)


def test_max_model_len_above_the_models() -> None:
    """vllm PR 5911, 3676, statement 127: 8,192 on a Llama-2 is refused; its last position is 4,095."""
    with pytest.raises(ConfigError, match="8000 prompt tokens and 192 new ones: llama-2-7b holds 4096"):
        predict("llama-2-7b", "h100-sxm", prompt_tokens=8000, new_tokens=192)
    assert predict("llama-2-7b", "h100-sxm", prompt_tokens=4000, new_tokens=97)  # the last token is never fed
    with pytest.raises(ConfigError, match="4000 prompt tokens and 98 new ones"):
        predict("llama-2-7b", "h100-sxm", prompt_tokens=4000, new_tokens=98)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_tokens": 0}, "new is 0; a row of a pass feeds 1 token or more"),
        ({"prompt_tokens": -5}, "new is -5"),
        ({"new_tokens": 0}, "an answer has 1 token or more"),
        ({"batch": 0}, "batch is 0"),
        ({"model": "lama-3-8b"}, "no preset is called 'lama-3-8b'; the nearest are llama-3"),
        ({"device": "a100"}, "no hardware is called 'a100'; the nearest are a10"),
        ({"kv": "int8-g3"}, "groups of 3 do not divide head_dim, which has 128"),
        ({"weights": "int4-g100"}, "groups of 100 do not divide hidden_size"),
        ({"dtype": "float23"}, "no storage format is called 'float23'"),
    ],
)
def test_bad_input_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"model": "llama-3-8b", "device": "h100-sxm", "prompt_tokens": 10} | changes
    with pytest.raises(ConfigError, match=message):
        predict(**arguments)


def test_largest_batch_by_hand() -> None:
    """80 GiB less 16.06 GB of weights, in pieces of 8,192 x 131,072 bytes."""
    free = 80 * 2**30 - 2 * 8_030_261_248
    assert largest_batch("llama-3-8b", "h100-sxm", tokens=8192) == free // 2**30 == 65
    assert largest_batch("llama-3-8b", "h100-sxm", tokens=8192, fraction=0.5) == (free - 40 * 2**30) // 2**30
    assert largest_batch("llama-3-8b", "h100-sxm", tokens=8192, kv="fp8") == 2 * free // 2**30
    assert largest_batch("llama-3.1-70b", "h100-sxm", tokens=1) == 0
    narrow = 80 * 2**30 - weight_bytes("llama-3.1-70b", "int4")
    assert largest_batch("llama-3.1-70b", "h100-sxm", tokens=1024, weights="int4") == narrow // (1024 * 327_680) == 139


@pytest.mark.parametrize("model", ["gemma-3-27b", "deepseek-v2", "qwen2.5-7b"])
def test_the_largest_batch_fits_and_one_more_does_not(model: str) -> None:
    device = {"deepseek-v2": "m3-ultra"}.get(model, "h100-sxm")
    memory = {"m3-ultra": 512, "h100-sxm": 80}[device] * GIB
    best = largest_batch(model, device, tokens=20_000)
    assert best > 0
    used = [weight_bytes(model) + kv_bytes(model, [20_000] * n) for n in (best, best + 1)]
    assert used[0] <= memory < used[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 0}, "tokens is 0; it must be 1 or more"),
        ({"fraction": 0.0}, "fraction is 0.0"),
        ({"fraction": 2.0}, "at most 1"),
    ],
)
def test_impossible_batches_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        largest_batch("llama-3-8b", "h100-sxm", **{"tokens": 10} | changes)


@pytest.mark.parametrize(("acceptance", "drafted", "tokens"), [(0.8, 4, 3.36), (0.5, 3, 1.88), (0.39, 3, 1.60)])
def test_speculation_is_slower_where_little_is_accepted(acceptance: float, drafted: int, tokens: float) -> None:
    """vllm 8439, B38."""
    assert tokens_per_verification(acceptance, drafted) == pytest.approx(tokens, abs=0.005)


def test_speculation_at_its_ends() -> None:
    """Nothing accepted is one token a pass, everything is g + 1. Past the ridge g + 1 rows cost g + 1 times."""
    assert tokens_per_verification(0.0, 5) == 1
    assert tokens_per_verification(1.0, 5) == 6
    assert tokens_per_verification(0.7, 0) == 1
    with pytest.raises(ConfigError, match=r"acceptance is 1\.2 and drafted 3"):
        tokens_per_verification(1.2, 3)
    with pytest.raises(ConfigError, match="drafted -1"):
        tokens_per_verification(0.5, -1)


def test_verification_is_nearly_free_until_the_ridge() -> None:
    """B38: five rows of one request cost a step; five rows of each of 256 do not."""
    alone, full = (
        pass_time("llama-3-8b", [Row(5, 500, 5)] * batch, "h100-sxm").seconds
        / pass_time("llama-3-8b", decode_pass(500, batch), "h100-sxm").seconds
        for batch in (1, 256)
    )
    assert alone < 1.05
    assert full > 2
