"""Shapes and types of the library are checked at run time in every test."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

# Before anything imports the library: the hook decorates modules as they are loaded.
for _module in (
    "kvlab.packing", "kvlab.kernels", "kvlab.rope", "kvlab.cache", "kvlab.model", "kvlab.quantize", "kvlab.generation",
    "kvlab.weights", "kvlab.evaluate",
):  # fmt: skip
    install_import_hook(_module, "beartype.beartype")

import torch  # noqa: E402

from gpu_line import MISSED, gpu_line  # noqa: E402
from kvlab import kernels  # noqa: E402
from kvlab.config import ModelConfig  # noqa: E402
from kvlab.model import GPT  # noqa: E402
from toys import random_gpt, small_config  # noqa: E402

# Whoever starts the tests in the background may have them ignore Ctrl-C, and all that they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Nothing here is about time: no case fails because another program took the processor for a moment.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture
def config() -> ModelConfig:
    return small_config()


@pytest.fixture
def model(config: ModelConfig) -> GPT:
    return random_gpt(config)


@pytest.fixture
def make_model() -> Callable[..., GPT]:
    return lambda dtype=torch.float64, seed=0, **changes: random_gpt(small_config(**changes), dtype, seed)


@pytest.fixture(scope="session")
def compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the kernels, compiled once and loaded. Without a compiler this fails, and says so."""
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLAB_CACHE", str(folder))
        kernels.build()
        kernels.enable()
    return folder


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """One of the processes that share the tests has ended: keep what it says of the GPU tests; all say the same."""
    node.config.stash[MISSED] = getattr(node, "workeroutput", {}).get("gpu_tests_missed", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say in one line what became of the GPU tests: a check that could not run must be seen."""
    stats = terminalreporter.stats
    run = (report.nodeid for kind in ("passed", "failed", "error") for report in stats.get(kind, ()))
    line = gpu_line(config.stash.get(MISSED, 0), run)
    if line:
        terminalreporter.write_line(line)
