"""What a forward pass consists of: its operators, each with the operations it does and the bytes it moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvlab.config import ModelConfig, Shape, shape_of
from kvlab.cost.flops import Row, attention_flops, require_rows
from kvlab.cost.formats import Format, format_of, unquantized
from kvlab.cost.memory import cache_format, experts_touched, kv_elements_of_a_layer, weight_format
from kvlab.cost.parameters import Matrix, active_width, attention_matrices, expert_parameters, mlp_matrices

Part = Literal["linear", "attention", "head", "elementwise", "overhead"]


@dataclass(frozen=True)
class Operator:
    """One kind of operator of a pass, in all layers together.

    Args:
        name: such as ``qkv`` or ``attention``.
        part: which share of the pass it belongs to.
        calls: how often it runs.
        launches: kernels that one call starts.
        rows: tokens that one call takes at once.
        keys: keys that a query of it can see at most; 0 where it is not attention.
        flops: operations of all calls.
        bytes: of weights, cache and activations that all calls read and write.
    """

    name: str
    part: Part
    calls: int
    launches: int
    rows: float
    keys: int
    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """FLOP a byte."""
        return self.flops / self.bytes


def operators(
    model: Shape,
    rows: Sequence[Row],
    dtype: str = "bfloat16",
    *,
    weights: str | Format | None = None,
    kv: str | Format | None = None,
) -> list[Operator]:
    """The operators of a pass with their FLOPs and bytes, each kind once for all layers.

    FLOPs add up to :func:`~kvlab.cost.flops.flops`, matrices to :func:`~kvlab.cost.memory.weight_bytes_read` (which
    adds norms, biases and rows of the embedding: a thousandth). Activations are counted once in and once out of each
    operator.

    Args:
        model: a preset name, a Hub config, or a shape.
        rows: what each request contributes.
        dtype: of the activations.
        weights: format of the weights; by default ``dtype``.
        kv: format of the cache; by default ``dtype``.

    Raises:
        ConfigError: a name is unknown, or there is no row.
    """
    config, tokens = shape_of(model), sum(row.new for row in rows)
    width = format_of(dtype).bytes_per_element
    narrow, cached = weight_format(config, weights or dtype), cache_format(config, kv or dtype)
    return [
        *_projections(config, tokens, narrow.bytes_per_element, width),
        *_attentions(config, require_rows(rows), cached.bytes_per_element, width),
        *_elementwise(config, tokens, width),
        *_head(config, sum(row.logits for row in rows), narrow, width),
    ]


def cache_bytes_read(model: Shape, rows: Sequence[Row], kv: str | Format = "bfloat16") -> int:
    """Bytes of keys and values that attention of a pass reads, the new ones included, each once a row and layer.

    Args:
        model: a preset name, a Hub config, or a shape.
        rows: what each request contributes.
        kv: format of the cache.

    Raises:
        ConfigError: a name is unknown.
    """
    config = shape_of(model)
    tokens = sum(keys_read(row, window) for window in config.windows for row in rows)
    return round(tokens * kv_elements_of_a_layer(config) * cache_format(config, kv).bytes_per_element)


def keys_read(row: Row, window: int | None) -> int:
    """Keys that some query of the row sees, in one layer.

    Args:
        row: what a request contributes.
        window: of the layer.
    """
    return row.past + row.new if window is None else min(row.past + row.new, window + row.new - 1)


def _projections(config: ModelConfig, tokens: int, narrow: float, width: float) -> Iterator[Operator]:
    """Every matrix of the blocks; experts are one operator."""
    moe = config.moe
    dense = config.n_layer if moe is None else moe.n_dense_layers
    yield from (_linear(matrix, config.n_layer, tokens, narrow, width) for matrix in attention_matrices(config))
    if dense:
        matrices = mlp_matrices(config, config.intermediate_size)
        yield from (_linear(matrix, dense, tokens, narrow, width) for matrix in matrices)
    if moe is not None:
        yield _experts(config, tokens, narrow, width)


def _linear(matrix: Matrix, calls: int, tokens: int, narrow: float, width: float) -> Operator:
    moved = matrix.size * narrow + tokens * (matrix.inputs + matrix.outputs) * width
    return Operator(
        matrix.name, "linear", calls, 1, tokens, 0, flops=2.0 * calls * matrix.size * tokens, bytes=calls * moved
    )


def _experts(config: ModelConfig, tokens: int, narrow: float, width: float) -> Operator:
    """Routed and shared experts of all layers; each touched expert sees only its share of the tokens."""
    moe = config.moe
    assert moe is not None
    layers, expert = config.n_layer - moe.n_dense_layers, expert_parameters(config)
    touched = experts_touched(config, tokens)
    router = config.hidden_size * moe.n_experts
    active = moe.experts_per_token + moe.n_shared_experts
    weights = (touched + moe.n_shared_experts) * expert + router
    moved = weights * narrow + tokens * active * 2 * config.hidden_size * width
    return Operator(
        name="experts",
        part="linear",
        calls=layers,
        launches=3,
        rows=tokens * moe.experts_per_token / touched,
        keys=0,
        flops=2.0 * layers * tokens * (active * expert + router),
        bytes=layers * moved,
    )


def _attentions(config: ModelConfig, rows: Sequence[Row], narrow: float, width: float) -> Iterator[Operator]:
    """One operator for each window that some layer has, and for decode steps and prompts apart: other kernels run."""
    steps, prompts = [row for row in rows if row.new == 1], [row for row in rows if row.new > 1]
    for window in config.window_kinds:
        for alike in filter(None, (prompts, steps)):
            yield _attention(config, alike, window, narrow, width)


def _attention(config: ModelConfig, rows: Sequence[Row], window: int | None, narrow: float, width: float) -> Operator:
    layers, tokens = config.windows.count(window), sum(row.new for row in rows)
    keys = [keys_read(row, window) for row in rows]
    moved = attention_bytes(config, tokens, sum(keys), narrow, width)
    return Operator(
        name="attention" if window is None else f"attention({window})",
        part="attention",
        calls=layers,
        launches=5,
        rows=max(row.new for row in rows),
        keys=max(keys),
        flops=layers * attention_flops(config, rows, window),
        bytes=layers * moved,
    )


def attention_bytes(config: ModelConfig, queries: int, keys: int, narrow: float, width: float) -> float:
    """Bytes that attention of one layer reads and writes: keys with their values, queries, and what comes out.

    Args:
        config: the model's shape.
        queries: tokens of the pass.
        keys: that some query sees, of all rows.
        narrow: bytes of an element of the cache.
        width: bytes of an element of the activations.
    """
    return keys * kv_elements_of_a_layer(config) * narrow + 2 * queries * config.n_head * config.head_dim * width


def _elementwise(config: ModelConfig, tokens: int, width: float) -> Iterator[Operator]:
    """What only moves activations, as kvlab's eager path runs it; an engine fuses most of it away."""
    hidden, layers = config.hidden_size, config.n_layer
    heads = (config.n_head + config.n_kv_head) * config.head_dim
    inner = active_width(config)

    def moving(name: str, calls: int, launches: int, elements: int) -> Operator:
        return Operator(name, "elementwise", calls, launches, tokens, 0, 0.0, calls * tokens * elements * width)

    yield moving("norm", 2 * layers + 1, 1, 2 * hidden)
    if config.qk_norm:
        yield moving("norm", layers, 2, 2 * heads)
    if config.position == "rope":
        yield moving("rotate", layers, 12, 2 * heads)
    yield moving("copy", layers, 3, 2 * config.n_head * config.head_dim + 4 * config.n_kv_head * config.head_dim)
    yield moving("activation", layers, 2, (3 if config.gated_mlp else 2) * inner)
    yield moving("add", 2 * layers, 1, 3 * hidden)


def _head(config: ModelConfig, logits: int, weights: Format, width: float) -> Iterator[Operator]:
    """The LM head, where something goes through it; a tied one has the embedding's format."""
    if logits:
        matrix = Matrix("head", config.hidden_size, config.vocab_size)
        kept = unquantized(weights) if config.tie_embeddings else weights
        yield replace(_linear(matrix, 1, logits, kept.bytes_per_element, width), part="head")
