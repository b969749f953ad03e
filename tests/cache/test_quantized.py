"""The quantized cache: what is old is rounded exactly as said, what is new is exact, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlab.cache import QuantizedCache, Step, make_cache, positions_from_mask
from kvlab.config import ModelConfig
from kvlab.cost import Format, kv_bytes
from kvlab.errors import CacheFull, CannotCrop, ConfigError
from kvlab.model import GPT
from toys import random_gpt, small_config

EXACT = {"rtol": 0, "atol": 1e-12}
SHAPE = {"n_head": 4, "n_kv_head": 2, "head_dim": 64, "hidden_size": 24, "max_seq_len": 256}


def shape(**changes: object) -> ModelConfig:
    return small_config(**(SHAPE | changes))


@pytest.fixture
def model() -> GPT:
    return random_gpt(shape())


def tokens_of(model: GPT, batch: int, time: int, seed: int = 1) -> Tensor:
    return torch.randint(model.config.vocab_size, (batch, time), generator=torch.Generator().manual_seed(seed))


def cache_of(
    config: ModelConfig, batch: int = 1, max_len: int = 200, bits: int = 8, residual: int = 32,
    dtype: torch.dtype = torch.float64,
) -> QuantizedCache:  # fmt: skip
    return QuantizedCache(config, batch, max_len, dtype, bits=bits, residual=residual)


def cold_of(seen: int, residual: int) -> int:
    """How many of the oldest tokens are codes once a pass is through."""
    return max(seen - residual, 0) // 32 * 32


class Fed:
    """Keys and values of a whole text, fed to a cache without a model, so that what comes out can be compared."""

    def __init__(self, config: ModelConfig, batch: int, time: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = (2, config.n_layer, batch, config.n_kv_head, time, config.head_dim)
        self.kv = torch.randn(size, generator=generator, dtype=torch.float64)
        self.kv *= torch.logspace(-1, 2, config.head_dim)  # channels of very different size

    def feed(self, cache: QuantizedCache, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """One pass; what each layer's queries may read."""
        step = cache.begin(positions)
        read = [self.append(cache, layer, step) for layer in range(self.kv.shape[1])]
        cache.commit(step)
        return read

    def append(self, cache: QuantizedCache, layer: int, step: Step) -> tuple[Tensor, Tensor]:
        at = step.positions.clamp(min=0)[:, None, :, None].expand(-1, self.kv.shape[3], -1, self.kv.shape[5])
        k, v = (self.kv[side, layer].gather(2, at).to(cache.dtype) for side in (0, 1))
        return cache.append(layer, k, v, step)

    def all_at_once(self, cache: QuantizedCache, time: int) -> list[tuple[Tensor, Tensor]]:
        return self.feed(cache, cache.next_positions(time))


def up(values: Tensor) -> Tensor:
    """The next float16 that is not below."""
    near = values.half()
    above = torch.nextafter(near, torch.full_like(near, torch.inf))
    return torch.where(near.float() < values, above, near).float()


def fake_quantized(values: Tensor, axis: int, bits: int) -> Tensor:
    """Round and come back, written down anew: one scale and one minimum for 32 neighbours along an axis."""
    runs = values.movedim(axis, -1).unflatten(-1, (-1, 32)).float()
    low = runs.amin(-1, keepdim=True)
    low = torch.where(
        low.half().float() > low, torch.nextafter(low.half(), torch.tensor(-torch.inf).half()), low.half()
    )
    span = (runs - low.float()).amax(-1, keepdim=True) / (2**bits - 1)
    scale = torch.where(span.half().float() < span, torch.nextafter(span.half(), torch.tensor(torch.inf).half()), span)
    scale, low = scale.half().float(), low.float()
    codes = ((runs - low) / scale).round().clamp(0, 2**bits - 1)
    return (codes * scale + low).flatten(-2).movedim(-1, axis).to(values.dtype)


