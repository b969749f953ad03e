"""Result files of ``kvlab bench --suite device`` as tables and pictures: what a device did beside what was foreseen."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from kvlab.book.chips import Markup
from kvlab.book.colours import ACCENT, DECODE, DECODE_SURFACE, IDLE, INK, PREFILL, PREFILL_SURFACE
from kvlab.cost import Calibration, Hardware
from kvlab.errors import MeasureError, one_line
from kvlab.resources import resource

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

Wait = Literal["ttft", "tpot"]

_NEEDED = ("device", "machine", "versions", "commit", "command", "seconds", "rounds", "noise", "hardware", "rows")
_COLOURS: dict[Wait, str] = {"ttft": PREFILL, "tpot": DECODE}
_MARKERS = ("o", "s", "^", "D")
_SHADES = (INK, ACCENT, IDLE)


@dataclass(frozen=True)
class Result:
    """What one run of the suite left.

    Args:
        name: of its file, without extension.
        data: the file's contents.
        hardware: the device as it was calibrated between the measurements.
    """

    name: str
    data: Mapping[str, Any]
    hardware: Hardware

    @property
    def title(self) -> str:
        """The device, in words."""
        return str(self.data["device"])

    @property
    def on_gpu(self) -> bool:
        """Whether it was measured on something else than a CPU."""
        return self.hardware.kind != "cpu"

    @property
    def dtypes(self) -> list[str]:
        """What the model was run in."""
        return list(dict.fromkeys(row["dtype"] for row in self.rows()))

    @property
    def stamp(self) -> str:
        """One line for figures: device, versions and commit of the measurement, not of whoever draws it."""
        versions = " · ".join(f"{name} {self.data['versions'][name].split('+')[0]}" for name in ("python", "torch"))
        return f"measured: {self.title} · {versions} · kvlab {self.data['commit']}"

    def rows(self, dtype: str | None = None) -> list[dict[str, Any]]:
        """The measured cases, by dtype, batch and prompt.

        Args:
            dtype: of these alone; None for all.
        """
        rows = [row for row in self.data["rows"] if dtype in (None, row["dtype"])]
        return sorted(rows, key=lambda row: (row["dtype"] != "float32", row["batch"], row["prompt_tokens"]))

    def off(self, figure: Wait) -> list[float]:
        """How far each prediction is off, ``|predicted / measured - 1|``, in the order of :meth:`rows`.

        Args:
            figure: ``ttft`` or ``tpot``.
        """
        return [abs(row[f"predicted_{figure}_s"] / row[f"{figure}_s"] - 1) for row in self.rows()]


def read_result(path: Path) -> Result:
    """One result file.

    Args:
        path: what ``kvlab bench --suite device --out`` wrote.

    Raises:
        MeasureError: the file cannot be read, or holds something else.
    """
    try:
        data = json.loads(path.read_text("utf8"))
        if missing := [name for name in _NEEDED if name not in data]:
            raise ValueError(f"it lacks {', '.join(missing)}")
        return Result(path.stem, data, Hardware.from_json(data["hardware"]))
    except (OSError, ValueError, KeyError, TypeError) as failure:
        again = f"kvlab bench --suite device --out {path.name}"
        raise MeasureError(f"{path} is not a result ({one_line(failure)}); write one with: {again}") from None


def read_results(folder: Path | None = None) -> list[Result]:
    """Every result file of a folder, by name.

    Args:
        folder: where they lie; None for those that ship with kvlab.

    Raises:
        MeasureError: a file is not a result.
        FileNotFoundError: the installation is incomplete.
    """
    return [read_result(path) for path in sorted((folder or resource("results")).glob("*.json"))]


def label(result: Result) -> Markup:
    """Where a result comes from: device, versions, commit, command.

    Args:
        result: whose label to show.
    """
    data = result.data
    lines = {
        "file": f"{result.name}.json",
        "device": result.title,
        "machine": f"{data['machine']}, {result.hardware.memory_bytes / 2**30:.0f} GiB of memory",
        "model": ", ".join(sorted({row["model"] for row in data["rows"]})),
        "versions": ", ".join(f"{name} {version}" for name, version in data["versions"].items()),
        "commit": data["commit"],
        "command": data["command"],
        "took": f"{data['seconds'] / 60:.0f} minutes, {data['rounds']} rounds",
    }
    style = "padding:.2em .5em;text-align:left"
    body = "".join(
        f'<tr><th scope="row" style="{style}">{name}</th><td style="{style}">{_text(value)}</td></tr>'
        for name, value in lines.items()
    )
    plain = "\n".join(f"{name}: {value}" for name, value in lines.items())
    return Markup(_scrolling(f"<tbody>{body}</tbody>", f"Label of {result.name}"), plain)


def cases(result: Result) -> Markup:
    """A table of every case: TTFT and TPOT as measured and as predicted, and the share of the peaks.

    Args:
        result: whose cases to show.
    """
    names = ("batch", "prompt", *_PHASE, "MFU", *_PHASE, "MBU")
    head = '<tr><td colspan="2"></td>' + _group("TTFT (prefill), ms", PREFILL_SURFACE)
    head += _group("TPOT (decode), ms", DECODE_SURFACE) + "</tr>"
    head += f"<tr>{''.join(_cell(name, 'th') for name in names)}</tr>"
    body, plain = "", []
    for dtype in result.dtypes:
        rows = [_case(row) for row in result.rows(dtype)]
        body += (
            f'<tbody><tr><th colspan="{len(names)}" scope="rowgroup" style="{_CELL};text-align:left">{dtype}</th></tr>'
        )
        body += "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows) + "</tbody>"
        plain += [dtype, *("  ".join(row) for row in rows)]
    return Markup(_scrolling(f"<thead>{head}</thead>{body}", f"Cases of {result.name}"), "\n".join(plain))


def summary(result: Result) -> str:
    """How far predictions were off, beside how far two measurements of the same thing lie apart.

    Args:
        result: whose residuals to sum up.
    """
    lines = []
    for figure in _COLOURS:
        off, noise = result.off(figure), result.data["noise"][figure]
        twice = "not measured twice" if noise is None else f"measured twice {noise:.1%} apart"
        lines.append(f"{figure.upper()}: off by {median(off):.0%} (median), {max(off):.0%} (worst); {twice}")
    return "\n".join(lines)


def draw_diagonal(axes: Axes, results: Sequence[Result], figure: Wait) -> None:
    """Predicted against measured milliseconds, with the line where they agree and a band of 20 % around it.

    Args:
        axes: where to draw.
        results: whose cases to show.
        figure: ``ttft`` or ``tpot``.
    """
    points = {
        f"{result.name}, {dtype}": [
            (1e3 * row[f"{figure}_s"], 1e3 * row[f"predicted_{figure}_s"]) for row in result.rows(dtype)
        ]
        for result in results
        for dtype in result.dtypes
    }
    every = [value for pairs in points.values() for pair in pairs for value in pair]
    ends = [min(every) / 1.5, max(every) * 1.5]
    axes.fill_between(ends, [0.8 * x for x in ends], [1.2 * x for x in ends], color=IDLE, alpha=0.5, linewidth=0)
    axes.plot(ends, ends, color=INK, linewidth=1)
    for marker, (name, pairs) in zip(cycle(_MARKERS), points.items(), strict=False):
        axes.plot(*zip(*pairs, strict=True), marker, color=_COLOURS[figure], mec="white", markersize=7, label=name)
    _logarithmic(axes.xaxis, ends)
    _logarithmic(axes.yaxis, ends)
    axes.set(xlim=ends, ylim=ends, xlabel="measured, ms", ylabel="predicted, ms", title=figure.upper())
    axes.legend(loc="lower right", fontsize=8)


def draw_rates(axes: Axes, hardware: Hardware) -> None:
    """FLOP/s of a linear layer by its rows: weights from memory as a line, weights from a cache as a dashed one.

    Args:
        axes: where to draw.
        hardware: a calibrated device.

    Raises:
        MeasureError: the device was not calibrated.
    """
    rates: list[float] = []
    for colour, (dtype, kernels) in zip(_SHADES, _calibration(hardware).kernels.items(), strict=False):
        (_, near), (_, far) = kernels.linear[0], kernels.linear[-1]
        axes.plot(near.x, [rate / 1e9 for rate in near.y], "--", color=colour, linewidth=1)
        axes.plot(far.x, [rate / 1e9 for rate in far.y], "o-", color=colour, label=dtype)
        rates += [rate / 1e9 for rate in (*near.y, *far.y)]
    axes.set(xscale="log", xlabel="rows in the pass", ylabel="GFLOP/s", title="More rows, higher rate")
    axes.set_xticks(ticks := [1, 8, 64, 512], [str(tick) for tick in ticks])
    axes.xaxis.minorticks_off()
    _logarithmic(axes.yaxis, [min(rates), max(rates)])
    axes.legend(loc="lower right")


def draw_bandwidth(axes: Axes, hardware: Hardware) -> None:
    """GB/s of plain reading by the bytes that are read again and again.

    Args:
        axes: where to draw.
        hardware: a calibrated device.

    Raises:
        MeasureError: the device was not calibrated.
    """
    read = _calibration(hardware).read_bandwidth
    axes.plot(read.x, [rate / 1e9 for rate in read.y], "o-", color=INK)
    axes.set(
        xscale="log", xlabel="working set, MiB", ylabel="GB/s", title="What fits a cache reads faster", ylim=(0, None)
    )
    axes.set_xticks(read.x, [f"{size / 2**20:,.0f}" for size in read.x])
    axes.xaxis.minorticks_off()


def _logarithmic(axis: Axis, ends: Sequence[float]) -> None:
    """A logarithmic axis with plain numbers: few where it is long, more where it is short."""
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, StrMethodFormatter

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})  # type: ignore[attr-defined]
    axis.set_major_locator(LogLocator(subs=(1,) if ends[1] > 100 * ends[0] else (1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(NullFormatter())


_PHASE = ("measured", "predicted", "off")
_CELL = "padding:.2em .5em;text-align:right"


def _calibration(hardware: Hardware) -> Calibration:
    if hardware.calibration is None:
        raise MeasureError(f"{hardware.name} has no curves, only peaks; kvlab calibrate measures them")
    return hardware.calibration


def _case(row: Mapping[str, Any]) -> list[str]:
    cells = [str(row["batch"]), f"{row['prompt_tokens']:,}"]
    for figure, share in (("ttft", "mfu"), ("tpot", "mbu")):
        took, foreseen = row[f"{figure}_s"], row[f"predicted_{figure}_s"]
        cells += [_ms(took), _ms(foreseen), f"{foreseen / took - 1:+.0%}", f"{row[share]:.0%}"]
    return cells


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.09995 else f"{1e3 * seconds:#.3g}"


def _cell(words: str, tag: Literal["td", "th"] = "td") -> str:
    scope = ' scope="col"' if tag == "th" else ""
    return f'<{tag}{scope} style="{_CELL}">{_text(words)}</{tag}>'


def _group(title: str, colour: str) -> str:
    style = f"{_CELL};text-align:center;border-bottom:3px solid {colour}"
    return f'<th colspan="4" scope="colgroup" style="{style}">{title}</th>'


def _scrolling(rows: str, name: str) -> str:
    """A table that scrolls inside its own box where the screen is narrow; the keyboard reaches it."""
    box = f'<div style="overflow-x:auto;margin:1em 0" tabindex="0" role="region" aria-label="{html.escape(name)}">'
    return f'{box}<table class="table" style="font-size:.85em;font-variant-numeric:tabular-nums">{rows}</table></div>'


def _text(value: Any) -> str:
    return html.escape(str(value))
