"""A shape out of a Hugging Face ``config.json``, and into one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from kvlab.config.parts import RopeScaling
from kvlab.errors import ConfigError

if TYPE_CHECKING:
    from kvlab.config.shape import Activation, ModelConfig


def read_fields(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a :class:`~kvlab.config.ModelConfig` that a ``config.json`` states.

    Args:
        family: one of the families that kvlab runs.
        config: the parsed file, in the spelling of transformers 4 or 5.

    Raises:
        ConfigError: a field is missing or unknown.
    """
    read = _read_gpt2 if family == "gpt2" else _read_llama_like
    try:
        return read(family, config)
    except KeyError as missing:
        raise ConfigError(f"config.json of a {family} model lacks the field {missing}; add it") from None


def as_ids(value: int | list[int] | tuple[int, ...] | None) -> tuple[int, ...]:
    """End-of-sequence ids, which configs spell as nothing, one number or a list."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


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
    theta, scaling = _read_rope(config)
    bias = config.get("attention_bias", False)
    return {
        "vocab_size": config["vocab_size"],
        "n_layer": config["num_hidden_layers"],
        "n_head": n_head,
        "n_kv_head": config.get("num_key_value_heads") or n_head,
        "head_dim": config.get("head_dim") or (128 if family == "qwen3" else hidden // n_head),
        "hidden_size": hidden,
        "intermediate_size": config["intermediate_size"],
        "max_seq_len": config["max_position_embeddings"],
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "activation": _activation(config.get("hidden_act", "silu")),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "qkv_bias": family == "qwen2" or bias,
        "out_bias": family != "qwen2" and bias,
        "mlp_bias": config.get("mlp_bias", False),
        "qk_norm": family == "qwen3",
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "windows": _read_windows(family, config),
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
    """Mistral windows every layer; Qwen only where it says so; Llama never."""
    n_layer, window = config["num_hidden_layers"], config.get("sliding_window")
    if family == "llama" or window is None or (family != "mistral" and not config.get("use_sliding_window", False)):
        return (None,) * n_layer
    if types := config.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    first = 0 if family == "mistral" else config.get("max_window_layers", n_layer)
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
