"""Bytes: of weights, of the KV cache, of logits.

GB is 1e9 bytes and GiB is 2**30. Functions return bytes and leave the choice to whoever prints.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from kvlab.config import ModelConfig, Shape, shape_of
from kvlab.cost.formats import Format, format_of, require_groups, unquantized
from kvlab.cost.parameters import expert_parameters, parameters
from kvlab.errors import ConfigError, at_least

GB, GIB = 10**9, 2**30


def weight_bytes(model: Shape, weights: str | Format = "bfloat16", embedding: str | Format | None = None) -> int:
    """Bytes of all weights; a tied head counts once.

    Args:
        model: a preset name, a Hub config, or a shape.
        weights: format of the matrices in the blocks, and of an untied head.
        embedding: format of the embedding, the norms and the biases; by default bfloat16 where ``weights`` is narrower.

    Raises:
        ConfigError: the model or a format is unknown, or a group size does not divide the layers.
    """
    config, count = shape_of(model), parameters(model)
    narrow = weight_format(config, weights)
    wide = unquantized(narrow) if embedding is None else format_of(embedding)
    matrices = count.attention + count.mlp + count.head
    return ceil(matrices * narrow.bytes_per_element) + ceil((count.embedding + count.vectors) * wide.bytes_per_element)


def weight_bytes_read(model: Shape, weights: str | Format = "bfloat16", tokens: int = 1) -> int:
    """Bytes of weights that one pass reads: every matrix once, of the embedding one row a token.

    A tied head is the embedding, and is read whole. Of experts, a pass reads those that its tokens visit: see
    :func:`experts_touched`.

    Args:
        model: a preset name, a Hub config, or a shape.
        weights: format of the matrices; embedding, norms and biases have bfloat16 where that is wider.
        tokens: in the pass.

    Raises:
        ConfigError: the model or the format is unknown, or there is no token.
    """
    config, count = shape_of(model), parameters(model)
    narrow = weight_format(config, weights)
    rows = min(at_least(1, "tokens", tokens), config.vocab_size)
    # The row of a token disappears in a tied head that is read whole; a learned position has a row of its own.
    looked_up = config.vocab_size if config.tie_embeddings else rows
    looked_up += min(tokens, config.max_seq_len) if config.position == "learned" else 0
    unvisited = 0.0
    if config.moe is not None:
        sparse_layers = config.n_layer - config.moe.n_dense_layers
        unvisited = sparse_layers * (config.moe.n_experts - experts_touched(config, tokens)) * expert_parameters(config)
    matrices = count.attention + count.mlp - unvisited + count.head
    rest = looked_up * config.hidden_size + count.vectors
    return ceil(matrices * narrow.bytes_per_element) + ceil(rest * unquantized(narrow).bytes_per_element)


def experts_touched(model: Shape, tokens: int) -> float:
    """Experts of a layer that a pass visits, expected where tokens choose independently: E (1 - (1 - k/E)^tokens).

    Real routers choose less evenly, and then fewer are touched.

    Args:
        model: a preset name, a Hub config, or a shape.
        tokens: in the pass.

    Raises:
        ConfigError: the model has no experts.
    """
    config = shape_of(model)
    if config.moe is None:
        raise ConfigError(f"{config.name} has no experts; moe is missing from its config")
    experts, chosen = config.moe.n_experts, config.moe.experts_per_token
    return experts * (1 - (1 - chosen / experts) ** at_least(1, "tokens", tokens))


def kv_elements_per_token(model: Shape) -> int:
    """Cached elements of one token in all layers: K and V of every KV head, or one latent a layer (MLA).

    Args:
        model: a preset name, a Hub config, or a shape.

    Raises:
        ConfigError: the model is unknown.
    """
    config = shape_of(model)
    return config.n_layer * kv_elements_of_a_layer(config)


def kv_elements_of_a_layer(config: ModelConfig, tensor_parallel: int = 1) -> int:
    """Cached elements of one token in one layer, on one device.

    Args:
        config: the model's shape.
        tensor_parallel: devices that share the KV heads.

    Raises:
        ConfigError: the heads cannot be shared evenly.
    """
    if config.mla is not None:
        return config.mla.kv_lora_rank + config.mla.rope_head_dim
    heads = config.n_kv_head
    if heads % tensor_parallel and tensor_parallel % heads:
        raise ConfigError(
            f"tensor_parallel is {tensor_parallel} for {heads} KV heads; one must be a multiple of the other"
        )
    # With more devices than heads every device still needs one: heads are copied, and the cache stops shrinking.
    return 2 * max(heads // tensor_parallel, 1) * config.head_dim


def kv_bytes_per_token(model: Shape, kv: str | Format = "bfloat16") -> float:
    """Bytes that one more token adds while no window is full: 2 x layers x KV heads x head_dim x bytes of an element.

    Args:
        model: a preset name, a Hub config, or a shape.
        kv: format of the cache. The format of the weights has no part in it.

    Raises:
        ConfigError: the model or the format is unknown.
    """
    config = shape_of(model)
    return kv_elements_per_token(config) * cache_format(config, kv).bytes_per_element


def kv_bytes(
    model: Shape,
    tokens: int | Iterable[int],
    kv: str | Format = "bfloat16",
    *,
    block_size: int = 1,
    residual: int = 0,
    honour_windows: bool = True,
    tensor_parallel: int = 1,
) -> int:
    """Bytes of the KV cache of one request, or of several, on one device.

    Args:
        model: a preset name, a Hub config, or a shape.
        tokens: held for each request: the prompt and what was generated and fed back.
        kv: format of the cache.
        block_size: tokens of a block of a paged pool; every request rounds up to whole blocks.
        residual: newest tokens of each request that stay in bfloat16 beside a narrower format (KIVI, arXiv:2402.02750).
        honour_windows: a windowed layer keeps its window only; False for a runtime that keeps everything.
        tensor_parallel: devices that share the KV heads. Beyond ``n_kv_head`` heads are copied; a latent (MLA) is
            never split.

    Raises:
        ConfigError: a size is impossible, the model or the format is unknown, or the heads cannot be shared evenly.
    """
    config = shape_of(model)
    lengths = list(tokens) if isinstance(tokens, Iterable) else [tokens]
    if min(lengths, default=0) < 0:
        raise ConfigError(f"tokens is {min(lengths)}; a request holds 0 tokens or more")
    at_least(0, "residual", residual)
    at_least(1, "block_size", block_size)
    each = kv_elements_of_a_layer(config, at_least(1, "tensor_parallel", tensor_parallel))
    narrow, exact = cache_format(config, kv).bytes_per_element, unquantized(kv).bytes_per_element
    total = 0.0
    for window in config.windows:
        kept = window if honour_windows else None
        for length in lengths:
            held = _rounded(length if kept is None else min(length, kept), block_size)
            newest = min(residual, held)
            total += each * ((held - newest) * narrow + newest * exact)
    return ceil(total)


def logits_bytes(model: Shape, positions: int, dtype: str = "float32") -> int:
    """Bytes of logits: the largest tensor of a prefill that keeps them for every position.

    Args:
        model: a preset name, a Hub config, or a shape.
        positions: that go through the head; generation needs 1 a request.
        dtype: of the logits.

    Raises:
        ConfigError: the model or the dtype is unknown, or ``positions`` is below 1.
    """
    width = format_of(dtype).bytes_per_element
    return ceil(at_least(1, "positions", positions) * shape_of(model).vocab_size * width)


def weight_format(model: Shape, weights: str | Format) -> Format:
    """The format of the matrices, after checking that its groups, which run along the inputs, divide all of them.

    Args:
        model: a preset name, a Hub config, or a shape.
        weights: a name of :data:`~kvlab.cost.formats.FORMATS`, or a format.

    Raises:
        ConfigError: no format is called so, or a group size does not divide some layer's inputs.
    """
    config, found = shape_of(model), format_of(weights)
    for what, width in _input_widths(config).items():
        require_groups(found, width, what)
    return found


def cache_format(model: Shape, kv: str | Format) -> Format:
    """The format of a cache, after checking that its groups, which run along a head, divide it (as llama.cpp asks too).

    Args:
        model: a preset name, a Hub config, or a shape.
        kv: a name of :data:`~kvlab.cost.formats.FORMATS`, or a format.

    Raises:
        ConfigError: no format is called so, or a group size does not divide a head or a latent.
    """
    config = shape_of(model)
    if config.mla is not None:
        return require_groups(kv, kv_elements_of_a_layer(config), "a token's latent (kv_lora_rank + rope_head_dim)")
    return require_groups(kv, config.head_dim, "head_dim")


def _input_widths(config: ModelConfig) -> dict[str, int]:
    """How many inputs the matrices have, each width under the name of its field."""
    widths = {"hidden_size": config.hidden_size}
    if config.mla is None:
        widths["n_head * head_dim"] = config.n_head * config.head_dim
    else:
        widths["q_lora_rank"] = config.mla.q_lora_rank or config.hidden_size
        widths["kv_lora_rank"] = config.mla.kv_lora_rank
        widths["n_head * v_head_dim"] = config.n_head * config.mla.v_head_dim
    if config.moe is not None:
        widths["moe.intermediate_size"] = config.moe.intermediate_size
    if config.moe is None or config.moe.n_dense_layers:
        widths["intermediate_size"] = config.intermediate_size
    return widths


def _rounded(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size) * block_size
