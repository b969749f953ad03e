"""The oracle of windows and evictions: one pass in float64 over the whole text, every pair of tokens on its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvlab.model import GPT
from kvlab.rope import frequencies

#: From the position of a query and the positions of all tokens: which it sees, and how far each is from it.
Sight = Callable[[int, Tensor], tuple[Tensor, Tensor]]


def streaming(sinks: int, window: int) -> Sight:
    """StreamingLLM, as written: distances inside the cache."""

    def sight(t: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        is_sink = tokens < sinks
        seen = (tokens <= t) & ((tokens > t - window) | is_sink)
        return seen, torch.where(is_sink, min(t, sinks + window - 1) - tokens, t - tokens)

    return sight


def absolute(sinks: int, window: int) -> Sight:
    """The other variant: sinks keep the positions they came with."""

    def sight(t: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return (tokens <= t) & ((tokens > t - window) | (tokens < sinks)), t - tokens

    return sight


def oracle(model: GPT, tokens: Tensor, sight: Sight) -> Tensor:
    """Logits of one row, [time, vocab_size]."""
    x = model.embedding(tokens[None])
    if model.position is not None:
        x = x + model.position(torch.arange(len(tokens)))
    for block in model.blocks:
        x = x + mix(model, block.attention, block.attention_norm(x), sight)
        x = x + block.mlp(block.mlp_norm(x))
    return model.head(model.norm(x))[0]


def mix(model: GPT, attention, x: Tensor, sight: Sight) -> Tensor:
    config, time = model.config, x.shape[1]
    heads = attention.qkv(x).view(time, -1, config.head_dim).transpose(0, 1)
    q, k, v = heads.split([config.n_head, config.n_kv_head, config.n_kv_head])
    q, k = attention.q_norm(q), attention.k_norm(k)
    k, v = (part.repeat_interleave(config.n_head // config.n_kv_head, 0) for part in (k, v))
    rows = []
    for t in range(time):
        seen, distance = sight(t, torch.arange(time))
        # Turning the query by the distance is turning both to their places: only the difference counts.
        query = turned(q[:, t], distance, model) if config.position == "rope" else q[:, t, None].expand_as(k)
        scores = (query * k).sum(-1) / config.head_dim**0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        rows.append((weights[..., None] * v).sum(1).flatten())
    return attention.out(torch.stack(rows)[None])


def turned(q: Tensor, distance: Tensor, model: GPT) -> Tensor:
    """A query [heads, head_dim] at each distance: [heads, tokens, head_dim]."""
    angle = distance[:, None].double() * frequencies(model.config)
    first, second = q[:, None].chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
