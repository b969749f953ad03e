"""The start of a chapter, the source on show, and the two stages a cell can run on."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import kvlab.resources
from kvlab import provenance
from kvlab.book import Lab, claims, explorer, in_build, progress, setup, show, stage


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr("IPython.display.display", lambda item, **_: found.append(item))
    return found


def test_setup_prints_the_stamp_and_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    lab = setup(seed=3, device="cpu")
    first = torch.rand(1)
    assert capsys.readouterr().out.strip() == lab.stamp
    for part in ("CPU", "float32", torch.__version__.split("+")[0], provenance.commit()):
        assert part in lab.stamp
    setup(seed=3, device="cpu")
    assert torch.equal(first, torch.rand(1))
    assert isinstance(lab, Lab)
    assert (lab.device, lab.dtype) == (torch.device("cpu"), torch.float32)


def test_importing_the_book_is_light() -> None:
    code = "import sys, kvlab.book; print([m for m in ('torch', 'matplotlib', 'IPython') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_show_prints_source_with_a_link_to_the_line(shown: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlab.book.source.source_link", lambda path, line: f"https://host/{path.name}#L{line}")
    show(kvlab.resources.resource, claims.Claim.html)
    first, second = (bundle["text/markdown"] for bundle in shown)
    assert first.startswith("```python\ndef resource(")
    assert "(https://host/resources.py#L" in first
    assert second.startswith("```python\ndef html(self)")
    assert shown[0]["text/plain"].startswith("# kvlab/resources.py, line ")


def test_show_fences_source_that_holds_a_fence(shown: list[Any], tmp_path: Any) -> None:
    def fenced() -> str:
        return "```"

    show(fenced)
    assert shown[0]["text/markdown"].startswith("````python\n")


def test_source_link_points_into_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "repository", lambda: "https://host/kvlab")
    link = provenance.source_link(provenance.Path(provenance.__file__), 12)
    assert link is not None
    assert link.startswith("https://host/kvlab/blob/")
    assert link.endswith("/lib/kvlab/provenance.py#L12")


def test_static_page_shows_the_picture_alone(shown: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def draw() -> None:
        shown.append("picture")

    monkeypatch.setenv(stage.BUILD_VARIABLE, "1")
    explorer(draw, lambda: "widget")
    assert shown == ["picture"]
    monkeypatch.delenv(stage.BUILD_VARIABLE)
    explorer(draw, lambda: "widget")
    assert shown == ["picture", "picture", "widget"]


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), ("", False)])
def test_the_build_is_known_by_its_variable(value: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(stage.BUILD_VARIABLE, value)
    assert in_build() is expected


def test_progress_is_silent_in_the_build(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(stage.BUILD_VARIABLE, "1")
    assert list(progress(range(3), "counting")) == [0, 1, 2]
    assert capfd.readouterr() == ("", "")
