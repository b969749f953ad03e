"""GGUF files: the weights exactly as ``gguf.dequantize`` has them, in the layout of the Hub; and damaged files."""

from __future__ import annotations

import builtins
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_maker import permute, write_gguf
from safetensors.torch import load_file
from test_load_folders import assert_same, logits_of
from tokenizers import Tokenizer

import kvlab.weights.convert as convert_module
from kvlab.errors import ConfigError, WeightsError
from kvlab.rope import frequencies, unpermute
from kvlab.store import sha256_of
from kvlab.weights import load
from kvlab.weights.convert import conversion_folder, convert
from kvlab.weights.gguf_file import GGUFFile, dequantize
from kvlab.weights.layout import to_hf

KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1]
Reference = Callable[[str], Any]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_weights_are_what_gguf_dequantizes(kind: Kind, path: Path, reference: Reference, bpe: Tokenizer) -> None:
    meant = write_gguf(path, reference("llama"), bpe, kind)
    model = load(path).model
    ours = to_hf(model.config, model.state_dict())
    assert ours.keys() == meant.keys()
    for name, weights in ours.items():
        if heads := {"q": 4, "k": 2}.get(name.split("_proj")[0][-1] if "_proj.weight" in name else ""):
            weights = torch.from_numpy(permute(weights.numpy(), heads))
        assert np.array_equal(weights.numpy(), meant[name]), name


@pytest.mark.parametrize("family", ["llama", "llama-tied", "llama-biased", "qwen2", "qwen3"])
def test_logits_equal_those_of_transformers(
    family: str, path: Path, reference: Reference, bpe: Tokenizer, tokens: torch.Tensor, quiet: None
) -> None:
    write_gguf(path, reference(family), bpe)
    loaded = load(path)
    assert_same(loaded.model(tokens), logits_of(reference(family), tokens))
    assert loaded.config.tie_embeddings == reference(family).config.tie_word_embeddings
    assert loaded.config.norm_eps == reference(family).config.rms_norm_eps  # 1e-05, not 9.999999747e-06
    assert loaded.name == "model"
    assert str(path) in loaded.source


def test_permuted_rows_are_what_makes_it_so(
    path: Path, reference: Reference, bpe: Tokenizer, tokens: torch.Tensor
) -> None:
    """Weights of Llama are permuted, those of Qwen are not (transformers 25199, llama2.c 286)."""
    write_gguf(path, reference("llama"), bpe, permuted=False)
    assert not torch.allclose(load(path).model(tokens), logits_of(reference("llama"), tokens), atol=1e-2)
    scores = torch.randn(4, 16, 64)
    assert torch.equal(unpermute(permute(scores.reshape(64, 64), 4), 4), scores.reshape(64, 64))


@pytest.mark.parametrize(("kind", "dtype"), [(Kind.F16, torch.float16), (Kind.BF16, torch.bfloat16)])
def test_16_bit_weights_are_kept_in_16_bits(
    kind: Kind, dtype: torch.dtype, path: Path, reference: Reference, bpe: Tokenizer
) -> None:
    write_gguf(path, reference("llama"), bpe, kind)
    load(path)
    kept = load_file(conversion_folder(sha256_of(path)) / "model.safetensors")
    assert kept["model.layers.0.mlp.up_proj.weight"].dtype == dtype
    assert kept["model.norm.weight"].dtype == torch.float32


