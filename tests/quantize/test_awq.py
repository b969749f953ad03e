"""AWQ: the same function before rounding, a smaller error after it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from statistics import fmean

import pytest
import torch
from torch import Tensor

import kvlab
from kvlab.errors import ConfigError
from kvlab.evaluate import perplexity
from kvlab.model import GPT
from kvlab.packing import quantize as round_to
from kvlab.quantize import Int4, Int8, Method, awq, clip_ranges, linears, quantize, row_aware, scale_channels
from kvlab.resources import resource

SHAPE: dict[str, object] = {"hidden_size": 64, "intermediate_size": 96, "n_head": 4, "head_dim": 16, "n_kv_head": 2}
FAMILIES: dict[str, dict[str, object]] = {
    "grouped": {},
    "one KV head": {"n_kv_head": 1},
    "as many KV heads": {"n_kv_head": 4},
    "biased": {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "tied": {"tie_embeddings": True},
    "qwen3": {"qk_norm": True},
}
MakeModel = Callable[..., GPT]


def text_for(model: GPT) -> Tensor:
    return torch.randint(model.config.vocab_size, (4, 24), generator=torch.Generator().manual_seed(1))


def loud(model: GPT, factor: float = 30.0) -> GPT:
    """The same function, with a few channels that activations are large in, as large models have them."""
    for block in model.blocks:
        for norm, reader in ((block.attention_norm, block.attention.qkv), (block.mlp_norm, block.mlp.gate_up)):
            channels = torch.arange(3, len(norm.weight), 29)
            norm.weight[channels] *= factor
            reader.weight[:, channels] /= factor
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", [Int4(32), Int8()], ids=str)
def test_before_rounding_the_function_is_the_same(make_model: MakeModel, family: str, method: Method) -> None:
    model = loud(make_model(**SHAPE | FAMILIES[family]))
    tokens, before = text_for(model), copy.deepcopy(model)
    scale_channels(model, tokens, method)
    torch.testing.assert_close(model(tokens), before(tokens), rtol=1e-9, atol=1e-9)
    pairs = zip(linears(model), linears(before), strict=True)
    assert sum(not torch.equal(mine.weight, old.weight) for (_, mine), (_, old) in pairs) >= 4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", [Int4(32), Int4(16, symmetric=True), Int8()], ids=str)
def test_no_layer_gets_worse(make_model: MakeModel, family: str, method: Method) -> None:
    model = loud(make_model(**SHAPE | FAMILIES[family]))
    report = scale_channels(model, text_for(model), method)
    names = [f"blocks.{i}.{n}" for i in (0, 1) for n in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")]
    assert [found.layer for found in report] == names
    for found in report:
        assert 0 <= found.after <= found.before
        assert 0 <= found.power <= 1
        assert (found.power == 0) == (found.after == found.before)
    readers = [found for found in report if found.layer.endswith(("qkv", "gate_up"))]
    assert fmean(found.after / found.before for found in readers) < 0.5  # those that read the loud channels


def inputs_of(model: GPT, tokens: Tensor) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    handles = [
        layer.register_forward_pre_hook(lambda _, given, name=name: seen.update({name: given[0].flatten(0, 1)}))
        for name, layer in linears(model)
    ]
    model(tokens)
    for handle in handles:
        handle.remove()
    return seen


def test_the_errors_that_are_reported_are_those_of_the_layers(make_model: MakeModel) -> None:
    """Mean squared error of a layer's output, before by plain rounding, after by rounding what AWQ left."""
    model, method = loud(make_model(**SHAPE | FAMILIES["biased"])), Int4(32)
    tokens = text_for(model)

    def errors() -> dict[str, float]:
        found = {}
        for name, x in inputs_of(model, tokens).items():
            weight = model.get_submodule(name).weight
            rounded = round_to(weight, method.grid, scale_dtype=torch.float16).dequantize(torch.float64)
            found[name] = ((x @ (rounded - weight).T) ** 2).mean().item()
        return found

    before = errors()
    report = scale_channels(model, tokens, method)
    after = errors()
    for found in report:
        assert found.before == pytest.approx(before[found.layer], rel=0.02)
        if found.layer.endswith(("out", "down")):  # outputs of the others were divided for these afterwards
            assert found.after == pytest.approx(after[found.layer], rel=0.02)


def test_query_heads_that_share_a_kv_head_share_their_scales(make_model: MakeModel) -> None:
    """Their values are divided once: columns of the output projection move together, head by head of a group."""
    model = make_model(**SHAPE, n_layer=1)
    before = model.blocks[0].attention.out.weight.clone()
    scale_channels(model, text_for(model), Int4(32))
    ratio = (model.blocks[0].attention.out.weight / before).view(64, 2, 2, 16)
    torch.testing.assert_close(ratio[:, :, 0], ratio[:, :, 1])
    assert not torch.allclose(ratio[:, 0], ratio[:, 1])


