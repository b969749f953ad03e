"""A shape out of a Hugging Face ``config.json``, and into one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from kvlab.config.parts import MLA, MoE, RopeScaling, window_pattern
from kvlab.errors import ConfigError

if TYPE_CHECKING:
    from kvlab.config.shape import Activation, ModelConfig


def read_fields(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a :class:`~kvlab.config.ModelConfig` that a ``config.json`` states.

    Args:
        family: one of the families that kvlab runs or counts.
        config: the parsed file, in the spelling of transformers 4 or 5.

    Raises:
        ConfigError: a field is missing or unknown.
    """
    special = {"gpt2": _read_gpt2, "falcon": _read_falcon, "deepseek": _read_deepseek}
    for field in ("hidden_size", "n_embd", "num_attention_heads", "n_head", "num_hidden_layers", "n_layer"):
        if field in config and not (isinstance(config[field], int) and config[field] > 0):
            raise ConfigError(f"{field} is {config[field]!r} in config.json; it must be a whole number of 1 or more")
    try:
        return special.get(family, _read_llama_like)(family, config)
    except KeyError as missing:
        raise ConfigError(f"config.json of a {family} model lacks the field {missing}; add it") from None


def as_ids(value: int | list[int] | tuple[int, ...] | None) -> tuple[int, ...]:
    """End-of-sequence ids, which configs spell as nothing, one number or a list."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


#: What a Gemma 3 that also sees leaves out of its config: the defaults of ``Gemma3TextConfig`` of ``transformers``.
GEMMA3_DEFAULTS = {
    "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072,
}  # fmt: skip

#: Widths of a head that a family assumes where its config is silent.
_HEAD_DIMS = {"qwen3": 128, "gemma2": 256, "gemma3": 256}


def _activation(name: str) -> Activation:
    known: dict[str, Activation] = {
        "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
    }  # fmt: skip
    if name not in known:
        raise ConfigError(f"the activation is {name!r}; kvlab has {', '.join(known)}")
    return known[name]


def _read_gpt2(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """GPT-2's own spelling; everything has a bias, positions are learned."""
    hidden = config["n_embd"]
    return {
        "vocab_size": config["vocab_size"],
        "n_layer": config["n_layer"],
        "n_head": config["n_head"],
        "n_kv_head": config["n_head"],
        "head_dim": hidden // config["n_head"],
        "hidden_size": hidden,
        "intermediate_size": config.get("n_inner") or 4 * hidden,
        "max_seq_len": config.get("n_positions") or config["n_ctx"],
        "norm": "layernorm",
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "activation": _activation(config.get("activation_function", "gelu_new")),
        "gated_mlp": False,
        "position": "learned",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "tie_embeddings": config.get("tie_word_embeddings", True),
    }


