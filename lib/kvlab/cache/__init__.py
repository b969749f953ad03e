"""Keys and values kept between forward passes: one protocol, several kinds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kvlab.cache.base import KVCache, Step, View, Visibility, classify, positions_from_mask, visible
from kvlab.cache.block_pool import ROOT, BlockPool
from kvlab.cache.contiguous import ContiguousCache, NoCache
from kvlab.cache.paged import BlockStorage, PagedCache
from kvlab.cache.quantized import QuantizedCache
from kvlab.cache.ragged import BlockView, RaggedBatch, Span
from kvlab.config import ModelConfig
from kvlab.errors import ConfigError

__all__ = [
    "ROOT", "BlockPool", "BlockStorage", "BlockView", "ContiguousCache", "KVCache", "NoCache", "PagedCache",
    "QuantizedCache", "RaggedBatch", "Span", "Step", "View", "Visibility", "classify", "make_cache",
    "positions_from_mask", "visible",
]  # fmt: skip

_KINDS: dict[str, Callable[..., KVCache]] = {
    "contiguous": ContiguousCache,
    "paged": PagedCache,
    "int8": partial(QuantizedCache, bits=8),
    "int4": partial(QuantizedCache, bits=4),
}


def make_cache(
    kind: str,
    config: ModelConfig,
    batch: int,
    max_len: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> KVCache:
    """A cache of one of the kinds.

    Args:
        kind: ``contiguous``, ``paged``, or ``int8`` or ``int4`` for codes with the newest 32 to 63 tokens exact.
        config: the model's shape.
        batch: rows.
        max_len: tokens a row may come to, prompt and answer together.
        dtype: of keys and values, usually the model's.
        device: where they live, usually the model's.

    Raises:
        ConfigError: the kind is unknown or a size is impossible.
    """
    if kind not in _KINDS:
        raise ConfigError(f"no cache is called {kind!r}; kvlab has {', '.join(_KINDS)}")
    return _KINDS[kind](config, batch, max_len, dtype, device)
