"""Reading paths of the landing page: pages with their minutes, read from the pages themselves."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

_TIME = re.compile(r"\*\*Time\*\*\s+(\d+) minutes? to read(?:, (\d+) minutes? to run)?")


@dataclass(frozen=True)
class Stop:
    """A page of a path and the minutes it takes to read and to run."""

    page: str
    title: str
    read: int
    run: int


class ReadingPath(SphinxDirective):
    """``{path}`` with one page a line, and after a bar what to do there; pages that do not exist yet are left out."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        stops: list[str] = []
        minutes = 0
        for line in filter(None, (text.strip() for text in self.content)):
            page, _, words = (part.strip() for part in line.partition("|"))
            source = Path(self.env.srcdir) / f"{page}.md"
            if page not in self.env.found_docs:
                continue
            self.env.note_dependency(str(source))
            stop = read_stop(source)
            minutes += stop.read + stop.run
            stops.append(f"- {{doc}}`{stop.title} </{page}>`{_minutes(stop)}{f': {words}' if words else ''}")
        if len(stops) > 1:
            stops += ["", f"Together {minutes} minutes."]
        holder = nodes.container(classes=["kvlab-path"])
        self.state.nested_parse(StringList(stops, self.get_source_info()[0]), self.content_offset, holder)
        return [holder]


def read_stop(source: Path) -> Stop:
    """Title and minutes of a page."""
    text = source.read_text("utf8")
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    time = _TIME.search(text)
    read, run = (int(time[1]), int(time[2] or 0)) if time else (0, 0)
    return Stop(source.stem, title[1].strip() if title else source.stem, read, run)


def _minutes(stop: Stop) -> str:
    if not stop.read:
        return ""
    return f" ({stop.read} min" + (f" + {stop.run} min to run)" if stop.run else ")")


def connect(app: Sphinx) -> None:
    app.add_directive("path", ReadingPath)
