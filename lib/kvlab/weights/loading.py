"""From a name to a model that is ready to run, and from such a model back to a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from kvlab.config import ModelConfig
from kvlab.devices import pick_device, pick_dtype
from kvlab.errors import ConfigError, WeightsError
from kvlab.model import GPT
from kvlab.quantize import Int4, Int8, is_quantized, quantize
from kvlab.store import cache_folder
from kvlab.weights.codes import quantization_of, read_quantized, write_quantized
from kvlab.weights.folder import read_config, read_model, write_folder
from kvlab.weights.layout import to_hf
from kvlab.weights.progress import Progress
from kvlab.weights.routes import Found, find, find_stored
from kvlab.weights.tokenizer import Tokenizer, read_tokenizer

Weights = Literal["stored", "int8", "int4"]
#: What ``load`` takes for ``weights``.
WEIGHTS: tuple[str, ...] = get_args(Weights)


@dataclass(frozen=True)
class LoadedModel:
    """A model with all that belongs to it.

    Args:
        model: in evaluation mode, without gradients.
        tokenizer: its vocabulary and chat template.
        config: its shape.
        name: what to call it.
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

    def save(self, folder: str | Path) -> Path:
        """Write the model as a folder that :func:`load` reads, in the dtype or the codes that it has now.

        ``transformers`` reads a wide one too; codes are kvlab's alone.

        Args:
            folder: is made; its files of these names are replaced.

        Raises:
            ConfigError: the family is GPT-2, for which kvlab has no writer.
        """
        rules, settings = self.tokenizer.rules.to_str(), self.tokenizer.settings()
        if is_quantized(self.model):
            return write_quantized(Path(folder), self.config, self.model, rules, settings)
        tensors = to_hf(self.config, self.model.state_dict())
        return write_folder(Path(folder), self.config, tensors.items(), rules, settings)


def load(
    name_or_path: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    weights: Weights | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model by name, from a path or from the Hub.

    What is downloaded or converted is kept in the cache folder (``KVLAB_CACHE``), and works offline from then on.

    Args:
        name_or_path: ``tiny``, ``smollm2``, a folder in the Hub's layout, a ``.gguf`` file, or a Hub id ``owner/name``.
        device: ``cpu``, ``cuda``, ``mps``; None picks the best that is there.
        dtype: ``float32``, ``float16``, ``bfloat16``; None picks the best for the device.
        weights: ``int8`` or ``int4`` rounds the matrices after loading, see :mod:`kvlab.quantize`; ``stored`` keeps the
            codes of a GGUF file as they are. None keeps wide weights wide, and codes that kvlab wrote as codes.
        progress: called with what is being done, bytes done and bytes in all, while something is downloaded or
            converted. None draws a bar on stderr if that is a terminal.

    Raises:
        UnknownModel: nothing goes by this name.
        WeightsError: the weights cannot be had, or are damaged.
        ConfigError: the model is of a kind that kvlab does not run.
        DeviceError: the device or the dtype is not to be had.
    """
    place = pick_device(None if device is None else str(device))
    kind = pick_dtype(place, None if dtype is None else str(dtype).removeprefix("torch."))
    if weights not in (None, *WEIGHTS):
        raise ConfigError(f"weights is {weights!r}; it may be {', '.join(WEIGHTS)}, or None")
    found = find_stored(name_or_path, progress) if weights == "stored" else find(name_or_path, progress)
    try:
        loaded = _read(found, place, kind)
    except WeightsError as failure:
        if not found.folder.is_relative_to(cache_folder()):
            raise
        raise WeightsError(f"{failure}; first delete {found.folder}, which is in kvlab's cache") from None
    if weights in ("int8", "int4"):
        quantize(loaded.model, Int8() if weights == "int8" else Int4())
    return loaded


def _read(found: Found, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    config = read_config(found.folder, found.name)
    tokenizer = read_tokenizer(found.folder, config)
    note = quantization_of(found.folder)
    if note is None:
        model = read_model(found.folder, config, device=device, dtype=dtype)
    else:
        model = read_quantized(found.folder, config, note, device, dtype)
    return LoadedModel(model=model, tokenizer=tokenizer, config=config, name=found.name, source=found.source)
