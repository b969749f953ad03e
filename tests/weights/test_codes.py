"""Codes on disk: a GGUF file's own, none of them rounded again, and kvlab's folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from gguf_maker import write_gguf
from safetensors.torch import load_file, save_file
from test_load_folders import logits_of
from tokenizers import Tokenizer
from torch import Tensor, nn

from kvlab.errors import ConfigError, UnknownModel, WeightsError
from kvlab.model import GPT
from kvlab.quantize import Int4, Int8, LowBitEmbedding, LowBitLinear, linears, quantize
from kvlab.weights import load
from kvlab.weights.codes import LAYOUT, _codes_of
from kvlab.weights.gguf_file import RawTensor

Reference = Callable[[str], Any]
FAMILIES = ["llama", "llama-tied", "llama-biased", "qwen2"]
KINDS = [Kind.Q4_1, Kind.Q8_0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def matrices(model: GPT) -> dict[str, Tensor]:
    """Every matrix of a model in float32, whether it is codes or not."""
    found = {n: x.quantized.dequantize() if isinstance(x, LowBitLinear) else x.weight for n, x in linears(model)}
    every = torch.arange(model.config.vocab_size)[None]
    return found | {"embedding": model.embedding(every)[0]}


def codes_of(model: GPT) -> set[str]:
    return {name for name, layer in linears(model) if isinstance(layer, LowBitLinear)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_stored_codes_stand_for_exactly_what_gguf_dequantizes(
    family: str, kind: Kind, path: Path, reference: Reference, bpe: Tokenizer, tokens: Tensor
) -> None:
    """The wide conversion is ``gguf.dequantize`` with queries and keys unpermuted; codes are that, row by row."""
    write_gguf(path, reference(family), bpe, kind)
    stored, wide = load(path, weights="stored", dtype="float32").model, load(path, dtype="float32").model
    assert codes_of(stored) == {name for name, _ in linears(stored)}
    assert isinstance(stored.embedding, LowBitEmbedding)
    for name, weight in matrices(wide).items():
        assert torch.equal(matrices(stored)[name], weight), name
    torch.testing.assert_close(stored(tokens), wide(tokens), rtol=2e-5, atol=2e-5)
    for _, layer in linears(stored):
        assert layer.grid.bits == {Kind.Q4_1: 4, Kind.Q8_0: 8}[kind]
        assert layer.scale.shape[1] == layer.in_features // 32


def test_queries_and_keys_are_unpermuted(path: Path, reference: Reference, bpe: Tokenizer, tokens: Tensor) -> None:
    """Eight bits are near enough to tell the right order of rows from the file's."""
    write_gguf(path, reference("llama"), bpe, Kind.Q8_0)
    got, want = load(path, weights="stored", dtype="float32").model(tokens), logits_of(reference("llama"), tokens)
    assert ((got - want).norm() / want.norm()).item() < 0.05
    write_gguf(path, reference("llama"), bpe, Kind.Q8_0, permuted=False)
    wrong = load(path, weights="stored", dtype="float32").model(tokens)
    assert ((wrong - want).norm() / want.norm()).item() > 0.1


def test_a_tied_head_and_embedding_are_one_storage(path: Path, reference: Reference, bpe: Tokenizer) -> None:
    write_gguf(path, reference("llama-tied"), bpe, Kind.Q4_1)
    model = load(path, weights="stored").model
    assert isinstance(model.embedding, LowBitEmbedding)
    assert isinstance(model.head, LowBitLinear)
    assert model.embedding.table is model.head


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.F32], ids=lambda kind: kind.name)
def test_wide_parts_of_a_file_stay_wide(
    kind: Kind, path: Path, reference: Reference, bpe: Tokenizer, tokens: Tensor
) -> None:
    """A matrix of ours whose parts are not all codes is wide, and exactly what the wide conversion has."""
    write_gguf(path, reference("llama"), bpe, Kind.Q8_0, kinds={"layers.0.self_attn.v_proj": kind, "lm_head": kind})
    stored, wide = load(path, weights="stored", dtype="float32").model, load(path, dtype="float32").model
    assert {name for name, _ in linears(stored)} - codes_of(stored) == {"blocks.0.attention.qkv", "head"}
    for name, weight in matrices(wide).items():
        assert torch.equal(matrices(stored)[name], weight), name
    torch.testing.assert_close(stored(tokens), wide(tokens), rtol=2e-5, atol=2e-5)


def test_a_file_without_codes_is_a_wide_model(path: Path, reference: Reference, bpe: Tokenizer, tokens: Tensor) -> None:
    write_gguf(path, reference("llama"), bpe, Kind.BF16)
    stored = load(path, weights="stored", dtype="float32").model
    assert codes_of(stored) == set()
    assert torch.equal(stored(tokens), load(path, dtype="float32").model(tokens))


