"""Where this copy of kvlab came from: repository address and commit, for stamps and links to the source."""

from __future__ import annotations

import json
import re
import subprocess
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]


@lru_cache(maxsize=1)
def repository() -> str | None:
    """The public address of the repository, or None where it is not known.

    A checkout has it in ``_config.yml``, an installation in the record that pip leaves of its source.
    """
    config = _ROOT / "_config.yml"
    if config.is_file():
        return repository_in(config.read_text("utf8"))
    url = str(_pip_record().get("url", ""))
    return url.removesuffix(".git").rstrip("/") if url.startswith("https://") else None


def repository_in(config: str) -> str | None:
    """The repository's address in the text of a ``_config.yml``, without a closing slash; None where there is none.

    Args:
        config: the text.
    """
    found = re.search(r"^repository:\n(?:[ ]+.*\n)*?[ ]+url:\s*(\S+)", config, re.MULTILINE)
    return found[1].rstrip("/") if found else None


@lru_cache(maxsize=1)
def commit() -> str:
    """The commit of this copy, shortened; ``+`` marks a checkout with changes, ``unknown`` a copy without a record."""
    if (_ROOT / ".git").exists():
        short = _git("rev-parse", "--short=7", "HEAD")
        return f"{short}+" if short and _git("status", "--porcelain", "--untracked-files=no") else short or "unknown"
    return str(_pip_record().get("vcs_info", {}).get("commit_id", "unknown"))[:7]


def source_link(path: Path, line: int) -> str | None:
    """The public address of a line of a library file, or None where the repository is not known.

    Args:
        path: the file, inside the package ``kvlab``.
        line: counted from 1.
    """
    home = repository()
    if home is None:
        return None
    inside = path.resolve().relative_to(Path(__file__).parent).as_posix()
    installed = _pip_record().get("vcs_info", {}).get("commit_id")
    return f"{home}/blob/{installed or 'main'}/lib/kvlab/{inside}#L{line}"


def _pip_record() -> dict[str, Any]:
    """What pip wrote down about where it installed kvlab from; empty where it wrote nothing."""
    try:
        text = distribution("kvlab").read_text("direct_url.json")
    except PackageNotFoundError:
        return {}
    record = json.loads(text) if text else {}
    return record if isinstance(record, dict) else {}


def _git(*arguments: str) -> str:
    """The answer of git in this checkout; empty when git is missing or refuses."""
    try:
        answer = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()
