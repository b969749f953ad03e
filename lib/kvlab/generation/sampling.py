"""From logits to a token: greedy, temperature, top-k, top-p, min-p, with a seed for each request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvlab.errors import KvlabError, SamplingError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one request picks its tokens. The filters apply in the order of the arguments.

    Args:
        temperature: divides the logits; 0 takes the most likely token, whatever the filters say.
        top_k: keep the k most likely tokens; None keeps all (arXiv:1805.04833).
        top_p: keep the smallest set of likely tokens whose probability reaches p, at least one (arXiv:1904.09751).
        min_p: drop tokens less likely than this fraction of the most likely one (arXiv:2407.01082).
        seed: of this request alone, so that its tokens do not depend on its neighbours; None draws one.

    Raises:
        SamplingError: a value is out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise SamplingError(f"temperature is {self.temperature}; it must be a number of 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise SamplingError(f"top_k is {self.top_k}; keep at least 1 token, or leave it out to keep all")
        if not 0 < self.top_p <= 1:
            raise SamplingError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (1 keeps all)")
        if not 0 <= self.min_p <= 1:
            raise SamplingError(f"min_p is {self.min_p}; it must be between 0 (keeps all) and 1")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise SamplingError(f"seed is {self.seed}; it must be a whole number from 0 to 2**63 - 1")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0


def probabilities(
    logits: Float[Tensor, "batch vocab"], settings: Sequence[Sampling], n_vocab: int | None = None
) -> Float[Tensor, "batch vocab"]:
    """The distribution that each row's token is drawn from, float32.

    Args:
        logits: of the next token.
        settings: one a row.
        n_vocab: ids from here on are padding of the embedding and get probability 0.
    """
    logits = _finite(logits, n_vocab)
    greedy = torch.zeros_like(logits).scatter_(1, logits.argmax(dim=1, keepdim=True), 1.0)
    if all(s.greedy for s in settings):
        return greedy
    column = lambda values: torch.tensor(values, dtype=torch.float32, device=logits.device)[:, None]  # noqa: E731
    # The largest logit is subtracted before the division: a temperature of 1e-6 must not overflow.
    smallest = torch.finfo(torch.float32).tiny
    temperature = column([1.0 if s.greedy else max(s.temperature, smallest) for s in settings])
    probs = ((logits - logits.amax(dim=1, keepdim=True)) / temperature).softmax(dim=1)
    if any(s.top_k is not None or s.top_p < 1 for s in settings):
        top_k = column([s.top_k or probs.shape[1] for s in settings])
        probs = _keep_likely(probs, logits, top_k, column([s.top_p for s in settings]))
    probs = torch.where(probs < column([s.min_p for s in settings]) * probs.amax(dim=1, keepdim=True), 0.0, probs)
    probs = torch.where(column([float(s.greedy) for s in settings]).bool(), greedy, probs)
    return probs / probs.sum(dim=1, keepdim=True)


def _finite(logits: Float[Tensor, "batch vocab"], n_vocab: int | None) -> Float[Tensor, "batch vocab"]:
    """Float32 logits without the padded ids; NaN is an error here rather than a random token."""
    logits = logits.float()
    if n_vocab is not None and n_vocab < logits.shape[1]:
        logits = logits.clone()
        logits[:, n_vocab:] = -torch.inf
    if not logits.amax(dim=1).isfinite().all():
        raise KvlabError("the logits are not finite; the weights are damaged or overflow in this dtype, try float32")
    return logits


def _keep_likely(
    probs: Float[Tensor, "batch vocab"],
    logits: Float[Tensor, "batch vocab"],
    top_k: Float[Tensor, "batch 1"],
    top_p: Float[Tensor, "batch 1"],
) -> Float[Tensor, "batch vocab"]:
    """Zero what lies outside the top k, then what lies outside the top p of the rest."""
    # By the logits: softmax rounds close ones to the same probability, and the most likely token must come first.
    order = logits.argsort(dim=1, descending=True, stable=True)
    ranked = probs.gather(1, order)
    rank = torch.arange(probs.shape[1], device=probs.device)
    ranked = torch.where(rank < top_k, ranked, 0.0)
    # A token stays while those before it have not reached p; so the first stays, and the one that reaches p.
    before = ranked.cumsum(dim=1) - ranked
    ranked = torch.where((before < top_p * ranked.sum(dim=1, keepdim=True)) | (rank == 0), ranked, 0.0)
    return torch.zeros_like(probs).scatter_(1, order, ranked)


class Sampler:
    """Draws the next token of each row, each row from its own stream of random numbers.

    Args:
        settings: one a row.
        n_vocab: ids from here on are never drawn.
    """

    def __init__(self, settings: Sequence[Sampling], n_vocab: int | None = None) -> None:
        self.settings, self.n_vocab = list(settings), n_vocab
        self._streams = [stream_of(s.seed) for s in settings]

    def __call__(self, logits: Float[Tensor, "batch vocab"]) -> list[int]:
        """One token id a row."""
        if all(s.greedy for s in self.settings):
            return most_likely(logits, self.n_vocab)
        draws = torch.stack([torch.rand(1, generator=stream) for stream in self._streams])
        return draw(probabilities(logits, self.settings, self.n_vocab), draws.to(logits.device))


def most_likely(logits: Float[Tensor, "batch vocab"], n_vocab: int | None = None) -> list[int]:
    """The token of the largest logit of each row: what a temperature of 0 picks.

    Args:
        logits: of the next token.
        n_vocab: ids from here on are never picked.
    """
    return _finite(logits, n_vocab).argmax(dim=1).tolist()


def draw(probs: Float[Tensor, "batch vocab"], uniform: Float[Tensor, "batch 1"]) -> list[int]:
    """The token whose slice of [0, 1) each uniform number falls into.

    Args:
        probs: a distribution a row.
        uniform: numbers in [0, 1).
    """
    reached = probs.cumsum(dim=1)
    chosen = (reached <= uniform * reached[:, -1:]).sum(dim=1)
    # Rounding may push a number that is almost 1 past the end; the last token that has a chance takes it.
    places = torch.arange(probs.shape[1], device=probs.device)
    last = torch.where(probs > 0, places, 0).amax(dim=1)
    return torch.minimum(chosen, last).tolist()


def stream_of(seed: int | None) -> torch.Generator:
    """Random numbers from a CPU, whatever the device: the same seed then gives the same tokens everywhere.

    Args:
        seed: where the stream begins; None draws a beginning.
    """
    stream = torch.Generator()
    if seed is None:
        stream.seed()
    else:
        stream.manual_seed(seed)
    return stream
