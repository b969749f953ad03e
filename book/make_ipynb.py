"""Make the notebooks that Colab opens from the chapters: without options write them, with `--check` compare them."""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from kvbook import addresses
from kvbook.layout import CHAPTERS, ROOT, notebook_pages
from kvbook.notebook_text import Book, NotebookError, Translator, read_book
from nbformat import NotebookNode

METADATA = {
    "colab": {"provenance": [], "toc_visible": True},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
INSTALL = """\
# Installs kvlab where it is missing, as in Colab, with what the notebooks need. The list of constraints keeps
# every package that is already here at its version. KVLAB_REPO may name another copy of the repository.
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile

if importlib.util.find_spec("kvlab") is None:
    here = {d.name: d.version for d in importlib.metadata.distributions() if d.name}
    with tempfile.NamedTemporaryFile("w", suffix=".txt", delete=False) as keep:
        for name, version in here.items():
            if re.fullmatch(r"\\d+(\\.\\d+)*((a|b|rc|\\.post|\\.dev)\\d+)*(\\+[a-z0-9.]+)?", version):
                print(f"{name}=={version}", file=keep)
    source = "git+" + os.environ.get("KVLAB_REPO", "REPOSITORY")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", keep.name, source, "kvlab[book]"], check=True)
    importlib.invalidate_caches()
"""


def notebook(path: Path, book: Book, repository: str) -> str:
    """The notebook of one chapter, as text."""
    source = jupytext.reads(path.read_text("utf8"), fmt="md:myst")
    translator = Translator(path.stem, book)
    cells = [made for cell in source.cells if (made := _cell(cell, translator))]
    code = [at for at, cell in enumerate(cells) if cell.cell_type == "code"]
    if not code:
        raise NotebookError("a chapter needs a code cell")
    install = nbformat.v4.new_code_cell(INSTALL.rstrip().replace("REPOSITORY", repository))
    install.metadata["cellView"] = "form"
    install.source = f"# @title Install kvlab (does nothing where it is there)\n{install.source}"
    cells.insert(code[0], install)
    cells[0].source = _with_home(cells[0].source, book.url(path.stem))
    for at, cell in enumerate(cells):
        cell["id"] = hashlib.sha256(f"{path.stem}:{at}".encode()).hexdigest()[:8]
    made = nbformat.v4.new_notebook(cells=cells, metadata=METADATA)
    nbformat.validate(made)
    return nbformat.writes(made, ensure_ascii=False).rstrip("\n") + "\n"


def _cell(cell: NotebookNode, translator: Translator) -> NotebookNode | None:
    """A cell of the notebook; None for text that says nothing outside the book."""
    if cell.cell_type != "code":
        text = translator.cell(cell.source)
        return nbformat.v4.new_markdown_cell(text) if text else None
    made = nbformat.v4.new_code_cell(cell.source)
    tags: list[str] = cell.metadata.get("tags", [])
    folded = {"hide-input": "How this is drawn", "hide-cell": "Solution: think first, then run this"}
    for tag in [tag for tag in tags if tag in folded]:
        made.metadata.update({"cellView": "form", "jupyter": {"source_hidden": True}})
        if not cell.source.startswith("%%"):
            made.source = f"# @title {folded[tag]}\n{cell.source}"
    return made


def _with_home(text: str, url: str) -> str:
    """Below the title, where the page of this notebook is."""
    return re.sub(
        r"^(# .+)$", rf"\1\n\n*This notebook is a page of [the online book]({url}).*", text, count=1, flags=re.MULTILINE
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when a notebook is stale")
    check: Any = parser.parse_args().check
    where = addresses.read(ROOT)
    book = read_book(CHAPTERS, where.site)
    stale = []
    for path in notebook_pages():
        target = path.with_suffix(".ipynb")
        try:
            text = notebook(path, book, where.repository)
        except NotebookError as error:
            raise SystemExit(f"{path.relative_to(ROOT)}: {error}") from None
        if not target.exists() or target.read_text("utf8") != text:
            stale.append(target.relative_to(ROOT).as_posix())
            if not check:
                target.write_text(text, "utf8")
    orphans = [p.relative_to(ROOT).as_posix() for p in CHAPTERS.rglob("*.ipynb") if not p.with_suffix(".md").exists()]
    print(("stale: " if check else "written: ") + (", ".join(stale) or "nothing"))
    if orphans:
        print("no chapter beside:", ", ".join(orphans))
    return int(bool(check and (stale or orphans)))


if __name__ == "__main__":
    sys.exit(main())
