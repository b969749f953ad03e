"""Who asks for what, and when: requests for a simulated cluster or a real server, without their text.

Lengths of real traffic come from the Azure LLM inference trace of 2023 (CC-BY 4.0; Patel et al., Splitwise, ISCA 2024,
arXiv:2311.18677), as quantiles in ``data/workloads.json``. Arrivals are open: nobody waits for an answer before the
next request is sent, so a slow server does not slow its users down, and its queue shows.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate, count, islice
from random import Random
from typing import Self

from kvlab.errors import ConfigError, at_least, nearest
from kvlab.resources import resource

#: Between two turns of a conversation pass so many times ``think_s``, evenly distributed.
_THINKING = (0.5, 1.5)

#: The names that a workload can have, and what they consist of where they state lengths.
_NAMES = ("azure-code", "azure-conv", "fixed:PROMPT/OUTPUT", "uniform:LOW-HIGH/LOW-HIGH", "shared-prefix", "multi-turn")
_STATED = {
    "fixed": ("fixed:PROMPT/OUTPUT, as in fixed:512/128", r"(\d+)/(\d+)"),
    "uniform": ("uniform:LOW-HIGH/LOW-HIGH, as in uniform:100-900/1-200", r"(\d+)-(\d+)/(\d+)-(\d+)"),
}


@dataclass(frozen=True)
class Lengths:
    """How many tokens something has: quantiles, and straight lines between them.

    Args:
        fractions: rising from 0 to 1.
        tokens: of the quantile at each fraction, never falling.

    Raises:
        ConfigError: the table is no distribution, or a length is below 1.
    """

    fractions: tuple[float, ...]
    tokens: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.fractions, self.fractions[1:], strict=False))
        rising &= all(a <= b for a, b in zip(self.tokens, self.tokens[1:], strict=False))
        ends = (*self.fractions[:1], *self.fractions[-1:])
        if not rising or len(self.fractions) != len(self.tokens) or ends != (0, 1):
            raise ConfigError(
                f"quantiles {self.tokens} at {self.fractions}: fractions rise from 0 to 1, tokens never fall"
            )
        if not _rounded(self.tokens[0]) >= 1:
            raise ConfigError(f"the shortest length is {self.tokens[0]:g} tokens; it must be 1 or more")

    @classmethod
    def fixed(cls, tokens: int) -> Self:
        """Always the same.

        Args:
            tokens: how many.

        Raises:
            ConfigError: ``tokens`` is below 1.
        """
        return cls((0, 1), (tokens, tokens))

    @classmethod
    def uniform(cls, low: int, high: int) -> Self:
        """Every whole number of a range equally often.

        Args:
            low: the smallest.
            high: the largest.

        Raises:
            ConfigError: ``low`` is below 1 or above ``high``.
        """
        if not 1 <= low <= high:
            raise ConfigError(f"lengths from {low} to {high}: the first is 1 or more, and not above the second")
        # Half a token beyond each end: rounding then leaves the ends as often as the rest. A hair less above, lest the
        # quantile at 1 be the next number.
        return cls((0, 1), (low - 0.5, math.nextafter(high + 0.5, 0)))

    @property
    def mean(self) -> float:
        """Tokens on average."""
        widths = (high - low for low, high in zip(self.fractions, self.fractions[1:], strict=False))
        middles = ((low + high) / 2 for low, high in zip(self.tokens, self.tokens[1:], strict=False))
        return sum(width * middle for width, middle in zip(widths, middles, strict=True))

    def at(self, fraction: float) -> int:
        """The quantile, in whole tokens.

        Args:
            fraction: 0 to 1.
        """
        right = min(bisect_right(self.fractions, fraction), len(self.fractions) - 1)
        low, high = self.fractions[right - 1], self.fractions[right]
        start, end = self.tokens[right - 1], self.tokens[right]
        return _rounded(start + (end - start) * (fraction - low) / (high - low))


@dataclass(frozen=True)
class Workload:
    """What users ask for.

    A prompt is a system prompt, the history of the conversation, and what the user adds. Lengths are drawn
    independently of each other: in the Azure traces the rank correlation of prompt and answer is -0.02 (code) and 0.07
    (conversation).

    Args:
        name: what to call it.
        prompts: tokens that a user adds at each turn.
        outputs: tokens of an answer.
        gap_cv: coefficient of variation of the gaps between arrivals (of conversations, where there are several turns).
            Gaps have a gamma distribution: 1 is a Poisson process, more comes in bursts. Measured in the Azure traces:
            1.09 for conversation, 13.15 for code, which comes in bursts between long pauses.
        systems: system prompts there are.
        system_tokens: of each of them.
        skew: the n-th system prompt is chosen in proportion to ``n ** -skew``: 0 is uniform, 1 is Zipf's law.
        turns: of a conversation. Each prompt has the whole history, answers included.
        think_s: seconds between the arrivals of two turns of a conversation, on average; evenly distributed between
            half and one and a half of it. It runs from one arrival to the next, whenever the answer comes.

    Raises:
        ConfigError: a number is impossible, or system prompts and their tokens do not go together.
    """

    name: str
    prompts: Lengths
    outputs: Lengths
    gap_cv: float = 1.0
    systems: int = 0
    system_tokens: int = 0
    skew: float = 0.0
    turns: int = 1
    think_s: float = 0.0

    def __post_init__(self) -> None:
        at_least(1, "turns", self.turns)
        at_least(0, "systems", self.systems)
        if not 0 < self.gap_cv < math.inf:
            raise ConfigError(f"gap_cv is {self.gap_cv}; it must be above 0, and 1 is a Poisson process")
        if not (0 <= self.skew < math.inf and 0 <= self.think_s < math.inf):
            raise ConfigError(f"skew is {self.skew} and think_s is {self.think_s}; both must be 0 or more")
        if self.system_tokens < 0 or (self.systems > 0) != (self.system_tokens > 0):
            raise ConfigError(
                f"{self.systems} system prompts of {self.system_tokens} tokens: give both, each 1 or more, or neither"
            )


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    What it says is not stored, only where it comes from. A prompt is the first tokens of a conversation's text, and a
    conversation's text begins with its system prompt. Two requests share what they have in common of these, and nothing
    by chance.

    Args:
        time: seconds, when it arrives.
        prompt_tokens: of the whole prompt.
        output_tokens: of the answer. The next turn of the conversation has it in its prompt.
        session: the conversation; a request without one has a number of its own.
        system: the system prompt that the conversation begins with.
        system_tokens: of it; 0 where there is none.
    """

    time: float
    prompt_tokens: int
    output_tokens: int
    session: int
    system: int = 0
    system_tokens: int = 0

    def block_key(self, index: int, block_size: int) -> Hashable:
        """What a block of the prompt or of the answer contains: equal keys for equal tokens, and for these only.

        A block that the system prompt does not fill belongs to the conversation.

        Args:
            index: of the block, 0 is the first of the prompt.
            block_size: tokens of a block, the same for all keys that are compared.
        """
        if (index + 1) * block_size <= self.system_tokens:
            return "system", self.system, index
        return "session", self.session, index


