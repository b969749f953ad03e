"""Where a cell runs: in the build of the static book, or live before a reader with a kernel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

# The build of the book and its tests set this; a reader's notebook never does.
BUILD_VARIABLE = "KVLAB_BUILD"


def in_build() -> bool:
    """True while the book is being built: failed claims fail the build, and no live widget is shown."""
    return os.environ.get(BUILD_VARIABLE, "") not in ("", "0")


def explorer(picture: Callable[[], Any], live: Callable[[], Any]) -> None:
    """Show an explorer: its static picture everywhere, and its live widget where a kernel can move it.

    A static page shows the picture alone, so that no reader ever pulls at a dead slider.

    Args:
        picture: draws the picture, with :func:`kvlab.book.figure`.
        live: makes the widget; called only outside the build.
    """
    picture()
    if not in_build():
        from IPython.display import display

        display(live())


def progress(items: Iterable[T], label: str) -> Iterator[T]:
    """Go through the items under a progress bar; in the build silently, so that pages stay free of bars.

    Args:
        items: what to go through.
        label: what the bar is called.
    """
    if in_build():
        yield from items
        return
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    yield from tqdm(items, desc=label)
