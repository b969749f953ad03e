"""A request as the scheduler knows it: how many tokens it has, how many are computed, and where they lie."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvlab.generation import Sampling

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(eq=False, slots=True)
class Request:
    """One prompt and its answer in the making.

    There is no prefill or decode phase: ``num_tokens`` is what there is, ``num_computed_tokens`` what has been fed, and
    whatever lies between is work. A prompt is a lot of it; a request that decodes always has one token left.

    This one is only numbers: it does not say what its tokens are, so it finds no prefix in the cache, not even its own
    after a preemption. :class:`TokenRequest` and :class:`~kvlab.serving.SimulatedRequest` do.

    Args:
        id: of the request.
        prompt_tokens: of the prompt.
        max_new_tokens: a cap on the answer, no reservation.
    """

    id: Hashable
    prompt_tokens: int
    max_new_tokens: int
    #: Tokens of prompt and answer so far.
    num_tokens: int = field(init=False)
    #: Of these, tokens whose keys and values are in the cache.
    num_computed_tokens: int = field(init=False, default=0)
    #: Blocks that hold them, in order; :class:`~kvlab.cache.BlockPool` numbers them.
    table: list[int] = field(init=False, default_factory=list)
    #: Numbers of the contents of its published blocks.
    contents: list[int] = field(init=False, default_factory=list)
    #: Tokens that a drafter guessed; the next pass verifies them.
    draft: Sequence[int] = field(init=False, default=())
    finish: FinishReason | None = field(init=False, default=None)
    #: What went wrong, where ``finish`` is ``error``.
    error: str = field(init=False, default="")
    preemptions: int = field(init=False, default=0)
    #: Tokens whose keys and values come along, computed by another engine.
    brought: int = field(init=False, default=0)
    #: Place in the order of arrival, and the step of the scheduler at which it arrived.
    number: int = field(init=False, default=0)
    added_at: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.num_tokens = self.prompt_tokens

    @property
    def new_tokens(self) -> int:
        """Tokens of the answer so far."""
        return self.num_tokens - self.prompt_tokens

    @property
    def remaining(self) -> int:
        """Tokens that have not been fed yet."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def longest(self) -> int:
        """Tokens that the cache may come to hold: the last token of an answer is never fed."""
        return self.prompt_tokens + self.max_new_tokens - 1

    @property
    def tokens_left(self) -> int:
        """Tokens of the answer that are still to come, at most."""
        return self.max_new_tokens - self.new_tokens

    def block_key(self, index: int, block_size: int) -> Hashable:
        """What a full block holds, for others that begin alike: equal keys mean equal tokens. None: nobody shares it.

        Args:
            index: of the block in the sequence.
            block_size: tokens of a block.
        """
        return None

    def append(self, tokens: Sequence[int]) -> int:
        """Take tokens of the answer, up to its end, and say how many were taken.

        Args:
            tokens: in order.
        """
        taken = min(len(tokens), self.tokens_left)
        self.num_tokens += taken
        if self.tokens_left == 0:
            self.finish = "length"
        return taken


@dataclass(eq=False, slots=True)
class TokenRequest(Request):
    """A request whose tokens are known: what a model answers.

    Args:
        tokens: prompt, and the answer as it grows.
        sampling: how its tokens are picked.
        stop_ids: token ids that end the answer.
    """

    tokens: list[int] = field(default_factory=list)
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        id: Hashable,
        prompt: Sequence[int],
        max_new_tokens: int = 64,
        *,
        sampling: Sampling | None = None,
        stop_ids: frozenset[int] = frozenset(),
    ) -> TokenRequest:
        """A request from its prompt.

        Args:
            id: of the request.
            prompt: token ids.
            max_new_tokens: a cap on the answer.
            sampling: greedy by default.
            stop_ids: token ids that end the answer.
        """
        return cls(id, len(prompt), max_new_tokens, list(prompt), sampling or Sampling(), stop_ids)

    @property
    def answer(self) -> list[int]:
        """Tokens of the answer so far."""
        return self.tokens[self.prompt_tokens :]

    def block_key(self, index: int, block_size: int) -> Hashable:
        """The tokens themselves."""
        return tuple(self.tokens[index * block_size : (index + 1) * block_size])

    def append(self, tokens: Sequence[int]) -> int:
        """Take tokens of the answer, up to the cap or to one that ends it."""
        for taken, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            Request.append(self, (token,))
            if token in self.stop_ids:
                self.finish = "stop"
            if self.finish:
                return taken
        return len(tokens)
