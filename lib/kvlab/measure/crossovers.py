"""Which matrix product is the fastest for how many rows, measured on the layers of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from kvlab.model import GPT
from kvlab.quantize import Routes, RowAwareLinear, linears, routes_from
from kvlab.quantize.routes import Product, key
from kvlab.timing import clock_for, interleave

#: Rows that are tried: single tokens, draft verification, batches, chunks.
ROWS = (1, 4, 16, 64, 128, 256, 512)

#: Multiplications of one timing. At one row this is every layer of a small model: fewer would stay in the processor's
#: cache, which flatters whatever reads most bytes.
_MACS_AT_ONCE = 4e9


def crossovers(
    model: GPT, rows: Sequence[int] = ROWS, tell: Callable[[str], None] = lambda _: None
) -> dict[str, Routes]:
    """The fastest product for each number of rows, for each format in a model.

    Args:
        model: holds row-aware layers (``quantize`` or ``row_aware``).
        rows: that are tried, at least one.
        tell: called with what is being measured.

    Returns:
        Routes by device, format and dtype, as :func:`kvlab.quantize.remember` keeps them.
    """
    formats: dict[str, list[RowAwareLinear]] = {}
    for name, layer in linears(model):
        if isinstance(layer, RowAwareLinear) and (name != "head" or layer.format not in formats):
            formats.setdefault(layer.format, []).append(layer)
    found = {}
    for kind, layers in formats.items():
        tell(f"{kind}: {', '.join(layers[0].products(model.dtype))}")
        found[key(model.device, kind, model.dtype)] = routes_from(_timed(layers, rows, model))
    return found


def _timed(layers: list[RowAwareLinear], rows: Sequence[int], model: GPT) -> dict[str, dict[int, float]]:
    """Seconds of every product that all the layers have, by rows."""
    products = [layer.products(model.dtype) for layer in layers]
    names = [name for name in products[0] if all(name in others for others in products)]
    seconds: dict[str, dict[int, float]] = {name: {} for name in names}
    for count in rows:
        macs = accumulate(count * layer.in_features * layer.out_features for layer in layers)
        chosen = layers[: 1 + sum(done < _MACS_AT_ONCE for done in macs)]
        widths = {layer.in_features for layer in chosen}
        inputs = {width: torch.randn(count, width, dtype=model.dtype, device=model.device) for width in widths}
        works = {name: _work([each[name] for each in products], chosen, inputs) for name in names}
        with torch.inference_mode():
            for name, sample in interleave(works, clock_for(model.device), repeats=3).items():
                seconds[name][count] = sample.median
    return seconds


def _work(products: list[Product], layers: list[RowAwareLinear], inputs: dict[int, Tensor]) -> Callable[[], None]:
    def work() -> None:
        for product, layer in zip(products, layers, strict=False):
            product(inputs[layer.in_features])

    return work
