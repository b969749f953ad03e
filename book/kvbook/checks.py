"""What is asked of chapters and built pages. Each check returns the problems it found, one line each; none is good."""

from __future__ import annotations

import ast
import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup

MAX_CELL_LINES = 28
MAX_CELL_WIDTH = 88
SECTIONS = ("Summary", "Exercises", "Where next", "Sources")
EXERCISES = ("pencil", "repair", "break")
_CELL = re.compile(r"^```\{code-cell\}[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
_BOX = r"^:{3,}\{admonition\}[^\n]*\n:class:[^\n]*\b%s\b.*?^:{3,}\s*$"


# --- chapters -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A code cell of a chapter's source."""

    code: str
    tags: tuple[str, ...]


def cells(text: str) -> list[Cell]:
    """The code cells of a chapter, without their options."""
    found = []
    for body in _CELL.findall(text):
        head = re.match(r"(?:---\n.*?^---\n|(?::[\w-]+:[^\n]*\n)+\n?)", body, re.MULTILINE | re.DOTALL)
        options = head[0] if head else ""
        tags = re.search(r"tags:\s*\[([^\]]*)\]", options)
        names = tuple(re.findall(r"[\w-]+", tags[1])) if tags else ()
        found.append(Cell(body[len(options) :].rstrip("\n"), names))
    return found


def cell_problems(text: str) -> list[str]:
    """Cells that do not fit on a screen, claims whose measurement is typed in, figures outside `figure`."""
    problems = []
    for cell in cells(text):
        name = cell.code.strip().split("\n")[0][:50]
        lines = cell.code.split("\n")
        if len(lines) > MAX_CELL_LINES:
            problems.append(f"a cell of {len(lines)} lines, {MAX_CELL_LINES} are allowed: {name}")
        wide = max(map(len, lines))
        if wide > MAX_CELL_WIDTH:
            problems.append(f"a line of {wide} characters, {MAX_CELL_WIDTH} are allowed: {name}")
        if "plt.show(" in cell.code:
            problems.append(f"plt.show() gives a picture without alt text, use figure(...): {name}")
        problems += _literal_claims(cell.code)
    return problems


def _literal_claims(code: str) -> list[str]:
    """Claims that measure a literal."""
    try:
        tree = ast.parse(re.sub(r"^(\s*)[%!].*$", r"\1pass", code, flags=re.MULTILINE))
    except SyntaxError as error:
        return [f"a cell that is not Python: {error}"]
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "claim"]
    return [
        f"claim measures a literal: {ast.unparse(call)[:70]}"
        for call in calls
        if len(call.args) > 1 and not any(isinstance(n, ast.Name) for n in ast.walk(call.args[1]))
    ]


def frame_problems(text: str) -> list[str]:
    """What a chapter's frame lacks."""
    problems = []
    if len(re.findall(r"^# ", _CELL.sub("", text), re.MULTILINE)) != 1:
        problems.append("there must be one title")
    problems += [f"no section {name}" for name in SECTIONS if not re.search(rf"^## {name}\s*$", text, re.MULTILINE)]
    problems += [f"no box of class {name}" for name in ("predict", "price", "summary") if not _boxes(text, name)]
    found = cells(text)
    if not found or "setup(" not in found[0].code:
        problems.append("the first code cell must call setup()")
    return problems + _promise_problems(text) + _exercise_problems(text)


def _boxes(text: str, name: str) -> list[str]:
    return [m[0] for m in re.finditer(_BOX % name, text, re.MULTILINE | re.DOTALL)]


def _promise_problems(text: str) -> list[str]:
    """The box at the head: what you will learn, what you need, how long it takes."""
    box = "\n".join(_boxes(text, "frame")[:1])
    if not box:
        return ["no box of class frame"]
    problems = [
        f"the frame lacks **{part}**" for part in ("You will learn", "You need", "Time") if f"**{part}**" not in box
    ]
    learn = box.split("**You will learn**")[-1].split("**You need**")[0]
    items = len(re.findall(r"^- ", learn, re.MULTILINE))
    if not 3 <= items <= 5:
        problems.append(f"You will learn has {items} items, 3 to 5 are asked for")
    if not re.search(r"\*\*Time\*\* \d+ minutes? to read, \d+ minutes? to run", box):
        problems.append("Time must say: N minutes to read, M minutes to run")
    return problems


