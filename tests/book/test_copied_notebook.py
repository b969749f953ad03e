"""A reader's start: one notebook, alone in an empty folder, in a fresh environment that already holds torch."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from kvbook.layout import BUILD, ROOT, numbered_chapters
from nbclient import NotebookClient

TORCH = "2.13.0"
CELL_SECONDS = 300


def git(folder: Path, *arguments: str) -> None:
    names = ["-c", "user.name=kvlab", "-c", "user.email=kvlab@example.org", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A repository that holds this working tree, standing in for the public address."""
    folder = tmp_path_factory.mktemp("clone") / "kvlab"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "a copy")
    return folder.as_uri()


@pytest.fixture(scope="module")
def fresh_python() -> Path:
    """A Python with torch and a kernel, as Colab has them, and no kvlab. What it installs stays for the next run."""
    wanted = f"{TORCH} {sys.version} {hashlib.sha256((ROOT / 'pyproject.toml').read_bytes()).hexdigest()}"
    home = BUILD / "copied"
    python, note = home / "venv" / "bin" / "python", home / "made_for.txt"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    if not note.exists() or note.read_text() != wanted:
        note.unlink(missing_ok=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home / "venv")], check=True)
        subprocess.run([*pip, "install", f"torch=={TORCH}", "ipykernel"], check=True)
        note.write_text(wanted)
    subprocess.run([*pip, "uninstall", "--yes", "kvlab"], check=True, stderr=subprocess.DEVNULL)
    return python


def versions(python: Path) -> dict[str, str]:
    listed = subprocess.run([str(python), "-m", "pip", "list", "--format=json"], check=True, capture_output=True)
    return {item["name"]: item["version"] for item in json.loads(listed.stdout)}


def run_alone(
    notebook: Path, folder: Path, python: Path, repository: str, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Run a notebook in a folder of its own, on the kernel of another environment, as a reader would."""
    kernels = folder / "jupyter" / "kernels" / "fresh"
    kernels.mkdir(parents=True)
    argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernels / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "fresh", "language": "python"}))
    work = folder / "work"
    work.mkdir()
    copied = work / notebook.name
    copied.write_bytes(notebook.read_bytes())
    nb = nbformat.read(copied, as_version=4)
    dropped = ("KVLAB_BUILD", "PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME", "PYTHONWARNINGS")
    environment = {key: value for key, value in os.environ.items() if key not in dropped}
    monkeypatch.setenv("JUPYTER_PATH", str(folder / "jupyter"))
    client = NotebookClient(nb, timeout=CELL_SECONDS, kernel_name="fresh", resources={"metadata": {"path": str(work)}})
    client.execute(env={**environment, "KVLAB_REPO": repository})
    return dict(nb)


# The first chapter: it loads the real model, and so needs most of what the install cell brings.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("chapter", numbered_chapters()[:1], ids=lambda path: path.stem)
def test_a_notebook_runs_alone_after_its_own_install_cell(
    chapter: Path, tmp_path: Path, fresh_python: Path, clone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = versions(fresh_python)
    assert before["torch"].split("+")[0] == TORCH
    assert "kvlab" not in before
    notebook = run_alone(chapter.with_suffix(".ipynb"), tmp_path, fresh_python, clone, monkeypatch)
    after = versions(fresh_python)
    assert "kvlab" in after
    assert {name: version for name, version in after.items() if name in before} == before
    told = json.dumps([output for cell in notebook["cells"] for output in cell.get("outputs", [])])
    assert "kvlab-claim-holds" in told
    assert "kvlab-claim-fails" not in told
