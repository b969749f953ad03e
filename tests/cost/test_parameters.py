"""Parameters: against the published counts, against transformers, and by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from kvlab.config import ModelConfig, preset_names, preset_source
from kvlab.cost import parameters
from kvlab.errors import ConfigError
from toys import small_config

SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 7,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LATENT: dict[str, Any] = SHAPE | {
    "num_key_value_heads": 6, "kv_lora_rank": 20, "q_lora_rank": 28, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 10, "head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 3,
    "moe_intermediate_size": 24, "first_k_dense_replace": 2, "n_group": 2, "topk_group": 1,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
FAMILIES: dict[str, Any] = {
    "gpt2": transformers.GPT2Config(vocab_size=97, n_embd=48, n_layer=3, n_head=4, n_positions=128),
    "gpt2-inner": transformers.GPT2Config(vocab_size=97, n_embd=48, n_layer=3, n_head=4, n_positions=64, n_inner=100),
    "llama": transformers.LlamaConfig(**SHAPE),
    "llama-tied-biased": transformers.LlamaConfig(
        **SHAPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "mistral": transformers.MistralConfig(**SHAPE, head_dim=12, sliding_window=7),
    "qwen2": transformers.Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=3),
    "qwen3": transformers.Qwen3Config(**SHAPE, head_dim=16),
    "mixtral": transformers.MixtralConfig(**SHAPE, num_local_experts=5, num_experts_per_tok=2, sliding_window=9),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SHAPE, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, rope_parameters=YARN
    ),
    "deepseek_v2": transformers.DeepseekV2Config(**LATENT, topk_method="greedy"),
    "deepseek_v2-direct-queries": transformers.DeepseekV2Config(**LATENT | {"q_lora_rank": None}),
    "deepseek_v3": transformers.DeepseekV3Config(**LATENT, rope_parameters=YARN),
    "gemma2": transformers.Gemma2Config(**SHAPE, head_dim=16, sliding_window=11),
    "gemma3_text": transformers.Gemma3TextConfig(**SHAPE, head_dim=16, sliding_window=11),
    "phi3": transformers.Phi3Config(**SHAPE, sliding_window=13),
    "falcon": transformers.FalconConfig(vocab_size=97, hidden_size=48, num_hidden_layers=3, num_attention_heads=6),
}


def counted_by_transformers(config: Any) -> int:
    """Parameters of a model that holds no memory, tied ones once."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    # DeepSeek-V3's balance of the experts is learned, and a buffer only because no gradient moves it.
    biases = [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    return sum(tensor.numel() for tensor in [*model.parameters(), *biases])


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_equal_transformers(family: str) -> None:
    config = FAMILIES[family]
    assert parameters(config.to_dict()).total == counted_by_transformers(config)


@pytest.mark.parametrize("family", [f for f in FAMILIES if getattr(FAMILIES[f], "layer_types", None)])
def test_layers_see_what_they_see_in_transformers(family: str) -> None:
    config = FAMILIES[family]
    want = [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]
    assert list(ModelConfig.from_hf(config.to_dict()).windows) == want
    older = {name: value for name, value in config.to_dict().items() if name != "layer_types"}
    assert list(ModelConfig.from_hf(older).windows) == want


@pytest.mark.parametrize("family", ["mistral", "mixtral", "phi3"])
def test_families_whose_every_layer_has_the_window(family: str) -> None:
    config = FAMILIES[family]
    assert ModelConfig.from_hf(config.to_dict()).windows == (config.sliding_window,) * 7
    assert ModelConfig.from_hf(config.to_dict() | {"sliding_window": None}).windows == (None,) * 7


@pytest.mark.parametrize("name", preset_names())
def test_presets_have_the_published_parameters(name: str) -> None:
    source, count = preset_source(name), parameters(name)
    assert (count.total, count.active) == (source.params_total, source.params_active)


def test_there_are_42_presets() -> None:
    assert len(preset_names()) == 42


def test_a_small_decoder_counted_by_hand() -> None:
    """Hidden 24; 6 query heads over 2 KV heads of 8; MLP 40; 2 layers; vocabulary 61."""
    count = parameters(small_config())
    assert count.embedding == count.head == 61 * 24
    assert count.attention == 2 * (24 * 48 + 24 * 16 + 24 * 16 + 48 * 24)
    assert count.mlp == count.active_mlp == 2 * 3 * 24 * 40
    assert count.vectors == (2 * 2 + 1) * 24
    assert count.total == count.active == 2928 + 6144 + 5760 + 120
    tied = parameters(small_config(tie_embeddings=True))
    assert (tied.head, tied.total) == (0, count.total - 61 * 24)


def test_biases_and_norms_of_heads_are_vectors() -> None:
    plain, full = small_config(), small_config(qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True)
    each = (48 + 16 + 16) + 24 + (40 + 40 + 24) + 2 * 8
    assert parameters(full).vectors == parameters(plain).vectors + 2 * each
    assert parameters(full).attention == parameters(plain).attention
    ungated = small_config(norm="layernorm", gated_mlp=False, mlp_bias=True)
    assert parameters(ungated).vectors == 5 * 48 + 2 * (40 + 24)
    assert parameters(ungated).mlp == 2 * 2 * 24 * 40


def test_a_token_of_mixtral_visits_two_of_eight_experts() -> None:
    count, expert = parameters("mixtral-8x7b-v0.1"), 3 * 4096 * 14336
    assert count.total - count.active == 32 * 6 * expert
    assert count.active_mlp == 32 * (2 * expert + 8 * 4096)


def test_a_gemma_3_that_sees_states_only_what_differs() -> None:
    """Its config.json on the Hub leaves out what transformers assumes."""
    seeing = {
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152},
    }  # fmt: skip
    assert parameters(seeing) == parameters("gemma-3-4b")
    assert ModelConfig.from_hf(seeing).windows == ModelConfig.preset("gemma-3-4b").windows
    assumed = transformers.Gemma3TextConfig(**seeing["text_config"]).to_dict()
    assert parameters(assumed) == parameters(seeing)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3", "gemma3_text", "phi3"])
