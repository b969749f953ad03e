"""The first cell of every chapter: device, dtype, seed, figure style, and the stamp that says what was used."""

from __future__ import annotations

import os
import platform
import random
from dataclasses import dataclass

import numpy as np
import torch

import kvlab
from kvlab.book.figures import set_stamp, use_style
from kvlab.devices import device_name, dtype_name, pick_device, pick_dtype
from kvlab.provenance import commit


@dataclass(frozen=True)
class Lab:
    """What a chapter runs on.

    Args:
        device: where tensors live.
        dtype: what models compute in.
        stamp: one line that names device, dtype, versions and commit.
    """

    device: torch.device
    dtype: torch.dtype
    stamp: str


def setup(seed: int = 0, device: str | None = None, dtype: str | None = None) -> Lab:
    """Prepare a chapter: pick device and dtype, seed, set the figure style, print the stamp.

    Args:
        seed: for Python, NumPy and torch.
        device: a device name; None picks the best that is there.
        dtype: a dtype name; None picks the best for the device.

    Raises:
        DeviceError: the device or dtype asked for is not there.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler writes its progress to stderr
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    place = pick_device(device)
    kind = pick_dtype(place, dtype)
    lab = Lab(place, kind, _stamp(place, kind))
    use_style()
    set_stamp(lab.stamp)
    print(lab.stamp)
    return lab


def _stamp(device: torch.device, dtype: torch.dtype) -> str:
    """One line: device, dtype, versions, commit."""
    versions = (
        f"Python {platform.python_version()} · torch {torch.__version__.split('+')[0]} · kvlab {kvlab.__version__}"
    )
    return f"{device_name(device)} · {dtype_name(dtype)} · {versions} ({commit()})"
