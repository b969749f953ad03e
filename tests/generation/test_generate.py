"""Generation: the two phases, their bookkeeping, and the limits."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.cache import make_cache
from kvlab.errors import PromptError, SamplingError
from kvlab.generation import Sampling, decode, generate, prefill
from kvlab.model import GPT
from kvlab.timing import Clock
from toys import random_gpt, small_config


def ticking() -> Clock:
    """A clock that moves by one second each time it is read."""
    counter = itertools.count()
    return Clock(read=lambda: float(next(counter)))


def recomputed(model: GPT, prompt: list[int], n: int) -> list[int]:
    """Greedy tokens without any cache: the whole sequence again for every token."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("m", [1, 2, 7])
def test_after_m_sampled_tokens_the_cache_holds_n_plus_m_minus_1(model: GPT, m: int) -> None:
    """The first token is sampled from prefill, the last is never fed (the classic toy)."""
    run = generate(model, [1, 2, 3, 4, 5], max_new_tokens=m).run()
    assert len(run.tokens[0]) == m
    assert run.cache.length == run.cache.tokens_seen == 5 + m - 1
    assert run.timing.kv_bytes == (5 + m - 1) * run.cache.bytes_per_token
    assert run.cache.nbytes == run.timing.kv_bytes


def test_prefill_yields_the_first_token_and_decode_the_others(model: GPT) -> None:
    steps = list(generate(model, [1, 2, 3], max_new_tokens=4))
    assert [step.phase for step in steps] == ["prefill", "decode", "decode", "decode"]
    assert [step.token for step in steps] == recomputed(model, [1, 2, 3], 4)


def test_prefill_and_decode_by_hand(model: GPT) -> None:
    cache = make_cache("contiguous", model.config, 1, 8, torch.float64)
    logits = prefill(model, torch.tensor([[1, 2, 3]]), cache)
    tokens = [int(logits.argmax())]
    for _ in range(3):
        tokens.append(int(decode(model, torch.tensor(tokens[-1:]), cache).argmax()))
    assert tokens == recomputed(model, [1, 2, 3], 4)
    assert cache.length == 6


@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=9), min_size=1, max_size=4), st.integers(1, 6))
def test_a_ragged_batch_gives_each_row_what_it_gets_alone(prompts: list[list[int]], n: int) -> None:
    model = random_gpt(small_config(windows=(None, 4)))
    sampling = [Sampling(temperature=1.0, seed=row) if row % 2 else Sampling() for row in range(len(prompts))]
    together = generate(model, prompts, max_new_tokens=n, sampling=sampling).run()
    for row, prompt in enumerate(prompts):
        alone = generate(model, [prompt], max_new_tokens=n, sampling=sampling[row]).run()
        assert together.tokens[row] == alone.tokens[0]


def test_several_eos_ids_stop_on_either(model: GPT) -> None:
    """vllm 4180: and a row that is done is written no more while the others go on."""
    free = generate(model, [[1, 2], [3, 4]], max_new_tokens=8).run().tokens
    ends = (free[0][3], free[1][1])
    ending = random_gpt(model.config.with_(eos_token_ids=ends))
    run = generate(ending, [[1, 2], [3, 4]], max_new_tokens=8).run()
    for row in (0, 1):
        first = next(i for i, token in enumerate(free[row]) if token in ends)
        assert run.tokens[row] == free[row][: first + 1]
        assert run.finish_reasons[row] == "stop"
        assert run.cache.rows_seen[row] == 2 + first
    ignored = generate(ending, [[1, 2], [3, 4]], max_new_tokens=8, ignore_eos=True).run()
    assert ignored.tokens == free
    assert ignored.finish_reasons == ["length", "length"]


@pytest.mark.parametrize(("prompt", "most"), [(60, 5), (63, 2), (64, 1)])
def test_context_overflow_ends_with_length_exactly_at_the_limit(model: GPT, prompt: int, most: int) -> None:
    """rasbt 925: the context of 64 holds the prompt and every new token but the last."""
    run = generate(model, [1] * prompt, max_new_tokens=50).run()
    assert len(run.tokens[0]) == most
    assert run.finish_reasons == ["length"]
    assert run.cache.tokens_seen == 64


def test_a_prompt_longer_than_the_context_is_refused_with_numbers(model: GPT) -> None:
    with pytest.raises(PromptError, match=r"65 tokens, more than the context of small, 64; shorten it by 1"):
        generate(model, [1] * 65)


def test_learned_positions_end_like_rotary_ones(make_model) -> None:  # type: ignore[no-untyped-def]
    """transformers 530: an index error inside the embedding is no answer."""
    model = make_model(position="learned", norm="layernorm", gated_mlp=False, max_seq_len=6)
    run = generate(model, [1, 2, 3], max_new_tokens=50).run()
    assert len(run.tokens[0]) == 4
    assert run.finish_reasons == ["length"]


def test_a_cached_prefix_is_reused_and_kept(model: GPT) -> None:
    prefix = make_cache("contiguous", model.config, 1, 40, torch.float64)
    prefill(model, torch.tensor([[5, 6, 7]]), prefix)
    runs = [generate(model, [8, 9], max_new_tokens=5, cache=prefix.fork()).run() for _ in range(2)]
    assert runs[0].tokens == runs[1].tokens == [recomputed(model, [5, 6, 7, 8, 9], 5)]
    assert prefix.length == 3


def test_timing_is_read_after_each_pass(model: GPT) -> None:
    """The clock ticks once at the start and once a pass."""
    run = generate(model, [1, 2, 3], max_new_tokens=4, clock=ticking()).run()
    times = run.timing.requests[0]
    assert times.tokens == [1.0, 2.0, 3.0, 4.0]
    assert (run.timing.ttft, run.timing.tpot, times.itl) == (1.0, 1.0, [1.0, 1.0, 1.0])


def test_a_single_token_has_no_time_per_output_token(model: GPT) -> None:
    run = generate(model, [1, 2, 3], max_new_tokens=1).run()
    assert run.timing.ttft is not None
    assert run.timing.tpot is None


def test_nothing_is_computed_before_the_first_token_is_asked_for(model: GPT) -> None:
    run = generate(model, [1, 2, 3], max_new_tokens=4)
    assert run.cache.length == 0
    first = next(iter(run))
    assert first.phase == "prefill"
    assert run.cache.length == 3
    assert [step.phase for step in run] == ["decode"] * 3


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "no prompt"),
        ([[1], []], "prompt 1 is empty"),
        ([1, 61], "the id 61"),
        ([-1], "the id -1"),
        ("hi", "no tokenizer"),
    ],
)
def test_bad_prompts_are_refused(model: GPT, prompts: object, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        generate(model, prompts)  # type: ignore[arg-type]


def test_no_tokens_and_wrong_numbers_of_settings_are_refused(model: GPT) -> None:
    with pytest.raises(PromptError, match="max_new_tokens is 0"):
        generate(model, [1], max_new_tokens=0)
    with pytest.raises(SamplingError, match="2 sampling settings for 1 prompts"):
        generate(model, [1], sampling=[Sampling()] * 2)
    with pytest.raises(PromptError, match="1 prompts for a cache of 2 rows"):
        generate(model, [1], cache=make_cache("contiguous", model.config, 2, 8, torch.float64))
