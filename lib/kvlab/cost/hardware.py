"""What a device can do: the peaks of its data sheet, and, where somebody measured, curves.

A peak draws the limit. It does not predict: a matrix product of 8 rows reaches a few per cent of a peak that 2,048 rows
come near, and memory that fits the cache is read twice as fast as memory that does not. A calibrated device therefore
carries curves (made by ``kvlab.measure.calibrate``), and everything in ``kvlab.cost`` uses them where they are.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Self

from kvlab.errors import ConfigError, nearest
from kvlab.resources import resource


@dataclass(frozen=True)
class Curve:
    """Measured points, straight between them on logarithmic axes, level beyond the ends.

    Args:
        x: where it was measured, rising and above 0.
        y: what was measured, above 0.

    Raises:
        ConfigError: there is no point, the numbers of x and y differ, or x does not rise.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.x, self.x[1:], strict=False))
        if not self.x or len(self.x) != len(self.y) or not rising or min(*self.x, *self.y, 1) <= 0:
            raise ConfigError(f"a curve of {self.x} and {self.y}: give it rising positive x and as many positive y")

    def at(self, x: float) -> float:
        """The value at a place.

        Args:
            x: anything; beyond the ends the curve stays level.
        """
        right = bisect_left(self.x, x)
        if right in (0, len(self.x)):
            return self.y[min(right, len(self.y) - 1)]
        low, high = self.x[right - 1], self.x[right]
        part = math.log(x / low) / math.log(high / low)
        return math.exp((1 - part) * math.log(self.y[right - 1]) + part * math.log(self.y[right]))


@dataclass(frozen=True)
class Kernels:
    """What the kernels of one dtype reach on a device.

    Args:
        linear: for each working set in bytes, FLOP/s of a linear layer by its rows, weights read from such a set.
        prefill_attention: FLOP/s of causal attention by the number of keys, counting visible pairs.
        decode_attention: byte/s at which one query reads keys and values, by the bytes of a layer's cache.
        elementwise: for ``norm``, ``rotate``, ``copy``, ``activation`` and ``add``, byte/s by the bytes in and out.
        launch_s: seconds of the host for each kernel that a pass starts.
        pass_s: seconds of the host for a pass, beside its kernels.
    """

    linear: tuple[tuple[float, Curve], ...]
    prefill_attention: Curve
    decode_attention: Curve
    elementwise: Mapping[str, Curve]
    launch_s: float
    pass_s: float

    def linear_rate(self, rows: float, working_set: float) -> float:
        """FLOP/s of a linear layer, between the measured working sets as between points of a curve.

        Args:
            rows: tokens that go through it at once.
            working_set: bytes that a pass reads, this layer among them.
        """
        sizes = tuple(size for size, _ in self.linear)
        return Curve(sizes, tuple(curve.at(rows) for _, curve in self.linear)).at(working_set)


@dataclass(frozen=True)
class Calibration:
    """What was measured on a device.

    Args:
        kernels: by dtype.
        read_bandwidth: byte/s of plain reading, by working set in bytes.
        asynchronous: the host runs ahead of the device, so that its time hides behind the kernels (GPU) or adds to
            them (CPU).
        noise: the same measurement twice, ``|second / first - 1|``, median over all points.
    """

    kernels: Mapping[str, Kernels]
    read_bandwidth: Curve
    asynchronous: bool
    noise: float


