"""Tokens as coloured chips: a line of text that shows where each token begins, and which phase it belongs to."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

from kvlab.book.colours import DECODE_SURFACE, IDLE, PREFILL_SURFACE

if TYPE_CHECKING:
    from kvlab.generation import TokenStep

Kind = Literal["prompt", "prefill", "decode", "part"]

# White on these has contrast 4.5 or more; a prompt token and a part of a character take the colours of the page.
_STYLE: dict[str, str] = {
    "prompt": f"box-shadow:inset 0 0 0 1px {IDLE};color:inherit",
    "prefill": f"background:{PREFILL_SURFACE};color:#fff",
    "decode": f"background:{DECODE_SURFACE};color:#fff",
    "part": f"box-shadow:inset 0 -3px 0 {PREFILL_SURFACE},inset 0 0 0 1px {IDLE};color:inherit",
}
_NUMBER = count(1)


@dataclass(frozen=True)
class Chip:
    """One token on show.

    Args:
        text: what to print; line breaks are shown as a sign.
        kind: whose colour it takes: a token of the prompt, the first token of an answer (``prefill``), a later one
            (``decode``), or a piece that is only part of a character (``part``).
        seconds: when it appears, for a line that is played; None where it simply stands.
    """

    text: str
    kind: Kind
    seconds: float | None = None


@dataclass(frozen=True)
class Markup:
    """HTML with the same words for a terminal.

    Args:
        source: the HTML.
        plain: its text.
    """

    source: str
    plain: str

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Both forms, for a notebook to choose from."""
        return {"text/html": self.source, "text/plain": self.plain}


def chips_html(chips: Sequence[Chip]) -> str:
    """Chips in a row that wraps, as HTML that needs nothing else.

    Args:
        chips: in reading order.
    """
    return "".join(_chip(chip) for chip in chips)


def token_line(chips: Sequence[Chip], label: str = "") -> Markup:
    """A row of chips as a notebook shows it.

    Args:
        chips: in reading order.
        label: printed above them; empty for none.
    """
    head = f"<b>{html.escape(label)}</b><br>" if label else ""
    plain = f"{label}: " * bool(label) + "|".join(chip.text for chip in chips)
    return Markup(f'<div style="{_BOX}">{head}{chips_html(chips)}</div>', plain)


def playback(chips: Sequence[Chip], label: str = "") -> Markup:
    """A row of chips that arrive when they did: each appears after its ``seconds``, without script.

    A reader who asked the system for less motion, and paper, get the finished line.

    Args:
        chips: in reading order, with their times.
        label: printed above them, beside the box that plays them again.
    """
    name = f"kvlab-play-{next(_NUMBER)}"
    # Two equal animations: the box switches from one to the other, which starts it anew.
    frames = "".join(f"@keyframes {name}-{n}{{from{{visibility:hidden}}}}" for n in (1, 2))
    rules = (
        f".{name} span{{animation:{name}-1 1ms backwards}}"
        f".{name} input:checked~div span{{animation-name:{name}-2}}"
        f"@media print,(prefers-reduced-motion:reduce){{.{name} span{{animation:none!important}}}}"
    )
    box = f'<input type="checkbox" id="{name}"> <label for="{name}"><b>{html.escape(label)}</b> · play again</label>'
    plain = "".join(chip.text for chip in chips)
    body = f'<div class="{name}" style="{_BOX}">{box}<div>{chips_html(chips)}</div></div>'
    return Markup(f"<style>{frames}{rules}</style>{body}", plain)


def watch(generation: Iterable[TokenStep], label: str = "") -> None:
    """Show an answer while it is made, token by token; what stays on the page can be played again.

    Args:
        generation: from :func:`kvlab.generate`; of a batch, the first row is shown.
        label: printed above the answer.
    """
    from IPython.display import display

    chips: list[Chip] = []
    screen = display(token_line(chips, label), display_id=True)
    for step in generation:
        if step.row == 0 and step.text:
            chips.append(Chip(step.text, step.phase, step.seconds))
            screen.update(token_line(chips, label))
    screen.update(playback(chips, label))


_BOX = "line-height:1.9;margin:.6em 0;color:inherit"


def _chip(chip: Chip) -> str:
    shown = html.escape(chip.text.replace("\n", "⏎"))
    delay = "" if chip.seconds is None else f";animation-delay:{chip.seconds:.3f}s"
    # A box of its own, so that a line never breaks behind the space that a token begins with.
    box = "display:inline-block;line-height:1.5;border-radius:3px;padding:0 1px;margin:1px 2px 1px 0"
    style = f"{_STYLE[chip.kind]};{box};white-space:pre-wrap{delay}"
    return f'<span style="{style}">{shown}</span>'
