"""What the notebooks need and nothing else does: a start, claims with proof, source on show, the figures.

Names are handed on lazily: ``import kvlab.book`` imports neither torch nor matplotlib.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlab.book.block_maps import BlockHistory, Held, block_map
    from kvlab.book.calculators import (
        BlockMapExplorer,
        DecodeStepCalculator,
        KVCacheCalculator,
        LatencyCalculator,
        MemoryCalculator,
        RooflineCalculator,
        SchedulerPlayground,
        WindowExplorer,
    )
    from kvlab.book.claims import Claim, ClaimFailed, claim, judge
    from kvlab.book.colours import CACHE, DECODE, IDLE, INK, PREFILL
    from kvlab.book.figures import figure, publish, use_style
    from kvlab.book.setting import Lab, setup
    from kvlab.book.source import show
    from kvlab.book.stage import explorer, in_build, progress
    from kvlab.book.timelines import Row, Span, engine_rows, timeline

_HOME = {
    "BlockHistory": "block_maps",
    "Held": "block_maps",
    "block_map": "block_maps",
    "BlockMapExplorer": "calculators",
    "DecodeStepCalculator": "calculators",
    "KVCacheCalculator": "calculators",
    "LatencyCalculator": "calculators",
    "MemoryCalculator": "calculators",
    "RooflineCalculator": "calculators",
    "SchedulerPlayground": "calculators",
    "WindowExplorer": "calculators",
    "Claim": "claims",
    "ClaimFailed": "claims",
    "claim": "claims",
    "judge": "claims",
    "CACHE": "colours",
    "DECODE": "colours",
    "IDLE": "colours",
    "INK": "colours",
    "PREFILL": "colours",
    "figure": "figures",
    "publish": "figures",
    "use_style": "figures",
    "Lab": "setting",
    "setup": "setting",
    "show": "source",
    "explorer": "stage",
    "in_build": "stage",
    "progress": "stage",
    "Row": "timelines",
    "Span": "timelines",
    "engine_rows": "timelines",
    "timeline": "timelines",
}
__all__ = [
    "CACHE",
    "DECODE",
    "IDLE",
    "INK",
    "PREFILL",
    "BlockHistory",
    "BlockMapExplorer",
    "Claim",
    "ClaimFailed",
    "DecodeStepCalculator",
    "Held",
    "KVCacheCalculator",
    "Lab",
    "LatencyCalculator",
    "MemoryCalculator",
    "RooflineCalculator",
    "Row",
    "SchedulerPlayground",
    "Span",
    "WindowExplorer",
    "block_map",
    "claim",
    "engine_rows",
    "explorer",
    "figure",
    "in_build",
    "judge",
    "progress",
    "publish",
    "setup",
    "show",
    "timeline",
    "use_style",
]


def __getattr__(name: str) -> Any:
    """Hand a name on from the module that holds it."""
    if name not in _HOME:
        raise AttributeError(f"module 'kvlab.book' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"kvlab.book.{_HOME[name]}"), name)
