"""Shapes and types of the library are checked at run time in every test."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from jaxtyping import install_import_hook

for _module in ("kvlab.cache", "kvlab.model", "kvlab.generation", "kvlab.weights"):
    install_import_hook(_module, "beartype.beartype")

import torch  # noqa: E402

from kvlab.config import ModelConfig  # noqa: E402
from kvlab.model import GPT  # noqa: E402


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


@pytest.fixture
def config() -> ModelConfig:
    return small_config()


@pytest.fixture
def model(config: ModelConfig) -> GPT:
    return random_gpt(config)


@pytest.fixture
def make_model() -> Callable[..., GPT]:
    return lambda dtype=torch.float64, seed=0, **changes: random_gpt(small_config(**changes), dtype, seed)
