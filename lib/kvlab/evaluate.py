"""What a change of format costs in quality: perplexity, agreement with the unchanged model, recall of a fact.

Perplexity is an average over a text, and an average hides what is rare. A cache that blurs old tokens loses a fact
long before it loses a percent of perplexity, so there are three measures.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from kvlab.cache import KVCache, make_cache
from kvlab.errors import PromptError
from kvlab.generation import generate
from kvlab.model import GPT
from kvlab.weights import LoadedModel

#: Makes a cache for a model, for so many tokens.
CacheMaker = Callable[[GPT, int], KVCache]

_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


def logits_of(
    model: GPT, tokens: Int[Tensor, "time"], cache: CacheMaker | str = "contiguous", chunk: int = 256
) -> Float[Tensor, "time vocab_size"]:
    """Logits after every token of a text, read in chunks, so that later ones see earlier ones through the cache.

    Args:
        model: the decoder.
        tokens: the text, at most as long as the model's context where the cache is not endless.
        cache: the cache that is judged: a kind, see :func:`kvlab.cache.make_cache`, or a function that makes one.
        chunk: tokens of a pass. Within a pass keys are exact in every cache, so a small chunk judges more strictly. A
            cache that evicts does so after a pass: its queries see up to a chunk more than its budget. And
            ``snapkv`` takes every pass of several tokens for a whole prompt: give it the prompt as one chunk.

    Raises:
        PromptError: the text is longer than the context, or has no token.
    """
    return torch.cat(list(_logits(model, tokens, cache, chunk)))


def _logits(
    model: GPT, tokens: Int[Tensor, "time"], cache: CacheMaker | str, chunk: int
) -> Iterator[Float[Tensor, "chunk vocab_size"]]:
    """Logits chunk by chunk: all of a long text would be gigabytes."""
    held, most = _make(cache, model, len(tokens)), model.config.max_seq_len
    if len(tokens) > most and not held.endless:
        raise PromptError(f"the text has {len(tokens)} tokens; {model.config.name} takes 1 to {most}")
    for part in tokens.split(chunk):
        with torch.inference_mode():
            logits = model(part[None].to(model.device), held)[0].float()
        yield logits


def _make(cache: CacheMaker | str, model: GPT, tokens: int) -> KVCache:
    """The cache that is judged, for one text."""
    if tokens < 1:
        raise PromptError(f"the text has {tokens} tokens; there is nothing to judge")
    if isinstance(cache, str):
        return make_cache(cache, model.config, 1, tokens, model.dtype, model.device)
    return cache(model, tokens)


def losses(
    model: GPT, tokens: Int[Tensor, "time"], cache: CacheMaker | str = "contiguous", chunk: int = 256
) -> Float[Tensor, "time-1"]:
    """Nats that the model pays for each token of a text but the first.

    Args:
        model: the decoder.
        tokens: the text.
        cache: see :func:`logits_of`.
        chunk: see :func:`logits_of`.

    Raises:
        PromptError: the text is longer than the context, or has fewer than two tokens.
    """
    if len(tokens) < 2:
        raise PromptError(f"the text has {len(tokens)} token(s); a loss needs a token and one before it")
    parts = zip(_logits(model, tokens, cache, chunk), tokens[1:].split(chunk), strict=False)
    # The last token has no next one: it may stand alone in a chunk of its own.
    paid = [F.cross_entropy(logits[: len(n)], n.to(logits.device), reduction="none") for logits, n in parts]
    return torch.cat(paid)


def perplexity(
    model: GPT, tokens: Int[Tensor, "time"], cache: CacheMaker | str = "contiguous", chunk: int = 256
) -> float:
    """exp of the mean loss: among how many equally likely tokens the model is undecided, on average.

    Args:
        model: the decoder.
        tokens: the text.
        cache: see :func:`logits_of`.
        chunk: see :func:`logits_of`.

    Raises:
        PromptError: see :func:`losses`.
    """
    return losses(model, tokens, cache, chunk).double().mean().exp().item()


def agreement(one: Float[Tensor, "time vocab_size"], other: Float[Tensor, "time vocab_size"]) -> float:
    """At which share of the positions two models would take the same next token.

    Args:
        one: logits, from :func:`logits_of`.
        other: of another model, or through another cache.
    """
    return (one.argmax(-1) == other.argmax(-1)).double().mean().item()


@dataclass(frozen=True)
class Recalled:
    """One question about a fact in a long prompt.

    Args:
        tokens: of the prompt.
        depth: where the fact stood: 0 at the start, 1 right before the question.
        key: the fact.
        answer: what the model said.
    """

    tokens: int
    depth: float
    key: str
    answer: str

    @property
    def right(self) -> bool:
        """Whether the answer holds the fact."""
        return self.key in self.answer


def recall(
    loaded: LoadedModel,
    tokens: int,
    depth: float,
    seed: int = 0,
    cache: CacheMaker | str = "contiguous",
    chunk: int = 256,
) -> Recalled:
    """Hide a number in filler text and ask for it: a passkey test (arXiv:2305.16300).

    Args:
        loaded: the model with its tokenizer.
        tokens: length of the prompt, roughly.
        depth: where the number stands: 0 at the start, 1 right before the question.
        seed: of the number.
        cache: see :func:`logits_of`.
        chunk: the prompt is read in such pieces, so that the question sees the fact through the cache.

    Raises:
        PromptError: the prompt does not fit the context.
    """
    key = str(random.Random(seed).randint(10_000, 99_999))
    start = loaded.tokenizer.encode("")  # what the family begins a prompt with, once
    fact, question, filler = (
        loaded.tokenizer.encode(text, special=False)
        for text in (
            f"The pass key is {key}. Remember it. {key} is the pass key. ",
            "What is the pass key? The pass key is",
            _FILLER,
        )
    )
    room = max(tokens - len(start) - len(fact) - len(question), 0)
    filler = (filler * (room // len(filler) + 1))[:room]
    before = round(depth * room)
    prompt = [*start, *filler[:before], *fact, *filler[before:], *question]
    held = _make(cache, loaded.model, len(prompt) + 8)
    pieces = torch.tensor(prompt[:-1]).split(chunk)
    with torch.inference_mode():
        for piece in pieces:
            loaded.model(piece[None].to(loaded.model.device), held, last_only=True)
    answer = generate(loaded, [prompt[-1]], max_new_tokens=8, ignore_eos=True, cache=held).run()
    return Recalled(len(prompt), depth, key, answer.text)
