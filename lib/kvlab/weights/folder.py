"""Folders in the Hub's layout: configuration, tokenizer and safetensors, read and written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvlab.config import ModelConfig
from kvlab.errors import WeightsError, one_line
from kvlab.model import GPT
from kvlab.weights.layout import IGNORED, from_hf, hf_shapes

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

#: Endings of what is refused: files of Python's object serialisation, which can run any code when they are read.
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")

_SHARD_BYTES = 4_000_000_000
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def refuse_pickle(path: Path) -> None:
    """Refuse a file by its ending.

    Args:
        path: a file, which is not opened.

    Raises:
        WeightsError: the ending is one of :data:`PICKLES`.
    """
    if path.suffix.lower() in PICKLES:
        raise WeightsError(
            f"{path} is a pickle, refused because reading one can run code; convert it to safetensors "
            "(transformers' save_pretrained, on a machine that you can lose), or find a copy that is"
        )


def read_config(folder: Path, name: str | None = None) -> ModelConfig:
    """The shape that a folder's ``config.json`` and ``generation_config.json`` describe.

    Args:
        folder: in the Hub's layout.
        name: what to call the model; by default the folder's name.

    Raises:
        WeightsError: a file is missing or is not JSON.
        ConfigError: the family is not one that kvlab runs, or a field is impossible.
    """
    path = folder / "config.json"
    if not path.exists():
        raise WeightsError(f"{folder} has no config.json; it is not a model in the Hub's layout")
    config, beside = read_json(path), folder / "generation_config.json"
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method not in (None, "kvlab"):
        raise WeightsError(f"{folder} is quantized by {method}, which kvlab cannot read; take the original checkpoint")
    generation = read_json(beside) if beside.exists() else {}
    shape = ModelConfig.from_hf(config, _stated(generation), name=name or folder.resolve().name)
    shape.require_runnable()
    return shape


def read_model(
    folder: Path, config: ModelConfig | None = None, *, device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> GPT:  # fmt: skip
    """The model of a folder, in evaluation mode and without gradients.

    Args:
        folder: in the Hub's layout.
        config: its shape; read from the folder when not given.
        device: where the weights shall be.
        dtype: what they shall be; the rotary tables stay float32.

    Raises:
        WeightsError: the weights are missing, damaged or do not fit the configuration.
    """
    config = config or read_config(folder)
    model = empty_model(config)
    with open_checkpoint(folder) as tensors:
        require_fit(folder, config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        _require_floats(folder, tensors)
        state = from_hf(config, tensors, lambda tensor: tensor.to(device, dtype))
    if config.tie_embeddings:
        state["head.weight"] = state["embedding.weight"]
    model.load_state_dict(state, assign=True)
    model.tie()
    return model.to(device).eval().requires_grad_(False)


def write_folder(
    folder: Path,
    config: ModelConfig,
    tensors: Iterable[tuple[str, Shaped[Tensor, "..."]]],
    tokenizer_json: str,
    tokenizer_config: Mapping[str, Any] | None = None,
    *,
    quantization: Mapping[str, Any] | None = None,
    shard_bytes: int = _SHARD_BYTES,
) -> Path:
    """Write a model as a folder that :func:`kvlab.load` and ``transformers`` read.

    Args:
        folder: is made; its files of these names are replaced.
        config: the model's shape.
        tensors: Hub names and tensors, for example ``kvlab.weights.layout.to_hf(config, state).items()``. They are
            written as they come, one file's worth at a time.
        tokenizer_json: of the ``tokenizers`` library (``Tokenizer.to_str()``).
        tokenizer_config: special tokens and chat template.
        quantization: how the weights were rounded, for ``config.json``; None for wide ones.
        shard_bytes: a file of weights becomes no larger than this, unless one tensor is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / WEIGHTS, folder / INDEX, *folder.glob("model-*.safetensors")):
        old.unlink(missing_ok=True)
    ids = {"bos_token_id": config.bos_token_id, "eos_token_id": list(config.eos_token_ids) or None}
    noted = {"quantization_config": quantization} if quantization else {}
    write_json(folder / "config.json", config.to_hf() | noted)
    write_json(folder / "generation_config.json", {k: v for k, v in ids.items() if v is not None})
    (folder / "tokenizer.json").write_text(tokenizer_json, "utf8")
    write_json(
        folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"} | dict(tokenizer_config or {})
    )
    _write_tensors(folder, tensors, shard_bytes)
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Args:
        path: the file.

    Raises:
        WeightsError: it is missing, unreadable or something else.
    """
    try:
        found = json.loads(path.read_text("utf8"))
    except (OSError, ValueError) as failure:
        raise WeightsError(f"{path} cannot be read as JSON ({failure}); download it again") from None
    if not isinstance(found, dict):
        raise WeightsError(f"{path} holds a JSON {type(found).__name__} where an object is needed; download it again")
    return found


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object, indented, characters as they are."""
    path.write_text(json.dumps(dict(value), indent=2, ensure_ascii=False) + "\n", "utf8")


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights, none of them opened.

    Args:
        folder: in the Hub's layout.

    Raises:
        WeightsError: there are none, or only pickles, or a part is missing.
    """
    if (folder / INDEX).exists() and not (folder / WEIGHTS).exists():
        return shards(folder)
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    for path in sorted(folder.iterdir()):
        refuse_pickle(path)
    what = f"{len(found)} .safetensors files and no {INDEX}" if found else "no .safetensors file"
    raise WeightsError(f"{folder} has {what}; a model is one {WEIGHTS}, or parts with an index: download it again")


def empty_model(config: ModelConfig) -> GPT:
    """A model whose parameters have shapes and no memory.

    Args:
        config: the model's shape.
    """
    with torch.device("meta"), _NoInit():
        return GPT(config)


class _NoInit(TorchFunctionMode):
    """Leaves new parameters as they are. On the meta device ``nn.init`` draws nothing and imports torch's compiler."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def shards(folder: Path, must_exist: bool = True) -> list[Path]:
    """The parts that a folder's index names.

    Args:
        folder: has an index.
        must_exist: refuse if a part is not there.

    Raises:
        WeightsError: the index is damaged, or a part is missing.
    """
    table = read_json(folder / INDEX).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise WeightsError(f"{folder / INDEX} has no weight_map; download it again")
    paths = [folder / Path(str(name)).name for name in sorted(set(table.values()))]
    missing = [path.name for path in paths if not path.exists()]
    if missing and must_exist:
        raise WeightsError(f"{folder} lacks {', '.join(missing)}, named by its index; download it again")
    return paths


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[dict[str, Tensor]]:
    """All tensors of a folder, still in the file: memory is touched when one is used.

    Args:
        folder: in the Hub's layout.

    Raises:
        WeightsError: a file is missing or not whole.
    """
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        except (SafetensorError, OSError, ValueError) as failure:
            raise WeightsError(
                f"{path} is not a whole safetensors file ({one_line(failure)}); it was probably cut off: "
                "download it again"
            ) from None
    yield tensors


