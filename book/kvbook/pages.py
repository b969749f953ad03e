"""Tidy pages: only local scripts, figures as files, and the Colab notebook as the one to download."""

from __future__ import annotations

import base64
import hashlib
import inspect
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config

from kvlab.provenance import source_link

STATIC = Path(__file__).resolve().parents[1] / "static"
_INLINE_IMAGE = re.compile(r'(<img class="kvlab-image" src=")data:image/png;base64,([A-Za-z0-9+/=]+)(")')

# Markup of the theme and of extensions that a screen reader stumbles over, and what it should be.
_MENDED = (
    ('<summary><span class="toctree-toggle"', '<summary aria-label="Pages below"><span class="toctree-toggle"'),
    ('<summary aria-label="Toggle hidden content">', "<summary>"),
    ('<section id="exercise-content">', "<section>"),
    ('<section id="solution-content">', "<section>"),
    ('role="doc-biblioentry"', 'role="listitem"'),
)
_EMPTY_HEADER = re.compile(r'<th class="head[^"]*">(?:<p></p>)?</th>')  # a corner of a table that is no heading


def connect(app: Sphinx) -> None:
    app.connect("config-inited", configure, priority=200)
    app.connect("builder-inited", forget_old_files)
    app.connect("html-page-context", tidy_scripts, priority=900)
    app.connect("html-page-context", store_images, priority=910)
    app.connect("build-finished", mend_markup)
    app.connect("build-finished", offer_notebooks)
    app.add_css_file("kvlab.css")


def configure(app: Sphinx, config: Config) -> None:
    # Vendored files stay out of Jupyter Book's own `_static`, whose scripts it puts on every page.
    config.html_static_path.append(str(STATIC))
    config.ogp_site_url = config.html_baseurl
    config.linkcode_resolve = link_to_code


def forget_old_files(app: Sphinx) -> None:
    """Sphinx warns when a file of ours has changed since the last build and would be overwritten."""
    for path in STATIC.rglob("*"):
        old = Path(app.outdir) / "_static" / path.relative_to(STATIC)
        if path.is_file() and old.is_file():
            old.unlink()


def link_to_code(domain: str, info: dict[str, str]) -> str | None:
    """Where the source of something in the reference stands in the repository."""
    item: Any = sys.modules.get(info["module"])
    for name in info["fullname"].split("."):
        item = getattr(item, name, None)
    item = item.fget if isinstance(item, property) else item
    item = inspect.unwrap(item) if callable(item) else item
    try:
        return source_link(Path(inspect.getsourcefile(item) or ""), inspect.getsourcelines(item)[1])
    except (TypeError, OSError, ValueError):
        return None


def tidy_scripts(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Drop Thebe, which loads from a CDN, and scripts that were registered twice."""
    seen: set[tuple[str, str]] = set()
    kept = []
    for script in context.get("script_files", []):
        attributes = str(sorted(getattr(script, "attributes", {}).items()))
        key = (str(getattr(script, "filename", script)), attributes)
        if key not in seen and "thebe" not in key[0].lower() and "thebe" not in attributes.lower():
            kept.append(script)
        seen.add(key)
    context["script_files"] = kept


def store_images(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Figures come out of a notebook inside their HTML; on the site they are files, loaded when they come into view."""
    body = context.get("body")
    if not body or "kvlab-image" not in body:
        return
    folder = Path(app.outdir) / "_images"
    folder.mkdir(parents=True, exist_ok=True)
    up = "../" * page.count("/")

    def store(match: re.Match[str]) -> str:
        data = base64.b64decode(match[2])
        name = f"figure-{hashlib.sha256(data).hexdigest()[:16]}.png"
        (folder / name).write_bytes(data)
        return f'{match[1]}{up}_images/{name}" loading="lazy{match[3]}'

    context["body"] = _INLINE_IMAGE.sub(store, body)


def offer_notebooks(app: Sphinx, error: Exception | None) -> None:
    """The download button hands out the notebook that Colab opens, not the executed source."""
    sources = Path(app.outdir) / "_sources"
    for notebook in Path(app.srcdir).glob("*.ipynb"):
        if error is None and (sources / notebook.name).exists():
            shutil.copyfile(notebook, sources / notebook.name)


def mend_markup(app: Sphinx, error: Exception | None) -> None:
    """Mend what the writers leave in the pages, and remove pages that the book no longer has."""
    kept = {*app.env.found_docs, "index", "genindex", "py-modindex", "search"}
    for path in Path(app.outdir).rglob("*.html") if error is None else ():
        name = path.relative_to(app.outdir).with_suffix("").as_posix()
        if not name.startswith("_static/") and name not in kept:
            path.unlink()
            continue
        before = after = path.read_text("utf8")
        for found, mended in _MENDED:
            after = after.replace(found, mended)
        after = _EMPTY_HEADER.sub("<td></td>", after)
        if after != before:
            path.write_text(after, "utf8")
