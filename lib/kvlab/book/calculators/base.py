"""A calculator as a notebook shows it: one piece of HTML that brings its script, its style and its data."""

from __future__ import annotations

import html
import json
import re
from abc import ABC, abstractmethod
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from kvlab.book.calculators.catalogue import catalogue
from kvlab.config import Shape, shape_of
from kvlab.cost import Device, hardware_of

_HERE = Path(__file__).parent
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w.]+)";\n', re.MULTILINE)


class Explorable(ABC):
    """A panel that answers in the page: no kernel, no network, no widget.

    The last expression of a cell shows it. Where scripts do not run it is the answer for its arguments, in a sentence.

    Args:
        setting: what the controls show at the start.
    """

    #: The script's name, without its ending.
    kind: ClassVar[str]
    #: What stands above the panel.
    title: ClassVar[str]

    def __init__(self, **setting: Any) -> None:
        self.setting = setting
        self.answer = self._answer()

    @abstractmethod
    def _answer(self) -> str:
        """The answer at the start, in the words that the script uses."""

    def _data(self) -> dict[str, Any]:
        """What the script is given: a ``catalogue`` of what it knows, and the ``setting``."""
        return {"catalogue": {}, "setting": self.setting}

    def __repr__(self) -> str:
        return self.answer

    def _repr_html_(self) -> str:
        """The panel with all that it needs."""
        safe = json.dumps(self._data(), separators=(",", ":")).replace("<", r"\u003c")
        return (
            f"<style>{_text('calculators.css')}</style>"
            f'<div class="kvlab-calculator" data-kind="{self.kind}" role="group" '
            f'aria-label="{html.escape(self.title)}">'
            f'<script type="application/json">{safe}</script>'
            f'<p class="kvc-answer">{html.escape(self.answer)}</p>'
            '<p class="kvc-still">Where scripts run, the numbers can be changed here.</p></div>'
            f'<script type="module">{bundle(self.kind)}</script>'
        )


class Calculator(Explorable):
    """An explorable about a model, and perhaps a device.

    Args:
        model: a preset name, a Hub config, or a shape; chosen at the start, the presets stand beside it.
        device: a slug or a device, chosen at the start; None where the calculator asks for none.
        setting: what the controls show at the start.

    Raises:
        ConfigError: a name is unknown, or a number is impossible.
    """

    def __init__(self, model: Shape, device: Device | None, **setting: Any) -> None:
        self.model = shape_of(model)
        self.device = None if device is None else hardware_of(device)
        super().__init__(**setting)

    def _data(self) -> dict[str, Any]:
        """Every model, device and format that can be chosen."""
        names = {"model": self.model.name, "device": self.device.name if self.device else None}
        stored = [self.setting[name] for name in ("weights", "kv") if name in self.setting]
        return {"catalogue": catalogue(self.model, self.device, stored), "setting": self.setting | names}


@cache
def bundle(kind: str) -> str:
    """A calculator's module and all that it imports as one script, each module once: an output can import no file.

    Args:
        kind: of the calculator, ``kv-cache`` for ``kv_cache.mjs``.
    """
    seen: dict[str, str] = {}

    def add(name: str) -> None:
        source = _text(name)
        for needed in _IMPORT.findall(source):
            if needed not in seen:
                add(needed)
        seen[name] = re.sub(r"^export ", "", _IMPORT.sub("", source), flags=re.MULTILINE)

    add(f"{kind.replace('-', '_')}.mjs")
    return "".join(seen.values())


def _text(name: str) -> str:
    return (_HERE / name).read_text("utf8")
