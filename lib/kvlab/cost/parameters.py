"""How many parameters a model has, from its shape alone."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.config import MLA, ModelConfig, Shape, shape_of


@dataclass(frozen=True)
class Parameters:
    """Parameters of a model, by part.

    Args:
        embedding: rows for tokens (and for learned positions).
        attention: projections with their biases and norms, all layers.
        mlp: dense MLPs and experts, routers included, all layers.
        norm: norms of the residual stream.
        head: of the LM head; 0 where it is the embedding.
        active_mlp: of ``mlp``, what one token visits.
    """

    embedding: int
    attention: int
    mlp: int
    norm: int
    head: int
    active_mlp: int

    @property
    def total(self) -> int:
        """All of them, tied weights once."""
        return self.embedding + self.attention + self.mlp + self.norm + self.head

    @property
    def active(self) -> int:
        """What one token uses; embedding and head are included."""
        return self.total - self.mlp + self.active_mlp


def parameters(model: Shape) -> Parameters:
    """Parameters of a model by part. Exact: the sum is the size of the published checkpoint.

    Args:
        model: a preset name, a Hub config, or a shape.

    Raises:
        ConfigError: the model is unknown, or its config lacks a field.
    """
    config = shape_of(model)
    norm = config.hidden_size * (2 if config.norm == "layernorm" else 1)
    positions = config.max_seq_len if config.position == "learned" else 0
    mlp, active = _mlps(config)
    return Parameters(
        embedding=(config.vocab_size + positions) * config.hidden_size,
        attention=config.n_layer * _attention(config),
        mlp=mlp,
        norm=norm * (config.n_layer * _norms_of_a_block(config) + 1),
        head=0 if config.tie_embeddings else config.vocab_size * config.hidden_size,
        active_mlp=active,
    )


def expert_parameters(config: ModelConfig) -> int:
    """Parameters of one routed expert, 0 in a model without experts.

    Args:
        config: the model's shape.
    """
    return 3 * config.hidden_size * config.moe.intermediate_size if config.moe else 0


def active_width(config: ModelConfig) -> int:
    """Width inside the MLPs that one token visits.

    Args:
        config: the model's shape.
    """
    moe = config.moe
    if moe is None:
        return config.intermediate_size
    return (moe.experts_per_token + moe.n_shared_experts) * moe.intermediate_size


def _attention(config: ModelConfig) -> int:
    """Of one layer."""
    if config.mla is not None:
        return _latent_attention(config, config.mla)
    heads = config.n_head + 2 * config.n_kv_head
    count = config.hidden_size * config.head_dim * (heads + config.n_head)
    count += heads * config.head_dim if config.qkv_bias else 0
    count += config.hidden_size if config.out_bias else 0
    return count + (2 * config.head_dim if config.qk_norm else 0)


def _latent_attention(config: ModelConfig, mla: MLA) -> int:
    """DeepSeek-V2's (arXiv:2405.04434): queries through a latent, keys and values up from the cached one, two norms."""
    hidden, n_head, q_width = config.hidden_size, config.n_head, config.n_head * config.head_dim
    queries = hidden * q_width if mla.q_lora_rank is None else mla.q_lora_rank * (hidden + 1 + q_width)
    down = hidden * (mla.kv_lora_rank + mla.rope_head_dim) + mla.kv_lora_rank
    up = mla.kv_lora_rank * n_head * (config.head_dim - mla.rope_head_dim + mla.v_head_dim)
    return queries + down + up + n_head * mla.v_head_dim * hidden


def _mlps(config: ModelConfig) -> tuple[int, int]:
    """All MLPs, and what of them one token visits."""
    moe, dense = config.moe, _dense_mlp(config)
    if moe is None:
        return config.n_layer * dense, config.n_layer * dense
    sparse, expert = config.n_layer - moe.n_dense_layers, expert_parameters(config)
    router = config.hidden_size * moe.n_experts
    # DeepSeek-V3's own count of active parameters leaves the bias of its router out.
    bias = moe.n_experts if moe.router_bias else 0
    always = moe.n_dense_layers * dense + sparse * (moe.n_shared_experts * expert + router)
    return always + sparse * (moe.n_experts * expert + bias), always + sparse * moe.experts_per_token * expert


def _dense_mlp(config: ModelConfig) -> int:
    matrices = (3 if config.gated_mlp else 2) * config.hidden_size * config.intermediate_size
    return matrices + (config.intermediate_size + config.hidden_size if config.mlp_bias else 0)


def _norms_of_a_block(config: ModelConfig) -> int:
    """Gemma 2 and 3 normalise before and after each half; Falcon's two halves share one norm."""
    return {"gemma2": 4, "gemma3": 4, "falcon": 1}.get(config.family, 2)
