"""Put the library's own source on show, so that nothing a chapter imports is hidden."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from kvlab.provenance import source_link


def show(*objects: type | Callable[..., Any] | ModuleType) -> None:
    """Print the source of functions, classes or modules of the library, highlighted, with a link to the repository.

    Args:
        objects: what to show, in order.
    """
    from IPython.display import display

    for item in objects:
        markdown, plain = _page(item)
        display({"text/markdown": markdown, "text/plain": plain}, raw=True)


def _page(item: type | Callable[..., Any] | ModuleType) -> tuple[str, str]:
    """The source as Markdown (every notebook and the book highlight it in their own theme) and as plain text."""
    item = inspect.unwrap(item) if callable(item) else item
    lines, start = inspect.getsourcelines(item)
    code = textwrap.dedent("".join(lines)).rstrip()
    path = Path(inspect.getsourcefile(item) or "")
    title = f"{_shown_path(path)}, line {max(start, 1)}"
    link = source_link(path, max(start, 1)) if "kvlab" in path.parts else None
    ticks = max([2, *(len(run) for run in re.findall(r"`+", code))]) + 1
    fence = "`" * max(ticks, 3)
    heading = f"[{title}]({link})" if link else title
    return f"{fence}python\n{code}\n{fence}\n\n{heading}", f"# {title}\n{code}"


def _shown_path(path: Path) -> str:
    """A file by its place in the library, without the reader's folders."""
    parts = path.parts
    return "/".join(parts[len(parts) - 1 - parts[::-1].index("kvlab") :]) if "kvlab" in parts else path.name
