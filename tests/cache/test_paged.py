"""The paged cache: every chunking equals one pass, and forks that share blocks never change each other."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlab.cache import BlockPool, BlockStorage, KVCache, PagedCache, make_cache, positions_from_mask
from kvlab.errors import CacheFull, CannotCrop, ConfigError
from kvlab.generation import Sampling, generate
from kvlab.model import GPT
from toys import random_gpt, small_config

EXACT = {"rtol": 0, "atol": 1e-12}


def tokens_of(model: GPT, batch: int, time: int, seed: int = 1) -> Tensor:
    return torch.randint(model.config.vocab_size, (batch, time), generator=torch.Generator().manual_seed(seed))


def cache_of(model: GPT, batch: int = 1, max_len: int = 64, **options: int) -> PagedCache:
    """A cache whose slots hold NaN until they are written, all but those beyond the blocks."""
    cache = PagedCache(model.config, batch, max_len, model.dtype, model.device, **options)
    poison(cache)
    return cache


def poison(cache: PagedCache) -> None:
    """NaN in every block that nobody holds."""
    size = cache.pool.block_size
    for block in range(cache.pool.n_blocks):
        if not cache.pool.holders(block):
            cache.storage.slots[:, :, :, block * size : (block + 1) * size] = torch.nan


def in_chunks(model: GPT, tokens: Tensor, sizes: list[int], cache: KVCache) -> Tensor:
    return torch.cat([model(part, cache) for part in tokens.split(sizes, dim=1)], dim=1)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 11])
@pytest.mark.parametrize("window", [None, 1, 4, 20])
def test_every_chunking_gives_the_logits_of_one_pass(block_size: int, chunk: int, window: int | None) -> None:
    model = random_gpt(small_config(windows=(window, None)))
    tokens = tokens_of(model, 2, 11)
    sizes = [chunk] * (11 // chunk) + ([11 % chunk] if 11 % chunk else [])
    got = in_chunks(model, tokens, sizes, cache_of(model, 2, block_size=block_size))
    torch.testing.assert_close(got, model(tokens), **EXACT)
    other = in_chunks(model, tokens, sizes, make_cache("contiguous", model.config, 2, 11, model.dtype))
    torch.testing.assert_close(got, other, rtol=0, atol=0)


def test_make_cache_makes_one_with_as_many_blocks_as_all_rows_need(model: GPT) -> None:
    cache = make_cache("paged", model.config, 3, 33, model.dtype, model.device)
    assert isinstance(cache, PagedCache)
    assert (cache.pool.n_blocks, cache.pool.block_size) == (9, 16)
    model(tokens_of(model, 3, 33), cache)
    assert cache.pool.n_free == 0


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=1.0, seed=3)])
def test_generation_over_blocks_is_generation(model: GPT, sampling: Sampling | None) -> None:
    prompts, options = [[1, 2, 3], list(range(20))], {"max_new_tokens": 9, "sampling": sampling, "ignore_eos": True}
    want = generate(model, prompts, **options).run()  # type: ignore[arg-type]
    got = generate(model, prompts, cache="paged", **options).run()  # type: ignore[arg-type]
    assert got.tokens == want.tokens
    assert got.timing.kv_bytes == want.timing.kv_bytes


# Bytes.


def test_bytes_are_the_pool_and_one_block_of_zeros() -> None:
    """2 layers x 2 KV heads x 8 x 2 (K and V) x 2 bytes: 128 a token; 5 blocks of 4 and the one beyond."""
    model = random_gpt(small_config(), torch.bfloat16)
    cache = PagedCache(model.config, 2, 9, model.dtype, n_blocks=5, block_size=4)
    assert cache.nbytes == (5 + 1) * 4 * 128
    assert cache.storage.slots.dtype == torch.bfloat16
    assert cache.used_bytes == 0
    model(torch.zeros(2, 7, dtype=torch.long), cache)
    assert cache.used_bytes == 14 * 128
    assert cache.pool.n_used == 4
    assert cache.fork().nbytes == cache.nbytes


def test_what_stands_beyond_the_blocks_is_zero_and_stays_so(model: GPT) -> None:
    cache = cache_of(model, 2, 12, block_size=4)
    mask = torch.arange(6) < torch.tensor([6, 2])[:, None]
    model(tokens_of(model, 2, 6), cache, positions=positions_from_mask(mask, [0, 0]))
    assert cache.storage.slots[:, :, :, cache.storage.beyond :].abs().max() == 0


def test_storage_is_born_zero_and_copies_whole_blocks_in_all_layers() -> None:
    config, pool = small_config(), BlockPool(3, 4)
    storage = BlockStorage(config, pool, torch.float32)
    assert storage.slots.abs().max() == 0
    k = torch.arange(2 * 2 * 8, dtype=torch.float32).view(2, 2, 8) + 1
    for layer in range(2):
        storage.write(layer, k + layer, -k - layer, storage.slots_of([2], 1, 3))
    storage.copy([(2, 0)])
    assert torch.equal(storage.slots[:, :, :, 0:4], storage.slots[:, :, :, 8:12])
    assert torch.equal(storage.slots[0, 1, :, 1:3], k + 1)
    assert torch.equal(storage.slots[1, 0, :, 1:3], -k)
    assert storage.slots_of([5, 1], 2, 6).tolist() == [22, 23, 4, 5]


# Padding, poison, errors.


@settings(max_examples=60)
@given(st.data())
def test_ragged_rows_equal_the_rows_alone(data: st.DataObject) -> None:
    """Any lengths, padded left or right, over several passes, in blocks of any size; unwritten slots hold NaN."""
    model = random_gpt(small_config(windows=(None, 3)))
    batch, block_size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    row_tokens = tokens_of(model, batch, 24, data.draw(st.integers(0, 99)))
    cache = cache_of(model, batch, block_size=block_size)
    got: list[list[Tensor]] = [[] for _ in range(batch)]
    for _ in range(data.draw(st.integers(1, 3))):
        lengths = data.draw(st.lists(st.integers(0, 6), min_size=batch, max_size=batch).filter(any))
        mask = padded(lengths, data.draw(st.booleans()))
        positions = positions_from_mask(mask, cache.rows_seen)
        logits = model(row_tokens.gather(1, positions.clamp(min=0)), cache, positions=positions)
        for row in range(batch):
            got[row].append(logits[row][mask[row]])
        assert [len(table) for table in cache.tables] == [-(-seen // block_size) for seen in cache.rows_seen]
    for row in range(batch):
        if seen := cache.rows_seen[row]:
            torch.testing.assert_close(torch.cat(got[row]), model(row_tokens[row : row + 1, :seen])[0], **EXACT)


def padded(lengths: list[int], left: bool) -> Tensor:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return mask.flip(1) if left else mask


def test_cache_full_says_the_numbers_and_changes_nothing(model: GPT) -> None:
    cache = cache_of(model, 2, 16, n_blocks=3, block_size=4)
    model(tokens_of(model, 2, 4), cache)
    kept, tables = cache.storage.slots.clone(), copy.deepcopy(cache.tables)
    with pytest.raises(CacheFull, match=r"2 new tokens need 2 more blocks of 4 tokens, and 1 of 3 are free"):
        model(tokens_of(model, 2, 1), cache)
    assert torch.equal(cache.storage.slots.nan_to_num(7), kept.nan_to_num(7))
    assert (cache.tables, cache.rows_seen, cache.pool.n_free) == (tables, [4, 4], 1)


def test_a_row_longer_than_max_len_is_refused_although_blocks_are_free(model: GPT) -> None:
    cache = cache_of(model, 1, 6, n_blocks=8, block_size=4)
    model(tokens_of(model, 1, 5), cache)
    with pytest.raises(CacheFull, match=r"holds 5 tokens and 2 more make 7.*max_len 6"):
        model(tokens_of(model, 1, 2), cache)
    assert cache.pool.n_used == 2


@pytest.mark.parametrize("options", [{"block_size": 0}, {"block_size": -4}, {"n_blocks": 0}])
def test_blocks_of_no_size_are_refused(model: GPT, options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be 1 or more"):
        PagedCache(model.config, 1, 8, model.dtype, **options)


def test_a_pass_that_fails_half_way_can_be_taken_again(model: GPT) -> None:
    tokens, cache = tokens_of(model, 1, 8), cache_of(model, block_size=3)
    model(tokens[:, :4], cache)
    work = model.blocks[1].mlp.forward
    model.blocks[1].mlp.forward = lambda x: 1 / 0  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        model(tokens[:, 4:], cache)
    model.blocks[1].mlp.forward = work  # type: ignore[method-assign]
    assert cache.tokens_seen == 4
    torch.testing.assert_close(model(tokens[:, 4:6], cache), model(tokens)[:, 4:6], **EXACT)
    cache.crop([6])
    assert len(cache.tables[0]) == 2


# Forks.


def test_a_fork_takes_no_block_until_it_writes_and_then_copies_exactly_one(
    model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = list[tuple[int, int]]()
    work: Callable[..., None] = BlockStorage.copy
    monkeypatch.setattr(BlockStorage, "copy", lambda self, copies: (copied.extend(copies), work(self, copies))[0])
    tokens, cache = tokens_of(model, 1, 20), cache_of(model, block_size=4)
    model(tokens[:, :10], cache)
    fork = cache.fork()
    assert cache.pool.n_used == 3
    got = model(tokens[:, 10:], fork)
    assert copied == [(cache.tables[0][2], fork.tables[0][2])]
    assert fork.tables[0][:2] == cache.tables[0][:2]
    assert cache.pool.n_used == 3 + 3
    torch.testing.assert_close(got, model(tokens)[:, 10:], **EXACT)
    model(tokens[:, 10:], cache)
    assert len(copied) == 1  # the other is the last holder by now, and writes where it is
    fork.reset()
    cache.reset()
    assert cache.pool.n_free == cache.pool.n_blocks


def test_a_cached_prefix_is_not_changed_by_its_reuse(model: GPT) -> None:
    tokens, prefix = tokens_of(model, 1, 10), cache_of(model, block_size=4)
    model(tokens[:, :6], prefix)
    kept = prefix.storage.slots[:, :, :, prefix.storage.slots_of(prefix.tables[0], 0, 6)].clone()
    answers = []
    for _ in range(2):
        fork = prefix.fork()
        answers.append(model(tokens[:, 6:], fork))
        fork.reset()
    torch.testing.assert_close(answers[0], answers[1], rtol=0, atol=0)
    assert torch.equal(prefix.storage.slots[:, :, :, prefix.storage.slots_of(prefix.tables[0], 0, 6)], kept)
    assert (prefix.length, prefix.pool.n_used) == (6, 2)


def test_rows_that_share_a_block_and_all_write_need_one_block_fewer_than_rows(model: GPT) -> None:
    """Three rows of one block, two blocks free: the last of the three keeps it."""
    tokens, cache = tokens_of(model, 1, 3), cache_of(model, n_blocks=3, block_size=4)
    model(tokens[:, :2], cache)
    cache.select([0, 0, 0])
    assert cache.pool.n_used == 1
    got = model(tokens[:, 2:].expand(3, 1), cache)
    torch.testing.assert_close(got, model(tokens)[:, 2:].expand(3, 1, -1), **EXACT)
    assert cache.pool.n_free == 0


def test_forks_that_all_write_are_refused_before_anything_changed(model: GPT) -> None:
    tokens, cache = tokens_of(model, 1, 3), cache_of(model, n_blocks=3, block_size=4)
    model(tokens[:, :2], cache)
    fork = cache.fork()
    cache.select([0, 0, 0])
    tables, kept = copy.deepcopy(cache.tables), cache.storage.slots.clone()
    with pytest.raises(CacheFull, match="3 new tokens need 3 more blocks of 4 tokens, and 2 of 3 are free"):
        model(tokens[:, 2:].expand(3, 1), cache)
    assert (cache.tables, cache.pool.n_free) == (tables, 2)
    assert torch.equal(cache.storage.slots.nan_to_num(7), kept.nan_to_num(7))
    fork.reset()
    model(tokens[:, 2:].expand(3, 1), cache)
    assert cache.rows_seen == [3, 3, 3]


def test_crop_gives_back_blocks_and_writes_after_it_change_no_fork(model: GPT) -> None:
    tokens, cache = tokens_of(model, 1, 12), cache_of(model, block_size=4)
    model(tokens[:, :11], cache)
    assert cache.max_rollback == 11
    fork = cache.fork()
    cache.crop([5])
    assert [len(cache.tables[0]), len(fork.tables[0])] == [2, 3]
    other = tokens_of(model, 1, 4, seed=9)
    got = model(other, cache)
    torch.testing.assert_close(got, model(torch.cat([tokens[:, :5], other], 1))[:, 5:], **EXACT)
    torch.testing.assert_close(model(tokens[:, 11:], fork), model(tokens)[:, 11:], **EXACT)
    fork.crop([0])
    assert fork.tables == [[]]


@pytest.mark.parametrize("lengths", [[5], [4, -1], [4, 8]])
def test_crop_refuses_what_it_cannot_take_back(model: GPT, lengths: list[int]) -> None:
    cache = cache_of(model, 2, block_size=4)
    model(tokens_of(model, 2, 7), cache)
    with pytest.raises(CannotCrop):
        cache.crop(lengths)
    assert cache.rows_seen == [7, 7]
    assert cache.pool.n_used == 4


class Family:
    """Caches that share a pool, and the tokens that each of their rows ought to hold."""

    def __init__(self, model: GPT, batch: int, n_blocks: int, block_size: int) -> None:
        self.model = model
        self.first = cache_of(model, batch, 14, n_blocks=n_blocks, block_size=block_size)
        self.members: list[tuple[PagedCache, list[list[int]]]] = [(self.first, [[] for _ in range(batch)])]

    def check(self) -> None:
        tables = [table for cache, _ in self.members for table in cache.tables]
        self.first.pool.check(tables)
        poison(self.first)

    def append(self, which: int, lengths: list[int], left: bool, seed: int) -> None:
        cache, rows = self.members[which]
        mask = padded(lengths, left)
        fed = tokens_of(self.model, *mask.shape, seed)
        positions = positions_from_mask(mask, cache.rows_seen)
        if not self.fits(cache, lengths):
            before = copy.deepcopy((cache.tables, cache.rows_seen)), cache.pool.n_free, cache.storage.slots.clone()
            with pytest.raises(CacheFull):
                self.model(fed, cache, positions=positions)
            assert ((cache.tables, cache.rows_seen), cache.pool.n_free) == before[:2]
            assert torch.equal(cache.storage.slots.nan_to_num(7), before[2].nan_to_num(7))
            return
        logits = self.model(fed, cache, positions=positions)
        for row, tokens in enumerate(rows):
            seen, new = len(tokens), fed[row][mask[row]].tolist()
            tokens += new
            if new:
                want = self.model(torch.tensor([tokens]))[0, seen:]
                torch.testing.assert_close(logits[row][mask[row]], want, **EXACT)

    def fits(self, cache: PagedCache, lengths: list[int]) -> bool:
        """By trying it out, row by row, on a copy of the books."""
        if any(seen + new > cache.max_len for seen, new in zip(cache.rows_seen, lengths, strict=True)):
            return False
        pool, tables = copy.deepcopy((cache.pool, cache.tables))
        try:
            for table, seen, new in zip(tables, cache.rows_seen, lengths, strict=True):
                if new:
                    pool.extend(table, seen, new)
        except CacheFull:
            return False
        return True


@settings(max_examples=80)
@given(st.data())
def test_appending_never_changes_a_fork_and_no_block_is_lost(data: st.DataObject) -> None:
    """Appends, forks, selections, crops and resets in any order, in a pool that is often too small."""
    model = random_gpt(small_config(windows=(None, 4)))
    family = Family(model, data.draw(st.integers(1, 2)), data.draw(st.integers(2, 14)), data.draw(st.integers(1, 4)))
    for _ in range(data.draw(st.integers(1, 10))):
        which = data.draw(st.integers(0, len(family.members) - 1))
        cache, rows = family.members[which]
        kind = data.draw(st.sampled_from(["append", "append", "append", "fork", "select", "crop", "reset"]))
        if kind == "append":
            lengths = data.draw(st.lists(st.integers(0, 5), min_size=len(rows), max_size=len(rows)).filter(any))
            family.append(which, lengths, data.draw(st.booleans()), data.draw(st.integers(0, 99)))
        elif kind == "fork":
            family.members.append((cache.fork(), [list(tokens) for tokens in rows]))
        elif kind == "select":
            chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=3))
            cache.select(chosen)
            family.members[which] = cache, [list(rows[row]) for row in chosen]
        elif kind == "crop":
            lengths = [data.draw(st.integers(0, len(tokens))) for tokens in rows]
            cache.crop(lengths)
            family.members[which] = cache, [tokens[:keep] for tokens, keep in zip(rows, lengths, strict=True)]
        else:
            cache.reset()
            family.members[which] = cache, [[] for _ in rows]
        family.check()
    for cache, _ in family.members:
        cache.reset()
    assert family.first.pool.n_free == family.first.pool.n_blocks


def test_every_holder_of_a_shared_block_may_be_dropped_in_any_order(model: GPT) -> None:
    cache = cache_of(model, 2, block_size=4)
    model(tokens_of(model, 2, 6), cache)
    forks = [cache.fork() for _ in range(3)]
    cache.select([1])
    for fork in (forks[1], forks[0]):
        fork.reset()
    cache.reset()
    assert cache.pool.n_used == 4
    forks[2].reset()
    assert cache.pool.n_used == 0
