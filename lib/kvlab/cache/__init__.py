"""Keys and values kept between forward passes: one protocol, several kinds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kvlab.cache.base import ENDLESS, KVCache, Step, View, Visibility, classify, positions_from_mask, visible
from kvlab.cache.block_pool import ROOT, BlockPool
from kvlab.cache.contiguous import ContiguousCache, NoCache
from kvlab.cache.evicting import EvictingCache
from kvlab.cache.heavy_hitter import HeavyHitterCache
from kvlab.cache.paged import BlockStorage, PagedCache
from kvlab.cache.quantized import QuantizedCache
from kvlab.cache.ragged import BlockView, RaggedBatch, Span
from kvlab.cache.snapkv import SnapKVCache
from kvlab.cache.streaming import SinkView, StreamingCache
from kvlab.config import ModelConfig
from kvlab.errors import ConfigError

__all__ = [
    "ENDLESS", "ROOT", "BlockPool", "BlockStorage", "BlockView", "ContiguousCache", "EvictingCache", "HeavyHitterCache",
    "KVCache", "NoCache", "PagedCache", "QuantizedCache", "RaggedBatch", "SinkView", "SnapKVCache", "Span", "Step",
    "StreamingCache", "View", "Visibility", "classify", "make_cache", "positions_from_mask", "visible",
]  # fmt: skip


def _streaming(
    config: ModelConfig, batch: int, max_len: int, dtype: torch.dtype, device: torch.device | str, **sizes: int
) -> StreamingCache:
    """A stream has no longest length."""
    return StreamingCache(config, batch, dtype, device, **sizes)


_KINDS: dict[str, Callable[..., KVCache]] = {
    "contiguous": ContiguousCache,
    "paged": PagedCache,
    "int8": partial(QuantizedCache, bits=8),
    "int4": partial(QuantizedCache, bits=4),
}
#: Kinds that take numbers of tokens: their names, an example, and who makes the cache.
_SIZED: dict[str, tuple[tuple[str, ...], str, Callable[..., KVCache]]] = {
    "window": (("window",), "window:256", partial(_streaming, sinks=0)),
    "streaming": (("sinks", "window"), "streaming:4+252", _streaming),
    "h2o": (("heavy", "recent"), "h2o:128+128", HeavyHitterCache),
    "snapkv": (("budget",), "snapkv:256", SnapKVCache),
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
        kind: ``contiguous``, ``paged``; ``int8`` or ``int4`` for codes with the newest 32 to 63 tokens exact;
            ``window:WINDOW`` for the newest tokens, ``streaming:SINKS+WINDOW`` for the first as well;
            ``h2o:HEAVY+RECENT`` or ``snapkv:BUDGET`` for those that are looked at.
        config: the model's shape.
        batch: rows.
        max_len: tokens a row may come to, prompt and answer together; a stream has no end and ignores it.
        dtype: of keys and values, usually the model's.
        device: where they live, usually the model's.

    Raises:
        ConfigError: the kind is unknown, a size is impossible, or the kind cannot serve this model.
    """
    return _maker(kind)(config, batch, max_len, dtype, device)


def _maker(kind: str) -> Callable[..., KVCache]:
    name, sizes, other = (*kind.split(":", 2), "", "")[:3]
    if name not in _SIZED:
        if kind not in _KINDS:
            known = [*_KINDS, *(example for _, example, _ in _SIZED.values())]
            raise ConfigError(f"no cache is called {kind!r}; kvlab has {', '.join(known)}")
        return _KINDS[kind]
    fields, example, maker = _SIZED[name]
    if other:
        raise ConfigError(
            f"{kind!r} would be {name} and {other} in one: {name} drops or turns tokens one by one, while codes of 32 "
            "tokens share a scale and blocks are shared between rows; choose one of the two"
        )
    numbers = sizes.split("+")
    if len(numbers) != len(fields) or not all(number.isdecimal() for number in numbers):
        raise ConfigError(
            f"{kind!r} does not say how many tokens the cache keeps; give {' + '.join(fields)}, as in {example}"
        )
    return partial(maker, **{field: int(number) for field, number in zip(fields, numbers, strict=True)})
