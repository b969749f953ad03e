"""Cache policies side by side: which tokens each layer and KV head holds at each step of an answer, and the answer."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from kvlab.book.calculators.words import binary, some, three
from kvlab.book.colours import CACHE, CACHE_SURFACE, DECODE_SURFACE, IDLE, PREFILL
from kvlab.book.figures import figure, label_text
from kvlab.cache import EvictingCache, KVCache, StreamingCache, make_cache, visible
from kvlab.errors import ConfigError
from kvlab.generation import decode, prefill
from kvlab.resources import resource
from kvlab.weights import LoadedModel

#: Policies by the names that a reader chooses from.
POLICIES = ("full", "window", "streaming", "h2o", "snapkv")
#: The fact that the first of the prompts hides.
PASS_KEY = "73914"
_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


@dataclass(frozen=True)
class Course:
    """An answer through one cache, with what the cache held at each step.

    Args:
        kind: of the cache, see :func:`kvlab.cache.make_cache`.
        prompt: its tokens, for human eyes.
        answer: ids of the answer, greedy.
        pieces: the same for human eyes.
        held: after the prompt, and after each token that was fed back: which of the tokens so far every layer and KV
            head holds.
        lengths: tokens that the cache says it holds, at the same moments.
        nbytes: that the cache has allocated at the end.
        loss: nats a token that it pays for the reference answer; its own where there is none.
    """

    kind: str
    prompt: tuple[str, ...]
    answer: tuple[int, ...]
    pieces: tuple[str, ...]
    held: tuple[Bool[Tensor, "n_layer n_kv_head seen"], ...]
    lengths: tuple[int, ...]
    nbytes: int
    loss: float

    @property
    def text(self) -> str:
        """The answer."""
        return "".join(self.pieces)


def sample_prompts() -> dict[str, str]:
    """Two prompts to compare policies on: a fact in filler text with the question at its end, and a page of a play."""
    fact = f"The pass key is {PASS_KEY}. Remember it. {PASS_KEY} is the pass key. "
    play = resource("texts", "macbeth.txt").read_text("utf8")
    return {
        "a pass key": f"{_FILLER * 4}{fact}{_FILLER * 7}What is the pass key? The pass key is",
        "a play": play[:1000],
    }


def kind_of(policy: str, budget: int, sinks: int, recent: int) -> str:
    """The kind of cache that a policy with these numbers is.

    Args:
        policy: one of ``POLICIES``.
        budget: tokens that stay; the full cache has none.
        sinks: of these, the first ones, for ``streaming``.
        recent: of these, the newest, for ``h2o``.

    Raises:
        ConfigError: the name is unknown, or nothing is left of the budget.
    """
    part = {"streaming": sinks, "h2o": recent}.get(policy, 0)
    if policy not in POLICIES or part >= budget:
        raise ConfigError(
            f"{policy!r} with {part} of {budget} tokens: give one of {', '.join(POLICIES)}, and more tokens"
        )
    rest = budget - part
    kinds = {"full": "contiguous", "streaming": f"streaming:{sinks}+{rest}", "h2o": f"h2o:{rest}+{recent}"}
    return kinds.get(policy, f"{policy}:{budget}")


def held_tokens(cache: KVCache) -> Bool[Tensor, "n_layer n_kv_head seen"]:
    """Which of the tokens that the first row has seen a cache still holds.

    Args:
        cache: of any kind that keeps whole tokens.
    """
    seen, shape = cache.rows_seen[0], (cache.config.n_layer, cache.config.n_kv_head)
    if isinstance(cache, EvictingCache):
        places = cache.positions[:, 0].cpu().clamp(max=seen)  # empty slots count past the end, which is cut off
        return torch.zeros((*shape, seen + 1), dtype=torch.bool).scatter_(2, places, True)[..., :seen]
    if isinstance(cache, StreamingCache):
        newest, all_tokens = torch.tensor([[seen - 1]]), torch.arange(seen)[None, None]
        return visible(all_tokens, newest, cache.window, cache.sinks)[0, 0].expand(*shape, seen)
    return torch.ones((*shape, seen), dtype=torch.bool)


def follow(
    lm: LoadedModel,
    prompt: str,
    kind: str,
    *,
    new_tokens: int = 12,
    chunk: int | None = None,
    reference: Sequence[int] | None = None,
) -> Course:
    """Read a prompt, answer greedily, and note at each step what the cache holds.

    Args:
        lm: the model with its tokenizer.
        prompt: text.
        kind: of the cache, see :func:`kvlab.cache.make_cache`.
        new_tokens: of the answer.
        chunk: tokens of a pass over the prompt; None reads it at once.
        reference: an answer to be judged by; its own by default.
    """
    ids = lm.tokenizer.encode(prompt)
    cache = make_cache(kind, lm.config, 1, len(ids) + new_tokens, lm.model.dtype, lm.model.device)
    for part in torch.tensor(ids).split(chunk or len(ids)):
        logits = prefill(lm.model, part[None], cache)[:, : lm.vocab_size]
    start, first = cache.fork(), logits
    answer, held, lengths = [int(logits.argmax())], [held_tokens(cache)], [cache.length]
    while len(answer) < new_tokens:
        answer.append(int(_fed(lm, answer[-1], cache).argmax()))
        held.append(held_tokens(cache))
        lengths.append(cache.length)
    return Course(
        kind=kind,
        prompt=tuple(lm.tokenizer.tokens(ids)),
        answer=tuple(answer),
        pieces=tuple(lm.tokenizer.tokens(answer)),
        held=tuple(held),
        lengths=tuple(lengths),
        nbytes=cache.nbytes,
        loss=_paid(lm, first, reference or answer, start),
    )


def _fed(lm: LoadedModel, token: int, cache: KVCache) -> Float[Tensor, "1 vocab"]:
    return decode(lm.model, torch.tensor([token]), cache)[:, : lm.vocab_size]


def _paid(lm: LoadedModel, logits: Float[Tensor, "1 vocab"], answer: Sequence[int], cache: KVCache) -> float:
    """Mean loss of an answer, token by token: several at once would be a prompt to some caches."""
    rows = [logits, *(_fed(lm, token, cache) for token in answer[:-1])]
    return F.cross_entropy(torch.cat(rows).float().cpu(), torch.tensor(answer)).item()


def policy_picture(courses: Mapping[str, Course], layer: int, *, fact: str = "", name: str = "fig-policies") -> None:
    """Draw what each policy holds in a layer at the end of the answer, a line for each KV head, with its answer.

    Args:
        courses: by the name of their policy, over one prompt.
        layer: index of the layer.
        fact: what the prompt hides; where it stands is marked.
        name: the figure's anchor.
    """
    first = next(iter(courses.values()))
    total, heads = len(first.prompt) + len(first.answer) - 1, first.held[0].shape[1]
    said = "; ".join(
        f"{policy} holds {course.lengths[-1]} and answers {label_text(course.text.strip())!r}"
        for policy, course in courses.items()
    )
    alt = f"Which of {total} tokens the {heads} KV heads of layer {layer} hold, by policy: {said}."
    marked = " An orange band stands where the fact is." if fact else ""
    caption = (
        f"What is left of the text in layer {layer} at the end of the answer: a line for each KV head, green where a "
        f"token is held.{marked} Beside each policy, what it answered."
    )
    with figure(alt, caption, size=(7.2, 0.9 + 0.62 * len(courses)), name=name) as (_, axes):
        for row, course in enumerate(courses.values()):
            for head, kept in enumerate(course.held[-1][layer]):
                spans = [(start, end - start) for held, start, end in _runs(kept.tolist()) if held]
                place = row + 0.12 + 0.76 * head / heads
                axes.broken_barh(spans, (place, 0.76 / heads - 0.03), color=CACHE, linewidth=0)
        for start, end in fact_places(first.prompt, fact):
            axes.axvspan(start, end, color=PREFILL, alpha=0.45, linewidth=0)
        labels = [f"{policy}, {each.lengths[-1]} held\n{_short(each.text)}" for policy, each in courses.items()]
        axes.set_yticks([row + 0.5 for row in range(len(courses))], labels)
        axes.set(xlim=(0, total), ylim=(len(courses), 0), xlabel="token of the text", title=f"Held in layer {layer}")
        axes.grid(visible=False)


def _short(text: str) -> str:
    """The beginning of an answer, for a figure."""
    words = label_text(text.strip())
    return f'"{words[:22]}..."' if len(words) > 25 else f'"{words}"'


def fact_places(prompt: Sequence[str], fact: str) -> list[tuple[int, int]]:
    """Where a fact stands in a prompt: first token and the one past the last, for each time that it is said.

    Args:
        prompt: its tokens, for human eyes.
        fact: what to look for; nothing stands nowhere.
    """
    text, ends, found = "".join(prompt), [0], []
    for piece in prompt:
        ends.append(ends[-1] + len(piece))
    at = text.find(fact) if fact else -1
    while at >= 0:
        inside = [i for i in range(len(prompt)) if ends[i] < at + len(fact) and ends[i + 1] > at]
        found.append((inside[0], inside[-1] + 1))
        at = text.find(fact, at + len(fact))
    return found


def _runs(held: Sequence[bool]) -> Iterator[tuple[bool, int, int]]:
    """Stretches of tokens that are all held or all gone: which, the first, the one past the last."""
    at = 0
    for which, group in groupby(held):
        start, at = at, at + len(list(group))
        yield which, start, at


class CachePolicyExplorer:
    """Choose a policy and its numbers, step through the answer, and see what a layer and a KV head still hold.

    Args:
        lm: the model with its tokenizer.
        prompts: texts to choose from, by name.
        new_tokens: of an answer.
    """

    def __init__(self, lm: LoadedModel, prompts: Mapping[str, str], new_tokens: int = 12) -> None:
        import ipywidgets as widgets

        self._lm, self._prompts, self._new_tokens = lm, dict(prompts), new_tokens
        self._courses: dict[tuple[str, str, int], Course] = {}
        wide: dict[str, Any] = {"style": {"description_width": "6.5em"}, "layout": widgets.Layout(width="24em")}
        late = {"continuous_update": False, **wide}  # a run takes a second or two
        self.prompt = widgets.Dropdown(options=list(self._prompts), description="prompt", **wide)
        self.policy = widgets.Dropdown(options=POLICIES, value="h2o", description="policy", **wide)
        self.budget = widgets.IntSlider(64, min=24, max=256, step=8, description="tokens kept", **late)
        self.sinks = widgets.IntSlider(4, min=0, max=16, description="sinks", **late)
        self.recent = widgets.IntSlider(32, min=1, max=63, description="recent", **late)
        chunks = [("at once", 0), ("64 tokens a pass", 64), ("16 tokens a pass", 16)]
        self.chunk = widgets.Dropdown(options=chunks, description="prompt is read", **wide)
        self.step = widgets.IntSlider(new_tokens, min=1, max=new_tokens, description="step", **wide)
        self.layer = widgets.IntSlider(0, min=0, max=lm.config.n_layer - 1, description="layer", **wide)
        self.head = widgets.IntSlider(0, min=0, max=lm.config.n_kv_head - 1, description="KV head", **wide)
        self.view = widgets.HTML()
        knobs = (self.prompt, self.policy, self.budget, self.sinks, self.recent, self.chunk)
        places = (self.step, self.layer, self.head)
        for knob in (*knobs, *places):
            knob.observe(self._show, names="value")
        self.box = widgets.HBox(
            [widgets.VBox([*knobs, *places]), self.view], layout=widgets.Layout(flex_flow="row wrap")
        )
        self._show()

    @property
    def kind(self) -> str:
        """The cache that the knobs ask for."""
        return kind_of(self.policy.value, self.budget.value, self.sinks.value, self.recent.value)

    @property
    def full(self) -> Course:
        """The answer with every token kept."""
        return self._course("contiguous")

    @property
    def course(self) -> Course:
        """The answer through the cache that was chosen."""
        return self._course(self.kind)

    def _course(self, kind: str) -> Course:
        """A run, made once for each setting."""
        key = (self.prompt.value, kind, self.chunk.value)
        if key not in self._courses:
            judge = None if kind == "contiguous" else self.full.answer
            text, chunk = self._prompts[self.prompt.value], self.chunk.value or None
            run = follow(self._lm, text, kind, new_tokens=self._new_tokens, chunk=chunk, reference=judge)
            self._courses[key] = run
        return self._courses[key]

    def _show(self, _: Any = None) -> None:
        self.recent.max = self.budget.value - 1
        self.budget.disabled = self.policy.value == "full"
        self.sinks.disabled, self.recent.disabled = self.policy.value != "streaming", self.policy.value != "h2o"
        self.view.value = policy_html(self.course, self.full, self.step.value, self.layer.value, self.head.value)


def policy_html(course: Course, full: Course, step: int, layer: int, head: int) -> str:
    """What the explorer shows, as HTML that is quick to draw again.

    Args:
        course: through the cache that was chosen.
        full: through one that keeps all, over the same prompt.
        step: counted from 1; after the first, the cache holds what is left of the prompt.
        layer: index of the layer.
        head: index of the KV head.
    """
    held = course.held[step - 1][layer]
    kept, seen = int(held[head].sum()), held.shape[1]
    same = next((i for i, (a, b) in enumerate(zip(course.answer, full.answer, strict=True)) if a != b), None)
    verdict = "the same" if same is None else f"another from token {same + 1} on"
    tokens = [*course.prompt, *course.pieces[: step - 1]]
    parts = [
        f"<b>{course.kind}</b>, step {step} of {len(course.answer)}: layer {layer}, KV head {head} holds {kept} of "
        f"{some(seen, 'token')}. The cache has allocated {binary(course.nbytes)}; one that keeps all, "
        f"{binary(full.nbytes)}.",
        f"<b>full</b>{_answer(full, step)}<br><b>{course.kind}</b>{_answer(course, step)}<br>The whole answer is "
        f"{verdict}. For the full cache's answer it pays {three(course.loss)} nats a token, the full cache "
        f"{three(full.loss)}.",
        "".join(_strip(kept_by, n, n == head) for n, kept_by in enumerate(held.tolist())),
        _text(tokens, held[head].tolist(), len(course.prompt)),
    ]
    blocks = "".join(f'<div style="margin:.5em 0">{part}</div>' for part in parts)
    return f'<div style="line-height:1.6;max-width:46em;margin-left:1em;color:inherit">{blocks}</div>'


def _answer(course: Course, step: int) -> str:
    words = _plain("".join(course.pieces[:step]))
    style = f"background:{DECODE_SURFACE};color:#fff;border-radius:3px;padding:0 2px;white-space:pre-wrap"
    return f' <span style="{style}">{words}</span>'


def _strip(held: Sequence[bool], head: int, chosen: bool) -> str:
    """A KV head as a line: green where a token is held."""
    bars = "".join(
        f'<span style="display:inline-block;height:100%;width:{100 * (end - start) / len(held):.3f}%;'
        f'background:{CACHE if which else "transparent"}"></span>'
        for which, start, end in _runs(held)
    )
    name = f"<b>head {head} ←</b>" if chosen else f"head {head}"
    line = f'<div style="height:10px;line-height:0;white-space:nowrap;box-shadow:inset 0 0 0 1px {IDLE}">{bars}</div>'
    return f'<div style="line-height:1.3;font-size:.85em">{name}{line}</div>'


def _text(tokens: Sequence[str], held: Sequence[bool], n_prompt: int) -> str:
    """The text with what is held on green; the answer underlined."""
    answered = [at >= n_prompt for at in range(len(tokens))]
    spans, at = [], 0
    for (kept, new), group in groupby(zip(held, answered, strict=True)):
        start, at = at, at + len(list(group))
        style = f"background:{CACHE_SURFACE};color:#fff" if kept else "opacity:.75"
        style += f";border-bottom:3px solid {DECODE_SURFACE}" if new else ""
        spans.append(f'<span style="{style}">{_plain("".join(tokens[start:at]))}</span>')
    return f'<div style="white-space:pre-wrap;overflow-wrap:anywhere">{"".join(spans)}</div>'


def _plain(text: str) -> str:
    return html.escape(text.replace("\n", "⏎"))
