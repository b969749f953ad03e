"""Figures: one style, alt text that reaches the page, a caption that says what to see, and the stamp."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlab.resources import resource

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STAMP = {"text": ""}
_STAMP_INCHES = 0.16
# Saved at 160 dots an inch, shown at 100: sharp on fine screens, and the page knows the size before the image is there.
_SHRINK = 100 / 160


@dataclass(frozen=True)
class Picture:
    """A finished figure, as a notebook shows it.

    Args:
        png: the image.
        alt: what it shows, for a reader who cannot see it.
        caption: what to see in it; empty for none.
        name: its anchor on the page; empty for none.
    """

    png: bytes
    alt: str
    caption: str = ""
    name: str = ""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """One HTML figure for Jupyter, Colab and the book alike; its alt text for a terminal."""
        return {"text/html": self.html(), "text/plain": f"[figure: {self.alt}]"}

    def html(self) -> str:
        """The figure with its image inside."""
        image = base64.b64encode(self.png).decode()
        width, height = (int.from_bytes(self.png[at : at + 4], "big") for at in (16, 20))
        anchor = f' id="{html.escape(self.name)}"' if self.name else ""
        words = f"<figcaption>{html.escape(self.caption)}</figcaption>" if self.caption else ""
        return (
            f'<figure class="kvlab-figure"{anchor} style="margin:1em 0"><img class="kvlab-image" '
            f'src="data:image/png;base64,{image}" alt="{html.escape(self.alt)}" '
            f'width="{round(width * _SHRINK)}" height="{round(height * _SHRINK)}" '
            f'style="max-width:100%;height:auto;background:white">{words}</figure>'
        )


@contextmanager
def figure(
    alt: str,
    caption: str = "",
    *,
    rows: int = 1,
    columns: int = 1,
    size: tuple[float, float] | None = None,
    name: str = "",
    **subplots: Any,
) -> Iterator[tuple[Figure, Any]]:
    """Draw a figure and show it when the block ends: ``with figure("Two bars: ...") as (fig, ax): ...``.

    Args:
        alt: what the picture shows, for a reader who cannot see it.
        caption: what to see in it.
        rows: rows of axes.
        columns: columns of axes.
        size: width and height in inches; None takes the style's.
        name: its anchor on the page.
        subplots: handed on to ``matplotlib.pyplot.subplots``.

    Raises:
        ValueError: the alt text is missing.
    """
    import matplotlib.pyplot as plt

    _demand(alt)
    use_style()
    drawing, axes = plt.subplots(rows, columns, figsize=size, **subplots)
    try:
        yield drawing, axes
        publish(drawing, alt, caption, name=name)
    finally:
        plt.close(drawing)


def publish(drawing: Figure, alt: str, caption: str = "", *, name: str = "") -> None:
    """Stamp a figure that is already drawn, show it and close it.

    Args:
        drawing: the Matplotlib figure.
        alt: what the picture shows, for a reader who cannot see it.
        caption: what to see in it.
        name: its anchor on the page.

    Raises:
        ValueError: the alt text is missing.
    """
    import matplotlib.pyplot as plt
    from IPython.display import display

    _demand(alt)
    _write_stamp(drawing)
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png", metadata={"Software": None})
    plt.close(drawing)
    display(Picture(buffer.getvalue(), alt.strip(), caption.strip(), name))


def use_style() -> None:
    """Apply the book's style to every figure drawn from here on."""
    import matplotlib.pyplot as plt

    plt.style.use(resource("kvlab.mplstyle"))


def label_text(text: str) -> str:
    """A text in letters that every figure font has, and without Matplotlib's mathematics.

    A missing glyph would be a warning and an empty box.

    Args:
        text: any text; what is not ASCII is spelled with backslashes.
    """
    return text.encode("ascii", "backslashreplace").decode().replace("$", r"\$")


def set_stamp(text: str) -> None:
    """Set the line that every figure carries from here on.

    Args:
        text: device, dtype, versions and commit; empty for none.
    """
    _STAMP["text"] = text


def _write_stamp(drawing: Figure) -> None:
    """The stamp in small grey letters, on a strip of its own below the picture."""
    if not _STAMP["text"]:
        return
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    strip = bottom = _STAMP_INCHES / drawing.get_figheight()
    layout = drawing.get_layout_engine()
    if isinstance(layout, ConstrainedLayoutEngine):
        for legend in drawing.legends:  # below the axes, but above the strip
            bottom += legend.get_window_extent().height / drawing.bbox.height
            legend.set_bbox_to_anchor((0, strip, 1, 1 - strip), transform=drawing.transFigure)
        layout.set(rect=(0, bottom, 1, 1 - bottom))
    drawing.text(0.995, 0.3 * strip, _STAMP["text"], ha="right", va="bottom", fontsize=6, color="#6B7280")


def _demand(alt: str) -> None:
    if not alt.strip():
        raise ValueError("a figure needs alt text: say in a sentence what the picture shows")
