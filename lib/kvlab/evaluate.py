"""What a change of format costs in quality: perplexity, agreement with the unchanged model, recall of a fact.

Perplexity is an average over a text, and an average hides what is rare. A cache that blurs old tokens loses a fact
long before it loses a percent of perplexity, so there are three measures.
"""

from __future__ import annotations

import random
from collections.abc import Callable
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


def contiguous(model: GPT, tokens: int) -> KVCache:
    """The plain cache, in the model's dtype.

    Args:
        model: the decoder.
        tokens: that it must hold.
    """
    return make_cache("contiguous", model.config, 1, tokens, model.dtype, model.device)


def logits_of(
    model: GPT, tokens: Int[Tensor, "time"], cache: CacheMaker = contiguous, chunk: int = 256
) -> Float[Tensor, "time vocab_size"]:
    """Logits after every token of a text, read in chunks, so that later ones see earlier ones through the cache.

    Args:
        model: the decoder.
        tokens: the text, at most as long as the model's context.
        cache: makes the cache that is judged.
        chunk: tokens of a pass. Within a pass keys are exact in every cache, so a small chunk judges more strictly.

    Raises:
        PromptError: the text is longer than the context, or has no token.
    """
    if not 0 < len(tokens) <= model.config.max_seq_len:
        raise PromptError(
            f"the text has {len(tokens)} tokens; {model.config.name} takes 1 to {model.config.max_seq_len}"
        )
    held = cache(model, len(tokens))
    with torch.inference_mode():
        parts = [model(part[None].to(model.device), held)[0].float() for part in tokens.split(chunk)]
    return torch.cat(parts)


def losses(
    model: GPT, tokens: Int[Tensor, "time"], cache: CacheMaker = contiguous, chunk: int = 256
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
    logits = logits_of(model, tokens, cache, chunk)
    return F.cross_entropy(logits[:-1], tokens[1:].to(logits.device), reduction="none")


def perplexity(model: GPT, tokens: Int[Tensor, "time"], cache: CacheMaker = contiguous, chunk: int = 256) -> float:
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
    loaded: LoadedModel, tokens: int, depth: float, seed: int = 0, cache: CacheMaker = contiguous, chunk: int = 256
) -> Recalled:
    """Hide a number in filler text and ask for it: a passkey test (arXiv:2305.16300).

    Args:
        loaded: the model with its tokenizer.
        tokens: length of the prompt, roughly.
        depth: where the number stands: 0 at the start, 1 right before the question.
        seed: of the number.
        cache: makes the cache that is judged.
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
    held = cache(loaded.model, len(prompt) + 8)
    pieces = torch.tensor(prompt[:-1]).split(chunk)
    with torch.inference_mode():
        for piece in pieces:
            loaded.model(piece[None].to(loaded.model.device), held, last_only=True)
    answer = generate(loaded, [prompt[-1]], max_new_tokens=8, ignore_eos=True, cache=held).run()
    return Recalled(len(prompt), depth, key, answer.text)
