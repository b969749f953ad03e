"""Which tensors of a Hugging Face checkpoint make up which parameter of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.config import ModelConfig
from kvlab.errors import WeightsError

#: Tables that some checkpoints carry and nobody reads: masks of GPT-2, rotary frequencies of old Llamas.
IGNORED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


@dataclass(frozen=True)
class Source:
    """Where one parameter comes from.

    Args:
        names: checkpoint tensors, stacked by rows in this order.
        transposed: GPT-2 stores its matrices [in, out].
    """

    names: tuple[str, ...]
    transposed: bool = False


def sources(config: ModelConfig) -> dict[str, Source]:
    """For every parameter of :class:`kvlab.model.GPT`, the checkpoint tensors that it is made of.

    Args:
        config: the model's shape.
    """
    table = _gpt2(config) if config.family == "gpt2" else _llama_like(config)
    if config.tie_embeddings:
        table.pop("head.weight", None)
    return table


def from_hf(
    config: ModelConfig, tensors: Mapping[str, Tensor], place: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> dict[str, Tensor]:
    """A checkpoint's tensors under our names, fused where we fuse.

    Args:
        config: the model's shape.
        tensors: the checkpoint, under Hugging Face names; the prefix ``transformer.`` of GPT-2 may be missing.
        place: casts or moves each finished parameter, one at a time.

    Raises:
        WeightsError: a tensor is missing, or is of no use to this model.
    """
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    table = sources(config)
    wanted = {name for source in table.values() for name in source.names}
    if missing := sorted(wanted - tensors.keys()):
        raise WeightsError(_counted(f"the checkpoint of {config.name} lacks", missing))
    extra = sorted(n for n in tensors.keys() - wanted if not n.endswith(IGNORED) and n != "lm_head.weight")
    if extra:
        raise WeightsError(
            _counted(f"the checkpoint of {config.name} has parts that a {config.family} does not", extra)
        )
    return {ours: place(_gather(source, tensors)) for ours, source in table.items()}


def to_hf(config: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The opposite of :func:`from_hf`, for models of the Llama kind.

    Args:
        config: the model's shape.
        state: the ``state_dict`` of a :class:`kvlab.model.GPT`.
    """
    out: dict[str, Tensor] = {}
    for ours, source in sources(config).items():
        rows = _rows(config, len(source.names), len(state[ours]))
        parts = state[ours].split(rows)
        out |= {name: part.contiguous() for name, part in zip(source.names, parts, strict=True)}
    return out


def hf_shapes(config: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shape that each checkpoint tensor must have.

    Args:
        config: the model's shape.
        state: the ``state_dict`` of a :class:`kvlab.model.GPT`; it may be on the meta device.
    """
    out: dict[str, tuple[int, ...]] = {}
    for ours, source in sources(config).items():
        shape = tuple(state[ours].shape)
        rows = _rows(config, len(source.names), shape[0])
        for name, height in zip(source.names, rows, strict=True):
            whole = (height, *shape[1:])
            out[name] = whole[::-1] if source.transposed else whole
    return out


def _rows(config: ModelConfig, parts: int, total: int) -> list[int]:
    """Rows of each part of a fused matrix: one part, gate and up, or queries, keys and values."""
    if parts == 3:
        return [heads * config.head_dim for heads in (config.n_head, config.n_kv_head, config.n_kv_head)]
    return [total // parts] * parts


def _gather(source: Source, tensors: Mapping[str, Tensor]) -> Tensor:
    parts = [tensors[name].T if source.transposed else tensors[name] for name in source.names]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


def _counted(what: str, names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what} {', '.join(names[:3])}{more}; it does not fit its config.json"


def _llama_like(config: ModelConfig) -> dict[str, Source]:
    table = {
        "embedding.weight": Source(("model.embed_tokens.weight",)),
        "norm.weight": Source(("model.norm.weight",)),
        "head.weight": Source(("lm_head.weight",)),
    }
    for layer in range(config.n_layer):
        for ours, theirs in _llama_block(config).items():
            names = tuple(f"model.layers.{layer}.{name}" for name in theirs)
            table[f"blocks.{layer}.{ours}"] = Source(names)
    return table


def _llama_block(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    heads = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    linears = {
        "attention.qkv": (heads, config.qkv_bias),
        "attention.out": (("self_attn.o_proj",), config.out_bias),
        "mlp.gate_up": (("mlp.gate_proj", "mlp.up_proj"), config.mlp_bias),
        "mlp.down": (("mlp.down_proj",), config.mlp_bias),
    }
    block: dict[str, tuple[str, ...]] = {
        "attention_norm.weight": ("input_layernorm.weight",),
        "mlp_norm.weight": ("post_attention_layernorm.weight",),
    }
    for ours, (theirs, bias) in linears.items():
        for kind in ("weight", "bias") if bias else ("weight",):
            block[f"{ours}.{kind}"] = tuple(f"{name}.{kind}" for name in theirs)
    if config.qk_norm:
        block |= {f"attention.{x}_norm.weight": (f"self_attn.{x}_norm.weight",) for x in ("q", "k")}
    return block


def _gpt2(config: ModelConfig) -> dict[str, Source]:
    parts = {
        "attention_norm": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj",
        "mlp_norm": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
    }  # fmt: skip
    table = {
        "embedding.weight": Source(("wte.weight",)),
        "position.weight": Source(("wpe.weight",)),
        "norm.weight": Source(("ln_f.weight",)),
        "norm.bias": Source(("ln_f.bias",)),
        "head.weight": Source(("lm_head.weight",)),
    }
    for layer in range(config.n_layer):
        for ours, theirs in parts.items():
            transposed = not ours.endswith("norm")
            table[f"blocks.{layer}.{ours}.weight"] = Source((f"h.{layer}.{theirs}.weight",), transposed)
            table[f"blocks.{layer}.{ours}.bias"] = Source((f"h.{layer}.{theirs}.bias",))
    return table
