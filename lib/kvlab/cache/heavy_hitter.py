"""A cache that keeps its heavy hitters, the tokens that received most attention (H2O, arXiv:2306.14048)."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlab.cache.evicting import EvictingCache, received
from kvlab.config import ModelConfig
from kvlab.errors import at_least


class HeavyHitterCache(EvictingCache):
    """H2O: the tokens that received most attention in all passes together, and the newest.

    A pass of several tokens evicts once, at its end; one of a single token evicts one. So a prompt read in chunks
    forgets earlier than one read at once.

    Args:
        config: the model's shape.
        batch: rows.
        max_len: tokens a row may come to.
        dtype: of keys and values.
        device: where they live.
        heavy: tokens that stay for the attention they received.
        recent: newest tokens that stay.

    Raises:
        ConfigError: a number is below 1, together they are more than the context, or layers of the model have windows.
    """

    evicts_singles = True

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        heavy: int,
        recent: int,
    ) -> None:
        budget = at_least(1, "heavy", heavy) + at_least(1, "recent", recent)
        super().__init__(config, batch, max_len, dtype, device, budget=budget, recent=recent)

    def _scores(
        self,
        before: Float[Tensor, "batch n_kv_head keys"],
        queries: Float[Tensor, "batch n_head time head_dim"],
        keys: Float[Tensor, "batch n_kv_head keys head_dim"],
        key_positions: Int[Tensor, "batch n_kv_head keys"],
        positions: Int[Tensor, "batch time"],
    ) -> Float[Tensor, "batch n_kv_head keys"]:
        return before + received(queries, keys, key_positions, positions)
