"""What a load test tells: the facts that only a client can see, and estimates of those that only a server knows."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from kvlab.errors import MeasureError
from kvlab.operate.facts import Facts
from kvlab.operate.prometheus import Distribution
from kvlab.timing import RequestTimes, percentile

# A gap below this part of the stream's average was no wait for the server: its text lay ready somewhere in between.
_NOTHING = 0.05
# Streams with fewer chunks say nothing about their rhythm.
_RHYTHM = 8
# The first requests of a run, whose times are held against the others'.
_EARLY = 3


@dataclass(frozen=True)
class _Answer:
    """One request that got tokens."""

    intended: float
    sent: float
    chunks: tuple[float, ...]
    prompt_tokens: int | None
    output_tokens: int
    cached_tokens: int | None

    @property
    def times(self) -> RequestTimes:
        """From the time that it was meant to be sent."""
        return RequestTimes(self.intended, list(self.chunks))

    @property
    def ttft(self) -> float:
        """To the first chunk with tokens."""
        return self.chunks[0] - self.intended

    @property
    def tpot(self) -> float | None:
        """By the server's count of tokens: a chunk may hold several."""
        rest = self.output_tokens - 1
        return (self.chunks[-1] - self.chunks[0]) / rest if rest > 0 else None

    @property
    def bursts(self) -> float | None:
        """Part of the gaps that are next to nothing, beside the average time for a chunk of this answer."""
        if len(self.chunks) < _RHYTHM:
            return None
        average = (self.chunks[-1] - self.sent) / len(self.chunks)
        gaps = self.times.itl
        return sum(gap < _NOTHING * average for gap in gaps) / len(gaps)


def facts_of_loadtest(result: Mapping[str, Any]) -> Facts:
    """From the JSON object that ``kvlab loadtest`` writes.

    The parts of a first token that only a server knows are estimated: what the quickest requests of the run needed
    counts as reading the prompt, what the others needed beyond that as waiting.

    Args:
        result: the object.

    Raises:
        MeasureError: it is something else, or a part of it is missing.
    """
    if not isinstance(result, Mapping) or result.get("kind") != "kvlab-loadtest":
        raise MeasureError(
            'this is no result of a load test: it has no "kind": "kvlab-loadtest"; give the file that '
            "kvlab loadtest --json wrote"
        )
    try:
        return _facts(result)
    except (KeyError, TypeError, AttributeError, IndexError) as failure:
        raise MeasureError(
            f"the result of the load test is damaged ({type(failure).__name__}: {failure}); write it again"
        ) from None


def _facts(result: Mapping[str, Any]) -> Facts:
    requests = result["requests"]
    answers = sorted(_answers(requests), key=lambda each: each.intended)
    ttft = Distribution.of(each.ttft for each in answers)
    queue, prefill = _parts(answers)
    early, late = _early_and_late(answers, warmed=bool(result["settings"].get("warmup")))
    slo = result["figures"].get("slo") or {}
    bursts = [each.bursts for each in answers if each.bursts is not None]
    cached = [each for each in answers if each.cached_tokens is not None and each.prompt_tokens]
    return Facts(
        sources=(f"a load test of {len(requests)} requests",),
        notes=tuple(_remarks(result, answers)),
        attempts=float(len(requests)),
        begun=float(len(answers)),
        finished=float(sum(request["error"] is None for request in requests)),
        prompt_tokens=float(sum(each.prompt_tokens or 0 for each in answers)) or None,
        output_tokens=float(sum(each.output_tokens for each in answers)),
        prompts=Distribution.of(float(each.prompt_tokens) for each in answers if each.prompt_tokens),
        answers=Distribution.of(float(each.output_tokens) for each in answers),
        ttft=ttft,
        queue=queue,
        prefill=prefill,
        itl=Distribution.of(gap for each in answers for gap in each.times.itl),
        batch_gaps=_gaps_by_batch(answers),
        prefix_queries=float(sum(each.prompt_tokens or 0 for each in cached)) or None,
        prefix_hits=float(sum(each.cached_tokens or 0 for each in cached)),
        failures=_failures(requests),
        failure_texts=_texts(requests),
        capped=float(_capped(result)),
        client_ttft=ttft,
        client_tpot=Distribution.of(each.tpot for each in answers if each.tpot is not None),
        send_lag=Distribution.of(each.sent - each.intended for each in answers),
        bursts=median(bursts) if bursts else None,
        early_ttft=early,
        late_ttft=late,
        slo_tpot=slo.get("tpot_s"),
    )


