"""The Hub: the real client against a Hub on loopback, in good days and bad ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_double import Hub
from test_store import Terminal

import kvlab.weights.hub as hub_module
from kvlab.errors import ConfigError, UnknownModel, WeightsError
from kvlab.weights import load, write_folder
from kvlab.weights.hub import hub_folder, is_hub_id

REPO = "somebody/small-llama"
WEIGHTS = "model.safetensors"
Saved = Callable[..., Path]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, bytes]], Hub]]:
    started: list[Hub] = []

    def start(files: dict[str, bytes]) -> Hub:
        hub = Hub({REPO: files})
        started.append(hub)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        return hub

    # A broken connection is tried again a few times; the pauses between are not what is tested.
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    yield start
    for hub in started:
        hub.close()


@pytest.fixture
def hub(start: Callable[[dict[str, bytes]], Hub], saved: Saved) -> Hub:
    extra = {
        "README.md": b"a card", "pytorch_model.bin": b"pickle", "consolidated.safetensors": b"another format",
        "onnx/model.onnx": b"onnx",
    }  # fmt: skip
    return start(contents(saved("llama")) | extra)


def left_in(cache: Path) -> list[str]:
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file())


def test_downloads_once_and_then_needs_no_network(
    hub: Hub, saved: Saved, tokens: torch.Tensor, private_cache: Path, quiet: None
) -> None:
    first = load(REPO)
    local = load(saved("llama"))
    assert torch.equal(first.model(tokens), local.model(tokens))
    assert first.name == first.config.name == REPO
    assert first.source.startswith(f"the Hub, {REPO}")
    asked = len(hub.asked)
    hub.close()
    second = load(REPO)
    assert torch.equal(second.model(tokens), local.model(tokens))
    assert second.source.startswith("the local cache")
    assert len(hub.asked) == asked


def test_only_what_is_read_is_taken(hub: Hub, private_cache: Path) -> None:
    load(REPO)
    kept = {path.name for path in hub_folder(REPO).rglob("*")}
    assert kept == {
        "config.json", "generation_config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json", "kvlab.json"
    }  # fmt: skip
    origin = json.loads((hub_folder(REPO) / "kvlab.json").read_text())["origin"]
    assert REPO in origin
    assert "c0ffee" in origin
    assert not any("onnx" in path or path.endswith(".bin") for _, path, _ in hub.asked)


def test_a_sharded_model(start: Callable[..., Hub], saved: Saved, tokens: torch.Tensor) -> None:
    folder = saved("llama", max_shard_size="100KB")
    start(contents(folder))
    assert torch.equal(load(REPO).model(tokens), load(folder).model(tokens))


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json", "config.json"])
def test_a_corrupted_file(name: str, hub: Hub, private_cache: Path, quiet: None) -> None:
    """The size is right, one bit is not; large files are checked by sha256, small ones by git's id."""
    hub.corrupt.add(name)
    with pytest.raises(WeightsError, match=f"{name} of {REPO} does not have the checksum.*try again"):
        load(REPO)
    assert left_in(private_cache) == []
    hub.corrupt.clear()
    assert load(REPO).config.n_layer == 2


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_download_that_breaks_off(name: str, hub: Hub, private_cache: Path, quiet: None) -> None:
    hub.truncate.add(name)
    with pytest.raises(WeightsError, match=r"broke off|cannot be reached") as caught:
        load(REPO)
    assert "\n" not in str(caught.value)
    assert left_in(private_cache) == []


def test_no_such_model(hub: Hub, private_cache: Path, quiet: None) -> None:
    with pytest.raises(UnknownModel, match=r"no model nobody/nothing; check the spelling, or set HF_TOKEN"):
        load("nobody/nothing")
    assert left_in(private_cache) == []


def test_a_gated_model_and_the_token_that_opens_it(
    hub: Hub, private_cache: Path, monkeypatch: pytest.MonkeyPatch, quiet: None
) -> None:
    hub.gated.add(REPO)
    with pytest.raises(WeightsError, match=f"{REPO} is gated: accept its terms at {hub.url}/{REPO} and set HF_TOKEN"):
        load(REPO)
    assert left_in(private_cache) == []
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert load(REPO).config.n_layer == 2
    assert {token for _, _, token in hub.asked[-3:]} == {"Bearer hf_good"}


@pytest.mark.parametrize("status", [403, 429, 500, 503])
def test_a_hub_in_trouble(status: int, hub: Hub, private_cache: Path, quiet: None) -> None:
    hub.status = status
    with pytest.raises(WeightsError, match=f"the Hub answered {status} for {REPO}") as caught:
        load(REPO)
    assert "\n" not in str(caught.value)


def test_a_hub_that_does_not_answer(hub: Hub, monkeypatch: pytest.MonkeyPatch, quiet: None) -> None:
    monkeypatch.setattr(hub_module, "PATIENCE", 0.3)
    hub.silent = True
    with pytest.raises(WeightsError, match=f"the Hub cannot be reached at {hub.url}"):
        load(REPO)
    assert not hub.outwaited


def test_no_network(private_cache: Path, quiet: None) -> None:
    with pytest.raises(WeightsError, match=r"the Hub cannot be reached at http://127\.0\.0\.1:9 .*local folder"):
        load(REPO)
    assert left_in(private_cache) == []


