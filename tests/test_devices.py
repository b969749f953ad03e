"""Which device and dtype are picked, and what is said where one is missing."""

from __future__ import annotations

import pytest
import torch

from kvlab.devices import best_cuda_dtype, pick_device, pick_dtype
from kvlab.errors import DeviceError


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [((7, 0), torch.float16), ((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)],
)
def test_a_t4_supports_bf16_by_emulation_only(capability: tuple[int, int], dtype: torch.dtype) -> None:
    """Soup 385: bfloat16 from compute capability 8.0 on."""
    assert best_cuda_dtype(capability) == dtype


def test_the_best_device_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert pick_device() == pick_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device() == torch.device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device() == torch.device("cuda")
    assert pick_device("cpu") == torch.device("cpu")


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="'cuda' is not on this machine; it has cpu"):
        pick_device("cuda")
    with pytest.raises(DeviceError, match="'gpu' is not a device name"):
        pick_device("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceError, match="'cuda:1' is not on this machine"):
        pick_device("cuda:1")


def test_dtypes_go_by_name() -> None:
    cpu = torch.device("cpu")
    assert pick_dtype(cpu, "bfloat16") == torch.bfloat16
    assert pick_dtype(cpu) in (torch.float32, torch.bfloat16)
    with pytest.raises(DeviceError, match="'int8' is not one of float32"):
        pick_dtype(cpu, "int8")
