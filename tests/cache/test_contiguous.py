"""The contiguous cache: cached equals recomputed, however the tokens arrive."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlab.cache import ContiguousCache, View, Visibility, make_cache, positions_from_mask
from kvlab.errors import CacheFull, CannotCrop, ConfigError
from kvlab.model import GPT
from toys import random_gpt, small_config

EXACT = {"rtol": 0, "atol": 1e-12}


def tokens_of(model: GPT, batch: int, time: int, seed: int = 1) -> Tensor:
    return torch.randint(model.config.vocab_size, (batch, time), generator=torch.Generator().manual_seed(seed))


def cache_of(model: GPT, batch: int = 1, max_len: int = 64) -> ContiguousCache:
    cache = make_cache("contiguous", model.config, batch, max_len, model.dtype, model.device)
    assert isinstance(cache, ContiguousCache)
    return cache


def in_chunks(model: GPT, tokens: Tensor, sizes: list[int], cache: ContiguousCache) -> Tensor:
    return torch.cat([model(part, cache) for part in tokens.split(sizes, dim=1)], dim=1)


@pytest.mark.parametrize("chunk", [1, 2, 3, 11])
@pytest.mark.parametrize("window", [None, 1, 3, 4, 20])
def test_chunk_position_ids_every_chunking_gives_the_logits_of_one_pass(chunk: int, window: int | None) -> None:
    model = random_gpt(small_config(windows=(window, None)))
    tokens = tokens_of(model, 2, 11)
    sizes = [chunk] * (11 // chunk) + ([11 % chunk] if 11 % chunk else [])
    got = in_chunks(model, tokens, sizes, cache_of(model, 2))
    torch.testing.assert_close(got, model(tokens), **EXACT)


def test_mask_cut_4_plus_3_tokens_give_the_logits_of_7_at_once(model: GPT) -> None:
    tokens = tokens_of(model, 1, 7)
    got = in_chunks(model, tokens, [4, 3], cache_of(model))
    torch.testing.assert_close(got, model(tokens), **EXACT)


def test_chunk_mask_without_offset_a_chunk_from_3_equals_rows_of_the_full_prefill(model: GPT) -> None:
    tokens, cache = tokens_of(model, 1, 8), cache_of(model)
    model(tokens[:, :3], cache)
    torch.testing.assert_close(model(tokens[:, 3:], cache), model(tokens)[:, 3:], **EXACT)


def test_decode_position_equals_the_length_before_it(model: GPT) -> None:
    cache = cache_of(model)
    model(tokens_of(model, 1, 5), cache)
    step = cache.begin(cache.next_positions(1))
    assert step.positions.tolist() == [[5]]
    assert cache.length == cache.tokens_seen == 5


@pytest.mark.parametrize("window", [4, 5])
def test_decode_respects_the_window_at_window_plus_one(window: int) -> None:
    model = random_gpt(small_config(windows=(window, window)))
    tokens = tokens_of(model, 1, window + 1)
    got = in_chunks(model, tokens, [window, 1], cache_of(model))
    torch.testing.assert_close(got, model(tokens), **EXACT)


@settings(max_examples=60)
@given(st.data())
def test_ragged_rows_equal_the_rows_alone(data: st.DataObject) -> None:
    """Any lengths, padded left or right, over several passes: padding is never written and never seen."""
    model = random_gpt(small_config(windows=(None, 3)))
    batch = data.draw(st.integers(1, 3))
    row_tokens = tokens_of(model, batch, 24, data.draw(st.integers(0, 99)))
    cache, got = cache_of(model, batch), [[] for _ in range(batch)]
    for _ in range(data.draw(st.integers(1, 3))):
        lengths = data.draw(st.lists(st.integers(0, 6), min_size=batch, max_size=batch).filter(any))
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        mask = mask.flip(1) if data.draw(st.booleans()) else mask
        positions = positions_from_mask(mask, cache.rows_seen)
        fed = row_tokens.gather(1, positions.clamp(min=0))
        logits = model(fed, cache, positions=positions)
        for row in range(batch):
            got[row].append(logits[row][mask[row]])
    for row in range(batch):
        seen = cache.rows_seen[row]
        if seen:
            alone = model(row_tokens[row : row + 1, :seen])[0]
            torch.testing.assert_close(torch.cat(got[row]), alone, **EXACT)


def test_left_padding_shares_no_position_ids() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1]]).bool()
    assert positions_from_mask(mask, [0]).tolist() == [[-1, -1, 0, 1, 2]]
    assert positions_from_mask(mask, [7]).tolist() == [[-1, -1, 7, 8, 9]]


def test_unused_slots_leak_no_nan(model: GPT) -> None:
    """Slots that no query can reach hold NaN, masked ones large finite numbers: the output does not change."""
    tokens, cache = tokens_of(model, 2, 9), cache_of(model, 2)
    cache.storage.fill_(torch.nan)
    cache.storage[:, :, 1, :, 2:9] = 1e30  # masked, but the longer row 0 makes kernels read these slots of row 1
    mask = torch.arange(6) < torch.tensor([6, 2])[:, None]
    model(tokens[:, :6], cache, positions=positions_from_mask(mask, [0, 0]))
    for row in (0, 1):
        seen = cache.rows_seen[row]
        cache_alone = cache_of(model)
        model(tokens[row : row + 1, :seen], cache_alone)
        want = model(tokens[row : row + 1, seen : seen + 1], cache_alone)
        probe = cache.fork()
        only = torch.tensor([[r == row] for r in (0, 1)])
        fed = tokens[torch.arange(2), torch.tensor(cache.rows_seen)][:, None]
        got = model(fed, probe, positions=positions_from_mask(only, probe.rows_seen))
        torch.testing.assert_close(got[row], want[0], **EXACT)


def test_padding_is_never_written(model: GPT) -> None:
    cache = cache_of(model, 2)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    model(tokens_of(model, 2, 3), cache, positions=positions_from_mask(mask, [0, 0]))
    assert cache.storage[:, :, 1, :, 1:].abs().max() == 0
    assert cache.storage[:, :, 1, :, 0].abs().min() > 0
    assert cache.lengths == [3, 1]


def test_cache_is_reset_between_requests(model: GPT) -> None:
    first, second = tokens_of(model, 1, 9, seed=2), tokens_of(model, 1, 5, seed=3)
    cache = cache_of(model)
    model(first, cache)
    cache.reset()
    got = model(second, cache)
    torch.testing.assert_close(got, model(second), rtol=0, atol=0)


def test_a_pass_that_fails_half_way_changes_nothing(model: GPT) -> None:
    tokens, cache = tokens_of(model, 1, 8), cache_of(model)
    model(tokens[:, :4], cache)
    broken = model.blocks[1].mlp.forward
    model.blocks[1].mlp.forward = lambda x: 1 / 0  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        model(tokens[:, 4:6], cache)
    model.blocks[1].mlp.forward = broken  # type: ignore[method-assign]
    assert cache.tokens_seen == 4
    torch.testing.assert_close(model(tokens[:, 4:], cache), model(tokens)[:, 4:], **EXACT)


def test_a_cached_prefix_is_not_changed_by_its_reuse(model: GPT) -> None:
    tokens, prefix = tokens_of(model, 1, 10), cache_of(model)
    model(tokens[:, :6], prefix)
    kept = prefix.storage.clone()
    answers = []
    for _ in range(2):
        fork = prefix.fork()
        answers.append(model(tokens[:, 6:], fork))
        assert fork.length == 10
    torch.testing.assert_close(answers[0], answers[1], rtol=0, atol=0)
    assert torch.equal(prefix.storage, kept)
    assert prefix.length == 6


def test_cache_full_says_the_numbers_and_writes_nothing(model: GPT) -> None:
    cache = cache_of(model, max_len=6)
    model(tokens_of(model, 1, 5), cache)
    kept = cache.storage.clone()
    with pytest.raises(CacheFull, match=r"holds 5 tokens and 2 more make 7.*max_len 6"):
        model(tokens_of(model, 1, 2), cache)
    assert torch.equal(cache.storage, kept)
    model(tokens_of(model, 1, 1), cache)
    assert cache.length == 6


def test_crop_takes_back_tokens_row_by_row(model: GPT) -> None:
    tokens, cache = tokens_of(model, 2, 9), cache_of(model, 2)
    model(tokens, cache)
    cache.crop([5, 3])
    mask = torch.arange(6) < torch.tensor([4, 6])[:, None]
    positions = positions_from_mask(mask, cache.rows_seen)
    got = model(tokens.gather(1, positions.clamp(min=0)), cache, positions=positions)
    full = model(tokens)
    torch.testing.assert_close(got[0, :4], full[0, 5:], **EXACT)
    torch.testing.assert_close(got[1], full[1, 3:], **EXACT)


@pytest.mark.parametrize("lengths", [[5], [4, -1], [4, 8]])
def test_crop_refuses_what_it_cannot_take_back(model: GPT, lengths: list[int]) -> None:
    cache = cache_of(model, 2)
    model(tokens_of(model, 2, 7), cache)
    with pytest.raises(CannotCrop):
        cache.crop(lengths)
    assert cache.rows_seen == [7, 7]


def test_select_reorders_and_repeats_rows(model: GPT) -> None:
    tokens, cache = tokens_of(model, 2, 6), cache_of(model, 2)
    model(tokens[:, :5], cache)
    cache.select([1, 0, 1])
    got = model(tokens[[1, 0, 1], 5:], cache)
    torch.testing.assert_close(got, model(tokens[[1, 0, 1]])[:, 5:], **EXACT)


def test_bytes_are_the_formula() -> None:
    """9 query heads over 3 KV heads: a third of what 9 KV heads would take (lingua 44, torchtune 38)."""
    grouped = small_config(n_head=9, n_kv_head=3)
    full = small_config(n_head=9, n_kv_head=9)
    caches = [make_cache("contiguous", c, 2, 50, torch.bfloat16) for c in (grouped, full)]
    assert caches[0].nbytes == 2 * 2 * 2 * 3 * 50 * 8 * 2
    assert caches[1].nbytes == 3 * caches[0].nbytes
    model = random_gpt(grouped, torch.bfloat16)
    model(torch.zeros(2, 7, dtype=torch.long), caches[0])
    assert caches[0].used_bytes == 7 * 2 * (2 * 2 * 3 * 8 * 2)


def test_a_bf16_model_gets_a_bf16_cache_and_integers_never_do(config: object) -> None:
    model = random_gpt(small_config(), torch.bfloat16)
    cache = cache_of(model)
    model(tokens_of(model, 1, 3), cache)
    assert cache.storage.dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="floating point"):
        make_cache("contiguous", model.config, 1, 8, torch.int64)


@pytest.mark.parametrize(
    ("seen", "mask", "window", "kind"),
    [
        ([0], [[1, 1, 1]], None, Visibility.CAUSAL),
        ([0], [[1, 1, 1]], 3, Visibility.CAUSAL),
        ([0], [[1, 1, 1, 1]], 3, Visibility.MASK),
        ([5], [[1]], None, Visibility.ALL),
        ([5], [[1]], 6, Visibility.ALL),
        ([5], [[1]], 5, Visibility.MASK),
        ([5], [[1, 1]], None, Visibility.CAUSAL_TAIL),
        ([0], [[1]], None, Visibility.ALL),
        ([2, 2], [[1, 1], [1, 1]], None, Visibility.CAUSAL_TAIL),
        ([2, 3], [[1, 1], [1, 1]], None, Visibility.MASK),
        ([0, 0], [[1, 1], [1, 0]], None, Visibility.MASK),
        ([4, 4], [[1], [0]], None, Visibility.MASK),
    ],
)
def test_the_cheapest_class_that_obeys_the_rule(
    seen: list[int], mask: list[list[int]], window: int | None, kind: Visibility
) -> None:
    cache = make_cache("contiguous", small_config(windows=(window, window)), len(seen), 16, torch.float32)
    cache.rows_seen = list(seen)
    step = cache.begin(positions_from_mask(torch.tensor(mask).bool(), seen))
    assert step.view(0).visibility is kind
    assert (step.view(0).mask is None) == (kind is not Visibility.MASK)


@pytest.mark.parametrize("kind", list(Visibility))
def test_a_view_has_a_mask_exactly_where_its_class_needs_one(kind: Visibility) -> None:
    mask = None if kind is Visibility.MASK else torch.ones(1, 1, 1, 1, dtype=torch.bool)
    with pytest.raises(ConfigError, match=f"class {kind.name} (lacks|has) a mask"):
        View(kind, mask)


@pytest.mark.parametrize("positions", [[[1, 2]], [[0, 2]], [[0], [0]], [[]]])
def test_positions_that_do_not_continue_the_rows_are_refused(positions: list[list[int]]) -> None:
    cache = make_cache("contiguous", small_config(), 1, 16, torch.float32)
    with pytest.raises(ConfigError, match="positions"):
        cache.begin(torch.tensor(positions, dtype=torch.long))


def test_an_unknown_kind_names_those_that_exist(config: object) -> None:
    with pytest.raises(ConfigError, match="contiguous"):
        make_cache("rotary", small_config(), 1, 8, torch.float32)


@pytest.mark.parametrize(("batch", "max_len"), [(0, 4), (1, 0)])
def test_a_cache_of_no_size_is_refused(batch: int, max_len: int) -> None:
    with pytest.raises(ConfigError, match="1 or more"):
        make_cache("contiguous", small_config(), batch, max_len, torch.float32)