def workload(name: str) -> Workload:
    """A workload by its name.

    - ``azure-code`` and ``azure-conv``: lengths of real requests, measured at 15 quantiles. The straight lines between
      them give means of 2,080 and 35.5 tokens (measured: 2,048 and 27.9) for code and of 1,190 and 215 (measured: 1,155
      and 211) for conversation. The long answers to code are the exception: the last hundredth of them is a line from
      252 to 1,899 tokens here, and nearer to 252 in truth.
    - ``fixed:PROMPT/OUTPUT``: always the same lengths, as in ``fixed:512/128``.
    - ``uniform:LOW-HIGH/LOW-HIGH``: all lengths of two ranges, as in ``uniform:100-900/1-200``.
    - ``shared-prefix``: 8 system prompts of 1,024 tokens, chosen by Zipf's law, then 32 to 256 tokens of a user's own.
    - ``multi-turn``: conversations of 5 turns, one every 30 s; 16 to 256 tokens are added to the history at each.

    The lengths of the last two are made up. All arrive as a Poisson process.

    Args:
        name: as above.

    Raises:
        ConfigError: no workload has this name, or its lengths cannot be read.
    """
    kind, _, lengths = name.partition(":")
    if kind in _STATED:
        return _stated(name, kind, lengths)
    if name in ("azure-code", "azure-conv"):
        return _measured(name)
    if name == "shared-prefix":
        own = Lengths.uniform(32, 256)
        return Workload(name, own, own, systems=8, system_tokens=1024, skew=1.0)
    if name == "multi-turn":
        return Workload(name, Lengths.uniform(16, 256), Lengths.uniform(64, 384), turns=5, think_s=30.0)
    raise ConfigError(f"no workload is called {name!r}; {nearest(name, _NAMES)}")


