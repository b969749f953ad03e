"""What the device at hand can do, measured with the kernels that kvlab's own path uses.

Every point of every curve is timed once a round, and the rounds are spread over time: a slow minute of the machine then
bends all curves alike instead of one of them, and two rounds side by side say how much a measurement is worth.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from math import ceil
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.cache import KVCache, View, Visibility, make_cache
from kvlab.config import ModelConfig
from kvlab.cost import Calibration, Curve, Hardware, Kernels, decode_pass, operators, pass_time
from kvlab.devices import device_name, dtype_name, pick_device, pick_dtype
from kvlab.errors import MeasureError
from kvlab.generation import decode
from kvlab.model import GPT, RMSNorm, attend, rotate
from kvlab.timing import Clock, clock_for, noise_floor

MIB = 2**20
#: Rows at which linear layers are timed: one request's decode step to a long prompt.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
#: From so many rows on a weight is used so often that it does not matter where it was read from.
_STREAM_ROWS = 64
_KEYS = (32, 128, 512, 1024, 2048)
_ELEMENTWISE = ("norm", "rotate", "copy", "activation", "add")
#: Cached elements of a token in one layer: keys and values of 4 heads.
_CACHED = 2 * 4 * 64
#: Seconds that a timing takes at least, so that the clock's own cost and its grain disappear.
_QUICKEST = 5e-3


@dataclass
class _Point:
    """One place of one curve.

    Args:
        curve: which curve it belongs to.
        x: its place.
        amount: operations or bytes of one run.
        work: one run.
        runs: how often the work is run in one timing, so that the clock's own cost disappears.
        seconds: of one run, one a round.
    """

    curve: tuple[str, ...]
    x: float
    amount: float
    work: Callable[[], object]
    runs: int = 1
    seconds: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Operations or bytes a second."""
        return self.amount / median(self.seconds)


