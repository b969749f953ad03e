"""Operations: pairs by brute force, shares and totals by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from kvlab.cache.base import visible
from kvlab.config import MLA, ModelConfig, MoE
from kvlab.cost import (
    Row,
    chunks,
    decode_pass,
    flops,
    middle_step,
    parameters,
    prefill_pass,
    tokens_read_again,
    visible_pairs,
)
from kvlab.errors import ConfigError
from kvlab.model import GPT
from toys import random_gpt, small_config

windows = st.one_of(st.none(), st.integers(1, 15))


@given(st.integers(0, 20), st.integers(0, 20), windows)
def test_visible_pairs_are_those_that_the_attention_rule_lets_through(new: int, past: int, window: int | None) -> None:
    keys, queries = torch.arange(past + new), torch.arange(past, past + new)
    rule = visible(keys[None, None], queries[None], window)
    assert visible_pairs(new, past, window) == int(rule.sum())


@given(st.integers(1, 400), st.integers(1, 450), windows)
def test_chunks_see_the_pairs_of_the_whole(prompt: int, chunk: int, window: int | None) -> None:
    """vllm 7604, B31: chunked prefill changes no operation of attention."""
    pieces = chunks(prompt, chunk)
    assert sum(row.new for row in pieces) == prompt
    assert [row.past for row in pieces] == [chunk * i for i in range(len(pieces))]
    assert [row.logits for row in pieces] == [0] * (len(pieces) - 1) + [1]
    assert sum(visible_pairs(row.new, row.past, window) for row in pieces) == visible_pairs(prompt, 0, window)


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_chunks_cost_the_operations_of_the_whole(prompt: int, chunk: int) -> None:
    for model in ("smollm2-135m", "gemma-3-1b"):
        whole = flops(model, prefill_pass(prompt)).total
        assert sum(flops(model, [row]).total for row in chunks(prompt, chunk)) == whole


def test_rows_of_a_batch_add_up() -> None:
    rows = [Row(7), Row(5, 100, 0), Row(1, 30), Row(9, 2, 9)]
    together, apart = flops("gemma-3-1b", rows), [flops("gemma-3-1b", [row]) for row in rows]
    for part in ("linear", "attention", "head", "total"):
        assert getattr(together, part) == sum(getattr(one, part) for one in apart)


def test_a_small_decoder_counted_by_hand() -> None:
    """Two layers, 6 heads of 8; 3 tokens after 4, the last one through a head of 61 x 24."""
    found = flops(small_config(), [Row(3, 4)])
    assert found.linear == 2 * 3 * 2 * (24 * 80 + 48 * 24 + 3 * 24 * 40)
    assert found.attention == 2 * 6 * (5 + 6 + 7) * 4 * 8
    assert found.head == 2 * 61 * 24
    assert found.total == found.linear + found.attention + found.head
    windowed = small_config(windows=(None, 5))
    assert flops(windowed, [Row(3, 4)]).attention == 6 * (5 + 6 + 7 + 5 + 5 + 5) * 4 * 8


@pytest.mark.parametrize("changes", [{}, {"windows": (None, 4)}, {"qkv_bias": True, "n_kv_head": 6}])
def test_operations_are_those_that_torch_counts(changes: dict[str, object]) -> None:
    """torch computes full squares of scores; what the mask hides is put back before comparing."""
    config = small_config(**changes)
    model: GPT = random_gpt(config, torch.float32)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 9, dtype=torch.long))
    found = flops(config, [Row(9, 0, 9)] * 2)
    hidden = sum(2 * (9 * 9 - visible_pairs(9, 0, window)) for window in config.windows)
    assert counter.get_total_flops() == found.total + 4 * config.n_head * config.head_dim * hidden


def test_prefill_is_not_mainly_attention() -> None:
    """Statement 53: its share in Llama-2-7B, causal."""
    shares = [flops("llama-2-7b", prefill_pass(n)).attention_share for n in (2048, 4096, 8192, 32_768)]
    assert [round(share, 2) for share in shares] == [0.04, 0.08, 0.14, 0.40]


@pytest.mark.parametrize(("model", "tokens"), [("llama-2-7b", 49_000), ("llama-3-8b", 53_000)])
def test_prompt_at_which_attention_is_half(model: str, tokens: int) -> None:
    """Statement 53."""
    found = [flops(model, [Row(n, 0, 0)]).attention_share for n in (tokens - 1000, tokens + 1000)]
    assert found[0] < 0.5 < found[1]


def test_projections_and_mlp_are_most_of_both_phases() -> None:
    """Statement 25: over nine tenths below 4K tokens, head included, in prefill; 86 % of a step at 4K."""
    for n in (128, 1024, 4000):
        found = flops("llama-2-7b", prefill_pass(n))
        assert found.linear / found.total > 0.9
    assert 0.85 < 1 - flops("llama-2-7b", decode_pass(4096)).attention_share < 0.87


def test_a_32k_prompt_takes_seconds() -> None:
    """Statement 58: 706 TFLOP, 4.5 s at half of an A100's peak."""
    total = flops("llama-2-7b", prefill_pass(32_768)).total
    assert round(total / 1e12) == 706
    assert round(total / (0.5 * 312e12), 1) == 4.5


