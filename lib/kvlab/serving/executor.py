"""Who does the work of a step: a model, or a cost model on a clock of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from kvlab.cache import BlockPool, BlockStorage, RaggedBatch, Span
from kvlab.cost import Row
from kvlab.errors import RequestRefused
from kvlab.generation import CompiledPagedStep, Draft, Drafter, Sampling, accept, probabilities
from kvlab.generation.sampling import most_likely, stream_of
from kvlab.model import GPT
from kvlab.serving.plan import Plan
from kvlab.serving.request import Request, TokenRequest
from kvlab.timing import VirtualClock


class Executor(Protocol):
    """Takes the steps that a scheduler plans."""

    def require(self, request: Request) -> None:
        """Check a request before it is queued.

        Raises:
            RequestRefused: this executor cannot serve it.
        """

    def repeats(self, plan: Plan, seconds: float | None) -> int:
        """How often a step may be taken in a row before so many seconds have passed; None for no limit. 1 or more."""

    def execute(self, plan: Plan) -> dict[Request, Sequence[int]]:
        """Take a step.

        Returns:
            What every request of the plan emitted: nothing if it fed a part of its prompt, one token, or with a draft
            or repeated steps several.
        """

    def draft(self, request: Request) -> Sequence[int]:
        """A guess at the tokens that come next, which the next pass verifies; empty for none."""

    def forget(self, request: Request) -> None:
        """The request has ended: drop what is kept about it."""


class StepSeconds(Protocol):
    """How long a step takes; :class:`kvlab.cost.StepTimes` is one."""

    def seconds(self, decodes: int, held: int, prompts: Sequence[Row] = ()) -> float:
        """Seconds of one step.

        Args:
            decodes: rows of one token.
            held: tokens that their caches hold before the step, together.
            prompts: the other rows.
        """


class CostModelExecutor:
    """Lets a clock advance by what a step would cost, and makes up the tokens.

    Args:
        times: how long a step takes.
        clock: advances.
    """

    def __init__(self, times: StepSeconds, clock: VirtualClock) -> None:
        self._times, self._clock = times, clock

    def require(self, request: Request) -> None:
        """Any request will do."""

    def repeats(self, plan: Plan, seconds: float | None) -> int:
        """As many as begin before the time is up."""
        one = self._seconds(plan, 1)
        if seconds is None or one == 0:
            return 2**30
        most = min(request.tokens_left for request in plan.tokens)
        most = min(most, max(ceil(seconds / one), 1))
        # Each step takes a little longer than the one before: so many may take too long, and this many do not.
        return max(ceil(seconds / self._seconds(plan, most)), 1)

    def execute(self, plan: Plan) -> dict[Request, Sequence[int]]:
        """Advance the clock; every request whose tokens are all fed emits one a step."""
        self._clock.advance(self._seconds(plan, plan.repeats) * plan.repeats)
        one = range(plan.repeats)
        return {request: one if fed == request.remaining else () for request, fed in plan.tokens.items()}

    def draft(self, request: Request) -> Sequence[int]:
        """None: nothing is guessed here."""
        return ()

    def forget(self, request: Request) -> None:
        """Nothing is kept."""

    def _seconds(self, plan: Plan, repeats: int) -> float:
        """Of one step; of steps in a row, the one in the middle, which is their mean: each adds a token to a row."""
        decodes = held = 0
        prompts = []
        for request, fed in plan.tokens.items():
            if fed == 1:
                decodes += 1
                held += request.num_computed_tokens
            else:
                prompts.append(Row(fed, request.num_computed_tokens, int(fed == request.remaining)))
        return self._times.seconds(decodes, held + decodes * (repeats - 1) // 2, prompts)


class ModelExecutor:
    """Runs a decoder over the blocks of a pool: one forward pass a step, the tokens of all requests end to end.

    Args:
        model: the decoder.
        pool: of the scheduler.
        n_vocab: ids from here on are padding of the embedding and never drawn.
        drafter: makes a drafter for a request; None for no speculation.
        buckets: numbers of requests for which ``kvlab compile --serving`` has compiled a decode step. A step in which
            nobody feeds more than a token takes the smallest that holds it.

    Raises:
        DeviceError: a step was not compiled for this model.
    """

    def __init__(
        self,
        model: GPT,
        pool: BlockPool,
        *,
        n_vocab: int | None = None,
        drafter: Callable[[], Drafter] | None = None,
        buckets: Sequence[int] = (),
    ) -> None:
        self.model, self.n_vocab = model, n_vocab or model.config.vocab_size
        self.storage = BlockStorage(model.config, pool, model.dtype, model.device)
        self._steps = [CompiledPagedStep(model, rows, self.storage) for rows in sorted(buckets)]
        self._new_drafter = drafter
        self._drafters: dict[Request, Drafter] = {}
        self._drafts: dict[Request, Draft] = {}
        self._streams: dict[Request, torch.Generator] = {}

    def require(self, request: Request) -> None:
        """Check that the tokens are known, and that they and the answer fit the model.

        Raises:
            RequestRefused: a token is unknown, the context is too short, or the request has no tokens at all.
        """
        if not isinstance(request, TokenRequest):
            raise RequestRefused(request.id, "it has no tokens; a model answers a TokenRequest")
        config = self.model.config
        if request.longest > config.max_seq_len:
            raise RequestRefused(
                request.id,
                f"{request.prompt_tokens} prompt tokens and up to {request.max_new_tokens} new ones are more than the "
                f"context of {config.name}, {config.max_seq_len}",
            )
        if unknown := [token for token in request.tokens if not 0 <= token < self.n_vocab]:
            raise RequestRefused(request.id, f"token ids {unknown[:3]} are not below {self.n_vocab}")

    def repeats(self, plan: Plan, seconds: float | None) -> int:
        """One: what comes next depends on what was said."""
        return 1

    def execute(self, plan: Plan) -> dict[Request, Sequence[int]]:
        """One forward pass. Nothing counts before the engine books it, so a pass that fails can be taken again."""
        self.storage.copy(plan.copies)
        spans, fed = list[Span](), list[int]()
        for request, tokens in plan.tokens.items():
            assert isinstance(request, TokenRequest)
            seen, draft = request.num_computed_tokens, list(request.draft)
            wanted = 1 + len(draft) if tokens == request.remaining + len(draft) else 0
            spans.append(Span(request.table, seen, tokens, wanted))
            fed += (request.tokens + draft)[seen : seen + tokens]
        return self._pick(list(plan.tokens), [span.wanted for span in spans], self._forward(spans, fed))

    def draft(self, request: Request) -> Sequence[int]:
        """What the request's drafter guesses."""
        if self._new_drafter is None:
            return ()
        assert isinstance(request, TokenRequest)
        if request not in self._drafters:
            self._drafters[request] = self._new_drafter()
        self._drafts[request] = self._drafters[request].propose(request.tokens, max(request.tokens_left - 1, 0))
        return self._drafts[request].tokens

    def forget(self, request: Request) -> None:
        """Drop its drafter and its stream of random numbers."""
        for kept in (self._drafters, self._drafts, self._streams):
            kept.pop(request, None)  # type: ignore[attr-defined]

    def _forward(self, spans: Sequence[Span], fed: Sequence[int]) -> Float[Tensor, "out vocab_size"]:
        batch = RaggedBatch(self.model.config, self.storage, spans)
        if all(span.new == 1 for span in spans):
            for step in self._steps:
                if step.rows >= len(spans):
                    return step(fed, batch)
        with torch.inference_mode():
            return self.model.run(torch.tensor([fed], device=batch.device), batch, batch.step(), last_only=True)[:, 0]

    def _pick(
        self, requests: Sequence[Request], wanted: Sequence[int], logits: Float[Tensor, "out vocab_size"]
    ) -> dict[Request, Sequence[int]]:
        """The tokens that follow: one for each request that is through its prompt, or what a draft comes to."""
        settings = [_sampling(request) for request, rows in zip(requests, wanted, strict=True) for _ in range(rows)]
        if not settings:
            return dict.fromkeys(requests, ())
        if all(each.greedy for each in settings) and max(wanted) == 1:
            newest = iter(most_likely(logits, self.n_vocab))
            return {request: (next(newest),) if rows else () for request, rows in zip(requests, wanted, strict=True)}
        probs = iter(probabilities(logits, settings, self.n_vocab).split([*wanted]))
        return {request: self._accept(request, rows) if len(rows := next(probs)) else () for request in requests}

    def _accept(self, request: Request, probs: Float[Tensor, "rows vocab_size"]) -> list[int]:
        made, kept = self._drafts.get(request), len(request.draft)
        draft = Draft([])
        if made is not None and kept:  # the scheduler may have shortened it
            draft = Draft(made.tokens[:kept], None if made.probs is None else made.probs[:kept])
        stream = self._streams.get(request)
        if stream is None:
            stream = self._streams[request] = stream_of(_sampling(request).seed)
        return accept(probs, draft, stream)


def _sampling(request: Request) -> Sampling:
    assert isinstance(request, TokenRequest)
    return request.sampling
