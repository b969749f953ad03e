"""What a step is, as plain data, and the ways to fill it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvlab.errors import ConfigError
from kvlab.serving.request import Request


class Policy(StrEnum):
    """How a step is filled."""

    #: A batch is formed, with memory for its longest possible answers, and nobody joins before its last one leaves. Its
    #: prompts are read in one step, so they share one token budget.
    STATIC = "static"
    #: Whole prompts as soon as there is room, in steps of their own; all others wait meanwhile.
    CONTINUOUS = "continuous"
    #: A token for everybody who decodes; what is left of the budget goes to prompts, in pieces.
    CHUNKED = "chunked"


class Order(StrEnum):
    """Who of those who wait comes first."""

    FCFS = "fcfs"
    #: The fewest tokens to feed; each step of waiting counts like ``ageing`` tokens fewer, so that nobody starves.
    SHORTEST = "shortest"


@dataclass
class Plan:
    """What one step computes.

    Args:
        tokens: how many each request feeds.
        copies: blocks to copy before anything is written, as (from, to): forks that part.
        preempted: requests that lost their blocks to others and start over.
        admitted: requests that joined, with the tokens that they found in the cache.
        repeats: how often the step is taken, one after the other; above 1 only where it is repeatable.
    """

    tokens: dict[Request, int] = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted: dict[Request, int] = field(default_factory=dict)
    repeats: int = 1
    #: Tokens of the step.
    total: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.total = sum(self.tokens.values())

    @property
    def repeatable(self) -> bool:
        """Whether the next step could be the same: everybody feeds the one token that is left, nobody came or went.

        After a preemption there may be room for somebody else.
        """
        if self.admitted or self.preempted or not self.tokens:
            return False
        return all(tokens == 1 == request.remaining for request, tokens in self.tokens.items())

    def give(self, request: Request, tokens: int) -> None:
        """Let a request take part.

        Args:
            request: that does not yet.
            tokens: that it feeds.
        """
        self.tokens[request] = tokens
        self.total += tokens

    def drop(self, request: Request) -> None:
        """Take a request out, if it is in; what it was given is free for others.

        Args:
            request: that shall not take part.
        """
        self.total -= self.tokens.pop(request, 0)

    def alone(self, request: Request) -> Plan:
        """The step of one of its requests, with the copies into its own blocks: the others' may hold new tokens by now.

        Args:
            request: one that takes part.
        """
        copies = [(source, target) for source, target in self.copies if target in request.table]
        return Plan({request: self.tokens[request]}, copies, repeats=self.repeats)


def policy_of(name: str) -> Policy:
    """A policy by its name.

    Args:
        name: of one.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in list(Policy):
        raise ConfigError(f"policy is {name!r}; it must be one of {', '.join(Policy)}")
    return Policy(name)


def order_of(name: str) -> Order:
    """An order by its name.

    Args:
        name: of one.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in list(Order):
        raise ConfigError(f"order is {name!r}; it must be one of {', '.join(Order)}")
    return Order(name)
