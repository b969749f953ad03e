"""The shape of a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from kvlab.config.hub import GEMMA3_DEFAULTS, as_ids, read_fields, write_fields
from kvlab.config.parts import MLA, MoE, RopeScaling
from kvlab.config.presets import preset_fields
from kvlab.errors import ConfigError

Norm = Literal["rmsnorm", "layernorm"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Position = Literal["rope", "learned"]

#: Families whose weights load with parity against ``transformers``.
RUNNABLE_FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")

#: What a ``config.json`` calls the families that are counted but not run, and what kvlab calls them.
_COUNTED_FAMILIES = {
    "mixtral": "mixtral", "qwen3_moe": "qwen3_moe", "deepseek_v2": "deepseek", "deepseek_v3": "deepseek",
    "gemma2": "gemma2", "gemma3": "gemma3", "gemma3_text": "gemma3", "phi3": "phi3", "falcon": "falcon",
}  # fmt: skip

_SIZES = (
    "vocab_size", "n_layer", "n_head", "n_kv_head", "head_dim", "hidden_size", "intermediate_size", "max_seq_len",
)  # fmt: skip


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

    @property
    def window_kinds(self) -> list[int | None]:
        """Each window that some layer has, the narrowest first, full attention last."""
        return sorted(set(self.windows), key=lambda window: (window is None, window))

    @classmethod
    def preset(cls, name: str) -> Self:
        """The shape of a published model, from ``data/models.json`` (each with its source).

        A preset has what bytes and FLOPs depend on. To run weights, load them: their own configuration is read.

        Args:
            name: a slug such as ``llama-3.1-8b`` or ``smollm2-135m``.

        Raises:
            ConfigError: no preset has this name; the nearest names are offered.
        """
        return cls(name=name, **preset_fields(name))

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None, name: str | None = None
    ) -> Self:
        """The shape that a Hugging Face ``config.json`` describes, in the spelling of transformers 4 or 5.

        Families beyond those that kvlab runs are read as far as sizes go; see :meth:`require_runnable`.

        Args:
            config: the parsed ``config.json``.
            generation_config: the parsed ``generation_config.json``; its end-of-sequence ids win.
            name: what to call the model; by default what the config calls itself.

        Raises:
            ConfigError: the family is unknown, or a field is missing or impossible.
        """
        kind = str(config.get("model_type", "missing"))
        if kind not in (*RUNNABLE_FAMILIES, *_COUNTED_FAMILIES):
            raise ConfigError(
                f"config.json says model_type {kind!r}; kvlab runs {', '.join(RUNNABLE_FAMILIES)}, "
                f"counts {', '.join(_COUNTED_FAMILIES)}, and has no code for another architecture"
            )
        family = _COUNTED_FAMILIES.get(kind, kind)
        # A model that sees and reads keeps the shape of its decoder in a part of its own.
        if kind == "gemma3":
            config = {**GEMMA3_DEFAULTS, **config, **(config.get("text_config") or {})}
        eos = (generation_config or {}).get("eos_token_id", config.get("eos_token_id"))
        return cls(
            name=name or str(config.get("_name_or_path") or family),
            family=family,
            eos_token_ids=as_ids(eos),
            bos_token_id=config.get("bos_token_id"),
            **read_fields(family, config),
        )

    def to_hf(self) -> dict[str, Any]:
        """This shape as a ``config.json`` that ``transformers`` reads (Llama, Mistral, Qwen2 and Qwen3).

        Raises:
            ConfigError: the family has no such writer.
        """
        if self.family not in RUNNABLE_FAMILIES or self.family == "gpt2":
            raise ConfigError(f"family is {self.family!r}; config.json is written for llama, mistral, qwen2, qwen3")
        return write_fields(self)

    def require_runnable(self) -> None:
        """Refuse a shape that kvlab counts but has no model code for.

        Raises:
            ConfigError: the family, or a part such as experts, is not run.
        """
        parts = [name for name in ("mla", "moe") if getattr(self, name) is not None]
        if parts or self.family not in RUNNABLE_FAMILIES:
            what = f"{self.family} with {' and '.join(parts)}" if parts else self.family
            raise ConfigError(
                f"{self.name} is of the family {what}; kvlab.cost can count it, "
                f"kvlab.model runs {', '.join(RUNNABLE_FAMILIES)}"
            )

    def with_(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated again."""
        return replace(self, **changes)


#: A model whose shape is all that matters: a preset name, a parsed Hub ``config.json``, or the shape itself.
Shape = ModelConfig | Mapping[str, Any] | str


def shape_of(model: Shape) -> ModelConfig:
    """The shape of a model, however it is given.

    Args:
        model: a preset name such as ``llama-3.1-8b``, the parsed ``config.json`` of a Hub model, or a shape.

    Raises:
        ConfigError: no preset has this name, or the config lacks a field.
    """
    if isinstance(model, ModelConfig):
        return model
    return ModelConfig.preset(model) if isinstance(model, str) else ModelConfig.from_hf(model)
