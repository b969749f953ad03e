"""The cache folder: where it is, and that a write is whole or not there."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

import kvlab.store as store
from kvlab.errors import WeightsError
from kvlab.store import cache_folder, publish, remembered_sha256, sha256_of, staging
from kvlab.weights.progress import reporting, watching


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLAB_CACHE", "~/models")
    assert cache_folder() == Path.home() / "models"
    monkeypatch.delenv("KVLAB_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/kvlab")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == Path.home() / ".cache" / "kvlab"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder() == Path.home() / "Library" / "Caches" / "kvlab"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    assert cache_folder() == Path("/local/kvlab/Cache")


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    with staging(target) as work:
        (work / "made").mkdir()
        (work / "made" / "a").write_text("a")
        assert not target.exists()
        assert publish(work / "made", target) == target
    assert (target / "a").read_text() == "a"
    assert os.listdir(target.parent) == ["model"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError, SystemExit])
def test_what_fails_leaves_nothing(failure: type[BaseException], tmp_path: Path) -> None:
    def interrupted() -> None:
        with staging(tmp_path / "model") as work:
            (work / "half").write_text("a")
            raise failure

    with pytest.raises(failure):
        interrupted()
    assert os.listdir(tmp_path) == []


def test_the_first_of_two_wins(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for text in ("first", "second"):
        with staging(target) as work:
            (work / "made").mkdir()
            (work / "made" / "a").write_text(text)
            assert publish(work / "made", target) == target
    assert (target / "a").read_text() == "first"
    assert os.listdir(tmp_path) == ["model"]


def test_everything_is_on_the_disk_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    target = tmp_path / "model"

    def flush(path: Path) -> None:
        flushed.append(path.name if path != tmp_path else "parent")
        assert target.exists() is (path == tmp_path)

    monkeypatch.setattr(store, "_flush", flush)
    with staging(target) as work:
        (work / "made").mkdir()
        (work / "made" / "a").write_text("a")
        publish(work / "made", target)
    assert flushed == ["a", "parent"]


def test_what_a_killed_process_left_is_swept_after_a_day(tmp_path: Path) -> None:
    old, young = tmp_path / ".partial-old", tmp_path / ".partial-young"
    for folder, hours in ((old, 25), (young, 23)):
        folder.mkdir()
        (folder / "half").write_text("x")
        at = tmp_path.stat().st_mtime - hours * 3600
        os.utime(folder, (at, at))
    with staging(tmp_path / "model"):
        pass
    assert os.listdir(tmp_path) == [".partial-young"]


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WeightsError, match=r"cannot write below .*set KVLAB_CACHE"), staging(tmp_path / "file" / "x"):
        pass


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    import errno

    with pytest.raises(WeightsError, match="is full; make room or set KVLAB_CACHE"), staging(tmp_path / "model"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(PermissionError), staging(tmp_path / "model"):
        raise PermissionError(errno.EACCES, "not this one")
    assert os.listdir(tmp_path) == []


def test_a_checksum_is_remembered_while_the_file_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, private_cache: Path
) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"one")
    assert remembered_sha256(path) == sha256_of(path)
    with monkeypatch.context() as patch:
        patch.setattr(store, "sha256_of", lambda path: "computed")
        assert remembered_sha256(path) != "computed"
        path.write_bytes(b"two!")
        assert remembered_sha256(path) == "computed"
    for note in private_cache.glob("fingerprints/*"):
        note.write_text("{ damaged")
    assert remembered_sha256(path) == sha256_of(path)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_drawn_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for screen, drawn in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", screen)
        with reporting(None, "converting x", 100) as report:
            report(50)
        assert ("converting x" in screen.getvalue()) is drawn
        assert (screen.getvalue() == "") is not drawn


def test_a_growing_folder_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    import kvlab.weights.progress as progress

    monkeypatch.setattr(progress, "_INTERVAL", 0.001)
    told: list[tuple[str, int, int | None]] = []
    half = threading.Event()

    def note(what: str, done: int, total: int | None) -> None:
        told.append((what, done, total))
        if done == 50:
            half.set()

    with watching(tmp_path, note, "x", 100):
        (tmp_path / "a").write_bytes(bytes(50))
        assert half.wait(10)
    assert told[-1] == ("x", 100, 100)
