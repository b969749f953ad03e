"""A cache that keeps of a prompt what its last queries look at (SnapKV, arXiv:2404.14469)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from kvlab.cache.base import UNWRITTEN
from kvlab.cache.evicting import EvictingCache, received
from kvlab.config import ModelConfig
from kvlab.errors import ConfigError, at_least


class SnapKVCache(EvictingCache):
    """SnapKV: at the end of a prompt, what its last queries look at stays. Answers are kept whole.

    The votes of the last queries are averaged over neighbours, so that a fact is kept with the words around it. Every
    pass of several tokens counts as a prompt, or a chunk of one, and leaves ``budget`` tokens; single tokens are added
    to them, and the cache grows.

    Args:
        config: the model's shape.
        batch: rows.
        max_len: tokens a row may come to.
        dtype: of keys and values.
        device: where they live.
        budget: tokens of a prompt that stay.
        observed: last queries of a prompt that vote; their tokens stay.
        pool: neighbours that share their votes; odd.

    Raises:
        ConfigError: a number is impossible, or layers of the model have windows.
    """

    evicts_singles = False

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        budget: int,
        observed: int = 16,
        pool: int = 7,
    ) -> None:
        if at_least(1, "observed", observed) >= budget:
            raise ConfigError(f"a budget of {budget} tokens keeps none beside the {observed} observed; make it larger")
        if at_least(1, "pool", pool) % 2 == 0:
            raise ConfigError(f"pool is {pool}; a token needs as many neighbours before it as after it: make it odd")
        super().__init__(config, batch, max_len, dtype, device, budget=budget, recent=observed)
        self.pool = pool

    def _scores(
        self,
        before: Float[Tensor, "batch n_kv_head keys"],
        queries: Float[Tensor, "batch n_head time head_dim"],
        keys: Float[Tensor, "batch n_kv_head keys head_dim"],
        key_positions: Int[Tensor, "batch n_kv_head keys"],
        positions: Int[Tensor, "batch time"],
    ) -> Float[Tensor, "batch n_kv_head keys"]:
        newest = positions.amax(dim=1, keepdim=True)
        voting = torch.where(positions > newest - self.recent, positions, -1)
        first = int((voting >= 0).any(dim=0).nonzero()[0])
        votes = received(queries[:, :, first:], keys, key_positions, voting[:, first:])
        # Neighbours are those in the text: a batch leaves empty slots between, which must not count.
        order = key_positions.argsort(dim=2)
        written = (key_positions < UNWRITTEN).to(votes.dtype)
        pooled = self._pooled(votes.gather(2, order)) / self._pooled(written.gather(2, order)).clamp(min=1 / self.pool)
        return torch.zeros_like(votes).scatter_(2, order, pooled)

    def _pooled(self, x: Float[Tensor, "batch n_kv_head keys"]) -> Float[Tensor, "batch n_kv_head keys"]:
        return F.avg_pool1d(x, self.pool, stride=1, padding=self.pool // 2)