def test_each_matrix_may_have_codes_of_its_own_kind(
    path: Path, reference: Reference, bpe: Tokenizer, tokens: Tensor
) -> None:
    """As SmolLM2's file has them: four bits in the blocks, eight in the embedding."""
    write_gguf(path, reference("llama-tied"), bpe, Kind.Q4_1, kinds={"embed_tokens": Kind.Q8_0, "down_proj": Kind.Q8_0})
    stored = load(path, weights="stored", dtype="float32").model
    bits = {name: layer.grid.bits for name, layer in linears(stored)}
    assert {name for name, width in bits.items() if width == 8} == {"blocks.0.mlp.down", "blocks.1.mlp.down", "head"}
    torch.testing.assert_close(stored(tokens), load(path, dtype="float32").model(tokens), rtol=2e-5, atol=2e-5)


def test_parts_of_one_matrix_in_two_kinds_of_codes_are_refused_by_name(
    path: Path, reference: Reference, bpe: Tokenizer
) -> None:
    write_gguf(path, reference("llama"), bpe, Kind.Q8_0, kinds={"layers.1.mlp.up_proj": Kind.Q4_1})
    message = r"blocks\.1\.mlp\.gate_up\.weight is one matrix here.*blk\.1\.ffn_gate\.weight Q8_0, "
    with pytest.raises(WeightsError, match=message + r"blk\.1\.ffn_up\.weight Q4_1.*load it wide"):
        load(path, weights="stored")
    assert load(path).config.n_layer == 2


def test_a_storage_type_that_is_not_read_is_refused_by_name(path: Path, reference: Reference, bpe: Tokenizer) -> None:
    write_gguf(path, reference("llama"), bpe, Kind.Q8_0, kinds={"layers.1.mlp.down_proj": Kind.Q5_0})
    with pytest.raises(WeightsError, match=r"blk\.1\.ffn_down\.weight is stored as Q5_0; kvlab reads GGUF in F32"):
        load(path, weights="stored")


def test_every_bit_pattern_of_q8_0_minus_128_too() -> None:
    """Quantizers end at -127, but the format has one more."""
    codes = np.arange(-128, 128, dtype=np.int8).reshape(8, 32)
    scale = np.full((8, 1), 0.5, dtype=np.float16)
    data = np.concatenate((scale.view(np.uint8), codes.view(np.uint8)), axis=1)
    made = _codes_of(RawTensor("blk.0.ffn_down.weight", "Q8_0", (8, 32), data))
    want = torch.from_numpy(codes.astype(np.float32)) * 0.5
    assert torch.equal(made.dequantize(), want)
    assert np.array_equal(want.numpy(), quants.dequantize(data, Kind.Q8_0))


def test_every_pair_of_codes_of_q4_1() -> None:
    """In a byte of the file lie element i and element i + 16, in ours neighbours."""
    data = np.zeros((16, 20), dtype=np.uint8)
    data[:, :4] = np.array([0.25, -1.5], dtype=np.float16).view(np.uint8)
    data[:, 4:] = np.arange(256, dtype=np.uint8).reshape(16, 16)
    made = _codes_of(RawTensor("blk.0.ffn_down.weight", "Q4_1", (16, 32), data))
    assert np.array_equal(made.dequantize().numpy(), quants.dequantize(data, Kind.Q4_1))
    assert made.dequantize()[1, :2].tolist() == [-1.5, 0.25 * 1 - 1.5]  # bytes 0x10, 0x11: their low codes come first


def prepared(path: Path, reference: Reference, bpe: Tokenizer, family: str, how: str) -> Any:
    """A quantized model: the codes of a file, or rounded after loading, with and without the head."""
    write_gguf(path, reference(family), bpe, Kind.Q4_1 if how == "stored" else Kind.F32)
    if how in ("stored", "int8", "int4"):
        return load(path, weights=how, dtype="float32")  # type: ignore[arg-type]
    loaded = load(path, dtype="float32")
    quantize(loaded.model, Int4(32, symmetric=True), head=None)
    return loaded


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ["stored", "int8", "int4", "wide head"])
def test_a_saved_model_gives_the_same_logits_and_keeps_one_storage(
    family: str, how: str, path: Path, reference: Reference, bpe: Tokenizer, tokens: Tensor, tmp_path: Path
) -> None:
    """A tied head quantized twice or lost (aprender 234, transformers 37905)."""
    before = prepared(path, reference, bpe, family, how)
    after = load(before.save(tmp_path / "saved"), dtype="float32")
    assert torch.equal(after.model(tokens), before.model(tokens))
    assert codes_of(after.model) == codes_of(before.model)
    assert after.tokenizer.encode("to be") == before.tokenizer.encode("to be")
    kept = load_file(tmp_path / "saved" / "model.safetensors")
    if before.config.tie_embeddings:
        assert not any(name.startswith("embedding.table") for name in kept)
        assert ("head.codes" in kept) == (how != "wide head")
        assert "head.weight" not in kept
    if before.config.tie_embeddings and how != "wide head":
        table = after.model.embedding.table
        assert table.codes.data_ptr() == after.model.head.codes.data_ptr()
        assert table.scale.data_ptr() == after.model.head.scale.data_ptr()
    again = load(after.save(tmp_path / "again"), dtype="float32")
    assert torch.equal(again.model(tokens), before.model(tokens))


