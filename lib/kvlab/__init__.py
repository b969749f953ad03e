"""kvlab: prefill, decode and the KV cache of large language models, built and measured."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlab.config import ModelConfig
    from kvlab.generation.generate import generate
    from kvlab.weights import load

__version__ = "0.1.0"
__all__ = ["ModelConfig", "__version__", "generate", "load"]

_HOME = {"ModelConfig": "kvlab.config", "generate": "kvlab.generation", "load": "kvlab.weights"}


def __getattr__(name: str) -> Any:
    """Hand names on lazily: ``import kvlab`` itself must not import torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'kvlab' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)
