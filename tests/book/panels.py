"""A page of panels, and what a test does to their controls in a browser."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbook import browser

from kvlab.book.calculators import Explorable


def page_of(folder: Path, *shown: Explorable, attributes: str = "") -> Path:
    """A site of one page that shows these panels."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>t</title>'
    body = "".join(f"<section>{panel._repr_html_()}</section>" for panel in shown)
    page = f'<html lang="en"{attributes}><head>{head}</head><body><main><h1>t</h1>{body}</main></body></html>'
    (folder / "index.html").write_text(f"<!doctype html>{page}", "utf8")
    return folder


def control(label: str, inside: str = "") -> str:
    """Selector of the field with this label."""
    return f"{inside} .kvc-field:has(label:text-is('{label}'))"


def choose(label: str, value: str) -> list[str]:
    """Step: choose from a list."""
    return ["select", f"{control(label)} select", value]


def enter(label: str, value: int) -> list[str]:
    """Step: type a number."""
    return ["fill", f"{control(label)} input[type=number]", str(value)]


ANSWER = ["text", ".kvc-answer"]


def clean(seen: dict[str, Any]) -> dict[str, Any]:
    """What was read, on a page that complained about nothing."""
    assert seen["console"] == seen["outside"] == seen["missing"] == []
    return seen


def answers_of(folder: Path, shown: Sequence[Explorable]) -> list[str]:
    """What panels answer in a browser, where each of them has come alive."""
    live = "document.querySelectorAll('.kvlab-calculator[data-live]').length"
    every = "[...document.querySelectorAll('.kvc-answer')].map((node) => node.textContent)"
    seen = clean(browser.drive(page_of(folder, *shown), [["evaluate", live], ["evaluate", every]]))
    alive, answers = seen["read"]
    assert alive == len(shown)
    return answers
