"""The sampling explorer: the four knobs over real logits, as a picture of a few settings and as a live widget."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvlab.book.colours import DECODE, IDLE
from kvlab.book.figures import figure, label_text
from kvlab.generation import Sampler, Sampling, probabilities

#: Token ids to readable pieces, such as ``Tokenizer.tokens``.
Label = Callable[[Sequence[int]], Sequence[str]]


@dataclass(frozen=True)
class Bar:
    """One of the likeliest tokens.

    Args:
        piece: the token for human eyes, a dot for its leading space.
        offered: its probability after the temperature, before the filters.
        drawn: its probability in the end; 0 for a token that was dropped.
    """

    piece: str
    offered: float
    drawn: float

    @property
    def kept(self) -> bool:
        """Whether it can be drawn."""
        return self.drawn > 0

    @property
    def length(self) -> float:
        """Of the bar: the probability of a draw, or what a dropped token had to offer."""
        return self.drawn if self.kept else self.offered


@dataclass(frozen=True)
class Outlook:
    """What a setting makes of one row of logits.

    Args:
        bars: the likeliest tokens, likeliest first.
        n_kept: tokens that can be drawn.
        entropy: of the distribution that is drawn from, nats.
    """

    bars: tuple[Bar, ...]
    n_kept: int
    entropy: float

    @property
    def sentence(self) -> str:
        """The two figures in words."""
        return f"keeps {self.n_kept:,} token{'s' * (self.n_kept != 1)}, entropy {self.entropy:.2f} nats"


def outlook(logits: Float[Tensor, "vocab"], setting: Sampling, label: Label, n_bars: int = 20) -> Outlook:
    """The distribution that a setting draws from, and how the likeliest tokens fare.

    Args:
        logits: of the next token.
        setting: the knobs.
        label: ids to readable pieces.
        n_bars: how many of the likeliest tokens to look at.
    """
    # Greedy has no distribution before the filters; the model's own stands in for it.
    warmth = Sampling(temperature=setting.temperature or 1.0)
    offered, drawn = probabilities(torch.stack([logits, logits]), [warmth, setting]).cpu()
    top = logits.float().cpu().topk(min(n_bars, len(logits))).indices
    pieces = [piece.replace(" ", "·").replace("\n", "\\n") for piece in label(top.tolist())]
    bars = map(Bar, pieces, offered[top].tolist(), drawn[top].tolist())
    entropy = -torch.special.xlogy(drawn, drawn).sum().item()
    return Outlook(tuple(bars), int((drawn > 0).sum()), abs(entropy))


def sampling_picture(
    logits: Float[Tensor, "vocab"], label: Label, settings: Mapping[str, Sampling], *, n_bars: int = 12, name: str = ""
) -> None:
    """Draw what several settings make of the same logits, side by side: kept tokens blue, dropped ones grey.

    Args:
        logits: of the next token.
        label: ids to readable pieces.
        settings: a title for each setting; at most three stand in a row.
        n_bars: bars a panel.
        name: the anchor of the figure.
    """
    looks = {title: outlook(logits, setting, label, n_bars) for title, setting in settings.items()}
    alt = "Bars of the likeliest tokens. " + "; ".join(f"{title}: {look.sentence}" for title, look in looks.items())
    columns = min(3, len(looks))
    rows = -(-len(looks) // columns)
    with figure(
        alt,
        "The same logits under different knobs; a dot is a space. Blue: the probability of a draw. Grey: what a "
        "dropped token had. The second line of a title counts all that can be drawn, beyond the bars shown as well.",
        rows=rows,
        columns=columns,
        size=(7.4, 0.4 + rows * (0.7 + 0.17 * n_bars)),
        name=name,
        squeeze=False,
        sharex=True,
    ) as (_, axes):
        for panel in axes.flat[len(looks) :]:
            panel.set_visible(False)
        for panel, (title, look) in zip(axes.flat, looks.items(), strict=False):
            _draw_bars(panel, title, look)


def _draw_bars(panel: Any, title: str, look: Outlook) -> None:
    colours = [DECODE if bar.kept else IDLE for bar in look.bars]
    panel.barh(range(len(look.bars)), [bar.length for bar in look.bars], color=colours)
    panel.set(yticks=range(len(look.bars)), yticklabels=[_in_figure(bar.piece) for bar in look.bars])
    panel.invert_yaxis()
    panel.grid(axis="y", visible=False)
    panel.tick_params(axis="y", length=0, labelsize=7.5)
    panel.set_title(f"{title}\n{look.n_kept:,} kept, {look.entropy:.2f} nats", fontsize=9)


def _in_figure(piece: str) -> str:
    """A piece for a figure; the dot that stands for a space is in its font."""
    return "·".join(label_text(part) for part in piece.split("·"))


class SamplingExplorer:
    """The knobs as sliders, the likeliest tokens as bars, and a button that draws.

    Args:
        logits: of the next token.
        label: ids to readable pieces.
        n_bars: how many of the likeliest tokens to show.
    """

    def __init__(self, logits: Float[Tensor, "vocab"], label: Label, n_bars: int = 20) -> None:
        import ipywidgets as widgets

        self._logits, self._label, self._n_bars = logits.detach().float().cpu(), label, n_bars
        wide: dict[str, Any] = {"style": {"description_width": "6.5em"}, "layout": widgets.Layout(width="24em")}
        self.temperature = widgets.FloatSlider(1.0, min=0, max=2, step=0.05, description="temperature", **wide)
        self.top_k = widgets.IntSlider(0, min=0, max=100, description="top-k (0: off)", **wide)
        self.top_p = widgets.FloatSlider(1.0, min=0.05, max=1, step=0.01, description="top-p", **wide)
        self.min_p = widgets.FloatSlider(0.0, min=0, max=0.5, step=0.01, description="min-p", **wide)
        self.seed = widgets.BoundedIntText(0, min=0, max=2**31 - 1, description="seed", **wide)
        self.draw = widgets.Button(description="Draw 10 tokens", button_style="primary")
        self.view = widgets.HTML()
        self.drawn: list[str] = []
        self._sampler = Sampler([self.setting])
        knobs = (self.temperature, self.top_k, self.top_p, self.min_p, self.seed)
        for knob in knobs:
            knob.observe(self._restart, names="value")
        self.draw.on_click(self._draw)
        self.box = widgets.HBox(
            [widgets.VBox([*knobs, self.draw]), self.view], layout=widgets.Layout(flex_flow="row wrap")
        )
        self._show()

    @property
    def setting(self) -> Sampling:
        """What the knobs say."""
        return Sampling(
            temperature=self.temperature.value,
            top_k=self.top_k.value or None,
            top_p=self.top_p.value,
            min_p=self.min_p.value,
            seed=self.seed.value,
        )

    def _restart(self, _: Any) -> None:
        """A knob moved: what was drawn belonged to another setting, and the seed begins anew."""
        self.drawn, self._sampler = [], Sampler([self.setting])
        self._show()

    def _draw(self, _: Any) -> None:
        ids = [self._sampler(self._logits[None])[0] for _ in range(10)]
        self.drawn += self._label(ids)
        self._show()

    def _show(self) -> None:
        # The order of the bars must not depend on the seed, which the outlook does not use.
        look = outlook(self._logits, replace(self.setting, seed=None), self._label, self._n_bars)
        self.view.value = _as_html(look, self.drawn)


def _as_html(look: Outlook, drawn: Sequence[str]) -> str:
    """The bars as a small table of plain HTML: quick to redraw at every move of a slider."""
    longest = max(bar.length for bar in look.bars)
    rows = "".join(_html_row(bar, longest) for bar in look.bars)
    words = " | ".join(html.escape(piece.replace("\n", "\\n")) for piece in drawn[-40:])
    said = f"<div><b>drawn:</b> {words}</div>" if drawn else ""
    return (
        f'<div style="margin-left:1em"><b>{look.sentence}</b>'
        f'<table style="border-collapse:collapse;line-height:1.25">{rows}</table>{said}</div>'
    )


def _html_row(bar: Bar, longest: float) -> str:
    colour, fate = (DECODE, f"{bar.drawn:.1%}") if bar.kept else (IDLE, "dropped")
    width = 14 * bar.length / longest
    return (
        f'<tr><td style="text-align:right;padding:0 .5em"><code>{html.escape(bar.piece)}</code></td>'
        f'<td style="width:14em"><div style="background:{colour};height:.8em;width:{width:.2f}em"></div></td>'
        f'<td style="padding:0 .5em">{fate}</td></tr>'
    )
