"""The cache folder of downloaded and converted models, where a write becomes visible whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvlab.errors import WeightsError

#: A file beside the weights that says where they came from.
ORIGIN = "kvlab.json"

_STAGING = ".partial-"
_DAY = 24 * 3600


def cache_folder() -> Path:
    """Where kvlab keeps models: ``KVLAB_CACHE``, or the place that the platform has for caches."""
    if chosen := os.environ.get("KVLAB_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "kvlab" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvlab"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvlab"


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """A folder beside the target to work in. Whatever happens, Ctrl-C included, it is gone afterwards.

    Args:
        target: what will be put in place by :func:`publish`.

    Raises:
        WeightsError: the cache folder cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=_STAGING, dir=target.parent))
    except OSError as failure:
        raise WeightsError(
            f"cannot write below {target.parent} ({failure}); set KVLAB_CACHE to another folder"
        ) from None
    try:
        _sweep(folder)
        yield folder
    except OSError as failure:
        if failure.errno not in (errno.ENOSPC, getattr(errno, "EDQUOT", None)):
            raise
        raise WeightsError(f"the disk of {target.parent} is full; make room or set KVLAB_CACHE to another") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(made: Path, target: Path) -> Path:
    """Move a finished file or folder to its place in one step.

    Two processes may make the same folder at once: the first rename wins, and the other's work is dropped.

    Args:
        made: the finished file or folder, on the same file system.
        target: where it shall be.

    Returns:
        The target.
    """
    for path in [made] if made.is_file() else sorted(made.rglob("*")):
        if path.is_file():
            _flush(path)
    try:
        made.replace(target)
    except OSError:
        if not target.is_dir():
            raise
    _flush(target.parent)
    return target


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remembered_sha256(path: Path) -> str:
    """The sha256 of a user's file, remembered for as long as its size and time of change stay the same.

    Args:
        path: the file.
    """
    stat = path.stat()
    known = {"path": str(path.resolve()), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    key = hashlib.sha256(str(known["path"]).encode()).hexdigest()[:24]
    note = cache_folder() / "fingerprints" / f"{key}.json"
    try:
        found = json.loads(note.read_text("utf8"))
        if found == known | {"sha256": found["sha256"]}:
            return str(found["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not remembered, or of another state of the file
    digest = sha256_of(path)
    with staging(note) as folder:
        made = folder / note.name
        made.write_text(json.dumps(known | {"sha256": digest}), "utf8")
        made.replace(note)
    return digest


def require_room(folder: Path, needed: int, what: str) -> None:
    """Refuse before the disk is full.

    Args:
        folder: on the file system in question; need not exist yet.
        needed: bytes that will be written.
        what: for the message.

    Raises:
        WeightsError: there is less room than that.
    """
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise WeightsError(
            f"{what} needs {needed / 1e9:.2f} GB below {there}, which has {free / 1e9:.2f} GB free; "
            "make room or set KVLAB_CACHE to another disk"
        )


def _flush(path: Path) -> None:
    """Ask the disk to keep what was written; a file system that cannot is taken as it is."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def _sweep(fresh: Path) -> None:
    """Remove what a process that was killed left behind: staging folders a day older than a fresh one."""
    now = fresh.stat().st_mtime
    for other in fresh.parent.glob(f"{_STAGING}*"):
        try:
            if now - other.stat().st_mtime > _DAY:
                shutil.rmtree(other, ignore_errors=True)
        except OSError:
            continue
