"""Small decoders with random weights, for every test that needs one."""

from __future__ import annotations

import torch

from kvlab.config import ModelConfig
from kvlab.model import GPT


def small_config(**changes: object) -> ModelConfig:
    """A decoder of a few thousand weights: 6 query heads over 2 KV heads."""
    shape: dict[str, object] = {
        "name": "small", "vocab_size": 61, "n_layer": 2, "n_head": 6, "n_kv_head": 2, "head_dim": 8,
        "hidden_size": 24, "intermediate_size": 40, "max_seq_len": 64,
    }  # fmt: skip
    return ModelConfig(**(shape | changes))  # type: ignore[arg-type]


def random_gpt(config: ModelConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> GPT:
    """A decoder with random weights, large enough that a wrong mask or position shows."""
    torch.manual_seed(seed)
    model = GPT(config).to(dtype).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    return model
