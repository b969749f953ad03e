"""One contender in one process: kvlab, transformers, or the device itself; started by ``peers.py``.

Reads one job as JSON from its first argument. Every line on standard input asks for one round, whose figures are the
answer, one line of JSON. What is run first in a process (compiling, packing, allocating) is timed apart.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Protocol

import torch
from torch import Tensor

import kvlab
from kvlab.cache import BlockPool, ContiguousCache, KVCache, make_cache
from kvlab.errors import DeviceError
from kvlab.generation import CompiledDecode, decode, paged_package, prefill
from kvlab.kernels import built
from kvlab.measure import Case, calibrate, profile
from kvlab.model import GPT
from kvlab.quantize import row_aware
from kvlab.serving import Engine as Serving
from kvlab.serving import ModelExecutor, Scheduler, TokenRequest
from kvlab.timing import Clock, repeat

Figures = dict[str, Any]
#: Steps of a warm-up: the first two calls of a step compile, pack or allocate.
_WARM_UP = 3


class Engine(Protocol):
    """What a contender must do: read prompts, then go on token by token."""

    @property
    def note(self) -> str:
        """What a reader should know about how it ran."""

    def start(self, prompts: Tensor, room: int) -> Tensor:
        """Read prompts into a fresh cache.

        Args:
            prompts: ids, one row a prompt.
            room: tokens that a row will come to.

        Returns:
            The first token of each answer.
        """

    def step(self, tokens: Tensor) -> Tensor:
        """The next token of each row.

        Args:
            tokens: the newest, one a row.
        """


class Transformers:
    """A model of ``transformers``, called directly: its ``generate`` only adds to each step.

    Args:
        folder: in the Hub's layout.
        static: a cache of fixed length instead of one that grows.
    """

    def __init__(self, folder: str, static: bool) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self._static = static
        self._cache: Any = None
        self.note = f"attention: {self._model.config._attn_implementation}"

    def start(self, prompts: Tensor, room: int) -> Tensor:
        """See :class:`Engine`."""
        from transformers import DynamicCache, StaticCache

        config = self._model.config
        self._cache = StaticCache(config=config, max_cache_len=room) if self._static else DynamicCache(config=config)
        return self._next(prompts)

    def step(self, tokens: Tensor) -> Tensor:
        """See :class:`Engine`."""
        return self._next(tokens[:, None])

    def _next(self, ids: Tensor) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1).logits
            return logits[:, -1].argmax(-1)


class Kvlab:
    """A model of kvlab: decoding by a compiled step where ``kvlab compile`` has made one, else eagerly.

    Args:
        model: a name, a Hub id or a path.
        load: arguments of ``kvlab.load``.
    """

    def __init__(self, model: str, load: Figures) -> None:
        self.model = row_aware(kvlab.load(model, device="cpu", **load).model)
        self._compiled: dict[int, CompiledDecode | None] = {}
        self._cache: KVCache | None = None

    @property
    def note(self) -> str:
        """How it decoded, by rows."""
        steps = ", ".join(f"{rows} row(s) {'compiled' if step else 'eager'}" for rows, step in self._compiled.items())
        return f"{steps}; kernels {'built' if built() else 'not built'}"

    def start(self, prompts: Tensor, room: int) -> Tensor:
        """See :class:`Engine`."""
        rows, model = len(prompts), self.model
        if rows not in self._compiled:
            self._compiled[rows] = self._step_of(rows)
        self._cache = make_cache("contiguous", model.config, rows, room, model.dtype, model.device)
        return prefill(model, prompts, self._cache).argmax(-1)

    def step(self, tokens: Tensor) -> Tensor:
        """See :class:`Engine`."""
        assert isinstance(self._cache, ContiguousCache)
        compiled = self._compiled[len(tokens)]
        logits = decode(self.model, tokens, self._cache) if compiled is None else compiled(tokens, self._cache)
        return logits.argmax(-1)

    def _step_of(self, rows: int) -> CompiledDecode | None:
        try:
            return CompiledDecode(self.model, rows)
        except DeviceError:
            return None


def measure(engine: Engine, prompts: Tensor, new: int, clock: Clock) -> Figures:
    """Answer prompts once and say what it took, in seconds.

    Args:
        engine: that answers.
        prompts: ids, one row a prompt.
        new: tokens of each answer.
        clock: what time is.
    """
    room = prompts.shape[1] + new
    start = clock.now()
    tokens = engine.start(prompts, room)
    first = clock.now()
    for _ in range(new - 1):
        tokens = engine.step(tokens)
    last = clock.now()
    tpot = (last - first) / (new - 1) if new > 1 else None
    return {"ttft_s": first - start, "tpot_s": tpot, "e2e_s": last - start}


def run_cases(make: Callable[[], Engine], job: Figures, clock: Clock) -> Figures:
    """Load an engine and measure every case, each warmed up by a short run of itself.

    Args:
        make: loads it.
        job: its ``cases`` (name, prompt, new, batch) and the ``vocab`` of the model.
        clock: what time is.
    """
    start = clock.now()
    engine = make()
    found: Figures = {"load_s": clock.now() - start, "cases": {}}
    dice = torch.Generator().manual_seed(0)
    for case in job["cases"]:
        prompts = torch.randint(job["vocab"], (case["batch"], case["prompt"]), generator=dice)
        begun = clock.now()
        measure(engine, prompts, min(case["new"], _WARM_UP), clock)
        found.setdefault("first_call_s", clock.now() - begun)
        found["cases"][case["name"]] = measure(engine, prompts, case["new"], clock)
    return found | {"note": engine.note}


def device(dtypes: Sequence[str], clock: Clock, cube: int = 2048) -> Figures:
    """The device itself: the calibration of the cost model, and the product that utilisation is measured against.

    Args:
        dtypes: names of the dtypes that models run in.
        clock: what time is.
        cube: rows and columns of the product.
    """
    hardware = calibrate(torch.device("cpu"), [getattr(torch, name) for name in dtypes], rounds=2)
    a, b = torch.ones(2, cube, cube, dtype=torch.bfloat16)
    took = repeat(lambda: torch.mm(a, b), clock, repeats=5)
    return {"matmul_flops": 2 * cube**3 / took.median, "hardware": hardware.to_json()}


def attention_share(model: GPT, prompt: int) -> Figures:
    """Seconds of a prefill, and the part of them that attention takes.

    Args:
        model: the decoder.
        prompt: tokens.
    """
    seen = profile(model, Case(prompt, 2)).prefill
    return {"seconds": seen.seconds, "attention": seen.share("attention")}


def serve(job: Figures, clock: Clock) -> Figures:
    """Equal requests through kvlab's serving engine, all at once and one after another.

    Args:
        job: ``model`` and ``load``, the ``case`` (prompt, new, batch) and the ``vocab``.
        clock: what time is.
    """
    case, dice = job["case"], torch.Generator().manual_seed(0)
    model = row_aware(kvlab.load(job["model"], device="cpu", **job["load"]).model)
    prompts = torch.randint(job["vocab"], (case["batch"], case["prompt"]), generator=dice).tolist()
    buckets = [rows for rows in (1, case["batch"]) if paged_package(model, rows).exists()]

    def seconds(at_once: int, new: int) -> float:
        pool = BlockPool(case["batch"] * (case["prompt"] + case["new"]) // 16 + 2 * case["batch"], 16)
        budget = case["batch"] * case["prompt"]
        scheduler = Scheduler(pool, token_budget=budget, max_running=at_once, reuse_prefixes=False)
        engine = Serving(scheduler, ModelExecutor(model, pool, buckets=buckets), clock)
        requests = [TokenRequest.of(index, prompt, new) for index, prompt in enumerate(prompts)]
        start = clock.now()
        for _ in engine.run((0.0, request) for request in requests):
            pass
        assert all(request.new_tokens == new for request in requests)
        return clock.now() - start

    found = {}
    for name, at_once in (("together", case["batch"]), ("one after another", 1)):
        seconds(at_once, _WARM_UP)
        found[name] = {"e2e_s": seconds(at_once, case["new"])}
    steps = f"steps compiled for {buckets} requests, others eager"
    return {"cases": found, "note": f"kernels {'built' if built() else 'not built'}; {steps}"}


def ready(job: Figures, clock: Clock) -> Callable[[], Figures]:
    """What a round is, for a job.

    Args:
        job: its ``contender`` and what that needs.
        clock: what time is.
    """
    if job["contender"] == "device":
        return lambda: device(job["dtypes"], clock)
    if job["contender"] == "profile":
        model = Kvlab(job["model"], job["load"]).model
        return lambda: {"profiles": [attention_share(model, prompt) for prompt in job["prompts"]]}
    if job["contender"] == "serving":
        return lambda: serve(job, clock)
    if job["contender"] == "transformers":
        return lambda: (
            run_cases(lambda: Transformers(job["folder"], job["static"]), job, clock)
            | {"versions": {"transformers": version("transformers"), "torch": torch.__version__}}
        )
    return lambda: run_cases(lambda: Kvlab(job["model"], job["load"]), job, clock)


def main() -> None:
    """Answer every line of standard input with a round."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to standard error
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    turn = ready(job, Clock())
    for _ in sys.stdin:
        print(json.dumps(turn()), file=answers, flush=True)


if __name__ == "__main__":
    main()
