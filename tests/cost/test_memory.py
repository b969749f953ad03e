"""Bytes: weights, KV cache, logits. The known faults of others' arithmetic, then the properties of ours."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.config import MLA, ModelConfig, MoE, preset_names
from kvlab.cost import (
    GB,
    GIB,
    Format,
    chunks,
    experts_touched,
    format_of,
    kv_bytes,
    kv_bytes_per_token,
    kv_elements_per_token,
    logits_bytes,
    parameters,
    weight_bytes,
    weight_bytes_read,
)
from kvlab.errors import ConfigError
from toys import small_config

MIB = 2**20
EXPERTS = MoE(n_experts=8, experts_per_token=2, intermediate_size=16, n_shared_experts=1, n_dense_layers=1)
LATENT = MLA(kv_lora_rank=16, rope_head_dim=4, v_head_dim=8, q_lora_rank=12)


# The faults of *Memory arithmetic*, and what else practitioners report.


def test_hidden_size_for_kv_heads_bits_for_bytes() -> None:
    """vllm 22291: 2 x hidden 3584 x 28 layers x 8 bits for a Qwen2.5-7B whose weights are int8."""
    assert kv_bytes_per_token("qwen2.5-7b") == 57_344
    assert 2 * 3584 * 28 * 8 / kv_bytes_per_token("qwen2.5-7b") == 28
    assert round(kv_bytes("qwen2.5-7b", 3072) / GB, 3) == 0.176


@pytest.mark.parametrize(
    ("model", "times"),
    [("llama-3-8b", 4), ("qwen2.5-7b", 7), ("llama-2-70b", 8), ("falcon-7b", 71), ("qwen3-0.6b", 1), ("llama-2-7b", 1)],
)
def test_estimator_uses_hidden_size(model: str, times: int) -> None:
    """vllm PR 29736, torchtune 38, statement 33. Qwen3-0.6B is right for the wrong reason: its head_dim hides it."""
    config = ModelConfig.preset(model)
    assert 2 * config.n_layer * config.hidden_size * 2 == times * kv_bytes_per_token(model)


def test_head_dim_is_not_hidden_over_heads() -> None:
    """blog 190: Qwen3-32B has heads of 128, and 5120 / 64 is 80."""
    assert kv_bytes_per_token("qwen3-32b") == 262_144 != 163_840


def test_windows_ignored() -> None:
    """llama.cpp 12637: Gemma-3-27B at 131,072 tokens, and llama.cpp's two caches of it."""
    assert kv_bytes("gemma-3-27b", 131_072, honour_windows=False) == 62 * GIB
    assert kv_bytes("gemma-3-27b", 131_072) == 10 * GIB + 52 * 8192 * 1024
    assert round(kv_bytes("gemma-3-27b", 131_072) / GIB, 2) == 10.41
    each = kv_bytes_per_token("gemma-3-27b") / 62
    assert 52 * each * (1024 + 512) == 624 * MIB
    assert 10 * each * 131_072 == 10_240 * MIB


def test_logits_larger_than_the_cache() -> None:
    """transformers 30860: 8,192 positions of Llama-3-8B in float32, against its KV cache."""
    assert logits_bytes("llama-3-8b", 8192) == 4_202_692_608
    assert kv_bytes("llama-3-8b", 8192) == 1_073_741_824
    assert logits_bytes("llama-3-8b", 1) == 513_024


def test_logits_of_every_prompt_position() -> None:
    """mlx-vlm 1732: a buffer of 25,353,916,928 bytes holds 24,179 positions of a vocabulary of 262,144."""
    assert 25_353_916_928 // logits_bytes("gemma-3-1b", 1) == 24_179


def test_concatenating_cache_copies() -> None:
    """transformers PR 30536: 512 appends by torch.cat write 131,328 rows. (The preallocated one: test_allocation.)"""
    assert sum(row.past + row.new for row in chunks(512, 1)) == 131_328


def test_parallel_slots() -> None:
    """ollama 12927: CodeLlama-7B, num_ctx 16,384 in each of 4 slots."""
    assert kv_bytes("codellama-7b", [16_384] * 4) == 32 * GIB


