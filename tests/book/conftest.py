"""The built book for the tests that look at it, and a word at the end about what could not run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "book"))

from kvbook import addresses, browser, execution  # noqa: E402
from kvbook.checks import Site  # noqa: E402
from kvbook.layout import SITE, notebook_pages  # noqa: E402


@pytest.fixture(scope="session")
def built() -> Path:
    """The folder of the built book; `make test` has just built it, otherwise it is built here."""
    if os.environ.get("KVLAB_BOOK_IS_BUILT") != "yes":
        done = subprocess.run([sys.executable, "book/build_book.py"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return SITE


@pytest.fixture(scope="session")
def site(built: Path) -> Site:
    """The built book, parsed."""
    return Site(built)


@pytest.fixture(scope="session")
def executed(built: Path) -> dict[str, dict[str, Any]]:
    """The executed notebooks by name."""
    key = execution.KEY_NOTE.read_text()
    return {path.stem: execution.executed(path.stem, key) for path in notebook_pages()}


@pytest.fixture(scope="session")
def address() -> addresses.Addresses:
    """Where repository and site are said to be."""
    return addresses.read(ROOT)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what cannot be looked at; what `make test` says of it in its last lines.

    That is the pages of a book that could not be built, which is a failure already; and without a browser its checks,
    which in CI stay in and fail.
    """
    unbuilt = os.environ.get("KVLAB_BOOK_IS_BUILT") == "failed"
    blind = bool(browser.missing()) and not browser.required()
    left_out = [
        item
        for item in items
        if (unbuilt and "built" in getattr(item, "fixturenames", ())) or (blind and item.get_closest_marker("browser"))
    ]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "browser: needs Chromium and Node")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if browser.missing() and not browser.required():
        terminalreporter.section("not run")
        terminalreporter.write_line(f"browser checks: {', '.join(browser.missing())} not found; {browser.INSTALL}")
