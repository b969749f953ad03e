"""How numbers are stored: bits of a code, and the share of a scale that comes with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvlab.errors import ConfigError, nearest


@dataclass(frozen=True)
class Format:
    """How weights or cache entries are stored.

    Args:
        bits: of one code.
        group: elements that share one scale; 0 where there is none.
        overhead_bits: scale, minimum and whatever else a group stores.

    Raises:
        ConfigError: a number is impossible.
    """

    bits: int
    group: int = 0
    overhead_bits: int = 0

    def __post_init__(self) -> None:
        if self.bits < 1 or self.group < 0 or self.overhead_bits < 0:
            raise ConfigError(
                f"a format of {self.bits} bits in groups of {self.group} with {self.overhead_bits} bits of scales; "
                "bits is 1 or more, the others 0 or more"
            )

    @property
    def bytes_per_element(self) -> float:
        """Bytes of one element with its share of the scale."""
        return (self.bits + (self.overhead_bits / self.group if self.group else 0)) / 8


#: Formats by name. Those with an underscore are the block formats of llama.cpp (``ggml-common.h``): 32 codes, a float16
#: scale, and for the ``_1`` kinds a float16 minimum. ``int8`` and ``int4`` are groups of 128 with a float16 scale
#: (``int4`` also with a float16 zero point), as AWQ and GPTQ checkpoints have them; ``int4-g32`` has groups of 32.
FORMATS = {
    "float32": Format(32),
    "bfloat16": Format(16),
    "float16": Format(16),
    "fp8": Format(8),
    "int8": Format(8, 128, 16),
    "int4": Format(4, 128, 32),
    "q8_0": Format(8, 32, 16),
    "q4_0": Format(4, 32, 16),
    "q4_1": Format(4, 32, 32),
}


def format_of(storage: str | Format) -> Format:
    """A storage format by its name; one that is given as such stays.

    Args:
        storage: a name of :data:`FORMATS`, with ``-g32`` for groups of another size, or a format.

    Raises:
        ConfigError: no format is called so.
    """
    if isinstance(storage, Format):
        return storage
    name, grouped, group = storage.partition("-g")
    sized = group.isdecimal() and int(group) > 0
    if name not in FORMATS or (grouped and not (sized and FORMATS[name].group)):
        raise ConfigError(f"no storage format is called {storage!r}; {nearest(storage, FORMATS)}")
    return replace(FORMATS[name], group=int(group)) if grouped else FORMATS[name]


def unquantized(storage: str | Format) -> Format:
    """What stays beside a format: itself where it has 16 bits or more, else bfloat16.

    Args:
        storage: a name of :data:`FORMATS`, or a format.

    Raises:
        ConfigError: no format is called so.
    """
    found = format_of(storage)
    return found if found.bits >= 16 else FORMATS["bfloat16"]


def require_groups(storage: str | Format, width: int, what: str) -> Format:
    """The format, after checking that its groups fill a row of elements exactly.

    Args:
        storage: a name of :data:`FORMATS`, or a format.
        width: elements of one row that share scales among themselves.
        what: the row's name, for the message.

    Raises:
        ConfigError: the groups do not divide the width.
    """
    found = format_of(storage)
    if found.group and width % found.group:
        raise ConfigError(
            f"groups of {found.group} do not divide {what}, which has {width} elements; choose a group size that does"
        )
    return found