def test_llama_2_7b_batch_4_4096_tokens_fp16() -> None:
    """Statement 106: right, because this model has as many KV heads as query heads. GB is not GiB."""
    held = kv_bytes("llama-2-7b", [4096] * 4, "float16")
    assert held == 8_589_934_592 == 8 * GIB
    assert round(held / GB, 2) == 8.59


def test_weights_and_cache_on_24_gib() -> None:
    """Statement 107: 22.07 GB; at a fraction of 0.9 the rest has 1.05 GiB."""
    total = weight_bytes("llama-2-7b", "float16") + kv_bytes("llama-2-7b", [4096] * 4, "float16")
    assert round(total / GB, 2) == 22.07
    assert round(total / GIB, 2) == 20.55
    assert round((0.9 * 24 * GIB - total) / GIB, 2) == 1.05


@pytest.mark.parametrize(
    ("model", "giga", "gibi"),
    [("llama-2-7b", 13.48, 12.55), ("qwen2.5-7b", 15.23, 14.19), ("mistral-7b-v0.3", 14.50, 13.50)],
)
def test_7b_in_16_bits_is_about_14_gb(model: str, giga: float, gibi: float) -> None:
    """Statement 68."""
    assert round(weight_bytes(model) / GB, 2) == giga
    assert round(weight_bytes(model) / GIB, 2) == gibi


@pytest.mark.parametrize(
    ("model", "gibi"),
    [
        ("llama-2-13b", 25.0),
        ("llama-2-7b", 16.0),
        ("llama-3.1-405b", 15.75),
        ("llama-2-70b", 10.0),
        ("llama-3-8b", 4.0),
        ("qwen2.5-7b", 1.75),
    ],
)
def test_a_prompt_of_32k_takes_tens_of_gb_or_two(model: str, gibi: float) -> None:
    """Statement 74."""
    assert kv_bytes(model, 32_768) == gibi * GIB


def test_batch_times_length_is_the_sum_of_real_lengths() -> None:
    """Statement 69: and a paged engine rounds each one up to its blocks."""
    lengths = [100, 17, 1, 0, 4096]
    assert kv_bytes("llama-3-8b", lengths) == sum(lengths) * 131_072
    assert kv_bytes("llama-3-8b", lengths, block_size=16) == (112 + 32 + 16 + 0 + 4096) * 131_072


def test_tokens_at_which_the_cache_outgrows_the_weights() -> None:
    """Statement 32: Llama-2-7B, 25.7 thousand tokens in flight."""
    assert round(weight_bytes("llama-2-7b") / kv_bytes_per_token("llama-2-7b"), -2) == 25_700


def test_a_latent_is_cached_instead_of_keys_and_values() -> None:
    """Statement 70: 576 elements a token and layer; every head's own K and V would be 71 times as much."""
    assert kv_elements_per_token("deepseek-v3") == 61 * 576
    assert 61 * 128 * (192 + 128) / kv_elements_per_token("deepseek-v3") == pytest.approx(71.1, abs=0.05)


@pytest.mark.parametrize(
    ("name", "size"),
    [("q8_0", 34 / 32), ("q4_0", 18 / 32), ("q4_1", 20 / 32), ("fp8", 1), ("int8", 1.015625), ("int4", 0.53125)],
)
def test_bytes_of_an_element_carry_its_scales(name: str, size: float) -> None:
    """transformers PR 30483, statement 72: a block of 32 in q8_0 is 34 bytes."""
    assert format_of(name).bytes_per_element == size
    assert kv_bytes("llama-3-8b", 1024, name) == 1024 * 65_536 * size


def test_effective_bits_of_a_cache_with_an_exact_tail() -> None:
    """B43: 2 bits in groups of 32 with scale and minimum are 3; with 128 of 1,024 tokens exact they are 4.625."""
    two = Format(2, 32, 32)
    assert two.bytes_per_element * 8 == 3
    elements = 1024 * kv_elements_per_token("llama-3-8b")
    assert kv_bytes("llama-3-8b", 1024, two, residual=128) * 8 / elements == (896 * 3 + 128 * 16) / 1024 == 4.625
    assert kv_bytes("llama-3-8b", 100, two, residual=128) == kv_bytes("llama-3-8b", 100, "bfloat16")


