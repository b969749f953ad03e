"""Telling a reader that something slow is under way: a download or a conversion, never an ordinary load."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

#: Called with what is being done, how many bytes of it are done, and how many there are (None: not known).
Progress = Callable[[str, int, int | None], None]

_INTERVAL = 0.2  # seconds between two looks at a growing folder


@contextmanager
def reporting(progress: Progress | None, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Report the bytes of one piece of work.

    Args:
        progress: the caller's own; None draws a bar on stderr where that is a terminal, and is silent elsewhere.
        what: the work, in a few words.
        total: bytes, or None when not known.

    Yields:
        A function to call with the bytes done so far.
    """
    if progress is not None:
        yield lambda done: progress(what, done, total)
    elif sys.stderr is not None and sys.stderr.isatty():
        with _bar(what, total) as report:
            yield report
    else:
        yield lambda done: None


@contextmanager
def watching(folder: Path, progress: Progress | None, what: str, total: int | None) -> Iterator[None]:
    """Report the growth of a folder that something else writes into.

    Args:
        folder: what grows.
        progress: see :func:`reporting`.
        what: the work, in a few words.
        total: bytes at the end.
    """
    stop = threading.Event()
    with reporting(progress, what, total) as report:
        watcher = threading.Thread(target=_watch, args=(folder, report, total, stop), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            stop.set()
            watcher.join()
        report(total if total is not None else _bytes_in(folder))


def _watch(folder: Path, report: Callable[[int], None], total: int | None, stop: threading.Event) -> None:
    while not stop.wait(_INTERVAL):
        done = _bytes_in(folder)
        report(done if total is None else min(done, total))


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # it was renamed under our eyes
            continue
    return total


@contextmanager
def _bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)
