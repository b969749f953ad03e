"""Every built page in headless Chromium: at desktop width light and dark, at phone width light."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvbook import browser
from kvbook.checks import Site

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def results(site: Site) -> list[dict[str, Any]]:
    assert not browser.missing(), f"{', '.join(browser.missing())} not found; {browser.INSTALL}"
    return browser.look_at(site.root, [path.relative_to(site.root).as_posix() for path in site.pages])


@pytest.fixture
def look(tmp_path: Path) -> Callable[[str], list[dict[str, Any]]]:
    """Look at one page of a site made for the test."""

    def look_at_page(body: str, head: str = "") -> list[dict[str, Any]]:
        start = (
            '<!doctype html><html lang="en"><head><title>t</title><meta name="viewport" content="width=device-width">'
        )
        (tmp_path / "index.html").write_text(f"{start}{head}</head><body><main><h1>t</h1>{body}</main></body></html>")
        return browser.look_at(tmp_path, ["index.html"])

    return look_at_page


def found(results: list[dict[str, Any]], key: str) -> list[str]:
    return sorted({f"{r['page']} ({r['view']}): {item}" for r in results for item in r[key]})


def test_every_page_is_seen_in_three_ways(results: list[dict[str, Any]], site: Site) -> None:
    assert len(results) == 3 * len(site.pages) > 0
    assert {(r["view"], r["scheme"]) for r in results} == {
        ("desktop", "light"),
        ("desktop", "dark"),
        ("phone", "light"),
    }
    themes = {(r["scheme"], r["theme"]) for r in results if not r["page"].startswith("index")}
    assert themes == {("light", "light"), ("dark", "dark")}


@pytest.mark.parametrize("key", ["console", "outside", "missing", "broken", "unset", "dead", "twice"])
def test_no_errors_and_nothing_from_elsewhere(results: list[dict[str, Any]], key: str) -> None:
    """Console errors, requests that leave the site, missing files, broken images, formulas that MathJax refused,
    calculators without their controls, ids that scripts gave twice."""
    assert found(results, key) == []


def test_no_page_is_wider_than_the_phone(results: list[dict[str, Any]]) -> None:
    assert [f"{r['page']} by {r['overflow']} px" for r in results if r["overflow"] > 0 and r["view"] == "phone"] == []


def test_no_accessibility_violation_beyond_the_theme(results: list[dict[str, Any]]) -> None:
    allowed = browser.read_baseline()
    ours = sorted(
        {
            f"{r['page']} ({r['scheme']}): {a['rule']}: {a['target']}: {a['why']}"
            for r in results
            for a in r["axe"]
            if (a["rule"], a["kind"]) not in allowed
        }
    )
    assert ours == []


def test_the_check_sees_what_it_looks_for(look: Callable[..., list[dict[str, Any]]]) -> None:
    results = look(
        '<p style="color:#999;background:#fff">faint</p><img src="gone.png" alt="gone">'
        '<div style="width:900px">wide</div>'
        '<div class="kvlab-calculator" data-kind="memory"><p id="a">a</p><p id="a">b</p></div>',
        '<script>console.error("bad")</script><script src="https://example.org/x.js"></script>',
    )
    assert any("bad" in text for text in found(results, "console"))
    assert any("https://example.org/x.js" in text for text in found(results, "outside"))
    assert any("404" in text for text in found(results, "missing"))
    assert any("gone.png" in text for text in found(results, "broken"))
    assert found(results, "dead") == ["index.html (desktop): memory", "index.html (phone): memory"]
    assert any(text.endswith(": a") for text in found(results, "twice"))
    assert any(r["overflow"] > 0 for r in results if r["view"] == "phone")
    assert ("color-contrast", "p") in browser.violations(results)
