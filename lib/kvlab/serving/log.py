"""What happened: everything, for a few requests, or what can be kept of millions."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvlab.errors import MeasureError
from kvlab.serving.engine import Event, StepRecord
from kvlab.serving.request import Request
from kvlab.timing import RequestTimes, goodput, percentile

PERCENTS = (50, 90, 95, 99)


@dataclass
class EventLog:
    """Keeps every event and every step: for figures, tests and a few hundred requests."""

    events: list[Event] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)

    def event(self, event: Event) -> None:
        """Keep it."""
        self.events.append(event)

    def step(self, record: StepRecord) -> None:
        """Keep it."""
        self.steps.append(record)

    def times(self) -> dict[Request, RequestTimes]:
        """When each request was sent and each of its tokens arrived; those that were refused are not in it."""
        times = {event.request: RequestTimes(event.time) for event in self.events if event.kind == "queued"}
        for record in self.steps:
            for request, tokens in record.emitted.items():
                times[request].tokens += record.token_times(len(tokens))
        return times


class Histogram:
    """Counts durations in bins that are one per cent wide: any number of them in a few hundred numbers."""

    _WIDTH = math.log(1.01)

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.sum = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count a duration.

        Args:
            seconds: 0 or more; all below a nanosecond are one bin.
            times: how often it occurred.
        """
        self.counts[round(math.log(max(seconds, 1e-9)) / self._WIDTH)] += times
        self.sum += seconds * times

    def merge(self, other: Histogram) -> None:
        """Count what another has counted.

        Args:
            other: stays as it is.
        """
        self.counts += other.counts
        self.sum += other.sum

    @property
    def total(self) -> int:
        """Durations that were counted."""
        return self.counts.total()

    def percentile(self, percent: float) -> float:
        """The duration below which so many per cent lie, within half a per cent of it.

        Args:
            percent: 0 to 100.

        Raises:
            MeasureError: nothing was counted, or ``percent`` is outside its range.
        """
        if not self.counts or not 0 <= percent <= 100:
            raise MeasureError(f"percentile {percent} of {self.total} durations; give 0 to 100, and count one or more")
        rank, passed = percent / 100 * (self.total - 1), 0
        for place in sorted(self.counts):
            passed += self.counts[place]
            if passed > rank:
                return math.exp(place * self._WIDTH)
        return math.exp(max(self.counts) * self._WIDTH)


class Served(NamedTuple):
    """What is kept of a request that ended; None where there is nothing to measure."""

    ttft: float | None
    tpot: float | None


@dataclass(slots=True)
class _Live:
    """A request that has not ended: when it was sent, and when its first and its last token came so far."""

    sent: float
    first: float = math.nan
    last: float = math.nan
    count: int = 0