@pytest.mark.parametrize("field", ["vocab_size", "num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_config_that_lacks_a_field_says_which(family: str, field: str) -> None:
    config = FAMILIES[family].to_dict()
    del config[field]
    with pytest.raises(ConfigError, match=f"lacks the field '{field}'; add it"):
        parameters(config)


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("gpt2", "n_embd"),
        ("mixtral", "num_local_experts"),
        ("qwen3_moe", "moe_intermediate_size"),
        ("deepseek_v3", "kv_lora_rank"),
        ("deepseek_v2", "n_routed_experts"),
    ],
)
def test_a_config_that_lacks_a_field_of_its_family_says_which(family: str, field: str) -> None:
    config = FAMILIES[family].to_dict()
    del config[field]
    with pytest.raises(ConfigError, match=f"lacks the field '{field}'; add it"):
        parameters(config)


@pytest.mark.parametrize("value", [0, -1, None, "48", 4.5])
@pytest.mark.parametrize("field", ["hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size"])
def test_an_impossible_size_in_a_config_is_refused_by_field(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field} is {value!r}"):
        parameters(FAMILIES["llama"].to_dict() | {field: value})


@pytest.mark.parametrize(
    "change",
    [
        {"new_decoder_architecture": True},
        {"alibi": True},
        {"bias": True},
        {"multi_query": False},
        {"parallel_attn": False},
    ],
)
def test_falcons_of_another_kind_are_refused(change: dict[str, bool]) -> None:
    with pytest.raises(ConfigError, match=f"Falcon: (without )?{next(iter(change))}"):
        parameters(FAMILIES["falcon"].to_dict() | change)


def test_the_number_of_qwens_experts_in_both_spellings() -> None:
    config = FAMILIES["qwen3_moe"].to_dict()
    older = {name: value for name, value in config.items() if name != "num_local_experts"} | {"num_experts": 6}
    assert parameters(older) == parameters(config)


def test_qwen_moe_that_mixes_dense_and_sparse_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="mlp_only_layers"):
        parameters(FAMILIES["qwen3_moe"].to_dict() | {"mlp_only_layers": [1]})