@dataclass(frozen=True)
class Hardware:
    """A device.

    Args:
        name: a slug for a preset, or what the device calls itself.
        title: for tables.
        kind: what kind of device, and of which generation.
        memory_bytes: of the device. A card's "GB" are taken as 2**30 bytes, which is what its driver shows; some of it
            is never usable.
        bandwidth: of its memory, byte/s.
        flops: dense peaks by dtype, FLOP/s; for float32 that of the vector units, for the others of the matrix units.
        source: where the figures come from.
        status: ``verified``, or which of the figures are not, and why.
        trap: what people get wrong about it, or an empty string.
        calibration: what was measured, or None for a data sheet.

    Raises:
        ConfigError: a figure is not above 0.
    """

    name: str
    title: str
    kind: str
    memory_bytes: int
    bandwidth: float
    flops: Mapping[str, float]
    source: str
    status: str = "verified"
    trap: str = ""
    calibration: Calibration | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        figures = {"memory_bytes": self.memory_bytes, "bandwidth": self.bandwidth, **self.flops}
        for name, value in figures.items():
            if not value > 0:
                raise ConfigError(f"{name} of {self.name} is {value}; it must be above 0")

    @property
    def label(self) -> str:
        """The title, with its status where a figure was not verified: the mark goes wherever the figure goes."""
        settled = self.status.startswith(("verified", "computed", "measured")) and "from memory" not in self.status
        return self.title if settled else f"{self.title} ({self.status})"

    def peak(self, dtype: str) -> float:
        """The dense peak of a dtype, FLOP/s.

        Args:
            dtype: ``float32``, ``float16``, ``bfloat16``, ``fp8`` or ``int8``.

        Raises:
            ConfigError: the device has no hardware for it, or its peak is not known.
        """
        if dtype not in self.flops:
            raise ConfigError(f"no {dtype} peak of {self.name} is known; it has {', '.join(self.flops) or 'none'}")
        return self.flops[dtype]

    def ridge(self, dtype: str) -> float:
        """FLOP a byte above which a kernel is bound by arithmetic, from the peaks.

        Args:
            dtype: of the arithmetic.

        Raises:
            ConfigError: no peak of this dtype is known.
        """
        return self.peak(dtype) / self.bandwidth

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The device that :meth:`to_json` wrote.

        Args:
            data: what it wrote.
        """
        calibration = data.get("calibration")
        return cls(**{**data, "calibration": _calibration(calibration) if calibration else None})


Device = Hardware | str


def hardware_of(device: Device) -> Hardware:
    """A device by its slug; one that is given as such stays.

    Args:
        device: a name of :func:`hardware_names`, or a device.

    Raises:
        ConfigError: no preset has this name; the nearest are offered.
    """
    if isinstance(device, Hardware):
        return device
    rows = _rows()
    if device not in rows:
        raise ConfigError(f"no hardware is called {device!r}; {nearest(device, rows)}")
    return Hardware(name=device, **rows[device])


def hardware_names() -> list[str]:
    """Every slug that :func:`hardware_of` knows, in the order of the file: GPUs first."""
    return list(_rows())


@cache
def _rows() -> dict[str, dict[str, Any]]:
    """``data/hardware.json``, read once, in base units."""
    rows: dict[str, dict[str, Any]] = json.loads(resource("hardware.json").read_text("utf8"))
    return {name: _base_units(row) for name, row in rows.items()}


def _base_units(row: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(row)
    out["memory_bytes"] = out.pop("memory_gib") * 2**30
    out["bandwidth"] = out.pop("bandwidth_gb_s") * 1e9
    out["flops"] = {dtype: tera * 1e12 for dtype, tera in out.pop("tflops").items()}
    return out


def _calibration(data: Mapping[str, Any]) -> Calibration:
    return Calibration(
        kernels={dtype: _kernels(kernels) for dtype, kernels in data["kernels"].items()},
        read_bandwidth=_curve(data["read_bandwidth"]),
        asynchronous=data["asynchronous"],
        noise=data["noise"],
    )


def _kernels(data: Mapping[str, Any]) -> Kernels:
    return Kernels(
        linear=tuple((size, _curve(curve)) for size, curve in data["linear"]),
        prefill_attention=_curve(data["prefill_attention"]),
        decode_attention=_curve(data["decode_attention"]),
        elementwise={name: _curve(curve) for name, curve in data["elementwise"].items()},
        launch_s=data["launch_s"],
        pass_s=data["pass_s"],
    )


def _curve(data: Mapping[str, Sequence[float]]) -> Curve:
    return Curve(tuple(data["x"]), tuple(data["y"]))
