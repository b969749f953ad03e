"""Put low-bit or row-aware layers in the place of a model's linear layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvlab.errors import ConfigError
from kvlab.model import GPT
from kvlab.packing import Grid, Quantized
from kvlab.packing import quantize as round_to
from kvlab.quantize.layers import LowBitEmbedding, LowBitLinear, RowAwareLinear, WideLinear
from kvlab.quantize.methods import Int8, Method
from kvlab.quantize.routes import known


def quantize(model: GPT, method: Method, *, head: Method | None = Int8()) -> GPT:  # noqa: B008 - frozen
    """Round a model's matrices, in place; activations, norms and biases stay wide.

    A tied head and the embedding share one set of codes. The head takes eight bits by default: rounded to four, it
    costs several per cent of perplexity.

    Args:
        model: the decoder.
        method: for the matrices in the blocks.
        head: for the head; None leaves it wide.

    Raises:
        ConfigError: the model is quantized, a group size does not divide a layer, or weights are zero or not finite;
            the layer is named, and the model is as it was.
    """
    codes: dict[str, Quantized] = {}
    biases: dict[str, Tensor] = {}
    for name, layer in linears(model):
        if isinstance(layer, LowBitLinear):
            raise ConfigError(f"{name} is quantized already; load the model again in its own dtype")
        assert isinstance(layer, nn.Linear | WideLinear)
        chosen = head if name == "head" else method
        if chosen is not None:
            codes[name] = _rounded(name, layer.weight.detach(), chosen.grid)
            biases |= {} if layer.bias is None else {name: layer.bias.detach()}
    return put(model, codes, biases)


def row_aware(model: GPT) -> GPT:
    """Let each linear layer take the fastest product for the rows at hand, in place; the weights stay what they are.

    Args:
        model: the decoder.
    """
    for name, layer in list(linears(model)):
        if isinstance(layer, nn.Linear):
            model.set_submodule(name, WideLinear(layer))
    return model


def measured(model: GPT) -> bool:
    """Whether the crossovers of all formats in a model have been measured on this machine.

    Args:
        model: the decoder.
    """
    return all(
        isinstance(layer, RowAwareLinear) and known(layer.device, layer.format, model.dtype)
        for _, layer in linears(model)
    )


def put(model: GPT, codes: dict[str, Quantized], biases: dict[str, Tensor] | None = None) -> GPT:
    """Put codes that exist already into a model, none of them rounded again.

    Args:
        model: the decoder; its other parameters are in place.
        codes: by the name of the layer, for example ``blocks.0.mlp.down``; ``embedding`` for an embedding of its own.
        biases: by the same names.
    """
    for name, weight in codes.items():
        if name != "embedding":
            model.set_submodule(name, LowBitLinear(weight, (biases or {}).get(name)))
    if "head" in codes and model.config.tie_embeddings:
        head = model.head
        assert isinstance(head, LowBitLinear)
        model.embedding = LowBitEmbedding(head, model.dtype)
    elif "embedding" in codes:
        model.embedding = LowBitEmbedding(LowBitLinear(codes["embedding"]), model.dtype)
    return model


def linears(model: GPT) -> Iterator[tuple[str, nn.Linear | RowAwareLinear]]:
    """The linear layers of a model by name, in the order in which a token meets them.

    Args:
        model: the decoder.
    """
    # A tied embedding has the head's codes: one layer under two names, of which the head's is wanted.
    for name, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, nn.Linear | RowAwareLinear) and not name.startswith("embedding"):
            yield name, layer


def is_quantized(model: GPT) -> bool:
    """Whether some layer of a model holds codes.

    Args:
        model: the decoder.
    """
    return any(isinstance(layer, LowBitLinear) for _, layer in linears(model))


def weight_storage_bytes(model: nn.Module) -> int:
    """Bytes of a model's weights as they are held: parameters and buffers, each storage once, tables of RoPE left out.

    Args:
        model: any.
    """
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.state_dict().values()}
    return sum(held.values())


def _rounded(name: str, weight: Float[Tensor, "outputs inputs"], grid: Grid) -> Quantized:
    if not torch.any(weight):
        raise ConfigError(f"{name} holds zeros only; its weights were probably never loaded")
    return round_to(weight, grid, name, scale_dtype=torch.float16)
