"""Prompts on their way into the model: as ids, checked against the context, padded to a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvlab.config import ModelConfig
from kvlab.errors import PromptError
from kvlab.weights import Tokenizer

Prompt = str | Sequence[int]


def token_rows(prompts: Prompt | Sequence[Prompt], tokenizer: Tokenizer | None, vocab_size: int) -> list[list[int]]:
    """Every prompt as a list of ids.

    Args:
        prompts: text or ids, one or a list.
        tokenizer: for text; None where there is none.
        vocab_size: ids from here on are unknown.

    Raises:
        PromptError: there is no prompt, one is empty, or one holds an unknown id.
    """
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    listed: list[Prompt] = [prompts] if single else list(prompts)  # type: ignore[list-item,arg-type]
    if not listed:
        raise PromptError("there is no prompt; give at least one")
    return [_ids(prompt, row, tokenizer, vocab_size) for row, prompt in enumerate(listed)]


def _ids(prompt: Prompt, row: int, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise PromptError(f"prompt {row} is text, but a bare decoder has no tokenizer; pass token ids")
        prompt = tokenizer.encode(prompt)
    if not len(prompt):
        raise PromptError(f"prompt {row} is empty; a model needs at least one token to continue")
    if unknown := [i for i in prompt if not 0 <= i < vocab_size]:
        raise PromptError(f"prompt {row} holds the id {unknown[0]}; the model's ids are 0 to {vocab_size - 1}")
    return list(prompt)


def limits(
    config: ModelConfig,
    rows: Sequence[Sequence[int]],
    seen: Sequence[int],
    max_new_tokens: int,
    endless: bool = False,
) -> list[int]:
    """How many tokens each row may get: the context holds the prompt and all new tokens but the last.

    Args:
        config: the model's shape.
        rows: prompts as ids.
        seen: tokens that the cache has of each row already.
        max_new_tokens: what was asked for.
        endless: the cache goes on past the context.

    Raises:
        PromptError: a prompt does not fit the context, or less than one token was asked for.
    """
    if max_new_tokens < 1:
        raise PromptError(f"max_new_tokens is {max_new_tokens}; prefill itself yields one token, so ask for 1 or more")
    if len(seen) != len(rows):
        raise PromptError(f"there are {len(rows)} prompts for a cache of {len(seen)} rows; make one with as many rows")
    if endless:
        return [max_new_tokens] * len(rows)
    context = config.max_seq_len
    for index, (row, before) in enumerate(zip(rows, seen, strict=True)):
        if before + len(row) > context:
            raise PromptError(
                f"prompt {index} comes to {before + len(row)} tokens, more than the context of {config.name}, "
                f"{context}; shorten it by {before + len(row) - context} tokens"
            )
    room = [context - before - len(row) + 1 for row, before in zip(rows, seen, strict=True)]
    return [min(max_new_tokens, most) for most in room]


def padded(rows: Sequence[Sequence[int]]) -> tuple[Int[Tensor, "batch time"], Bool[Tensor, "batch time"]]:
    """Rows padded on the right to one length, and which of it is real.

    Args:
        rows: prompts as ids.
    """
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = torch.tensor(ids)
    return tokens, torch.arange(tokens.shape[1]) < lengths[:, None]