def test_the_same_folder_in_another_dtype_has_the_same_codes(
    path: Path, reference: Reference, bpe: Tokenizer, tmp_path: Path
) -> None:
    folder = prepared(path, reference, bpe, "llama-biased", "int4").save(tmp_path / "saved")
    one, other = load(folder, dtype="float32").model, load(folder, dtype="bfloat16").model
    assert other.dtype == torch.bfloat16
    for (name, mine), (_, theirs) in zip(linears(one), linears(other), strict=True):
        assert torch.equal(mine.codes, theirs.codes), name
        assert mine.scale.dtype == theirs.scale.dtype == torch.float16
        assert torch.equal(mine.scale, theirs.scale)
        assert mine.bias is None or theirs.bias.dtype == torch.bfloat16


@pytest.fixture
def folder(path: Path, reference: Reference, bpe: Tokenizer, tmp_path: Path) -> Path:
    return prepared(path, reference, bpe, "llama", "int8").save(tmp_path / "saved")


def change(folder: Path, work: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    work(config)
    (folder / "config.json").write_text(json.dumps(config))


def test_an_unknown_layout_is_refused(folder: Path) -> None:
    """gpt-fast 159: what is packed for one reader means something else to another."""
    change(folder, lambda config: config["quantization_config"].update(layout="tiles-16"))
    with pytest.raises(WeightsError, match=f"codes in the layout 'tiles-16'; this kvlab reads '{LAYOUT}'"):
        load(folder)


def test_codes_of_another_program_are_refused(folder: Path) -> None:
    change(folder, lambda config: config["quantization_config"].update(quant_method="awq"))
    with pytest.raises(WeightsError, match="is quantized by awq, which kvlab cannot read"):
        load(folder)


def test_a_folder_that_lost_codes_names_the_layer(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = load_file(file)
    for lost in ("blocks.1.mlp.down.codes", "blocks.1.mlp.down.scale"):
        save_file({name: tensor for name, tensor in whole.items() if name != lost}, file)
        with pytest.raises(WeightsError, match=r"the codes of blocks\.1\.mlp\.down are not whole"):
            load(folder)
    save_file({name: tensor for name, tensor in whole.items() if name != "blocks.0.attention_norm.weight"}, file)
    with pytest.raises(WeightsError, match=r"lacks blocks\.0\.attention_norm\.weight"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "shape"), [("codes", (64, 32)), ("codes", (32, 96)), ("scale", (64, 5)), ("scale", (32, 1))]
)
def test_codes_and_scales_of_another_shape_name_the_layer(folder: Path, name: str, shape: tuple[int, int]) -> None:
    file = folder / "model.safetensors"
    whole = load_file(file)
    lost = f"blocks.1.mlp.down.{name}"
    save_file(whole | {lost: torch.zeros(shape, dtype=whole[lost].dtype)}, file)
    with pytest.raises(WeightsError, match=r"blocks\.1\.mlp\.down"):
        load(folder)


def test_a_wide_folder_has_no_codes_to_keep(path: Path, reference: Reference, bpe: Tokenizer, tmp_path: Path) -> None:
    write_gguf(path, reference("llama"), bpe)
    wide = load(path).save(tmp_path / "wide")
    for name in (wide, "tiny"):
        with pytest.raises(UnknownModel, match=f"{name} has no codes of its own.*weights='int8' or 'int4'"):
            load(name, weights="stored")


def test_weights_that_are_rounded_after_loading(path: Path, reference: Reference, bpe: Tokenizer) -> None:
    write_gguf(path, reference("llama"), bpe)
    for kind, method in (("int8", Int8()), ("int4", Int4())):
        loaded, by_hand = load(path, weights=kind), load(path)  # type: ignore[arg-type]
        quantize(by_hand.model, method)
        for (name, mine), (_, theirs) in zip(linears(loaded.model), linears(by_hand.model), strict=True):
            assert not isinstance(mine, nn.Linear)
            assert torch.equal(mine.codes, theirs.codes), name


def test_codes_are_not_rounded_a_second_time(folder: Path, path: Path, reference: Reference, bpe: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"blocks\.0\.attention\.qkv is quantized already"):
        load(folder, weights="int4")