def rounded_like(kv: Tensor, cold: int, bits: int) -> tuple[Tensor, Tensor]:
    """Keys and values [head, token, channel] as a cache holds them: the first ``cold`` rounded, the others exact."""
    keys, values = kv[0].clone(), kv[1].clone()
    if cold:
        keys[:, :cold] = fake_quantized(kv[0, :, :cold], 1, bits)  # along the tokens: a scale a channel and block
        values[:, :cold] = fake_quantized(kv[1, :, :cold], 2, bits)  # along the channels: a scale a token and group
    return keys, values


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("residual", [0, 5, 32, 64])
def test_old_tokens_are_rounded_by_the_rule_and_new_ones_are_exact(bits: int, residual: int) -> None:
    """Against a reference that is written down here: keys per channel, values per token, whole blocks of 32."""
    config = shape(n_layer=1)
    cache, fed = cache_of(config, 1, 160, bits, residual), Fed(config, 1, 160)
    for size in (70, 1, 1, 33, 1, 50, 4):
        before = cache.tokens_seen
        [(keys, values)] = fed.all_at_once(cache, size)
        want = rounded_like(fed.kv[:, 0, 0, :, : before + size], cold_of(before, residual), bits)
        torch.testing.assert_close(keys[0], want[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(values[0], want[1], rtol=1e-6, atol=1e-6)
        exact = slice(cold_of(before, residual), None)
        assert torch.equal(keys[0, :, exact], fed.kv[0, 0, 0, :, exact.start : before + size])
        assert torch.equal(values[0, :, exact], fed.kv[1, 0, 0, :, exact.start : before + size])
    assert cache.max_rollback == 160 - cold_of(160, residual)


@pytest.mark.parametrize("prompt", [1, 31, 32, 63, 64, 65, 100, 128])
@pytest.mark.parametrize("residual", [1, 32, 40])
def test_the_residual_window_is_exact_after_prefill_too(prompt: int, residual: int) -> None:
    """transformers 35185: the whole prompt was rounded, and only tokens of decode stayed exact."""
    config = shape()
    cache, fed = cache_of(config, residual=residual, bits=2), Fed(config, 1, prompt + 1)
    fed.all_at_once(cache, prompt)
    newest = slice(max(prompt - residual, 0), prompt + 1)
    for layer, read in enumerate(fed.all_at_once(cache, 1)):
        for side in (0, 1):
            assert torch.equal(read[side][0, :, newest], fed.kv[side, layer, 0, :, newest])


@settings(max_examples=30)
@given(st.data(), st.sampled_from([8, 4]), st.sampled_from([0, 3, 32]))
def test_any_chunking_of_ragged_rows_ends_in_the_same_codes(data: st.DataObject, bits: int, residual: int) -> None:
    """Padded left or right, in any number of passes: each row reads as if it had come alone and at once."""
    config, batch, longest = shape(n_layer=1), data.draw(st.integers(1, 3)), 150
    fed, cache = Fed(config, batch, longest), cache_of(config, batch, longest, bits, residual)
    for _ in range(data.draw(st.integers(1, 4))):
        lengths = data.draw(st.lists(st.integers(0, 36), min_size=batch, max_size=batch).filter(any))
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        mask = mask.flip(1) if data.draw(st.booleans()) else mask
        before = list(cache.rows_seen)
        [read] = fed.feed(cache, positions_from_mask(mask, before))
        for row, seen in enumerate(cache.rows_seen):
            want = rounded_like(fed.kv[:, 0, row, :, :seen], cold_of(before[row], residual), bits)
            for side in (0, 1):
                torch.testing.assert_close(read[side][row, :, :seen], want[side], rtol=1e-6, atol=1e-6)
            assert torch.isfinite(read[0][row]).all()
    for row, seen in enumerate(cache.rows_seen):
        if not seen:
            continue
        alone = cache_of(config, 1, longest, bits, residual)
        Fed.feed(_row(fed, row), alone, alone.next_positions(seen))
        blocks = cold_of(seen, residual) // 32
        for mine, theirs in ((cache.keys, alone.keys), (cache.values, alone.values)):
            assert torch.equal(mine.codes[:, row, :, :blocks], theirs.codes[:, 0, :, :blocks])
            assert torch.equal(mine.scale[:, row, :, :blocks], theirs.scale[:, 0, :, :blocks])


def _row(fed: Fed, row: int) -> Fed:
    alone = object.__new__(Fed)
    alone.kv = fed.kv[:, :, row : row + 1]
    return alone


@pytest.mark.parametrize("sizes", [[40], [20, 20], [1] * 40, [3] * 13 + [1]])
def test_nothing_is_rounded_before_a_block_is_older_than_the_residual(model: GPT, sizes: Sequence[int]) -> None:
    """With 32 residual tokens, up to 63 are exact: any chunking gives the logits of one pass."""
    tokens, cache = tokens_of(model, 1, 40), cache_of(model.config, bits=2)
    got = torch.cat([model(part, cache) for part in tokens.split(sizes, dim=1)], dim=1)
    torch.testing.assert_close(got, model(tokens), **EXACT)


def test_a_pass_sees_its_own_tokens_exactly(model: GPT) -> None:
    """A prompt in one pass has the logits of no cache at all, however few bits: rounding starts with the next pass."""
    tokens, cache = tokens_of(model, 1, 150), cache_of(model.config, bits=2, residual=0)
    torch.testing.assert_close(model(tokens, cache), model(tokens), **EXACT)
    next_one = model(tokens[:, :1], cache)
    assert not torch.allclose(next_one, model(torch.cat((tokens, tokens[:, :1]), 1))[:, -1:], atol=1e-3)


@pytest.mark.parametrize(("bits", "limit"), [(8, 0.02), (4, 0.3)])
def test_logits_stay_near_those_of_the_exact_cache(model: GPT, bits: int, limit: float) -> None:
    tokens = tokens_of(model, 1, 170)
    quantized, exact = cache_of(model.config, bits=bits), make_cache("contiguous", model.config, 1, 200, model.dtype)
    got, want = ([model(part, cache) for part in tokens.split(30, dim=1)][-1] for cache in (quantized, exact))
    off = ((got - want).norm() / want.norm()).item()
    assert 0 < off < limit


@pytest.mark.parametrize("windows", [(None, 20), (20, 20)])
def test_windows_hide_codes_as_they_hide_anything(windows: tuple[int | None, ...]) -> None:
    """A window that is shorter than the residual sees exact tokens only, so nothing changes at all."""
    model = random_gpt(shape(windows=windows))
    tokens, cache = tokens_of(model, 1, 110), cache_of(model.config, bits=2)
    got = torch.cat([model(part, cache) for part in tokens.split(11, dim=1)], dim=1)
    same = torch.isclose(got, model(tokens), **EXACT).all()
    assert same == (None not in windows)


def test_unused_slots_leak_no_nan(model: GPT) -> None:
    """What no query can reach holds NaN, what is masked holds large finite numbers: the output does not change."""
    tokens = tokens_of(model, 2, 120)
    lengths = [100, 10]
    mask = torch.arange(100) < torch.tensor(lengths)[:, None]
    clean, poisoned = (cache_of(model.config, 2, 200) for _ in range(2))
    beyond = [cold_of(length, 32) // 32 for length in lengths]
    for store in (poisoned.keys, poisoned.values):
        store.codes.fill_(255)
        for part in (store.scale, store.minimum):
            assert part is not None
            part.fill_(torch.nan)
            part[:, 1, :, : beyond[0]] = 60.0  # masked, but the longer row makes attention read these of row 1
    poisoned.tail.fill_(torch.nan)
    for cache in (clean, poisoned):
        model(tokens[:, :100], cache, positions=positions_from_mask(mask, [0, 0]))
    fed = tokens[torch.arange(2), torch.tensor(lengths)][:, None]
    for _ in range(3):
        got, want = model(fed, poisoned), model(fed, clean)
        torch.testing.assert_close(got, want, **EXACT)
        assert torch.isfinite(got).all()


def test_padding_is_never_written(model: GPT) -> None:
    cache = cache_of(model.config, 2, residual=0)
    mask = torch.arange(40) < torch.tensor([40, 3])[:, None]
    model(tokens_of(model, 2, 40), cache, positions=positions_from_mask(mask, [0, 0]))
    assert cache.keys.codes[:, 0, :, 0].any()
    assert not cache.keys.codes[:, 1].any()
    assert not cache.values.codes[:, 1].any()
    assert cache.tail[:, :, 1, :, 3:].abs().max() == 0
    assert cache.tail[:, :, 1, :, :3].abs().min() > 0
    assert cache.lengths == [40, 3]


def test_cache_is_reset_between_requests(model: GPT) -> None:
    cache, fresh = cache_of(model.config), cache_of(model.config)
    for part in tokens_of(model, 1, 130, seed=2).split(70, dim=1):
        model(part, cache)
    cache.reset()
    assert cache.tokens_seen == cache.max_rollback == 0
    for part in tokens_of(model, 1, 90, seed=3).split(30, dim=1):
        torch.testing.assert_close(model(part, cache), model(part, fresh), rtol=0, atol=0)


def test_a_pass_that_fails_half_way_changes_nothing(model: GPT) -> None:
    """Also where its first layer had turned a block into codes already."""
    tokens, cache, whole = tokens_of(model, 1, 130), cache_of(model.config), cache_of(model.config)
    for each in (cache, whole):
        model(tokens[:, :60], each)
    broken = model.blocks[1].mlp.forward
    model.blocks[1].mlp.forward = lambda x: 1 / 0  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        model(tokens_of(model, 1, 70, seed=9), cache)
    model.blocks[1].mlp.forward = broken  # type: ignore[method-assign]
    assert cache.tokens_seen == 60
    assert cache.used_bytes == whole.used_bytes
    for part in tokens[:, 60:].split(35, dim=1):
        torch.testing.assert_close(model(part, cache), model(part, whole), rtol=0, atol=0)


def test_keys_that_are_not_finite_are_refused_when_they_would_become_codes() -> None:
    config = shape()
    cache, fed = cache_of(config), Fed(config, 1, 70)
    fed.kv[0, 1, 0, 0, 3, 3] = torch.nan
    with pytest.raises(ConfigError, match="the keys of layer 1 holds NaN or infinity"):
        fed.all_at_once(cache, 70)
    assert cache.tokens_seen == 0


def test_a_cached_prefix_is_not_changed_by_its_reuse(model: GPT) -> None:
    tokens, prefix = tokens_of(model, 1, 140), cache_of(model.config)
    model(tokens[:, :70], prefix)
    held = (prefix.keys.codes, prefix.values.codes, prefix.keys.scale, prefix.tail)
    kept = [tensor.clone() for tensor in held]
    answers = []
    for _ in range(2):
        fork = prefix.fork()
        assert (fork.residual, fork.grid, fork.lengths) == (32, prefix.grid, [70])
        answers.append([model(part, fork) for part in tokens[:, 70:].split(35, dim=1)][-1])
    torch.testing.assert_close(answers[0], answers[1], rtol=0, atol=0)
    for before, after in zip(
        kept, (prefix.keys.codes, prefix.values.codes, prefix.keys.scale, prefix.tail), strict=True
    ):
        assert torch.equal(before, after)
    assert prefix.length == 70


def test_select_reorders_and_repeats_rows(model: GPT) -> None:
    tokens, cache = tokens_of(model, 2, 120), cache_of(model.config, 2)
    mask = torch.arange(100) < torch.tensor([100, 70])[:, None]
    model(tokens[:, :100], cache, positions=positions_from_mask(mask, [0, 0]))
    plain = cache.fork()
    cache.select([1, 0, 1])
    assert cache.rows_seen == [70, 100, 70]
    fed = torch.tensor([[5], [6]])
    for _ in range(40):  # until a block of each row has become codes
        got, want = model(fed[[1, 0, 1]], cache), model(fed, plain)
        torch.testing.assert_close(got, want[[1, 0, 1]], **EXACT)


def test_crop_takes_back_exact_tokens_row_by_row() -> None:
    """As if they had never come: the tokens after the crop take their places, and blocks fill up as before."""
    config = shape(n_layer=1)
    first, second, longest = Fed(config, 2, 160, seed=0), Fed(config, 2, 160, seed=1), 160
    cache, never = (cache_of(config, 2, longest, bits=4) for _ in range(2))
    first.all_at_once(cache, 90)
    assert cache.max_rollback == 90 - 32
    cache.crop([70, 33])
    mask = torch.arange(70) < torch.tensor([70, 33])[:, None]
    first.feed(never, positions_from_mask(mask, [0, 0]))
    assert cache.lengths == never.lengths == [70, 33]
    never._cold = list(cache._cold)  # rows that were longer once have a block of codes that a fresh one has not
    never.keys.copy_(cache.keys)
    never.values.copy_(cache.values)
    for _ in range(25):
        [got], [want] = (second.all_at_once(each, 2) for each in (cache, never))
        for row, seen in enumerate(cache.rows_seen):
            for side in (0, 1):
                assert torch.equal(got[side][row, :, :seen], want[side][row, :, :seen])


@pytest.mark.parametrize("keep", [31, 0])
def test_crop_refuses_what_became_codes(keep: int) -> None:
    config = shape()
    cache = cache_of(config)
    Fed(config, 1, 70).all_at_once(cache, 70)
    with pytest.raises(CannotCrop, match=f"seen 70 tokens and was to keep {keep}; this cache keeps between 32 and 70"):
        cache.crop([keep])
    assert cache.rows_seen == [70]
    cache.crop([32])
    assert cache.max_rollback == 0


def test_cache_full_says_the_numbers_and_writes_nothing(model: GPT) -> None:
    cache = cache_of(model.config, max_len=70)
    model(tokens_of(model, 1, 69), cache)
    kept = cache.tail.clone(), cache.keys.codes.clone()
    with pytest.raises(CacheFull, match=r"holds 69 tokens and 2 more make 71.*max_len 70"):
        model(tokens_of(model, 1, 2), cache)
    assert torch.equal(cache.tail, kept[0])
    assert torch.equal(cache.keys.codes, kept[1])
    model(tokens_of(model, 1, 1), cache)
    assert cache.length == 70


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("residual", [0, 32])
def test_bytes_are_those_of_the_cost_model_scales_counted(bits: int, residual: int) -> None:
    """A code, and for 32 of them a float16 scale and a float16 minimum; the newest tokens in 16 bits."""
    config, length = shape(), 160 + residual
    cache = cache_of(config, 2, length, bits, residual, torch.bfloat16)
    Fed(config, 2, length).all_at_once(cache, length)
    format_ = Format(bits, 32, 32)
    assert cache.used_bytes == kv_bytes(config, [length, length], format_, residual=residual)
    # A block that is filling stays exact until it is full: its room comes on top.
    assert (
        cache.nbytes == kv_bytes(config, [length, length], format_, residual=residual) + 2 * 32 * cache.bytes_per_token
    )
    exact = make_cache("contiguous", config, 2, length, torch.bfloat16)
    assert cache.nbytes < exact.nbytes


def test_used_bytes_follow_the_tokens() -> None:
    config = shape()
    cache, fed = cache_of(config, dtype=torch.bfloat16), Fed(config, 1, 200)
    each = cache.bytes_per_token
    fed.all_at_once(cache, 63)
    assert cache.used_bytes == 63 * each
    fed.all_at_once(cache, 1)
    assert cache.used_bytes == 32 * each + kv_bytes(config, 32, Format(8, 32, 32))
    assert cache.lengths == [64]


def test_a_short_cache_has_no_codes_at_all(model: GPT) -> None:
    """Where max_len is within the residual: a plain cache, in a ring."""
    tokens, cache = tokens_of(model, 1, 20), cache_of(model.config, max_len=20, bits=2)
    assert cache.keys.nbytes == cache.values.nbytes == 0
    got = torch.cat([model(part, cache) for part in tokens.split(3, dim=1)], dim=1)
    torch.testing.assert_close(got, model(tokens), **EXACT)


@pytest.mark.parametrize("head_dim", [8, 48, 80])
def test_a_head_that_is_not_whole_groups_is_refused(head_dim: int) -> None:
    with pytest.raises(ConfigError, match=f"a head has rows of {head_dim} = .* groups of 32 do not divide"):
        cache_of(shape(head_dim=head_dim))


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"bits": 3}, "bits is 3"),
        ({"residual": -1}, "residual is -1; it must be 0 or more"),
        ({"dtype": torch.int64}, "floating point"),
        ({"batch": 0}, "1 or more"),
    ],
)
def test_impossible_settings_are_refused(settings_: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cache_of(shape(), **settings_)  # type: ignore[arg-type]


def test_kinds_by_name() -> None:
    for kind, bits in (("int8", 8), ("int4", 4)):
        cache = make_cache(kind, shape(), 1, 100, torch.float32)
        assert isinstance(cache, QuantizedCache)
        assert (cache.grid.bits, cache.residual) == (bits, 32)
