"""Routes that were measured on somebody's machine have no part in these tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlab.quantize import routes_for


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    routes_for.cache_clear()
    yield tmp_path / "cache"
    routes_for.cache_clear()
