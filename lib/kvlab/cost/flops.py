"""Floating-point operations of a forward pass; a multiply-add counts as two.

A linear layer costs 2 operations a weight and token. Attention costs, for each visible (query, key) pair and head, 2 an
element of the key for the score and 2 an element of the value for the mix. Norms, rotations and softmax are left out:
they cost bytes and launches, hardly operations. Training papers count the same way (arXiv:2001.08361, section 2.1), but
without the causal mask; the figures here count only the pairs that the rule lets through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.config import MLA, ModelConfig, Shape, shape_of
from kvlab.cost.parameters import parameters
from kvlab.errors import ConfigError, at_least


@dataclass(frozen=True)
class Row:
    """What one request contributes to a forward pass: a prompt, a chunk of one, or a decode step.

    Args:
        new: tokens that are fed.
        past: tokens that its cache holds already.
        logits: positions that go through the LM head.

    Raises:
        ConfigError: no token is fed, or a number is impossible.
    """

    new: int
    past: int = 0
    logits: int = 1

    def __post_init__(self) -> None:
        if self.new < 1:
            raise ConfigError(f"new is {self.new}; a row of a pass feeds 1 token or more")
        if self.past < 0:
            raise ConfigError(f"past is {self.past}; a cache holds 0 tokens or more")
        if not 0 <= self.logits <= self.new:
            raise ConfigError(f"logits is {self.logits}; of {self.new} new tokens, 0 to {self.new} go through the head")


def prefill_pass(prompt_tokens: int, batch: int = 1) -> list[Row]:
    """The rows of a pass that reads whole prompts.

    Args:
        prompt_tokens: of each prompt.
        batch: prompts in the pass.

    Raises:
        ConfigError: a number is below 1.
    """
    return [Row(prompt_tokens)] * at_least(1, "batch", batch)


def decode_pass(past: int, batch: int = 1) -> list[Row]:
    """The rows of a decode step.

    Args:
        past: tokens that each cache holds before the step.
        batch: requests in the step.

    Raises:
        ConfigError: a number is impossible.
    """
    return [Row(1, past)] * at_least(1, "batch", batch)


def middle_step(prompt_tokens: int, new_tokens: int, batch: int = 1) -> list[Row]:
    """The decode step in the middle of the answers, which stands for all of them: a step grows evenly with its cache.

    The last token of an answer is sampled and never fed.

    Args:
        prompt_tokens: of each request.
        new_tokens: of each answer.
        batch: requests in the step.

    Raises:
        ConfigError: a number is impossible.
    """
    return decode_pass(prompt_tokens + max(new_tokens - 2, 0) // 2, batch)


def chunks(prompt_tokens: int, chunk: int) -> list[Row]:
    """A prompt in pieces, one row a pass, in order; only the last one needs logits.

    Args:
        prompt_tokens: of the prompt.
        chunk: tokens of a piece, the last one may be shorter.

    Raises:
        ConfigError: a number is below 1.
    """
    at_least(1, "prompt_tokens", prompt_tokens)
    starts = range(0, prompt_tokens, at_least(1, "chunk", chunk))
    sizes = [min(chunk, prompt_tokens - start) for start in starts]
    return [Row(size, start, int(start + size == prompt_tokens)) for start, size in zip(starts, sizes, strict=True)]


@dataclass(frozen=True)
class Flops:
    """Operations of a pass.

    Args:
        linear: projections and MLPs (of experts, those that the tokens visit).
        attention: scores and mixes.
        head: the LM head.
    """

    linear: int
    attention: int
    head: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.linear + self.attention + self.head

    @property
    def attention_share(self) -> float:
        """Attention's part of the total, 0 to 1."""
        return self.attention / self.total


def flops(model: Shape, rows: Sequence[Row]) -> Flops:
    """Operations of one forward pass over a batch of rows, prompts and decode steps mixed as they come.

    Args:
        model: a preset name, a Hub config, or a shape.
        rows: what each request contributes.

    Raises:
        ConfigError: the model is unknown, or there is no row.
    """
    config = shape_of(model)
    count = parameters(config)
    return Flops(
        linear=2 * (count.attention + count.active_mlp) * sum(row.new for row in require_rows(rows)),
        attention=sum(attention_flops(config, rows, window) for window in config.windows),
        head=2 * config.vocab_size * config.hidden_size * sum(row.logits for row in rows),
    )


def attention_flops(config: ModelConfig, rows: Sequence[Row], window: int | None) -> int:
    """Operations of attention in one layer.

    Args:
        config: the model's shape.
        rows: what each request contributes.
        window: of the layer.
    """
    if config.mla is not None:
        return sum(_latent_attention_flops(config, config.mla, row) for row in rows)
    return 4 * config.n_head * config.head_dim * sum(visible_pairs(row.new, row.past, window) for row in rows)


def _latent_attention_flops(config: ModelConfig, mla: MLA, row: Row) -> int:
    """The cheaper of two ways (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).

    Either keys and values come out of the latents again, those of the past included, or the matrix that would bring
    them out is applied to the query and to the mix, and attention runs on the latents. A prompt takes the first way,
    a decode step the second.
    """
    pairs = visible_pairs(row.new, row.past)
    out_again = row.past * mla.kv_lora_rank * (config.head_dim - mla.rope_head_dim + mla.v_head_dim)
    on_heads = pairs * (config.head_dim + mla.v_head_dim) + out_again
    on_latents = pairs * (2 * mla.kv_lora_rank + mla.rope_head_dim)
    return 2 * config.n_head * min(on_heads, on_latents)


def require_rows(rows: Sequence[Row]) -> Sequence[Row]:
    """The rows of a pass, after checking that there is one.

    Args:
        rows: what each request contributes.

    Raises:
        ConfigError: there is none.
    """
    if not rows:
        raise ConfigError("a pass has no rows; give it one or more")
    return rows


def visible_pairs(new: int, past: int = 0, window: int | None = None) -> int:
    """(query, key) pairs that the attention rule lets through, in one row.

    Args:
        new: queries, the last of the sequence.
        past: keys before them.
        window: tokens a query sees, itself included; None for all.
    """
    if window is None or past + new <= window:
        return new * past + new * (new + 1) // 2
    growing = max(min(window - past, new), 0)
    return visible_pairs(growing, past) + (new - growing) * window


def tokens_read_again(prompt_tokens: int, chunk: int) -> int:
    """Cached tokens that a chunked prefill reads: each chunk reads everything before it.

    Args:
        prompt_tokens: of the prompt.
        chunk: tokens of a piece.

    Raises:
        ConfigError: a number is below 1.
    """
    return sum(row.past for row in chunks(prompt_tokens, chunk))
