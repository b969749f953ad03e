"""How many parameters a model has, from its shape alone."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.config import ModelConfig, Shape, shape_of


@dataclass(frozen=True)
class Parameters:
    """Parameters of a model, by part.

    Args:
        embedding: rows for tokens (and for learned positions).
        attention: projections of all layers.
        mlp: dense MLPs and experts, routers included, of all layers.
        vectors: norms and biases; no format makes them narrower.
        head: of the LM head; 0 where it is the embedding.
        active_mlp: of ``mlp``, what one token visits.
    """

    embedding: int
    attention: int
    mlp: int
    vectors: int
    head: int
    active_mlp: int

    @property
    def total(self) -> int:
        """All of them, tied weights once."""
        return self.embedding + self.attention + self.mlp + self.vectors + self.head

    @property
    def active(self) -> int:
        """What one token uses; embedding and head are included."""
        return self.total - self.mlp + self.active_mlp


@dataclass(frozen=True)
class Matrix:
    """A projection of a layer.

    Args:
        name: such as ``qkv``.
        inputs: elements that one token brings.
        outputs: elements that it takes away.
    """

    name: str
    inputs: int
    outputs: int

    @property
    def size(self) -> int:
        """Weights in it."""
        return self.inputs * self.outputs


def parameters(model: Shape) -> Parameters:
    """Parameters of a model by part. Exact: the sum is the size of the published checkpoint.

    Args:
        model: a preset name, a Hub config, or a shape.

    Raises:
        ConfigError: the model is unknown, or its config lacks a field.
    """
    config = shape_of(model)
    positions = config.max_seq_len if config.position == "learned" else 0
    mlp, active = _mlps(config)
    return Parameters(
        embedding=(config.vocab_size + positions) * config.hidden_size,
        attention=config.n_layer * sum(matrix.size for matrix in attention_matrices(config)),
        mlp=mlp,
        vectors=config.n_layer * _vectors(config) + _norm(config),
        head=0 if config.tie_embeddings else config.vocab_size * config.hidden_size,
        active_mlp=active,
    )


def attention_matrices(config: ModelConfig) -> list[Matrix]:
    """Projections of one layer's attention. Latent attention (DeepSeek-V2, arXiv:2405.04434) goes down and up again.

    Args:
        config: the model's shape.
    """
    hidden, q_width, mla = config.hidden_size, config.n_head * config.head_dim, config.mla
    if mla is None:
        return [
            Matrix("qkv", hidden, q_width + 2 * config.n_kv_head * config.head_dim),
            Matrix("out", q_width, hidden),
        ]
    queries = [Matrix("q", hidden, q_width)]
    if mla.q_lora_rank is not None:
        queries = [Matrix("q_down", hidden, mla.q_lora_rank), Matrix("q_up", mla.q_lora_rank, q_width)]
    expanded = config.head_dim - mla.rope_head_dim + mla.v_head_dim
    return [
        *queries,
        Matrix("kv_down", hidden, mla.kv_lora_rank + mla.rope_head_dim),
        Matrix("kv_up", mla.kv_lora_rank, config.n_head * expanded),
        Matrix("out", config.n_head * mla.v_head_dim, hidden),
    ]


def mlp_matrices(config: ModelConfig, width: int) -> list[Matrix]:
    """Projections of one MLP, or of one expert.

    Args:
        config: the model's shape.
        width: inside it.
    """
    hidden = config.hidden_size
    if not config.gated_mlp:
        return [Matrix("up", hidden, width), Matrix("down", width, hidden)]
    return [Matrix("gate_up", hidden, 2 * width), Matrix("down", width, hidden)]


def expert_parameters(config: ModelConfig) -> int:
    """Parameters of one routed expert, 0 in a model without experts.

    Args:
        config: the model's shape.
    """
    return sum(matrix.size for matrix in mlp_matrices(config, config.moe.intermediate_size)) if config.moe else 0


def active_width(config: ModelConfig) -> int:
    """Width inside the MLPs that one token visits.

    Args:
        config: the model's shape.
    """
    moe = config.moe
    if moe is None:
        return config.intermediate_size
    return (moe.experts_per_token + moe.n_shared_experts) * moe.intermediate_size


def _mlps(config: ModelConfig) -> tuple[int, int]:
    """All MLPs, and what of them one token visits."""
    moe, dense = config.moe, sum(matrix.size for matrix in mlp_matrices(config, config.intermediate_size))
    if moe is None:
        return config.n_layer * dense, config.n_layer * dense
    sparse, expert = config.n_layer - moe.n_dense_layers, expert_parameters(config)
    router = config.hidden_size * moe.n_experts
    # DeepSeek-V3's own count of active parameters leaves the bias of its router out.
    bias = moe.n_experts if moe.router_bias else 0
    always = moe.n_dense_layers * dense + sparse * (moe.n_shared_experts * expert + router)
    return always + sparse * (moe.n_experts * expert + bias), always + sparse * moe.experts_per_token * expert


def _norm(config: ModelConfig) -> int:
    """One norm of the residual stream."""
    return config.hidden_size * (2 if config.norm == "layernorm" else 1)


def _vectors(config: ModelConfig) -> int:
    """Norms and biases of one layer."""
    # Gemma 2 and 3 normalise before and after each half; Falcon's two halves share one norm.
    count = {"gemma2": 4, "gemma3": 4, "falcon": 1}.get(config.family, 2) * _norm(config)
    count += (config.n_head + 2 * config.n_kv_head) * config.head_dim if config.qkv_bias else 0
    count += config.hidden_size if config.out_bias else 0
    count += 2 * config.head_dim if config.qk_norm else 0
    if config.mlp_bias:
        count += sum(matrix.outputs for matrix in mlp_matrices(config, config.intermediate_size))
    if config.mla is not None:
        count += config.mla.kv_lora_rank + (config.mla.q_lora_rank or 0)
    return count
