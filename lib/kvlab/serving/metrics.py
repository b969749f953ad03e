"""The metrics page of an engine: the names that vLLM 0.32 uses, where they mean the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlab.errors import KvlabError
from kvlab.serving.engine import Event, StepRecord
from kvlab.serving.log import Lifetime, Lifetimes
from kvlab.serving.request import Request
from kvlab.serving.scheduler import Scheduler

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge, Histogram

# The buckets of vLLM, so that a dashboard for the one shows the other.
_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_GAPS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_SPANS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_STEP_TOKENS = (1, *(2**power for power in range(3, 15)))
_REQUEST_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_TIMES = (0, 1, 2, 5, 10, 20, 50)


class Metrics(Lifetimes):
    """A listener that fills a ``prometheus_client.CollectorRegistry``.

    Names are those of vLLM with ``kvlab:`` for ``vllm:``, and the label ``model_name``. Times come from the events that
    :class:`~kvlab.serving.EventLog` keeps. What differs from vLLM:

    - ``kv_cache_usage_perc`` is a part of all blocks; vLLM keeps one of them for itself.
    - ``num_preemptions`` moves when the preemption happens; there, when the request emits its next token.
    - ``prompt_tokens`` moves at the first token, here as there, prompts from the cache included.
    - ``inter_token_latency_seconds`` has a sample for every token after the first; there, for every step that emitted
      any, which is less under speculation.
    - ``request_time_per_output_token_seconds`` leaves answers of one token out; there they count as 0.
    - ``iteration_tokens_total`` (a histogram) has the tokens that each step computed; there a prompt is booked whole
      at the step of its first token, so that chunks do not show.
    - ``request_success`` counts what was aborted; there a client that hangs up is not counted.
    - Histograms of finished requests, ``e2e_request_latency_seconds`` among them, are of answers that came to their end
      (``stop`` or ``length``).

    Args:
        scheduler: of the engine.
        model_name: the label.

    Raises:
        KvlabError: ``prometheus_client`` is not installed.
    """

    def __init__(self, scheduler: Scheduler, model_name: str) -> None:
        super().__init__()
        try:
            from prometheus_client import CollectorRegistry
        except ImportError:
            raise KvlabError(
                "a metrics page needs the package prometheus_client; run: pip install 'kvlab[serve]'"
            ) from None
        self.registry = CollectorRegistry()
        self._scheduler, self._model_name = scheduler, model_name
        self._looked_up = scheduler.prefix_queries, scheduler.prefix_hits
        self._make_gauges()
        self._make_counters()
        self._make_histograms()

    def page(self) -> str:
        """Everything, in the text format that Prometheus reads."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry).decode("utf8")

    def event(self, event: Event) -> None:
        """Count it."""
        super().event(event)
        if event.kind == "preempted":
            self._preemptions.inc()

    def step(self, record: StepRecord) -> None:
        """Count it."""
        super().step(record)
        self._generated.inc(sum(map(len, record.emitted.values())))
        self._count_prefixes()
        if fed := sum(record.fed.values()):
            _observe(self._step_tokens, fed, record.repeats)

    def began(self, life: Lifetime) -> None:
        """A first token."""
        self._prompts.inc(life.prompt_tokens)
        self._ttft.observe(life.first - life.sent)

    def gap(self, seconds: float, times: int) -> None:
        """Tokens after it."""
        _observe(self._itl, seconds, times)

    def ended(self, request: Request, life: Lifetime) -> None:
        """A request has ended."""
        self._success.labels(self._model_name, request.finish).inc()
        if request.finish not in ("stop", "length"):
            return
        for histogram, value in (
            (self._tpot, life.tpot),
            (self._e2e, life.e2e),
            (self._queue, life.scheduled - life.sent),
            (self._prefill, life.first - life.scheduled),
            (self._decode, life.last - life.first),
            (self._inference, life.last - life.scheduled),
            (self._request_prompt, life.prompt_tokens),
            (self._request_generation, life.tokens),
            (self._request_cap, request.max_new_tokens),
            (self._request_preemptions, request.preemptions),
        ):
            if value is not None:
                histogram.observe(value)

    def _make_gauges(self) -> None:
        scheduler, pool = self._scheduler, self._scheduler.pool
        self._gauge("num_requests_running", "Requests that run.").set_function(lambda: len(scheduler.running))
        self._gauge("num_requests_waiting", "Requests that wait, preempted ones among them.").set_function(
            lambda: scheduler.n_waiting
        )
        self._gauge("kv_cache_usage_perc", "Part of the blocks that somebody holds, 0 to 1.").set_function(
            lambda: pool.usage
        )
        settings = {
            "block_size": pool.block_size,
            "num_gpu_blocks": pool.n_blocks,
            "kv_cache_size_tokens": pool.n_blocks * pool.block_size,
            "enable_prefix_caching": scheduler.reuse_prefixes,
        }
        self._gauge("cache_config_info", "The KV cache, in labels.", *settings, **settings).set(1)

    def _make_counters(self) -> None:
        self._preemptions = self._counter("num_preemptions", "Requests that lost their blocks to others.")
        self._queries = self._counter("prefix_cache_queries", "Tokens that were looked up in the cache.")
        self._hits = self._counter("prefix_cache_hits", "Tokens that were found there.")
        self._prompts = self._counter("prompt_tokens", "Tokens of prompts whose first token came.")
        self._generated = self._counter("generation_tokens", "Tokens that were emitted.")
        self._success = self._new_counter("request_success", "Requests that ended.", "finished_reason")
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(self._model_name, reason)

    def _make_histograms(self) -> None:
        make = self._histogram
        self._ttft = make("time_to_first_token_seconds", "From arrival to the first token.", _TTFT)
        self._itl = make("inter_token_latency_seconds", "Between two tokens of a request.", _GAPS)
        self._tpot = make("request_time_per_output_token_seconds", "Per token after the first, by request.", _GAPS)
        self._e2e = make("e2e_request_latency_seconds", "From arrival to the last token.", _SPANS)
        self._queue = make("request_queue_time_seconds", "From arrival to the first step.", _SPANS)
        self._prefill = make("request_prefill_time_seconds", "From the first step to the first token.", _SPANS)
        self._decode = make("request_decode_time_seconds", "From the first token to the last.", _SPANS)
        self._inference = make("request_inference_time_seconds", "From the first step to the last token.", _SPANS)
        self._step_tokens = make("iteration_tokens_total", "Tokens that a step computed.", _STEP_TOKENS)
        self._request_prompt = make("request_prompt_tokens", "Tokens of a prompt.", _REQUEST_TOKENS)
        self._request_generation = make("request_generation_tokens", "Tokens of an answer.", _REQUEST_TOKENS)
        self._request_cap = make("request_params_max_tokens", "The most that was asked for.", _REQUEST_TOKENS)
        self._request_preemptions = make("request_num_preemptions", "Preemptions of a request.", _TIMES)

    def _count_prefixes(self) -> None:
        """The scheduler keeps the totals; a counter wants what came on top."""
        queries, hits = self._looked_up
        self._looked_up = self._scheduler.prefix_queries, self._scheduler.prefix_hits
        self._queries.inc(self._looked_up[0] - queries)
        self._hits.inc(self._looked_up[1] - hits)

    def _gauge(self, name: str, text: str, *labels: str, **values: object) -> Gauge:
        from prometheus_client import Gauge

        found = Gauge(f"kvlab:{name}", text, ["model_name", *labels], registry=self.registry)
        return found.labels(model_name=self._model_name, **values)

    def _new_counter(self, name: str, text: str, *labels: str) -> Counter:
        from prometheus_client import Counter

        return Counter(f"kvlab:{name}", text, ["model_name", *labels], registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return self._new_counter(name, text).labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        from prometheus_client import Histogram

        found = Histogram(f"kvlab:{name}", text, ["model_name"], registry=self.registry, buckets=buckets)
        return found.labels(self._model_name)


def _observe(histogram: Histogram, value: float, times: int) -> None:
    for _ in range(times):
        histogram.observe(value)
