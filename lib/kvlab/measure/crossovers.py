"""Which matrix product is the fastest for how many rows, measured on the layers of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvlab.model import GPT
from kvlab.quantize import Routes, RowAwareLinear, linears, routes_from
from kvlab.quantize.routes import Product
from kvlab.timing import clock_for, interleave

#: Rows that are tried: single tokens, draft verification, batches, chunks.
ROWS = (1, 4, 16, 64, 128, 256, 512)

#: Multiplications of one timing: few layers would stay in the processor's cache and flatter the narrow formats.
_MACS_AT_ONCE = 2e10


def crossovers(
    model: GPT, rows: Sequence[int] = ROWS, tell: Callable[[str], None] = lambda _: None
) -> dict[str, Routes]:
    """The fastest product for each number of rows, for each format in a model.

    Args:
        model: holds row-aware layers (``quantize`` or ``row_aware``).
        rows: that are tried, at least one.
        tell: called with what is being measured.

    Returns:
        Routes by device type and format, as :func:`kvlab.quantize.remember` keeps them.
    """
    formats: dict[str, list[RowAwareLinear]] = {}
    for name, layer in linears(model):
        if isinstance(layer, RowAwareLinear) and name != "head":
            formats.setdefault(layer.format, []).append(layer)
    for name, layer in linears(model):
        if isinstance(layer, RowAwareLinear) and name == "head":
            formats.setdefault(layer.format, [layer])
    found = {}
    for kind, layers in formats.items():
        tell(f"{kind}: {', '.join(layers[0].products())}")
        found[f"{model.device.type}/{kind}"] = routes_from(_timed(layers, rows, model))
    return found


def _timed(layers: list[RowAwareLinear], rows: Sequence[int], model: GPT) -> dict[str, dict[int, float]]:
    """Seconds of every product that all the layers have, by rows."""
    names = [name for name in layers[0].products() if all(name in layer.products() for layer in layers)]
    seconds: dict[str, dict[int, float]] = {name: {} for name in names}
    for count in rows:
        chosen, macs = [], 0.0
        for layer in layers:
            if macs < _MACS_AT_ONCE:
                chosen.append(layer)
                macs += count * layer.in_features * layer.out_features
        inputs = {
            w: torch.randn(count, w, dtype=model.dtype, device=model.device) for w in {x.in_features for x in chosen}
        }
        works = {name: _work([layer.products()[name] for layer in chosen], chosen, inputs) for name in names}
        with torch.inference_mode():
            for name, sample in interleave(works, clock_for(model.device), repeats=5).items():
                seconds[name][count] = sample.median
    return seconds


def _work(products: list[Product], layers: list[RowAwareLinear], inputs: dict[int, Tensor]) -> Callable[[], None]:
    def work() -> None:
        for product, layer in zip(products, layers, strict=True):
            product(inputs[layer.in_features])

    return work
