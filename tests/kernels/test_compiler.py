"""Compiling the kernels: once, whole or not at all, and with a message that says what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvlab import kernels
from kvlab.errors import DeviceError
from kvlab.kernels import compiler


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def program(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def changed(source: Path, folder: Path) -> Path:
    copy = folder / source.name
    copy.write_text(source.read_text("utf8") + "\n")
    return copy


def test_a_second_build_is_the_first_one(compiled_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLAB_CACHE", str(compiled_kernels))
    monkeypatch.setenv("PATH", "")  # no compiler could be found any more
    monkeypatch.delenv("CXX", raising=False)
    made = kernels.build()
    assert made == kernels.library()
    assert kernels.built()
    assert made.is_relative_to(compiled_kernels)
    assert [path.name for path in made.parent.iterdir()] == [made.name]


def test_another_source_and_other_flags_are_another_library(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {kernels.library()}
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-g"))
        names.add(kernels.library())
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "instruction_set", lambda: "x86_64-AVX9")
        names.add(kernels.library())
    for kind in ("SOURCES", "HEADERS"):
        for number, source in enumerate(files := getattr(compiler, kind)):
            with monkeypatch.context() as patch:
                patch.setattr(compiler, kind, (*files[:number], changed(source, tmp_path), *files[number + 1 :]))
                names.add(kernels.library())
    assert len(names) == 7
    assert kernels.library() in names


def test_every_source_and_header_in_the_folder_counts() -> None:
    folder = compiler.SOURCE.parent
    assert {*compiler.SOURCES, *compiler.HEADERS} == {*folder.glob("*.cpp"), *folder.glob("*.h")}


def test_without_a_compiler_the_message_says_how_to_get_one(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(empty_cache))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(DeviceError, match=r"no C\+\+ compiler was found .* apt install g\+\+\. Without it kvlab runs"):
        kernels.build()
    assert not kernels.built()


def test_the_compiler_that_fails_is_quoted_and_nothing_is_left(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "CXX", str(program(tmp_path, "broken", "echo 'linear.cpp:7: fatal error: no such header' >&2; exit 1"))
    )
    with pytest.raises(DeviceError, match=r"broken cannot compile the kernels: linear\.cpp:7: fatal error: no such"):
        kernels.build()
    assert [path for path in empty_cache.rglob("*") if path.is_file()] == []
    assert list((empty_cache / "kernels").iterdir()) == []
    assert not kernels.built()


def test_a_compiler_that_is_interrupted_leaves_nothing(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("CXX", str(program(tmp_path, "compiler", "exit 0")))
    monkeypatch.setattr(compiler.subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kernels.build()
    assert list((empty_cache / "kernels").iterdir()) == []


def test_the_users_own_compiler_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = program(tmp_path, "my-c++", "exit 0")
    program(tmp_path, "g++", "exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CXX", str(mine))
    assert kernels.require_compiler() == str(mine)
    monkeypatch.delenv("CXX")
    assert kernels.require_compiler() == str(tmp_path / "g++")
