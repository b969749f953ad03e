"""Step through a generation that was recorded: tokens by phase, candidates of each step, the cache, the time."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlab.book.chips import Chip, Kind, chips_html
from kvlab.book.colours import CACHE, DECODE, IDLE, INK, PREFILL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

    from kvlab.generation import Generation
    from kvlab.weights import LoadedModel

_COLOUR = {"prefill": PREFILL, "decode": DECODE}


@dataclass(frozen=True)
class Candidate:
    """A token that could have come next.

    Args:
        text: for human eyes.
        probability: by the model's own distribution, before any sampling filter.
        chosen: whether it is the one that was taken.
    """

    text: str
    probability: float
    chosen: bool


@dataclass(frozen=True)
class Moment:
    """One step of a generation.

    Args:
        text: of the token that it yielded.
        phase: ``prefill`` for the first, ``decode`` for all others.
        start: when the step began, seconds from the start of the generation.
        seconds: how long it took, until the token was there.
        columns: columns of the KV cache that are filled after it.
        fed: tokens that went into the model.
        candidates: the likeliest next tokens, best first, the chosen one among them.
    """

    text: str
    phase: str
    start: float
    seconds: float
    columns: int
    fed: int
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Recording:
    """A generation, kept so that it can be looked at step by step.

    Args:
        prompt: its tokens, for human eyes.
        moments: its steps, in order.
    """

    prompt: tuple[str, ...]
    moments: tuple[Moment, ...]

    @property
    def columns(self) -> int:
        """Columns of the cache at the end."""
        return self.moments[-1].columns

    def chips(self, step: int | None = None) -> list[Chip]:
        """The answer after a step, as chips with the times at which they came.

        Args:
            step: counted from 1; None for the whole answer.
        """
        made = self.moments[:step]
        return [Chip(m.text, "prefill" if m.phase == "prefill" else "decode", m.start + m.seconds) for m in made]


def record(lm: LoadedModel, prompt: Sequence[int], *, top: int = 5, **settings: Any) -> tuple[Generation, Recording]:
    """Generate, and keep what the model thought at every step.

    The logits are overheard at the LM head, so that what is recorded is the generation itself and not a rerun.

    Args:
        lm: the model with its tokenizer.
        prompt: token ids.
        top: how many candidates to keep of a step.
        settings: handed on to :func:`kvlab.generate`.

    Returns:
        The finished generation and its recording.
    """
    from kvlab.generation import generate

    heard: list[Tensor] = []
    hook = lm.model.head.register_forward_hook(lambda module, given, made: heard.append(made[0, -1]))
    try:
        generation = generate(lm, prompt, **settings).run()
    finally:
        hook.remove()
    return generation, _recording(lm, list(prompt), generation, heard, top)


def _recording(lm: LoadedModel, prompt: list[int], generation: Generation, heard: list[Tensor], top: int) -> Recording:
    tokens, ends = generation.tokens[0], generation.timing.requests[0].tokens
    starts = [0.0, *ends[:-1]]
    moments = [
        Moment(
            text=lm.tokenizer.tokens([token])[0],
            phase="decode" if at else "prefill",
            start=starts[at],
            seconds=ends[at] - starts[at],
            columns=len(prompt) + at,
            fed=1 if at else len(prompt),
            candidates=_candidates(lm, logits, token, top),
        )
        for at, (token, logits) in enumerate(zip(tokens, heard, strict=True))
    ]
    return Recording(tuple(lm.tokenizer.tokens(prompt)), tuple(moments))


def _candidates(lm: LoadedModel, logits: Tensor, token: int, top: int) -> tuple[Candidate, ...]:
    """The likeliest tokens; the chosen one takes the last place where it is not among them."""
    probabilities = logits.float()[: lm.vocab_size].softmax(dim=0).cpu()
    ids = probabilities.topk(min(top, len(probabilities))).indices.tolist()
    if token not in ids:
        ids[-1] = token
    texts = lm.tokenizer.tokens(ids)
    return tuple(Candidate(t, float(probabilities[i]), i == token) for i, t in zip(ids, texts, strict=True))


def explore(recording: Recording) -> Any:
    """The explorer: a slider, buttons and a player over the steps.

    Args:
        recording: from :func:`record`.

    Returns:
        An ipywidgets box; works with ipywidgets 7 and 8.
    """
    import ipywidgets as widgets

    last = len(recording.moments)
    slider = widgets.IntSlider(value=1, min=1, max=last, description="step", layout={"width": "22em"})
    player = widgets.Play(value=1, min=1, max=last, interval=400)
    widgets.jslink((player, "value"), (slider, "value"))
    back = widgets.Button(description="back", icon="arrow-left", layout={"width": "6em"})
    onward = widgets.Button(description="next", icon="arrow-right", layout={"width": "6em"})
    screen = widgets.HTML(value=step_html(recording, 1))

    def move(by: int) -> None:
        slider.value = min(max(slider.value + by, 1), last)

    def redraw(change: dict[str, Any]) -> None:
        screen.value = step_html(recording, change["new"])

    back.on_click(lambda _: move(-1))
    onward.on_click(lambda _: move(1))
    slider.observe(redraw, names="value")
    return widgets.VBox([widgets.HBox([back, onward, slider, player]), screen])


def step_html(recording: Recording, step: int) -> str:
    """What the explorer shows at a step, as HTML.

    Args:
        recording: from :func:`record`.
        step: counted from 1.
    """
    now = recording.moments[step - 1]
    tokens = "token" if now.fed == 1 else "tokens"
    head = (
        f"<b>Step {step} of {len(recording.moments)}: {now.phase}.</b> {now.fed} {tokens} in, 1 token out, "
        f"{now.seconds * 1000:.1f} ms."
    )
    prompt: list[Chip] = [Chip(text, _prompt_kind(text)) for text in recording.prompt]
    parts = [
        head,
        f"{chips_html(prompt)}{chips_html(recording.chips(step))}",
        "<b>What could have come</b>" + "".join(_bar(c, _COLOUR[now.phase]) for c in now.candidates),
        f"<b>KV cache</b>: {now.columns} of {recording.columns} columns filled" + _cells(recording, step),
        "<b>Time</b>" + _clock(recording, step),
    ]
    blocks = "".join(f'<div style="margin:.5em 0">{part}</div>' for part in parts)
    return f'<div style="line-height:1.8;max-width:46em;color:inherit">{blocks}</div>'


def _prompt_kind(text: str) -> Kind:
    return "part" if "\\x" in text else "prompt"


def _bar(candidate: Candidate, colour: str) -> str:
    """A candidate as a bar whose length is its probability."""
    name = html.escape(candidate.text.replace("\n", "⏎").replace(" ", "␣"))
    mark = " ← taken" if candidate.chosen else ""
    bar = (
        f'<span style="display:inline-block;height:.8em;width:{14 * candidate.probability:.2f}em;'
        f'background:{colour if candidate.chosen else IDLE}"></span>'
    )
    label = f'<code style="display:inline-block;min-width:9em">{name}</code>'
    return f'<div style="line-height:1.4">{label} {bar} {candidate.probability:.1%}{mark}</div>'


def _cells(recording: Recording, step: int) -> str:
    """The columns of the cache: filled before, filled by this step, still empty."""
    now = recording.moments[step - 1]
    colours = [CACHE] * (now.columns - now.fed) + [_COLOUR[now.phase]] * now.fed
    colours += [""] * (recording.columns - now.columns)
    cells = "".join(
        f'<span style="display:inline-block;width:7px;height:14px;margin:0 1px 1px 0;'
        f'{f"background:{colour}" if colour else f"box-shadow:inset 0 0 0 1px {IDLE}"}"></span>'
        for colour in colours
    )
    return f'<div style="line-height:1">{cells}</div>'


def _clock(recording: Recording, step: int) -> str:
    """Every step as a bar as wide as it took long; those to come are grey."""
    total = sum(moment.seconds for moment in recording.moments)
    bars = "".join(
        f'<span style="display:inline-block;box-sizing:border-box;height:14px;border-right:1px solid #fff;'
        f'width:{100 * moment.seconds / total:.3f}%;background:{_COLOUR[moment.phase] if at < step else IDLE}"></span>'
        for at, moment in enumerate(recording.moments)
    )
    return f'<div style="line-height:1;white-space:nowrap">{bars}</div>'


def picture(recording: Recording, step: int, *, name: str = "fig-explorer") -> None:
    """The explorer stopped at a step, for pages without a kernel: candidates, the cache over all steps, the time.

    Args:
        recording: from :func:`record`.
        step: counted from 1.
        name: the figure's anchor.
    """
    from kvlab.book.figures import figure

    now = recording.moments[step - 1]
    best = now.candidates[0]
    alt = (
        f"Step {step} of {len(recording.moments)}. Candidates: the likeliest token has {best.probability:.0%}. "
        f"Cache: {recording.moments[0].columns} columns after step 1, one more with each step, {now.columns} now. "
        f"Time: step 1 took {recording.moments[0].seconds * 1000:.0f} ms, this one {now.seconds * 1000:.0f} ms."
    )
    caption = (
        f"The explorer at step {step}. Above, the candidates for this token. In the middle, the cache: prefill fills "
        "a whole row of columns at once (orange), each decode step adds one (blue). Below, what each step took."
    )
    shape: dict[str, Any] = {"height_ratios": [len(now.candidates), 6, 3]}
    with figure(alt, caption, rows=3, size=(6.4, 5.6), name=name, gridspec_kw=shape) as (_, axes):
        _draw_candidates(axes[0], now)
        _draw_cache(axes[1], recording, step)
        _draw_times(axes[2], recording, step)


def _draw_candidates(axes: Axes, now: Moment) -> None:
    rows = range(len(now.candidates))
    colours = [_COLOUR[now.phase] if c.chosen else IDLE for c in now.candidates]
    axes.barh(rows, [100 * c.probability for c in now.candidates], color=colours, height=0.7)
    axes.set_yticks(rows, [_in_ascii(c.text) for c in now.candidates], family="monospace")
    axes.invert_yaxis()
    axes.set(title="What could have come next", xlabel="probability, %", xlim=(0, 100))
    axes.grid(axis="y", visible=False)


def _in_ascii(text: str) -> str:
    """A token for a figure, with signs for what cannot be seen."""
    from kvlab.book.figures import label_text

    return label_text(text).replace("\n", "\\n").replace(" ", "\u2423")


def _draw_cache(axes: Axes, recording: Recording, step: int) -> None:
    for at, moment in enumerate(recording.moments, 1):
        old, faint = moment.columns - moment.fed, 1.0 if at <= step else 0.25
        axes.barh(at, old, height=1.0, color=CACHE, alpha=faint, linewidth=0)
        axes.barh(at, moment.fed, left=old, height=1.0, color=_COLOUR[moment.phase], alpha=faint, linewidth=0)
    axes.axhline(step, color=INK, linewidth=0.8)
    axes.set(title="Columns of the KV cache, step by step", xlabel="column", ylabel="step")
    axes.set(xlim=(0, recording.columns), ylim=(len(recording.moments) + 0.5, 0.5))
    axes.grid(visible=False)


def _draw_times(axes: Axes, recording: Recording, step: int) -> None:
    steps = range(1, len(recording.moments) + 1)
    colours = [_COLOUR[m.phase] if at <= step else IDLE for at, m in enumerate(recording.moments, 1)]
    axes.bar(steps, [1000 * m.seconds for m in recording.moments], color=colours)
    axes.axvline(step, color=INK, linewidth=0.8)
    axes.set(title="Time of each step", xlabel="step", ylabel="ms", xlim=(0.4, len(recording.moments) + 0.6))
