"""What the notebooks need and nothing else does: a start, claims with proof, source on show, the figures.

Names are handed on lazily: ``import kvlab.book`` imports neither torch nor matplotlib.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlab.book.calculators import (
        DecodeStepCalculator,
        KVCacheCalculator,
        LatencyCalculator,
        MemoryCalculator,
        RooflineCalculator,
    )
    from kvlab.book.claims import Claim, ClaimFailed, claim, judge
    from kvlab.book.colours import CACHE, DECODE, IDLE, INK, PREFILL
    from kvlab.book.figures import figure, publish, use_style
    from kvlab.book.setting import Lab, setup
    from kvlab.book.source import show
    from kvlab.book.stage import explorer, in_build, progress
    from kvlab.book.timelines import Row, Span, engine_rows, timeline

_HOME = {
    "DecodeStepCalculator": "calculators",
    "KVCacheCalculator": "calculators",
    "LatencyCalculator": "calculators",
    "MemoryCalculator": "calculators",
    "RooflineCalculator": "calculators",
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
    "Claim",
    "ClaimFailed",
    "DecodeStepCalculator",
    "KVCacheCalculator",
    "Lab",
    "LatencyCalculator",
    "MemoryCalculator",
    "RooflineCalculator",
    "Row",
    "Span",
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
