"""What a load test tells: the facts that only a client can see, and estimates of those that only a server knows."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from kvlab.errors import MeasureError
from kvlab.operate.artefacts import cautions
from kvlab.operate.facts import Facts
from kvlab.operate.prometheus import Distribution
from kvlab.operate.record import Record
from kvlab.timing import percentile, pooled_itl

# The first requests of a run, whose times are held against the others'.
_EARLY = 3
# Times in a file are rounded, each for itself.
_ROUNDING = 1e-3


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
        records = sorted(map(_record, result["requests"]), key=lambda record: record.intended_s)
        return _facts(result, records)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as failure:
        if isinstance(failure, MeasureError):
            raise
        raise MeasureError(
            f"the result of the load test is damaged ({type(failure).__name__}: {failure}); write it again"
        ) from None


def _record(request: Mapping[str, Any]) -> Record:
    known = {name: value for name, value in request.items() if value is not None}
    record = Record.from_json({"asked_prompt_tokens": 0, "asked_output_tokens": 0} | known)
    times = [record.intended_s, *([] if record.sent_s is None else [record.sent_s]), *record.chunks_s]
    if any(later < earlier - _ROUNDING for earlier, later in pairwise(times)):
        raise MeasureError(
            f"request {record.id} was answered before it was sent, or its chunks are out of order: times are seconds "
            "since the run began, of one clock; write the result again"
        )
    return record


def _facts(result: Mapping[str, Any], records: Sequence[Record]) -> Facts:
    answers = [record for record in records if record.chunks_s]
    warnings = _warnings(result, records)
    queue, prefill = _parts(answers)
    early, late = _early_and_late(answers, warmed=bool(result["settings"].get("warmup")))
    ttft = Distribution.of(_ttft(record) for record in answers)
    cached = [record for record in answers if record.cached_tokens is not None and record.prompt_tokens]
    return Facts(
        sources=(f"a load test of {len(records)} requests",),
        notes=tuple(_remarks(result, answers)),
        running=_streams(answers),
        attempts=float(len(records)),
        begun=float(len(answers)),
        finished=float(sum(record.completed for record in records)),
        prompt_tokens=float(sum(record.prompt_tokens or 0 for record in answers)) or None,
        output_tokens=float(sum(record.output_tokens for record in answers)),
        prompts=Distribution.of(float(record.prompt_tokens) for record in answers if record.prompt_tokens),
        answers=Distribution.of(float(record.output_tokens) for record in answers),
        ttft=ttft,
        queue=queue,
        prefill=prefill,
        itl=Distribution.of(pooled_itl([record.times for record in answers])),
        batch_gaps=_gaps_by_batch(answers),
        prefix_queries=float(sum(record.prompt_tokens or 0 for record in cached)) or None,
        prefix_hits=float(sum(record.cached_tokens or 0 for record in cached)),
        failures=_failures(records),
        failure_texts=Counter(record.error.message for record in records if record.error and record.error.message),
        capped=_capped(records) if "capped" in warnings else None,
        client_ttft=ttft,
        client_tpot=Distribution.of(record.tpot for record in answers if record.tpot is not None),
        send_lag=Distribution.of(record.send_lag for record in answers if record.send_lag is not None),
        buffered=warnings.get("buffered"),
        early_ttft=early,
        late_ttft=late,
        slo_tpot=(result["figures"].get("slo") or {}).get("tpot_s"),
    )


def _ttft(record: Record) -> float:
    return record.chunks_s[0] - record.intended_s


def _warnings(result: Mapping[str, Any], records: Sequence[Record]) -> dict[str, str]:
    """By kind: those of the result, and those that its requests show."""
    settings = {"requests": len(records), "shared_prompts": True, "template_tokens": 0} | result["settings"]
    found = {each.kind: each.message for each in cautions(settings, records, [], interrupted=False)}
    return found | {each["kind"]: each["message"] for each in result.get("warnings") or ()}


def _remarks(result: Mapping[str, Any], answers: Sequence[Record]) -> Iterator[str]:
    if result.get("interrupted"):
        yield "The load test was interrupted: these are the requests until then."
    if not answers:
        yield "No request of the load test got a token, so nothing is known about times."
    else:
        yield (
            "A client sees one time to the first token; how much of it was waiting and how much was reading is "
            "estimated from the quickest requests. The server's metrics page says it: give both."
        )
    yield from (f"The load test warns: {warning['message']}." for warning in result.get("warnings") or ())


def _parts(answers: Sequence[Record]) -> tuple[Distribution | None, Distribution | None]:
    """Waiting and reading. Whoever was quickest read the prompt as well; what is beyond that, another time, is waiting.

    Long prompts take longer to read: each is held against the quickest of its own length, within a factor of two.
    """
    by_length: defaultdict[int, list[float]] = defaultdict(list)
    for record in answers:
        by_length[(record.prompt_tokens or 0).bit_length()].append(_ttft(record))
    quickest = {length: percentile(times, 5) for length, times in by_length.items()}
    reading = [min(_ttft(record), quickest[(record.prompt_tokens or 0).bit_length()]) for record in answers]
    waiting = [_ttft(record) - read for record, read in zip(answers, reading, strict=True)]
    return Distribution.of(waiting), Distribution.of(reading)


def _early_and_late(answers: Sequence[Record], *, warmed: bool) -> tuple[float | None, float | None]:
    """Typical first tokens at the begin of a run and after; None where a warm-up went before, or too few came."""
    if warmed or len(answers) < 3 * _EARLY:
        return None, None
    times = [_ttft(record) for record in answers]
    return median(times[:_EARLY]), median(times[_EARLY:])


def _streams(answers: Sequence[Record]) -> tuple[float, ...]:
    """How many answers streamed at once, on average over the time in which any did."""
    spans = sorted((record.chunks_s[0], record.chunks_s[-1]) for record in answers)
    busy = end = 0.0
    for start, stop in spans:
        busy += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return (sum(stop - start for start, stop in spans) / busy,) if busy else ()


def _gaps_by_batch(answers: Sequence[Record]) -> tuple[tuple[float, float], ...]:
    """The median gap by the number of answers that streamed at that time, for the fewest and the most.

    Both are medians of a fifth of the gaps, so that neither is a single odd moment.
    """
    begins = sorted(record.chunks_s[0] for record in answers)
    ends = sorted(record.chunks_s[-1] for record in answers)
    gaps = []
    for record in answers:
        for earlier, later in pairwise(record.chunks_s):
            streaming = bisect_left(begins, later) - bisect_left(ends, later)
            gaps.append((float(streaming), later - earlier))
    gaps.sort()
    part = len(gaps) // 5
    if part < 20:
        return ()
    few, many = gaps[:part], gaps[-part:]
    return tuple((median(n for n, _ in some), median(gap for _, gap in some)) for some in (few, many))


def _failures(records: Sequence[Record]) -> dict[str, float]:
    """By kind; what the client broke off is no failure of the server's."""
    kinds = Counter(record.error.kind for record in records if record.error)
    return {kind: float(count) for kind, count in kinds.items() if kind != "cancelled"}


def _capped(records: Sequence[Record]) -> float:
    """Answers that the limit of the context cut; one where the result only says that there are some."""
    cut = sum(
        record.finish_reason == "length" and record.output_tokens < record.asked_output_tokens for record in records
    )
    return float(max(cut, 1))
