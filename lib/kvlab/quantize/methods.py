"""The ways to round weights."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.packing import Grid


@dataclass(frozen=True)
class Int8:
    """Eight bits, symmetric: codes from -127 to 127.

    Args:
        group_size: inputs that share a scale; None for one scale a row of the matrix (per channel).

    Raises:
        ConfigError: the group size is below 1.
    """

    group_size: int | None = None

    def __post_init__(self) -> None:
        self.grid  # noqa: B018 - a Grid checks itself

    @property
    def grid(self) -> Grid:
        """Where the weights are rounded to."""
        return Grid(8, self.group_size, symmetric=True)


@dataclass(frozen=True)
class Int4:
    """Four bits.

    Args:
        group_size: inputs that share a scale; None for a whole row. 16 levels are few: groups of 32 are usual.
        symmetric: levels from -7 to 7 times the scale; False spends a minimum a group and uses all 16.

    Raises:
        ConfigError: the group size is below 1.
    """

    group_size: int | None = 32
    symmetric: bool = False

    def __post_init__(self) -> None:
        self.grid  # noqa: B018 - a Grid checks itself

    @property
    def grid(self) -> Grid:
        """Where the weights are rounded to."""
        return Grid(4, self.group_size, self.symmetric)


Method = Int8 | Int4
