"""Where compiled steps are kept, how they are made, and how they come back: whatever kind of step it is."""

from __future__ import annotations

import hashlib
import inspect
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvlab import rope
from kvlab.cache import ragged
from kvlab.devices import dtype_name
from kvlab.errors import DeviceError, one_line
from kvlab.kernels import built, direct_calls, instruction_set, library
from kvlab.model import GPT, attention, gpt, layers
from kvlab.quantize import RowAwareLinear, linears
from kvlab.quantize import layers as quantized_layers
from kvlab.store import cache_folder, publish, staging


def package_of(model: GPT, rows: int, kind: str, source: Path) -> Path:
    """Where a compiled step is, or will be: one for each shape, formats, rows, instruction set, torch and source.

    Args:
        model: the decoder.
        rows: of the step.
        kind: of step, with whatever else it depends on; part of the name.
        source: of the step.
    """
    layers_ = [f"{name} {_route(layer, rows, model.dtype)}" for name, layer in linears(model)]
    layers_ += [f"{name} {held.dtype} {tuple(held.shape)}" for name, held in model.state_dict().items()]
    sources = [inspect.getsource(module) for module in (gpt, layers, attention, rope, ragged, quantized_layers)]
    sources += [path.read_text("utf8") for path in (Path(__file__), source)]
    kernels = library().stem if built() else "torch"
    shape = repr(replace(model.config, name=""))
    key = [shape, *layers_, dtype_name(model.dtype), f"{rows}{kind}", torch.__version__, instruction_set(), kernels]
    digest = hashlib.sha256("\n".join(key + sources).encode()).hexdigest()[:24]
    return cache_folder() / "steps" / f"{model.config.name.replace('/', '-')}-{rows}{kind}-{digest}.pt2"


def _route(layer: nn.Module, rows: int, dtype: torch.dtype) -> str:
    """Format of a layer and the product that it takes: another product is another graph."""
    if not isinstance(layer, RowAwareLinear):
        return "plain"
    return f"{layer.format} {layer.route(rows, dtype)}"


def require_cpu(model: GPT) -> None:
    """Packages are for a CPU.

    Args:
        model: the decoder.

    Raises:
        DeviceError: it is elsewhere.
    """
    if model.device.type != "cpu":
        raise DeviceError(f"the model is on {model.device}; packages are for a CPU, a GPU records CUDA graphs")


def empty_layers(model: GPT, *shape: int) -> list[Tensor]:
    """Keys and values of each layer in turn, to write a step down with.

    Args:
        model: the decoder.
        shape: of the keys of a layer.
    """
    return [torch.zeros(shape, dtype=model.dtype) for _ in range(2 * model.config.n_layer)]


def make_package(step: nn.Module, args: tuple[Any, ...], dynamic: tuple[Any, ...], target: Path) -> Path:
    """Write a step down for arguments of these shapes, compile it, and put the package into its place.

    Args:
        step: has a ``model``.
        args: examples, each a tensor of its own: the exporter takes two that are one tensor for one input.
        dynamic: which sizes of them may differ.
        target: the place.

    Raises:
        DeviceError: it cannot be compiled here.
    """
    configs = {
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.custom_ops_to_c_shims": direct_calls(),
    }
    with staging(target) as work, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's, about itself
        made = work / target.name
        try:
            exported = torch.export.export(step, args, dynamic_shapes=dynamic)
            torch._inductor.aoti_compile_and_package(exported, package_path=str(made), inductor_configs=configs)
        except Exception as failure:  # the compiler's own, of many kinds
            name = step.model.config.name  # type: ignore[union-attr]
            raise DeviceError(f"the step of {name} cannot be compiled here: {one_line(failure)[:300]}") from failure
        return publish(made, target)


def load_package(path: Path, step: nn.Module) -> torch._C._aoti.AOTIModelPackageLoader:
    """A package with the weights of a step's model, used where they are.

    Args:
        path: of the package.
        step: what it was made from, over the model at hand.
    """
    # The loader itself: the wrapper around it imports the compiler (a second) and parses its call at every step.
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
    state: dict[str, Tensor] = {**dict(step.named_parameters(remove_duplicate=False))}
    state |= dict(step.named_buffers(remove_duplicate=False))
    weights = {name: state[name].data for name in loader.get_constant_fqns()}
    loader.load_constants(weights, False, True, True)
    return loader