def arrivals(workload: Workload, *, rate: float, requests: int, seed: int = 0) -> Iterator[Arrival]:
    """The requests of a workload, in the order in which they arrive, made as they are asked for.

    Conversations began before time 0, and those that are under way at 0 come in with their history: the rate is the
    same from the first second on.

    Args:
        workload: what is asked for.
        rate: requests per second on average, every turn of a conversation counted.
        requests: how many.
        seed: of everything that is drawn.

    Raises:
        ConfigError: the rate is not above 0, or ``requests`` is negative.
    """
    if not 0 < rate < math.inf:
        raise ConfigError(f"rate is {rate} requests per second; it must be above 0")
    return islice(_endless(workload, rate, Random(seed)), at_least(0, "requests", requests))


def _endless(workload: Workload, rate: float, random: Random) -> Iterator[Arrival]:
    # The turn that each conversation comes to next, and how many it has left; sessions tell those of one time apart.
    waiting: list[tuple[float, int, int, Arrival]] = []
    for first in _beginnings(workload, rate, random):
        heappush(waiting, (first.time, first.session, workload.turns, first))
        # What comes later than this begins later: up to here the order is settled.
        while waiting and waiting[0][0] <= first.time:
            time, session, left, turn = heappop(waiting)
            if time >= 0:
                yield turn
            if left > 1:
                following = _next_turn(workload, turn, random)
                heappush(waiting, (following.time, session, left - 1, following))


def _beginnings(workload: Workload, rate: float, random: Random) -> Iterator[Arrival]:
    """The first turn of every conversation, from so early on that at time 0 as many are under way as ever after."""
    shape = workload.gap_cv**-2
    scale = workload.turns / rate / shape
    popularity = list(accumulate(rank**-workload.skew for rank in range(1, workload.systems + 1)))
    time = -(workload.turns - 1) * _THINKING[1] * workload.think_s
    for session in count():
        time += random.gammavariate(shape, scale)
        yield Arrival(
            time=time,
            prompt_tokens=workload.system_tokens + workload.prompts.at(random.random()),
            output_tokens=workload.outputs.at(random.random()),
            session=session,
            system=random.choices(range(workload.systems), cum_weights=popularity)[0] if popularity else 0,
            system_tokens=workload.system_tokens,
        )


def _next_turn(workload: Workload, turn: Arrival, random: Random) -> Arrival:
    history = turn.prompt_tokens + turn.output_tokens
    return replace(
        turn,
        time=turn.time + workload.think_s * random.uniform(*_THINKING),
        prompt_tokens=history + workload.prompts.at(random.random()),
        output_tokens=workload.outputs.at(random.random()),
    )


def _stated(name: str, kind: str, lengths: str) -> Workload:
    """A workload whose name has its lengths."""
    form, pattern = _STATED[kind]
    found = re.fullmatch(pattern, lengths)
    if not found:
        raise ConfigError(f"workload {name!r}: write {form}")
    numbers = [int(number) for number in found.groups()]
    if kind == "fixed":
        return Workload(name, Lengths.fixed(numbers[0]), Lengths.fixed(numbers[1]))
    return Workload(name, Lengths.uniform(*numbers[:2]), Lengths.uniform(*numbers[2:]))


def _measured(name: str) -> Workload:
    """A workload whose lengths were measured."""
    data = json.loads(resource("workloads.json").read_text("utf8"))
    fractions, found = tuple(data["fractions"]), data[name]
    prompts, outputs = (Lengths(fractions, tuple(found[of])) for of in ("prompt_tokens", "output_tokens"))
    return Workload(name, prompts, outputs)


def _rounded(tokens: float) -> int:
    return int(tokens + 0.5)
