"""The decoder: one class for GPT-2, Llama and SmolLM2, Mistral, Qwen2.5 and Qwen3."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvlab.cache import KVCache, NoCache, Step
from kvlab.config import ModelConfig
from kvlab.errors import PromptError
from kvlab.model.attention import Attention
from kvlab.model.layers import MLP, GatedMLP, make_norm
from kvlab.rope import Rope


class Block(nn.Module):
    """Attention, then MLP, each on a normalised copy of the residual stream and added back to it.

    Args:
        config: the model's shape.
        layer: index of the block.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, layer)
        self.mlp_norm = make_norm(config)
        self.mlp = GatedMLP(config) if config.gated_mlp else MLP(config)

    def forward(
        self,
        x: Float[Tensor, "batch time hidden_size"],
        cache: KVCache,
        step: Step,
        rope: tuple[Tensor, Tensor] | None,
    ) -> Float[Tensor, "batch time hidden_size"]:
        """One block of the residual stream."""
        x = x + self.attention(self.attention_norm(x), cache, step, rope)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A decoder-only transformer.

    Args:
        config: its shape.

    Raises:
        ConfigError: the shape has a part that kvlab counts but does not run.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        config.require_runnable()
        self.config = config
        self.embedding: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.position == "learned"
        self.position = nn.Embedding(config.max_seq_len, config.hidden_size) if learned else None
        self.rope = None if learned else Rope(config)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = make_norm(config)
        self.head: nn.Module = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Make the LM head the embedding matrix, where the model has it so."""
        if self.config.tie_embeddings:
            self.head.weight = self.embedding.weight

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.norm.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the residual stream, and so of the cache."""
        return next(self.norm.parameters()).dtype

    def forward(
        self,
        tokens: Int[Tensor, "batch time"],
        cache: KVCache | None = None,
        *,
        positions: Int[Tensor, "batch time"] | None = None,
        last_only: bool = False,
    ) -> Float[Tensor, "batch out vocab_size"]:
        """Logits of the tokens. The cache, if there is one, advances by them.

        Args:
            tokens: token ids; what stands at padding does not matter.
            cache: what came before; None for a pass that remembers nothing.
            positions: on the host, -1 for padding; None when every row simply continues.
            last_only: only the last token of each row goes through the LM head, and ``out`` is 1.

        Raises:
            PromptError: a position lies beyond the model's context, and the cache is not endless; or the cache has
                another number of rows.
            CacheFull: the cache has no room; nothing was written.
        """
        cache = cache or NoCache(self.config, len(tokens), self.dtype, self.device)
        positions = cache.next_positions(tokens.shape[1]) if positions is None else positions
        if positions.shape != tokens.shape:
            raise PromptError(
                f"tokens have shape {tuple(tokens.shape)}, and the cache of {cache.batch} row(s) expects "
                f"{tuple(positions.shape)}; make a cache for {len(tokens)} row(s)"
            )
        step = cache.begin(positions)
        self._require_context(cache, step)
        logits = self.run(tokens, cache, step, last_only)
        cache.commit(step)
        return logits

    def run(
        self, tokens: Int[Tensor, "batch time"], cache: KVCache, step: Step, last_only: bool
    ) -> Float[Tensor, "rows out vocab_size"]:
        """The tensor part of a pass, between ``begin`` and ``commit``.

        Args:
            tokens: token ids.
            cache: receives keys and values.
            step: from ``cache.begin``.
            last_only: see ``forward``.

        Returns:
            Logits; ``rows`` is the batch, but with ``last_only`` and a ragged pass one for each token that it wants.
        """
        x = self.embedding(tokens)
        if self.position is not None:
            x = x + self.position(step.positions.clamp(min=0))
        rope = None if self.rope is None else step.rotation(self.rope)
        for block in self.blocks:
            x = block(x, cache, step, rope)
        if last_only:
            x = x[step.outputs()][:, None]
        return self.head(self.norm(x))

    def _require_context(self, cache: KVCache, step: Step) -> None:
        longest = max(cache.ends(step.n_new))
        if not cache.endless and longest > self.config.max_seq_len:
            raise PromptError(
                f"{longest} tokens are more than the context of {self.config.name}, {self.config.max_seq_len}; "
                "shorten the prompt or choose a model with a longer context"
            )
