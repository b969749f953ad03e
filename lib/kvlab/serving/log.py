"""What happened: everything, for a few requests, or what can be kept of millions.

Every figure comes from the same few times: when a request was sent, when it first ran, and when its tokens came. The
figures themselves are those of :class:`kvlab.timing.RequestTimes`.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from kvlab.errors import MeasureError
from kvlab.serving.engine import Event, StepRecord
from kvlab.serving.request import Request
from kvlab.timing import PERCENTS, RequestTimes, figures, goodput


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


@dataclass(slots=True)
class Lifetime:
    """What the figures of one request are made of: a few times, however long the answer. NaN is "not yet".

    Args:
        prompt_tokens: that the user sent.
        sent: when.
        scheduled: when it first joined those who run.
        first: when its first token came.
        last: when its newest token came.
        tokens: of the answer so far.
    """

    prompt_tokens: int
    sent: float
    scheduled: float = math.nan
    first: float = math.nan
    last: float = math.nan
    tokens: int = 0

    @property
    def ttft(self) -> float | None:
        """Time to first token; None before it came."""
        return self.first - self.sent if self.tokens else None

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for fewer than two tokens."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def e2e(self) -> float | None:
        """From sending to the newest token; None before the first came."""
        return self.last - self.sent if self.tokens else None


class Lifetimes:
    """Follows requests from their arrival to their end, and tells its subclasses what figures are made of."""

    def __init__(self) -> None:
        self._live: dict[Request, Lifetime] = {}

    def began(self, life: Lifetime) -> None:
        """The first token of a request came.

        Args:
            life: of the request.
        """

    def gap(self, seconds: float, times: int) -> None:
        """So much time lay between two tokens of a request.

        Args:
            seconds: between them.
            times: how often.
        """

    def ended(self, request: Request, life: Lifetime) -> None:
        """A request ended, with or without an answer.

        Args:
            request: that ended; ``finish`` says how.
            life: of the request.
        """

    def event(self, event: Event) -> None:
        """Something happened to a request."""
        request = event.request
        if event.kind == "queued":
            if request not in self._live:
                self._live[request] = Lifetime(request.prompt_tokens, event.time)
        elif event.kind == "scheduled":
            life = self._live[request]
            if math.isnan(life.scheduled):
                life.scheduled = event.time
        elif event.kind == "finished":
            self.ended(request, self._live.pop(request))
        elif event.kind == "refused":
            self._live.pop(request, None)

    def step(self, record: StepRecord) -> None:
        """Note when tokens came. Those that came one a step, in step with all others, are told in one call."""
        live, start, end, repeats, steady = self._live, record.start, record.end, record.repeats, 0
        for request, tokens in record.emitted.items():
            count = len(tokens)
            if not count:
                continue
            life = live[request]
            if life.last == start and count == repeats:
                steady += count
            else:
                self._irregular(life, record.token_times(count))
            life.last = end
            life.tokens += count
        if steady:
            self.gap((end - start) / repeats, steady)

    def _irregular(self, life: Lifetime, times: Sequence[float]) -> None:
        """Tokens after a pause, the first of an answer, and those that came at once."""
        for time in times:
            if math.isnan(life.first):
                life.first = life.last = time
                self.began(life)
            else:
                self.gap(time - life.last, 1)
                life.last = time


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
            times: how often it occurred, 1 or more.
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
        rank, places = percent / 100 * (self.total - 1), sorted(self.counts)
        passed = accumulate(self.counts[place] for place in places)
        place = next(place for place, count in zip(places, passed, strict=True) if count > rank)
        return math.exp(place * self._WIDTH)


class Served(NamedTuple):
    """What is kept of a request that was answered to its end; the TPOT of a single token is None."""

    ttft: float
    tpot: float | None


class Summary(Lifetimes):
    """Keeps three numbers a request, and counts of everything else: for simulations of millions of requests.

    Latencies are of answers that came to their end, ``stop`` or ``length``; tokens are of all.
    """

    def __init__(self) -> None:
        super().__init__()
        # NaN where a figure does not exist: TPOT of a single token.
        self.ttft, self.tpot, self.e2e = array("d"), array("d"), array("d")
        self.itl = Histogram()
        self.finished: Counter[str] = Counter()
        #: How many requests were refused, by the reason without its numbers; and one message for each reason.
        self.refused: Counter[str] = Counter()
        self.refusals: dict[str, str] = {}
        self.preemptions = self.steps = 0
        self.tokens_in = self.tokens_out = self.tokens_fed = 0
        self.start, self.end, self.kv_peak = math.inf, -math.inf, 0.0
        # Seconds in which a step ran, and those seconds times what was held and who took part.
        self._busy_s = self._kv_seconds = self._running_seconds = 0.0

    def expect(self, request: Request, life: Lifetime) -> None:
        """Announce a request that another engine has begun to answer.

        Args:
            request: will be queued.
            life: so far.
        """
        self._live[request] = life
        self.start = min(self.start, life.sent)

    def refuse(self, message: str) -> None:
        """Count a request that was refused.

        Args:
            message: why.
        """
        reason = re.sub(r"\d+", "N", message)
        self.refused[reason] += 1
        self.refusals.setdefault(reason, message)

    def event(self, event: Event) -> None:
        """Count it."""
        super().event(event)
        if event.kind == "queued":
            self.start = min(self.start, event.time)
        elif event.kind == "preempted":
            self.preemptions += 1
        elif event.kind == "refused":
            self.refuse(event.request.error)

    def step(self, record: StepRecord) -> None:
        """Count it."""
        super().step(record)
        took = record.end - record.start
        self.steps += record.repeats
        self.tokens_fed += sum(record.fed.values()) * record.repeats
        self.end = max(self.end, record.end)
        self.kv_peak = max(self.kv_peak, record.kv_usage)
        self._busy_s += took
        self._kv_seconds += took * record.kv_usage
        self._running_seconds += took * len(record.fed)

    def gap(self, seconds: float, times: int) -> None:
        """Count it."""
        self.itl.add(seconds, times)

    def ended(self, request: Request, life: Lifetime) -> None:
        """Keep its figures."""
        self.finished[request.finish or "unfinished"] += 1
        if life.tokens:
            self.tokens_in += life.prompt_tokens
            self.tokens_out += life.tokens
            self.end = max(self.end, life.last)
        if life.ttft is not None and life.e2e is not None and request.finish in ("stop", "length"):
            self.ttft.append(life.ttft)
            self.e2e.append(life.e2e)
            self.tpot.append(math.nan if life.tpot is None else life.tpot)

    def merge(self, other: Summary) -> None:
        """Add what happened on another replica.

        Args:
            other: of the same span of time.
        """
        for name in ("ttft", "tpot", "e2e", "finished", "refused", "preemptions", "steps", "tokens_in", "tokens_out",
                     "tokens_fed", "_busy_s", "_kv_seconds", "_running_seconds"):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.itl.merge(other.itl)
        self.refusals = other.refusals | self.refusals
        self.start, self.end = min(self.start, other.start), max(self.end, other.end)
        self.kv_peak = max(self.kv_peak, other.kv_peak)

    @property
    def seconds(self) -> float:
        """From the first request to the last token; 0 where nothing was served."""
        return max(self.end - self.start, 0.0)

    def served(self) -> list[Served]:
        """Latencies of every request that was answered to its end."""
        pairs = zip(self.ttft, self.tpot, strict=True)
        return [Served(ttft, None if math.isnan(tpot) else tpot) for ttft, tpot in pairs]

    def report(self, *, ttft: float | None = None, tpot: float | None = None) -> dict[str, Any]:
        """All figures, in seconds, tokens and requests; rates are 0 and latencies None where nothing was served.

        Args:
            ttft: the longest time to first token that was promised, for the goodput.
            tpot: the longest time per output token that was promised.
        """
        seconds = self.seconds or math.inf
        return {
            "requests": self.finished.total() + self.refused.total(),
            "finished": dict(self.finished),
            "refused": self.refused.total(),
            "refusals": {self.refusals[reason]: count for reason, count in self.refused.most_common()},
            "preemptions": self.preemptions,
            "seconds": self.seconds,
            "ttft_s": figures(self.ttft),
            "tpot_s": figures([tpot for tpot in self.tpot if not math.isnan(tpot)]),
            "itl_s": self._itl_figures(),
            "e2e_s": figures(self.e2e),
            "requests_per_s": self.finished.total() / seconds,
            "prompt_tokens_per_s": self.tokens_in / seconds,
            "output_tokens_per_s": self.tokens_out / seconds,
            "goodput_per_s": goodput(self.served(), seconds, ttft=ttft, tpot=tpot),
            "slo": {"ttft_s": ttft, "tpot_s": tpot},
            "kv_usage": {"mean": self._kv_seconds / (self._busy_s or 1), "peak": self.kv_peak},
            "running_mean": self._running_seconds / (self._busy_s or 1),
            "steps": self.steps,
            "tokens_fed": self.tokens_fed,
        }

    def _itl_figures(self) -> dict[str, float] | None:
        if not self.itl.counts:
            return None
        found = {f"p{percent}": self.itl.percentile(percent) for percent in PERCENTS}
        return {"mean": self.itl.sum / self.itl.total, **found, "max": self.itl.percentile(100)}
