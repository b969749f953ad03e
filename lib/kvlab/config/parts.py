"""Parts of a model's shape that are made of several numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvlab.errors import ConfigError, at_least


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
        router_bias: the router corrects the balance with one bias an expert (DeepSeek-V3, arXiv:2412.19437).

    Raises:
        ConfigError: a number is impossible.
    """

    n_experts: int
    experts_per_token: int
    intermediate_size: int
    n_shared_experts: int = 0
    n_dense_layers: int = 0
    router_bias: bool = False

    def __post_init__(self) -> None:
        for name, least in (("n_experts", 1), ("intermediate_size", 1), ("n_shared_experts", 0), ("n_dense_layers", 0)):
            at_least(least, f"moe.{name}", getattr(self, name))
        if not 1 <= self.experts_per_token <= self.n_experts:
            raise ConfigError(
                f"moe.experts_per_token is {self.experts_per_token}; a token visits 1 to n_experts {self.n_experts}"
            )


@dataclass(frozen=True, kw_only=True)
class MLA:
    """Multi-head latent attention, DeepSeek-V2 (arXiv:2405.04434): one latent is cached instead of K and V.

    Args:
        kv_lora_rank: width of the cached latent.
        rope_head_dim: width of the cached rotary key, shared by all heads.
        v_head_dim: width of a value head.
        q_lora_rank: width of the query's own latent; None when queries are projected directly.

    Raises:
        ConfigError: a width is below 1.
    """

    kv_lora_rank: int
    rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None

    def __post_init__(self) -> None:
        for name in ("kv_lora_rank", "rope_head_dim", "v_head_dim"):
            at_least(1, f"mla.{name}", getattr(self, name))


def window_pattern(window: int | None, full_every: int | None, n_layer: int) -> tuple[int | None, ...]:
    """One window a layer; with ``full_every`` n, the last of every n layers sees everything (Gemma).

    Args:
        window: tokens that a windowed layer sees, None for all.
        full_every: how often a layer sees everything; None for never.
        n_layer: layers.
    """
    if full_every is None:
        return (window,) * n_layer
    return tuple(None if layer % full_every == full_every - 1 else window for layer in range(n_layer))
