"""A window to step along a text: what a streaming cache holds, in which slot, and what a model paid for each token."""

from __future__ import annotations

import json
import math
from functools import cache
from itertools import pairwise
from typing import Any

from kvlab.book.calculators.base import Explorable
from kvlab.book.calculators.words import count, some, three
from kvlab.errors import ConfigError
from kvlab.resources import resource

_ALL = "contiguous"


class WindowExplorer(Explorable):
    """A text read through a window, with or without sinks, over losses that were recorded.

    Every setting of ``benchmarks/window_steps.py`` can be chosen: equally many slots, of which none, one or four are
    sinks.

    Args:
        read: tokens that are read at the start.
        sinks: of the slots.
        slots: tokens that are held at most, sinks and window together.

    Raises:
        ConfigError: the text is shorter, or this setting was not recorded.
    """

    kind = "window-steps"
    title = "Explore: a window that rolls over a text, with and without sinks"

    def __init__(self, *, read: int = 160, sinks: int = 0, slots: int = 128) -> None:
        found = recorded()
        if not 1 <= read < len(found["tokens"]):
            raise ConfigError(f"read is {read}; the text has tokens 1 to {len(found['tokens']) - 1} to stop after")
        if _kind(sinks, slots) not in found["losses"]:
            raise ConfigError(
                f"{sinks} sinks among {slots} slots were not recorded; there are {', '.join(found['losses'])}"
            )
        super().__init__(read=read, sinks=sinks, slots=slots)

    def _data(self) -> dict[str, Any]:
        """The text and its losses."""
        found = recorded()
        return {
            "catalogue": {name: found[name] for name in ("tokens", "losses", "model")},
            "setting": self.setting,
        }

    def _answer(self) -> str:
        """The same by the library's rule of who sees what."""
        import torch  # late: a second's work

        from kvlab.cache import visible

        read, sinks, slots = self.setting["read"], self.setting["sinks"], self.setting["slots"]
        seen = visible(torch.arange(read)[None, None], torch.tensor([[read - 1]]), slots - sinks, sinks)
        held = seen.flatten().nonzero().flatten().tolist()
        breaks = [index for index in range(1, len(held)) if held[index] > held[index - 1] + 1]
        edges = [0, *breaks, len(held)]
        ranges = [(held[first], held[past - 1]) for first, past in pairwise(edges)]
        return _words(read, sinks, slots, len(held), ranges)


@cache
def recorded() -> dict[str, Any]:
    """What ``benchmarks/window_steps.py`` wrote: tokens, and for each cache thousandths of a nat a token."""
    found: dict[str, Any] = json.loads(resource("results", "streaming", "window-steps.json").read_text("utf8"))
    return found


def _kind(sinks: int, slots: int) -> str:
    return f"streaming:{sinks}+{slots - sinks}"


def _words(read: int, sinks: int, slots: int, held: int, ranges: list[tuple[int, int]]) -> str:
    """The answer, in the words of ``windowWords`` in ``window_steps.mjs``."""
    tokens, losses = recorded()["tokens"], recorded()["losses"]
    paid, every = losses[_kind(sinks, slots)], losses[_ALL]
    who = f"a window of {count(slots)} without sinks holds"
    if sinks:
        who = f"{some(sinks, 'sink')} and a window of {count(slots - sinks)} hold"
    which = " and ".join(count(a) if a == b else f"{count(a)} to {count(b)}" for a, b in ranges)
    piece = tokens[read].replace("\n", "⏎")
    return (
        f"After {some(read, 'token')}, {who} {count(held)}: {which}. The next one, “{piece}”, costs "
        f"{three(paid[read - 1] / 1000)} nats. Perplexity so far: {_perplexity(paid[:read])}; "
        f"with all tokens kept {_perplexity(every[:read])}."
    )


def _perplexity(losses: list[int]) -> str:
    return three(math.exp(sum(losses) / 1000 / len(losses)))
