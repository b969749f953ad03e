"""Requests served on a virtual clock by steps whose times can be worked out by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from hypothesis import strategies as st

from kvlab.cache import BlockPool
from kvlab.cost import Row
from kvlab.serving import Arrival, CostModelExecutor, Engine, Listener, Plan, Scheduler, SimulatedRequest
from kvlab.timing import VirtualClock

STEP_S, TOKEN_S, HELD_S = 0.010, 0.001, 1e-6

Ask = tuple[float, int, int]


def in_order(found: list[Ask]) -> list[Ask]:
    times = accumulate(gap for gap, _, _ in found)
    return [(time, prompt, output) for time, (_, prompt, output) in zip(times, found, strict=True)]


#: Requests as (time, prompt, output), in order.
TRACES = st.lists(st.tuples(st.floats(0, 0.3), st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=12).map(
    in_order
)

#: A pool of 14 blocks holds any of them, and not many together: somebody is preempted.
RUNS = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(["static", "continuous", "chunked"]),
        "token_budget": st.integers(50, 90),
        "blocks": st.integers(14, 60),
        "max_running": st.integers(1, 6),
        "repeats": st.booleans(),
    }
)


class ToyTimes:
    """A step takes 10 ms, 1 ms for each token and a microsecond for each token in the caches of those who decode."""

    def seconds(self, decodes: int, held: int, prompts: Sequence[Row] = ()) -> float:
        tokens = decodes + sum(row.new for row in prompts)
        return STEP_S + TOKEN_S * tokens + HELD_S * held


class OneByOne(CostModelExecutor):
    """Takes no two steps in one."""

    def repeats(self, plan: Plan, seconds: float | None) -> int:
        return 1


def engine(
    *listeners: Listener, blocks: int = 1000, block_size: int = 4, repeats: bool = True, **settings: Any
) -> Engine:
    clock = VirtualClock()
    executor = (CostModelExecutor if repeats else OneByOne)(ToyTimes(), clock)
    return Engine(Scheduler(BlockPool(blocks, block_size), **settings), executor, clock, listeners)


def asked(number: int, time: float, prompt: int, output: int, cap: int | None = None) -> SimulatedRequest:
    return SimulatedRequest.of(number, Arrival(time, prompt, output, number), cap)


def serve(coming: Iterable[tuple[float, int, int]], *listeners: Listener, **settings: Any) -> Engine:
    """Serve requests, given as (time, prompt tokens, output tokens), to the end."""
    made = engine(*listeners, **settings)
    for _ in made.run((time, asked(number, time, *rest)) for number, (time, *rest) in enumerate(coming)):
        pass
    made.scheduler.check()
    return made