def test_the_format_of_the_weights_has_no_part_in_the_cache() -> None:
    """B1 again: a model with int8 weights keeps a bfloat16 cache."""
    assert kv_bytes_per_token("qwen2.5-7b") == 2 * 28 * 4 * 128 * 2
    assert weight_bytes("qwen2.5-7b", "int8") < 0.6 * weight_bytes("qwen2.5-7b")


@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-2-70b"])
def test_tensor_parallel_stops_shrinking_the_cache_at_the_kv_heads(model: str) -> None:
    """torchtitan PR 2299, statement 115: 8 KV heads on 16 devices are copied."""
    whole = kv_bytes(model, 1000)
    shares = [kv_bytes(model, 1000, tensor_parallel=n) for n in (1, 2, 4, 8, 16, 32)]
    assert shares == [whole, whole // 2, whole // 4, whole // 8, whole // 8, whole // 8]


def test_tensor_parallel_never_splits_a_latent() -> None:
    assert kv_bytes("deepseek-v3", 1000, tensor_parallel=8) == kv_bytes("deepseek-v3", 1000)
    assert kv_bytes("deepseek-v3", 1000) == 1000 * 61 * 576 * 2


@pytest.mark.parametrize(("heads", "devices"), [(4, 3), (2, 5), (6, 4)])
def test_heads_that_cannot_be_shared_evenly_are_refused(heads: int, devices: int) -> None:
    config = small_config(n_head=12, n_kv_head=heads)
    with pytest.raises(ConfigError, match=f"tensor_parallel is {devices} for {heads} KV heads"):
        kv_bytes(config, 10, tensor_parallel=devices)


# Weights.


def test_weights_by_format_counted_by_hand() -> None:
    """Matrices are narrow, an untied head too; the embedding (or a tied head) and the vectors are not."""
    config = small_config()
    matrices, wide, head = 6144 + 5760, 61 * 24 + 120, 61 * 24
    assert weight_bytes(config, "float32") == 4 * (matrices + wide + head)
    assert weight_bytes(config, "fp8") == matrices + head + 2 * wide
    assert weight_bytes(config, "int8-g8") == (matrices + head) * 10 // 8 + 2 * wide
    assert weight_bytes(config, "fp8", embedding="fp8") == matrices + head + wide
    assert weight_bytes(small_config(tie_embeddings=True), "fp8") == matrices + 2 * wide


def test_biases_stay_wide() -> None:
    config = small_config(qkv_bias=True, out_bias=True, mlp_bias=True)
    assert weight_bytes(config, "fp8") - weight_bytes(small_config(), "fp8") == 2 * 2 * (80 + 24 + 80 + 24)


def test_embedding_counted_as_read_per_token() -> None:
    """gpt-fast: of an untied embedding one row a token is read, a tied head once, and once only."""
    untied, tied = small_config(), small_config(tie_embeddings=True)
    rest = 6144 + 5760 + 120
    assert weight_bytes_read(untied, "float32") == 4 * (rest + 61 * 24 + 24)
    assert weight_bytes_read(untied, "float32", tokens=5) == 4 * (rest + 61 * 24 + 5 * 24)
    assert weight_bytes_read(untied, "float32", tokens=500) == weight_bytes(untied, "float32")
    for tokens in (1, 500):
        assert weight_bytes_read(tied, "float32", tokens) == weight_bytes(tied, "float32") == 4 * (rest + 61 * 24)


def test_of_learned_positions_one_row_a_token_is_read() -> None:
    config = small_config(position="learned", tie_embeddings=True)
    assert weight_bytes(config, "float32") - weight_bytes_read(config, "float32", 3) == 4 * (64 - 3) * 24
    assert weight_bytes_read(config, "float32", 1000) == weight_bytes(config, "float32")


def test_experts_that_a_pass_visits() -> None:
    """One token visits its own; many visit all. By enumeration: two of three experts, two tokens."""
    two_of_three = small_config(moe=MoE(n_experts=3, experts_per_token=2, intermediate_size=16))
    pairs = [{0, 1}, {0, 2}, {1, 2}]
    assert experts_touched(two_of_three, 2) == pytest.approx(sum(len(a | b) for a in pairs for b in pairs) / 9)
    assert experts_touched("mixtral-8x7b-v0.1", 1) == 2
    assert experts_touched("mixtral-8x7b-v0.1", 1000) == pytest.approx(8)
    with pytest.raises(ConfigError, match="llama-3-8b has no experts"):
        experts_touched("llama-3-8b", 1)


def test_a_pass_reads_the_experts_that_it_visits() -> None:
    config = small_config(n_layer=3, moe=EXPERTS, tie_embeddings=True)
    expert, all_weights = 3 * 24 * 16, weight_bytes(config, "float32")
    one = weight_bytes_read(config, "float32")
    assert all_weights - one == 4 * 2 * (8 - 2) * expert
    touched = experts_touched(config, 5)
    assert weight_bytes_read(config, "float32", 5) == ceil(all_weights - 4 * 2 * (8 - touched) * expert)
    assert 2 * parameters("mixtral-8x7b-v0.1").active == pytest.approx(weight_bytes_read("mixtral-8x7b-v0.1"), rel=0.02)


@pytest.mark.parametrize(
    ("changes", "weights", "message"),
    [
        ({}, "int8", "groups of 128 do not divide hidden_size, which has 24 elements"),
        ({}, "int4-g12", "groups of 12 do not divide intermediate_size, which has 40"),
        ({"n_head": 5, "n_kv_head": 5, "intermediate_size": 48}, "int4-g12", "do not divide n_head \\* head_dim"),
        ({"moe": MoE(n_experts=4, experts_per_token=1, intermediate_size=20)}, "int8-g8", "moe.intermediate_size"),
        ({"mla": LATENT}, "int8-g8", "do not divide q_lora_rank, which has 12"),
        ({"mla": MLA(kv_lora_rank=20, rope_head_dim=4, v_head_dim=8)}, "int8-g8", "do not divide kv_lora_rank"),
        (
            {"mla": MLA(kv_lora_rank=16, rope_head_dim=4, v_head_dim=6)},
            "int8-g8",
            "do not divide n_head \\* v_head_dim",
        ),
    ],
)
def test_group_size_that_does_not_divide_names_the_layers_width(
    changes: dict[str, Any], weights: str, message: str
) -> None:
    """torchchat 1362: 576 columns and groups of 128 were skipped in silence."""
    for function in (weight_bytes, weight_bytes_read):
        with pytest.raises(ConfigError, match=message):
            function(small_config(**changes), weights)


def test_576_columns_have_no_groups_of_128() -> None:
    with pytest.raises(ConfigError, match="groups of 128 do not divide hidden_size, which has 576 elements"):
        weight_bytes("smollm2-135m", "int4")
    assert weight_bytes("smollm2-135m", "int4-g64") < weight_bytes("smollm2-135m", "int4-g32")


def test_an_unused_width_refuses_nothing() -> None:
    """Every layer of Qwen3-30B-A3B has experts; the MLP's own width stands in its config and is not there."""
    config = small_config(intermediate_size=41, moe=MoE(n_experts=4, experts_per_token=1, intermediate_size=16))
    assert weight_bytes(config, "int8-g8") > 0


# The cache: shapes, formats, refusals.


@pytest.mark.parametrize(("kv", "fits"), [("q8_0", False), ("int8-g8", True), ("int8-g16", False), ("int8", False)])
def test_groups_of_a_cache_run_along_a_head(kv: str, fits: bool) -> None:
    """As llama.cpp asks: a group that crossed heads would mix keys with keys of another head, or with values."""
    config = small_config()  # 2 x 2 x 8 elements a token: 16 and 32 divide the row, not the head
    if fits:
        assert kv_bytes(config, 5, kv) == 5 * 2 * 32 * 10 // 8
        return
    for function in (kv_bytes_per_token, lambda c, f: kv_bytes(c, 1, f)):
        with pytest.raises(ConfigError, match="do not divide head_dim, which has 8 elements"):
            function(config, kv)


def test_groups_of_a_latent_divide_the_latent() -> None:
    assert kv_bytes("deepseek-v3", 1, "int8-g64") == 61 * 576 + 61 * 9 * 2
    with pytest.raises(ConfigError, match="groups of 128 do not divide a token's latent"):
        kv_bytes("deepseek-v3", 1, "int8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": -1}, "tokens is -1"),
        ({"tokens": [5, -2]}, "tokens is -2"),
        ({"tokens": 1, "block_size": 0}, "block_size is 0; it must be 1 or more"),
        ({"tokens": 1, "residual": -1}, "residual is -1"),
        ({"tokens": 1, "tensor_parallel": 0}, "tensor_parallel is 0"),
        ({"tokens": 1, "kv": "float8"}, "no storage format is called 'float8'; the nearest are float"),
    ],
)
def test_impossible_caches_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kv_bytes("llama-3-8b", **arguments)


