"""Chapters and their notebooks: the frame, the cells, the pairing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from kvbook import checks
from kvbook.layout import ROOT, notebook_pages, numbered_chapters

CHAPTERS = numbered_chapters()
PAGES = notebook_pages()

SAMPLE = re.search(r"^`````markdown\n(.*?)^`````$", (ROOT / "book" / "AUTHORING.md").read_text("utf8"), re.M | re.S)


def sample() -> str:
    """The chapter of AUTHORING.md, with the two exercises it leaves out."""
    assert SAMPLE is not None
    text = SAMPLE[1]
    start, end = text.index("```{exercise}"), text.index("(… one more")
    more = [text[start:end].replace("-pencil", f"-{kind}") for kind in ("repair", "break")]
    return text[:end] + "".join(more) + text[text.index("## Where next") :]


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_frame(path: Path) -> None:
    assert checks.frame_problems(path.read_text("utf8")) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_cells(path: Path) -> None:
    assert checks.cell_problems(path.read_text("utf8")) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_notebook_has_no_outputs(path: Path) -> None:
    cells = json.loads(path.with_suffix(".ipynb").read_text("utf8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_the_chapters_and_the_results_have_notebooks() -> None:
    assert {path.stem for path in PAGES} == {"results", *(path.stem for path in CHAPTERS)}


def test_notebooks_are_what_the_chapters_make() -> None:
    done = subprocess.run([sys.executable, "book/make_ipynb.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\nrun: make notebooks"


def test_a_cell_has_a_time_limit_and_errors_stop_the_build() -> None:
    config = yaml.safe_load((ROOT / "_config.yml").read_text("utf8"))
    assert 0 < config["execute"]["timeout"] <= 120
    assert config["execute"]["allow_errors"] is False
    assert config["execute"]["stderr_output"] == "error"


def test_the_sample_of_the_guide_has_the_frame() -> None:
    assert checks.frame_problems(sample()) == []
    assert checks.cell_problems(sample()) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("# 4. The KV cache", "The KV cache", "one title"),
        ("## Summary", "## The end", "no section Summary"),
        ("## Where next", "## Next", "no section Where next"),
        ("**You need**", "**Needed**", "lacks **You need**"),
        ("- when keeping it loses.", "", "2 items"),
        ("**Time** 25 minutes to read", "**Time** short", "Time must say"),
        (":class: predict", ":class: note", "no box of class predict"),
        (":class: price", ":class: note", "no box of class price"),
        ("lab = setup()", "lab = None", "setup()"),
        ("ex-04-repair", "ex-04-mend", "ends in -repair"),
        ("*5 minutes.* 30", "30", "does not say its time"),
        (":class: dropdown", ":class: open", "no folded solution"),
        (":tags: [hide-cell]", ":tags: [other]", "tagged hide-cell"),
    ],
)
def test_what_a_frame_lacks_is_found(old: str, new: str, problem: str) -> None:
    assert old in sample()
    assert any(problem in found for found in checks.frame_problems(sample().replace(old, new)))


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("x = 1\n" * 29, "29 lines"),
        (f"x = '{'a' * 90}'", "characters"),
        ("claim('a', 3, 3)", "literal"),
        ("claim('a', 3 * 2, 6)", "literal"),
        ("plt.show()", "alt text"),
        ("x = = 1", "not Python"),
    ],
)
def test_what_is_wrong_with_a_cell_is_found(code: str, problem: str) -> None:
    text = f"```{{code-cell}} ipython3\n:tags: [x]\n\n{code}\n```\n"
    (found,) = checks.cell_problems(text)
    assert problem in found


def test_cells_are_read_without_their_options() -> None:
    bodies = ["---\ntags: [hide-input, other]\n---\na = 1", ":tags: [x]\n\nb = 2", "c = 3"]
    text = "\n".join(f"```{{code-cell}}\n{body}\n```" for body in bodies)
    assert checks.cells(text) == [
        checks.Cell("a = 1", ("hide-input", "other")),
        checks.Cell("b = 2", ("x",)),
        checks.Cell("c = 3", ()),
    ]
