"""Metrics pages made to order: what a server in a known state would show."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parent / "fixtures"
Values = Sequence[tuple[float, float]]

# vLLM's own edges.
TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
GAPS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
SPANS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
HISTOGRAMS = {
    "ttft": ("time_to_first_token_seconds", TTFT),
    "itl": ("inter_token_latency_seconds", GAPS),
    "queue": ("request_queue_time_seconds", SPANS),
    "prefill": ("request_prefill_time_seconds", SPANS),
    "e2e": ("e2e_request_latency_seconds", SPANS),
    "prompts": ("request_prompt_tokens", TOKENS),
    "answers": ("request_generation_tokens", TOKENS),
}
TIMES = ("ttft", "itl", "queue", "prefill", "e2e")


@dataclass(frozen=True)
class State:
    """A server, since it was started: histograms as (value, how often), everything else as numbers."""

    ttft: Values = ()
    itl: Values = ()
    queue: Values = ()
    prefill: Values = ()
    e2e: Values = ()
    prompts: Values = ()
    answers: Values = ()
    running: float = 0
    waiting: float = 0
    kv: float = 0.0
    steps: float = 0
    pool_tokens: int = 160_000
    block_size: int = 16
    caching: bool = True
    counters: Mapping[str, float] = field(default_factory=dict)

    def text(self, kind: str = "vllm", *, scale: float = 1.0, engines: int = 1) -> str:
        """The page; ``scale`` stretches every time and the edges with it, ``engines`` share the load evenly."""
        return "\n".join(self._lines(kind, scale, engines)) + "\n"

    def _lines(self, kind: str, scale: float, engines: int) -> Iterator[str]:
        for engine in range(engines):
            labels = f'engine="{engine}",model_name="m"'
            for name, (metric, edges) in HISTOGRAMS.items():
                stretch = scale if name in TIMES else 1.0
                yield from _histogram(f"{kind}:{metric}", labels, getattr(self, name), edges, stretch, engines)
            for name, value in self._numbers().items():
                yield f"{kind}:{name}{{{labels}}} {value / engines!r}"
            yield f"{kind}:kv_cache_usage_perc{{{labels}}} {self.kv!r}"
            yield (
                f'{kind}:cache_config_info{{{labels},block_size="{self.block_size}",enable_prefix_caching='
                f'"{self.caching}",kv_cache_size_tokens="{self.pool_tokens}"}} 1.0'
            )

    def _numbers(self) -> dict[str, float]:
        prompt, found = sum(value * n for value, n in self.prompts), {}
        first = sum(n for _, n in self.ttft)
        found["prompt_tokens_total"] = prompt
        found["generation_tokens_total"] = sum(n for _, n in self.itl) + first
        found["prefix_cache_queries_total"] = prompt if self.caching else 0.0
        found |= {"prefix_cache_hits_total": 0.0, "num_preemptions_total": 0.0}
        found |= {"iteration_tokens_total_count": self.steps, "iteration_tokens_total_sum": 0.0}
        found |= {"num_requests_running": self.running, "num_requests_waiting": self.waiting}
        return found | dict(self.counters)


def _histogram(
    name: str, labels: str, values: Values, edges: Sequence[float], stretch: float, engines: int
) -> Iterator[str]:
    for edge in (*edges, inf):
        count = sum(n for value, n in values if value <= edge)
        text = "+Inf" if edge == inf else repr(edge * stretch)
        yield f'{name}_bucket{{{labels},le="{text}"}} {count / engines!r}'
    yield f"{name}_count{{{labels}}} {sum(n for _, n in values) / engines!r}"
    yield f"{name}_sum{{{labels}}} {sum(value * n for value, n in values) * stretch / engines!r}"
    yield f"{name}_created{{{labels}}} 1.8e+09"


def captured(name: str) -> str:
    """A page that was stored."""
    return (FIXTURES / "metrics" / f"{name}.prom").read_text("utf8")


def page_of_delta(name: str) -> str:
    """A page with what moved during a run, as if the server had been started for it."""
    delta = json.loads((FIXTURES / "metrics" / "deltas" / f"{name}.json").read_text("utf8"))
    lines = [f"{key} {value}" for part in ("counter_deltas", "gauges_at_end") for key, value in delta[part].items()]
    for metric, histogram in delta["histogram_deltas"].items():
        lines += [f'{metric}_bucket{{le="{edge}"}} {count}' for edge, count in histogram["buckets"].items()]
        lines += [f"{metric}_count {histogram['count']}", f"{metric}_sum {histogram['sum']}"]
    return "\n".join(lines) + "\n"


def request(id: int, sent: float, chunks: Sequence[float], **other: Any) -> dict[str, Any]:
    """A request of a load-test result that went well."""
    return {
        "id": id, "intended_s": sent, "sent_s": sent, "headers_s": sent, "chunks_s": list(chunks),
        "end_s": chunks[-1] if chunks else sent, "status": 200, "error": None, "finish_reason": "length",
        "prompt_tokens": None, "output_tokens": len(chunks), "cached_tokens": None,
    } | other  # fmt: skip


def loadtest(requests: Sequence[Mapping[str, Any]], **other: Any) -> dict[str, Any]:
    """A load-test result."""
    return {
        "kind": "kvlab-loadtest", "version": 1, "settings": {"warmup": 2}, "interrupted": False, "seconds": 60.0,
        "figures": {"slo": {"ttft_s": None, "tpot_s": None}}, "warnings": [], "requests": list(requests),
    } | other  # fmt: skip


def of_bench(name: str) -> dict[str, Any]:
    """What ``vllm bench serve`` stored, as a load test of ours."""
    data = json.loads((FIXTURES / "bench" / f"{name}.json").read_text("utf8"))
    found = []
    rows = zip(data["start_times"], data["ttfts"], data["itls"], data["input_lens"], strict=True)
    for id, (sent, ttft, gaps, prompt) in enumerate(rows):
        chunks = [sent + ttft]
        for gap in gaps:
            chunks.append(chunks[-1] + gap)
        found.append(request(id, sent, chunks, prompt_tokens=prompt))
    return loadtest(found)


def of_run(name: str) -> dict[str, Any]:
    """A client's records of a run, as a load test of ours. Times count from its start, or from a request's."""
    data = json.loads((FIXTURES / "runs" / f"{name}.json").read_text("utf8"))
    whole = isinstance(data, dict)
    return loadtest([_of_record(id, each, whole) for id, each in enumerate(data["requests"] if whole else data)])


def _of_record(id: int, record: Mapping[str, Any], relative: bool) -> dict[str, Any]:
    start = record["send"] if relative else 0.0
    chunks, usage = [start + time for time in record.get("t_events") or ()], record.get("usage") or {}
    error = None
    if record.get("cancelled"):
        error = {"kind": "cancelled", "message": ""}
    elif not chunks:
        busy = "The engine is currently busy and cannot accept new requests."
        error = {"kind": "in-band" if record["status"] == 200 else f"http-{record['status']}", "message": busy}
    return request(
        id, record["send"], chunks, error=error, status=record.get("status", 200),
        prompt_tokens=usage.get("prompt_tokens") or record.get("prompt_len"),
    )  # fmt: skip
