"""How long a forward pass takes: the sum of its operators, each as slow as its slowest part.

The roofline (Williams, Waterman and Patterson, 2009): an operator that does F operations on B bytes takes at least
``max(F / peak, B / bandwidth)``. With a calibrated device the peak becomes the rate that was measured for so many rows,
the bandwidth that of such a working set, and a third part joins: the host needs time to launch anything at all. On a
GPU it runs ahead and hides behind the kernels while they are longer; on a CPU it is the same processor, and adds up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvlab.config import ModelConfig, Shape, shape_of
from kvlab.cost.flops import Row, attention_flops, decode_pass, flops, require_rows
from kvlab.cost.formats import Format, format_of, unquantized
from kvlab.cost.hardware import Calibration, Device, Hardware, Kernels, hardware_of
from kvlab.cost.memory import cache_format, experts_touched, kv_elements_of_a_layer, weight_bytes_read, weight_format
from kvlab.cost.parameters import Matrix, active_width, attention_matrices, expert_parameters, mlp_matrices
from kvlab.errors import ConfigError

Part = Literal["linear", "attention", "head", "elementwise", "overhead"]
Bound = Literal["compute", "bandwidth", "launch"]


@dataclass(frozen=True)
class Operator:
    """One kind of operator of a pass, in all layers together.

    Args:
        name: such as ``qkv`` or ``attention``.
        part: which share of the pass it belongs to.
        calls: how often it runs.
        launches: kernels that one call starts.
        rows: tokens that one call takes at once.
        keys: keys that a query of it can see at most; 0 where it is not attention.
        flops: operations of all calls.
        bytes: of weights, cache and activations that all calls read and write.
    """

    name: str
    part: Part
    calls: int
    launches: int
    rows: float
    keys: int
    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """FLOP a byte."""
        return self.flops / self.bytes


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
        return max(self.kernels_s, self.host_s) if self.asynchronous else self.kernels_s + self.host_s

    def share(self, part: Part) -> float:
        """Part of the seconds that go to one kind of work, 0 to 1; all parts add up to 1.

        Args:
            part: kind of work; ``overhead`` is the time in which the host works and the device does not.
        """
        if part == "overhead":
            return 1 - self.kernels_s / self.seconds
        return sum(timed.kernel_s for timed in self.operators if timed.operator.part == part) / self.seconds


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
    measured = hardware.calibration
    if measured is None:
        timed = [_at_the_peak(operator, hardware, dtype) for operator in found]
        return PassTime(tuple(timed), 0.0, asynchronous=True)
    if dtype not in measured.kernels:
        raise ConfigError(f"{hardware.name} was calibrated for {', '.join(measured.kernels)}, not for {dtype}")
    working_set = sum(operator.bytes for operator in found if operator.part in ("linear", "head"))
    kernels = measured.kernels[dtype]
    timed = [_as_measured(operator, measured, kernels, working_set) for operator in found]
    return PassTime(tuple(timed), kernels.pass_s, measured.asynchronous)


def operators(
    model: Shape,
    rows: Sequence[Row],
    dtype: str = "bfloat16",
    *,
    weights: str | Format | None = None,
    kv: str | Format | None = None,
) -> list[Operator]:
    """The operators of a pass with their FLOPs and bytes, each kind once for all layers.

    FLOPs add up to :func:`~kvlab.cost.flops.flops`, matrices to :func:`~kvlab.cost.memory.weight_bytes_read` (which
    adds norms, biases and rows of the embedding: a thousandth). Activations are counted once in and once out of each
    operator.

    Args:
        model: a preset name, a Hub config, or a shape.
        rows: what each request contributes.
        dtype: of the activations.
        weights: format of the weights; by default ``dtype``.
        kv: format of the cache; by default ``dtype``.

    Raises:
        ConfigError: a name is unknown, or there is no row.
    """
    config, tokens = shape_of(model), sum(row.new for row in rows)
    width = format_of(dtype).bytes_per_element
    narrow, cached = weight_format(config, weights or dtype), cache_format(config, kv or dtype)
    return [
        *_projections(config, tokens, narrow.bytes_per_element, width),
        *_attentions(config, require_rows(rows), cached.bytes_per_element, width),
        *_elementwise(config, tokens, width),
        *_head(config, sum(row.logits for row in rows), narrow, width),
    ]


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


def cache_bytes_read(model: Shape, rows: Sequence[Row], kv: str | Format = "bfloat16") -> int:
    """Bytes of keys and values that attention of a pass reads, the new ones included, each once a row and layer.

    Args:
        model: a preset name, a Hub config, or a shape.
        rows: what each request contributes.
        kv: format of the cache.

    Raises:
        ConfigError: a name is unknown.
    """
    config = shape_of(model)
    tokens = sum(_held(row, window) for window in config.windows for row in rows)
    return round(tokens * kv_elements_of_a_layer(config) * cache_format(config, kv).bytes_per_element)


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


def _held(row: Row, window: int | None) -> int:
    """Keys that some query of the row sees."""
    return row.past + row.new if window is None else min(row.past + row.new, window + row.new - 1)


def _projections(config: ModelConfig, tokens: int, narrow: float, width: float) -> Iterator[Operator]:
    """Every matrix of the blocks; experts are one operator."""
    moe = config.moe
    dense = config.n_layer if moe is None else moe.n_dense_layers
    yield from (_linear(matrix, config.n_layer, tokens, narrow, width) for matrix in attention_matrices(config))
    if dense:
        matrices = mlp_matrices(config, config.intermediate_size)
        yield from (_linear(matrix, dense, tokens, narrow, width) for matrix in matrices)
    if moe is not None:
        yield _experts(config, tokens, narrow, width)


def _linear(matrix: Matrix, calls: int, tokens: int, narrow: float, width: float) -> Operator:
    moved = matrix.size * narrow + tokens * (matrix.inputs + matrix.outputs) * width
    return Operator(
        matrix.name, "linear", calls, 1, tokens, 0, flops=2.0 * calls * matrix.size * tokens, bytes=calls * moved
    )


def _experts(config: ModelConfig, tokens: int, narrow: float, width: float) -> Operator:
    """Routed and shared experts of all layers; each touched expert sees only its share of the tokens."""
    moe = config.moe
    assert moe is not None
    layers, expert = config.n_layer - moe.n_dense_layers, expert_parameters(config)
    touched = experts_touched(config, tokens)
    router = config.hidden_size * moe.n_experts
    active = moe.experts_per_token + moe.n_shared_experts
    weights = (touched + moe.n_shared_experts) * expert + router
    moved = weights * narrow + tokens * active * 2 * config.hidden_size * width
    return Operator(
        name="experts",
        part="linear",
        calls=layers,
        launches=3,
        rows=tokens * moe.experts_per_token / touched,
        keys=0,
        flops=2.0 * layers * tokens * (active * expert + router),
        bytes=layers * moved,
    )


def _attentions(config: ModelConfig, rows: Sequence[Row], narrow: float, width: float) -> Iterator[Operator]:
    """One operator for each window that some layer has: its cost depends on what it sees."""
    each = kv_elements_of_a_layer(config)
    tokens = sum(row.new for row in rows)
    for window in sorted(set(config.windows), key=lambda w: (w is None, w)):
        layers = config.windows.count(window)
        held = [_held(row, window) for row in rows]
        moved = sum(held) * each * narrow + 2 * tokens * config.n_head * config.head_dim * width
        yield Operator(
            name="attention" if window is None else f"attention({window})",
            part="attention",
            calls=layers,
            launches=5,
            rows=max(row.new for row in rows),
            keys=max(held),
            flops=layers * attention_flops(config, rows, window),
            bytes=layers * moved,
        )


def _elementwise(config: ModelConfig, tokens: int, width: float) -> Iterator[Operator]:
    """What only moves activations, as kvlab's eager path runs it; an engine fuses most of it away."""
    hidden, layers = config.hidden_size, config.n_layer
    heads = (config.n_head + config.n_kv_head) * config.head_dim
    inner = active_width(config)

    def moving(name: str, calls: int, launches: int, elements: int) -> Operator:
        return Operator(name, "elementwise", calls, launches, tokens, 0, 0.0, calls * tokens * elements * width)

    yield moving("norm", 2 * layers + 1, 1, 2 * hidden)
    if config.qk_norm:
        yield moving("norm", layers, 2, 2 * heads)
    if config.position == "rope":
        yield moving("rotate", layers, 12, 2 * heads)
    yield moving("copy", layers, 3, 2 * config.n_head * config.head_dim + 4 * config.n_kv_head * config.head_dim)
    yield moving("activation", layers, 2, (3 if config.gated_mlp else 2) * inner)
    yield moving("add", 2 * layers, 1, 3 * hidden)