def _exercise_problems(text: str) -> list[str]:
    """Three exercises, each with a time and a folded solution that is executed."""
    problems = []
    for kind in EXERCISES:
        label = re.search(rf"^:label: (\S+-{kind})\s*$", text, re.MULTILINE)
        if label is None:
            problems.append(f"no exercise with a label that ends in -{kind}")
            continue
        exercise = text[label.end() :].split("```", 1)[0]
        if not re.search(r"\*\d+ minutes?\.?\*", exercise):
            problems.append(f"{label[1]} does not say its time, as in *5 minutes.*")
        gate = re.search(
            rf"^```\{{solution-start\}} {re.escape(label[1])}\n(.*?)^```\{{solution-end\}}", text, re.M | re.S
        )
        if gate is None or ":class: dropdown" not in gate[1]:
            problems.append(f"{label[1]} has no folded solution")
        elif not any("hide-cell" in cell.tags for cell in cells(gate[1])):
            problems.append(f"the solution of {label[1]} executes no cell tagged hide-cell")
    return problems


# --- pages ----------------------------------------------------------------------------------------------------------


class Site:
    """The built book, parsed once."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        pages = [path for path in sorted(self.root.rglob("*.html")) if "_static" not in path.parts]
        self.pages = {path: BeautifulSoup(path.read_text("utf8"), "html.parser") for path in pages}
        self.anchors = {path: _anchors(soup) for path, soup in self.pages.items()}

    def anchors_of(self, page: str) -> set[str] | None:
        """The anchors of a page, named without extension; None when there is no such page."""
        return self.anchors.get(self.root / f"{page}.html")


def _anchors(soup: BeautifulSoup) -> set[str]:
    return {str(tag["id"]) for tag in soup.find_all(id=True)} | {
        str(tag["name"]) for tag in soup.find_all("a", attrs={"name": True})
    }


def link_problems(site: Site) -> list[str]:
    """Local links that lead to no file or to no anchor, and scripts, styles and images that come from elsewhere."""
    problems = []
    for path, soup in site.pages.items():
        page = path.relative_to(site.root).as_posix()
        for tag in soup.find_all(["a", "link", "img", "script", "iframe", "source"]):
            url = str(tag.get("href") or tag.get("src") or "")
            if not url or url == "#":
                continue
            parts = urlsplit(url)
            if parts.scheme in ("http", "https") or url.startswith("//"):
                if tag.name != "a" and "canonical" not in tag.get("rel", []):
                    problems.append(f"{page}: loads from outside: {url}")
            elif not parts.scheme and (reason := _broken(site, path, parts.path, parts.fragment)):
                problems.append(f"{page}: {url}: {reason}")
    return problems


def _broken(site: Site, page: Path, path: str, fragment: str) -> str:
    target = (page.parent / unquote(path)).resolve() if path else page
    if target.is_dir():
        target /= "index.html"
    if not target.exists():
        return "no such file"
    if fragment and target in site.anchors and unquote(fragment) not in site.anchors[target]:
        return "no such anchor"
    return ""


def site_link_problems(texts: Mapping[str, str], address: str, site: Site) -> list[str]:
    """Links of notebooks (name to text) into the site that lead to no page, anchor or image."""
    problems = []
    for name, text in texts.items():
        for url in sorted(set(re.findall(rf"{re.escape(address)}/[^\s)\"\\]*", text))):
            parts = urlsplit(url.removeprefix(f"{address}/"))
            if reason := _broken(site, site.root / "index.html", parts.path or "index.html", parts.fragment):
                problems.append(f"{name}: {url}: {reason}")
    return problems


def image_problems(site: Site) -> list[str]:
    """Pictures in the text of a page whose alt text is missing or is a file name."""
    problems = []
    for path, soup in site.pages.items():
        for image in soup.select("article img"):
            alt = str(image.get("alt") or "").strip()
            if not alt or re.fullmatch(r"\S+\.(png|svg|jpe?g|gif)", alt):
                problems.append(f"{path.relative_to(site.root)}: no alt text: {str(image.get('src'))[:60]}")
        named = ("title", "aria-label", "aria-hidden")
        nameless = [svg for svg in soup.select("article svg") if not any(svg.find(n) or svg.get(n) for n in named)]
        problems += [f"{path.relative_to(site.root)}: an inline drawing without a title"] * len(nameless)
    return problems


def duplicate_anchor_problems(site: Site) -> list[str]:
    """Anchors that stand twice on a page: a link to one of them leads to the first."""
    problems = []
    for path, soup in site.pages.items():
        names = [str(tag["id"]) for tag in soup.select("article [id]")]
        twice = sorted({name for name in names if names.count(name) > 1})
        problems += [f"{path.relative_to(site.root)}: two elements have the id {name}" for name in twice]
    return problems


def output_problems(notebook: dict[str, Any]) -> list[str]:
    """What an executed notebook should not hold: words on stderr, errors, live widgets, failed claims."""
    problems = []
    for cell in notebook["cells"]:
        name = "".join(cell["source"]).strip().split("\n")[0][:50]
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if output.get("name") == "stderr":
                problems.append(f"stderr under “{name}”: {''.join(output['text'])[:100]}")
            if output["output_type"] == "error":
                problems.append(f"{output['ename']} under “{name}”")
            if "application/vnd.jupyter.widget-view+json" in data:
                problems.append(f"a live widget under “{name}”: use explorer(picture, live)")
            if "kvlab-claim-fails" in "".join(data.get("text/html", "")):
                problems.append(f"a failed claim under “{name}”")
    return problems


# --- statements -----------------------------------------------------------------------------------------------------

VERDICTS = {"OK", "IMP", "WRONG", "OLD"}
COLUMNS = ["row", "statement", "verdict", "correction", "owed_by_heading", "place", "claim"]


def read_statements(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf8", newline="") as file:
        return list(csv.DictReader(file))


def statement_problems(rows: Iterable[Mapping[str, str]], finished: set[int], site: Site) -> list[str]:
    """Rows owed by finished headings without a place, and places and claims that are not on the built pages."""
    problems = []
    for row in rows:
        where = f"row {row['row']}"
        page, _, anchor = row["place"].partition("#")
        if not row["place"]:
            if int(row["owed_by_heading"]) in finished:
                problems.append(
                    f"{where}: owed by heading {row['owed_by_heading']}, which is finished, and has no place"
                )
            if row["claim"]:
                problems.append(f"{where}: a claim without a place")
            continue
        anchors = site.anchors_of(page)
        if anchors is None:
            problems.append(f"{where}: there is no page {page}")
            continue
        if not anchor or anchor not in anchors:
            problems.append(f"{where}: page {page} has no anchor {anchor or '(none given)'}")
        if row["claim"] and row["claim"] not in {name for name in anchors if name.startswith("claim-")}:
            problems.append(f"{where}: page {page} has no claim {row['claim']}")
    return problems


# --- myths ----------------------------------------------------------------------------------------------------------

MYTHS_PAGE = "myths"
VERDICT_WORDS = {"WRONG": "Wrong", "IMP": "Imprecise", "OLD": "Outdated"}


def myth_problems(rows: Iterable[Mapping[str, str]], site: Site) -> list[str]:
    """Statements that are not right, have a place and no entry that leads there; entries without such a statement.

    An entry is an element of class ``myth`` with the anchor ``myth-N`` of each row that it covers. It begins with the
    verdict, in bold, and links to the row's place or to its claim.
    """
    soup = site.pages.get(site.root / f"{MYTHS_PAGE}.html")
    if soup is None:
        return [f"there is no page {MYTHS_PAGE}"]
    owed = {f"myth-{row['row']}": row for row in rows if row["verdict"] in VERDICT_WORDS and row["place"]}
    found = {str(tag["id"]): tag for tag in soup.find_all(id=re.compile(r"^myth-\d+$"))}
    problems = [f"{name}: no such row is wrong and has a place" for name in sorted(found.keys() - owed.keys())]
    for name, row in owed.items():
        entry = found[name].find_parent(class_="myth") or found[name] if name in found else None
        problems += [f"{name}: {why}" for why in _entry_problems(entry, row)]
    return problems


def _entry_problems(entry: Any, row: Mapping[str, str]) -> list[str]:
    """What an entry of the myths page lacks for one of its rows."""
    if entry is None:
        return [f"no entry for row {row['row']}"]
    problems = []
    verdict, shown = VERDICT_WORDS[row["verdict"]], entry.find("strong")
    if shown is None or shown.get_text().strip(". ") != verdict:
        problems.append(f"the entry does not begin with **{verdict}.**")
    page, _, anchor = row["place"].partition("#")
    wanted = {f"{page}.html#{name}" for name in (anchor, row["claim"]) if name}
    if not wanted & {str(link["href"]) for link in entry.select("a[href]")}:
        problems.append(f"no link to {' or '.join(sorted(wanted))}")
    return problems