def _read_llama_like(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Llama, Mistral, Qwen2 and Qwen3 share their fields and differ in defaults."""
    n_head, hidden = config["num_attention_heads"], config["hidden_size"]
    # A stretched rotation changes no size, so where a family is only counted any kind of it will do.
    theta, scaling = _read_rope(config) if family in ("llama", "mistral", "qwen2", "qwen3") else (10_000.0, None)
    bias = config.get("attention_bias", False)
    return {
        "vocab_size": config["vocab_size"],
        "n_layer": config["num_hidden_layers"],
        "n_head": n_head,
        "n_kv_head": config.get("num_key_value_heads") or n_head,
        "head_dim": config.get("head_dim") or _HEAD_DIMS.get(family, hidden // n_head),
        "hidden_size": hidden,
        "intermediate_size": config["intermediate_size"],
        "max_seq_len": config["max_position_embeddings"],
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "activation": _activation(config.get("hidden_activation") or config.get("hidden_act", "silu")),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "qkv_bias": family == "qwen2" or bias,
        "out_bias": family != "qwen2" and bias,
        "mlp_bias": config.get("mlp_bias", False),
        "qk_norm": family in ("qwen3", "qwen3_moe", "gemma3"),
        "tie_embeddings": config.get("tie_word_embeddings", family.startswith("gemma")),
        "windows": _read_windows(family, config),
        "moe": _read_experts(family, config),
    }


def _read_experts(family: str, config: Mapping[str, Any]) -> MoE | None:
    """Mixtral's experts have the MLP's own width, Qwen's their own (and two spellings of their number)."""
    if family == "mixtral":
        return MoE(
            n_experts=config["num_local_experts"],
            experts_per_token=config["num_experts_per_tok"],
            intermediate_size=config["intermediate_size"],
        )
    if family != "qwen3_moe":
        return None
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ConfigError(
            "config.json mixes dense and sparse layers (mlp_only_layers, decoder_sparse_step); "
            "kvlab counts models whose every layer has experts"
        )
    return MoE(
        n_experts=config.get("num_local_experts") or config["num_experts"],
        experts_per_token=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
    )


def _read_deepseek(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSeek-V2 and V3: a latent is cached, most layers have experts."""
    rotary = config["qk_rope_head_dim"]
    return {
        **_read_llama_like(family, config),
        "n_kv_head": config["num_attention_heads"],
        "head_dim": config["qk_nope_head_dim"] + rotary,
        "mla": MLA(
            kv_lora_rank=config["kv_lora_rank"],
            rope_head_dim=rotary,
            v_head_dim=config["v_head_dim"],
            q_lora_rank=config.get("q_lora_rank"),
        ),
        "moe": MoE(
            n_experts=config["n_routed_experts"],
            experts_per_token=config["num_experts_per_tok"],
            intermediate_size=config["moe_intermediate_size"],
            n_shared_experts=config.get("n_shared_experts") or 0,
            n_dense_layers=config.get("first_k_dense_replace", 0),
            router_bias=config["model_type"] == "deepseek_v3",
        ),
    }


def _read_falcon(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Falcon of the first kind: one KV head for all queries, one norm and no gate a block."""
    others = [name for name in ("new_decoder_architecture", "alibi", "bias") if config.get(name)]
    others += [f"without {name}" for name in ("multi_query", "parallel_attn") if not config.get(name, True)]
    if others:
        raise ConfigError(f"config.json is a Falcon: {', '.join(others)}; kvlab counts Falcon-7B's kind")
    n_head = config.get("num_attention_heads") or config["n_head"]
    hidden = config["hidden_size"]
    return {
        "vocab_size": config["vocab_size"],
        "n_layer": config.get("num_hidden_layers") or config["n_layer"],
        "n_head": n_head,
        "n_kv_head": 1,
        "head_dim": hidden // n_head,
        "hidden_size": hidden,
        "intermediate_size": config.get("ffn_hidden_size") or 4 * hidden,
        "max_seq_len": config.get("max_position_embeddings", 2048),
        "norm": "layernorm",
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "activation": _activation(config.get("activation", "gelu")),
        "gated_mlp": False,
        "tie_embeddings": config.get("tie_word_embeddings", True),
    }


def _read_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling: ``rope_parameters`` in transformers 5, ``rope_theta`` and ``rope_scaling`` before."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    return theta, RopeScaling(
        kind=cast(Any, kind),
        factor=rope.get("factor", 1.0),
        low_freq_factor=rope.get("low_freq_factor", 1.0),
        high_freq_factor=rope.get("high_freq_factor", 4.0),
        original_max_seq_len=original,
    )


def _read_windows(family: str, config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Mistral, Mixtral, Phi-3 window every layer; Gemma all but every second or sixth; Qwen where it says so."""
    n_layer, window = config["num_hidden_layers"], config.get("sliding_window")
    qwen = family.startswith("qwen")
    windowed = family in ("mistral", "mixtral", "phi3", "gemma2", "gemma3") or (
        qwen and config.get("use_sliding_window", False)
    )
    if window is None or not windowed:
        return (None,) * n_layer
    if types := config.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    if family.startswith("gemma"):
        return window_pattern(window, 2 if family == "gemma2" else config.get("sliding_window_pattern", 6), n_layer)
    first = config.get("max_window_layers", n_layer) if qwen else 0
    return tuple(window if layer >= first else None for layer in range(n_layer))


def write_fields(config: ModelConfig) -> dict[str, Any]:
    """A ``config.json`` of a Llama, Mistral, Qwen2 or Qwen3, in the spelling that transformers 4 and 5 both accept.

    Args:
        config: the model's shape.
    """
    architecture = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[config.family]
    activation = {"gelu_tanh": "gelu_pytorch_tanh"}.get(config.activation, config.activation)
    out: dict[str, Any] = {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_kv_head,
        "head_dim": config.head_dim,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": activation,
        "rope_theta": config.rope_theta,
        "attention_bias": config.qkv_bias and config.family != "qwen2",
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "rope_scaling": _write_rope(config),
    }
    return out | _write_windows(config)


def _write_rope(config: ModelConfig) -> dict[str, Any] | None:
    if config.rope_scaling is None:
        return None
    out = asdict(config.rope_scaling)
    return {
        "rope_type": out.pop("kind"),
        "original_max_position_embeddings": out.pop("original_max_seq_len"),
        **out,
    }


def _write_windows(config: ModelConfig) -> dict[str, Any]:
    window = next((w for w in config.windows if w is not None), None)
    if window is None:
        return {"sliding_window": None}
    types = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
    return {"sliding_window": window, "use_sliding_window": True, "layer_types": types}
