"""The shape of a decoder: what a model is before it has weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, Self, cast

from kvlab.errors import ConfigError
from kvlab.resources import resource

Norm = Literal["rmsnorm", "layernorm"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Position = Literal["rope", "learned"]

#: Families whose weights load with parity against ``transformers``.
RUNNABLE_FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")

_SIZES = (
    "vocab_size", "n_layer", "n_head", "n_kv_head", "head_dim", "hidden_size", "intermediate_size", "max_seq_len",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How a model stretches its rotary frequencies past the length that it was first trained on.

    Args:
        kind: ``linear`` divides every frequency by ``factor``; ``llama3`` only the slow ones (Llama 3.1 report,
            arXiv:2407.21783, and ``transformers`` ``_compute_llama3_parameters``).
        factor: how many times longer the context becomes.
        low_freq_factor: wavelengths above ``original_max_seq_len / low_freq_factor`` are fully stretched.
        high_freq_factor: wavelengths below ``original_max_seq_len / high_freq_factor`` stay.
        original_max_seq_len: context of the first training, in tokens.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ConfigError(
                f"rope_scaling of type {self.kind!r}: kvlab knows 'linear' and 'llama3'; "
                "use a checkpoint without it, at the context length it was trained on"
            )
        if not self.factor >= 1:
            raise ConfigError(f"rope_scaling factor is {self.factor}; it stretches, so it must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class MoE:
    """The experts of a mixture-of-experts model (counted by ``kvlab.cost``; not run by ``kvlab.model``).

    Args:
        n_experts: routed experts in a layer.
        experts_per_token: routed experts that one token visits.
        intermediate_size: hidden width of one expert.
        n_shared_experts: experts that every token visits besides.
        n_dense_layers: first layers that have an ordinary MLP.
    """

    n_experts: int
    experts_per_token: int
    intermediate_size: int
    n_shared_experts: int = 0
    n_dense_layers: int = 0


@dataclass(frozen=True, kw_only=True)
class MLA:
    """Multi-head latent attention, DeepSeek-V2 (arXiv:2405.04434): one latent is cached instead of K and V.

    Args:
        kv_lora_rank: width of the cached latent.
        rope_head_dim: width of the cached rotary key, shared by all heads.
        v_head_dim: width of a value head.
        q_lora_rank: width of the query's own latent; None when queries are projected directly.
    """

    kv_lora_rank: int
    rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only transformer, in the terms of the field.

    Sizes are numbers of elements, ``max_seq_len`` and windows are tokens. Validates itself when it is made.

    Args:
        name: what to call the model in tables.
        family: whose block it is: ``gpt2``, ``llama``, ``mistral``, ``qwen2``, ``qwen3``, or another that only
            ``kvlab.cost`` can count.
        vocab_size: rows of the embedding (may be padded beyond the tokenizer's vocabulary).
        n_layer: decoder blocks.
        n_head: query heads.
        n_kv_head: key and value heads; query head h reads KV head ``h // (n_head // n_kv_head)``.
        head_dim: width of a head. Not always ``hidden_size / n_head`` (Qwen3, Gemma).
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP.
        max_seq_len: the longest sequence, prompt and answer together.
        norm: ``rmsnorm`` or ``layernorm`` (with bias).
        norm_eps: added to the variance.
        activation: of the MLP.
        gated_mlp: True for ``down(act(gate(x)) * up(x))`` (arXiv:2002.05202), False for ``down(act(up(x)))``.
        position: ``rope`` rotates queries and keys (arXiv:2104.09864), ``learned`` adds a vector per position.
        rope_theta: base of the rotary frequencies.
        rope_scaling: see :class:`RopeScaling`.
        qkv_bias: the projections to queries, keys and values have a bias (GPT-2, Qwen2).
        out_bias: the projection out of attention has a bias (GPT-2).
        mlp_bias: the MLP's projections have a bias (GPT-2).
        qk_norm: queries and keys are normalised per head before the rotation (Qwen3).
        tie_embeddings: the LM head is the embedding matrix.
        windows: for each layer, how many tokens it sees, itself included, or None for all of them. Empty means
            that every layer sees everything.
        eos_token_ids: generation stops after any of these.
        bos_token_id: put before a raw prompt by the tokenizers of some families.
        mla: latent attention, see :class:`MLA`.
        moe: experts, see :class:`MoE`.

    Raises:
        ConfigError: a field is impossible; the message names the field, the value and what is allowed.
    """

    name: str = "unnamed"
    family: str = "llama"
    vocab_size: int
    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    max_seq_len: int
    norm: Norm = "rmsnorm"
    norm_eps: float = 1e-5
    activation: Activation = "silu"
    gated_mlp: bool = True
    position: Position = "rope"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    windows: tuple[int | None, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    mla: MLA | None = None
    moe: MoE | None = None

    def __post_init__(self) -> None:
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * max(self.n_layer, 0))
        self._check_sizes()
        self._check_choices()
        self._check_windows()

    def _check_sizes(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of 1 or more")
        if self.n_head % self.n_kv_head:
            raise ConfigError(
                f"n_head {self.n_head} is not a multiple of n_kv_head {self.n_kv_head}; "
                "each KV head serves the same number of query heads"
            )
        if self.position == "rope" and self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; rotary positions turn pairs, so it must be even")
        for name in ("norm_eps", "rope_theta"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be above 0")

    def _check_choices(self) -> None:
        allowed = {
            "norm": ("rmsnorm", "layernorm"),
            "activation": ("silu", "gelu", "gelu_tanh", "relu"),
            "position": ("rope", "learned"),
        }
        for name, choices in allowed.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; kvlab has {', '.join(choices)}")

    def _check_windows(self) -> None:
        if len(self.windows) != self.n_layer:
            raise ConfigError(f"windows has {len(self.windows)} entries for {self.n_layer} layers; give one a layer")
        for layer, window in enumerate(self.windows):
            if window is not None and window < 1:
                raise ConfigError(f"windows[{layer}] is {window}; a window is at least 1 token, or None for all")

    @property
    def n_group(self) -> int:
        """How many query heads share one KV head."""
        return self.n_head // self.n_kv_head

    @classmethod
    def preset(cls, name: str) -> Self:
        """The shape of a published model, from ``data/models.json`` (each with its source).

        A preset has what bytes and FLOPs depend on. To run weights, load them: their own configuration is read.

        Args:
            name: a slug such as ``llama-3.1-8b`` or ``smollm2-135m``.

        Raises:
            ConfigError: no preset has this name; the nearest names are offered.
        """
        rows = _preset_rows()
        if name not in rows:
            near = get_close_matches(name.lower(), rows, n=3, cutoff=0.4) or sorted(rows)[:3]
            raise ConfigError(f"no preset is called {name!r}; the nearest are {', '.join(near)}")
        row = dict(rows[name]["shape"])
        if "mla" in row:
            row["mla"] = MLA(**row["mla"])
        if "moe" in row:
            row["moe"] = MoE(**row["moe"])
        row["windows"] = _window_pattern(row.pop("window", None), row.pop("full_every", None), row["n_layer"])
        return cls(name=name, **row)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None, name: str | None = None
    ) -> Self:
        """The shape that a Hugging Face ``config.json`` describes, in the spelling of transformers 4 or 5.

        Args:
            config: the parsed ``config.json``.
            generation_config: the parsed ``generation_config.json``; its end-of-sequence ids win.
            name: what to call the model; by default what the config calls itself.

        Raises:
            ConfigError: the family is unknown, or a field is missing or impossible.
        """
        family = str(config.get("model_type", "missing"))
        if family not in RUNNABLE_FAMILIES:
            raise ConfigError(
                f"config.json says model_type {family!r}; kvlab runs {', '.join(RUNNABLE_FAMILIES)} "
                "and has no code for another architecture"
            )
        read = _read_gpt2 if family == "gpt2" else _read_llama_like
        try:
            shape = read(family, config)
        except KeyError as missing:
            raise ConfigError(f"config.json of a {family} model lacks the field {missing}; add it") from None
        eos = (generation_config or {}).get("eos_token_id", config.get("eos_token_id"))
        return cls(
            name=name or str(config.get("_name_or_path") or family),
            family=family,
            eos_token_ids=_as_ids(eos),
            bos_token_id=config.get("bos_token_id"),
            **shape,
        )

    def to_hf(self) -> dict[str, Any]:
        """This shape as a ``config.json`` that ``transformers`` reads (Llama, Mistral, Qwen2 and Qwen3).

        Raises:
            ConfigError: the family has no such writer.
        """
        if self.family not in RUNNABLE_FAMILIES or self.family == "gpt2":
            raise ConfigError(f"family is {self.family!r}; config.json is written for llama, mistral, qwen2, qwen3")
        return _write_llama_like(self)

    def with_(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated again."""
        return replace(self, **changes)


def preset_names() -> list[str]:
    """Every name that :meth:`ModelConfig.preset` knows, sorted."""
    return sorted(_preset_rows())


@dataclass(frozen=True)
class PresetSource:
    """Where the shape of a preset comes from.

    Args:
        hf_id: the model on the Hugging Face Hub.
        source: the file or page that was read.
        status: ``verified``, or what was not and how it was cross-checked.
        params_total: parameters of the published model, tied weights counted once.
        params_active: parameters that one token uses.
        note: a trap in the shape, or an empty string.
    """

    hf_id: str
    source: str
    status: str
    params_total: int
    params_active: int
    note: str = field(default="")


def preset_source(name: str) -> PresetSource:
    """The source of a preset's figures.

    Raises:
        ConfigError: no preset has this name.
    """
    ModelConfig.preset(name)
    row = _preset_rows()[name]
    return PresetSource(**{f.name: row[f.name] for f in fields(PresetSource)})


@cache
def _preset_rows() -> dict[str, dict[str, Any]]:
    """``data/models.json``, read once."""
    rows: dict[str, dict[str, Any]] = json.loads(resource("models.json").read_text("utf8"))
    return rows


def _window_pattern(window: int | None, full_every: int | None, n_layer: int) -> tuple[int | None, ...]:
    """One window a layer; with ``full_every`` n, the last of every n layers sees everything (Gemma)."""
    if full_every is None:
        return (window,) * n_layer
    return tuple(None if layer % full_every == full_every - 1 else window for layer in range(n_layer))


def _as_ids(value: int | list[int] | tuple[int, ...] | None) -> tuple[int, ...]:
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


def _write_llama_like(config: ModelConfig) -> dict[str, Any]:
    """The fields that :func:`_read_llama_like` reads, in the spelling that transformers 4 and 5 both accept."""
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
