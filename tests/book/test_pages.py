"""The built pages: links, pictures, outputs, the ledger, the statements."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import yaml
from kvbook import checks
from kvbook.addresses import Addresses
from kvbook.checks import Site
from kvbook.layout import ROOT, notebook_pages
from kvbook.ledger import read_claims

PAGES = notebook_pages()

# Headings of the plan whose work is done: each of their statements must have its place in the book. A heading
# joins when its issue closes.
FINISHED_HEADINGS = {1, 2, 3, 4, 5, 6}


def test_links_and_anchors(site: Site) -> None:
    assert checks.link_problems(site) == []


def test_no_anchor_stands_twice(site: Site) -> None:
    assert checks.duplicate_anchor_problems(site) == []


def test_every_picture_has_alt_text(site: Site) -> None:
    assert checks.image_problems(site) == []


def test_every_page_of_the_contents_is_built(site: Site) -> None:
    def files(node: Any) -> list[str]:
        if isinstance(node, list):
            return [name for item in node for name in files(item)]
        own = [node["file"]] if "file" in node else []
        return own + [name for key in ("parts", "chapters", "sections") for name in files(node.get(key, []))]

    toc = yaml.safe_load((ROOT / "_toc.yml").read_text("utf8"))
    listed = [toc["root"], *files(toc)]
    assert [name for name in listed if site.anchors_of(name) is None] == []
    assert sorted(path.stem for path in PAGES if path.stem not in listed) == []


def test_nothing_stray_in_the_outputs(executed: dict[str, dict[str, Any]]) -> None:
    assert {name: found for name, nb in executed.items() if (found := checks.output_problems(nb))} == {}


def test_the_ledger_lists_every_claim(site: Site, executed: dict[str, dict[str, Any]]) -> None:
    ledger = site.pages[site.root / "claims.html"]
    links = [str(link["href"]) for link in ledger.select("table.kvlab-ledger a")]
    expected = [f"{name}.html#{claim['slug']}" for name, nb in executed.items() for claim in read_claims(nb)]
    assert sorted(links) == sorted(expected)


def test_statements_are_complete() -> None:
    rows = checks.read_statements(ROOT / "data" / "statements.csv")
    assert [int(row["row"]) for row in rows] == list(range(1, 151))
    assert all(list(row) == checks.COLUMNS for row in rows)
    assert {row["verdict"] for row in rows} == checks.VERDICTS


def test_statements_of_finished_headings_have_their_place(site: Site) -> None:
    rows = checks.read_statements(ROOT / "data" / "statements.csv")
    assert checks.statement_problems(rows, FINISHED_HEADINGS, site) == []


def test_every_statement_that_is_not_right_has_its_entry_among_the_myths(site: Site) -> None:
    rows = checks.read_statements(ROOT / "data" / "statements.csv")
    assert checks.myth_problems(rows, site) == []


def test_links_of_the_notebooks_lead_into_the_site(site: Site, address: Addresses) -> None:
    texts = {path.name: path.with_suffix(".ipynb").read_text("utf8") for path in PAGES}
    assert checks.site_link_problems(texts, address.site, site) == []


# --- the checks themselves, on a small broken site ------------------------------------------------------------------


def small_site(folder: Path, article: str, other: str = '<p id="there"></p>') -> Site:
    (folder / "index.html").write_text(f"<html><body><article>{article}</article></body></html>")
    (folder / "other.html").write_text(f"<html><body><article>{other}</article></body></html>")
    (folder / "real.png").write_bytes(b"")
    return Site(folder)


def test_a_good_small_site_has_no_problem(tmp_path: Path) -> None:
    site = small_site(
        tmp_path, '<a href="other.html#there">x</a><img src="real.png" alt="A picture"><a href="https://x.org">x</a>'
    )
    assert checks.link_problems(site) == checks.image_problems(site) == checks.duplicate_anchor_problems(site) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    site = small_site(
        tmp_path,
        '<a href="gone.html">x</a><a href="other.html#gone">x</a><a href="#gone">x</a><script src="https://cdn.org/x.js"></script>',
    )
    problems = checks.link_problems(site)
    assert len(problems) == 4
    assert "no such file" in problems[0]
    assert sum("no such anchor" in problem for problem in problems) == 2
    assert any("loads from outside: https://cdn.org/x.js" in problem for problem in problems)


def test_pictures_without_alt_text_are_found(tmp_path: Path) -> None:
    site = small_site(
        tmp_path,
        '<img src="real.png"><img src="real.png" alt="_images/real.png"><svg></svg><svg><title>t</title></svg>',
    )
    assert len(checks.image_problems(site)) == 3


def test_an_anchor_that_stands_twice_is_found(tmp_path: Path) -> None:
    site = small_site(tmp_path, '<p id="a"></p><p id="a"></p><p id="b"></p>')
    assert checks.duplicate_anchor_problems(site) == ["index.html: two elements have the id a"]


def test_notebook_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    site = small_site(tmp_path, "")
    text = json.dumps(
        "[a](https://s.io/k/other.html#there) [b](https://s.io/k/other.html#gone) [c](https://s.io/k/no.html)"
    )
    assert len(checks.site_link_problems({"n": text}, "https://s.io/k", site)) == 2


def test_stray_outputs_are_found() -> None:
    outputs: list[dict[str, Any]] = [
        {"output_type": "stream", "name": "stderr", "text": "warning"},
        {"output_type": "error", "ename": "ValueError"},
        {"output_type": "display_data", "data": {"application/vnd.jupyter.widget-view+json": {}}},
        {"output_type": "display_data", "data": {"text/html": ['<div class="kvlab-claim kvlab-claim-fails">']}},
        {"output_type": "stream", "name": "stdout", "text": "fine"},
    ]
    assert len(checks.output_problems({"cells": [{"source": "x", "outputs": outputs}]})) == 4


def row(place: str, claim: str = "", heading: str = "1") -> dict[str, str]:
    return {"row": "1", "owed_by_heading": heading, "place": place, "claim": claim}


def test_statement_places_are_checked(tmp_path: Path) -> None:
    site = small_site(tmp_path, "", '<p id="there"></p><div id="claim-a"></div>')

    def problems(*rows: dict[str, str]) -> int:
        return len(checks.statement_problems(rows, {1}, site))

    assert problems(row("other#there"), row("other#there", "claim-a"), row("", heading="2")) == 0
    assert problems(row("")) == 1
    assert problems(row("other#gone")) == 1
    assert problems(row("other")) == 1
    assert problems(row("nowhere#there")) == 1
    assert problems(row("nowhere#there", heading="2")) == 1
    assert problems(row("other#there", "claim-gone")) == 1
    assert problems(row("other#there", "there")) == 1


def myth(anchor: str, verdict: str = "Wrong.", link: str = "other.html#there") -> str:
    return f'<div class="myth admonition" id="{anchor}"><p><strong>{verdict}</strong> <a href="{link}">x</a></p></div>'


def myths(folder: Path, body: str) -> Site:
    (folder / "myths.html").write_text(f"<html><body><article>{body}</article></body></html>")
    return Site(folder)


def test_entries_of_the_myths_page_are_checked(tmp_path: Path) -> None:
    wrong = {**row("other#there", "claim-a"), "verdict": "WRONG"}
    fine, waiting = {**wrong, "row": "2", "verdict": "OK"}, {**wrong, "row": "3", "place": ""}

    def problems(body: str) -> list[str]:
        return checks.myth_problems([wrong, fine, waiting], myths(tmp_path, body))

    assert problems(myth("myth-1")) == []
    assert problems(myth("myth-1", link="other.html#claim-a")) == []
    assert problems('<div class="myth"><span id="myth-1"></span>' + myth("any")) == []
    assert problems("") == ["myth-1: no entry for row 1"]
    assert problems(myth("myth-1", link="other.html#gone")) == [
        "myth-1: no link to other.html#claim-a or other.html#there"
    ]
    assert problems(myth("myth-1", "Imprecise.")) == ["myth-1: the entry does not begin with **Wrong.**"]
    assert problems(myth("myth-1") + myth("myth-2") + myth("myth-3")) == [
        "myth-2: no such row is wrong and has a place",
        "myth-3: no such row is wrong and has a place",
    ]


def test_a_link_beside_an_entry_is_not_in_it(tmp_path: Path) -> None:
    wrong = {**row("other#there"), "verdict": "IMP"}
    beside = myth("myth-1", "Imprecise.", "#") + '<a href="other.html#there">x</a>'
    assert checks.myth_problems([wrong], myths(tmp_path, beside)) == ["myth-1: no link to other.html#there"]


def test_a_book_without_myths_has_a_problem(tmp_path: Path) -> None:
    assert checks.myth_problems([], small_site(tmp_path, "")) == ["there is no page myths"]


def test_statements_file_reads_quoted_cells(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([checks.COLUMNS, ["1", 'a, "b"', "OK", "", "1", "", ""]])
    assert checks.read_statements(path)[0]["statement"] == 'a, "b"'
