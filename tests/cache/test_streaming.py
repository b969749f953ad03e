"""The streaming cache: sinks and a rolling window equal one masked pass, for every chunking, in constant memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cache.windowed import absolute, oracle, streaming
from kvlab.cache import StreamingCache, Visibility, make_cache, positions_from_mask
from kvlab.errors import CacheFull, CannotCrop, ConfigError, PromptError
from kvlab.model import GPT
from kvlab.rope import angles, rotate
from toys import random_gpt, small_config

# The tables of angles are float32.
CLOSE = {"rtol": 0, "atol": 2e-5}


@pytest.fixture(scope="module")
def model() -> GPT:
    return random_gpt(small_config())


def cache_of(model: GPT, sinks: int, window: int, batch: int = 1) -> StreamingCache:
    return StreamingCache(model.config, batch, model.dtype, sinks=sinks, window=window)


def tokens_of(model: GPT, batch: int, time: int, seed: int = 1) -> Tensor:
    return torch.randint(model.config.vocab_size, (batch, time), generator=torch.Generator().manual_seed(seed))


def read(model: GPT, tokens: Tensor, cache: StreamingCache, chunk: int) -> Tensor:
    return torch.cat([model(part, cache) for part in tokens.split(chunk, dim=1)], dim=1)


@pytest.mark.parametrize("length", [5, 8, 9, 10, 19])  # before the wrap, W - 1, W, W + 1 of the ring, 2W + 1
@pytest.mark.parametrize("chunk", [1, 2, 3, 8, 19])
@pytest.mark.parametrize(("sinks", "window"), [(0, 9), (3, 6), (1, 8), (8, 1)])
def test_every_chunking_equals_one_masked_pass(model: GPT, sinks: int, window: int, chunk: int, length: int) -> None:
    tokens = tokens_of(model, 1, length)
    got = read(model, tokens, cache_of(model, sinks, window), chunk)
    torch.testing.assert_close(got[0], oracle(model, tokens[0], streaming(sinks, window)), **CLOSE)


def test_absolute_sinks_are_another_variant(model: GPT) -> None:
    tokens = tokens_of(model, 1, 19)
    got = read(model, tokens, cache_of(model, 3, 6), 4)
    assert (got[0] - oracle(model, tokens[0], absolute(3, 6))).abs().max() > 0.01


def test_without_sinks_it_is_the_plain_window() -> None:
    """Layers that have the window themselves give the same: there a distance is a distance."""
    model, mistral = random_gpt(small_config()), random_gpt(small_config(windows=(9, 9)))
    mistral.load_state_dict(model.state_dict())
    tokens = tokens_of(model, 2, 19)
    torch.testing.assert_close(read(model, tokens, cache_of(model, 0, 9, 2), 4), mistral(tokens), **CLOSE)
    torch.testing.assert_close(read(mistral, tokens, cache_of(mistral, 0, 9, 2), 4), mistral(tokens), **CLOSE)


@given(data=st.data())
@settings(max_examples=60)
def test_rows_of_a_batch_are_what_they_are_alone(model: GPT, data: st.DataObject) -> None:
    sinks = data.draw(st.integers(0, 4), "sinks")
    window, batch = data.draw(st.integers(1, 8), "window"), data.draw(st.integers(1, 3), "batch")
    cache, texts = cache_of(model, sinks, window, batch), [tokens_of(model, 1, 30, seed)[0] for seed in range(batch)]
    got: list[list[Tensor]] = [[] for _ in texts]
    for _ in range(data.draw(st.integers(1, 6), "passes")):
        time = data.draw(st.integers(1, 9), "time")
        mask = torch.tensor(data.draw(st.lists(st.lists(st.booleans(), min_size=time, max_size=time),
                                               min_size=batch, max_size=batch), "mask"))  # fmt: skip
        mask &= mask.cumsum(1) + torch.tensor(cache.rows_seen)[:, None] <= 30
        positions = positions_from_mask(mask, cache.rows_seen)
        tokens = torch.stack([text[at.clamp(min=0)] for text, at in zip(texts, positions, strict=True)])
        logits = model(tokens, cache, positions=positions)
        for row in range(batch):
            got[row] += logits[row][mask[row]].unbind()
        assert cache.lengths == [min(seen, sinks + window) for seen in cache.rows_seen]
    for row, text in enumerate(texts):
        if got[row]:
            expected = oracle(model, text[: len(got[row])], streaming(sinks, window))
            torch.testing.assert_close(torch.stack(got[row]), expected, **CLOSE)


def test_sink_positions_a_token_after_an_eviction_counts_inside_the_cache(model: GPT) -> None:
    """Held [0, 1, 2, 3, 6, 7, 8] and one more: their places are 0 to 7 (transformers 33691 and 35350)."""
    cache = cache_of(model, 4, 4)
    model(tokens_of(model, 1, 9), cache)
    step = cache.begin(cache.next_positions(1))
    key = torch.randn(1, 2, 8, 8, dtype=torch.float64)
    at = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7]])
    cos, sin = (part[:, None] for part in angles(model.config, at))
    # What one query sees: the sinks moved up by two, because the text is two tokens further than the cache.
    assert step.sinks is not None
    moved = rotate(cache.sink_keys, *(part[None] for part in angles(model.config, torch.tensor([[2]]))))
    torch.testing.assert_close(step.sinks, moved, **CLOSE)
    # And turning composes: rope(rope(k, 6), -2) == rope(k, 4).
    back = [part[:, None] for part in angles(model.config, torch.full((1, 8), -2))]
    ahead = [part[:, None] for part in angles(model.config, at + 2)]
    torch.testing.assert_close(rotate(rotate(key, *ahead), *back), rotate(key, cos, sin), **CLOSE)


def test_offset_reset_20_tokens_through_a_window_of_8_have_been_seen(model: GPT) -> None:
    cache = cache_of(model, 0, 8)
    read(model, tokens_of(model, 1, 20), cache, 3)
    assert (cache.tokens_seen, cache.length) == (20, 8)


@pytest.mark.parametrize("chunk", [1, 5])
def test_eviction_once_a_prompt_length_is_bounded_after_every_pass(model: GPT, chunk: int) -> None:
    cache = cache_of(model, 2, 6)
    for part in tokens_of(model, 1, 40).split(chunk, dim=1):
        model(part, cache)
        assert cache.length <= 8


def test_decode_ignores_the_window_cached_equals_masked_at_one_past_it(model: GPT) -> None:
    tokens, cache = tokens_of(model, 1, 10), cache_of(model, 0, 9)
    model(tokens[:, :9], cache)
    last = model(tokens[:, 9:], cache)[0, 0]
    torch.testing.assert_close(last, oracle(model, tokens[0], streaming(0, 9))[-1], **CLOSE)


def test_trimmed_before_attention_a_prompt_longer_than_the_window(model: GPT) -> None:
    tokens = tokens_of(model, 1, 6)
    cached, whole = model(tokens, cache_of(model, 0, 4)), oracle(model, tokens[0], streaming(0, 4))
    torch.testing.assert_close(cached[0], whole, **CLOSE)


def test_window_that_never_frees_memory_bytes_are_those_of_the_slots(model: GPT) -> None:
    cache, element = cache_of(model, 3, 6), 8
    slot = model.config.n_layer * model.config.n_kv_head * model.config.head_dim * element
    assert cache.nbytes == 2 * 9 * slot + 3 * slot
    before = {buffer.data_ptr() for buffer in (cache.storage, cache.sink_keys)}
    read(model, tokens_of(model, 1, 50), cache, 1)
    assert cache.nbytes == 2 * 9 * slot + 3 * slot
    assert {buffer.data_ptr() for buffer in (cache.storage, cache.sink_keys)} == before
    assert cache.used_bytes == 2 * 9 * slot


def test_it_goes_on_past_the_context_and_relative_to_the_start_nothing_changes(model: GPT) -> None:
    """Whoever starts late sees the same: after the window has rolled, only what is held counts."""
    text = tokens_of(model, 1, 300)
    cache = cache_of(model, 2, 6)
    late = read(model, text, cache, 7)[0, -1]
    assert cache.tokens_seen == 300 > model.config.max_seq_len
    # Two layers reach back two windows; before that only the sinks are seen.
    fresh = cache_of(model, 2, 6)
    short = torch.cat((text[:, :2], text[:, -20:]), dim=1)
    torch.testing.assert_close(read(model, short, fresh, 1)[0, -1], late, **CLOSE)


def test_float32_keeps_its_digits_after_a_million_tokens() -> None:
    model = random_gpt(small_config(), torch.float32)
    cache = cache_of(model, 2, 6)
    text = tokens_of(model, 1, 40)
    read(model, text[:, :20], cache, 20)
    near = cache.fork()
    # The same contents, a million tokens on: every key of the window is turned by as much.
    far, ahead = cache, 999_996  # a multiple of the window, so that slots stay
    cos, sin = (part[None] for part in angles(model.config, torch.tensor([[ahead]])))
    far.storage[0, :, :, :, 2:] = rotate(far.storage[0, :, :, :, 2:], cos, sin)
    far.rows_seen = [seen + ahead for seen in far.rows_seen]
    torch.testing.assert_close(read(model, text[:, 20:], far, 1), read(model, text[:, 20:], near, 1), rtol=0, atol=1e-4)


def test_a_failed_pass_changes_nothing(model: GPT) -> None:
    tokens, cache = tokens_of(model, 1, 30), cache_of(model, 2, 6)
    read(model, tokens[:, :14], cache, 14)
    for time in (1, 5):
        step = cache.begin(cache.next_positions(time))
        noise = torch.full((1, 2, time, 8), 7.0, dtype=torch.float64)
        cache.append(0, noise, noise, step)  # the pass breaks off in the second layer
        twin = cache.fork()
        expected = oracle(model, tokens[0], streaming(2, 6))[14:]
        torch.testing.assert_close(read(model, tokens[:, 14:], twin, time)[0], expected, **CLOSE)


def test_forks_selected_rows_and_reset(model: GPT) -> None:
    tokens, cache = tokens_of(model, 2, 25), cache_of(model, 2, 6, 2)
    read(model, tokens[:, :12], cache, 5)
    twin = cache.fork()
    read(model, tokens[:, 12:], cache, 1)
    swapped = cache_of(model, 2, 6, 2)
    read(model, tokens[:, :12], swapped, 5)
    swapped.select([1, 0, 1])
    rows = tokens[[1, 0, 1], 12:]
    expected = torch.stack([oracle(model, row, streaming(2, 6))[12:] for row in tokens])
    torch.testing.assert_close(read(model, tokens[:, 12:], twin, 1), expected, **CLOSE)
    torch.testing.assert_close(read(model, rows, swapped, 4), expected[[1, 0, 1]], **CLOSE)
    cache.reset()
    torch.testing.assert_close(
        read(model, tokens[:, :12], cache, 4)[0], oracle(model, tokens[0], streaming(2, 6))[:12], **CLOSE
    )


def test_tokens_come_back_until_the_first_was_overwritten(model: GPT) -> None:
    tokens, cache = tokens_of(model, 1, 20), cache_of(model, 2, 6)
    read(model, tokens[:, :8], cache, 8)
    cache.crop([3])
    torch.testing.assert_close(
        read(model, tokens[:, 3:], cache, 2)[0], oracle(model, tokens[0], streaming(2, 6))[3:], **CLOSE
    )
    with pytest.raises(CannotCrop, match="keeps between 20 and 20"):
        cache.crop([19])


def test_a_step_of_one_token_needs_no_mask(model: GPT) -> None:
    cache = cache_of(model, 2, 6, 2)
    read(model, tokens_of(model, 2, 8), cache, 8)
    assert cache.begin(cache.next_positions(1)).view(0).visibility is Visibility.ALL


def test_a_cache_of_another_batch_is_refused(model: GPT) -> None:
    with pytest.raises(PromptError, match=r"shape \(2, 3\), and the cache of 1 row\(s\) .* make a cache for 2 row"):
        model(tokens_of(model, 2, 3), cache_of(model, 2, 6))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("streaming:0+0", {}, "window is 0; it must be 1 or more"),
        ("streaming:4+61", {}, "4 sinks and a window of 61 are 65 tokens, more than the context of small, 64"),
        ("window:65", {}, "0 sinks and a window of 65 are 65 tokens"),
        ("streaming:4+60", {"position": "learned"}, "small has learned positions, .* cannot be turned"),
        ("streaming:4+8", {"windows": (7, None)}, "layers of small see 7 tokens, .* make it 7 or less"),
        ("streaming:4", {}, "'streaming:4' does not say how many tokens .* give sinks \\+ window, as in streaming:4"),
        ("window:-3", {}, "give window, as in window:256"),
        ("h2o:8", {}, "give heavy \\+ recent"),
        ("sinks:4+4", {}, "no cache is called 'sinks:4\\+4'; kvlab has contiguous, paged, .*snapkv:256"),
    ],
)
def test_what_cannot_be_is_refused(kind: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_cache(kind, small_config(**changes), 1, 32, torch.float32)


def test_a_window_over_learned_positions_ends_with_the_context() -> None:
    model = random_gpt(small_config(position="learned"))
    cache, tokens = make_cache("window:6", model.config, 1, 10, model.dtype), tokens_of(model, 1, 65)
    assert not cache.endless
    got = model(tokens[:, :20], cache)
    torch.testing.assert_close(got[0], oracle(model, tokens[0, :20], streaming(0, 6)), **CLOSE)
    with pytest.raises(CacheFull, match="the cache was made for max_len 64"):
        model(tokens[:, 20:], cache)
