"""AWQ: scale the channels that activations say are important, so that rounding hurts them less (arXiv:2306.00978).

A rounding error of a weight is multiplied by its activation. Where a channel's activations are large, its weights are
multiplied by s before rounding and the activations divided by s: the product is the same, and the error of that
channel becomes s times smaller. s is the mean magnitude of the activation to a power between 0 and 1 that is searched.
The division costs nothing: it is folded into the layer before.

Then each group's range is searched: with the few largest weights clipped the steps are finer for all the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvlab.errors import ConfigError
from kvlab.model import GPT, Block, GatedMLP
from kvlab.packing import quantize as round_to
from kvlab.quantize.methods import Method

#: Powers of the activation magnitude that are tried; 0 leaves the layer alone.
POWERS = tuple(step / 10 for step in range(11))

#: Shares of a group's range that are tried; 1 clips nothing.
RANGES = tuple(1 - step / 20 for step in range(9))

#: Rows of activations, spread over the text, by which ranges are judged.
RANGE_ROWS = 128


@dataclass(frozen=True)
class Scaled:
    """What AWQ did to one matrix.

    Args:
        layer: its name.
        power: of the activation magnitude, the best of those tried.
        before: mean squared error of the layer's output, rounded without scaling.
        after: and with it.
    """

    layer: str
    power: float
    before: float
    after: float


def awq(model: GPT, tokens: Int[Tensor, "batch time"], method: Method) -> list[Scaled]:
    """Prepare a model's weights in place for a rounding that follows: scale channels, then clip ranges.

    Quantize afterwards with the same method.

    Args:
        model: of the Llama kind (RMSNorm, gated MLP), wide.
        tokens: calibration text, a few hundred to a few thousand tokens of the kind that the model will see.
        method: the rounding to come.

    Raises:
        ConfigError: the model has another structure or is quantized, or a group size does not divide a layer; the model
            is as it was.
    """
    report = scale_channels(model, tokens, method)
    clip_ranges(model, tokens, method)
    return report


def scale_channels(model: GPT, tokens: Int[Tensor, "batch time"], method: Method) -> list[Scaled]:
    """The first half of :func:`awq`: rescale channels; before rounding the model's answers are the same.

    Norms are rescaled for the projections that read them, values for the output projection, and ``up`` for ``down``.

    Args:
        model: of the Llama kind (RMSNorm, gated MLP), wide.
        tokens: calibration text.
        method: the rounding to come.

    Raises:
        ConfigError: see :func:`awq`.
    """
    report: list[Scaled] = []
    with torch.inference_mode():
        seen = _inputs(model, _matrices(model, method), tokens)
        for index, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            name = f"blocks.{index}"
            # Inputs were recorded before any scaling. Each scaling keeps the function, so they stay right for all
            # matrices but those whose own input was divided, and these are done once.
            for layer, matrix, divide, tie in _sites(block):
                x = seen[f"{name}.{layer}"]
                scales, found = _search(f"{name}.{layer}", matrix, x, method, tie)
                report.append(found)
                matrix.weight.mul_(scales)
                divide(scales)
    return report


def clip_ranges(model: GPT, tokens: Int[Tensor, "batch time"], method: Method) -> None:
    """The second half of :func:`awq`: clip each group's weights to the share of its range that rounds best.

    Best is the smallest squared error of what the group adds to the output. Where a few weights reach far, the steps
    of the others become finer.

    Args:
        model: of the Llama kind (RMSNorm, gated MLP), wide.
        tokens: calibration text.
        method: the rounding to come.

    Raises:
        ConfigError: see :func:`awq`.
    """
    with torch.inference_mode():
        matrices = _matrices(model, method)
        seen = _inputs(model, matrices, tokens)
        for name, matrix in matrices:
            x = seen[name]
            matrix.weight.copy_(_clipped(name, matrix.weight, x[:: max(1, len(x) // RANGE_ROWS)], method))


def _sites(
    block: Block,
) -> list[tuple[str, nn.Linear, Callable[[Tensor], None], Callable[[Tensor], Tensor]]]:
    """Each matrix of a block, what divides its input, and how its channels must share a scale."""
    attention, mlp = block.attention, block.mlp
    assert isinstance(mlp, GatedMLP)
    queries, _, kv = attention.heads
    group, width = queries // kv, attention.head_dim

    def divide_values(scales: Float[Tensor, "inputs"]) -> None:
        own = scales.view(kv, group, width)[:, 0].reshape(-1)
        attention.qkv.weight[-kv * width :].div_(own[:, None])
        if attention.qkv.bias is not None:
            attention.qkv.bias[-kv * width :].div_(own)

    def divide_up(scales: Float[Tensor, "inputs"]) -> None:
        half = len(mlp.gate_up.weight) // 2
        mlp.gate_up.weight[half:].div_(scales[:, None])
        if mlp.gate_up.bias is not None:
            mlp.gate_up.bias[half:].div_(scales)

    def shared(magnitude: Float[Tensor, "inputs"]) -> Float[Tensor, "inputs"]:
        """Query heads of a group read the same values, and so share their scales."""
        return magnitude.view(kv, group, width).mean(1, keepdim=True).expand(kv, group, width).reshape(-1)

    def own(magnitude: Float[Tensor, "inputs"]) -> Float[Tensor, "inputs"]:
        return magnitude

    return [
        ("attention.qkv", attention.qkv, lambda s: _divide_norm(block.attention_norm, s), own),
        ("attention.out", attention.out, divide_values, shared),
        ("mlp.gate_up", mlp.gate_up, lambda s: _divide_norm(block.mlp_norm, s), own),
        ("mlp.down", mlp.down, divide_up, own),
    ]


def _divide_norm(norm: nn.Module, scales: Float[Tensor, "inputs"]) -> None:
    weight = norm.weight
    assert isinstance(weight, Tensor)
    weight.div_(scales)


def _search(
    name: str, matrix: nn.Linear, x: Float[Tensor, "rows inputs"], method: Method, tie: Callable[[Tensor], Tensor]
) -> tuple[Float[Tensor, "inputs"], Scaled]:
    """The scales whose rounding changes the layer's output least."""
    weight, exact = matrix.weight.float(), x @ matrix.weight.float().T
    magnitude = tie(x.abs().mean(0))
    # A channel that is silent in this text must not be divided out of the range of float16.
    magnitude = magnitude.clamp(min=max(1e-4 * magnitude.max().item(), 1e-8))
    best: tuple[float, float, Tensor] | None = None
    plain = 0.0
    for power in POWERS:
        scales = magnitude**power
        scales = scales / (scales.max() * scales.min()).sqrt()
        rounded = round_to(weight * scales, method.grid, name, torch.float16).dequantize() / scales
        error = (x @ rounded.T - exact).square().mean().item()
        plain = error if power == 0 else plain
        if best is None or error < best[0]:
            best = (error, power, scales)
    assert best is not None
    return best[2].to(matrix.weight.dtype), Scaled(name, best[1], plain, best[0])


