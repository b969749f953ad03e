"""A model's two phases, measured, beside what the cost model predicts for the same device."""

from __future__ import annotations

import platform
import shlex
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import kvlab
from kvlab.cache import make_cache
from kvlab.cost import Hardware, cache_bytes_read, flops, mbu, mfu, middle_step, predict, prefill_pass
from kvlab.devices import device_name, dtype_name
from kvlab.errors import MeasureError
from kvlab.generation import CompiledDecode, generate
from kvlab.model import GPT
from kvlab.provenance import commit
from kvlab.quantize import is_quantized, weight_storage_bytes
from kvlab.timing import Clock, Sample, clock_for


@dataclass(frozen=True)
class Case:
    """What is measured: a batch of equal requests, all started at once.

    Args:
        prompt_tokens: of each request.
        new_tokens: of each answer; a TPOT needs two.
        batch: requests.

    Raises:
        MeasureError: a number is too small.
    """

    prompt_tokens: int
    new_tokens: int = 17
    batch: int = 1

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.new_tokens < 2 or self.batch < 1:
            raise MeasureError(
                f"{self.prompt_tokens} prompt tokens, {self.new_tokens} new tokens, batch {self.batch}; "
                "a case has 1 prompt token, 2 new tokens and 1 request or more"
            )


@dataclass(frozen=True)
class Measured:
    """One case on one device.

    Args:
        case: what was run.
        ttft: seconds to the first tokens.
        tpot: seconds for each token after the first.
        kv_bytes: that the cached tokens need, at the end.
    """

    case: Case
    ttft: Sample
    tpot: Sample
    kv_bytes: int


class Bench:
    """A case ready to run: its prompts and its cache are made once, as a server's are.

    Args:
        model: the decoder.
        case: what to run.
        compiled: the model's compiled decode step for this batch; None runs it eagerly.
        clock: what time is; by default the device's.
    """

    def __init__(
        self, model: GPT, case: Case, compiled: CompiledDecode | None = None, clock: Clock | None = None
    ) -> None:
        self.model, self.case, self._compiled = model, case, compiled
        self._clock = clock or clock_for(model.device)
        dice = torch.Generator().manual_seed(0)
        shape = (case.batch, case.prompt_tokens)
        self._prompts = torch.randint(model.config.vocab_size, shape, generator=dice).tolist()
        room = case.prompt_tokens + case.new_tokens - 1
        self._cache = make_cache("contiguous", model.config, case.batch, room, model.dtype, model.device)
        self._ttft: list[float] = []
        self._tpot: list[float] = []

    def run(self, keep: bool = True) -> None:
        """Answer all prompts once.

        Args:
            keep: False for a warm-up.
        """
        self._cache.reset()
        generation = generate(
            self.model,
            self._prompts,
            max_new_tokens=self.case.new_tokens,
            ignore_eos=True,
            cache=self._cache,
            compiled=self._compiled,
            clock=self._clock,
        ).run()
        if keep:
            self._ttft.append(generation.timing.ttft or 0.0)
            self._tpot.append(generation.timing.tpot or 0.0)

    @property
    def measured(self) -> Measured:
        """What the runs so far took."""
        return Measured(self.case, Sample(tuple(self._ttft)), Sample(tuple(self._tpot)), self._cache.used_bytes)


def bench(
    model: GPT,
    case: Case,
    *,
    repeats: int = 3,
    compiled: CompiledDecode | None = None,
    clock: Clock | None = None,
) -> Measured:
    """Measure one case: warmed up once, then repeated.

    Args:
        model: the decoder.
        case: what to run.
        repeats: times that count.
        compiled: the model's compiled decode step for this batch; None runs it eagerly.
        clock: what time is; by default the device's.

    Raises:
        MeasureError: no repeat is asked for.
        PromptError: prompt and answer are longer than the model's context.
    """
    if repeats < 1:
        raise MeasureError(f"repeats is {repeats}; measure 1 time or more")
    ready = Bench(model, case, compiled, clock)
    ready.run(keep=False)
    for _ in range(repeats):
        ready.run()
    return ready.measured


def report(model: GPT, name: str, measured: Measured, hardware: Hardware) -> dict[str, Any]:
    """One case as plain data: what was measured, what was predicted, and how near the limits it came.

    The prediction is for torch's own products. A model of codes runs others, and has the limit in its place: all
    bytes at the bandwidth, all operations at the peak.

    Args:
        model: that was run.
        name: what to call it.
        measured: what it took.
        hardware: the calibrated device.
    """
    case, dtype = measured.case, dtype_name(model.dtype)
    prefill, step = prefill_pass(case.prompt_tokens, case.batch), middle_step(**asdict(case))
    ttft, tpot = measured.ttft.median, measured.tpot.median
    held, quantized = weight_storage_bytes(model), is_quantized(model)
    read = held + cache_bytes_read(model.config, step, dtype)
    if quantized:
        predicted = flops(model.config, prefill).total / hardware.peak(dtype), read / hardware.bandwidth
    else:
        foreseen = predict(model.config, hardware, **asdict(case), dtype=dtype)
        predicted = foreseen.ttft, foreseen.tpot
    return {
        "model": name,
        **asdict(case),
        "prefill_tok_s": case.batch * case.prompt_tokens / ttft,
        "decode_tok_s": case.batch / tpot,
        "ttft_s": ttft,
        "tpot_s": tpot,
        "predicted_ttft_s": predicted[0],
        "predicted_tpot_s": predicted[1],
        "predicted_by": "limit" if quantized else "calibration",
        "weight_bytes": held,
        "kv_bytes": measured.kv_bytes,
        "mfu": mfu(model.config, prefill, ttft, hardware, dtype),
        "mbu": read / tpot / hardware.bandwidth if quantized else mbu(model.config, step, tpot, hardware, dtype),
        "ttft_repeats_s": list(measured.ttft.seconds),
        "tpot_repeats_s": list(measured.tpot.seconds),
        "dtype": dtype,
        **provenance(model.device),
    }


def provenance(device: torch.device) -> dict[str, Any]:
    """What a result must say about itself: device, versions, commit, command.

    Args:
        device: that it was measured on.
    """
    command = shlex.join(["kvlab", *sys.argv[1:]]) if "kvlab" in sys.argv[0] else "in a notebook or script"
    return {
        "device": device_name(device),
        "machine": machine(device),
        "versions": versions(),
        "commit": commit(),
        "command": command,
    }


def versions() -> dict[str, str]:
    """Versions of everything that a measurement depends on."""
    found = {"python": platform.python_version(), "kvlab": kvlab.__version__, "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    with suppress(PackageNotFoundError):
        found["transformers"] = version("transformers")
    return found


def machine(device: torch.device) -> str:
    """The hardware in words: of a CPU its vector units, of a GPU its compute capability.

    Args:
        device: of this machine.
    """
    if device.type == "cuda":
        return "compute capability {}.{}".format(*torch.cuda.get_device_capability(device))
    return f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
