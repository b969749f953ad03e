"""Writes GGUF files as llama.cpp's converter does: its names, its metadata, its permuted queries and keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def llama_cpp_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def permute(weights: np.ndarray, n_head: int) -> np.ndarray:
    """``LlamaModel.permute`` of llama.cpp's convert_hf_to_gguf.py, word for word."""
    return (
        weights.reshape(n_head, 2, weights.shape[0] // n_head // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def stored(weights: np.ndarray, kind: Kind) -> np.ndarray:
    """As llama.cpp stores it; vectors stay float32."""
    return weights if weights.ndim == 1 else gguf.quants.quantize(weights, kind)


def write_gguf(
    path: Path,
    reference: Any,
    rules: Tokenizer,
    kind: Kind = Kind.F32,
    *,
    permuted: bool | None = None,
    metadata: dict[str, Any] | None = None,
    leave_out: tuple[str, ...] = (),
    more: dict[str, np.ndarray] | None = None,
    kinds: dict[str, Kind] | None = None,
) -> dict[str, np.ndarray]:
    """Write a model of ``transformers`` as GGUF; returns what ``gguf.dequantize`` makes of each stored tensor.

    Matrices whose Hub name has a part that is in ``kinds`` are stored so, the others as ``kind``.
    """
    config = reference.config
    family = config.model_type
    writer = gguf.GGUFWriter(path, family)
    _add_shape(writer, config)
    add_tokenizer(writer, rules, leave_out)
    for key, value in (metadata or {}).items():
        _add(writer, key, value)
    meant = {}
    tied = config.tie_word_embeddings
    for name, tensor in reference.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        weights = tensor.detach().float().numpy()
        if (family == "llama" if permuted is None else permuted) and (".q_proj." in name or ".k_proj." in name):
            weights = permute(weights, config.num_attention_heads if ".q_" in name else config.num_key_value_heads)
        wanted = next((other for part, other in (kinds or {}).items() if part in name), kind)
        data = np.ascontiguousarray(stored(weights, wanted))
        stored_as = Kind.F32 if weights.ndim == 1 else wanted
        writer.add_tensor(llama_cpp_name(name), data, raw_dtype=stored_as)
        meant[name] = gguf.dequantize(data, stored_as).reshape(weights.shape)
    for name, array in (more or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def _add_shape(writer: Any, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.model_type == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)


def add_tokenizer(writer: Any, rules: Tokenizer, leave_out: tuple[str, ...] = ()) -> None:
    import json

    model = json.loads(rules.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    special = {token.content for token in rules.get_added_tokens_decoder().values()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    if "add_bos" not in leave_out:
        writer.add_add_bos_token(True)


def _add(writer: Any, key: str, value: Any) -> None:
    for kv in writer.kv_data:  # the writer refuses a key twice
        kv.pop(key, None)
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif value is not None:
        writer.add_string(key, value)
