"""Caches that evict by attention equal one masked pass whose evictions are worked out token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cache.windowed import turned
from kvlab.cache import HeavyHitterCache, KVCache, SnapKVCache, Visibility, make_cache, positions_from_mask
from kvlab.errors import CannotCrop, ConfigError
from kvlab.model import GPT
from toys import random_gpt, small_config

CLOSE = {"rtol": 0, "atol": 2e-5}


@pytest.fixture(scope="module")
def model() -> GPT:
    """Attention that is sharp: where all tokens get the same, the oldest would always be the heaviest."""
    model = random_gpt(small_config())
    for block in model.blocks:
        block.attention.qkv.weight[: 6 * 8] *= 30
    return model


def tokens_of(model: GPT, batch: int, time: int, seed: int = 1) -> Tensor:
    return torch.randint(model.config.vocab_size, (batch, time), generator=torch.Generator().manual_seed(seed))


def h2o(model: GPT, heavy: int, recent: int, batch: int = 1) -> HeavyHitterCache:
    return HeavyHitterCache(model.config, batch, 64, model.dtype, heavy=heavy, recent=recent)


def snapkv(model: GPT, budget: int, observed: int = 3, pool: int = 3, batch: int = 1) -> SnapKVCache:
    return SnapKVCache(model.config, batch, 64, model.dtype, budget=budget, observed=observed, pool=pool)


def read(model: GPT, tokens: Tensor, cache: KVCache, sizes: list[int]) -> Tensor:
    return torch.cat([model(part, cache) for part in tokens.split(sizes, dim=1)], dim=1)


class Head:
    """What one KV head of one layer keeps: plain lists, one token at a time."""

    def __init__(self) -> None:
        self.scores: dict[int, float] = {}

    def h2o(self, weights: Tensor, new: range, heavy: int, recent: int) -> None:
        """Weights [queries of the group and pass, tokens of the text]."""
        self.scores |= dict.fromkeys(new, 0.0)
        for token in self.scores:
            self.scores[token] += float(weights[:, token].sum())
        while len(self.scores) > heavy + recent:
            old = [token for token in self.scores if token <= new[-1] - recent]
            del self.scores[min(old, key=lambda token: self.scores[token])]

    def snapkv(self, weights: Tensor, new: range, budget: int, observed: int, pool: int) -> None:
        """Weights [group, queries of the pass, tokens of the text]."""
        self.scores |= dict.fromkeys(new, 0.0)
        if len(new) == 1:
            return
        held = sorted(self.scores)
        votes = [float(weights[:, -observed:, token].sum()) for token in held]
        for place, token in enumerate(held):
            near = votes[max(place - pool // 2, 0) : place + pool // 2 + 1]
            self.scores[token] = sum(near) / len(near)
        newest = [token for token in held if token > new[-1] - observed]
        others = sorted((t for t in held if t not in newest), key=lambda token: -self.scores[token])
        self.scores = {token: self.scores[token] for token in newest + others[: budget - len(newest)]}


def oracle(model: GPT, tokens: Tensor, sizes: list[int], policy: str, **numbers: int) -> Tensor:
    """Logits [time, vocab_size] of a text read in passes; every weight from the whole text, masked by what is kept."""
    config, time = model.config, len(tokens)
    group = config.n_head // config.n_kv_head
    x = model.embedding(tokens[None])
    for block in model.blocks:
        attention, normed = block.attention, block.attention_norm(x)
        heads = attention.qkv(normed).view(time, -1, config.head_dim).transpose(0, 1)
        q, k, v = heads.split([config.n_head, config.n_kv_head, config.n_kv_head])
        kept, out, start = (
            [Head() for _ in range(config.n_kv_head)],
            torch.zeros(time, config.n_head, config.head_dim),
            0,
        )
        out = out.to(x.dtype)
        for size in sizes:
            new = range(start, start + size)
            for index, head in enumerate(kept):
                all_weights = torch.zeros(group, size, time, dtype=x.dtype)
                for t in new:
                    seen = torch.tensor([j in head.scores or start <= j <= t for j in range(time)])
                    for g in range(group):
                        query = turned(q[index * group + g, t][None], t - torch.arange(time), model)[0]
                        scores = (query * k[index]).sum(-1) / config.head_dim**0.5
                        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
                        all_weights[g, t - start] = weights
                        out[t, index * group + g] = weights @ v[index]
                if policy == "h2o":
                    head.h2o(all_weights.flatten(0, 1), new, **numbers)
                else:
                    head.snapkv(all_weights, new, **numbers)
            start += size
        x = x + attention.out(out.flatten(1)[None])
        x = x + block.mlp(block.mlp_norm(x))
    return model.head(model.norm(x))[0]


def chunks(time: int, chunk: int) -> list[int]:
    return [chunk] * (time // chunk) + ([time % chunk] if time % chunk else [])


@pytest.mark.parametrize("length", [4, 7, 8, 9, 17])  # around the budget of 8: W - 1, W, W + 1, 2W + 1
@pytest.mark.parametrize("chunk", [1, 2, 3, 17])
@pytest.mark.parametrize(("heavy", "recent"), [(4, 4), (1, 7), (7, 1)])
def test_h2o_every_chunking_equals_one_masked_pass(
    model: GPT, heavy: int, recent: int, chunk: int, length: int
) -> None:
    tokens, sizes = tokens_of(model, 1, length), chunks(length, chunk)
    got = read(model, tokens, h2o(model, heavy, recent), sizes)
    torch.testing.assert_close(got[0], oracle(model, tokens[0], sizes, "h2o", heavy=heavy, recent=recent), **CLOSE)


@pytest.mark.parametrize(
    "sizes", [[5], [7, 1], [8, 1, 1], [9, 1, 1, 1], [17, 1, 1], [6, 6, 6, 1], [13, 1, 1, 5, 1], [1] * 12]
)
def test_snapkv_equals_one_masked_pass(model: GPT, sizes: list[int]) -> None:
    tokens, numbers = tokens_of(model, 1, sum(sizes)), {"budget": 8, "observed": 3, "pool": 3}
    got = read(model, tokens, snapkv(model, **numbers), sizes)
    torch.testing.assert_close(got[0], oracle(model, tokens[0], sizes, "snapkv", **numbers), **CLOSE)


@pytest.mark.parametrize("policy", ["h2o", "snapkv"])
def test_chunks_after_heads_have_parted(model: GPT, policy: str) -> None:
    sizes = [28, 5, 1, 6, 4]
    tokens = tokens_of(model, 1, sum(sizes))
    numbers = {"heavy": 6, "recent": 2} if policy == "h2o" else {"budget": 8, "observed": 3, "pool": 1}
    cache: HeavyHitterCache | SnapKVCache = h2o(model, 6, 2) if policy == "h2o" else snapkv(model, 8, pool=1)
    first = model(tokens[:, :28], cache)
    kept = cache.positions[0, 0].sort(dim=-1).values
    assert not torch.equal(kept[0], kept[1])
    got = torch.cat((first, read(model, tokens[:, 28:], cache, sizes[1:])), dim=1)
    torch.testing.assert_close(got[0], oracle(model, tokens[0], sizes, policy, **numbers), **CLOSE)


def test_a_prompt_after_a_pass_of_padding_alone(model: GPT) -> None:
    tokens, cache = tokens_of(model, 1, 5), h2o(model, 4, 3)
    model(tokens[:, :1], cache, positions=torch.tensor([[-1]]))
    torch.testing.assert_close(model(tokens, cache), model(tokens, h2o(model, 4, 3)), **CLOSE)


def test_h2o_after_single_tokens_a_chunk_and_single_tokens_again(model: GPT) -> None:
    """A chunk finds another slot empty in each head: each has its own mask, and all its query heads must get it."""
    sizes, cache = [1] * 12 + [9, 1, 1, 4, 1, 1, 1], h2o(model, 4, 3)
    tokens = tokens_of(model, 1, sum(sizes))
    singles = read(model, tokens[:, :12], cache, sizes[:12])
    empty = cache.positions[:, 0, :, :8] >= 64
    assert not torch.equal(empty[:, 0], empty[:, 1])
    got = torch.cat((singles, read(model, tokens[:, 12:], cache, sizes[12:])), dim=1)
    torch.testing.assert_close(got[0], oracle(model, tokens[0], sizes, "h2o", heavy=4, recent=3), **CLOSE)


@given(data=st.data())
@settings(max_examples=40)
@pytest.mark.parametrize("make", [lambda m, n: h2o(m, 4, 3, n), lambda m, n: snapkv(m, 7, batch=n)])
def test_scores_summed_over_the_batch_rows_evict_what_each_would_alone(model: GPT, make, data: st.DataObject) -> None:
    """H2O 14."""
    batch = data.draw(st.integers(1, 3), "batch")
    texts = [tokens_of(model, 1, 40, seed)[0] for seed in range(batch)]
    together, alone = make(model, batch), [make(model, 1) for _ in texts]
    for _ in range(data.draw(st.integers(1, 6), "passes")):
        time = data.draw(st.sampled_from([1, 1, 2, 5]), "time")
        # A row is padding, or brings its tokens on the left.
        counts = data.draw(st.lists(st.integers(0, time), min_size=batch, max_size=batch), "counts")
        counts = [1 if time > 1 and count == 0 else count for count in counts]
        mask = torch.arange(time) < torch.tensor(counts)[:, None]
        positions = positions_from_mask(mask, together.rows_seen)
        tokens = torch.stack([text[at.clamp(min=0)] for text, at in zip(texts, positions, strict=True)])
        logits = model(tokens, together, positions=positions)
        for row, count in enumerate(counts):
            if count == 0:
                continue
            # One token in a pass of several is a pass of several: fed with padding, as here.
            own = model(tokens[row : row + 1], alone[row], positions=positions[row : row + 1])
            torch.testing.assert_close(logits[row, :count], own[0, :count], **CLOSE)
            held = alone[row].positions[:, 0].sort(dim=-1).values[..., : alone[row].length]
            assert torch.equal(together.positions[:, row].sort(dim=-1).values[..., : held.shape[2]], held)
        assert together.lengths == [cache.length for cache in alone]


def test_a_row_that_waits_forgets_nothing(model: GPT) -> None:
    """Full rows, one of which is padding for some steps: it evicts only when it brings a token."""
    tokens, both, alone = tokens_of(model, 2, 16), h2o(model, 4, 3, 2), h2o(model, 4, 3)
    for token in tokens[:, :10].split(1, dim=1):  # one by one, so that the free slots lie anywhere
        model(token, both)
        model(token[1:], alone)
    for step in range(3):
        model(tokens[:, 10 + step : 11 + step], both, positions=torch.tensor([[10 + step], [-1]]))
        assert both.lengths == [7, 7]
    for step in range(3):
        token = tokens[:, 10 + step : 11 + step]
        together = model(token, both, positions=torch.tensor([[13 + step], [10 + step]]))
        torch.testing.assert_close(together[1], model(token[1:], alone)[0], **CLOSE)


def test_eviction_once_a_prompt_length_is_bounded_after_every_step(model: GPT) -> None:
    cache = h2o(model, 4, 4)
    for size in (20, 1, 1, 6, 1):
        model(tokens_of(model, 1, size), cache)
        assert cache.length == 8
        assert ((cache.positions < 64).sum(dim=-1) == 8).all()


def test_the_newest_always_stay(model: GPT) -> None:
    cache = h2o(model, 2, 3)
    for end in range(1, 30):
        model(tokens_of(model, 1, 1, end), cache)
        newest = torch.arange(max(end - 3, 0), end)
        assert (cache.positions[..., None] == newest).any(dim=3).sum(dim=-1).eq(len(newest)).all()


def test_heads_keep_different_tokens(model: GPT) -> None:
    cache = h2o(model, 6, 2)
    read(model, tokens_of(model, 1, 40), cache, [1] * 40)
    kept = cache.positions[:, 0].sort(dim=-1).values
    assert not torch.equal(kept[0, 0], kept[0, 1])


def test_bytes_are_those_of_the_budget_and_of_positions_and_scores(model: GPT) -> None:
    cache = h2o(model, 5, 3)
    heads, width = 2 * 2, 8 * 8
    expected = heads * 9 * (2 * width + 8 + 8) + heads * 8  # float64: scores of 8 bytes; where the next token goes
    assert cache.nbytes == expected
    model(tokens_of(model, 1, 40), cache)
    assert cache.nbytes == expected
    assert cache.used_bytes == heads * 8 * 2 * width


def test_snapkv_holds_the_budget_and_the_answer(model: GPT) -> None:
    cache = snapkv(model, 8)
    model(tokens_of(model, 1, 30), cache)
    assert cache.length == 8
    for _ in range(5):
        model(tokens_of(model, 1, 1), cache)
    assert (cache.length, cache.tokens_seen) == (13, 35)
    slot = 2 * 2 * (2 * 8 * 8 + 8 + 8)
    assert cache.nbytes == (9 + 64) * slot + 2 * 2 * 8


def test_a_fact_and_its_neighbours_are_kept_together(model: GPT) -> None:
    """Pooling: a single loud token brings those beside it along."""
    votes = torch.zeros(1, 2, 20, dtype=torch.float64)
    cache = snapkv(model, 6, observed=3, pool=3)
    votes[..., 8] = 1.0
    kept = cache._best(cache._pooled(votes), torch.arange(20).expand(1, 2, 20), (6,))
    assert kept[0, 0].tolist() == [7, 8, 9, 17, 18, 19]


@pytest.mark.parametrize("time", [1, 4])
@pytest.mark.parametrize("make", [lambda m: h2o(m, 4, 3), lambda m: snapkv(m, 7)])
def test_a_failed_pass_changes_nothing(model: GPT, make, time: int) -> None:
    tokens, cache, other = tokens_of(model, 1, 20), make(model), make(model)
    model(tokens[:, :12], cache)
    model(tokens[:, :12], other)
    step = cache.begin(cache.next_positions(time))
    noise = torch.full((1, 2, time, 8), 7.0, dtype=torch.float64)
    cache.append(0, noise, noise, step)
    cache.observe(0, noise.repeat(1, 3, 1, 1), step)  # and the second layer fails
    torch.testing.assert_close(model(tokens[:, 12:], cache), model(tokens[:, 12:], other), **CLOSE)


@pytest.mark.parametrize("make", [lambda m: h2o(m, 4, 3, 2), lambda m: snapkv(m, 7, batch=2)])
def test_forks_selected_rows_and_reset(model: GPT, make) -> None:
    tokens, cache = tokens_of(model, 2, 20), make(model)
    fresh = read(model, tokens, make(model), [12] + [1] * 8)
    first = model(tokens[:, :12], cache)
    twin, swapped, other = cache.fork(), cache.fork(), cache.fork()
    other.reset()  # none of the others' business
    swapped.select([1, 0, 1])
    torch.testing.assert_close(read(model, tokens[:, 12:], twin, [1] * 8), fresh[:, 12:], **CLOSE)
    rows = [1, 0, 1]
    torch.testing.assert_close(read(model, tokens[rows, 12:], swapped, [1] * 8), fresh[rows, 12:], **CLOSE)
    torch.testing.assert_close(read(model, tokens[:, 12:], cache, [1] * 8), fresh[:, 12:], **CLOSE)
    cache.reset()
    assert (cache.length, cache.tokens_seen) == (0, 0)
    torch.testing.assert_close(model(tokens[:, :12], cache), first, **CLOSE)
    cache.reset()
    torch.testing.assert_close(
        read(model, tokens, cache, [1] * 20), read(model, tokens, make(model), [1] * 20), **CLOSE
    )


def test_nothing_can_be_taken_back(model: GPT) -> None:
    cache = h2o(model, 4, 3)
    model(tokens_of(model, 1, 5), cache)
    with pytest.raises(CannotCrop, match="keeps between 5 and 5"):
        cache.crop([4])


def test_steps_need_no_mask_where_rows_are_alike(model: GPT) -> None:
    cache = h2o(model, 4, 3, 2)
    assert cache.begin(cache.next_positions(5)).view(0).visibility is Visibility.CAUSAL
    model(tokens_of(model, 2, 9), cache)
    assert cache.begin(cache.next_positions(1)).view(1).visibility is Visibility.ALL


def test_the_full_path_is_not_asked_for_queries(model: GPT) -> None:
    cache = make_cache("contiguous", model.config, 1, 8, model.dtype)
    assert not cache.needs_queries
    with pytest.raises(ConfigError, match="ContiguousCache keeps tokens whatever is looked at"):
        cache.observe(0, torch.zeros(1, 6, 1, 8, dtype=torch.float64), cache.begin(cache.next_positions(1)))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("h2o:0+4", {}, "heavy is 0; it must be 1 or more"),
        ("h2o:4+0", {}, "recent is 0"),
        ("h2o:60+5", {}, "a cache of 65 tokens for small, whose context is 64"),
        ("h2o:4+4", {"windows": (8, None)}, "layers of small have windows"),
        ("snapkv:16", {}, "a budget of 16 tokens keeps none beside the 16 observed"),
        ("snapkv:", {}, "give budget, as in snapkv:256"),
    ],
)
def test_what_cannot_be_is_refused(kind: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_cache(kind, small_config(**changes), 1, 32, torch.float32)


def test_a_pool_is_odd(model: GPT) -> None:
    with pytest.raises(ConfigError, match="pool is 4"):
        snapkv(model, 8, pool=4)
