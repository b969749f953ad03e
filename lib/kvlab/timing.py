"""The only clock of the project, and what the latency figures mean.

Every figure is computed from one list of events: when a request was sent and when each of its tokens arrived.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any


@dataclass(frozen=True)
class Clock:
    """Reads the time after the device has finished its queue, so that a kernel's time is the kernel's own.

    Args:
        read: returns seconds, monotonic.
        synchronise: waits until the device has done everything that was asked of it.
    """

    read: Callable[[], float] = perf_counter
    synchronise: Callable[[], None] = lambda: None

    def now(self) -> float:
        """Seconds on the clock, with the device idle."""
        self.synchronise()
        return self.read()


def clock_for(device: Any) -> Clock:
    """The clock of a torch device: a GPU works asynchronously and must be waited for before the clock is read.

    Args:
        device: a ``torch.device``.
    """
    # A device object exists, so torch is imported already; this module itself stays free of it.
    torch = sys.modules["torch"]
    waits: dict[str, Callable[[], None]] = {
        "cuda": lambda: torch.cuda.synchronize(device),
        "mps": lambda: torch.mps.synchronize(),
    }
    return Clock(synchronise=waits[device.type]) if device.type in waits else Clock()


@dataclass
class RequestTimes:
    """When one request was sent and when each token of its answer arrived, in seconds on one clock.

    Args:
        sent: the request's start.
        tokens: one time a token, in order.
    """

    sent: float
    tokens: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float | None:
        """Time to first token: from sending to the first token of the answer; None before it came."""
        return self.tokens[0] - self.sent if self.tokens else None

    @property
    def e2e(self) -> float | None:
        """End to end: from sending to the last token; None before the first token came."""
        return self.tokens[-1] - self.sent if self.tokens else None

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, (E2E - TTFT) / (n - 1); None for fewer than two tokens."""
        if len(self.tokens) < 2:
            return None
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1)

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: the gaps between tokens. The wait for the first token is not one of them."""
        return [later - earlier for earlier, later in zip(self.tokens, self.tokens[1:], strict=False)]


def pooled_itl(requests: Sequence[RequestTimes]) -> list[float]:
    """Every gap of every request in one list. Its mean weighs requests by length; the mean TPOT does not."""
    return [gap for request in requests for gap in request.itl]
