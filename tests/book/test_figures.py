"""Figures carry alt text, caption, stamp and the agreed colours."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex

from kvlab.book import DECODE, IDLE, PREFILL, Row, figure, figures, timeline


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr("IPython.display.display", found.append)
    return found


def test_alt_and_caption_reach_the_html(shown: list[Any]) -> None:
    with figure('Two "bars"', "See <this>.", name="fig-bars") as (_, axes):
        axes.bar([0, 1], [1, 2])
    (picture,) = shown
    page = picture.html()
    assert 'alt="Two &quot;bars&quot;"' in page
    assert "<figcaption>See &lt;this&gt;.</figcaption>" in page
    assert 'id="fig-bars"' in page
    assert picture.png.startswith(b"\x89PNG")


def test_a_figure_without_alt_text_is_refused() -> None:
    with pytest.raises(ValueError, match="alt text"), figure(" "):
        pass


def test_a_failing_cell_leaves_no_figure_open(shown: list[Any]) -> None:
    with pytest.raises(ZeroDivisionError), figure("never shown"):
        1 / 0  # noqa: B018
    assert not shown
    assert not plt.get_fignums()


def test_the_stamp_stands_below_the_picture(shown: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(figures._STAMP, "text", "CPU · float32 · abc1234")
    with figure("an empty frame") as (drawing, axes):
        axes.set_xlabel("milliseconds")
    stamp = next(text for text in drawing.texts if "abc1234" in text.get_text())
    label = axes.xaxis.label.get_window_extent()
    assert stamp.get_window_extent().y1 <= label.y0


def test_the_stamp_stands_below_a_legend_too(shown: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(figures._STAMP, "text", "CPU · float32 · abc1234")
    with figure("a timeline", size=(7.2, 2.9)) as (drawing, axes):
        timeline(axes, [Row("A", [(0, 20, "prefill"), (20, 5, "decode")])])
    stamp = next(text for text in drawing.texts if "abc1234" in text.get_text())
    legend = drawing.legends[0].get_window_extent()
    assert stamp.get_window_extent().y1 <= legend.y0
    assert legend.y1 <= axes.xaxis.label.get_window_extent().y0


def test_timeline_draws_each_span_in_its_colour_and_the_wait_between() -> None:
    _, axes = plt.subplots()
    timeline(axes, [Row("A", [(10, 20, "prefill"), (30, 5, "decode"), (45, 5, "decode")], arrival=0)], title="A waits")
    bars = {(patch.get_x(), patch.get_width(), to_hex(patch.get_facecolor()).upper()) for patch in axes.patches}
    assert {(10, 20, PREFILL), (30, 5, DECODE), (45, 5, DECODE), (0, 10, IDLE), (35, 10, IDLE)} == bars
    marker = axes.lines[0].get_xdata()
    assert list(marker) == [30]
    labels = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert labels == ["waiting", "prefill", "decode step", "first token"]
    plt.close()


def test_the_first_token_is_not_where_a_prompt_was_read_again() -> None:
    _, axes = plt.subplots()
    spans = [(0, 20, "prefill"), (20, 5, "prefill"), (25, 5, "decode"), (40, 8, "prefill"), (48, 5, "decode")]
    timeline(axes, [Row("A", spans)])
    assert list(axes.lines[0].get_xdata()) == [25]
    plt.close()


def test_timeline_refuses_an_unknown_kind() -> None:
    _, axes = plt.subplots()
    with pytest.raises(ValueError, match="'thinking'"):
        timeline(axes, [Row("A", [(0, 1, "thinking")])])
    plt.close()