@pytest.mark.parametrize("method", [Int4(32), Int4(None, symmetric=True), Int8()], ids=str)
def test_no_group_gets_worse_by_clipping(make_model: MakeModel, method: Method) -> None:
    """Squared error of what each group of weights adds to the output, over the rows that were seen."""
    model = loud(make_model(**SHAPE))
    tokens, before = text_for(model), copy.deepcopy(model)
    clip_ranges(model, tokens, method)
    better = 0
    for name, x in inputs_of(before, tokens).items():
        weight, cut = before.get_submodule(name).weight, model.get_submodule(name).weight
        if name == "head":
            assert torch.equal(weight, cut)
            continue
        assert (cut.abs() <= weight.abs() * (1 + 1e-6)).all()  # cut towards zero, never moved elsewhere
        group = method.grid.group_of(weight.shape[1], name)

        def errors(matrix: Tensor, weight: Tensor = weight, x: Tensor = x, group: int = group) -> Tensor:
            rounded = round_to(matrix, method.grid, scale_dtype=torch.float16).dequantize(torch.float64)
            off = (rounded - weight).unflatten(1, (-1, group))
            return torch.einsum("rgi,ogi->rog", x.unflatten(1, (-1, group)), off).square().mean(0)

        was, now = errors(weight), errors(cut)
        assert (now <= was * (1 + 1e-3) + 1e-12).all()
        better += int((now < 0.9 * was).sum())
    assert better > 10


@pytest.mark.parametrize(
    "make",
    [
        lambda make_model: make_model(**SHAPE, norm="layernorm"),
        lambda make_model: make_model(**SHAPE, gated_mlp=False),
        lambda make_model: quantize(make_model(**SHAPE), Int8()),
        lambda make_model: row_aware(make_model(**SHAPE)),
    ],
    ids=["layernorm", "plain MLP", "quantized", "row-aware"],
)
def test_what_awq_cannot_scale_is_refused_and_unchanged(
    make_model: MakeModel, make: Callable[[MakeModel], GPT]
) -> None:
    model = make(make_model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ConfigError, match=r"small is .*AWQ here takes wide models of the Llama kind"):
        awq(model, text_for(model), Int4(32))
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_group_size_that_does_not_divide_names_the_layer_and_keeps_the_function(make_model: MakeModel) -> None:
    model = make_model(**SHAPE)
    tokens = text_for(model)
    want = model(tokens)
    with pytest.raises(ConfigError, match=r"blocks\.0\.mlp\.down has rows of 96 = 1 x 64 \+ 32"):
        awq(model, tokens, Int4(64))
    torch.testing.assert_close(model(tokens), want, rtol=1e-9, atol=1e-9)


def judged(model: GPT, windows: Tensor) -> float:
    return fmean(perplexity(model, window, chunk=512) for window in windows)


def test_with_a_scale_a_row_awq_recovers_a_quarter_of_what_rounding_moves() -> None:
    """On the bundled model as it is, at equal bits: the distance of its next-token distributions, in nats.

    Its activations are even, so that channels need no scaling; the few weights that reach far are what clipping mends.
    """
    loaded = kvlab.load("tiny", dtype="float32", device="cpu")
    ids = torch.tensor(loaded.tokenizer.encode(resource("texts", "macbeth.txt").read_text("utf8")))
    windows, calibration = ids[: 4 * 512].view(4, 512), ids[-4 * 512 :].view(4, 512)
    method = Int4(None, symmetric=True)
    with torch.inference_mode():
        exact = loaded.model(windows).log_softmax(-1)

        def moved(model: GPT) -> float:
            return (exact.exp() * (exact - model(windows).log_softmax(-1))).sum(-1).mean().item()

        plain = moved(quantize(copy.deepcopy(loaded.model), method))
        awq(loaded.model, calibration, method)
        assert moved(quantize(loaded.model, method)) < 0.75 * plain


def test_where_activations_have_loud_channels_awq_recovers_most_of_what_rounding_loses() -> None:
    """On the bundled model, with its function unchanged and a few channels made loud; on a play that it never read.

    Without them there is nothing to recover: four bits cost it half a percent of perplexity, and AWQ changes that
    within the noise. Its activations are even; those of models with billions of weights are not.
    """
    loaded = kvlab.load("tiny", dtype="float32", device="cpu")
    ids = torch.tensor(loaded.tokenizer.encode(resource("texts", "macbeth.txt").read_text("utf8")))
    windows, calibration = ids[: 4 * 512].view(4, 512), ids[-2 * 512 :].view(2, 512)
    exact = judged(loaded.model, windows)
    wide = loud(loaded.model)
    assert judged(wide, windows) == pytest.approx(exact, rel=1e-4)
    plain, scaled = copy.deepcopy(wide), wide
    quantize(plain, Int4(64))
    awq(scaled, calibration, Int4(64))
    quantize(scaled, Int4(64))
    lost = judged(plain, windows) - exact
    kept = judged(scaled, windows) - exact
    assert lost > 0.05 * exact
    assert kept < 0.75 * lost
