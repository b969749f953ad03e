"""Speculative decoding: guess several tokens cheaply, check them in one pass, and keep the distribution as it was.

A pass over five tokens reads the weights once, as a pass over one does, so where decoding waits for memory a check of
four guesses costs little more than a step. A drafter guesses, the model reads the newest token and the guesses at
once, and :func:`accept` keeps as many as exact sampling allows (Leviathan et al., arXiv:2211.17192; Chen et al.,
arXiv:2302.01318). What comes out is distributed as without the drafter, whatever the drafter says: a bad one costs
time and never changes the answer's law.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvlab.cache import ContiguousCache
from kvlab.errors import ConfigError, SamplingError, at_least
from kvlab.generation.generate import Generation, Phase, TokenStep, Work, prefill, prepare
from kvlab.generation.prompts import Prompt
from kvlab.generation.sampling import Sampling, draw, probabilities, stream_of
from kvlab.model import GPT
from kvlab.timing import Clock
from kvlab.weights import LoadedModel

#: Between a request's stream of random numbers and its drafter's. In the low 32 bits, which are all that torch seeds.
_APART = 0x5DEECE66


@dataclass(frozen=True)
class Draft:
    """Guesses at the next tokens.

    Args:
        tokens: in order; may be empty.
        probs: the distribution that each was drawn from; None where the drafter was certain of each.

    Raises:
        SamplingError: there is not one distribution a token.
    """

    tokens: list[int]
    probs: Float[Tensor, "drafted vocab"] | None = None

    def __post_init__(self) -> None:
        if self.probs is not None and len(self.probs) != len(self.tokens):
            raise SamplingError(
                f"a draft of {len(self.tokens)} tokens has {len(self.probs)} distributions; give one a token, or None"
            )


@runtime_checkable
class Drafter(Protocol):
    """Guesses for one request; each request has its own."""

    def propose(self, tokens: Sequence[int], most: int) -> Draft:
        """Guess how a sequence goes on.

        Args:
            tokens: prompt and answer so far, the newest token included. Each call continues what earlier calls were
                given, not what they answered: guesses may have been rejected.
            most: the longest draft that is of use; 0 or more.
        """


class NGramDrafter:
    """Guesses that the text repeats itself: what followed when its last tokens stood there before.

    Known as prompt lookup; free of any model. The longest n-gram at the end that has occurred before is looked up, the
    last occurrence wins, and what followed it is the draft. Where that runs into the end, it goes on with its own
    guesses: a loop is continued. vLLM calls the settings ``num_speculative_tokens``, ``prompt_lookup_max`` and
    ``prompt_lookup_min``.

    Args:
        drafted: tokens a draft.
        longest: tokens of the n-gram that is tried first.
        shortest: tokens of the n-gram that is tried last. Short ones match often and guess badly.

    Raises:
        ConfigError: a number is below 1, or the longest is shorter than the shortest.
    """

    def __init__(self, drafted: int = 4, longest: int = 3, shortest: int = 1) -> None:
        self.drafted = at_least(1, "drafted", drafted)
        self.shortest = at_least(1, "shortest", shortest)
        self.longest = at_least(shortest, "longest", longest)
        # Where the token after each n-gram stands. An index: a scan of the whole context each time costs as much again
        # with every token of it.
        self._after: dict[tuple[int, ...], int] = {}
        self._read = 0

    def propose(self, tokens: Sequence[int], most: int) -> Draft:
        """What followed the last tokens before; empty where they are new.

        Args:
            tokens: prompt and answer so far.
            most: the longest draft that is of use.
        """
        if len(tokens) < self._read:  # another sequence
            self._after, self._read = {}, 0
        self._index(tokens)
        for n in range(min(self.longest, len(tokens)), self.shortest - 1, -1):
            if (start := self._after.get(tuple(tokens[-n:]))) is not None:
                period = len(tokens) - start
                return Draft([tokens[start + i % period] for i in range(min(self.drafted, most))])
        return Draft([])

    def _index(self, tokens: Sequence[int]) -> None:
        """Note the n-grams that have a token after them; the one at the very end has none yet."""
        for end in range(max(self._read, 1), len(tokens)):
            for n in range(self.shortest, min(self.longest, end) + 1):
                self._after[tuple(tokens[end - n : end])] = end
        self._read = len(tokens)


class ModelDrafter:
    """Guesses with a smaller model of the same vocabulary, which keeps a cache of its own.

    Args:
        model: the draft.
        drafted: tokens a draft; each costs a pass of the draft.
        sampling: how it draws. Exactness does not depend on it; the acceptance does, and is best where it is the
            target's. Its seed may be the target's too: the two streams are kept apart.

    Raises:
        ConfigError: ``drafted`` is below 1.
    """

    def __init__(self, model: GPT, drafted: int = 4, sampling: Sampling = Sampling()) -> None:  # noqa: B008 - frozen
        self.model, self.drafted, self.sampling = model, at_least(1, "drafted", drafted), sampling
        # With the numbers that accept draws, a guess would decide its own acceptance, and the answer would be skewed.
        self._stream = stream_of(None if sampling.seed is None else sampling.seed ^ _APART)
        self._cache = ContiguousCache(model.config, 1, 1, model.dtype, model.device)
        self._fed: list[int] = []

    def propose(self, tokens: Sequence[int], most: int) -> Draft:
        """A continuation drawn from the draft model; shorter, or empty, where its context ends.

        Args:
            tokens: prompt and answer so far.
            most: the longest draft that is of use.
        """
        length = min(self.drafted, most, self.model.config.max_seq_len - len(tokens) + 1)
        if length < 1:
            return Draft([])
        known = self._rewind(tokens)
        self._make_room(len(tokens) + length - 1)
        logits = self._read(tokens[known:])
        guesses, rows = list[int](), list[Tensor]()
        while True:
            rows.append(probabilities(logits, [self.sampling]))
            guesses += draw(rows[-1], torch.rand(1, 1, generator=self._stream).to(logits.device))
            if len(guesses) == length:
                return Draft(guesses, torch.cat(rows))
            logits = self._read(guesses[-1:])

    def _rewind(self, tokens: Sequence[int]) -> int:
        """Forget rejected guesses; how many tokens stay. The newest is always read: its logits are needed."""
        pairs = zip(self._fed, tokens[:-1], strict=False)
        known = next((i for i, (fed, token) in enumerate(pairs) if fed != token), min(len(self._fed), len(tokens) - 1))
        self._cache.crop([known])
        del self._fed[known:]
        return known

    def _make_room(self, length: int) -> None:
        """A cache of at least this length, doubled when it is outgrown: nobody says how long the answer will be."""
        if length <= self._cache.max_len:
            return
        old, config = self._cache, self.model.config
        self._cache = ContiguousCache(config, 1, min(2 * length, config.max_seq_len), old.dtype, old.device)
        self._cache.storage[..., : old.max_len, :] = old.storage
        self._cache.rows_seen = list(old.rows_seen)

    def _read(self, tokens: Sequence[int]) -> Float[Tensor, "1 vocab"]:
        logits = prefill(self.model, torch.tensor([list(tokens)]), self._cache)
        self._fed += tokens
        return logits


def truncated(model: GPT, n_layer: int) -> GPT:
    """The first layers of a model under its own norm and head, as a draft of it: the weights are shared.

    Args:
        model: the decoder; wide or quantized.
        n_layer: layers that stay.

    Raises:
        ConfigError: the model does not have so many, or less than one shall stay.
    """
    config = model.config
    if not 1 <= n_layer <= config.n_layer:
        raise ConfigError(f"n_layer is {n_layer}; {config.name} has {config.n_layer} layers, keep 1 or more of them")
    with torch.device("meta"):  # shapes without memory: every part is replaced by the model's
        short = GPT(config.with_(name=f"{config.name}-{n_layer}", n_layer=n_layer, windows=config.windows[:n_layer]))
    short.embedding, short.position, short.rope = model.embedding, model.position, model.rope
    short.blocks = nn.ModuleList(model.blocks[:n_layer])
    short.norm, short.head = model.norm, model.head
    return short.train(model.training)


def accept(probs: Float[Tensor, "rows vocab"], draft: Draft, stream: torch.Generator) -> list[int]:
    """Decide how much of a draft stays, and draw the token after it, so that the outcome is distributed as ``probs``.

    Args:
        probs: the target's distributions: of each drafted token, and of the one after the draft.
        draft: what was guessed.
        stream: of this request, on the CPU. Not the drafter's.

    Returns:
        1 to ``drafted + 1`` tokens: those that stay, and one of the target's own.

    Raises:
        SamplingError: the numbers of rows or the vocabularies differ, or the draft holds an unknown token or one that
            its own distribution excludes.
    """
    return settle(probs, draft, torch.rand(len(draft.tokens) + 1, generator=stream))


def settle(probs: Float[Tensor, "rows vocab"], draft: Draft, uniform: Float[Tensor, "numbers"]) -> list[int]:
    """What :func:`accept` does with given random numbers.

    A token of probability p that was drawn with probability q stays with probability min(1, p / q). At the first that
    does not, the answer goes on with a draw from what p has more than q, max(p - q, 0) made to sum to 1; after a draft
    that stays whole, with a draw from the last row (arXiv:2211.17192, algorithm 1; appendix A.1 says why it is exact).

    Args:
        probs: the target's distributions: of each drafted token, and of the one after the draft.
        draft: what was guessed.
        uniform: numbers in [0, 1): one for each drafted token, one for the last draw.

    Raises:
        SamplingError: as :func:`accept`.
    """
    _require_fit(probs, draft)
    kept = _kept(probs[:-1], draft, uniform[:-1])
    row = probs[kept]
    if kept < len(draft.tokens):
        row = _residual(row, draft, kept)
    [last] = draw(row[None], uniform[-1:, None].to(row.device))
    return [*draft.tokens[:kept], last]


def _require_fit(probs: Float[Tensor, "rows vocab"], draft: Draft) -> None:
    rows, vocab = probs.shape
    if rows != len(draft.tokens) + 1:
        raise SamplingError(
            f"there are {rows} distributions for a draft of {len(draft.tokens)} tokens; "
            "give one for each of them, and one for the token after them"
        )
    if draft.probs is not None and draft.probs.shape[1] != vocab:
        raise SamplingError(
            f"the draft's vocabulary has {draft.probs.shape[1]} tokens, the target's {vocab}; "
            "they must be one: choose a draft of the same family"
        )
    _require_known(draft, vocab)


def _require_known(draft: Draft, vocab: int) -> None:
    if unknown := [token for token in draft.tokens if not 0 <= token < vocab]:
        raise SamplingError(f"the draft holds the id {unknown[0]}; the target's ids are 0 to {vocab - 1}")


def _kept(probs: Float[Tensor, "drafted vocab"], draft: Draft, uniform: Float[Tensor, "drafted"]) -> int:
    """How many tokens stay, from the first on."""
    if not draft.tokens:
        return 0
    at = torch.tensor(draft.tokens, device=probs.device)[:, None]
    p = probs.gather(1, at)[:, 0].cpu()
    q = torch.ones_like(p) if draft.probs is None else draft.probs.to(probs.device).gather(1, at)[:, 0].cpu()
    if not bool((q > 0).all()):
        impossible = draft.tokens[int(torch.where(q > 0, 0, 1).argmax())]
        raise SamplingError(
            f"the draft holds the token {impossible}, and its own distribution gives it probability 0; "
            "a drafter must return the distributions that it drew from"
        )
    # u < p / q, without a division: what is equally likely to both always stays.
    return int((uniform * q < p).long().cumprod(0).sum())


def _residual(p: Float[Tensor, "vocab"], draft: Draft, index: int) -> Float[Tensor, "vocab"]:
    """What the target has more than the draft, not scaled: ``draw`` does not mind."""
    if draft.probs is None:
        more = p.clone()
        more[draft.tokens[index]] = 0
    else:
        more = (p - draft.probs[index].to(p.device)).clamp(min=0)
    # Where the two are the same, only rounding can have rejected: the target's own distribution is what is left.
    return more if bool(more.any()) else p


class Speculation(Generation):
    """An answer in the making, several tokens a pass: iterate over its tokens, or ``run()`` it to the end.

    The tokens of a pass come at the same time, and count in ``tokens`` and ``text`` when the first is handed out.

    Args:
        work: from :func:`kvlab.generation.generate.prepare`; of one row.
        drafter: of this request alone.
    """

    def __init__(self, work: Work, drafter: Drafter) -> None:
        super().__init__(work)
        self.passes = self.drafted = self.accepted = 0
        self._drafter, self._settings = drafter, work.sampler.settings[0]
        self._stream = stream_of(self._settings.seed)

    @property
    def acceptance(self) -> float | None:
        """Fraction of the drafted tokens that are in the answer; None before anything was drafted.

        What was drafted after a rejected token counts as drafted too, so this is below the chance that a token stays.
        """
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_pass(self) -> float | None:
        """Tokens of the answer a verification pass, the first token aside; None before the first such pass."""
        return (len(self.tokens[0]) - 1) / self.passes if self.passes else None

    def _generate(self) -> Iterator[TokenStep]:
        start = self._clock.now()
        row, [prompt] = self._rows[0], self._prompts
        logits = prefill(self._model, torch.tensor([prompt]), self.cache)
        yield from self._take(logits, Draft([]), "prefill", start)
        while row.finish is None:
            # A pass yields a token more than its draft at most.
            most = row.limit - len(row.tokens) - 1
            draft = self._drafter.propose(prompt + row.tokens, most)
            if len(draft.tokens) > most:
                raise SamplingError(f"the drafter was asked for {most} tokens at most and gave {len(draft.tokens)}")
            _require_known(draft, self._model.config.vocab_size)
            self.passes += 1
            yield from self._take(self._verify(row.tokens[-1:] + draft.tokens), draft, "decode", start)

    def _verify(self, tokens: list[int]) -> Float[Tensor, "rows vocab"]:
        """Logits after each token, in one pass."""
        with torch.inference_mode():
            return self._model(torch.tensor([tokens], device=self._model.device), self.cache)[0]

    def _take(self, logits: Float[Tensor, "rows vocab"], draft: Draft, phase: Phase, start: float) -> list[TokenStep]:
        """Put what stays into the answer, up to its end, and take the rest out of the cache."""
        probs = probabilities(logits, [self._settings] * len(logits), self._sampler.n_vocab)
        verdict, row, steps = accept(probs, draft, self._stream), self._rows[0], list[TokenStep]()
        now = self._clock.now() - start
        while row.finish is None and len(steps) < len(verdict):
            steps.append(self._add(0, verdict[len(steps)], phase, now))
        # The newest token has not been fed yet.
        self.cache.crop([len(self._prompts[0]) + len(row.tokens) - 1])
        self.timing.kv_bytes = self.cache.used_bytes
        self.drafted += len(draft.tokens)
        self.accepted += min(len(steps), len(verdict) - 1)
        return steps


def speculate(
    model: LoadedModel | GPT,
    prompt: Prompt,
    drafter: Drafter,
    *,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    clock: Clock | None = None,
) -> Speculation:
    """Answer one prompt as :func:`kvlab.generate` does, with the guesses of a drafter checked several at a time.

    Greedy tokens are those of ``generate``, as far as a pass over several tokens rounds like a pass over one; sampled
    ones are other draws from the same distribution.

    Args:
        model: from ``kvlab.load``, or a bare decoder (then the prompt is token ids and there is no text).
        prompt: text or token ids.
        drafter: of this request alone.
        max_new_tokens: a limit; the model's context is another.
        sampling: of the model; greedy by default. The drafter may draw in another way.
        stop: texts that end the answer and are not part of it.
        ignore_eos: go on past end-of-sequence ids, as benchmarks do.
        clock: what time is; by default the device's.

    Raises:
        ConfigError: a draft model's vocabulary is not the model's.
        PromptError: the prompt is empty, too long for the context, or holds an unknown id.
        SamplingError: while it runs, the drafter gave more than it was asked for, or what cannot be a draft.
    """
    work = prepare(
        model,
        [prompt],
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop=stop,
        ignore_eos=ignore_eos,
        cache="contiguous",
        clock=clock,
    )
    if isinstance(drafter, ModelDrafter) and drafter.model.config.vocab_size != work.model.config.vocab_size:
        raise ConfigError(
            f"the draft {drafter.model.config.name} has a vocabulary of {drafter.model.config.vocab_size}, "
            f"{work.model.config.name} one of {work.model.config.vocab_size}; choose a draft of the same family"
        )
    return Speculation(work, drafter)
