"""Bytes of what a forward pass computes and throws away again, on kvlab's own eager path.

The peak is the largest of five moments, each the sum of the tensors that are alive then. Beside them stand, for the
whole pass, the positions and the rotary tables, and the mask where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from kvlab.config import ModelConfig, Shape, shape_of
from kvlab.cost.flops import Row, require_rows
from kvlab.cost.formats import format_of
from kvlab.cost.parameters import active_width


def activation_bytes(model: Shape, rows: Sequence[Row], dtype: str = "bfloat16") -> int:
    """Peak of the tensors between the layers, without autograd; weights and cache excluded.

    An engine that fuses kernels stays below. Rows are taken to be of the same length, as those of
    :func:`~kvlab.cost.flops.prefill_pass` are.

    Args:
        model: a preset name, a Hub config, or a shape; of experts those that a token visits count.
        rows: what each request contributes; every position with logits costs a vector as wide as the vocabulary.
        dtype: of the activations.

    Raises:
        ConfigError: a name is unknown, or there is no row.
    """
    config, width = shape_of(model), format_of(dtype).bytes_per_element
    tokens = sum(row.new for row in require_rows(rows))
    logits = sum(row.logits for row in rows)
    hidden = config.hidden_size
    inner = (4 if config.gated_mlp else 2) * active_width(config)
    pairs, windowed = _mask(config, rows)
    moments = (
        tokens * (3 * hidden + inner) * width,  # two residual streams and a normalised copy; gate, up and two products
        tokens * _rotation(config, width),
        _attention(config, rows, width),
        tokens * (3 * hidden + _projected(config)) * width,  # the way out of attention
        logits * (2 * hidden + config.vocab_size) * width,
    )
    tables = 4 * config.head_dim if config.position == "rope" else 0
    return ceil(max(moments) + tokens * (8 + tables) + (pairs if windowed else 0))


def _projected(config: ModelConfig) -> int:
    """Elements of a token when attention is done: queries, keys and values, their rotated copies, and the mix."""
    q_width, kv_width = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    rotated = q_width + kv_width if config.position == "rope" else 0
    return 2 * q_width + 2 * kv_width + rotated


def _rotation(config: ModelConfig, width: float) -> float:
    """Bytes of a token while queries or keys are turned: in float32 at least, as halves and as the two joined."""
    if config.position != "rope":
        return 0.0
    q_width, kv_width = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    turning = 12 if width < 4 else 2 * width
    normalised = q_width + kv_width if config.qk_norm else 0
    held = (2 * config.hidden_size + q_width + 2 * kv_width + normalised) * width
    return held + max(turning * q_width, turning * kv_width + q_width * width)


def _attention(config: ModelConfig, rows: Sequence[Row], width: float) -> float:
    """Bytes inside the kernel: what is projected, KV heads copied for their query heads, the mask in the dtype."""
    tokens, keys = sum(row.new for row in rows), sum(row.past + row.new for row in rows)
    pairs, windowed = _mask(config, rows)
    one_query = max(row.new for row in rows) == 1
    expanded = 0 if config.n_group == 1 or one_query else 2 * keys * config.n_head * config.head_dim
    own = tokens * (2 * config.hidden_size + _projected(config)) + expanded + pairs
    # A byte a pair where the mask is made for this layer alone, and a float32 sum for each softmax.
    return own * width + (0 if windowed else pairs) + 4 * tokens * config.n_head


def _mask(config: ModelConfig, rows: Sequence[Row]) -> tuple[int, bool]:
    """Pairs that a mask names, and whether it is a window's, made for every row and kept for the pass.

    A prompt or a single token that no window cuts needs none.
    """
    new, keys = max(row.new for row in rows), max(row.past + row.new for row in rows)
    if any(window is not None and window < keys for window in config.windows):
        return len(rows) * new * keys, True
    return (new * keys if 1 < new < keys else 0), False
