"""Quantized models on disk: kvlab's own folders, and the codes that a GGUF file holds.

A folder has codes under the names of our layers (``blocks.0.mlp.down.codes``, ``.scale``, ``.minimum``), everything
else in floating point, and in ``config.json`` what was rounded how. The layout on disk is one for all devices; kernels
repack when a model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvlab.config import ModelConfig
from kvlab.errors import ConfigError, WeightsError
from kvlab.model import GPT
from kvlab.packing import Grid, Quantized, pack
from kvlab.quantize import LowBitEmbedding, LowBitLinear, linears, put
from kvlab.weights.folder import empty_model, open_checkpoint, read_json, write_folder
from kvlab.weights.gguf_config import hub_raws, rotary_rows
from kvlab.weights.gguf_file import GGUFFile, RawTensor, dequantize
from kvlab.weights.layout import from_hf, sources

#: How codes lie in a file: rows of the matrix, the first code of a byte in its low bits, scales beside them.
LAYOUT = "rows-1"

#: Where an embedding of codes has them.
_TABLE = "embedding.table."

#: Storage types of a GGUF file whose codes are kept, with bytes of a block of 32 and the grid of its codes.
_BLOCKS = {"Q8_0": (34, Grid(8, 32, symmetric=True)), "Q4_1": (20, Grid(4, 32, symmetric=False))}


def write_quantized(
    folder: Path, config: ModelConfig, model: GPT, tokenizer_json: str, tokenizer_config: Mapping[str, Any]
) -> Path:
    """Write a quantized model as a folder.

    Args:
        folder: is made; its files of these names are replaced.
        config: the model's shape.
        model: holds codes.
        tokenizer_json: of the ``tokenizers`` library.
        tokenizer_config: special tokens and chat template.
    """
    layers = {name: layer.grid for name, layer in linears(model) if isinstance(layer, LowBitLinear)}
    tensors = {n: t for n, t in model.state_dict().items() if not n.startswith(_TABLE)}
    # A tied embedding is the head's codes; a model file that has a tensor twice would be two storages when read.
    if isinstance(model.embedding, LowBitEmbedding) and not config.tie_embeddings:
        layers["embedding"] = model.embedding.table.grid
        tensors |= {f"embedding.{name}": tensor for name, tensor in model.embedding.table.state_dict().items()}
    note = {
        "quant_method": "kvlab",
        "layout": LAYOUT,
        "layers": {n: {"bits": g.bits, "group": g.group, "symmetric": g.symmetric} for n, g in layers.items()},
    }
    if config.tie_embeddings and "head.weight" in tensors:
        del tensors["head.weight"]
    return write_folder(folder, config, tensors.items(), tokenizer_json, tokenizer_config, quantization=note)


def quantization_of(folder: Path) -> dict[str, Any] | None:
    """What ``config.json`` says about kvlab's own quantization; None for a wide model.

    Args:
        folder: in the Hub's layout.

    Raises:
        WeightsError: the layout is one that this version does not read.
    """
    note = read_json(folder / "config.json").get("quantization_config") or {}
    if note.get("quant_method") != "kvlab":
        return None
    if note.get("layout") != LAYOUT:
        raise WeightsError(
            f"{folder} holds codes in the layout {note.get('layout')!r}; this kvlab reads {LAYOUT!r}: quantize the "
            "original again, or install the kvlab that wrote it"
        )
    return dict(note)


def read_quantized(
    folder: Path, config: ModelConfig, note: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> GPT:
    """The model of a folder with codes.

    Args:
        folder: as :func:`write_quantized` wrote it.
        config: its shape.
        note: from :func:`quantization_of`.
        device: where the weights shall be.
        dtype: of everything that is not codes or scales.

    Raises:
        WeightsError: codes are missing, or do not fit the configuration.
    """
    model = empty_model(config)
    with open_checkpoint(folder) as tensors:
        codes = {name: _stored(folder, tensors, name, grid) for name, grid in note["layers"].items()}
        state = {
            name: tensor.to(device, dtype)
            for name, tensor in tensors.items()
            if name.rpartition(".")[0] not in codes or name.endswith(".bias")
        }
        codes = {name: weight.map(lambda tensor: tensor.to(device)) for name, weight in codes.items()}
    return _assemble(folder, model, codes, state).to(device)


def gguf_model(file: GGUFFile, config: ModelConfig) -> GPT:
    """The model of a GGUF file in the file's own formats: its integers, none of them rounded again.

    Args:
        file: an open GGUF file.
        config: its shape.

    Raises:
        WeightsError: a tensor is of an unknown name or type, or parts of one matrix of ours are stored differently.
    """
    raws = hub_raws(file)
    codes: dict[str, Quantized] = {}
    wide: dict[str, Tensor] = {}
    for ours, source in sources(config).items():
        parts = [raws[name] for name in source.names if name in raws]
        kinds = {raw.kind for raw in parts}
        if len(parts) == len(source.names) and kinds <= set(_BLOCKS):
            name = "head" if ours == "embedding.weight" and config.tie_embeddings else ours.removesuffix(".weight")
            codes[name] = _stacked(ours, parts, config)
        else:
            wide |= {
                name: rotary_rows(raw.name, dequantize(raw), config)
                for name, raw in zip(source.names, parts, strict=False)
            }
    state = {name: tensor for name, tensor in from_hf(config, _filled(config, wide)).items() if tensor.numel()}
    return _assemble(file.path, empty_model(config), codes, state)


def _filled(config: ModelConfig, wide: dict[str, Tensor]) -> dict[str, Tensor]:
    """Wide tensors, with empty ones in the place of those that are codes."""
    names = {name for source in sources(config).values() for name in source.names}
    return {name: torch.empty(0) for name in names} | wide


def _assemble(where: Path, model: GPT, codes: dict[str, Quantized], state: dict[str, Tensor]) -> GPT:
    biases = {name: state.pop(f"{name}.bias") for name in codes if f"{name}.bias" in state}
    if model.config.tie_embeddings and "embedding.weight" in state:
        state["head.weight"] = state["embedding.weight"]
    lacking = [n for n in model.state_dict() if n.rpartition(".")[0] not in codes and n not in state]
    if model.config.tie_embeddings and "head" in codes:
        lacking = [name for name in lacking if name != "embedding.weight"]
    if lacking:
        raise WeightsError(f"{where} lacks {', '.join(lacking[:3])}; it does not fit its configuration")
    _require_shapes(where, model, codes)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie()
    return put(model, codes, biases).eval().requires_grad_(False)


def _require_shapes(where: Path, model: GPT, codes: Mapping[str, Quantized]) -> None:
    shapes = {name.removesuffix(".weight"): tuple(t.shape) for name, t in model.state_dict().items()}
    for name, weight in codes.items():
        found = (weight.codes.shape[0], weight.columns)
        if shapes[name] != found:
            raise WeightsError(
                f"{where}: {name} is {list(found)} where its configuration makes it {list(shapes[name])}"
            )


def _stored(where: Path, tensors: Mapping[str, Tensor], name: str, grid: Mapping[str, Any]) -> Quantized:
    try:
        shape = Grid(int(grid["bits"]), grid["group"], bool(grid["symmetric"]))
        codes, scale = tensors[f"{name}.codes"], tensors[f"{name}.scale"]
        minimum = None if shape.symmetric else tensors[f"{name}.minimum"]
        rows, columns = codes.shape[0], codes.shape[-1] * 8 // shape.bits
        wanted = (rows, columns // shape.group_of(columns, name))
    except (KeyError, ConfigError) as failure:
        raise WeightsError(f"{where}: the codes of {name} are not whole ({failure}); write the model again") from None
    for kind, tensor in (("scale", scale), ("minimum", scale if minimum is None else minimum)):
        if codes.dtype != torch.uint8 or not tensor.is_floating_point() or tuple(tensor.shape) != wanted:
            raise WeightsError(
                f"{where}: {name} has codes {list(codes.shape)} in {codes.dtype} and a {kind} {list(tensor.shape)} in "
                f"{tensor.dtype}; it should be {list(wanted)}: write the model again"
            )
    return Quantized(codes, scale, minimum, shape)


def _stacked(ours: str, parts: list[RawTensor], config: ModelConfig) -> Quantized:
    """The parts of one matrix of ours, row after row."""
    if len({raw.kind for raw in parts}) > 1:
        mixed = ", ".join(f"{raw.name} {raw.kind}" for raw in parts)
        raise WeightsError(
            f"{ours} is one matrix here, and the file stores its parts differently ({mixed}); load it wide"
        )
    every = [_codes_of(raw).map(lambda tensor, raw=raw: rotary_rows(raw.name, tensor, config)) for raw in parts]
    first = every[0]
    minimum = None if first.minimum is None else torch.cat([q.minimum for q in every if q.minimum is not None])
    return Quantized(torch.cat([q.codes for q in every]), torch.cat([q.scale for q in every]), minimum, first.grid)


def _codes_of(raw: RawTensor) -> Quantized:
    """The integers of a stored tensor with their scales: ``block_q8_0`` and ``block_q4_1`` of ``ggml-common.h``."""
    size, grid = _BLOCKS[raw.kind]
    blocks = torch.from_numpy(np.array(raw.data)).reshape(raw.shape[0], -1, size)
    scale = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)
    if raw.kind == "Q8_0":
        # Signed bytes, shifted up as ours are: the sum modulo 256 is the sum.
        return Quantized((blocks[..., 2:] ^ 0x80).flatten(1), scale, None, grid)
    minimum = blocks[..., 2:4].contiguous().view(torch.float16).squeeze(-1)
    # ggml keeps element i and element i + 16 of a block in one byte, we keep neighbours.
    codes = torch.cat((blocks[..., 4:] & 0x0F, blocks[..., 4:] >> 4), dim=-1)
    return Quantized(pack(codes.flatten(1), 4), scale, minimum, grid)
