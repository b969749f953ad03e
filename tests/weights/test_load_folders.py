"""Folders in the Hub's layout: parity with ``transformers`` for every family, and what is said of damaged ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvlab.errors import ConfigError, DeviceError, PromptError, WeightsError
from kvlab.weights import load, read_config, read_model, write_folder
from kvlab.weights.layout import from_hf, to_hf

FAMILIES = ["gpt2", "llama", "llama-tied", "llama-biased", "llama3", "mistral", "qwen2", "qwen3"]
Saved = Callable[..., Path]
Reference = Callable[[str], Any]


def logits_of(reference: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return reference(tokens).logits


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max().item() <= tolerance * theirs.abs().max().item()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(
    family: str, saved: Saved, reference: Reference, tokens: torch.Tensor
) -> None:
    loaded = load(saved(family), device="cpu")
    assert_same(loaded.model(tokens), logits_of(reference(family), tokens))
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.config.eos_token_ids == (1,)
    assert str(loaded.name) in loaded.source


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_in_the_spelling_of_transformers_4(
    family: str, saved: Saved, reference: Reference, tokens: torch.Tensor
) -> None:
    folder = saved(family)
    config = json.loads((folder / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype", "float32")
    if rope := config.pop("rope_parameters", None):
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    if family == "gpt2":
        config.pop("n_inner", None)
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    assert_same(load(folder).model(tokens), logits_of(reference(family), tokens))


def test_the_reference_is_sensitive(saved: Saved, reference: Reference, tokens: torch.Tensor) -> None:
    """Interleaved against half-split RoPE (transformers 25199, llama2.c 286): wrong rows of q would be seen."""
    folder = saved("llama")
    path = folder / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.0.self_attn.q_proj.weight"
    interleaved = weights[name].reshape(4, 2, 8, 64).transpose(1, 2).reshape(64, 64).contiguous()
    save_file(weights | {name: interleaved}, path)
    with pytest.raises(AssertionError):
        assert_same(load(folder).model(tokens), logits_of(reference("llama"), tokens), 1e-2)


def test_a_sharded_checkpoint(saved: Saved, reference: Reference, tokens: torch.Tensor) -> None:
    folder = saved("llama", max_shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert_same(load(folder).model(tokens), logits_of(reference("llama"), tokens))


def test_a_missing_shard_is_named(saved: Saved) -> None:
    folder = saved("llama", max_shard_size="100KB")
    gone = sorted(folder.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(WeightsError, match=f"lacks {gone.name}.*download it again"):
        load(folder)


def test_an_index_cannot_lead_out_of_the_folder(saved: Saved, tmp_path: Path) -> None:
    folder = saved("llama")
    shutil.move(folder / "model.safetensors", tmp_path / "elsewhere.safetensors")
    index = {"weight_map": {"lm_head.weight": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"lacks elsewhere\.safetensors"):
        load(folder)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_a_16_bit_file_is_widened_exactly(kind: torch.dtype, saved: Saved) -> None:
    folder = saved("llama", dtype=kind)
    stored = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {kind}
    model = load(folder, dtype="float32").model
    assert model.dtype == torch.float32
    wide = to_hf(model.config, model.state_dict())
    assert all(torch.equal(wide[name], tensor.float()) for name, tensor in stored.items())


def test_dtype_and_device_as_names_or_as_torch_has_them(saved: Saved) -> None:
    folder = saved("llama")
    loaded = load(str(folder), dtype=torch.bfloat16, device=torch.device("cpu"))
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.model.rope is not None
    assert loaded.model.rope.cos.dtype == torch.float32  # transformers 29285
    with pytest.raises(DeviceError, match="int8"):
        load(folder, dtype=torch.int8)
    with pytest.raises(DeviceError, match="teapot"):
        load(folder, device="teapot")


def test_a_tied_head_is_one_tensor(saved: Saved) -> None:
    model = load(saved("llama-tied"), dtype="bfloat16").model
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()
    assert model.head.weight is model.embedding.weight


def test_padded_vocabulary_is_not_for_sampling(saved: Saved) -> None:
    """vllm 340: the embedding has 320 rows, the tokenizer fewer tokens."""
    loaded = load(saved("llama"))
    assert loaded.config.vocab_size == 320
    assert loaded.vocab_size == loaded.tokenizer.vocab_size < 320


@pytest.mark.parametrize("keep", [0.5, 0.98, 0.0, 7])
def test_a_truncated_file(keep: float, saved: Saved, quiet: None) -> None:
    folder = saved("llama")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: keep if isinstance(keep, int) else int(len(whole) * keep)])
    with pytest.raises(WeightsError, match=r"model\.safetensors is not a whole safetensors file.*download it again"):
        load(folder)


def test_a_header_that_lies(saved: Saved) -> None:
    folder = saved("llama")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"shape":[64,64]', b'"shape":[64,65]', 1))
    with pytest.raises(WeightsError, match="not a whole safetensors file"):
        load(folder)
    path.write_bytes((10**15).to_bytes(8, "little") + whole[8:])
    with pytest.raises(WeightsError, match="not a whole safetensors file"):
        load(folder)


def test_weights_of_another_shape(saved: Saved) -> None:
    folder = saved("llama")
    path = folder / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(weights | {name: torch.zeros(97, 64)}, path)
    with pytest.raises(WeightsError, match=r"layers\.1\.mlp\.up_proj\.weight is \[97, 64\].*makes it \[96, 64\]"):
        load(folder)


def test_gpt2_weights_of_another_shape(saved: Saved) -> None:
    folder = saved("gpt2")
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"transformer.h.0.attn.c_attn.weight": torch.zeros(192, 64)}, path)
    with pytest.raises(WeightsError, match=r"c_attn\.weight is \[192, 64\].*makes it \[64, 192\]"):
        load(folder)


def test_weights_missing_and_weights_too_many(saved: Saved) -> None:
    folder = saved("llama")
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file({n: t for n, t in weights.items() if "layers.1.mlp" not in n}, path)
    with pytest.raises(WeightsError, match=r"lacks model\.layers\.1\.mlp\.down_proj\.weight"):
        load(folder)
    save_file(weights | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, path)
    with pytest.raises(WeightsError, match=r"has parts that a llama does not model.*q_proj\.bias"):
        load(folder)


def test_integer_codes_are_not_taken_for_weights(saved: Saved) -> None:
    folder = saved("llama")
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"model.layers.0.mlp.up_proj.weight": torch.zeros(96, 64, dtype=torch.int8)}, path)
    with pytest.raises(WeightsError, match=r"up_proj\.weight is stored as torch\.int8"):
        load(folder)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_checkpoint_quantized_by_others(saved: Saved) -> None:
    folder = saved("llama")
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(WeightsError, match="quantized by gptq"):
        load(folder)


def test_a_config_of_an_unknown_family(saved: Saved) -> None:
    folder = saved("llama")
    edit_config(folder, model_type="mamba2")
    with pytest.raises(ConfigError, match=r"mamba2.*kvlab runs gpt2, llama"):
        load(folder)


@pytest.mark.parametrize("text", ["{", "[1]", "\ufeff\x00"])
def test_a_config_that_is_no_json_object(text: str, saved: Saved) -> None:
    folder = saved("llama")
    (folder / "config.json").write_text(text)
    with pytest.raises(WeightsError, match=r"config\.json .*download it again"):
        load(folder)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"has no config\.json"):
        load(tmp_path)


@pytest.mark.parametrize("ending", ["bin", "pt", "pth", "pkl", "ckpt"])
def test_a_pickle_is_refused_by_name(ending: str, saved: Saved, tmp_path: Path) -> None:
    folder = saved("llama")
    (folder / "model.safetensors").unlink()
    pickle = folder / f"pytorch_model.{ending}"
    pickle.write_bytes(b"\x80\x04cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    with pytest.raises(WeightsError, match=f"pytorch_model.{ending} is a pickle, refused because"):
        load(folder)
    with pytest.raises(WeightsError, match=r"is a pickle, refused because reading one can run code.*safetensors"):
        load(pickle)


def test_no_weights_at_all_and_too_many(saved: Saved) -> None:
    folder = saved("llama")
    path = folder / "model.safetensors"
    shutil.copy(path, folder / "a.safetensors")
    path.rename(folder / "b.safetensors")
    with pytest.raises(WeightsError, match=r"has 2 \.safetensors files and no model\.safetensors\.index\.json"):
        load(folder)
    (folder / "a.safetensors").unlink()
    assert load(folder).config.n_layer == 2  # one file is the model, whatever it is called
    (folder / "b.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"has no \.safetensors file"):
        load(folder)


def test_a_folder_without_a_tokenizer(saved: Saved) -> None:
    folder = saved("llama")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(WeightsError, match=r"tokenizer\.json is not a tokenizer"):
        load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(WeightsError, match=r"has no tokenizer\.json; save one there"):
        load(folder)
    assert read_model(folder).config.n_layer == 2  # the model alone is whole


@pytest.mark.parametrize("family", ["llama", "llama-tied", "llama-biased", "llama3", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("shard_bytes", [10**9, 60_000])
def test_what_is_saved_is_what_was_loaded(
    family: str, shard_bytes: int, saved: Saved, reference: Reference, tokens: torch.Tensor, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    first = load(saved(family))
    state, rules = to_hf(first.config, first.model.state_dict()), first.tokenizer.rules.to_str()
    folder = tmp_path / "out"
    write_folder(folder, first.config, state.items(), rules, first.tokenizer.settings(), shard_bytes=shard_bytes)
    files = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert len(files) > 1 if shard_bytes == 60_000 else len(files) == 1
    again = load(folder)
    assert again.config.with_(name=family) == first.config.with_(name=family)
    assert torch.equal(again.model(tokens), first.model(tokens))
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert_same(logits_of(theirs, tokens), logits_of(reference(family), tokens))


def test_save_replaces_an_older_model(saved: Saved, tokens: torch.Tensor, tmp_path: Path) -> None:
    """A sharded model over a whole one, and the other way round: the old files must not win."""
    folder, small, large = tmp_path / "out", load(saved("llama")), load(saved("qwen3"))
    large.save(folder)
    state = to_hf(small.config, small.model.state_dict()).items()
    write_folder(folder, small.config, state, small.tokenizer.rules.to_str(), shard_bytes=60_000)
    assert torch.equal(load(folder).model(tokens), small.model(tokens))
    large.save(folder)
    assert torch.equal(load(folder).model(tokens), large.model(tokens))
    assert load(folder).tokenizer.settings() == large.tokenizer.settings()


def test_transformers_reads_the_tokenizer_that_is_saved(saved: Saved, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    loaded = load(saved("llama"))
    theirs = AutoTokenizer.from_pretrained(loaded.save(tmp_path / "out"))
    for text in ("to be or not to be", "引力", " 12\n"):
        assert theirs(text)["input_ids"] == loaded.tokenizer.encode(text)
    messages = [{"role": "user", "content": "To be?"}]
    assert theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == loaded.tokenizer.render(
        messages
    )


def test_gpt2_has_no_writer(saved: Saved, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gpt2"):
        load(saved("gpt2")).save(tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


def test_parameters_are_placed_one_at_a_time(saved: Saved) -> None:
    """Each finished parameter is cast on its own, so that memory never holds the model twice."""
    folder = saved("llama")
    config = read_config(folder)
    seen: list[torch.Tensor] = []

    def place(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor.double()

    state = from_hf(config, load_file(folder / "model.safetensors"), place)
    assert len(seen) == len(state)
    assert all(tensor.dtype == torch.float64 for tensor in state.values())


def test_the_bundled_model() -> None:
    from transformers import AutoModelForCausalLM, logging

    from kvlab.resources import resource

    logging.disable_progress_bar()
    stored = load_file(resource("tiny") / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    loaded = load("tiny", device="cpu")
    assert (loaded.name, loaded.source, loaded.model.dtype) == ("tiny", "bundled with kvlab", torch.float32)
    assert loaded.tokenizer.eos_token_ids == loaded.config.eos_token_ids != ()
    theirs = AutoModelForCausalLM.from_pretrained(resource("tiny"), dtype=torch.float32).eval()
    ids = torch.tensor([loaded.tokenizer.encode("To be, or not to be")])
    assert_same(loaded.model(ids), logits_of(theirs, ids))
    with pytest.raises(PromptError, match="tiny has no chat template"):
        loaded.tokenizer.chat([{"role": "user", "content": "Hello"}])


def test_an_installation_without_the_bundled_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kvlab.resources._CHECKOUT", tmp_path)
    monkeypatch.setattr("kvlab.resources._INSTALLED", tmp_path / "none")
    with pytest.raises(WeightsError, match="tiny is missing from this installation of kvlab; reinstall it"):
        load("tiny")