def _head(config: ModelConfig, logits: int, weights: Format, width: float) -> Iterator[Operator]:
    """The LM head, where something goes through it; a tied one has the embedding's format."""
    if logits:
        matrix = Matrix("head", config.hidden_size, config.vocab_size)
        kept = unquantized(weights) if config.tie_embeddings else weights
        yield replace(_linear(matrix, 1, logits, kept.bytes_per_element, width), part="head")


def _at_the_peak(operator: Operator, hardware: Hardware, dtype: str) -> Timed:
    # An engine fuses what only moves activations into its neighbours: against a data sheet it counts nothing.
    moved = 0.0 if operator.part == "elementwise" else operator.bytes
    compute = operator.flops / hardware.peak(dtype) if operator.flops else 0.0
    return Timed(operator, compute, moved / hardware.bandwidth, 0.0)


def _as_measured(operator: Operator, measured: Calibration, kernels: Kernels, working_set: float) -> Timed:
    launch = operator.calls * operator.launches * kernels.launch_s
    each = operator.bytes / operator.calls
    if operator.part == "elementwise":
        return Timed(operator, 0.0, operator.bytes / kernels.elementwise[operator.name].at(each), launch)
    if operator.part == "attention":
        if operator.rows == 1:
            return Timed(operator, 0.0, operator.bytes / kernels.decode_attention.at(each), launch)
        return Timed(operator, operator.flops / kernels.prefill_attention.at(operator.keys), 0.0, launch)
    compute = operator.flops / kernels.linear_rate(operator.rows, working_set)
    return Timed(operator, compute, operator.bytes / measured.read_bandwidth.at(working_set), launch)
