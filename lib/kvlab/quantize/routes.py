"""Which matrix product for how many rows: measured on the device, or a rule of thumb until it has been."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvlab.devices import dtype_name
from kvlab.kernels import built, enable, instruction_set, library
from kvlab.store import cache_folder, publish, staging

Product = Callable[[Tensor], Tensor]

#: Routes in the order of preference where nothing was measured, and the rows up to which each is worth trying.
_RULE = (("kernel", 64), ("packed", 8), ("dequantize", None), ("torch", None))


@dataclass(frozen=True)
class Routes:
    """Crossovers between products.

    Args:
        steps: rows up to which a route is the fastest, and its name, in rising order; the last has no limit (None).
    """

    steps: tuple[tuple[int | None, str], ...]

    def choose(self, rows: int, there: Iterable[str]) -> str:
        """The route for a number of rows.

        Args:
            rows: of the activations.
            there: names of the routes that the layer has; another is never chosen.
        """
        names = set(there)
        found = [name for limit, name in self.steps if name in names and (limit is None or rows <= limit)]
        return found[0] if found else next(iter(there))


RULE_OF_THUMB = Routes(tuple((limit, name) for name, limit in _RULE))


def known(device: torch.device, format: str, dtype: torch.dtype) -> bool:
    """Whether crossovers were measured for a format.

    Args:
        device: where the layer is.
        format: of its weights.
        dtype: of the activations.
    """
    return routes_for(device, format, dtype) is not RULE_OF_THUMB


def key(device: torch.device, format: str, dtype: torch.dtype) -> str:
    """Under which name crossovers are kept: ``cpu/int8-g32/bfloat16``.

    Args:
        device: where the layer is.
        format: of its weights.
        dtype: of the activations.
    """
    return f"{device.type}/{format}/{dtype_name(dtype)}"


@cache
def routes_for(device: torch.device, format: str, dtype: torch.dtype) -> Routes:
    """The crossovers that were measured on this machine, or a rule of thumb.

    Args:
        device: where the layer is.
        format: of its weights.
        dtype: of the activations.
    """
    if device.type == "cpu":
        enable()
    try:
        steps = _kept()[key(device, format, dtype)]
        return Routes(tuple((limit, str(name)) for limit, name in steps))
    except (KeyError, ValueError, TypeError):
        return RULE_OF_THUMB  # not measured, or by another version


def routes_from(seconds: Mapping[str, Mapping[int, float]]) -> Routes:
    """Crossovers out of measurements.

    Args:
        seconds: of each route, by rows; all over the same rows.
    """
    steps: list[tuple[int | None, str]] = []
    for rows in sorted(next(iter(seconds.values()))):
        best = min(seconds, key=lambda name: seconds[name][rows])
        if steps and steps[-1][1] == best:
            steps.pop()
        steps.append((rows, best))
    return Routes((*steps[:-1], (None, steps[-1][1])))


def remember(found: Mapping[str, Routes]) -> Path:
    """Keep measured crossovers for the processes to come.

    Args:
        found: by :func:`key`.
    """
    target = _file()
    kept = _kept() | {name: routes.steps for name, routes in found.items()}
    with staging(target) as work:
        made = work / target.name
        made.write_text(json.dumps(kept, indent=1) + "\n", "utf8")
        publish(made, target)
    routes_for.cache_clear()
    return target


def _kept() -> dict[str, Any]:
    """What was remembered; nothing where the file is missing or damaged."""
    try:
        found = json.loads(_file().read_text("utf8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _file() -> Path:
    """One file for each torch, instruction set and number of threads, and for each build of the kernels."""
    name = f"{torch.__version__}-{instruction_set()}-{torch.get_num_threads()}"
    return cache_folder() / "routes" / f"{name}-{library().stem if built() else 'torch'}.json"
