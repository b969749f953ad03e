"""The line at the end of a test run that says what became of the GPU tests."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

#: How many GPU tests were collected and could not be run.
MISSED = pytest.StashKey[int]()


def gpu_line(missed: int, run: Iterable[str]) -> str:
    """The line; empty when no GPU test was asked for.

    Args:
        missed: GPU tests that found no device.
        run: names of the tests that ran.
    """
    if missed:
        return f"GPU tests: {missed} not run, no CUDA device"
    if torch.cuda.is_available() and any("tests/gpu/" in name for name in run):
        return f"GPU tests: run on {torch.cuda.get_device_name()}"
    return ""
