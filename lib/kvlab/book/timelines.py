"""The picture that recurs: the engine's timeline, one row a request, waiting grey, prefill orange, decode blue."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from kvlab.book.colours import CACHE, DECODE, IDLE, INK, PREFILL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kvlab.serving import EventLog, Request

_COLOURS = {"prefill": PREFILL, "decode": DECODE, "cache": CACHE, "wait": IDLE}
_LABELS = {"wait": "waiting", "prefill": "prefill", "decode": "decode step", "cache": "KV cache"}


class Span(NamedTuple):
    """A stretch of one request's time.

    Args:
        start: when it begins, in the unit of the axis.
        length: how long it lasts.
        kind: ``prefill``, ``decode``, ``cache`` or ``wait``.
    """

    start: float
    length: float
    kind: str


class Row(NamedTuple):
    """One request on the timeline.

    Args:
        name: shown at the left.
        spans: what was done for it, in order of time.
        arrival: when the request came; the gaps from then on are drawn as waiting.
    """

    name: str
    spans: Sequence[tuple[float, float, str]]
    arrival: float = 0.0


def timeline(
    axes: Axes, rows: Sequence[Row], *, title: str = "", end: float | None = None, unit: str = "milliseconds"
) -> None:
    """Draw requests over time; a marker stands where the first token of a request comes out of its prefill.

    Args:
        axes: where to draw.
        rows: one request each, top to bottom.
        title: what to see in the picture, as a sentence.
        end: the right edge; None takes the end of the last span.
        unit: the label of the time axis.

    Raises:
        ValueError: a span is of an unknown kind.
    """
    for y, row in enumerate(rows):
        _draw_row(axes, y, Row(*row))
    ends = [start + length for row in rows for start, length, _ in row[1]]
    axes.set(title=title, xlabel=unit, xlim=(0, end if end is not None else max(ends, default=1.0)))
    axes.set(yticks=range(len(rows)), yticklabels=[row[0] for row in rows], ylim=(len(rows) - 0.4, -0.75))
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    _legend(axes, {kind for row in rows for _, _, kind in row[1]}, any(_waits(Row(*row)) for row in rows))


def engine_rows(log: EventLog, *, per_second: float = 1e3) -> list[Row]:
    """What an engine did, as rows of a :func:`timeline`: one request each, in the order in which they came.

    A step in which a request feeds several tokens is prefill, one in which it feeds a single token a decode step; the
    first token of an answer comes at the end of the last step of its prompt, whatever its size.

    Args:
        log: of the engine.
        per_second: units of the time axis in a second; 1,000 for milliseconds.
    """
    queued = {event.request: event.time for event in log.events if event.kind == "queued"}
    if not queued:
        return []
    zero = min(queued.values())
    spans: dict[Request, list[Span]] = {request: [] for request in queued}
    answering: set[Request] = set()
    for record in log.steps:
        start, length = (record.start - zero) * per_second, (record.end - record.start) * per_second
        for request, fed in record.fed.items():
            kind = "decode" if fed == 1 and request in answering else "prefill"
            spans[request].append(Span(start, length, kind))
            if record.emitted.get(request):
                answering.add(request)
    return [Row(str(request.id), spans[request], (time - zero) * per_second) for request, time in queued.items()]


def _draw_row(axes: Axes, y: int, row: Row) -> None:
    for start, length in _waits(row):
        axes.barh(y, length, left=start, height=0.3, color=IDLE)
    for start, length, kind in row.spans:
        if kind not in _COLOURS:
            raise ValueError(f"a span of kind {kind!r}; the kinds are {', '.join(_COLOURS)}")
        height = 0.3 if kind == "wait" else 0.62
        axes.barh(y, length, left=start, height=height, color=_COLOURS[kind], edgecolor="white", linewidth=0.6)
    # What is read after the first decode step is read again, after a preemption.
    begun = takewhile(lambda span: span[2] != "decode", row.spans)
    read = [start + length for start, length, kind in begun if kind == "prefill"]
    if read:
        axes.plot([max(read)], [y - 0.42], marker="v", color=INK, markersize=5, clip_on=False)


def _waits(row: Row) -> list[tuple[float, float]]:
    """The gaps of a row, from its arrival on, that are wide enough to be seen: start and length of each."""
    ends = [row.arrival, *(start + length for start, length, _ in row.spans)]
    smallest = 0.004 * (max(ends) - min(ends))
    gaps = [(free, span[0] - free) for free, span in zip(ends, row.spans, strict=False)]
    return [(start, length) for start, length in gaps if length > smallest]


def _legend(axes: Axes, kinds: set[str], waits: bool) -> None:
    """What the colours mean, below the axis; only what is drawn."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    drawn = [kind for kind in _LABELS if kind in kinds or (kind == "wait" and waits)]
    handles: list[Any] = [Rectangle((0, 0), 1, 1, color=_COLOURS[kind]) for kind in drawn]
    labels = [_LABELS[kind] for kind in drawn]
    if "prefill" in kinds:
        handles.append(Line2D([], [], marker="v", ls="", color=INK))
        labels.append("first token")
    figure = axes.figure
    for old in list(figure.legends):
        old.remove()
    figure.legend(handles, labels, ncols=len(labels), loc="outside lower center")
