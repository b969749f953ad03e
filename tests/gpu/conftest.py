"""GPU tests: every check runs on the CPU too, and on a GPU wherever there is one."""

from __future__ import annotations

import pytest
import torch

from gpu_line import NO_GPU


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Both devices. On the CPU a check proves its own logic; the summary names those that found no GPU."""
    if request.param == "cuda":
        require_gpu()
    return torch.device(request.param)


@pytest.fixture
def gpu() -> torch.device:
    """For what only a GPU can do."""
    require_gpu()
    return torch.device("cuda")


def require_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip(NO_GPU)