class Calibrator:
    """Measures in rounds, so that other measurements can stand between them.

    Args:
        device: what to measure; by default the best that is there.
        dtypes: what to measure it in; by default all that models run in here.
        clock: what time is; by default the device's.
        largest: bytes of the largest working set; it should be beyond every cache of the device.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        dtypes: Sequence[torch.dtype] = (),
        *,
        clock: Clock | None = None,
        largest: int = 512 * MIB,
    ) -> None:
        self.device = device or pick_device()
        self.dtypes = tuple(dtypes) or default_dtypes(self.device)
        self._clock = clock or clock_for(self.device)
        self._largest = largest
        self._pools: list[Tensor] = []
        with torch.inference_mode():
            self._points = [*self._reads()]
            for dtype in self.dtypes:
                self._points += [*self._linears(dtype), *self._attentions(dtype), *self._elementwise(dtype)]
                self._points += self._steps(dtype)
            for point in self._points:
                self._warm_up(point)

    def round(self) -> None:
        """Time every point once more."""
        with torch.inference_mode():
            # Memory that nobody touched for a while is slow at its first touch: a virtual machine's host takes it away.
            for pool in self._pools:
                pool.sum()
            for point in self._points:
                point.seconds.append(self._time(point))

    @property
    def noise(self) -> float:
        """The same measurement twice, ``|second / first - 1|``, median over all points; 0 before the second round."""
        return noise_floor(point.seconds for point in self._points) or 0.0

    def result(self) -> Hardware:
        """The device as the rounds so far show it.

        Raises:
            MeasureError: there was no round yet.
        """
        if not self._points[0].seconds:
            raise MeasureError("nothing was measured yet; call round() first")
        read = self._curve("read")
        kernels = {dtype_name(dtype): self._kernels(dtype_name(dtype)) for dtype in self.dtypes}
        return Hardware(
            name="this-device",
            title=device_name(self.device),
            kind=self.device.type,
            memory_bytes=memory_of(self.device),
            bandwidth=read.y[-1],
            flops={name: max(rate for _, curve in found.linear for rate in curve.y) for name, found in kernels.items()},
            source=f"kvlab calibrate, torch {torch.__version__.split('+')[0]}",
            status="measured",
            trap="peaks are the best rates that were measured, not those of a data sheet",
            calibration=Calibration(kernels, read, self._asynchronous, self.noise),
        )

    def _kernels(self, dtype: str) -> Kernels:
        streamed = self._curve("linear", dtype, str(self._largest))
        tail = [(x, y) for x, y in zip(streamed.x, streamed.y, strict=True) if x > _STREAM_ROWS]
        linear = []
        for size in self._working_sets():
            own = self._curve("linear", dtype, str(size))
            points = [(x, y) for x, y in zip(own.x, own.y, strict=True) if x <= _STREAM_ROWS] + tail
            linear.append((float(size), Curve(tuple(x for x, _ in points), tuple(y for _, y in points))))
        kernels = Kernels(
            linear=tuple(linear),
            prefill_attention=self._curve("prefill", dtype),
            decode_attention=self._curve("decode", dtype),
            elementwise={kind: self._curve(kind, dtype) for kind in _ELEMENTWISE},
            launch_s=0.0,
            pass_s=0.0,
        )
        launch, outside = self._host(dtype, kernels)
        return replace(kernels, launch_s=launch, pass_s=outside)

    def _curve(self, *curve: str) -> Curve:
        points = sorted((p for p in self._points if p.curve == curve), key=lambda p: p.x)
        return Curve(tuple(p.x for p in points), tuple(p.rate for p in points))

    def _host(self, dtype: str, kernels: Kernels) -> tuple[float, float]:
        """Seconds of a launch and of a pass: what is left of a step when its kernels are taken off.

        Two decoders that differ in their layers alone are compared. In place a kernel finds nothing in the caches, so
        this is more than an empty loop over the same calls would show.
        """
        left, launches = [], []
        bare = Calibration({dtype: kernels}, self._curve("read"), self._asynchronous, 0.0)
        device = Hardware("bare", "bare", self.device.type, 1, 1.0, {}, "", calibration=bare)
        for point in (p for p in self._points if p.curve == ("step", dtype)):
            config = _probe(int(point.x), self._asynchronous)
            # Where the host runs ahead, kernels hide behind it: nothing is to be taken off.
            spent = 0.0 if self._asynchronous else pass_time(config, decode_pass(0), device, dtype).kernels_s
            left.append(median(point.seconds) - spent)
            launches.append(sum(op.calls * op.launches for op in operators(config, decode_pass(0))))
        launch = max((left[1] - left[0]) / (launches[1] - launches[0]), 0.0)
        return launch, max(left[0] - launches[0] * launch, 0.0)

    @property
    def _asynchronous(self) -> bool:
        return self.device.type != "cpu"

    def _working_sets(self) -> list[int]:
        return [self._largest // 24, self._largest // 6, self._largest]

    def _reads(self) -> Iterator[_Point]:
        """Plain reading: a sum over float32."""
        for size in (self._largest // 512, self._largest // 64, self._largest // 6, self._largest):
            pool = torch.ones(size // 4, device=self.device)
            self._pools.append(pool)
            yield _Point(("read",), pool.nbytes, pool.nbytes, pool.sum)

    def _steps(self, dtype: torch.dtype) -> Iterator[_Point]:
        """Decode steps of two decoders that differ in their layers."""
        for layers in (2, 14):
            config = _probe(layers, self._asynchronous)
            model = GPT(config).to(self.device, dtype).eval().requires_grad_(False)
            cache = make_cache("contiguous", config, 1, 16, dtype, self.device)
            yield _Point(("step", dtype_name(dtype)), layers, 1, partial(_step, model, cache))

    def _linears(self, dtype: torch.dtype) -> Iterator[_Point]:
        """The four matrices of a block, over blocks whose weights were not used for a whole working set."""
        hidden = 4096 if self._asynchronous else 768
        sizes = [(hidden * 5 // 3, hidden), (hidden, hidden), (hidden * 16 // 3, hidden), (hidden, hidden * 8 // 3)]
        elements = sum(outputs * inputs for outputs, inputs in sizes)
        pool = torch.ones(
            max(self._largest // dtype.itemsize // elements, 1), elements, device=self.device, dtype=dtype
        )
        self._pools.append(pool)
        blocks = [_cut(flat, sizes) for flat in pool]
        inputs = {width: torch.ones(max(ROWS), width, device=self.device, dtype=dtype) for _, width in sizes}
        for size in self._working_sets():
            within = blocks[: max(size // pool[0].nbytes, 1)]
            for rows in ROWS:
                if rows > _STREAM_ROWS and size < self._largest:
                    continue
                x = {width: tensor[:rows] for width, tensor in inputs.items()}
                amount = 2.0 * rows * elements
                yield _Point(("linear", dtype_name(dtype), str(size)), rows, amount, partial(_run, x, cycle(within)))

    def _attentions(self, dtype: torch.dtype) -> Iterator[_Point]:
        """Queries of 8 heads over 4 KV heads, as the model attends: a prompt over itself, one query over a cache."""
        for keys in _KEYS:
            batch = max(256 // keys, 1)
            q, k, v = (torch.ones(batch, n, keys, 64, device=self.device, dtype=dtype) for n in (8, 4, 4))
            amount = 4.0 * batch * 8 * 64 * keys * (keys + 1) / 2
            work = partial(attend, q, k, v, View(Visibility.CAUSAL))
            yield _Point(("prefill", dtype_name(dtype)), keys, amount, work)
        for batch, keys in ((1, 32), (1, 128), (1, 512), (1, 2048), (4, 2048), (16, 2048)):
            if batch * keys * _CACHED * dtype.itemsize <= self._largest // 4:
                yield self._decode_attention(dtype, batch, keys)

    def _decode_attention(self, dtype: torch.dtype, batch: int, keys: int) -> _Point:
        each = batch * keys * _CACHED * dtype.itemsize
        layers = max(min(32, self._largest // 4 // each), 1)
        caches = torch.ones(layers, 2, batch, 4, keys, 64, device=self.device, dtype=dtype)
        q = torch.ones(batch, 8, 1, 64, device=self.device, dtype=dtype)
        everything, turn = View(Visibility.ALL), cycle(range(layers))

        def work() -> Tensor:
            held = caches[next(turn)]
            return attend(q, held[0], held[1], everything)

        return _Point(("decode", dtype_name(dtype)), each, each, work)

    def _elementwise(self, dtype: torch.dtype) -> Iterator[_Point]:
        """What only moves activations, over widths of 1,024, by the bytes that come in and go out."""
        for size in (2**12, 2**16, 2**19, 2**22, 2**24, 2**27):
            if size > self._largest // 4:
                break
            for kind, work, moved in _movers(size, dtype, self.device):
                yield _Point((kind, dtype_name(dtype)), moved, moved, work)

    def _warm_up(self, point: _Point) -> None:
        """Run it twice: the second time says how many runs make one timing."""
        point.work()
        took = self._time(point)
        point.runs = max(ceil(_QUICKEST / max(took, 1e-7)), 1)

    def _time(self, point: _Point) -> float:
        start = self._clock.now()
        for _ in range(point.runs):
            point.work()
        return (self._clock.now() - start) / point.runs


def calibrate(
    device: torch.device | None = None,
    dtypes: Sequence[torch.dtype] = (),
    *,
    rounds: int = 3,
    clock: Clock | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Hardware:
    """Measure a device: rates by rows, bandwidth by working set, attention by length, the cost of a launch.

    Takes 10 to 30 seconds on two CPU cores.

    Args:
        device: what to measure; by default the best that is there.
        dtypes: what to measure it in; by default all that models run in here.
        rounds: times that every point is measured; the noise floor needs two.
        clock: what time is; by default the device's.
        report: hears a line before each round.

    Raises:
        MeasureError: no round is asked for.
    """
    if rounds < 1:
        raise MeasureError(f"rounds is {rounds}; measure 1 or more")
    report("allocating and warming up")
    calibrator = Calibrator(device, dtypes, clock=clock)
    for number in range(rounds):
        report(f"round {number + 1} of {rounds}")
        calibrator.round()
    return calibrator.result()


def default_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """What models run in on a device: float32, and 16 bits of the better kind.

    Args:
        device: of this machine.
    """
    narrow = torch.bfloat16 if device.type == "cpu" else pick_dtype(device)
    return (torch.float32, narrow)


def memory_of(device: torch.device) -> int:
    """Bytes of memory that a device has; of a CPU, those of the machine.

    Args:
        device: of this machine.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cut(flat: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Matrices of these sizes, one after the other in a flat piece of memory."""
    pieces = flat.split([outputs * inputs for outputs, inputs in sizes])
    return [piece.view(size) for piece, size in zip(pieces, sizes, strict=True)]


def _run(x: Mapping[int, Tensor], blocks: Iterator[list[Tensor]]) -> None:
    for weight in next(blocks):
        F.linear(x[weight.shape[1]], weight)


def _movers(size: int, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Callable[[], object], int]]:
    """Each kind of elementwise work over tensors of ``size`` bytes, and the bytes that it moves."""
    width = 1024
    rows = max(size // (width * dtype.itemsize), 1)
    x = torch.ones(1, rows, width, device=device, dtype=dtype)
    pair = torch.ones(1, rows, 2 * width, device=device, dtype=dtype)
    heads = torch.ones(1, rows, 16, 64, device=device, dtype=dtype).transpose(1, 2)
    table = torch.ones(1, 1, rows, 32, device=device)
    norm = RMSNorm(width, 1e-5).to(device, dtype)

    def gated() -> Tensor:
        gate, up = pair.chunk(2, dim=-1)
        return F.silu(gate) * up

    yield "norm", lambda: norm(x), 2 * x.nbytes
    yield "rotate", lambda: rotate(heads, table, table), 2 * x.nbytes
    yield "copy", heads.contiguous, 2 * x.nbytes
    yield "activation", gated, 3 * x.nbytes
    yield "add", lambda: x + x, 3 * x.nbytes


def _probe(layers: int, asynchronous: bool) -> ModelConfig:
    """A decoder whose steps are little but launches: tiny where kernels hide behind the host, else of common shape."""
    heads = 2 if asynchronous else 8
    return ModelConfig(
        name="probe", vocab_size=256, n_layer=layers, n_head=heads, n_kv_head=heads // 2, head_dim=64,
        hidden_size=64 * heads, intermediate_size=192 * heads, max_seq_len=64,
    )  # fmt: skip


def _step(model: GPT, cache: KVCache) -> None:
    cache.reset()
    decode(model, torch.zeros(1, dtype=torch.long), cache).argmax(-1).tolist()
