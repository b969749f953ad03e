"""Numbers in words, as ``words.mjs`` writes them: the answer in a page without script is the answer with one."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal
from math import floor, log10

_BINARY = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "bytes"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def count(value: float) -> str:
    """A whole number with commas.

    Args:
        value: 0 or more.
    """
    return _fixed(value, 0)


def three(value: float) -> str:
    """Three digits that count, at least the whole part.

    Args:
        value: 0 or more.
    """
    if not value:
        return "0"
    decimals = max(2 - floor(log10(value)), 0)
    shown = _fixed(value, decimals)
    return _fixed(value, decimals - 1) if decimals and float(shown) >= 10 ** (3 - decimals) else shown


def binary(value: float) -> str:
    """Bytes in KiB, MiB, GiB or TiB.

    Args:
        value: bytes.
    """
    return _scaled(value, _BINARY)


def duration(seconds: float) -> str:
    """A time in s, ms or µs.

    Args:
        seconds: 0 or more.
    """
    return _scaled(seconds, _SECONDS)


def some(number: int, thing: str) -> str:
    """A number of things, one without its plural.

    Args:
        number: of them.
        thing: one of them.
    """
    return f"{count(number)} {thing}{'' if number == 1 else 's'}"


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    if not value:
        return f"0 {units[-1][1]}"
    size, unit = next((pair for pair in units if value >= pair[0] * 0.9995), units[-1])
    return f"{three(value / size)} {unit}"


def _fixed(value: float, decimals: int) -> str:
    return f"{Decimal(value).quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP):,f}"
