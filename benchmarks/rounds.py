"""Requests, rates and ratios: what the seconds of every round come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Figures = dict[str, Any]
Rates = dict[str, float]

#: Tokens that a decode step follows: few, so that the weights are nearly all that it reads.
SHORT = 32
TRANSFORMERS = ("transformers dynamic", "transformers static")


@dataclass(frozen=True)
class Case:
    """Equal requests that start together.

    Args:
        name: what the figures are filed under.
        prompt: tokens of each.
        new: tokens of each answer.
        batch: requests.
    """

    name: str
    prompt: int
    new: int
    batch: int


@dataclass(frozen=True)
class Goal:
    """A ratio of two rates that is looked at.

    Args:
        metric: name of the rate.
        over: contender on top.
        under: contenders below; where there are several, the one with the highest median.
        at_least: what it should come to.
    """

    metric: str
    over: str
    under: tuple[str, ...]
    at_least: float

    @property
    def title(self) -> str:
        """In words."""
        return f"{self.metric}: {self.over} / {' or '.join(self.under)}"


@dataclass(frozen=True)
class Ratio:
    """A ratio as the rounds show it.

    Args:
        title: in words.
        rounds: one value a round, both sides of the same round.
        at_least: what it should come to; None where nothing is promised.
    """

    title: str
    rounds: tuple[float, ...]
    at_least: float | None

    @property
    def median(self) -> float:
        """The middle of the rounds."""
        return median(self.rounds)


def goals(prompts: Sequence[int], batch: int) -> list[Goal]:
    """What kvlab should reach.

    Args:
        prompts: lengths of the prompts.
        batch: rows of a batched step.
    """
    bf16 = "kvlab bfloat16"
    found = [
        Goal("decode_1", bf16, TRANSFORMERS, 3.2),
        Goal("decode_1", "kvlab int8", TRANSFORMERS, 4.0),
        Goal("decode_1", "kvlab int4", TRANSFORMERS, 6.0),
        Goal("decode_1", "kvlab int4", ("llama.cpp Q4_1",), 1.15),
        Goal(f"decode_{batch}", bf16, ("vLLM",), 1.2),
        Goal(f"output_{batch}", bf16, ("vLLM",), 1.2),
    ]
    for prompt in prompts:
        found.append(Goal(f"prefill_{prompt}", bf16, TRANSFORMERS, 1.0))
        found += [Goal(f"prefill_{prompt}", f"kvlab {name}", (bf16,), 0.8) for name in ("int8", "int4")]
    return found


def cases_of(prompts: Sequence[int], new: int, batch: int) -> list[Case]:
    """What every contender runs.

    Args:
        prompts: lengths of the prompts whose prefill is measured.
        new: tokens of an answer where decode is measured.
        batch: rows of the batched case.
    """
    return [
        Case("decode_1", SHORT, new, 1),
        Case(f"decode_{batch}", SHORT, new, batch),
        *(Case(f"prefill_{prompt}", prompt, 1, 1) for prompt in prompts),
    ]


def rates(cases: Sequence[Case], figures: Mapping[str, Figures]) -> Rates:
    """Tokens per second of one round.

    Args:
        cases: that were run.
        figures: seconds of each: ``ttft_s``, ``tpot_s``, ``e2e_s``; what a contender cannot say is missing.
    """
    found: Rates = {}
    for case in cases:
        took = figures.get(case.name)
        if took is None:
            continue
        if case.new == 1:
            found[case.name] = case.batch * case.prompt / took["ttft_s"]
            continue
        found[case.name] = case.batch / took["tpot_s"]
        if case.batch > 1 and "e2e_s" in took:
            found[f"output_{case.batch}"] = case.batch * case.new / took["e2e_s"]
    return found


def medians(rounds: Sequence[Rates]) -> Rates:
    """The middle of the rounds, rate by rate.

    Args:
        rounds: of one contender.
    """
    return {name: median(one[name] for one in rounds) for name in (rounds[0] if rounds else ())}


def ratio(goal: Goal, rounds: Mapping[str, Sequence[Rates]]) -> Ratio | None:
    """A goal's ratio, round by round; None where one of its sides was not measured.

    Args:
        goal: which.
        rounds: rates of every contender.
    """
    there = [name for name in (goal.over, *goal.under) if goal.metric in (rounds.get(name) or [{}])[0]]
    below = [name for name in there if name in goal.under]
    if goal.over not in there or not below:
        return None
    under = max(below, key=lambda name: medians(rounds[name])[goal.metric])
    pairs = zip(rounds[goal.over], rounds[under], strict=False)
    title = f"{goal.metric}: {goal.over} / {under}"
    return Ratio(title, tuple(a[goal.metric] / b[goal.metric] for a, b in pairs), goal.at_least)
