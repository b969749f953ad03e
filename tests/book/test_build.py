"""How the book is built: when outputs are stale, what leaves the pages, one address, reading paths, the ledger."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvbook import addresses, execution
from kvbook.layout import ROOT
from kvbook.ledger import read_claims
from kvbook.pages import link_to_code, tidy_scripts
from kvbook.paths import read_stop

from kvlab.book.claims import judge


def small_repository(folder: Path) -> Path:
    for name in ("lib/kvlab/a.py", "data/shapes.json", "data/statements.csv"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("1")
    return folder


@pytest.mark.parametrize(
    ("name", "stale"), [("lib/kvlab/a.py", True), ("data/shapes.json", True), ("data/statements.csv", False)]
)
def test_outputs_are_stale_when_library_or_data_change(tmp_path: Path, name: str, stale: bool) -> None:
    root = small_repository(tmp_path)
    before = execution.outputs_key(root)
    assert execution.outputs_key(root) == before
    (root / name).write_text("2")
    assert (execution.outputs_key(root) != before) is stale


def test_outputs_are_stale_when_a_version_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = small_repository(tmp_path)
    before = execution.outputs_key(root)
    monkeypatch.setattr(execution, "version", lambda name: "0")
    assert execution.outputs_key(root) != before


def test_no_warning_is_suppressed() -> None:
    config = yaml.safe_load((ROOT / "_config.yml").read_text("utf8"))
    assert "suppress_warnings" not in config["sphinx"]["config"]
    source = (ROOT / "book" / "kvbook" / "execution.py").read_text("utf8")
    assert "config.suppress_warnings = []" in source
    assert '"-W", "--keep-going"' in (ROOT / "book" / "build_book.py").read_text("utf8")


class Script:
    def __init__(self, filename: str | None, **attributes: str) -> None:
        self.filename = filename
        self.attributes = attributes


def test_thebe_and_doubles_leave_the_scripts() -> None:
    kept = Script("_static/a.js")
    scripts = [kept, Script("_static/a.js"), Script("_static/sphinx-thebe.js"), Script(None, body="THEBE_JS_URL")]
    context: dict[str, Any] = {"script_files": scripts}
    tidy_scripts(None, "page", "", context, None)  # type: ignore[arg-type]
    assert context["script_files"] == [kept]


def test_the_reference_links_to_the_line() -> None:
    link = link_to_code("py", {"module": "kvlab.book.claims", "fullname": "Claim.html"})
    lines = (ROOT / "lib" / "kvlab" / "book" / "claims.py").read_text("utf8").splitlines()
    line = 1 + next(at for at, text in enumerate(lines) if "def html(self)" in text)
    assert link is not None
    assert link.endswith(f"lib/kvlab/book/claims.py#L{line}")
    assert link_to_code("py", {"module": "kvlab.book.claims", "fullname": "nothing"}) is None


def test_claims_are_read_from_outputs() -> None:
    _, metadata = judge("so", 1, 1)._repr_mimebundle_()
    notebook = {"cells": [{"outputs": [{"metadata": metadata}, {"metadata": {}}, {}]}, {}]}
    assert [claim["slug"] for claim in read_claims(notebook)] == ["claim-so"]


@pytest.mark.parametrize(
    ("line", "read", "run"),
    [
        ("**Time** 25 minutes to read, 1 minute to run on two CPU cores.", 25, 1),
        ("**Time** 1 minute to read.", 1, 0),
        ("no time", 0, 0),
    ],
)
def test_minutes_are_read_from_the_page(tmp_path: Path, line: str, read: int, run: int) -> None:
    page = tmp_path / "01_a.md"
    page.write_text(f"# 1. A\n\n{line}\n")
    stop = read_stop(page)
    assert (stop.page, stop.title, stop.read, stop.run) == ("01_a", "1. A", read, run)


def test_the_addresses_change_in_one_go(tmp_path: Path) -> None:
    for name in ("_config.yml", "README.md", "chapters/index.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text("utf8"))
    old = addresses.read(tmp_path)
    new = addresses.Addresses("https://github.com/someone/kvlab", "https://someone.github.io/kvlab")
    addresses.change(new, tmp_path)
    assert addresses.read(tmp_path) == new
    for name in ("_config.yml", "README.md", "chapters/index.md"):
        text = (tmp_path / name).read_text("utf8")
        assert old.repository not in text
        assert old.site not in text


def test_the_addresses_stand_in_no_other_file(address: addresses.Addresses) -> None:
    """Beside the configuration, the files that `make address` rewrites, and the notebooks, which are made."""
    found = subprocess.run(
        ["git", "grep", "-lIF", "-e", address.repository, "-e", address.site], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    others = {name for name in found if not re.fullmatch(r"chapters/\w+\.ipynb", name)}
    assert others <= {"_config.yml", *addresses.FOLLOWERS}


def test_vendored_scripts_and_lock_name_no_host() -> None:
    lock = (ROOT / "book" / "package-lock.json").read_text("utf8")
    assert "resolved" not in lock
    assert '"playwright-core": "1.65.1"' in lock
    assert '"axe-core": "4.14.1"' in lock
