"""The shape of a model: presets, config.json in both spellings, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.config import MLA, ModelConfig, RopeScaling, preset_names, preset_source
from kvlab.errors import ConfigError
from toys import small_config

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def test_transformers_4_and_5_spell_the_same_model() -> None:
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3, "torch_dtype": "bfloat16"}
    new = LLAMA | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}, "dtype": "bfloat16"}
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new)
    assert ModelConfig.from_hf(new).rope_scaling == RopeScaling(kind="llama3", factor=8.0)
    assert ModelConfig.from_hf(new).rope_theta == 5e5


def test_head_dim_is_not_hidden_over_heads() -> None:
    """blog 190: Qwen3-32B states 128, and 5120 / 64 is 80."""
    config = ModelConfig.preset("qwen3-32b")
    assert config.head_dim == 128 != config.hidden_size // config.n_head
    stated = ModelConfig.from_hf(LLAMA | {"head_dim": 128})
    assert stated.head_dim == 128
    assert ModelConfig.from_hf(LLAMA).head_dim == 64


def test_eos_ids_come_from_the_generation_config() -> None:
    config = LLAMA | {"eos_token_id": 2, "bos_token_id": 1}
    assert ModelConfig.from_hf(config).eos_token_ids == (2,)
    assert ModelConfig.from_hf(config, {"eos_token_id": [7, 8]}).eos_token_ids == (7, 8)
    assert ModelConfig.from_hf(config, {}).bos_token_id == 1


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 16}, (16, 16, 16, 16)),
        ({"model_type": "mistral", "sliding_window": None}, (None,) * 4),
        ({"model_type": "qwen2", "sliding_window": 16}, (None,) * 4),
        (
            {"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 16),
        ),
        (
            {
                "model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None, 8, None),
        ),
        ({"model_type": "llama", "sliding_window": 16}, (None,) * 4),
    ],
)  # fmt: skip
def test_windows_are_read_where_the_family_has_them(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    config = LLAMA | {"num_hidden_layers": 4} | changes
    assert ModelConfig.from_hf(config).windows == windows


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@given(st.data())
def test_config_json_there_and_back(family: str, data: st.DataObject) -> None:
    scaling = data.draw(
        st.sampled_from([None, RopeScaling(kind="linear", factor=2.0), RopeScaling(kind="llama3", factor=8.0)])
    )
    window = None if family == "llama" else data.draw(st.sampled_from([None, 5]))
    config = small_config(
        name="x",
        family=family,
        tie_embeddings=data.draw(st.booleans()),
        rope_scaling=scaling,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        windows=(None if family.startswith("qwen") else window, window),
        eos_token_ids=tuple(data.draw(st.lists(st.integers(0, 60), max_size=2))),
    )
    written = json.loads(json.dumps(config.to_hf()))
    assert ModelConfig.from_hf(written, name="x") == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layer": 0}, "n_layer is 0; it must be a whole number of 1 or more"),
        ({"hidden_size": -4}, "hidden_size is -4"),
        ({"vocab_size": 2.5}, "vocab_size is 2.5"),
        ({"n_kv_head": 4}, "n_head 6 is not a multiple of n_kv_head 4"),
        ({"head_dim": 7}, "head_dim is 7; rotary positions turn pairs"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0"),
        ({"norm": "batchnorm"}, "norm is 'batchnorm'; kvlab has rmsnorm, layernorm"),
        ({"windows": (4,)}, "windows has 1 entries for 2 layers"),
        ({"windows": (4, 0)}, r"windows\[1\] is 0"),
    ],
)
def test_impossible_shapes_are_refused_by_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_config(**change)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"model_type": "mamba"}, "model_type 'mamba'; kvlab runs gpt2, llama"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "lacks the field 'hidden_size'"),
        ({}, "model_type 'missing'"),
        (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling of type 'yarn'"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor is 0.5"),
        (LLAMA | {"hidden_act": "mish"}, "activation is 'mish'"),
    ],
)
def test_configs_that_kvlab_cannot_run_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(config)


def test_every_preset_is_a_valid_shape_with_a_source() -> None:
    for name in preset_names():
        assert ModelConfig.preset(name).name == name
        source = preset_source(name)
        assert source.source
        assert source.status
        assert source.params_active <= source.params_total


def test_presets_carry_what_is_special_about_a_model() -> None:
    gemma, deepseek = ModelConfig.preset("gemma-3-27b"), ModelConfig.preset("deepseek-v3")
    assert gemma.windows.count(None) == 10
    assert gemma.windows[:6] == (1024,) * 5 + (None,)
    assert deepseek.mla == MLA(kv_lora_rank=512, rope_head_dim=64, v_head_dim=128, q_lora_rank=1536)
    assert deepseek.moe is not None
    assert ModelConfig.preset("mistral-7b-v0.1").windows == (4096,) * 32


def test_an_unknown_preset_offers_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"llama-3\.1-8b"):
        ModelConfig.preset("Llama-3.1-8")


def test_a_change_is_validated_again() -> None:
    assert small_config().with_(n_layer=3, windows=()).windows == (None,) * 3
    with pytest.raises(ConfigError):
        small_config().with_(n_head=5)