def require_fit(where: Path, config: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse weights that are not of the shapes that the configuration states.

    Args:
        where: for the message.
        config: the model's shape.
        found: shapes of the checkpoint's tensors by name. One that is missing is the matter of ``from_hf``.

    Raises:
        WeightsError: a shape differs.
    """
    for name, shape in hf_shapes(config, empty_model(config).state_dict()).items():
        actual = found.get(name, found.get(f"transformer.{name}", shape))
        if actual != shape:
            raise WeightsError(
                f"{where}: {name} is {list(actual)} where config.json makes it {list(shape)}; "
                "the weights and the configuration are not of the same model"
            )


def _require_floats(where: Path, tensors: Mapping[str, Shaped[Tensor, "..."]]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES and not name.endswith(IGNORED):
            raise WeightsError(f"{where}: {name} is stored as {tensor.dtype}; take a checkpoint in 16 or 32 bits")


def _write_tensors(folder: Path, tensors: Iterable[tuple[str, Shaped[Tensor, "..."]]], shard_bytes: int) -> None:
    table: dict[str, str] = {}
    parts = 0
    for parts, part in enumerate(_parts(tensors, shard_bytes), start=1):
        file = f"model-{parts:05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        table |= dict.fromkeys(part, file)
    if parts == 1:
        (folder / file).replace(folder / WEIGHTS)
    else:
        write_json(folder / INDEX, {"metadata": {}, "weight_map": table})


def _parts(
    tensors: Iterable[tuple[str, Shaped[Tensor, "..."]]], limit: int
) -> Iterator[dict[str, Shaped[Tensor, "..."]]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if part and size + tensor.nbytes > limit:
            yield part
            part, size = {}, 0
        part[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    if part:
        yield part


def _stated(generation: Mapping[str, Any]) -> dict[str, Any]:
    """A generation_config.json that says nothing of the end must not override config.json, which does."""
    return {key: value for key, value in generation.items() if value is not None}
