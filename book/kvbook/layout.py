"""Where things are in the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = ROOT / "chapters"
BUILD = ROOT / "_build"
SITE = BUILD / "html"


def numbered_chapters() -> list[Path]:
    """The chapters of the course, in order: the pages that have the frame and a notebook."""
    return sorted(CHAPTERS.glob("[0-9][0-9]_*.md"))
