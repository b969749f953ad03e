"""The line at the end of a test run that says what became of the GPU tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

NO_GPU = "no CUDA device"


def gpu_summary(stats: Mapping[str, Sequence[object]]) -> str:
    """The line about the GPU tests; empty when none of them was asked for."""
    missed = sum(NO_GPU in str(getattr(report, "longrepr", "")) for report in stats.get("skipped", ()))
    if missed:
        return f"GPU tests: {missed} not run, {NO_GPU}"
    wanted = ("passed", "failed", "error")
    run = {getattr(report, "nodeid", "") for kind in wanted for report in stats.get(kind, ())}
    on_gpu = sum(name.startswith("tests/gpu/") for name in run)
    return f"GPU tests: run on {torch.cuda.get_device_name()}" if on_gpu and torch.cuda.is_available() else ""
