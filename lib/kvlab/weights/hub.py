"""Models from the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path

from kvlab.errors import WeightsError
from kvlab.weights.progress import Progress
from kvlab.weights.store import cache_folder

_ID = re.compile(r"[\w.-]+/[\w.-]+")


def is_hub_id(name: str) -> bool:
    return _ID.fullmatch(name) is not None


def cached_hub(repo: str) -> Path | None:
    folder = cache_folder() / "hub" / repo.replace("/", "--")
    return folder if folder.exists() else None


def fetch_hub(repo: str, progress: Progress | None = None) -> Path:
    raise WeightsError("not there yet")