def _answers(requests: Sequence[Mapping[str, Any]]) -> Iterator[_Answer]:
    for each in requests:
        chunks = tuple(each["chunks_s"] or ())
        if chunks and each["sent_s"] is not None:
            tokens = each["output_tokens"] or len(chunks)
            yield _Answer(
                each["intended_s"], each["sent_s"], chunks, each["prompt_tokens"], tokens, each["cached_tokens"]
            )


def _remarks(result: Mapping[str, Any], answers: Sequence[_Answer]) -> Iterator[str]:
    if result.get("interrupted"):
        yield "The load test was interrupted: these are the requests until then."
    if not answers:
        yield "No request of the load test got a token, so nothing is known about times."
    else:
        yield (
            "A client sees one time to the first token; how much of it was waiting and how much was reading is "
            "estimated from the quickest requests. The server's metrics page says it: give both."
        )
    yield from (warning["message"] for warning in result.get("warnings") or ())


def _parts(answers: Sequence[_Answer]) -> tuple[Distribution | None, Distribution | None]:
    """Waiting and reading. Whoever was quickest read the prompt as well; what is beyond that, another time, is waiting.

    Long prompts take longer to read: each is held against the quickest of its own length, within a factor of two.
    """
    by_length: defaultdict[int, list[float]] = defaultdict(list)
    for each in answers:
        by_length[(each.prompt_tokens or 0).bit_length()].append(each.ttft)
    quickest = {length: percentile(times, 5) for length, times in by_length.items()}
    reading = [min(each.ttft, quickest[(each.prompt_tokens or 0).bit_length()]) for each in answers]
    waiting = [each.ttft - read for each, read in zip(answers, reading, strict=True)]
    return Distribution.of(waiting), Distribution.of(reading)


def _early_and_late(answers: Sequence[_Answer], *, warmed: bool) -> tuple[float | None, float | None]:
    """Typical first tokens at the begin of a run and after; None where a warm-up went before, or too few came."""
    if warmed or len(answers) < 3 * _EARLY:
        return None, None
    times = [each.ttft for each in answers]
    return median(times[:_EARLY]), median(times[_EARLY:])


def _gaps_by_batch(answers: Sequence[_Answer]) -> tuple[tuple[float, float], ...]:
    """The median gap by the number of answers that streamed at that time, for the fewest and the most.

    Both are averages over a fifth of the gaps, so that neither is a single odd moment.
    """
    begins = sorted(each.chunks[0] for each in answers)
    ends = sorted(each.chunks[-1] for each in answers)
    gaps = []
    for each in answers:
        for earlier, later in pairwise(each.chunks):
            streaming = bisect_left(begins, later) - bisect_left(ends, later)
            gaps.append((float(streaming), later - earlier))
    gaps.sort()
    part = len(gaps) // 5
    if part < 20:
        return ()
    few, many = gaps[:part], gaps[-part:]
    return tuple((median(n for n, _ in some), median(gap for _, gap in some)) for some in (few, many))


def _failures(requests: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By kind; what the user broke off is no failure of the server's."""
    kinds = Counter(each["error"]["kind"] for each in requests if each["error"])
    return {kind: float(count) for kind, count in kinds.items() if kind != "cancelled"}


def _texts(requests: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return Counter(each["error"]["message"] for each in requests if each["error"] and each["error"].get("message"))


def _capped(result: Mapping[str, Any]) -> int:
    """Answers that the limit of the context cut: they ended by length, short of what was asked."""
    if not any(warning["kind"] == "capped" for warning in result.get("warnings") or ()):
        return 0
    asked = result["settings"].get("output_tokens")
    short = [
        each
        for each in result["requests"]
        if each["finish_reason"] == "length" and asked and (each["output_tokens"] or asked) < asked
    ]
    return len(short) or 1
