"""Where the time of each phase goes, by torch's own profiler."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from kvlab.cache import KVCache, make_cache
from kvlab.cost.operators import Part
from kvlab.errors import MeasureError
from kvlab.generation import decode, prefill
from kvlab.measure.bench import Case
from kvlab.model import GPT
from kvlab.timing import Clock, clock_for, repeat

_LINEAR = ("aten::mm", "aten::addmm", "aten::linear", "aten::matmul", "aten::bmm")
_HEAD = "kvlab: head"
_ATTENTION = "aten::scaled_dot_product_attention"


@dataclass(frozen=True)
class OperatorTime:
    """One kind of operator in a profile.

    Args:
        name: torch's own, such as ``aten::mm``.
        part: which share it belongs to.
        calls: in one pass.
        seconds: of one pass, without what it called in turn.
    """

    name: str
    part: Part
    calls: float
    seconds: float


@dataclass(frozen=True)
class PhaseProfile:
    """Where the time of one pass goes.

    Args:
        seconds: of a pass, timed without the profiler.
        operators: those that the profiler saw, the longest first; the profiler makes each of them somewhat longer.
    """

    seconds: float
    operators: tuple[OperatorTime, ...]

    @property
    def kernels_s(self) -> float:
        """Seconds in operators, as the profiler saw them."""
        return sum(operator.seconds for operator in self.operators)

    def share(self, part: Part) -> float:
        """Part of a pass that goes to one kind of work, 0 to 1; all parts add up to 1.

        Args:
            part: kind of work; ``overhead`` is what no operator accounts for: Python, dispatch, waiting.
        """
        # With the profiler's own cost the operators can come to more than the pass: then nothing is left over.
        whole = max(self.seconds, self.kernels_s)
        if part == "overhead":
            return 1 - self.kernels_s / whole
        return sum(operator.seconds for operator in self.operators if operator.part == part) / whole


@dataclass(frozen=True)
class Profile:
    """Both phases.

    Args:
        prefill: the pass that reads the prompts.
        decode: a step after them.
    """

    prefill: PhaseProfile
    decode: PhaseProfile


def profile(model: GPT, case: Case, *, passes: int = 3, clock: Clock | None = None) -> Profile:
    """Profile both phases of a model.

    Args:
        model: the decoder.
        case: how many prompts of which length.
        passes: of each phase, timed and then watched; the quickest of them count, undisturbed as they are.
        clock: what time is; by default the device's.

    Raises:
        MeasureError: no pass is asked for.
        PromptError: the prompt is longer than the model's context.
    """
    if passes < 1:
        raise MeasureError(f"passes is {passes}; profile 1 or more")
    clock = clock or clock_for(model.device)
    tokens = torch.zeros(case.batch, case.prompt_tokens, dtype=torch.long)
    room = case.prompt_tokens + 1
    cache = make_cache("contiguous", model.config, case.batch, room, model.dtype, model.device)

    def read() -> None:
        cache.reset()
        prefill(model, tokens, cache)

    def step() -> None:
        _back_to(cache, case.prompt_tokens)
        decode(model, tokens[:, 0], cache)

    with _marks(model):
        return Profile(*(_phase(work, passes, clock, model.device) for work in (read, step)))


def _phase(work: Callable[[], None], passes: int, clock: Clock, device: torch.device) -> PhaseProfile:
    took = repeat(work, clock, repeats=passes).best
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    # Read once, at the first profile of a process: without it the profiler writes its progress to stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    watched: list[tuple[float, Any]] = []
    for _ in range(passes):
        with torch_profile(activities=activities) as recorded:
            seconds = repeat(work, clock, repeats=1, warmup=0).best
        watched.append((seconds, recorded))
    _, quickest = min(watched, key=lambda pair: pair[0])
    return PhaseProfile(took, _operators(quickest.events(), device))


def _operators(events: Any, device: torch.device) -> tuple[OperatorTime, ...]:
    """Events by name and part. On a GPU the kernels that an operator started count, not the host's time."""
    found: dict[tuple[str, Part], list[float]] = {}
    for event in events:
        if not event.name.startswith("aten::"):
            continue
        micro = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        entry = found.setdefault((event.name, _part(event)), [0.0, 0.0])
        entry[0] += 1
        entry[1] += micro * 1e-6
    rows = [OperatorTime(name, part, calls, seconds) for (name, part), (calls, seconds) in found.items()]
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _part(event: Any) -> Part:
    """Which share an event belongs to, by the marks around it and by its name."""
    around = set()
    above = event
    while above is not None:
        around.add(above.name)
        above = above.cpu_parent
    if _HEAD in around:
        return "head"
    if _ATTENTION in around:
        return "attention"
    return "linear" if around & set(_LINEAR) else "elementwise"


@contextmanager
def _marks(model: GPT) -> Iterator[None]:
    """Mark the LM head in the profile while the block runs."""
    marks: list[Any] = []

    def enter(module: nn.Module, args: Any) -> None:
        mark = record_function(_HEAD)
        mark.__enter__()
        marks.append(mark)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        marks.pop().__exit__(None, None, None)

    hooks = [model.head.register_forward_pre_hook(enter), model.head.register_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _back_to(cache: KVCache, length: int) -> None:
    cache.crop([length] * cache.batch)
