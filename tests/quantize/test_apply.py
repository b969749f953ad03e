"""A quantized model is the model whose weights are what the codes stand for, or it is the model as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from kvlab.errors import ConfigError
from kvlab.generation import generate
from kvlab.model import GPT
from kvlab.packing import quantize as round_to
from kvlab.quantize import (
    Int4,
    Int8,
    LowBitEmbedding,
    LowBitLinear,
    Method,
    WideLinear,
    linears,
    quantize,
    row_aware,
    weight_storage_bytes,
)

SHAPE: dict[str, object] = {"hidden_size": 64, "intermediate_size": 96, "n_head": 4, "n_kv_head": 2, "head_dim": 16}
BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "tied": {"tie_embeddings": True},
    "biased": BIASES,
    "gpt2": {
        "position": "learned", "norm": "layernorm", "gated_mlp": False, "activation": "gelu_tanh",
        "tie_embeddings": True, **BIASES,
    },
    "qwen3": {"qk_norm": True, "tie_embeddings": True},
    "mistral": {"windows": (4, None)},
}  # fmt: skip
METHODS = [Int8(), Int8(32), Int4(), Int4(16), Int4(32, symmetric=True)]
MakeModel = Callable[..., GPT]


def tokens_of(model: GPT, batch: int = 2, time: int = 9) -> Tensor:
    return torch.randint(model.config.vocab_size, (batch, time), generator=torch.Generator().manual_seed(1))


def dequantized(model: GPT, method: Method, head: Method | None) -> GPT:
    """The same model with every matrix rounded and widened again: what quantization means."""
    twin = copy.deepcopy(model)
    for name, layer in linears(twin):
        chosen = head if name == "head" else method
        if chosen is not None:
            rounded = round_to(layer.weight, chosen.grid, scale_dtype=torch.float16).dequantize(layer.weight.dtype)
            layer.weight.copy_(rounded)  # in place: a tied embedding follows
    return twin


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("head", [Int8(), None, Int4(32)], ids=str)
def test_logits_are_those_of_the_dequantized_weights(
    make_model: MakeModel, family: str, method: Method, head: Method | None
) -> None:
    model = make_model(**SHAPE | FAMILIES[family])
    want = dequantized(model, method, head)
    got = quantize(model, method, head=head)
    assert got is model
    tokens = tokens_of(model)
    torch.testing.assert_close(model(tokens), want(tokens), rtol=0, atol=1e-12)
    asked = generate(model, [1, 2, 3], max_new_tokens=6).run().tokens
    assert asked == generate(want, [1, 2, 3], max_new_tokens=6).run().tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrower_activations_give_the_same_up_to_their_rounding(
    make_model: MakeModel, family: str, dtype: torch.dtype
) -> None:
    """Whatever product each layer takes: one row, then nine."""
    model = make_model(dtype, **SHAPE | FAMILIES[family])
    want = dequantized(model, Int4(32), Int8()).double()
    quantize(model, Int4(32))
    for tokens in (tokens_of(model, 1, 1), tokens_of(model, 1, 9)):
        got, exact = model(tokens).double(), want(tokens)
        assert ((got - exact).norm() / exact.norm()).item() < {torch.float32: 1e-5, torch.bfloat16: 0.06}[dtype]


def test_a_tied_head_is_quantized_once_and_not_lost(make_model: MakeModel) -> None:
    """aprender 234, transformers 37905: one set of codes, in one storage, for lookup and for logits."""
    model = make_model(**SHAPE, tie_embeddings=True)
    wide = model.head.weight.detach().clone()
    quantize(model, Int4(32))
    assert isinstance(model.embedding, LowBitEmbedding)
    assert isinstance(model.head, LowBitLinear)
    assert model.embedding.table.codes.data_ptr() == model.head.codes.data_ptr()
    assert model.embedding.table.scale.data_ptr() == model.head.scale.data_ptr()
    assert model.head.grid.bits == 8
    rows = model.embedding(torch.arange(61)[None])[0]
    assert torch.equal(rows, model.head.quantized.dequantize(torch.float64))
    torch.testing.assert_close(rows, wide, rtol=0, atol=0.01)
    model.to(torch.float32)
    assert model.embedding.table.codes.data_ptr() == model.head.codes.data_ptr()


def test_an_untied_embedding_stays_wide(make_model: MakeModel) -> None:
    model = quantize(make_model(**SHAPE), Int4(32))
    assert isinstance(model.embedding, nn.Embedding)
    wide = quantize(make_model(**SHAPE, tie_embeddings=True), Int4(32), head=None)
    assert isinstance(wide.head, nn.Linear)
    assert wide.head.weight.data_ptr() == wide.embedding.weight.data_ptr()


def test_bytes_are_counted_once_with_scales(make_model: MakeModel) -> None:
    model = make_model(torch.float32, **SHAPE, n_layer=1, tie_embeddings=True)
    weights, embedding, norms = 64 * (128 + 64) + 64 * 96 * 3, 61 * 64, 3 * 64
    assert weight_storage_bytes(model) == 4 * (weights + embedding + norms)
    quantize(model, Int4(32))
    four = weights // 2 + weights // 32 * 4  # a float16 scale and a float16 minimum for 32 codes
    assert weight_storage_bytes(model) == four + embedding + 61 * 2 + 4 * norms


def state(model: GPT) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_unchanged(model: GPT, before: dict[str, Tensor]) -> None:
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if not tensor.isnan().any())
    assert all(type(layer) is nn.Linear for _, layer in linears(model))


@pytest.mark.parametrize(
    ("method", "head", "message"),
    [
        (Int4(48), Int8(), r"blocks\.0\.attention\.qkv has rows of 64 = 1 x 48 \+ 16; groups of 48 do not divide"),
        (Int4(64), Int8(), r"blocks\.0\.mlp\.down has rows of 96 = 1 x 64 \+ 32; groups of 64 do not divide"),
        (Int8(), Int8(48), r"head has rows of 64 = 1 x 48 \+ 16"),
    ],
)
def test_a_group_size_that_does_not_divide_names_the_layer_and_changes_nothing(
    make_model: MakeModel, method: Method, head: Method, message: str
) -> None:
    """torchchat 1362: such layers were skipped in silence, and stayed wide."""
    model = make_model(**SHAPE)
    before = state(model)
    with pytest.raises(ConfigError, match=message):
        quantize(model, method, head=head)
    assert_unchanged(model, before)


@pytest.mark.parametrize("name", ["blocks.0.attention.qkv", "blocks.1.mlp.down", "head"])
@pytest.mark.parametrize(
    ("value", "message"), [(0.0, "holds zeros only"), (torch.nan, "holds NaN or"), (torch.inf, "holds NaN or infinity")]
)
def test_weights_that_are_zero_or_not_finite_name_the_layer_and_change_nothing(
    make_model: MakeModel, name: str, value: float, message: str
) -> None:
    model = make_model(**SHAPE)
    weight = model.get_submodule(name).weight
    weight[...] = value if value == 0 else weight
    weight[3, 5] = value
    before = state(model)
    with pytest.raises(ConfigError, match=f"{name} {message}"):
        quantize(model, Int4(32))
    assert_unchanged(model, before)


@pytest.mark.parametrize("method", [Int8(), Int4()], ids=str)
def test_quantizing_twice_is_refused_and_changes_nothing(make_model: MakeModel, method: Method) -> None:
    model = quantize(make_model(**SHAPE, tie_embeddings=True), Int8())
    before = state(model)
    with pytest.raises(ConfigError, match=r"blocks\.0\.attention\.qkv is quantized already; load the model again"):
        quantize(model, method)
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    "cast", [lambda m: m.to(torch.bfloat16), lambda m: m.float(), lambda m: m.half(), lambda m: m.to("cpu")],
    ids=["bfloat16", "float", "half", "cpu"],
)  # fmt: skip
def test_a_cast_of_the_model_keeps_codes_and_scales(make_model: MakeModel, cast: Callable[[GPT], GPT]) -> None:
    """They are what was rounded to: a scale in bfloat16 would be another weight."""
    model = quantize(make_model(torch.float32, **SHAPE | BIASES, tie_embeddings=True), Int4(32))
    model(tokens_of(model))
    before = state(model)
    cast(model)
    for name, layer in linears(model):
        assert torch.equal(layer.codes, before[f"{name}.codes"])
        assert layer.scale.dtype == torch.float16
        assert torch.equal(layer.scale, before[f"{name}.scale"])
        assert layer.bias is None or layer.bias.dtype == model.dtype
    assert model.embedding(torch.tensor([[1]])).dtype == model.dtype
    out = model(tokens_of(model))
    assert out.dtype == model.dtype
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_row_aware_layers_share_the_weights_and_give_the_same_logits(make_model: MakeModel, family: str) -> None:
    model = make_model(torch.float32, **SHAPE | FAMILIES[family])
    tokens, size = tokens_of(model), weight_storage_bytes(model)
    want, places = model(tokens), {name: layer.weight.data_ptr() for name, layer in linears(model)}
    assert row_aware(row_aware(model)) is model
    assert all(isinstance(layer, WideLinear) for _, layer in linears(model))
    assert {name: layer.weight.data_ptr() for name, layer in linears(model)} == places
    assert weight_storage_bytes(model) == size
    torch.testing.assert_close(model(tokens), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(tokens[:1, :1]), want[:1, :1], rtol=1e-4, atol=1e-4)


def test_a_row_aware_model_can_be_quantized(make_model: MakeModel) -> None:
    model = make_model(**SHAPE, tie_embeddings=True)
    want = dequantized(model, Int4(32), Int8())
    tokens = tokens_of(model)
    torch.testing.assert_close(quantize(row_aware(model), Int4(32))(tokens), want(tokens), rtol=0, atol=1e-12)


@pytest.mark.parametrize("prepare", [row_aware, lambda model: quantize(model, Int8())], ids=["wide", "codes"])
def test_a_copy_multiplies_by_its_own_weights(make_model: MakeModel, prepare: Callable[[GPT], GPT]) -> None:
    model = prepare(make_model(torch.float32, **SHAPE))
    tokens = tokens_of(model)
    want = model(tokens)
    twin = copy.deepcopy(model)
    for _, layer in linears(model):
        (layer.codes if isinstance(layer, LowBitLinear) else layer.weight).zero_()
    torch.testing.assert_close(twin(tokens), want)
    assert not torch.allclose(model(tokens), want)


@pytest.mark.parametrize("method", [Int8, Int4])
def test_an_impossible_group_size_is_refused_when_the_method_is_made(method: type[Method]) -> None:
    with pytest.raises(ConfigError, match="group is 0"):
        method(0)