class Summary:
    """Keeps three numbers a request, and counts of everything else: for simulations of millions of requests."""

    def __init__(self) -> None:
        # NaN where a figure does not exist: TPOT of a single token.
        self.ttft, self.tpot, self.e2e = array("d"), array("d"), array("d")
        self.itl = Histogram()
        self.finished: Counter[str] = Counter()
        self.refused = self.preemptions = self.steps = 0
        self.tokens_in = self.tokens_out = self.tokens_fed = 0
        self.start, self.end, self.kv_peak = math.inf, 0.0, 0.0
        self._busy = self._kv_seconds = self._running_seconds = 0.0
        self._live: dict[Request, _Live] = {}

    def expect(self, request: Request, sent: float, first: float) -> None:
        """Announce a request whose first token came from another engine.

        Args:
            request: will be queued.
            sent: when the user sent it.
            first: when the first token came.
        """
        self._live[request] = _Live(sent, first, first, 1)
        self.start = min(self.start, sent)

    def served_elsewhere(self, request: Request, sent: float, first: float) -> None:
        """Count a request whose only token came from another engine.

        Args:
            request: that has ended.
            sent: when the user sent it.
            first: when its token came.
        """
        self.expect(request, sent, first)
        self._finish(request, self._live.pop(request))

    def event(self, event: Event) -> None:
        """Count it."""
        request = event.request
        if event.kind == "queued":
            self._live.setdefault(request, _Live(event.time))
            self.start = min(self.start, event.time)
        elif event.kind == "preempted":
            self.preemptions += 1
        elif event.kind == "refused":
            self.refused += 1
        elif event.kind == "finished":
            self._finish(request, self._live.pop(request))

    def step(self, record: StepRecord) -> None:
        """Count it."""
        took = record.end - record.start
        each = took / record.repeats
        live, steady = self._live, 0
        for request, tokens in record.emitted.items():
            if not tokens:
                continue
            state = live[request]
            if state.last == record.start and len(tokens) == record.repeats:
                steady += len(tokens)
            else:
                self._irregular(state, record.token_times(len(tokens)))
            state.last = record.end
            state.count += len(tokens)
        if steady:
            self.itl.add(each, steady)
        self.steps += record.repeats
        self.tokens_fed += sum(record.fed.values()) * record.repeats
        self.end = max(self.end, record.end)
        self.kv_peak = max(self.kv_peak, record.kv_usage)
        self._busy += took
        self._kv_seconds += took * record.kv_usage
        self._running_seconds += took * len(record.fed)

    def merge(self, other: Summary) -> None:
        """Add what happened on another replica.

        Args:
            other: of the same span of time.
        """
        for mine, theirs in ((self.ttft, other.ttft), (self.tpot, other.tpot), (self.e2e, other.e2e)):
            mine.extend(theirs)
        self.itl.merge(other.itl)
        self.finished += other.finished
        for name in ("refused", "preemptions", "steps", "tokens_in", "tokens_out", "tokens_fed", "_busy",
                     "_kv_seconds", "_running_seconds"):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.start, self.end = min(self.start, other.start), max(self.end, other.end)
        self.kv_peak = max(self.kv_peak, other.kv_peak)

    @property
    def seconds(self) -> float:
        """From the first request to the end of the last step; 0 where nothing was served."""
        return max(self.end - self.start, 0.0)

    def served(self) -> list[Served]:
        """Latencies of every request that ended with an answer."""
        known = lambda value: None if math.isnan(value) else value  # noqa: E731
        return [Served(known(ttft), known(tpot)) for ttft, tpot in zip(self.ttft, self.tpot, strict=True)]

    def report(self, *, ttft: float | None = None, tpot: float | None = None) -> dict[str, Any]:
        """All figures, in seconds, tokens and requests.

        Args:
            ttft: the longest time to first token that was promised, for the goodput.
            tpot: the longest time per output token that was promised.
        """
        seconds = self.seconds or math.nan
        return {
            "requests": self.finished.total() + self.refused,
            "finished": dict(self.finished),
            "refused": self.refused,
            "preemptions": self.preemptions,
            "seconds": self.seconds,
            "ttft_s": _figures(self.ttft),
            "tpot_s": _figures(self.tpot),
            "itl_s": self._itl_figures(),
            "e2e_s": _figures(self.e2e),
            "requests_per_s": self.finished.total() / seconds,
            "prompt_tokens_per_s": self.tokens_in / seconds,
            "output_tokens_per_s": self.tokens_out / seconds,
            "goodput_per_s": goodput(self.served(), seconds, ttft=ttft, tpot=tpot) if self.seconds else 0.0,
            "slo": {"ttft_s": ttft, "tpot_s": tpot},
            "kv_usage": {"mean": self._kv_seconds / (self._busy or 1), "peak": self.kv_peak},
            "running_mean": self._running_seconds / (self._busy or 1),
            "steps": self.steps,
            "tokens_fed": self.tokens_fed,
        }

    def _irregular(self, state: _Live, times: Sequence[float]) -> None:
        """Tokens after a pause, the first of an answer, and those that came at once."""
        last = state.last
        for time in times:
            if math.isnan(last):
                state.first = time
            else:
                self.itl.add(time - last)
            last = time

    def _finish(self, request: Request, state: _Live) -> None:
        self.finished[request.finish or "unfinished"] += 1
        if state.count:
            self.tokens_in += request.prompt_tokens
            self.tokens_out += state.count
            self.ttft.append(state.first - state.sent)
            self.e2e.append(state.last - state.sent)
            gaps = state.count - 1
            self.tpot.append((state.last - state.first) / gaps if gaps else math.nan)

    def _itl_figures(self) -> dict[str, float] | None:
        if not self.itl.total:
            return None
        found = {f"p{percent}": self.itl.percentile(percent) for percent in PERCENTS}
        return {"mean": self.itl.sum / self.itl.total, **found, "max": self.itl.percentile(100)}


def _figures(values: Iterable[float]) -> dict[str, float] | None:
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return None
    found = {f"p{percent}": percentile(known, percent) for percent in PERCENTS}
    return {"mean": sum(known) / len(known), **found, "max": max(known)}
