"""Where things are in the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = ROOT / "chapters"
BUILD = ROOT / "_build"
SITE = BUILD / "html"


def numbered_chapters() -> list[Path]:
    """The chapters of the course, in order: the pages that have the frame."""
    return sorted(CHAPTERS.glob("[0-9][0-9]_*.md"))


def notebook_pages() -> list[Path]:
    """The pages that are executed and have a notebook beside them: the chapters, and tables made of results."""
    return [path for path in sorted(CHAPTERS.glob("*.md")) if "\nkernelspec:\n" in path.read_text("utf8")]
