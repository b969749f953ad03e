"""How long a forward pass takes: the sum of its operators, each as slow as its slowest part.

The roofline (Williams, Waterman and Patterson, 2009): an operator that does F operations on B bytes takes at least
``max(F / peak, B / bandwidth)``. With a calibrated device the peak becomes the rate that was measured for so many rows,
the bandwidth that of such a working set, and a third part joins: the host needs time to launch anything at all. On a
GPU it runs ahead and hides behind the kernels while they are longer; on a CPU it is the same processor, and adds up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvlab.config import Shape, shape_of
from kvlab.cost.flops import Row, decode_pass, flops, require_rows
from kvlab.cost.formats import Format, format_of, unquantized
from kvlab.cost.hardware import Calibration, Device, Hardware, Kernels, hardware_of
from kvlab.cost.memory import weight_bytes_read
from kvlab.cost.operators import Operator, Part, cache_bytes_read, operators
from kvlab.errors import ConfigError

Bound = Literal["compute", "bandwidth", "launch"]


@dataclass(frozen=True)
class Timed:
    """An operator and what it takes.

    Args:
        operator: what runs.
        compute_s: seconds that its arithmetic needs.
        bandwidth_s: seconds that its bytes need.
        launch_s: seconds of the host, to start it.
    """

    operator: Operator
    compute_s: float
    bandwidth_s: float
    launch_s: float

    @property
    def kernel_s(self) -> float:
        """Seconds of the device: the slower of arithmetic and bytes."""
        return max(self.compute_s, self.bandwidth_s)

    @property
    def bound(self) -> Bound:
        """Which of the three it is."""
        if self.launch_s > self.kernel_s:
            return "launch"
        return "compute" if self.compute_s == self.kernel_s else "bandwidth"


@dataclass(frozen=True)
class PassTime:
    """A forward pass on a device.

    Args:
        operators: in the order in which they run.
        pass_s: seconds of the host that belong to no operator.
        asynchronous: the host runs ahead of the device.
    """

    operators: tuple[Timed, ...]
    pass_s: float
    asynchronous: bool

    @property
    def kernels_s(self) -> float:
        """Seconds that the device works."""
        return sum(timed.kernel_s for timed in self.operators)

    @property
    def host_s(self) -> float:
        """Seconds that the host needs to start everything."""
        return self.pass_s + sum(timed.launch_s for timed in self.operators)

    @property
    def seconds(self) -> float:
        """Of the whole pass: the longer of host and device where they overlap, else their sum."""
        return together(self.kernels_s, self.host_s, self.asynchronous)

    def share(self, part: Part) -> float:
        """Part of the seconds that go to one kind of work, 0 to 1; all parts add up to 1.

        Args:
            part: kind of work; ``overhead`` is the time in which the host works and the device does not.
        """
        if part == "overhead":
            return 1 - self.kernels_s / self.seconds
        return sum(timed.kernel_s for timed in self.operators if timed.operator.part == part) / self.seconds


def together(kernels_s: float, host_s: float, asynchronous: bool) -> float:
    """Seconds of host and device: the longer of both where they overlap, else their sum.

    Args:
        kernels_s: seconds that the device works.
        host_s: seconds that the host needs to start everything.
        asynchronous: the host runs ahead of the device.
    """
    return max(kernels_s, host_s) if asynchronous else kernels_s + host_s


@dataclass(frozen=True)
class Peaks:
    """What a data sheet says of an operator: arithmetic at the peak, bytes at the full bandwidth, nothing of the host.

    Args:
        flops: FLOP/s.
        bandwidth: byte/s.
    """

    flops: float
    bandwidth: float
    pass_s: ClassVar[float] = 0.0
    asynchronous: ClassVar[bool] = True

    def timed(self, operator: Operator, working_set: float) -> Timed:
        """What an operator takes.

        Args:
            operator: what runs.
            working_set: bytes of all matrices of the pass; a peak knows no difference.
        """
        # An engine fuses what only moves activations into its neighbours: against a data sheet it counts nothing.
        moved = 0.0 if operator.part == "elementwise" else operator.bytes
        return Timed(operator, operator.flops / self.flops, moved / self.bandwidth, 0.0)

    def attention(self, queries: float, keys: int, flops: float, moved: float, calls: int) -> tuple[float, float]:
        """Seconds that attention needs for its arithmetic, and for its bytes.

        Args:
            queries: of the longest row.
            keys: that a query sees at most.
            flops: operations of all calls.
            moved: bytes of all calls.
            calls: layers.
        """
        return flops / self.flops, moved / self.bandwidth


@dataclass(frozen=True)
class Curves:
    """What was measured of an operator.

    Args:
        measured: of the device.
        kernels: of the dtype, among them.
    """

    measured: Calibration
    kernels: Kernels

    @property
    def pass_s(self) -> float:
        """Seconds of the host that belong to no operator."""
        return self.kernels.pass_s

    @property
    def asynchronous(self) -> bool:
        """The host runs ahead of the device."""
        return self.measured.asynchronous

    def timed(self, operator: Operator, working_set: float) -> Timed:
        """What an operator takes.

        Args:
            operator: what runs.
            working_set: bytes of all matrices of the pass.
        """
        kernels, launch = self.kernels, operator.calls * operator.launches * self.kernels.launch_s
        if operator.part == "elementwise":
            each = operator.bytes / operator.calls
            return Timed(operator, 0.0, operator.bytes / kernels.elementwise[operator.name].at(each), launch)
        if operator.part == "attention":
            figures = operator.rows, operator.keys, operator.flops, operator.bytes, operator.calls
            return Timed(operator, *self.attention(*figures), launch)
        compute = operator.flops / kernels.linear_rate(operator.rows, working_set)
        return Timed(operator, compute, operator.bytes / self.measured.read_bandwidth.at(working_set), launch)

    def attention(self, queries: float, keys: int, flops: float, moved: float, calls: int) -> tuple[float, float]:
        """Seconds that attention needs for its arithmetic, and for its bytes: decode steps read, prompts compute.

        Args:
            queries: of the longest row.
            keys: that a query sees at most.
            flops: operations of all calls.
            moved: bytes of all calls.
            calls: layers.
        """
        if queries == 1:
            return 0.0, moved / self.kernels.decode_attention.at(moved / calls)
        return flops / self.kernels.prefill_attention.at(keys), 0.0


def rates_of(hardware: Hardware, dtype: str) -> Peaks | Curves:
    """What a device was measured to do, or else the peaks of its data sheet.

    Args:
        hardware: the device.
        dtype: of the arithmetic.

    Raises:
        ConfigError: the device knows no rate for the dtype.
    """
    measured = hardware.calibration
    if measured is None:
        return Peaks(hardware.peak(dtype), hardware.bandwidth)
    if dtype not in measured.kernels:
        raise ConfigError(f"{hardware.name} was calibrated for {', '.join(measured.kernels)}, not for {dtype}")
    return Curves(measured, measured.kernels[dtype])


def pass_time(
    model: Shape,
    rows: Sequence[Row],
    device: Device,
    dtype: str = "bfloat16",
    *,
    weights: str | Format | None = None,
    kv: str | Format | None = None,
) -> PassTime:
    """How long one forward pass takes.

    With the peaks of a data sheet this is a limit that no implementation beats; with a calibration it is a prediction
    for kvlab's own path. Rows of a batch are taken to be of about the same length: a ragged batch also pays for a mask.

    Args:
        model: a preset name, a Hub config, or a shape.
        rows: what each request contributes.
        device: a slug or a device.
        dtype: of the arithmetic and of the activations.
        weights: format of the weights in memory; by default ``dtype``.
        kv: format of the cache; by default ``dtype``.

    Raises:
        ConfigError: a name is unknown, the device knows no rate for the dtype, or there is no row.
    """
    config, hardware = shape_of(model), hardware_of(device)
    found = operators(config, rows, dtype, weights=weights, kv=kv)
    rates = rates_of(hardware, dtype)
    working_set = sum(operator.bytes for operator in found if operator.part in ("linear", "head"))
    timed = tuple(rates.timed(operator, working_set) for operator in found)
    return PassTime(timed, rates.pass_s, rates.asynchronous)


def critical_batch(device: Device, dtype: str = "bfloat16", weights: str | Format | None = None) -> float:
    """Tokens in a pass from which its linear layers are bound by arithmetic: the ridge in units of tokens.

    A weight of ``b`` bytes serves 2 operations a token: the ridge is reached at ``peak * b / (2 * bandwidth)`` tokens.

    Args:
        device: a slug or a device; its peaks are used.
        dtype: of the arithmetic.
        weights: format of the weights; by default ``dtype``.

    Raises:
        ConfigError: a name is unknown, or the device has no peak for the dtype.
    """
    return hardware_of(device).ridge(dtype) * format_of(weights or dtype).bytes_per_element / 2


def weight_read_seconds(model: Shape, device: Device, weights: str | Format = "bfloat16") -> float:
    """The floor of a decode step: reading every weight once at the full bandwidth.

    Args:
        model: a preset name, a Hub config, or a shape.
        device: a slug or a device.
        weights: format of the weights.

    Raises:
        ConfigError: a name is unknown.
    """
    return weight_bytes_read(model, weights) / hardware_of(device).bandwidth


def mfu(model: Shape, rows: Sequence[Row], seconds: float, device: Device, dtype: str = "bfloat16") -> float:
    """Model FLOPs utilisation (arXiv:2204.02311): operations of the pass, over what the peak could do in its time.

    Args:
        model: a preset name, a Hub config, or a shape.
        rows: what each request contributed.
        seconds: that the pass took.
        device: a slug or a device.
        dtype: of the arithmetic.

    Raises:
        ConfigError: a name is unknown, or the device has no peak for the dtype.
    """
    return flops(model, rows).total / seconds / hardware_of(device).peak(dtype)


def mbu(
    model: Shape,
    rows: Sequence[Row],
    seconds: float,
    device: Device,
    weights: str | Format = "bfloat16",
    kv: str | Format | None = None,
) -> float:
    """Model bandwidth utilisation: bytes of weights and cache that the pass must read, over what memory could deliver.

    Args:
        model: a preset name, a Hub config, or a shape.
        rows: what each request contributed.
        seconds: that the pass took.
        device: a slug or a device.
        weights: format of the weights.
        kv: format of the cache; by default that of the weights, or bfloat16 where they are narrower.

    Raises:
        ConfigError: a name is unknown, or there is no row.
    """
    needed = weight_bytes_read(model, weights, sum(row.new for row in require_rows(rows)))
    needed += cache_bytes_read(model, rows, kv or unquantized(weights))
    return needed / seconds / hardware_of(device).bandwidth


def step_bytes(
    model: Shape, past: int, batch: int = 1, weights: str | Format = "bfloat16", kv: str | Format | None = None
) -> int:
    """Bytes that one decode step reads: all weights, and every cache.

    Args:
        model: a preset name, a Hub config, or a shape.
        past: tokens that each cache holds before the step.
        batch: requests in the step.
        weights: format of the weights.
        kv: format of the cache; by default that of the weights, or bfloat16 where they are narrower.

    Raises:
        ConfigError: a name is unknown, or a size is impossible.
    """
    rows = decode_pass(past, batch)
    return weight_bytes_read(model, weights, batch) + cache_bytes_read(model, rows, kv or unquantized(weights))
