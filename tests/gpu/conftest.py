"""GPU tests: every check that can runs on the CPU too, and on a GPU wherever there is one."""

from __future__ import annotations

import pytest
import torch

from gpu_line import MISSED


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Both devices. On the CPU a check proves its own logic."""
    return torch.device(request.param)


@pytest.fixture
def gpu() -> torch.device:
    """For what only a GPU can do."""
    return torch.device("cuda")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU its tests cannot be run: take them out, and leave their number for the last line."""
    if torch.cuda.is_available():
        return
    missed = [item for item in items if needs_gpu(item)]
    items[:] = [item for item in items if not needs_gpu(item)]
    config.stash[MISSED] = len(missed)
    if hasattr(config, "workeroutput"):  # of pytest-xdist, whose controller collects nothing itself
        config.workeroutput["gpu_tests_missed"] = len(missed)
    config.hook.pytest_deselected(items=missed)


def needs_gpu(item: pytest.Item) -> bool:
    """Whether a test asks for a GPU, by its fixture or by its parameter."""
    assert isinstance(item, pytest.Function)
    asked = item.callspec.params if hasattr(item, "callspec") else {}
    return "gpu" in item.fixturenames or asked.get("device") == "cuda"
