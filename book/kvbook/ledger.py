"""Claims: links to them, and the page that lists every claim of the executed book."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective, SphinxRole

from kvbook.execution import executed
from kvlab.book.claims import CLAIM_KEY

LOGGER = logging.getLogger(__name__)
LEDGER_PAGE = "claims"
_ANCHOR = re.compile(r'<(?:div|figure) class="kvlab-[\w -]+" id="([\w-]+)"')


class ledger_node(nodes.General, nodes.Element):
    """Where the list of claims goes."""


class Ledger(SphinxDirective):
    """``{ledger}``: every claim of the book, page by page."""

    def run(self) -> list[nodes.Node]:
        return [ledger_node()]


class ClaimRole(SphinxRole):
    """``{claim}`words <page#claim-slug>```: a link to a claim; without a page, to one of the same page."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        words, _, target = self.text.rpartition("<")
        page, _, slug = target.rstrip(">").strip().rpartition("#")
        link = nodes.reference("", "", nodes.inline("", words.strip() or slug), internal=True)
        link["kvbook_claim"] = (page or self.env.docname, slug)
        self.set_source_info(link)
        return [link], []


def connect(app: Sphinx) -> None:
    app.add_node(ledger_node)
    app.add_directive("ledger", Ledger)
    app.add_role("claim", ClaimRole())
    app.connect("doctree-read", collect)
    app.connect("env-purge-doc", purge)
    app.connect("env-merge-info", merge)
    app.connect("env-updated", refresh)
    app.connect("doctree-resolved", resolve)


def claims_of(env: BuildEnvironment) -> dict[str, list[dict[str, Any]]]:
    """Every claim that was found, by page."""
    if not hasattr(env, "kvbook_claims"):
        env.kvbook_claims = {}
    return env.kvbook_claims


def read_claims(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The claims in the outputs of an executed notebook."""
    notes = [output.get("metadata", {}) for cell in notebook["cells"] for output in cell.get("outputs", [])]
    return [note[CLAIM_KEY] for note in notes if CLAIM_KEY in note]


def collect(app: Sphinx, doctree: nodes.document) -> None:
    page = app.env.docname
    if "kernelspec" not in app.env.metadata.get(page, {}):
        return
    _link_outputs(doctree)
    try:
        found = read_claims(executed(page, app.config.kvbook_outputs_key))
    except KeyError:  # the notebook failed, which is reported elsewhere
        return
    slugs = [claim["slug"] for claim in found]
    for slug in sorted({slug for slug in slugs if slugs.count(slug) > 1}):
        LOGGER.warning("two claims of this page have the anchor %s: make the sentences differ", slug, location=page)
    for claim in found:
        if claim["narrow"]:
            LOGGER.info("true, but narrowly: %s: %s (%s)", page, claim["sentence"], claim["measured"])
    claims_of(app.env)[page] = found


def _link_outputs(doctree: nodes.document) -> None:
    """``[words](#name)`` may lead to an anchor inside an output of the same page: a claim, a figure with a name."""
    names = {name for raw in doctree.findall(nodes.raw) for name in _ANCHOR.findall(raw.astext())}
    for link in list(doctree.findall(pending_xref)):
        if link.get("reftype") == "myst" and link.get("reftarget") in names:
            link.replace_self(nodes.reference("", "", *link.children, internal=True, refuri=f"#{link['reftarget']}"))


def purge(app: Sphinx, env: BuildEnvironment, page: str) -> None:
    claims_of(env).pop(page, None)


def merge(app: Sphinx, env: BuildEnvironment, pages: Iterable[str], other: BuildEnvironment) -> None:
    claims_of(env).update({page: found for page, found in claims_of(other).items() if page in pages})


def refresh(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """The ledger is written again in every build: its source does not change when a claim does."""
    return [LEDGER_PAGE] if LEDGER_PAGE in env.found_docs else []


def resolve(app: Sphinx, doctree: nodes.document, page: str) -> None:
    for link in list(doctree.findall(nodes.reference)):
        if "kvbook_claim" in link:
            _resolve_link(app, link, page)
    for place in list(doctree.findall(ledger_node)):
        place.replace_self(_tables(app, page))


def _resolve_link(app: Sphinx, link: nodes.reference, page: str) -> None:
    target, slug = link["kvbook_claim"]
    known = claims_of(app.env)
    # Of a notebook that failed nothing is known; that it failed is said already.
    failed = target not in known and target in app.env.found_docs
    if not failed and slug not in {claim["slug"] for claim in known.get(target, [])}:
        LOGGER.warning("no claim %s on page %s", slug, target, location=link)
    del link["kvbook_claim"]
    link["refuri"] = f"#{slug}" if target == page else f"{app.builder.get_relative_uri(page, target)}#{slug}"


def _tables(app: Sphinx, page: str) -> list[nodes.Node]:
    """One table a page, under the page's title, in the order of the book."""
    found = claims_of(app.env)
    made: list[nodes.Node] = []
    for source in [name for name in sorted(found) if found[name]]:
        uri = app.builder.get_relative_uri(page, source)
        title = app.env.titles[source].astext()
        heading = nodes.rubric("", "", nodes.reference("", title, refuri=uri, internal=True))
        made += [heading, _table([_cells(claim, uri) for claim in found[source]])]
    total = sum(len(claims) for claims in found.values())
    pages = sum(1 for claims in found.values() if claims)
    narrow = sum(claim["narrow"] for claims in found.values() for claim in claims)
    room = f" {narrow} of them held without the room they should have." if narrow else ""
    return [nodes.paragraph("", f"{total} claims on {pages} pages, all of them true in this build.{room}"), *made]


def _cells(claim: dict[str, Any], uri: str) -> list[nodes.Node]:
    link = nodes.reference("", claim["sentence"].replace("`", ""), refuri=f"{uri}#{claim['slug']}", internal=True)
    return [
        nodes.paragraph("", "", link),
        nodes.paragraph("", claim["measured"]),
        nodes.paragraph("", claim["expected"]),
    ]


def _table(rows: list[list[nodes.Node]]) -> nodes.table:
    head = [nodes.paragraph("", words) for words in ("Claim", "Measured", "Expected")]
    group = nodes.tgroup("", *(nodes.colspec(colwidth=width) for width in (54, 22, 24)), cols=3)
    group += nodes.thead("", _row(head))
    group += nodes.tbody("", *(_row(cells) for cells in rows))
    return nodes.table("", group, classes=["kvlab-ledger"])


def _row(cells: list[nodes.Node]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", cell) for cell in cells))
