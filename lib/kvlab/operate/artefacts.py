"""What distorts the figures of a load test without being the server's speed: the client, a proxy, or what was sent."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from kvlab.operate.record import Record
from kvlab.timing import percentile

#: Chunks from which on a rhythm can be told.
_RHYTHM = 8

#: Chunks that are closer than this on average came together: no model writes 2,000 tokens a second to one reader.
_AT_ONCE_S = 0.0005

#: A gap below this part of an answer's mean gap is none.
_NO_GAP = 0.1

#: Answers whose last gaps are below this part of their first ones run out of a buffer.
_FALLING = 0.5

#: A client is late from here on, at the 99th percentile; and where it is more than this part of the median TTFT.
_LATE_S, _LATE_PART = 0.01, 0.05

#: Chunks for each token below which chunks are bundles.
_BUNDLED = 0.9


@dataclass(frozen=True)
class Caution:
    """What a reader of the figures should know.

    Args:
        kind: ``interrupted``, ``failed``, ``send-lag``, ``buffered``, ``bundled``, ``capped``, ``ended-early``,
            ``no-usage``, ``prompt-length`` or ``cache-hits``.
        message: what was seen, what it does to the figures, and what to do.
    """

    kind: str
    message: str


def cautions(
    settings: Mapping[str, Any], records: Sequence[Record], loop_lags: Sequence[float], *, interrupted: bool
) -> list[Caution]:
    """Everything that a reader of the figures should know.

    Args:
        settings: of the result.
        records: of every request that was sent.
        loop_lags: how late the client's event loop woke up, in seconds.
        interrupted: the run was ended early.
    """
    good = [record for record in records if record.completed]
    found = [*_incomplete(settings, records, good, interrupted), *_send_lag(records, good, loop_lags)]
    found += [*_buffered(good), *_bundled(good), *_short(good), *_no_usage(good)]
    return [*found, *_prompt_length(good), *_cache_hits(settings, good)]


def _incomplete(
    settings: Mapping[str, Any], records: Sequence[Record], good: Sequence[Record], interrupted: bool
) -> Iterator[Caution]:
    if interrupted:
        yield Caution(
            "interrupted",
            f"the run was ended early: {len(records)} of {settings['requests']} requests were sent, "
            f"{len(good)} completed",
        )
    failed = len(records) - len(good)
    if failed:
        yield Caution(
            "failed",
            f"{failed} of {len(records)} requests failed; latencies are of the others, and a server that fails "
            "has less to do",
        )


def _send_lag(records: Sequence[Record], good: Sequence[Record], loop_lags: Sequence[float]) -> Iterator[Caution]:
    lags = [record.send_lag for record in records if record.send_lag is not None]
    late = max((percentile(each, 99) for each in (lags, loop_lags) if each), default=0.0)
    first = [record.ttft for record in good if record.ttft is not None]
    if late > _LATE_S and (not first or late > _LATE_PART * median(first)):
        yield Caution(
            "send-lag",
            f"the client itself is late, by {late * 1e3:.0f} ms at the 99th percentile: a part of every latency here "
            "is its own; send less, or from a machine with nothing else to do",
        )


def _buffered(good: Sequence[Record]) -> Iterator[Caution]:
    """Streams that something between server and client held back and let go."""
    streams = [record for record in good if len(record.itl) >= _RHYTHM - 1]
    if not streams:
        return
    crowd = _Crowd(streams)
    for seen, number in (
        ("their chunks all at once", sum(_at_once(record.itl) for record in streams)),
        ("their chunks in bursts, with long gaps between", sum(_in_bursts(record.itl) for record in streams)),
        ("their chunks faster and faster", sum(_falling(record) and not crowd.thins(record) for record in streams)),
    ):
        share = number / len(streams)
        if share > 0.5:
            yield Caution(
                "buffered",
                f"{share:.0%} of the answers delivered {seen}: a proxy, or the client, holds them back (TTFT too late, "
                "ITL too short); measure without it, or switch its buffering off (nginx: proxy_buffering off)",
            )
            return


class _Crowd:
    """How many answers stream at a time: a server whose batch empties is faster for those who stay, by itself."""

    def __init__(self, streams: Sequence[Record]) -> None:
        self._starts = sorted(record.chunks_s[0] for record in streams)
        self._ends = sorted(record.chunks_s[-1] for record in streams)

    def thins(self, record: Record) -> bool:
        """Whether fewer answers stream in the last quarter of this one than in its first."""
        quarter = len(record.chunks_s) // 4
        return self._at(record.chunks_s[-quarter]) < self._at(record.chunks_s[quarter])

    def _at(self, moment: float) -> int:
        return bisect_right(self._starts, moment) - bisect_left(self._ends, moment)


def _at_once(gaps: list[float]) -> bool:
    return fmean(gaps) < _AT_ONCE_S


def _in_bursts(gaps: list[float]) -> bool:
    limit = _NO_GAP * fmean(gaps)
    return sum(gap < limit for gap in gaps) >= len(gaps) / 2


def _falling(record: Record) -> bool:
    gaps = record.itl
    quarter = len(gaps) // 4
    return quarter >= 2 and median(gaps[-quarter:]) < _FALLING * median(gaps[:quarter])


def _bundled(good: Sequence[Record]) -> Iterator[Caution]:
    tokens = sum(record.output_tokens for record in good if record.counted)
    chunks = sum(len(record.chunks_s) for record in good if record.counted)
    if tokens and chunks < _BUNDLED * tokens:
        yield Caution(
            "bundled",
            f"{chunks:,} chunks carried {tokens:,} tokens: ITL is of chunks, about {tokens / max(chunks, 1):.1f} "
            "tokens each (speculation, or a stream interval); compare TPOT",
        )


def _short(good: Sequence[Record]) -> Iterator[Caution]:
    """Answers with fewer tokens than were asked for."""
    short = [record for record in good if record.counted and record.output_tokens < record.asked_output_tokens]
    capped = [record for record in short if record.finish_reason == "length"]
    if capped:
        least = min(capped, key=lambda record: record.output_tokens)
        yield Caution(
            "capped",
            f"{len(capped)} answers were cut at a length that nobody asked for (such as {least.output_tokens} of "
            f"{least.asked_output_tokens} tokens): prompt and answer together pass the context; ask for less",
        )
    if len(short) > len(capped):
        yield Caution(
            "ended-early",
            f"{len(short) - len(capped)} answers ended by themselves before the tokens that were asked for: the server "
            "does not take ignore_eos; compare rates by tokens, not by requests",
        )


def _no_usage(good: Sequence[Record]) -> Iterator[Caution]:
    missing = sum(not record.counted for record in good)
    if missing:
        yield Caution(
            "no-usage",
            f"the server did not count the tokens of {missing} answers: their chunks were counted instead, and TPOT "
            "and tokens/s are wrong where chunks are bundles",
        )


def _prompt_length(good: Sequence[Record]) -> Iterator[Caution]:
    counted = [
        (record.prompt_tokens, record.asked_prompt_tokens) for record in good if record.prompt_tokens is not None
    ]
    off = [(told, asked) for told, asked in counted if told != asked]
    if off:
        told, asked = max(off, key=lambda pair: abs(pair[0] - pair[1]))
        yield Caution(
            "prompt-length",
            f"{len(off)} of {len(counted)} prompts have another length by the server's count than was meant (such as "
            f"{told} for {asked} tokens); give the model's tokenizer (--tokenizer)",
        )


def _cache_hits(settings: Mapping[str, Any], good: Sequence[Record]) -> Iterator[Caution]:
    """Prompts that share nothing, and that the server knew nevertheless. It may know its own chat template."""
    hits = [record for record in good if record.cached_tokens is not None and record.prompt_tokens]
    if settings["shared_prompts"] or not hits:
        return
    template = settings["template_tokens"]
    known = sum(max((record.cached_tokens or 0) - template, 0) for record in hits)
    asked = sum(record.prompt_tokens or 0 for record in hits)
    if known > 0.05 * asked:
        yield Caution(
            "cache-hits",
            f"the server had {known / asked:.0%} of the prompts in its cache, although no two begin alike: TTFT is too "
            "short; what else writes to this server?",
        )
