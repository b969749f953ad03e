"""The same tests under the oldest ``transformers`` that is supported, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OLDEST = "5.0.0"
#: What it needs in other versions than the newest does.
REQUIRES = ["huggingface_hub>=1.3,<2", "tokenizers>=0.22,<=0.23.0"]


@pytest.fixture(scope="module")
def folder() -> Path:
    """A folder with these packages alone, to be put before the others. What it holds stays for the next run."""
    home = ROOT / "_build" / "oldest_transformers"
    wanted, note = f"{OLDEST} {REQUIRES} {sys.version}", home / "made_for.txt"
    if not note.exists() or note.read_text() != wanted:
        note.unlink(missing_ok=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-deps"]
        packages = [f"transformers=={OLDEST}", *REQUIRES]
        subprocess.run([*pip, "--upgrade", "--target", str(home / "packages"), *packages], check=True)
        note.write_text(wanted)
    return home / "packages"


def test_the_oldest_transformers_gives_the_same(folder: Path) -> None:
    tests = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/interop/test_transformers.py"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "KVLAB_TRANSFORMERS": OLDEST}
    done = subprocess.run(tests, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_the_oldest_is_the_bound_that_the_package_states() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]["optional-dependencies"]
    assert extras["transformers"] == [f"transformers>={OLDEST}"]