def _clipped(
    name: str, weight: Float[Tensor, "outputs inputs"], x: Float[Tensor, "rows inputs"], method: Method
) -> Float[Tensor, "outputs inputs"]:
    """Weights whose every group is cut to the range that rounds best."""
    group = method.grid.group_of(weight.shape[1], name)
    groups = weight.float().unflatten(1, (-1, group))
    inputs = x.unflatten(1, (-1, group)).transpose(0, 1)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    if method.grid.symmetric:
        high = torch.maximum(high, -low)
        low = -high
    best, least = groups, torch.full_like(low, torch.inf)
    for share in RANGES:
        cut = groups.clamp(low * share, high * share)
        off = round_to(cut.flatten(1), method.grid, name, torch.float16).dequantize().view_as(groups) - groups
        error = (inputs @ off.permute(1, 2, 0)).square().mean(1).T[..., None]  # outputs, groups, 1
        best, least = torch.where(error < least, cut, best), torch.minimum(error, least)
    return best.flatten(1)


def _matrices(model: GPT, method: Method) -> list[tuple[str, nn.Linear]]:
    """The matrices in the blocks, after checking that all of them can be scaled and then rounded."""
    found = [(name, layer) for name, layer in model.named_modules() if name.startswith("blocks.")]
    matrices = [(name, layer) for name, layer in found if isinstance(layer, nn.Linear)]
    config = model.config
    if len(matrices) != 4 * config.n_layer or config.norm != "rmsnorm" or not config.gated_mlp:
        raise ConfigError(
            f"{config.name} is quantized or has LayerNorm or a plain MLP; AWQ here takes wide models of the Llama kind"
        )
    for name, layer in matrices:
        method.grid.group_of(layer.in_features, name)
    return matrices


def _inputs(
    model: GPT, matrices: list[tuple[str, nn.Linear]], tokens: Int[Tensor, "batch time"]
) -> dict[str, Float[Tensor, "rows inputs"]]:
    """What every matrix in the blocks reads while the model reads the tokens, in float32."""
    seen: dict[str, Tensor] = {}
    hooks = [layer.register_forward_pre_hook(_recorder(name, seen)) for name, layer in matrices]
    try:
        model(tokens.to(model.device), last_only=True)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _recorder(name: str, seen: dict[str, Tensor]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def record(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen[name] = inputs[0].reshape(-1, inputs[0].shape[-1]).float()

    return record