def test_the_raw_codes_are_at_hand(path: Path, reference: Reference, bpe: Tokenizer) -> None:
    meant = write_gguf(path, reference("llama"), bpe, Kind.Q4_1)
    raw = {tensor.name: tensor for tensor in GGUFFile(path).tensors()}
    codes = raw["blk.1.ffn_down.weight"]
    assert (codes.kind, codes.shape) == ("Q4_1", (64, 96))
    assert codes.data.shape == (64, 96 // 32 * 20)  # per 32 weights: scale, minimum, 16 bytes of codes
    assert codes.nbytes == 64 * 60
    assert np.array_equal(dequantize(codes).numpy(), meant["model.layers.1.mlp.down_proj.weight"])


def test_a_storage_type_that_kvlab_does_not_read(path: Path, reference: Reference, bpe: Tokenizer) -> None:
    write_gguf(path, reference("llama"), bpe, Kind.Q5_0)
    with pytest.raises(WeightsError, match=r"token_embd\.weight is stored as Q5_0; .*F32, F16, BF16, Q8_0, Q4_1"):
        load(path)


def test_the_second_load_reads_no_gguf(
    path: Path, reference: Reference, bpe: Tokenizer, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(path, reference("llama"), bpe, Kind.Q4_1)
    first = load(path)
    monkeypatch.setitem(sys.modules, "gguf", None)  # importing it fails from now on
    second = load(path)
    assert torch.equal(first.model(tokens), second.model(tokens))
    assert second.tokenizer.encode("to be") == first.tokenizer.encode("to be")


def test_a_changed_file_is_converted_anew(
    path: Path, reference: Reference, bpe: Tokenizer, tokens: torch.Tensor
) -> None:
    write_gguf(path, reference("llama"), bpe)
    first = load(path).model(tokens)
    write_gguf(path, reference("llama-tied"), bpe)
    second = load(path).model(tokens)
    assert not torch.allclose(first, second)
    assert_same(second, logits_of(reference("llama-tied"), tokens))


def test_without_the_gguf_package(
    path: Path, reference: Reference, bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(path, reference("llama"), bpe)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(WeightsError, match=r"needs the package gguf; run: pip install 'kvlab\[gguf\]'"):
        load(path)


@pytest.mark.parametrize("keep", [0.0, 3, 40, 0.02, 0.1, 0.5, 0.999])
def test_a_truncated_file(
    keep: float, path: Path, reference: Reference, bpe: Tokenizer, private_cache: Path, quiet: None
) -> None:
    write_gguf(path, reference("llama"), bpe)
    whole = path.read_bytes()
    path.write_bytes(whole[: keep if isinstance(keep, int) else int(keep * len(whole))])
    with pytest.raises(WeightsError, match=r"model\.gguf is not a whole GGUF file.*download it again"):
        load(path)
    assert not list(private_cache.glob("gguf/*"))


def test_something_else_with_the_ending(path: Path) -> None:
    path.write_text("<html>404</html>" * 10)
    with pytest.raises(WeightsError, match=r"is not a whole GGUF file \(.*magic"):
        load(path)


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({"general.architecture": "mamba"}, WeightsError, "holds a 'mamba'; .*llama, qwen2, qwen3"),
        ({"llama.expert_count": 8}, WeightsError, "mixture of 8 experts"),
        ({"llama.rope.dimension_count": 8}, WeightsError, "rotates 8 of 16 dimensions"),
        ({"llama.block_count": None}, WeightsError, "lacks 'block_count'"),
        ({"split.count": 3}, WeightsError, "one of 3 parts"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, ConfigError, "'yarn'"),
        ({"tokenizer.ggml.model": "bert"}, WeightsError, "tokenizer of the kind 'bert'"),
        ({"tokenizer.ggml.pre": "klingon"}, WeightsError, "in the manner 'klingon'; kvlab knows gpt-2, smollm"),
        ({"llama.attention.head_count": 5}, ConfigError, "n_head 5 is not a multiple"),
        ({"llama.feed_forward_length": 128}, WeightsError, r"model\.gguf: .*gate_proj\.weight is \[96, 64\]"),
    ],
)
def test_what_is_said_of_other_models(
    metadata: dict[str, Any], error: type[Exception], message: str, path: Path, reference: Reference, bpe: Tokenizer
) -> None:
    write_gguf(path, reference("llama"), bpe, metadata=metadata)
    with pytest.raises(error, match=message):
        load(path)


def test_a_tensor_of_unknown_use_is_named(path: Path, reference: Reference, bpe: Tokenizer) -> None:
    write_gguf(path, reference("llama"), bpe, more={"blk.0.ssm_conv1d.weight": np.zeros((4, 4), np.float32)})
    with pytest.raises(WeightsError, match=r"has a tensor blk\.0\.ssm_conv1d\.weight"):
        load(path)


def test_linear_rope_scaling(path: Path, reference: Reference, bpe: Tokenizer) -> None:
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    write_gguf(path, reference("llama"), bpe, metadata=scaling)
    config = load(path).config
    assert config.rope_scaling is not None
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == ("linear", 4.0)


def test_llama_3_scaling_is_read_from_its_divisors(path: Path, reference: Reference, bpe: Tokenizer) -> None:
    """``rope_freqs.weight`` as llama.cpp's converter computes it (head_dim 16, theta 500,000, 8,192 tokens)."""
    turns = 8192 * 500_000.0 ** -(np.arange(0, 16, 2) / 16) / (2 * np.pi)
    smooth = ((turns - 1) / 3).clip(0, 1)
    divisors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    assert divisors[0] == 1
    assert divisors[-1] == 8
    assert np.any((divisors > 1) & (divisors < 8))
    more = {"rope_freqs.weight": divisors}
    write_gguf(path, reference("llama"), bpe, metadata={"llama.rope.freq_base": 500_000.0}, more=more)
    config = load(path).config
    assert config.rope_scaling is not None
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == ("llama3", 8.0)
    plain = 500_000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    assert torch.allclose(frequencies(config), plain / torch.from_numpy(divisors), rtol=1e-6)


def test_other_divisors_are_refused(path: Path, reference: Reference, bpe: Tokenizer) -> None:
    more = {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}
    write_gguf(path, reference("llama"), bpe, more=more)
    with pytest.raises(WeightsError, match=r"does not scale as Llama 3\.1 does"):
        load(path)


def test_every_id_that_ends_an_answer(path: Path, reference: Reference, bpe: Tokenizer) -> None:
    """vllm 4180: more than one token can end an answer."""
    ends = {"tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eom_token_id": 1}
    write_gguf(path, reference("llama"), bpe, metadata=ends)
    loaded = load(path)
    assert loaded.config.eos_token_ids == loaded.tokenizer.eos_token_ids == (1, 3)
    assert loaded.tokenizer.bos_token_id == 0


def test_ctrl_c_leaves_nothing(
    path: Path, reference: Reference, bpe: Tokenizer, private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(path, reference("llama"), bpe)
    whole = convert_module.hub_tensors

    def interrupted(*given: Any) -> Any:
        for at, pair in enumerate(whole(*given)):
            if at == 5:
                raise KeyboardInterrupt
            yield pair

    monkeypatch.setattr(convert_module, "hub_tensors", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(path)
    assert list(private_cache.glob("gguf/*")) == list(private_cache.glob("gguf/.*")) == []


def test_two_at_once(
    path: Path, reference: Reference, bpe: Tokenizer, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both convert, one rename wins, both results are whole and the same."""
    write_gguf(path, reference("llama"), bpe)
    barrier, whole = threading.Barrier(2, timeout=30), convert_module.write_folder

    def together(*given: Any, **named: Any) -> Path:
        made = whole(*given, **named)
        barrier.wait()
        return made

    monkeypatch.setattr(convert_module, "write_folder", together)
    made: list[Path] = []
    run = lambda: made.append(convert(path, "f00d", "a test", "x"))  # noqa: E731
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [conversion_folder("f00d")] * 2
    assert_same(load(made[0]).model(tokens), logits_of(reference("llama"), tokens))
    assert [entry.name for entry in made[0].parent.iterdir()] == [made[0].name]


def test_a_full_disk_is_said_before_it_is_written(
    path: Path, reference: Reference, bpe: Tokenizer, private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(path, reference("llama"), bpe)
    monkeypatch.setattr("shutil.disk_usage", lambda where: type("Usage", (), {"free": 1000})())
    with pytest.raises(WeightsError, match=r"the conversion of model\.gguf needs 0\.00 GB .* KVLAB_CACHE"):
        load(path)
    assert not (private_cache / "gguf").exists()


def test_progress_is_told(path: Path, reference: Reference, bpe: Tokenizer, quiet: None) -> None:
    write_gguf(path, reference("llama"), bpe)
    told: list[tuple[str, int, int | None]] = []
    load(path, progress=lambda what, done, total: told.append((what, done, total)))
    assert {what for what, _, _ in told} == {"converting model.gguf"}
    done = [done for _, done, _ in told]
    assert done == sorted(done)
    assert done[-1] == told[-1][2] == 4 * sum(p.numel() for p in reference("llama").parameters())
    told.clear()
    load(path, progress=lambda what, done, total: told.append((what, done, total)))
    assert told == []  # an ordinary load is not worth a word


def test_sentencepiece_is_converted_by_transformers(
    path: Path, reference: Reference, bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", "t", "o", "b", "e", "\u2581t", "\u2581b", "\u2581to", "\u2581be"]
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces, "tokenizer.ggml.merges": None,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(pieces))], "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 9, "tokenizer.ggml.pre": None,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
    write_gguf(path, reference("llama"), bpe, metadata=metadata)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        with pytest.raises(WeightsError, match="SentencePiece tokenizer; converting it once needs: pip install"):
            load(path)
    tokenizer = load(path).tokenizer
    ids = tokenizer.encode("to be\u5f15")
    assert ids[0] == tokenizer.bos_token_id == 1
    assert ids.count(1) == 1  # llama.cpp 7107
    assert tokenizer.tokens(ids)[1:] == [" to", " be", r"\xe5", r"\xbc", r"\x95"]
    assert tokenizer.decode(ids) == "to be\u5f15"
    write_gguf(path, reference("llama"), bpe, metadata=metadata | {"tokenizer.ggml.add_bos_token": False})
    assert load(path).tokenizer.encode("to be\u5f15") == ids[1:]


def test_the_import_is_late() -> None:
    """Neither ``gguf`` nor ``transformers`` nor the Hub's library is paid for by those who do not need them."""
    import subprocess

    code = (
        "import sys, kvlab; kvlab.load('tiny'); "
        "late = {'gguf', 'transformers', 'huggingface_hub', 'jinja2', 'rich', 'torch._dynamo'}; "
        "print(sorted(late & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_nothing_is_unpickled(
    path: Path, reference: Reference, bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pickle

    def refuse(*given: Any, **named: Any) -> Any:
        raise AssertionError("something was unpickled")

    write_gguf(path, reference("llama"), bpe)
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(builtins, "eval", refuse)
    assert load(path).config.n_layer == 2
