"""What the calculators know: models, devices and formats, as plain data for the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from kvlab.config import ModelConfig, Shape, preset_names, preset_source, shape_of
from kvlab.cost import (
    FORMATS,
    Device,
    Format,
    Hardware,
    Row,
    format_of,
    hardware_names,
    hardware_of,
    operators,
    parameters,
)
from kvlab.cost.memory import cache_format, weight_format
from kvlab.cost.parameters import attention_matrices, expert_parameters, mlp_matrices
from kvlab.errors import ConfigError

_SIZES = ("n_layer", "n_head", "n_kv_head", "head_dim", "hidden_size", "vocab_size", "max_seq_len", "tie_embeddings")
_FORMAT_TITLES = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp8": "fp8",
    "int8": "int8, groups of 128",
    "int4": "int4, groups of 128",
    "q8_0": "8 bits, groups of 32 (q8_0)",
    "q4_0": "4 bits, groups of 32 (q4_0)",
    "q4_1": "4 bits, groups of 32 (q4_1)",
}


def catalogue(model: Shape, device: Device | None, stored: Iterable[str] = ()) -> dict[str, Any]:
    """Every preset, device and format; a model, a device or a format of the reader's own joins them.

    Args:
        model: that is chosen at the start.
        device: that is chosen at the start; None where a calculator asks for none.
        stored: names of the formats that are chosen at the start.

    Raises:
        ConfigError: a name is unknown.
    """
    config, kinds = shape_of(model), {name: format_of(name) for name in (*FORMATS, *stored)}
    models = {name: _model(ModelConfig.preset(name), preset_source(name).status, kinds) for name in preset_names()}
    if config.name not in models or config != ModelConfig.preset(config.name):
        models = {config.name: _model(config, "yours", kinds)} | {n: m for n, m in models.items() if n != config.name}
    formats = {name: {"name": name, "title": _FORMAT_TITLES.get(name, name), **asdict(f)} for name, f in kinds.items()}
    found: dict[str, Any] = {"models": models, "formats": formats}
    if device is not None:
        devices = {name: _device(name) for name in hardware_names()}
        found["devices"] = devices | {hardware_of(device).name: _device(device)}
    return found


def runs_ahead(device: Hardware) -> bool:
    """Whether the host's work hides behind the device's: measured where it was, else everything but a CPU.

    Args:
        device: a device.
    """
    return device.calibration.asynchronous if device.calibration else device.kind != "cpu"


def _model(config: ModelConfig, status: str, kinds: Mapping[str, Format]) -> dict[str, Any]:
    """A shape with what follows from it and is counted here: parameters, matrices, kernels, formats that do not fit."""
    return {
        "name": config.name,
        "status": status,
        **{name: getattr(config, name) for name in _SIZES},
        "windows": [[window, config.windows.count(window)] for window in config.window_kinds],
        "mla": asdict(config.mla) if config.mla else None,
        "moe": _experts(config),
        "parameters": asdict(parameters(config)),
        "matrices": _matrices(config),
        "launches": _launches(config),
        "weights_refused": _refusals(config, kinds, weight_format),
        "cache_refused": _refusals(config, kinds, cache_format),
    }


def _experts(config: ModelConfig) -> dict[str, Any] | None:
    if config.moe is None:
        return None
    counted = {"expert_parameters": expert_parameters(config), "layers": config.n_layer - config.moe.n_dense_layers}
    return asdict(config.moe) | counted


def _matrices(config: ModelConfig) -> list[dict[str, Any]]:
    """Every projection that all tokens go through, with the layers that have it."""
    dense = config.n_layer if config.moe is None else config.moe.n_dense_layers
    found = [(config.n_layer, matrix) for matrix in attention_matrices(config)]
    found += [(dense, matrix) for matrix in mlp_matrices(config, config.intermediate_size) if dense]
    return [{"name": m.name, "calls": calls, "inputs": m.inputs, "outputs": m.outputs} for calls, m in found]


def _launches(config: ModelConfig) -> dict[str, int]:
    """Kernels that a decode step starts, by operator; those that only move activations together."""
    found: dict[str, int] = {"elementwise": 0}
    for operator in operators(config, [Row(1)]):
        name = "elementwise" if operator.part == "elementwise" else operator.name
        found[name] = found.get(name, 0) + operator.calls * operator.launches
    return found


def _refusals(
    config: ModelConfig, kinds: Mapping[str, Format], check: Callable[[ModelConfig, Format], Format]
) -> dict[str, str]:
    """Formats that the model cannot have, with the reason."""
    found = {}
    for name, kind in kinds.items():
        try:
            check(config, kind)
        except ConfigError as error:
            found[name] = str(error).partition(";")[0]
    return found


def _device(device: Device) -> dict[str, Any]:
    hardware = hardware_of(device)
    return {
        "name": hardware.name,
        "label": hardware.label,
        "memory_bytes": hardware.memory_bytes,
        "bandwidth": hardware.bandwidth,
        "flops": dict(hardware.flops),
        "asynchronous": runs_ahead(hardware),
    }
