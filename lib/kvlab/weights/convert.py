"""GGUF to a folder in the Hub's layout, once: the second load reads safetensors from the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from kvlab.store import ORIGIN, cache_folder, publish, require_room, staging
from kvlab.weights.codes import gguf_model, write_quantized
from kvlab.weights.folder import require_fit, write_folder, write_json
from kvlab.weights.gguf_config import hub_shapes, hub_tensors, read_gguf_config
from kvlab.weights.gguf_file import GGUFFile
from kvlab.weights.gguf_tokenizer import read_gguf_tokenizer
from kvlab.weights.progress import Progress, reporting

#: Rises when the conversion itself changes, so that older results are not used any more.
VERSION = 1


def conversion_folder(digest: str, stored: bool = False) -> Path:
    """Where the conversion of a GGUF file is, or will be.

    Args:
        digest: sha256 of the file.
        stored: with the file's own codes, not widened.
    """
    return cache_folder() / "gguf" / f"{digest[:32]}-{'codes-' if stored else ''}v{VERSION}"


def convert(
    path: Path, digest: str, origin: str, name: str, progress: Progress | None = None, stored: bool = False
) -> Path:
    """The folder of a GGUF file, made now if the cache does not have it.

    Weights that the file keeps in 16 or 32 bits stay so. Q8_0 and Q4_1 are written as float32: scale times code plus
    minimum does not fit 16 bits, and rounding it would change what the file says. That is 540 MB for SmolLM2-135M
    against 98 MB of Q4_1; the disk is cheap, dequantizing takes seconds each time, and mapping float32 takes none.

    Args:
        path: the GGUF file.
        digest: its sha256.
        origin: a sentence about where it came from.
        name: what to call the model.
        progress: see :func:`kvlab.load`.
        stored: keep the file's own codes.

    Raises:
        WeightsError: the file is damaged, of a kind that kvlab does not read, or the disk is full.
    """
    target = conversion_folder(digest, stored)
    if target.exists():
        return target
    file = GGUFFile(path)
    config = read_gguf_config(file, name)
    require_fit(path, config, hub_shapes(file))
    tokenizer_json, settings = read_gguf_tokenizer(file)
    total = 4 * sum(prod(t.shape) for t in file.tensors())
    require_room(target, total, f"the conversion of {path.name}")
    with staging(target) as work, reporting(progress, f"converting {path.name}", total) as report:
        if stored:
            made = write_quantized(work / "made", config, gguf_model(file, config), tokenizer_json, settings)
        else:
            tensors = _counted(hub_tensors(file, config), report)
            made = write_folder(work / "made", config, tensors, tokenizer_json, settings)
        write_json(made / ORIGIN, {"origin": origin, "name": name})
        return publish(made, target)


def _counted(
    tensors: Iterator[tuple[str, Float[Tensor, "..."]]], report: Callable[[int], None]
) -> Iterator[tuple[str, Float[Tensor, "..."]]]:
    done = 0
    for name, tensor in tensors:
        yield name, tensor
        done += 4 * tensor.numel()
        report(done)
