"""Calculators that answer in the page, without a kernel: each is a small ES module with a class that inlines it.

Their arithmetic stands in ``cost.mjs`` and is tested to give what :mod:`kvlab.cost` gives.
"""

from kvlab.book.calculators.base import Calculator, Explorable
from kvlab.book.calculators.explorables import Asked, BlockMapExplorer, SchedulerPlayground, Timed
from kvlab.book.calculators.kinds import (
    DecodeStepCalculator,
    KVCacheCalculator,
    LatencyCalculator,
    MemoryCalculator,
    RooflineCalculator,
)
from kvlab.book.calculators.windows import WindowExplorer

__all__ = [
    "Asked",
    "BlockMapExplorer",
    "Calculator",
    "DecodeStepCalculator",
    "Explorable",
    "KVCacheCalculator",
    "LatencyCalculator",
    "MemoryCalculator",
    "RooflineCalculator",
    "SchedulerPlayground",
    "Timed",
    "WindowExplorer",
]
