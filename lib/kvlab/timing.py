"""The only clock of the project, and what the latency figures mean.

Every figure is computed from one list of events: when a request was sent and when each of its tokens arrived.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median, quantiles
from time import perf_counter, sleep
from typing import Any, Protocol

from kvlab.errors import MeasureError


@dataclass
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

    def wait_until(self, time: float) -> None:
        """Do nothing until a time on this clock; nothing at all if it has passed.

        Args:
            time: in seconds.
        """
        sleep(max(time - self.read(), 0.0))


class VirtualClock(Clock):
    """A clock that stands still until it is told how long something took: simulated work takes no time of ours."""

    def __init__(self) -> None:
        self._seconds = 0.0
        super().__init__(read=lambda: self._seconds)

    def advance(self, seconds: float) -> None:
        """Let time pass.

        Args:
            seconds: 0 or more.

        Raises:
            MeasureError: time would run backwards.
        """
        if not seconds >= 0:
            raise MeasureError(f"seconds is {seconds}; a clock advances by 0 or more")
        self._seconds += seconds

    def wait_until(self, time: float) -> None:
        """It is that time now; nothing at all if it has passed."""
        self._seconds = max(self._seconds, time)


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
        return [later - earlier for earlier, later in pairwise(self.tokens)]


def pooled_itl(requests: Sequence[RequestTimes]) -> list[float]:
    """Every gap of every request in one list. Its mean weighs requests by length; the mean TPOT does not."""
    return [gap for request in requests for gap in request.itl]


def carries_token(delta: Mapping[str, Any]) -> bool:
    """Whether a chunk of a streamed chat answer holds anything that was generated; the first that does ends the TTFT.

    Text, reasoning and tool calls are generated. The role that opens a stream is not: many servers send it before they
    have computed anything.

    Args:
        delta: of the chunk, as OpenAI's protocol has it.
    """
    return any(delta.get(part) for part in ("content", "reasoning", "reasoning_content", "refusal", "tool_calls"))


class Latencies(Protocol):
    """What a promise is about: figures of one request, None where there is nothing to measure."""

    @property
    def ttft(self) -> float | None:
        """Time to first token."""

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first."""


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which so many per cent lie, on a straight line between the two nearest.

    Args:
        values: in any order; one or more.
        percent: 0 to 100; 50 is the median.

    Raises:
        MeasureError: there is no value, or ``percent`` is outside its range.
    """
    if not values or not 0 <= percent <= 100:
        raise MeasureError(f"percentile {percent} of {len(values)} values; give 0 to 100, and one value or more")
    ranked = sorted(values)
    place = percent / 100 * (len(ranked) - 1)
    low = int(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)


#: The percentiles that a table of latencies shows.
PERCENTS = (50, 90, 95, 99)


def figures(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles (``p50`` and so on) and maximum of latencies; None where there is none.

    Args:
        values: in any order.
    """
    if not values:
        return None
    ranked = sorted(values)
    found = {f"p{percent}": percentile(ranked, percent) for percent in PERCENTS}
    return {"mean": fmean(ranked), **found, "max": ranked[-1]}


def goodput(
    requests: Sequence[Latencies], seconds: float, *, ttft: float | None = None, tpot: float | None = None
) -> float:
    """Requests per second that kept every promise (DistServe, arXiv:2401.09670).

    An answer that never began keeps no promise about its first token; one of a single token has no TPOT to break.

    Args:
        requests: all that were sent, whatever became of them.
        seconds: that the run lasted.
        ttft: the longest time to first token that was promised, in seconds.
        tpot: the longest time per output token that was promised, in seconds.

    Raises:
        MeasureError: the run lasted no time.
    """
    if seconds <= 0:
        raise MeasureError(f"seconds is {seconds}; goodput is a rate, so the run must last above 0")
    return sum(_kept(request, ttft, tpot) for request in requests) / seconds


def _kept(request: Latencies, ttft: float | None, tpot: float | None) -> bool:
    if request.ttft is None:
        return False
    in_time = ttft is None or request.ttft <= ttft
    return in_time and (tpot is None or request.tpot is None or request.tpot <= tpot)


@dataclass(frozen=True)
class Sample:
    """The same work, timed several times.

    Args:
        seconds: one a repeat, in order.
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle time: one disturbed repeat does not move it."""
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """The middle half of the times, as a fraction of the median; 0 for a single repeat."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median

    @property
    def best(self) -> float:
        """The shortest time: what the machine can do when nobody disturbs it."""
        return min(self.seconds)


def noise_floor(series: Iterable[Sequence[float]]) -> float | None:
    """How far the same measurement lies apart when it is made twice: median of ``|second / first - 1|``.

    Args:
        series: repeats of each measurement, in order; every neighbouring pair counts. None where nothing was repeated.
    """
    apart = [abs(second / first - 1) for seconds in series for first, second in pairwise(seconds)]
    return median(apart) if apart else None


def interleave(
    works: Mapping[str, Callable[[], object]], clock: Clock, *, repeats: int = 5, warmup: int = 1
) -> dict[str, Sample]:
    """Time several works turn by turn, so that a slow minute of the machine falls on all of them alike.

    Args:
        works: what to run, by name.
        clock: of the device that does the work; see :func:`clock_for`.
        repeats: rounds that are timed; in each, every work runs once.
        warmup: rounds before them that are not: compiling, allocating and caching happen there.

    Raises:
        MeasureError: there is nothing to time, or no repeat is asked for.
    """
    if not works or repeats < 1 or warmup < 0:
        raise MeasureError(
            f"{len(works)} works, {repeats} repeats, {warmup} warm-ups; time 1 work or more, 1 time or more"
        )
    times: dict[str, list[float]] = {name: [] for name in works}
    for lap in range(warmup + repeats):
        for name, work in works.items():
            start = clock.now()
            work()
            took = clock.now() - start
            if lap >= warmup:
                times[name].append(took)
    return {name: Sample(tuple(seconds)) for name, seconds in times.items()}


def repeat(work: Callable[[], object], clock: Clock, *, repeats: int = 5, warmup: int = 1) -> Sample:
    """Time one work several times; to compare two, :func:`interleave` them.

    Args:
        work: what to run.
        clock: of the device that does the work.
        repeats: times that count.
        warmup: times before them that do not.

    Raises:
        MeasureError: no repeat is asked for.
    """
    return interleave({"work": work}, clock, repeats=repeats, warmup=warmup)["work"]
