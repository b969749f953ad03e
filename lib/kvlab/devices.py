"""The one place that picks a device and a dtype."""

from __future__ import annotations

import torch

from kvlab.errors import DeviceError

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


def pick_device(name: str | None = None) -> torch.device:
    """The device to run on: the one named, or the best that is there (CUDA, then Apple's MPS, then the CPU).

    Args:
        name: ``cpu``, ``cuda``, ``cuda:1``, ``mps``; None or ``auto`` picks.

    Raises:
        DeviceError: the device is unknown to torch or not on this machine.
    """
    found = _available()
    if name in (None, "auto"):
        return torch.device(found[0])
    try:
        device = torch.device(str(name))
    except RuntimeError:
        raise DeviceError(f"device {name!r} is not a device name; this machine has {', '.join(found)}") from None
    beyond = device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()
    if device.type not in found or beyond:
        raise DeviceError(f"device {name!r} is not on this machine; it has {', '.join(found)}")
    return device


def pick_dtype(device: torch.device, name: str | None = None) -> torch.dtype:
    """The dtype to compute in: the one named, or the best for the device.

    Args:
        device: where the model will run.
        name: ``float32``, ``float16``, ``bfloat16`` or ``float64``; None or ``auto`` picks.

    Raises:
        DeviceError: the name is none of these.
    """
    if name in (None, "auto"):
        if device.type == "cuda":
            return best_cuda_dtype(torch.cuda.get_device_capability(device))
        return torch.float16 if device.type == "mps" else torch.float32
    if name not in _DTYPES:
        raise DeviceError(f"dtype {name!r} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[str(name)]


def best_cuda_dtype(capability: tuple[int, int]) -> torch.dtype:
    """bfloat16 where the hardware multiplies it (compute capability 8.0 and above), else float16.

    A T4 (7.5) runs bfloat16 by emulation only, while ``torch.cuda.is_bf16_supported`` answers True there.

    Args:
        capability: major and minor compute capability.
    """
    return torch.bfloat16 if capability >= (8, 0) else torch.float16


def device_name(device: torch.device) -> str:
    """The device in words: a GPU by its name, a CPU by the threads that torch uses on it.

    Args:
        device: of this machine.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"CPU, {threads} thread{'s' if threads > 1 else ''}"
    return device.type.upper()


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``, and so on.

    Args:
        dtype: any.
    """
    return str(dtype).removeprefix("torch.")


def _available() -> list[str]:
    """Device types of this machine, best first."""
    found = ["cuda"] if torch.cuda.is_available() else []
    if torch.backends.mps.is_available():
        found.append("mps")
    return [*found, "cpu"]
