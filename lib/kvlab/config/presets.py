"""Shapes of published models, from ``data/models.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from kvlab.config.parts import MLA, MoE, window_pattern
from kvlab.errors import ConfigError, nearest
from kvlab.resources import resource


@dataclass(frozen=True)
class PresetSource:
    """Where the shape of a preset comes from.

    Args:
        hf_id: the model on the Hugging Face Hub.
        source: the file or page that was read.
        status: ``verified``, or what was not and how it was cross-checked.
        params_total: parameters of the published model, tied weights counted once.
        params_active: parameters that one token uses.
        note: a trap in the shape, or an empty string.
    """

    hf_id: str
    source: str
    status: str
    params_total: int
    params_active: int
    note: str = field(default="")


def preset_names() -> list[str]:
    """Every name that :meth:`ModelConfig.preset` knows, sorted."""
    return sorted(_rows())


def preset_source(name: str) -> PresetSource:
    """The source of a preset's figures.

    Args:
        name: a slug.

    Raises:
        ConfigError: no preset has this name.
    """
    row = _row(name)
    return PresetSource(**{f.name: row[f.name] for f in fields(PresetSource)})


def preset_fields(name: str) -> dict[str, Any]:
    """The fields of a :class:`~kvlab.config.ModelConfig` that a preset states.

    Args:
        name: a slug.

    Raises:
        ConfigError: no preset has this name; the nearest names are offered.
    """
    shape = dict(_row(name)["shape"])
    if "mla" in shape:
        shape["mla"] = MLA(**shape["mla"])
    if "moe" in shape:
        shape["moe"] = MoE(**shape["moe"])
    shape["windows"] = window_pattern(shape.pop("window", None), shape.pop("full_every", None), shape["n_layer"])
    return shape


def _row(name: str) -> dict[str, Any]:
    rows = _rows()
    if name not in rows:
        raise ConfigError(f"no preset is called {name!r}; {nearest(name, rows)}")
    return rows[name]


@cache
def _rows() -> dict[str, dict[str, Any]]:
    """``data/models.json``, read once."""
    rows: dict[str, dict[str, Any]] = json.loads(resource("models.json").read_text("utf8"))
    return rows
