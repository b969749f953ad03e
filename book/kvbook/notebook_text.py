"""MyST Markdown said again in plain Markdown, for a notebook that Jupyter and Colab show without Sphinx."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pybtex.database import parse_file

TITLES = {
    name: name.capitalize()
    for name in ("note", "tip", "hint", "important", "warning", "caution", "danger", "attention")
} | {"seealso": "See also", "exercise": "Exercise"}
_OPEN = re.compile(r"^(?P<fence>:{3,}|`{3,}|~{3,})\{(?P<name>[\w:-]+)\}[ \t]*(?P<title>.*)$")
_PLAIN = re.compile(r"^\s*(?P<fence>`{3,}|~{3,})[^`]*$")
_LABEL = re.compile(r"^\((?P<label>[^()\s]+)\)=\s*$")
_SPAN = re.compile(r"(?P<role>\{[A-Za-z][\w:-]*\})?(?P<ticks>`+)(?P<body>.+?)(?<!`)(?P=ticks)(?!`)", re.DOTALL)
_TARGET = re.compile(r"^(?P<words>.*?)\s*<(?P<target>[^<>]+)>$", re.DOTALL)


class NotebookError(Exception):
    """A chapter uses MyST that has no form in a notebook."""


@dataclass
class Book:
    """What links need to know of the whole book: titles of pages, where labels are, who wrote a source."""

    site: str
    titles: dict[str, str] = field(default_factory=dict)
    labels: dict[str, tuple[str, str]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    outputs: set[tuple[str, str]] = field(default_factory=set)

    def url(self, page: str, anchor: str = "") -> str:
        return f"{self.site}/{page}.html" + (f"#{anchor}" if anchor else "")


def read_book(chapters: Path, site: str) -> Book:
    """Walk through every page of the book."""
    book = Book(site, sources=read_sources(chapters / "references.bib"))
    for path in sorted(chapters.rglob("*.md")):
        page = path.relative_to(chapters).with_suffix("").as_posix()
        title = opened = ""
        waiting: list[str] = []
        for line in path.read_text("utf8").splitlines():
            label = _LABEL.match(line)
            named = re.match(r"^:(?:name|label):\s*(\S+)\s*$", line) or re.match(r"^\$\$ \((\S+)\)$", line)
            book.outputs.update((page, name) for name in re.findall(r"\bname=\"([\w-]+)\"", line))
            heading = re.match(r"^#+ (.+)$", line)
            opened = found["title"].strip() if (found := _OPEN.match(line)) else opened
            if label:
                waiting.append(label["label"])
            elif named:
                book.labels[named[1]] = (page, opened or named[1])
            elif line.strip():
                words = heading[1].strip() if heading else ""
                book.labels.update({name: (page, words or name) for name in waiting})
                waiting = []
                title = title or (words if heading and line.startswith("# ") else "")
        book.titles[page] = title or page
    return book


def read_sources(bibliography: Path) -> dict[str, str]:
    """Each key of the bibliography as a reader would name it: Pope et al., 2023."""
    shown = {}
    for key, entry in parse_file(str(bibliography)).entries.items() if bibliography.exists() else ():
        people = [" ".join(person.last_names) for person in entry.persons.get("author", [])] or [entry.fields["title"]]
        names = {1: people[0], 2: " and ".join(people[:2])}.get(len(people), f"{people[0]} et al.")
        shown[key] = re.sub(r"[{}\\]", "", f"{names}, {entry.fields.get('year', '')}")
    return shown


@dataclass
class Translator:
    """Translates the text cells of one page, in order; it remembers whether a solution is open between cells."""

    page: str
    book: Book
    solution: str = ""

    def cell(self, source: str) -> str:
        """One text cell; a part that lies inside a gated solution is folded."""
        parts: list[str] = []
        for inside, lines in self._by_solution(source.splitlines()):
            text = "\n".join(self.lines(lines)).strip("\n")
            if text or inside:
                parts.append(_details(inside, text) if inside and text else text)
        return re.sub(r"\n{3,}", "\n\n", "\n\n".join(part for part in parts if part)).strip("\n")

    def lines(self, lines: list[str]) -> list[str]:
        """Blocks one after the other: directives by name, code as it is, the rest inline."""
        done: list[str] = []
        text: list[str] = []
        at = 0
        while at < len(lines):
            directive, plain = _OPEN.match(lines[at]), _PLAIN.match(lines[at])
            if directive or plain:
                end = _closing(lines, at, (directive or plain or {})["fence"])
                done += self._inline(text)
                text = []
                done += self._directive(directive, lines[at + 1 : end]) if directive else lines[at : end + 1]
                at = end
            elif not (_LABEL.match(lines[at]) or lines[at].startswith("% ")):
                text.append(re.sub(r"^(\s*\$\$) \(\S+\)\s*$", r"\1", lines[at]))
            at += 1
        return done + self._inline(text)

    def _by_solution(self, lines: list[str]) -> Iterator[tuple[str, list[str]]]:
        """Cut a cell at the gates of solutions: the title of the open solution (or nothing) and the lines."""
        held: list[str] = []
        at = 0
        while at < len(lines):
            gate = _OPEN.match(lines[at])
            if gate and gate["name"] in ("solution-start", "solution-end"):
                yield self.solution, held
                held, at = [], _closing(lines, at, gate["fence"])
                label = gate["title"].strip()
                self.solution = f"Solution: {self._label(label)[1]}" if gate["name"] == "solution-start" else ""
            else:
                held.append(lines[at])
            at += 1
        yield self.solution, held

    def _directive(self, match: re.Match[str], body: list[str]) -> list[str]:
        name, title = match["name"], match["title"].strip()
        options, body = _options(body)
        folded = name == "dropdown" or "dropdown" in options.get("class", "")
        if name in TITLES or name in ("admonition", "dropdown", "epigraph", "margin", "sidebar", "tab-item"):
            titled = name in ("admonition", "dropdown", "tab-item", "exercise")
            words = self._words(_titled(TITLES.get(name, ""), title if titled else ""))
            inner = self.lines(body if titled or not title else [title, *body])
            return _details(words, "\n".join(inner)).split("\n") if folded else _quote(words, inner)
        makers: dict[str, Callable[[], list[str]]] = {
            "figure": lambda: self._image(title, options, body),
            "image": lambda: self._image(title, options, []),
            "math": lambda: ["$$", *([title] if title else []), *body, "$$"],
            "code-block": lambda: [f"```{title}", *body, "```"],
            "table": lambda: [f"**{self._words(title)}**", "", *self.lines(body)],
            "tab-set": lambda: self.lines(body),
            "raw": lambda: body if title == "html" else [],
        }
        if name not in makers:
            raise NotebookError(
                f"{self.page}: the directive {name} has no form in a notebook; see book/kvbook/notebook_text.py"
            )
        return ["", *makers[name](), ""]

    def _image(self, path: str, options: dict[str, str], caption: list[str]) -> list[str]:
        address = path if path.startswith("https://") else f"{self.book.site}/_images/{Path(path).name}"
        words = " ".join(self.lines(caption)).strip()
        return [f"![{options.get('alt', '')}]({address})", *(["", f"*{words}*"] if words else [])]

    def _inline(self, lines: list[str]) -> list[str]:
        return self._words("\n".join(lines)).split("\n") if lines else []

    def _words(self, text: str) -> str:
        """Roles become links, code spans stay as they are, footnotes become words in brackets."""
        made: list[str] = []
        at = 0
        for span in _SPAN.finditer(text):
            made += [
                self._links(text[at : span.start()]),
                self._role(span["role"][1:-1], span["body"]) if span["role"] else span[0],
            ]
            at = span.end()
        return "".join([*made, self._links(text[at:])])

    def _links(self, text: str) -> str:
        text = re.sub(r"^\[\^([^\]]+)\]:", r"**[\1]**", text, flags=re.MULTILINE)
        text = re.sub(r"\[\^([^\]]+)\]", r"<sup>[\1]</sup>", text)
        return re.sub(r"\]\((?!https?:|mailto:)([^)\s]+)\)", lambda match: f"]({self._local(match[1])})", text)

    def _local(self, target: str) -> str:
        """A link to another source file or label, as an address of the site."""
        file, _, anchor = target.partition("#")
        if file.endswith(".md"):
            return self.book.url(file.removesuffix(".md"), anchor)
        if file:
            raise NotebookError(f"{self.page}: the link to {target} leads nowhere from a notebook")
        if (self.page, anchor) in self.book.outputs or anchor.startswith("claim-"):
            return self.book.url(self.page, anchor)
        return self.book.url(self._label(anchor)[0], anchor.lower().replace("_", "-"))

    def _label(self, label: str) -> tuple[str, str]:
        if label not in self.book.labels:
            raise NotebookError(f"{self.page}: no page of the book has the label {label}")
        return self.book.labels[label]

    def _role(self, name: str, body: str) -> str:
        found = _TARGET.match(body)
        words, target = (found["words"], found["target"]) if found else ("", body)
        if name in ("ref", "numref", "eq", "term", "doc", "claim"):
            return getattr(self, f"_role_{name}")(" ".join(words.split()), " ".join(target.split()))
        if name.startswith("cite"):
            return self._cite(body, bare=name == "cite:t")
        simple = {"math": "${}$", "kbd": "`{}`", "code": "`{}`", "sub": "<sub>{}</sub>", "sup": "<sup>{}</sup>"}
        if name in simple:
            return simple[name].format(body)
        if name.startswith("py:") or name in ("func", "class", "meth", "mod", "attr"):
            return f"`{words or target.lstrip('~!.').split('.')[-1] if '~' in target else words or target}`"
        raise NotebookError(f"{self.page}: the role {name} has no form in a notebook; see book/kvbook/notebook_text.py")

    def _role_ref(self, words: str, label: str) -> str:
        page, title = self._label(label)
        return f"[{words or title}]({self.book.url(page, label.lower().replace('_', '-'))})"

    _role_numref = _role_ref

    def _role_eq(self, words: str, label: str) -> str:
        return f"[{words or 'the equation'}]({self.book.url(self._label(label)[0], f'equation-{label}')})"

    def _role_term(self, words: str, term: str) -> str:
        anchor = re.sub(r"[^A-Za-z0-9_.]+", "-", term).strip("-")
        return f"[{words or term}]({self.book.url('glossary', f'term-{anchor}')})"

    def _role_doc(self, words: str, target: str) -> str:
        page = target.lstrip("/")
        if page not in self.book.titles:
            raise NotebookError(f"{self.page}: there is no page {page}")
        return f"[{words or self.book.titles[page]}]({self.book.url(page)})"

    def _role_claim(self, words: str, target: str) -> str:
        page, _, slug = target.rpartition("#")
        return f"[{words or slug}]({self.book.url(page or self.page, slug)})"

    def _cite(self, keys: str, bare: bool) -> str:
        missing = [key for key in re.split(r",\s*", keys) if key not in self.book.sources]
        if missing:
            raise NotebookError(f"{self.page}: references.bib has no {', '.join(missing)}")
        links = [f"[{self.book.sources[key]}]({self.book.url('bibliography')})" for key in re.split(r",\s*", keys)]
        return ", ".join(links) if bare else f"({'; '.join(links)})"


def _closing(lines: list[str], start: int, fence: str) -> int:
    """The line that closes the fence opened at ``start``."""
    close = re.compile(rf"^\s*{re.escape(fence[0])}{{{len(fence)},}}\s*$")
    for at in range(start + 1, len(lines)):
        if close.match(lines[at]):
            return at
    raise NotebookError(f"a fence is never closed: {lines[start]}")


def _options(body: list[str]) -> tuple[dict[str, str], list[str]]:
    """The ``:key: value`` lines at the head of a directive, and the rest."""
    options: dict[str, str] = {}
    while body and (match := re.match(r"^:([\w-]+):\s*(.*)$", body[0])):
        options[match[1]] = match[2]
        body = body[1:]
    while body and not body[0].strip():
        body = body[1:]
    return options, body


def _titled(kind: str, title: str) -> str:
    return f"{kind}: {title}" if title and kind else kind or title


def _quote(title: str, inner: list[str]) -> list[str]:
    while inner and not inner[-1].strip():
        inner = inner[:-1]
    head = [f"**{title}**", ""] if title else []
    return ["", *(f"> {line}" if line.strip() else ">" for line in [*head, *inner]), ""]


def _details(title: str, text: str) -> str:
    return f"<details>\n<summary><b>{title}</b></summary>\n\n{text.strip()}\n\n</details>\n"
