"""The tools of the book: a Sphinx extension (execution, claims, paths, pages), the notebook's text, the checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx calls this: execution keyed on the library, claims and their ledger, reading paths, tidy pages."""
    from kvbook import execution, ledger, pages, paths

    for part in (execution, ledger, pages, paths):
        part.connect(app)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
