"""An event loop whose time is a number: sleeping takes no time of ours, and events come exactly when they should.

What runs on it talks to servers in the same process (:mod:`kvlab.operate.in_process`). A load test of an hour is over
in a second, and its figures are the same every time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from selectors import DefaultSelector
from typing import Any, TypeVar

from kvlab.errors import MeasureError

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Where a loop would wait for its next timer, the time becomes that timer's.

    Work takes no time: only waits do. Threads are not waited for, so ``run_in_executor`` is of no use here.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        super().__init__(_Impatient(self))

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._seconds

    def skip(self, seconds: float) -> None:
        """Let time pass.

        Args:
            seconds: 0 or more.
        """
        self._seconds += seconds


class _Impatient(DefaultSelector):
    """Looks whether anything is ready; where nothing is, lets the loop's time pass instead of waiting."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        """What is ready now."""
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise MeasureError(f"at {self._loop.time():g} s of virtual time everything waits for something else")
        self._loop.skip(max(timeout, 0.0))
        return ready


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time, as ``asyncio.run`` does in real time.

    Where a loop runs already, as in a notebook, it gets a thread of its own.

    Args:
        main: what to run; every wait in it must be one of asyncio's.

    Raises:
        MeasureError: everything waits, and nothing is scheduled that could end it.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(main)
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(_run, main).result()


def _run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