def test_offline_by_wish(hub: Hub, monkeypatch: pytest.MonkeyPatch, quiet: None) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(WeightsError, match="not in the local cache and HF_HUB_OFFLINE is set"):
        load(REPO)
    assert hub.asked == []


def test_what_another_tool_downloaded_is_used(
    hub: Hub, saved: Saved, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokens: torch.Tensor
) -> None:
    from huggingface_hub import hf_hub_download

    def take(*names: str) -> None:
        for name in names:
            hf_hub_download(REPO, name, cache_dir=store, endpoint=hub.url)

    store = tmp_path / "hf-hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(store))
    take("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    loaded = load(REPO)  # the snapshot has no weights: it is not used
    assert str(store) not in loaded.source
    take(WEIGHTS)
    hub.close()
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "empty"))
    again = load(REPO)
    assert str(store) in again.source
    assert torch.equal(again.model(tokens), loaded.model(tokens))


def test_pickles_only(start: Callable[..., Hub], saved: Saved, private_cache: Path) -> None:
    files = contents(saved("llama"))
    files["pytorch_model.bin"] = files.pop(WEIGHTS)
    hub = start(files)
    with pytest.raises(
        WeightsError, match=r"has only a pickle \(pytorch_model\.bin\), refused because reading one can run code"
    ):
        load(REPO)
    assert not any(path.endswith(".bin") for _, path, _ in hub.asked)
    assert left_in(private_cache) == []


def test_an_unknown_family_costs_no_download(start: Callable[..., Hub], saved: Saved, private_cache: Path) -> None:
    files = contents(saved("llama"))
    config = json.loads(files["config.json"]) | {"model_type": "mamba2"}
    hub = start(files | {"config.json": json.dumps(config).encode()})
    with pytest.raises(ConfigError, match="mamba2"):
        load(REPO)
    assert not any(path.endswith(WEIGHTS) for _, path, _ in hub.asked)
    assert left_in(private_cache) == []


@pytest.mark.parametrize("gone", ["tokenizer.json", "model-00002.safetensors"])
def test_an_incomplete_repository_costs_no_download(
    gone: str, start: Callable[..., Hub], saved: Saved, private_cache: Path, tmp_path: Path
) -> None:
    from kvlab.weights.layout import to_hf

    first = load(saved("llama"))
    tensors = to_hf(first.config, first.model.state_dict()).items()
    write_folder(tmp_path / "parts", first.config, tensors, first.tokenizer.rules.to_str(), shard_bytes=100_000)
    files = contents(tmp_path / "parts")
    del files[gone]
    hub = start(files)
    with pytest.raises(WeightsError, match=f"{REPO} lacks {gone}, which kvlab needs"):
        load(REPO)
    assert not any(path.endswith(".safetensors") for _, path, _ in hub.asked)
    assert left_in(private_cache) == []


def test_ctrl_c_leaves_nothing(hub: Hub, private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = hub_module._require_intact

    def interrupted(path: Path, *given: Any) -> None:
        if path.name == WEIGHTS:
            raise KeyboardInterrupt
        whole(path, *given)

    monkeypatch.setattr(hub_module, "_require_intact", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(REPO)
    assert left_in(private_cache) == []


def test_progress_is_told(hub: Hub, quiet: None) -> None:
    told: list[tuple[str, int, int | None]] = []
    load(REPO, progress=lambda what, done, total: told.append((what, done, total)))
    size = len(hub.repos[REPO][WEIGHTS])
    assert told[-1] == (f"downloading {REPO}", size, size)


def test_the_library_of_the_hub_is_left_as_it_was(hub: Hub) -> None:
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars, logging

    before = logging.get_verbosity()
    logging.set_verbosity_info()
    enable_progress_bars()
    try:
        load(REPO)
        assert logging.get_verbosity() == logging.INFO
        assert not are_progress_bars_disabled()
    finally:
        logging.set_verbosity(before)


def test_on_a_terminal_there_is_one_bar(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import enable_progress_bars

    enable_progress_bars()
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    load(REPO)
    assert f"downloading {REPO}" in screen.getvalue()
    assert f"{WEIGHTS}:" not in screen.getvalue()  # the bar of the Hub's library


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("Qwen/Qwen2.5-0.5B", True), ("a/b", True), ("tiny", False), ("a/b/c", False), ("./a", False), ("../b", False),
        ("/a/b", False), ("a/b.gguf", False), ("a/b.pt", False), ("a b/c", False), ("", False), ("a/..", False),
    ],
)  # fmt: skip
def test_the_form_of_a_hub_id(name: str, is_one: bool) -> None:
    assert is_hub_id(name) is is_one


@pytest.mark.parametrize(
    "name", ["tinny", "smolm2", "TINY", "no-such-thing", "./nowhere", "/no/where.gguf", "", "x" * 5000]
)
def test_an_unknown_name(name: str, quiet: None) -> None:
    with pytest.raises(UnknownModel) as caught:
        load(name)
    message = str(caught.value)
    for allowed in ("tiny", "smollm2", "config.json", ".gguf", "Hub id"):
        assert allowed in message
    near = {"tinny": "tiny", "smolm2": "smollm2", "TINY": "tiny"}.get(name)
    assert (f"did you mean {near}?" in message) if near else "did you mean" not in message
    assert "\n" not in message
    assert len(message) < 300