@pytest.mark.parametrize("tokens", [0, -3])
@pytest.mark.parametrize("model", ["llama-3-8b", "gpt-2-small", "mixtral-8x7b-v0.1"])
def test_a_pass_without_tokens_is_refused(model: str, tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"tokens is {tokens}; it must be 1 or more"):
        weight_bytes_read(model, tokens=tokens)
    with pytest.raises(ConfigError, match=f"positions is {tokens}"):
        logits_bytes(model, tokens)


@pytest.mark.parametrize("name", ["int4-g", "int4-g0", "int4-gx", "float32-g32", "fp8-g8", "int5", "", "int4-g-4"])
def test_formats_that_do_not_exist_offer_the_nearest(name: str) -> None:
    with pytest.raises(ConfigError, match=r"no storage format is called .*; the nearest are "):
        format_of(name)


@pytest.mark.parametrize("numbers", [(0,), (8, -1, 16), (8, 32, -1)])
def test_formats_of_impossible_numbers_are_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=f"a format of {numbers[0]} bits"):
        Format(*numbers)


def test_an_unknown_model_offers_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no preset is called 'llama3-8b'; the nearest are llama-3"):
        kv_bytes("llama3-8b", 1)


windows = st.one_of(st.none(), st.integers(1, 12))


@given(st.data())
def test_kv_bytes_are_counted_slot_by_slot(data: st.DataObject) -> None:
    """Every layer, request, head and slot, one at a time."""
    n_kv_head, layers = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    config = small_config(
        n_head=2 * n_kv_head,
        n_kv_head=n_kv_head,
        n_layer=layers,
        windows=tuple(data.draw(st.lists(windows, min_size=layers, max_size=layers))),
    )
    lengths = data.draw(st.lists(st.integers(0, 30), max_size=4))
    block, residual = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 10))
    honour = data.draw(st.booleans())
    total = 0
    for window in config.windows:
        for length in lengths:
            slots = 0
            while slots < (min(length, window) if honour and window else length):
                slots += block
            exact = min(slots, residual)
            total += 2 * n_kv_head * (exact * 8 * 2 + (slots - exact) * (8 + 2))  # a float16 scale a head and slot
    got = kv_bytes(config, lengths, "int8-g8", block_size=block, residual=residual, honour_windows=honour)
    assert got == total


@given(st.sampled_from(preset_names()), st.integers(0, 300_000), st.integers(0, 1000), st.integers(1, 64))
def test_kv_bytes_never_fall_as_tokens_come(model: str, tokens: int, more: int, block: int) -> None:
    held, later = (kv_bytes(model, n, block_size=block) for n in (tokens, tokens + more))
    assert held <= later
    assert kv_bytes(model, tokens) <= held < kv_bytes(model, tokens) + block * kv_bytes_per_token(model)
    assert kv_bytes(model, tokens) <= kv_bytes(model, tokens, honour_windows=False)
    assert kv_bytes(model, [tokens, more]) == kv_bytes(model, tokens) + kv_bytes(model, more)


def test_a_length_may_be_a_number_of_numpy() -> None:
    np = pytest.importorskip("numpy")
    assert kv_bytes("llama-3-8b", np.int64(7)) == kv_bytes("llama-3-8b", 7)
    assert kv_bytes("llama-3-8b", np.array([7, 8])) == kv_bytes("llama-3-8b", 15)
