"""Figures of a load test."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import TYPE_CHECKING, Any

from kvlab.errors import MeasureError
from kvlab.operate.record import Record
from kvlab.resources import resource

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kvlab.operate.report import LoadTestResult

#: Requests that a timeline has room for.
_ROWS = 200

# The style's colour cycle: decode, prefill, then others.
_DECODE, _PREFILL, _FAILED = "C0", "C1", "C3"


def pictures(result: LoadTestResult) -> Iterator[tuple[str, bytes]]:
    """File names and PNG images: every request in time, and how latencies are distributed.

    Args:
        result: of a load test.

    Raises:
        MeasureError: matplotlib is not installed.
    """
    try:
        from matplotlib import style
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MeasureError("figures need matplotlib; install it with: pip install 'kvlab[book]'") from None
    for name, draw, panels in (("timeline.png", _timeline, 1), ("latencies.png", _latencies, 2)):
        with style.context(str(resource("kvlab.mplstyle"))):
            figure = Figure()
            FigureCanvasAgg(figure)
            draw(figure.subplots(1, panels), result)
            image = BytesIO()
            figure.savefig(image, format="png", metadata={"Software": None})
        yield name, image.getvalue()


def _timeline(axes: Axes, result: LoadTestResult) -> None:
    """One row a request: waiting, then receiving."""
    for row, record in enumerate(result.records[:_ROWS]):
        _bar(axes, row, record)
    shown = min(len(result.records), _ROWS)
    axes.set(xlabel="seconds", ylabel="request", title=f"{shown} of {len(result.records)} requests: waiting, receiving")
    axes.invert_yaxis()
    for colour, label in ((_PREFILL, "until the first token"), (_DECODE, "tokens"), (_FAILED, "failed")):
        axes.plot([], [], color=colour, linewidth=6, label=label)
    axes.legend(loc="upper right")


def _bar(axes: Axes, row: int, record: Record) -> None:
    end = record.end_s if record.end_s is not None else record.intended_s
    if record.chunks_s:
        first, last = record.chunks_s[0], record.chunks_s[-1]
        axes.barh(row, first - record.intended_s, left=record.intended_s, height=0.8, color=_PREFILL)
        axes.barh(row, last - first, left=first, height=0.8, color=_DECODE)
    else:
        axes.barh(row, end - record.intended_s, left=record.intended_s, height=0.8, color=_PREFILL)
    if not record.completed:
        axes.plot(end, row, marker="x", color=_FAILED)


def _latencies(axes: Any, result: LoadTestResult) -> None:
    """How many requests were served within how long."""
    good, slo = result.completed, result.report()["slo"]
    for panel, name, colour in ((axes[0], "ttft", _PREFILL), (axes[1], "tpot", _DECODE)):
        values = sorted(value * 1e3 for record in good if (value := getattr(record, name)) is not None)
        if values:
            panel.step(values, [(rank + 1) / len(values) for rank in range(len(values))], where="post", color=colour)
        promised = slo[f"{name}_s"]
        if promised is not None:
            panel.axvline(promised * 1e3, color="0.3", linestyle="--", label="promised")
            panel.legend(loc="lower right")
        panel.set(
            xlabel=f"{name.upper()}, ms", ylabel="part of the requests", ylim=(0, 1.02), title=f"{name.upper()} within"
        )
