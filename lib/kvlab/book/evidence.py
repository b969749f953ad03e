"""How a measurement is held against what a claim expects: equal, near, in order. NaN never passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


class Missing:
    """Stands for an argument that was not given; None can be expected."""


@dataclass(frozen=True)
class Verdict:
    """Whether the measurement passes, with both sides in words; narrow: without the room that was asked for."""

    holds: bool
    measured: str
    expected: str
    narrow: bool = False


def equal(measured: Any, expected: Any, unit: str = "") -> Verdict:
    """Exactly equal: numbers, strings, bools, None, lists, arrays and tensors.

    Args:
        measured: what was found.
        expected: what it must be.
        unit: written behind numbers.
    """
    left, right = plain(measured), plain(expected)
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        holds = np.shape(left) == np.shape(right) and bool(np.all(np.asarray(left) == np.asarray(right)))
    else:
        holds = isinstance(left, bool) == isinstance(right, bool) and bool(left == right) and not _has_nan(left)
    return Verdict(holds, words(left, unit), words(right, unit))


def near(measured: Any, expected: Any, absolute: float, relative: float, unit: str = "") -> Verdict:
    """Within ``absolute + relative * |expected|``, in every element.

    Args:
        measured: what was found.
        expected: what it should be, of the same shape or one number.
        absolute: how far off is allowed, in the unit of the numbers.
        relative: how far off is allowed, as a share of the expected number.
        unit: written behind numbers.

    Raises:
        ValueError: a tolerance is negative or not finite.
    """
    if not (np.isfinite(absolute) and np.isfinite(relative) and absolute >= 0 and relative >= 0):
        raise ValueError(f"tolerances must be finite and not negative, got {absolute} and {relative}")
    left, right = _numbers(measured), _numbers(expected)
    if right.shape not in ((), left.shape):
        return Verdict(False, f"shape {left.shape}", f"shape {right.shape}")
    with np.errstate(invalid="ignore"):  # equal infinities are equal; any other difference with one is not allowed
        off = np.where(left == right, 0.0, np.abs(left - right))
        holds = bool(np.all((left == right) | (off <= absolute + relative * np.abs(right))))
    return Verdict(holds, *_near_in_words(left, right, off, _allowed(absolute, relative, unit), unit))


def ordered(measured: Any, at_least: float | None, at_most: float | None, spare: float, unit: str = "") -> Verdict:
    """Above a lower bound, below an upper bound, in every element; narrow where a factor to spare is not kept.

    Args:
        measured: what was found.
        at_least: the lower bound; None for none.
        at_most: the upper bound; None for none.
        spare: the factor by which a bound should be kept, 1 or more.
        unit: written behind numbers.

    Raises:
        ValueError: the factor is below 1, or meant for a bound that is not positive.
    """
    bounds = [bound for bound in (at_least, at_most) if bound is not None]
    if not 1 <= spare < np.inf or (spare > 1 and min(bounds) <= 0):
        raise ValueError(f"spare is a factor of at least 1 for positive bounds, got {spare} for {bounds}")
    numbers = _numbers(measured)
    low = -np.inf if at_least is None else at_least
    high = np.inf if at_most is None else at_most
    holds = bool(numbers.size and np.all((numbers >= low) & (numbers <= high)))
    narrow = holds and not np.all((numbers >= low * spare) & (numbers <= high / spare))
    asked = [f"at least {words(at_least, unit)}"] if at_least is not None else []
    asked += [f"at most {words(at_most, unit)}"] if at_most is not None else []
    kept = f", {'without' if narrow else 'with'} a factor of {spare:g} to spare" if spare > 1 else ""
    return Verdict(holds, _extent(numbers, unit), " and ".join(asked) + kept, narrow)


def plain(value: Any) -> Any:
    """A tensor or array as a NumPy array, a scalar of either as a Python number, a list of numbers as an array."""
    if hasattr(value, "detach"):
        tensor = value.detach().cpu()
        value = (tensor.double() if tensor.is_floating_point() else tensor).numpy()
    if isinstance(value, (list, tuple)) and value and all(_is_number(item) for item in value):
        value = np.asarray([plain(item) for item in value])
    if isinstance(value, (np.ndarray, np.generic)):
        return value.item() if value.ndim == 0 else value
    return value


def words(value: Any, unit: str = "") -> str:
    """A value as a reader would write it: thousands with commas, four digits of a fraction, quoted strings."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "nothing"}[value]
    if isinstance(value, int):
        return f"{value:,}{unit}"
    if isinstance(value, float):
        return f"{value:,.4g}{unit}" if abs(value) < 1e6 else f"{value:.4g}{unit}"
    if isinstance(value, np.ndarray):
        return _short(np.array2string(value, threshold=8, separator=", ").replace("\n", "")) + unit
    return _short(f"“{value}”" if isinstance(value, str) else str(value))


def _allowed(absolute: float, relative: float, unit: str) -> str:
    """A tolerance in words."""
    parts = [f"{absolute:.3g}{unit}"] if absolute else []
    parts += [f"{100 * relative:.3g} %"] if relative else []
    return " + ".join(parts) or "0"


def _near_in_words(left: Array, right: Array, off: Array, allowed: str, unit: str) -> tuple[str, str]:
    """Both sides of a comparison: two numbers, or for arrays the largest difference."""
    if left.size == 1:
        return words(left.item(), unit), f"{words(right.item(), unit)} ± {allowed}"
    worst = float(np.max(off)) if off.size else 0.0
    return f"largest difference {worst:.3g}{unit} in {off.size:,} numbers", f"at most {allowed}"


def _numbers(value: Any) -> Array:
    return np.asarray(plain(value), dtype=np.float64)


def _extent(numbers: Array, unit: str) -> str:
    """One number, or the range of several."""
    if numbers.size == 0:
        return "nothing"
    low, high = float(np.min(numbers)), float(np.max(numbers))
    return words(low, unit) if low == high or numbers.size == 1 else f"{words(low)} to {words(high, unit)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) or (hasattr(value, "detach") and value.ndim == 0)


def _has_nan(value: Any) -> bool:
    return isinstance(value, float) and value != value


def _short(text: str, limit: int = 90) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