def test_prefill_time_is_a_n_plus_b_n_squared() -> None:
    """Statements 11 and 27: twice the prompt is twice the linear part, four times attention (and n more pairs)."""
    once, twice = (flops("llama-2-7b", [Row(n, 0, 0)]) for n in (4096, 8192))
    assert twice.linear == 2 * once.linear
    assert twice.attention / once.attention == pytest.approx(4, rel=1e-3)


def test_steps_of_a_long_prompt_under_a_budget() -> None:
    """vllm 21495: 130,000 tokens under 512 take 254 steps."""
    assert len(chunks(130_000, 512)) == 254


def test_chunks_read_the_past_again() -> None:
    """vllm 7604, statement 90: 4.6 N and 7.5 N token reads."""
    assert tokens_read_again(40_000, 4096) == 4.608 * 40_000
    assert tokens_read_again(8192, 512) == 7.5 * 8192
    assert tokens_read_again(512, 512) == 0


def test_two_operations_a_weight_and_token() -> None:
    """The rule of thumb 2 P: without the embedding, and of experts what a token visits."""
    for model in ("llama-3-8b", "mixtral-8x7b-v0.1"):
        config, count = ModelConfig.preset(model), parameters(model)
        step = flops(model, decode_pass(0))
        weights = count.active - count.embedding - count.vectors
        assert step.linear + step.head == 2 * weights
        assert step.attention == 4 * config.n_layer * config.n_head * config.head_dim


LATENT = MLA(kv_lora_rank=16, rope_head_dim=4, v_head_dim=8, q_lora_rank=12)


@pytest.mark.parametrize(
    ("row", "want"),
    [
        # A prompt: keys of 8 and values of 8, which the matrix products have brought out of the latents already.
        (Row(50), 50 * 51 // 2 * (8 + 8)),
        # A step: scores of 16 + 4, a mix of 16, all inside the latents.
        (Row(1, 99), 100 * (16 + 4 + 16)),
        # A long chunk: cheaper to bring 10 old tokens out again, 16 x (4 + 8) operations each.
        (Row(90, 10), (90 * 10 + 90 * 91 // 2) * 16 + 10 * 16 * 12),
    ],
)
def test_latent_attention_takes_the_cheaper_way(row: Row, want: int) -> None:
    """DeepSeek-V2, arXiv:2405.04434, section 2.1.2: absorbed matrices in decode."""
    config = small_config(mla=LATENT)
    assert flops(config, [row]).attention == 2 * config.n_layer * config.n_head * want


def test_a_step_of_deepseek_computes_on_latents() -> None:
    step = flops("deepseek-v3", decode_pass(999)).attention
    assert step == 61 * 128 * 1000 * 2 * (576 + 512)


def test_experts_cost_what_a_token_visits() -> None:
    moe = MoE(n_experts=8, experts_per_token=2, intermediate_size=16, n_shared_experts=1, n_dense_layers=1)
    config = small_config(n_layer=3, moe=moe)
    attention, dense, expert, router = 24 * 80 + 48 * 24, 3 * 24 * 40, 3 * 24 * 16, 24 * 8
    assert flops(config, [Row(5)]).linear == 2 * 5 * (3 * attention + dense + 2 * (3 * expert + router))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0,), "new is 0; a row of a pass feeds 1 token or more"),
        ((-2,), "new is -2"),
        ((1, -1), "past is -1"),
        ((2, 0, 3), "logits is 3; of 2 new tokens, 0 to 2"),
        ((2, 0, -1), "logits is -1"),
    ],
)
def test_impossible_rows_are_refused(numbers: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Row(*numbers)


def test_impossible_passes_are_refused() -> None:
    with pytest.raises(ConfigError, match="a pass has no rows"):
        flops("llama-3-8b", [])
    for make in (prefill_pass, decode_pass):
        with pytest.raises(ConfigError, match="batch is 0; it must be 1 or more"):
            make(8, 0)
    with pytest.raises(ConfigError, match="chunk is 0"):
        chunks(8, 0)
    with pytest.raises(ConfigError, match="prompt_tokens is 0"):
        chunks(0, 8)
    with pytest.raises(ConfigError, match="new is 0"):
        prefill_pass(0)


@pytest.mark.parametrize(("new", "past"), [(1, 10), (2, 10), (3, 10), (4, 11), (17, 17)])
def test_the_step_in_the_middle_of_an_answer(new: int, past: int) -> None:
    """Of 17 tokens 16 are fed, behind 10 to 25 others; the mean of these is 17.5."""
    assert middle_step(10, new, 3) == [Row(1, past)] * 3
