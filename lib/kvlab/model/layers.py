"""The parts of a block beside attention: norms and MLPs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from kvlab.config import ModelConfig

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class RMSNorm(nn.Module):
    """Divide by the root of the mean square, then scale (arXiv:1910.07467).

    Args:
        size: width of the vectors.
        eps: added to the mean square.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        """Normalise the last dimension; statistics are taken in float32 at least."""
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def make_norm(config: ModelConfig) -> nn.Module:
    """The norm of a block: RMSNorm, or LayerNorm with bias."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
    return RMSNorm(config.hidden_size, config.norm_eps)


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))`` (SwiGLU and its kin, arXiv:2002.05202); gate and up are one matrix.

    Args:
        config: the model's shape.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = _ACTIVATIONS[config.activation]

    def forward(self, x: Float[Tensor, "batch time hidden_size"]) -> Float[Tensor, "batch time hidden_size"]:
        """Apply the MLP to each token."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


class MLP(nn.Module):
    """``down(act(up(x)))``, as in GPT-2.

    Args:
        config: the model's shape.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = _ACTIVATIONS[config.activation]

    def forward(self, x: Float[Tensor, "batch time hidden_size"]) -> Float[Tensor, "batch time hidden_size"]:
        """Apply the MLP to each token."""
        return self.down(self.activation(self.up(x)))
