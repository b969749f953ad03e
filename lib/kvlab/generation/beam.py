"""Beam search: keep the few likeliest beginnings instead of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvlab.cache import KVCache, make_cache
from kvlab.errors import SamplingError
from kvlab.generation.generate import decode, prefill
from kvlab.generation.prompts import limits, token_rows
from kvlab.model import GPT


@dataclass(frozen=True)
class Beam:
    """One answer that beam search found.

    Args:
        tokens: its ids, an end-of-sequence id included.
        log_prob: of all of them together, nats.
        finished: whether it ended with an end-of-sequence id.
    """

    tokens: tuple[int, ...]
    log_prob: float
    finished: bool

    def score(self, length_penalty: float) -> float:
        """Log probability over length to a power: 0 favours short answers, 1 compares tokens' averages."""
        return self.log_prob / len(self.tokens) ** length_penalty


def beam_search(
    model: GPT,
    prompt: Sequence[int],
    *,
    n_beams: int = 4,
    max_new_tokens: int = 32,
    length_penalty: float = 1.0,
    eos_token_ids: Sequence[int] = (),
) -> list[Beam]:
    """The likeliest answers, best first. Every pass runs ``n_beams`` rows, and the cache is reordered after each.

    Args:
        model: the decoder.
        prompt: token ids.
        n_beams: beginnings that are kept.
        max_new_tokens: length at which the search ends; the context is another limit.
        length_penalty: see :meth:`Beam.score`.
        eos_token_ids: ids that finish a beam.

    Raises:
        SamplingError: the number of beams is below 1.
        PromptError: the prompt is empty, too long, or holds an unknown id; or less than one token was asked for.
    """
    if n_beams < 1:
        raise SamplingError(f"n_beams is {n_beams}; keep 1 or more (1 is greedy)")
    [row] = token_rows([prompt], None, model.config.vocab_size)
    [max_new_tokens] = limits(model.config, [row], [0], max_new_tokens)
    room = len(row) + max_new_tokens - 1
    cache = make_cache("contiguous", model.config, 1, room, model.dtype, model.device)
    log_probs = prefill(model, torch.tensor([row]), cache).float().log_softmax(dim=1)
    alive, finished = [Beam((), 0.0, False)], []
    while True:
        parents, beams = _extend(alive, log_probs, n_beams, frozenset(eos_token_ids))
        finished += [beam for beam in beams if beam.finished]
        kept = [(parent, beam) for parent, beam in zip(parents, beams, strict=True) if not beam.finished][:n_beams]
        alive = [beam for _, beam in kept]
        if not alive or len(alive[0].tokens) == max_new_tokens or _settled(alive, finished, n_beams, length_penalty):
            break
        log_probs = _advance(model, cache, [parent for parent, _ in kept], alive)
    return sorted(finished + alive, key=lambda beam: -beam.score(length_penalty))[:n_beams]


def _extend(
    alive: list[Beam], log_probs: Float[Tensor, "beams vocab"], n_beams: int, eos: frozenset[int]
) -> tuple[list[int], list[Beam]]:
    """The best continuations, best first: enough that ``n_beams`` go on even if each beam's best is its end."""
    total = log_probs + torch.tensor([[beam.log_prob] for beam in alive], device=log_probs.device)
    most = min(n_beams * (1 + len(eos)), total.numel())
    scores, flat = total.flatten().topk(most)
    parents, tokens = (flat // total.shape[1]).tolist(), (flat % total.shape[1]).tolist()
    beams = [
        Beam((*alive[parent].tokens, token), score, token in eos)
        for parent, token, score in zip(parents, tokens, scores.tolist(), strict=True)
    ]
    return parents, beams


def _settled(alive: list[Beam], finished: list[Beam], n_beams: int, length_penalty: float) -> bool:
    """Whether no living beam can still overtake: without a length penalty a beam only ever loses probability."""
    if len(finished) < n_beams or length_penalty > 0:
        return False
    worst = sorted(beam.score(length_penalty) for beam in finished)[-n_beams]
    return alive[0].score(length_penalty) <= worst


def _advance(model: GPT, cache: KVCache, parents: list[int], alive: list[Beam]) -> Float[Tensor, "beams vocab"]:
    """One decode pass for all living beams, each on its parent's cache row."""
    cache.select(parents)
    newest = torch.tensor([beam.tokens[-1] for beam in alive])
    return decode(model, newest, cache).float().log_softmax(dim=1)
