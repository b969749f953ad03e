"""When a load test sends what: an arrival process, a trace of real traffic, or as many at once as there are places."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.errors import ConfigError, at_least, one_line

if TYPE_CHECKING:
    from kvlab.serving.workload import Arrival

#: What a trace may call its columns: ours, and those of the Azure LLM inference traces.
_COLUMNS = {
    "time": ("time", "TIMESTAMP"),
    "prompt_tokens": ("prompt_tokens", "ContextTokens"),
    "output_tokens": ("output_tokens", "GeneratedTokens"),
}


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is sent to a server, and when.

    With a ``rate`` or a ``trace`` the loop is open: requests come when they are due, whether the server keeps up or
    not, as users do. With a ``concurrency`` it is closed: each place sends its next request when its last one is
    answered, so that a slow server is asked less; its figures say what a server can do, not what users would see.

    Args:
        requests: how many are sent; of a trace, at most.
        rate: per second on average.
        concurrency: places of a closed loop.
        workload: lengths and what prompts share, by a name that :func:`kvlab.serving.workload.workload` knows.
        trace: a file of requests to replay: JSONL or CSV with ``time`` (seconds, or a date with a time of day),
            ``prompt_tokens`` and ``output_tokens``; or a CSV file of the Azure LLM inference traces.
        burstiness: coefficient of variation of the gaps between arrivals; 1 is Poisson, None what the workload says.
        seed: of lengths and arrivals. What prompts say is new in every run, because servers remember prompts.
        warmup: requests that are sent before, all at once, and left out of every figure.
        slo_ttft: promised seconds to the first token, for the goodput.
        slo_tpot: promised seconds for each token after it.
        tokenizer: a ``tokenizer.json``, or the folder it is in, to write prompts of an exact length as text.

    Raises:
        ConfigError: a number is impossible, or two of rate, concurrency and trace are given.
    """

    requests: int = 100
    rate: float | None = None
    concurrency: int | None = None
    workload: str = "fixed:256/64"
    trace: Path | None = None
    burstiness: float | None = None
    seed: int = 0
    warmup: int = 1
    slo_ttft: float | None = None
    slo_tpot: float | None = None
    tokenizer: Path | None = None

    def __post_init__(self) -> None:
        at_least(1, "requests", self.requests)
        at_least(0, "warmup", self.warmup)
        ways = [name for name in ("rate", "concurrency", "trace") if getattr(self, name) is not None]
        if len(ways) > 1:
            raise ConfigError(f"{' and '.join(ways)} are given; give one of them: a loop is open or closed")
        if self.concurrency is not None:
            at_least(1, "concurrency", self.concurrency)
        if self.burstiness is not None and self.rate is None:
            raise ConfigError("burstiness is about the gaps of an arrival process; give a rate with it")
        for name in ("slo_ttft", "slo_tpot"):
            promised = getattr(self, name)
            if promised is not None and not 0 < promised < math.inf:
                raise ConfigError(f"{name} is {promised}; promise seconds above 0")
        if self.trace is None:
            next(iter(self.arrivals()))  # which checks the names and the numbers

    @property
    def places(self) -> int | None:
        """Places of a closed loop, one where nothing else is said; None for an open loop."""
        return None if self.rate is not None or self.trace is not None else self.concurrency or 1

    def arrivals(self) -> list[Arrival]:
        """The requests in the order in which they are due. In a closed loop their times mean nothing.

        Raises:
            ConfigError: no workload has this name, or the trace cannot be read.
        """
        from kvlab.serving.workload import arrivals, workload

        if self.trace is not None:
            return list(read_trace(self.trace, self.requests))
        asked = workload(self.workload)
        if self.burstiness is not None:
            asked = replace(asked, gap_cv=self.burstiness)
        return list(
            arrivals(asked, rate=1.0 if self.rate is None else self.rate, requests=self.requests, seed=self.seed)
        )


def read_trace(path: Path, requests: int) -> Iterator[Arrival]:
    """The first requests of a trace; the earliest of them comes at 0.

    Args:
        path: as :class:`Load` describes it.
        requests: at most.

    Raises:
        ConfigError: it cannot be read, or a line has not what is needed.
    """
    from kvlab.serving.workload import Arrival

    try:
        with path.open(encoding="utf8", newline="") as file:
            lines = map(json.loads, file) if path.suffix.startswith(".json") else csv.DictReader(file)
            rows = [_row(line, number) for number, line in enumerate(islice(lines, requests), start=1)]
    except (OSError, ValueError) as failure:
        if isinstance(failure, ConfigError):
            raise
        raise ConfigError(f"trace {path} cannot be read: {one_line(failure)}") from None
    if not rows:
        raise ConfigError(f"trace {path} has no requests; write one a line: time, prompt_tokens, output_tokens")
    rows.sort()
    for session, (time, prompt_tokens, output_tokens) in enumerate(rows):
        yield Arrival(time - rows[0][0], prompt_tokens, output_tokens, session)


def _row(line: Mapping[str, Any], number: int) -> tuple[float, int, int]:
    """Time, prompt tokens and output tokens of a line."""
    if not isinstance(line, Mapping):
        raise ConfigError(f"request {number} of the trace is {line!r}; it must be an object with {', '.join(_COLUMNS)}")
    found = []
    for name, spellings in _COLUMNS.items():
        spelled = next((spelling for spelling in spellings if spelling in line), None)
        if spelled is None:
            raise ConfigError(f"request {number} of the trace has no {name}; it has {', '.join(map(str, line))}")
        found.append(line[spelled])
    try:
        time, prompt_tokens, output_tokens = _seconds(found[0]), int(found[1]), int(found[2])
    except (TypeError, ValueError) as failure:
        raise ConfigError(f"request {number} of the trace: {one_line(failure)}") from None
    at_least(1, f"request {number} of the trace: prompt_tokens", prompt_tokens)
    at_least(1, f"request {number} of the trace: output_tokens", output_tokens)
    return time, prompt_tokens, output_tokens


def _seconds(time: Any) -> float:
    """Seconds, from a number or a date. Azure writes seven digits after the second, of which Python reads six."""
    try:
        seconds = float(time)
    except ValueError:
        seconds = datetime.fromisoformat(time.strip()[:26]).timestamp()
    if not math.isfinite(seconds):
        raise ValueError(f"time is {time}; it must be finite")
    return seconds
