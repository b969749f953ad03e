"""GGUF files, the format of llama.cpp: the metadata, and each tensor as it is stored.

Reading and dequantizing are two steps, so that a kernel that runs low-bit weights can take the stored codes.
The layout is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, read by the ``gguf`` package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from kvlab.errors import WeightsError

#: Storage types that can be turned into floating point.
READABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_1")


@dataclass(frozen=True)
class RawTensor:
    """A tensor as the file stores it.

    Args:
        name: llama.cpp's name, for example ``blk.0.attn_q.weight``.
        kind: storage type, for example ``Q4_1``.
        shape: of the weights, slowest dimension first (GGUF itself writes the fastest first).
        data: the stored bytes or numbers, one row a row; a view of the file.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    data: Shaped[np.ndarray, "..."]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(self.data.nbytes)


class GGUFFile:
    """An open GGUF file.

    Args:
        path: the file.

    Raises:
        WeightsError: the ``gguf`` package is missing, or the file is not whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        reader = require_gguf().GGUFReader
        try:
            self._reader = reader(path)
            self.metadata: Mapping[str, Any] = {n: _value(f) for n, f in self._reader.fields.items()}
        except OSError as failure:
            raise WeightsError(f"{path} cannot be read ({failure.strerror or failure})") from None
        except Exception as failure:  # whatever Python raises where the bytes run out
            raise WeightsError(
                f"{path} is not a whole GGUF file ({type(failure).__name__}: {failure}); download it again"
            ) from None
        if (parts := int(self.metadata.get("split.count", 1))) > 1:
            raise WeightsError(f"{path} is one of {parts} parts; join them with llama.cpp's gguf-split --merge")

    def tensors(self) -> Iterator[RawTensor]:
        """Every tensor, in the order of the file."""
        for tensor in self._reader.tensors:
            shape = tuple(int(n) for n in reversed(tensor.shape))
            yield RawTensor(tensor.name, tensor.tensor_type.name, shape, tensor.data)


def dequantize(tensor: RawTensor) -> Float[Tensor, "..."]:
    """The weights of a stored tensor, none of them rounded.

    F16 and BF16 stay what they are. Q8_0 and Q4_1 become float32, exactly as ``gguf.dequantize`` has them.

    Args:
        tensor: as stored.

    Raises:
        WeightsError: the storage type is not one of :data:`READABLE`.
    """
    if tensor.kind not in READABLE:
        raise WeightsError(f"{tensor.name} is stored as {tensor.kind}; kvlab reads GGUF in {', '.join(READABLE)}")
    if tensor.kind in ("F32", "F16"):
        return torch.from_numpy(np.array(tensor.data)).reshape(tensor.shape)
    if tensor.kind == "BF16":
        return torch.from_numpy(np.array(tensor.data).view(np.int16)).view(torch.bfloat16).reshape(tensor.shape)
    gguf = require_gguf()
    weights = gguf.dequantize(tensor.data, gguf.GGMLQuantizationType[tensor.kind])
    return torch.from_numpy(np.ascontiguousarray(weights, dtype=np.float32)).reshape(tensor.shape)


def require_gguf() -> ModuleType:
    """The ``gguf`` package.

    Raises:
        WeightsError: it is not installed.
    """
    try:
        import gguf
    except ImportError:
        raise WeightsError("reading a GGUF file needs the package gguf; run: pip install 'kvlab[gguf]'") from None
    return gguf  # type: ignore[no-any-return]


def _value(field: Any) -> Any:
    """A metadata field as Python has it: a number, a string, or a list of one of them."""
    gguf = require_gguf()
    text = field.types[-1] == gguf.GGUFValueType.STRING
    values = [bytes(field.parts[i]).decode("utf8") if text else field.parts[i][0].item() for i in field.data]
    return values if field.types[0] == gguf.GGUFValueType.ARRAY else values[0]
