"""The shape of a model, and the names of its weights, out of a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from kvlab.config import ModelConfig, RopeScaling
from kvlab.errors import WeightsError
from kvlab.rope import frequencies, unpermute
from kvlab.weights.gguf_file import GGUFFile, RawTensor, dequantize

#: What ``general.architecture`` may be.
ARCHITECTURES = ("llama", "qwen2", "qwen3")

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"


def read_gguf_config(file: GGUFFile, name: str) -> ModelConfig:
    """The shape that a file's metadata describes.

    Args:
        file: an open GGUF file.
        name: what to call the model.

    Raises:
        WeightsError: the architecture is not one of :data:`ARCHITECTURES`, or a field is missing.
        ConfigError: a field is impossible.
    """
    family = str(file.metadata.get("general.architecture"))
    if family not in ARCHITECTURES:
        raise WeightsError(f"{file.path} holds a {family!r}; kvlab reads GGUF files of {', '.join(ARCHITECTURES)}")
    shapes = {tensor.name: tensor.shape for tensor in file.tensors()}
    try:
        shape = _shape(file, family, shapes)
        shape |= _optional_parts(family, shapes)
    except KeyError as missing:
        raise WeightsError(f"{file.path} lacks {missing}; convert it again with a current llama.cpp") from None
    config = ModelConfig(name=name, family=family, **shape)
    return config.with_(rope_scaling=_rope_scaling(file, config))


def hub_tensors(file: GGUFFile, config: ModelConfig) -> Iterator[tuple[str, Float[Tensor, "..."]]]:
    """The file's weights, dequantized, under the Hub's names and in its layout.

    Args:
        file: an open GGUF file.
        config: from :func:`read_gguf_config`.

    Raises:
        WeightsError: a tensor has an unknown name or an unreadable storage type.
    """
    for name, raw in hub_raws(file).items():
        yield name, rotary_rows(raw.name, dequantize(raw), config)


def hub_shapes(file: GGUFFile) -> dict[str, tuple[int, ...]]:
    """The shapes of the file's weights under the Hub's names.

    Args:
        file: an open GGUF file.

    Raises:
        WeightsError: a tensor has an unknown name.
    """
    return {name: raw.shape for name, raw in hub_raws(file).items()}


def hub_raws(file: GGUFFile) -> dict[str, RawTensor]:
    """The file's weights as they are stored, under the Hub's names.

    Args:
        file: an open GGUF file.

    Raises:
        WeightsError: a tensor has an unknown name.
    """
    return {hub_name(raw.name): raw for raw in file.tensors() if raw.name != _ROPE_FACTORS}


def hub_name(name: str) -> str:
    """The Hub's name of a tensor.

    Args:
        name: llama.cpp's, for example ``blk.0.attn_q.weight``.

    Raises:
        WeightsError: the model has a part that kvlab does not know.
    """
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    found = _BLOCK.fullmatch(name)
    if found is None or found[2] not in _INNER:
        raise WeightsError(f"the GGUF file has a tensor {name}, which is no part of a plain Llama or Qwen")
    return f"model.layers.{found[1]}.{_INNER[found[2]]}.{found[3]}"


def rotary_rows(name: str, rows: Shaped[Tensor, "..."], config: ModelConfig) -> Shaped[Tensor, "..."]:
    """Rows of a stored tensor in our order.

    llama.cpp interleaves the rotary pairs of queries and keys, in files of the architecture llama only.

    Args:
        name: llama.cpp's, for example ``blk.0.attn_q.weight``.
        rows: weights, or codes, or scales: one row an output.
        config: the model's shape.
    """
    part = name.rsplit(".", 2)[-2]
    if config.family != "llama" or part not in ("attn_q", "attn_k"):
        return rows
    out: Tensor = unpermute(rows, config.n_head if part == "attn_q" else config.n_kv_head)
    return out


def _shape(file: GGUFFile, family: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    meta = {k.removeprefix(f"{family}."): v for k, v in file.metadata.items() if k.startswith(f"{family}.")}
    if meta.get("expert_count"):
        raise WeightsError(f"{file.path} is a mixture of {meta['expert_count']} experts; kvlab runs dense models")
    n_head, hidden = meta["attention.head_count"], meta["embedding_length"]
    head_dim = meta.get("attention.key_length") or hidden // n_head
    if (turned := meta.get("rope.dimension_count", head_dim)) != head_dim:
        raise WeightsError(f"{file.path} rotates {turned} of {head_dim} dimensions of a head; kvlab rotates all")
    return {
        "vocab_size": shapes["token_embd.weight"][0],
        "n_layer": meta["block_count"],
        "n_head": n_head,
        "n_kv_head": meta.get("attention.head_count_kv") or n_head,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "intermediate_size": meta["feed_forward_length"],
        "max_seq_len": meta["context_length"],
        "norm_eps": _shortest(meta["attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(meta.get("rope.freq_base", 10_000.0)),
        "eos_token_ids": end_ids(file),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
    }


def _optional_parts(family: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """What is there is known by its weights: biases, norms of queries and keys, a head of its own."""
    return {
        "qkv_bias": "blk.0.attn_q.bias" in shapes,
        "out_bias": "blk.0.attn_output.bias" in shapes,
        "mlp_bias": "blk.0.ffn_down.bias" in shapes,
        "qk_norm": family == "qwen3",
        "tie_embeddings": "output.weight" not in shapes,
    }


def end_ids(file: GGUFFile) -> tuple[int, ...]:
    """Every id that ends an answer: of a text, of a turn, of a message.

    Args:
        file: an open GGUF file.
    """
    found = (file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(i for i in found if i is not None))


def _rope_scaling(file: GGUFFile, config: ModelConfig) -> RopeScaling | None:
    """``linear`` is written in the metadata; that of Llama 3.1 as a tensor of divisors, one a frequency."""
    factors = next((t for t in file.tensors() if t.name == _ROPE_FACTORS), None)
    kind = file.metadata.get(f"{config.family}.rope.scaling.type", "none")
    if factors is not None:
        return _llama3_scaling(dequantize(factors).double(), config)
    if kind == "none":
        return None
    return RopeScaling(kind=kind, factor=_shortest(file.metadata.get(f"{config.family}.rope.scaling.factor", 1.0)))


def _llama3_scaling(divisors: Float[Tensor, "half"], config: ModelConfig) -> RopeScaling:
    """Llama 3.1 and 3.2 differ in the factor alone, which is the largest divisor; the others must agree."""
    scaling = RopeScaling(kind="llama3", factor=_shortest(divisors.max().item()))
    wanted = frequencies(config) / frequencies(config.with_(rope_scaling=scaling))
    if divisors.shape != wanted.shape or not torch.allclose(divisors, wanted, rtol=1e-4):
        raise WeightsError(f"{_ROPE_FACTORS} of {config.name} does not scale as Llama 3.1 does; kvlab knows no other")
    return scaling


def _shortest(value: float) -> float:
    """The number that was meant by a float32: 9.999999747378752e-06 was 1e-05."""
    return float(str(np.float32(value)))
