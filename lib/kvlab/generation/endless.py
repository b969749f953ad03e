"""An answer without an end: nothing that grows with it is kept."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvlab.cache import KVCache
from kvlab.errors import ConfigError
from kvlab.generation.generate import Phase, TokenStep, Work, decode, prefill, prepare
from kvlab.generation.prompts import Prompt
from kvlab.generation.sampling import Sampling
from kvlab.generation.text import TextStream
from kvlab.timing import Clock
from kvlab.weights import LoadedModel


def endless(
    model: LoadedModel,
    prompt: Prompt,
    *,
    cache: KVCache | str,
    sampling: Sampling | None = None,
    clock: Clock | None = None,
) -> Iterator[TokenStep]:
    """Answer for ever, or until you stop asking. Past the model's own end of an answer, too.

    Args:
        model: from :func:`kvlab.load`.
        prompt: text or token ids.
        cache: a kind such as ``streaming:4+252``, or a cache to continue from, which changes.
        sampling: greedy by default. A greedy answer without an end repeats itself sooner or later.
        clock: what time is; by default the device's.

    Raises:
        ConfigError: a cache of this kind ends.
        PromptError: the prompt is empty or holds an unknown id.
    """
    work = prepare(
        model, prompt, max_new_tokens=1, sampling=sampling, stop=(), ignore_eos=True, cache=cache, clock=clock
    )
    if not work.cache.endless:
        raise ConfigError(
            f"{type(work.cache).__name__} ends after {work.cache.max_len} tokens; an answer without an end needs a "
            "cache that rolls, such as streaming:4+252, and a model without learned positions"
        )
    return _steps(work, TextStream(model.tokenizer.decode))


def _steps(work: Work, text: TextStream) -> Iterator[TokenStep]:
    start = work.clock.now()
    logits = prefill(work.model, torch.tensor(work.prompts), work.cache)
    phase: Phase = "prefill"
    while True:
        [token] = work.sampler(logits)
        yield TokenStep(0, token, text.push(token), phase, work.clock.now() - start)
        logits = decode(work.model, torch.tensor([token]), work.cache)
        phase = "decode"
