"""The pool of an engine that takes its memory once: start-up messages and what they mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.cost import GIB, Pool, clamp_max_tokens, kv_bytes, pool_bytes, weight_bytes
from kvlab.errors import ConfigError

MIB = 2**20


@pytest.mark.parametrize(
    ("blocks", "tokens", "max_len"),
    [(229, 3664, 4096), (378, 6048, 8192), (2439, 39_024, 131_072)],
)
def test_4096_over_3664_at_start(blocks: int, tokens: int, max_len: int) -> None:
    """vllm 2418, OpenRLHF 336, SubgraphRAG 19: max seq len is larger than what the cache can store."""
    pool = Pool(blocks)
    assert pool.tokens == tokens
    assert not pool.holds(max_len)
    assert pool.holds(tokens)
    assert not pool.holds(tokens + 1)


def test_39024_tokens_of_llama_3_1() -> None:
    """SubgraphRAG 19: 4.76 GiB were there, 131,072 tokens need 16."""
    assert round(kv_bytes("llama-3.1-8b", 39_024) / GIB, 2) == 4.76
    assert kv_bytes("llama-3.1-8b", 131_072) == 16 * GIB
    pool = Pool.of("llama-3.1-8b", kv_bytes("llama-3.1-8b", 39_024))
    assert (pool.blocks, pool.tokens) == (2439, 39_024)


def test_the_pool_is_preallocated() -> None:
    """vllm 4253: a 0.5B model "needs" 21 GB. 0.9 x 81,920 MiB are taken whatever the model."""
    for model in ("qwen2.5-0.5b", "llama-3.1-8b"):
        weights = weight_bytes(model)
        free = pool_bytes(81_920 * MIB, 0.9, weights)
        assert free + weights == 73_728 * MIB


def test_the_peak_of_the_activations_comes_off_the_pool() -> None:
    """vllm 10517: what the engine profiles is not there for the cache."""
    assert pool_bytes(100, 0.5, 20, 7) == 23


def test_two_ooms_with_opposite_fixes() -> None:
    """Awesome-ML-SYS 259: 80 GB, weights 60. At 0.70 nothing starts; at 0.90 there are 12, and 8 outside."""
    giga = 10**9
    assert pool_bytes(80 * giga, 0.70, 60 * giga) == -4 * giga
    assert pool_bytes(80 * giga, 0.90, 60 * giga) == 12 * giga
    with pytest.raises(ConfigError, match="holds nothing; leave more memory to it"):
        Pool.of("llama-3-8b", pool_bytes(80 * giga, 0.70, 60 * giga))


@pytest.mark.parametrize(("blocks", "times"), [(1381, 10.79), (127_626, 997.08)])
def test_maximum_concurrency(blocks: int, times: float) -> None:
    """vllm 8031: pool tokens over max_model_len, a worst case."""
    assert round(Pool(blocks).concurrency(2048), 2) == times


def test_concurrency_is_a_worst_case() -> None:
    """Ten requests of 2,048 tokens fit, and twice as many of half the length."""
    pool = Pool(1381)
    assert pool.blocks // pool.blocks_of(2048) == int(pool.concurrency(2048)) == 10
    assert pool.blocks // pool.blocks_of(1024) == 21


@given(st.integers(1, 500), st.integers(1, 40), st.integers(0, 20_000))
def test_blocks_of_a_request(blocks: int, size: int, tokens: int) -> None:
    pool = Pool(blocks, size)
    needed = pool.blocks_of(tokens)
    assert (needed - 1) * size < tokens <= needed * size or tokens == needed == 0
    assert pool.holds(tokens) == (tokens <= pool.tokens)


@given(st.integers(2**24, 2**36), st.sampled_from([1, 16, 128]), st.sampled_from([1, 2, 8, 16]))
def test_a_pool_takes_all_blocks_that_fit(available: int, block_size: int, devices: int) -> None:
    pool = Pool.of("llama-3-8b", available, block_size=block_size, tensor_parallel=devices)
    each = kv_bytes("llama-3-8b", block_size, tensor_parallel=devices)
    assert pool.blocks * each <= available < (pool.blocks + 1) * each


def test_a_pool_without_groups_stores_every_token_of_a_windowed_layer() -> None:
    """B6: Gemma-3 in a runtime that ignores the window."""
    pool = Pool.of("gemma-3-27b", 62 * GIB)
    assert pool.tokens == 131_072


def test_requested_tokens_beyond_the_limit_are_clamped() -> None:
    """gpustack 929: 12 + 8,192 > 8,192, the request was refused; 8,180 would do."""
    assert clamp_max_tokens(12, 8192, 8192) == 8180
    assert clamp_max_tokens(12, 100, 8192) == 100
    assert clamp_max_tokens(8191, 5, 8192) == 1
    with pytest.raises(
        ConfigError, match="a prompt of 8192 tokens leaves no room for an answer below the limit of 8192"
    ):
        clamp_max_tokens(8192, 1, 8192)
    with pytest.raises(ConfigError, match="requested is 0"):
        clamp_max_tokens(12, 0, 8192)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((100, 0.0, 1), "fraction is 0.0; it must be above 0 and at most 1"),
        ((100, 1.5, 1), "fraction is 1.5"),
        ((-1, 0.5, 1), "memory_bytes is -1"),
        ((100, 0.5, -1), "weight_bytes is -1"),
        ((100, 0.5, 1, -1), "peak_bytes is -1"),
    ],
)
def test_impossible_memory_is_refused_by_field(numbers: tuple[int, float, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pool_bytes(*numbers)


@pytest.mark.parametrize("numbers", [(0,), (-3,), (4, 0)])
def test_pools_of_nothing_are_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=f"a pool of {numbers[0]} blocks"):
        Pool(*numbers)
    with pytest.raises(ConfigError, match="max_len is 0"):
        Pool(4).concurrency(0)
