"""MyST said again in plain Markdown."""

from __future__ import annotations

import json
from pathlib import Path

import make_ipynb
import pytest
from kvbook.notebook_text import Book, NotebookError, Translator, read_book

SITE = "https://s.io/k"
BOOK = Book(
    SITE,
    titles={"01_a": "1. A", "02_b": "2. B"},
    labels={"far": ("02_b", "Far away"), "eq-x": ("01_a", "eq-x"), "ex-1": ("01_a", "Pencil: bytes")},
    sources={"pope": "Pope et al., 2022", "dao": "Dao, 2023"},
    outputs={("01_a", "fig-x")},
)


def say(text: str) -> str:
    return Translator("01_a", BOOK).cell(text)


@pytest.mark.parametrize(
    ("myst", "markdown"),
    [
        (":::{note}\nMind `x`.\n:::", "> **Note**\n>\n> Mind `x`."),
        (":::{admonition} Bet\n:class: predict\n\nGuess.\n\nAgain.\n:::", "> **Bet**\n>\n> Guess.\n>\n> Again."),
        (":::{dropdown} More\nHidden.\n:::", "<details>\n<summary><b>More</b></summary>\n\nHidden.\n\n</details>"),
        (":::{tip}\n:class: dropdown\nFold.\n:::", "<details>\n<summary><b>Tip</b></summary>\n\nFold.\n\n</details>"),
        ("```{exercise} Pencil\n:label: ex-1\n\nHow many?\n```", "> **Exercise: Pencil**\n>\n> How many?"),
        ("```{math}\nx^2\n```", "$$\nx^2\n$$"),
        ("$$\nx\n$$ (eq-x)", "$$\nx\n$$"),
        ("```{code-block} text\n{ref}`far`\n```", "```text\n{ref}`far`\n```"),
        ("```python\n:::{note}\n```", "```python\n:::{note}\n```"),
        ("(label)=\n## Head", "## Head"),
        ("% a comment\nwords", "words"),
        ("```{image} images/dot.svg\n:alt: A dot.\n```", f"![A dot.]({SITE}/_images/dot.svg)"),
        ("```{figure} images/dot.svg\n:alt: A dot.\n\nSee it.\n```", f"![A dot.]({SITE}/_images/dot.svg)\n\n*See it.*"),
        ("{ref}`there <far>`", f"[there]({SITE}/02_b.html#far)"),
        ("{ref}`far`", f"[Far away]({SITE}/02_b.html#far)"),
        ("{ref}`a long\nname <far>`", f"[a long name]({SITE}/02_b.html#far)"),
        ("{doc}`02_b`", f"[2. B]({SITE}/02_b.html)"),
        ("{doc}`the next </02_b>`", f"[the next]({SITE}/02_b.html)"),
        ("{term}`KV cache`", f"[KV cache]({SITE}/glossary.html#term-KV-cache)"),
        ("{term}`Keys <KV head>`", f"[Keys]({SITE}/glossary.html#term-KV-head)"),
        ("{eq}`eq-x`", f"[the equation]({SITE}/01_a.html#equation-eq-x)"),
        ("{claim}`so <claim-a>`", f"[so]({SITE}/01_a.html#claim-a)"),
        ("{claim}`so <02_b#claim-a>`", f"[so]({SITE}/02_b.html#claim-a)"),
        ("[so](#claim-a) [far](#far)", f"[so]({SITE}/01_a.html#claim-a) [far]({SITE}/02_b.html#far)"),
        ("[fig](#fig-x)", f"[fig]({SITE}/01_a.html#fig-x)"),
        ("[b](02_b.md#far)", f"[b]({SITE}/02_b.html#far)"),
        ("{cite:t}`pope`", f"[Pope et al., 2022]({SITE}/bibliography.html)"),
        ("{cite:p}`dao`", f"([Dao, 2023]({SITE}/bibliography.html))"),
        ("{math}`x` and $y$", "$x$ and $y$"),
        ("{class}`~kvlab.cache.Step`", "`Step`"),
        ("`{ref}` stays, ``{ref}`far` `` too", "`{ref}` stays, ``{ref}`far` `` too"),
        ("see[^1]\n\n[^1]: a note", "see<sup>[1]</sup>\n\n**[1]** a note"),
        ("::::{tip}\n:::{note}\nIn.\n:::\n::::", "> **Tip**\n>\n>\n> > **Note**\n> >\n> > In."),
    ],
)  # fmt: skip
def test_what_becomes_of_it(myst: str, markdown: str) -> None:
    assert say(myst) == markdown


@pytest.mark.parametrize(
    "myst",
    [
        "```{list-table}\n```",
        "{ref}`nowhere`",
        "{doc}`nowhere`",
        "{cite:t}`nobody`",
        "{glue}`x`",
        "[x](file.txt)",
        "```{note}\nopen",
    ],
)
def test_what_has_no_form_in_a_notebook_is_refused(myst: str) -> None:
    with pytest.raises(NotebookError):
        say(myst)


def test_a_solution_is_folded_across_cells() -> None:
    translator = Translator("01_a", BOOK)
    first = translator.cell("Before.\n\n```{solution-start} ex-1\n:class: dropdown\n```\n\nTwo tensors.")
    second = translator.cell("In between.")
    third = translator.cell("The end.\n\n```{solution-end}\n```\n\nAfter.")
    assert (
        first == "Before.\n\n<details>\n<summary><b>Solution: Pencil: bytes</b></summary>\n\nTwo tensors.\n\n</details>"
    )
    assert second.startswith("<details>")
    assert third.endswith("The end.\n\n</details>\n\nAfter.")


def test_a_gate_without_words_leaves_nothing() -> None:
    assert say("```{solution-start} ex-1\n:class: dropdown\n```") == ""


CHAPTER = """---
kernelspec:
  display_name: Python 3
  name: python3
---
# 1. A

Words.

```{code-cell} ipython3
print(1)
```

(far)=
## Far

```{code-cell} ipython3
:tags: [hide-input]

print(2)
```
"""


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, str]:
    path = tmp_path / "01_a.md"
    path.write_text(CHAPTER)
    return path, make_ipynb.notebook(path, read_book(tmp_path, SITE), "https://host/repo")


def test_a_notebook_is_the_same_every_time(made: tuple[Path, str]) -> None:
    path, text = made
    assert make_ipynb.notebook(path, read_book(path.parent, SITE), "https://host/repo") == text


def test_the_cells_of_a_notebook(made: tuple[Path, str]) -> None:
    cells = json.loads(made[1])["cells"]
    assert [cell["cell_type"] for cell in cells] == ["markdown", "code", "code", "markdown", "code"]
    assert f"[the online book]({SITE}/01_a.html)" in "".join(cells[0]["source"])
    install = "".join(cells[1]["source"])
    assert "git+" in install
    assert "https://host/repo" in install
    assert "KVLAB_REPO" in install
    assert cells[2]["metadata"] == {}
    assert cells[4]["metadata"]["cellView"] == "form"
    assert cells[4]["source"][0].startswith("# @title")
    assert len({cell["id"] for cell in cells}) == len(cells)


def test_the_library_knows_pages_and_labels(made: tuple[Path, str]) -> None:
    book = read_book(made[0].parent, SITE)
    assert book.titles == {"01_a": "1. A"}
    assert book.labels == {"far": ("01_a", "Far")}
