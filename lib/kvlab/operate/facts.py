"""What is known about a server: plain numbers, whatever they were read from.

:func:`facts` computes them from one read of a metrics page or from two, :func:`facts_of_loadtest` from what a client
saw. A fact that the source does not have is None, and no rule of :mod:`kvlab.operate.causes` may stumble over that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from kvlab.errors import ConfigError, MeasureError
from kvlab.operate.prometheus import Distribution, Kind, Page

# A gap counts as a stall from here on, in typical gaps. Buckets are coarse, so the typical gap is taken large.
_STALL = 1.5


@dataclass(frozen=True)
class Facts:
    """About one window of time; everything in seconds, tokens and requests.

    Args:
        sources: what was read, a phrase each.
        notes: what is odd about it, a sentence each.
        engine: who wrote the metrics page; None where no page was read.
        restarted: a counter ran backwards between the reads: the server is a new one.
        running: requests in the batch, at each read; of a client, answers that streamed at once, on average.
        waiting: requests that wait, preempted ones among them, at each read.
        kv_usage: part of the KV pool that is held, 0 to 1, at each read; of several engines the fullest.
        pool_tokens: that the KV pool holds.
        block_size: tokens of a block.
        prefix_caching: whether it is switched on.
        attempts: requests that came in the window, failed ones among them.
        begun: that got their first token in it.
        finished: that came to their end in it.
        served: first tokens since the server started.
        unfinished: requests since the start that got a first token and did not end; clients that hung up are in it.
        prompt_tokens: of those who began, cached ones among them.
        output_tokens: generated.
        steps: of the engine that gave tokens.
        prompts: tokens of a prompt; of those who finished since the server started.
        answers: tokens of an answer; likewise.
        ttft: to the first token.
        queue: before the first step; of finished requests on a server, estimated from a client.
        prefill: from the first step to the first token; likewise.
        itl: between two outputs of a request, one sample a step.
        itl_before: the same, from the start of the server to the window.
        batch_before: requests a step, from the start of the server to the window.
        batch_gaps: requests that decoded at once, and the median gap then; from a client's records.
        preemptions: in the window.
        prefix_queries: prompt tokens that were looked up.
        prefix_hits: of them found.
        hit_rate_before: from the start of the server to the window.
        rejections: refused by a limit on the queue.
        failures: requests that failed, by kind: ``4xx``, ``5xx``, or what a client saw.
        failure_texts: what the server said, with how often.
        capped: answers that ended at the context limit before they were as long as asked.
        drafts: verification steps of speculative decoding.
        draft_tokens: drafted.
        accepted_tokens: of them kept.
        client_ttft: to the first token, as a client saw it, from the time that it meant to send.
        client_tpot: for each token after it, as a client saw it.
        send_lag: from the time that the client meant to send to the time that it did.
        buffered: how streams were held back on their way, in the words of the load test; None where they were not.
        early_ttft: of the first requests of a run, their median; where no warm-up came before.
        late_ttft: median of the others.
        slo_tpot: the longest time for a token that was promised.
        step_floor: what a decode step of this batch would take at the bandwidth of the hardware.
    """

    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    engine: Kind | None = None
    restarted: bool = False
    running: tuple[float, ...] = ()
    waiting: tuple[float, ...] = ()
    kv_usage: tuple[float, ...] = ()
    pool_tokens: float | None = None
    block_size: float | None = None
    prefix_caching: bool | None = None
    attempts: float | None = None
    begun: float | None = None
    finished: float | None = None
    served: float | None = None
    unfinished: float | None = None
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    steps: float | None = None
    prompts: Distribution | None = None
    answers: Distribution | None = None
    ttft: Distribution | None = None
    queue: Distribution | None = None
    prefill: Distribution | None = None
    itl: Distribution | None = None
    itl_before: Distribution | None = None
    batch_before: float | None = None
    batch_gaps: tuple[tuple[float, float], ...] = ()
    preemptions: float | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    hit_rate_before: float | None = None
    rejections: float | None = None
    failures: Mapping[str, float] = field(default_factory=dict)
    failure_texts: Mapping[str, int] = field(default_factory=dict)
    capped: float | None = None
    drafts: float | None = None
    draft_tokens: float | None = None
    accepted_tokens: float | None = None
    client_ttft: Distribution | None = None
    client_tpot: Distribution | None = None
    send_lag: Distribution | None = None
    buffered: str | None = None
    early_ttft: float | None = None
    late_ttft: float | None = None
    slo_tpot: float | None = None
    step_floor: float | None = None

    @property
    def user_seconds(self) -> float | None:
        """What all requests together waited for: their first tokens and every further one. The common scale of causes.

        Both histograms move with every token, while those of finished requests lag behind a live run.
        """
        parts = [each.sum for each in (self.ttft, self.itl) if each is not None]
        return sum(parts) if parts and sum(parts) > 0 else None

    def share(self, seconds: float | None) -> float:
        """Of the time that the requests waited, 0 to 1; 0 where that is not known.

        Args:
            seconds: of all requests together.
        """
        whole = self.user_seconds
        return min(max((seconds or 0.0) / whole, 0.0), 1.0) if whole else 0.0

    @property
    def batch(self) -> float | None:
        """Requests that decode in a step, on average; from the gauges where no step was counted."""
        if self.steps and self.itl:
            return self.itl.count / self.steps
        return sum(self.running) / len(self.running) if self.running else None

    @property
    def waiting_share(self) -> float:
        """Of the requests in the house, those who wait; 0 where nobody waited any more at the last read.

        By Little's law it is also the part of their time that they spend waiting.
        """
        if not self.waiting or not self.running or self.waiting[-1] <= 0:
            return 0.0
        return sum(self.waiting) / (sum(self.waiting) + sum(self.running))

    @property
    def evicted(self) -> float | None:
        """Requests that got a first token, have not ended and do not run: they were preempted, or their client left.

        None where the counts do not reach back to those who run.
        """
        if self.unfinished is None or not self.running or self.unfinished < self.running[-1]:
            return None
        return self.unfinished - self.running[-1]

    @property
    def mean_prompt(self) -> float | None:
        """Tokens of a prompt."""
        if self.begun and self.prompt_tokens is not None:
            return self.prompt_tokens / self.begun
        return self.prompts.mean if self.prompts and self.prompts.count else None

    @property
    def hit_rate(self) -> float | None:
        """Of the prompt tokens that were looked up in the prefix cache, those that were found."""
        return (self.prefix_hits or 0.0) / self.prefix_queries if self.prefix_queries else None

    @property
    def typical_gap(self) -> float | None:
        """The gap between two tokens of a stream that nothing disturbs: no more than this.

        The median's bucket has an upper edge, and the mean is exact; a tail makes both too large, never too small.
        """
        median = self.itl.bounds(50) if self.itl and self.itl.count else None
        return min(median[1], self.itl.mean) if self.itl and median else None

    @property
    def stalls(self) -> tuple[float, float, float]:
        """From which gap on a stream stalls, how many gaps did, and the least that they took in all."""
        if self.itl is None or self.typical_gap is None:
            return 0.0, 0.0, 0.0
        edge = _STALL * self.typical_gap
        return edge, *self.itl.above(edge)

    @property
    def stall_share(self) -> float:
        """Of the time between tokens, what passed in stalls, at least."""
        return self.stalls[2] / self.itl.sum if self.itl and self.itl.sum > 0 else 0.0


def facts(before: Page | None, after: Page, seconds: float | None = None) -> Facts:
    """From a metrics page.

    Args:
        before: an earlier read; None for what happened since the server started.
        after: the read.
        seconds: between the two, where it is known.

    Raises:
        MeasureError: the pages are of two kinds of engine.
    """
    if before is not None and before.kind != after.kind:
        raise MeasureError(f"one page is of {before.kind} and one of {after.kind}; give two reads of the same server")
    restarted = before is not None and _ran_backwards(before, after)
    pages = [after] if before is None or restarted else [before, after]
    earlier = pages[0] if len(pages) == 2 else None
    found = _from_llamacpp(earlier, after) if after.kind == "llamacpp" else _from_vllm(earlier, after)
    notes = [note for page in (before, after) if page is not None for note in page.notes]
    notes += _remarks(after, found, restarted)
    return replace(
        found, sources=(_source(after, earlier, seconds),), notes=tuple(dict.fromkeys(notes)), restarted=restarted
    )


def _source(after: Page, before: Page | None, seconds: float | None) -> str:
    if before is None:
        return f"one metrics page of {after.kind}, from the start of the server on"
    apart = "" if seconds is None else f", {seconds:.3g} s apart"
    return f"two metrics pages of {after.kind}{apart}"


def _ran_backwards(before: Page, after: Page) -> bool:
    """Whether any counter of requests or tokens is lower than it was."""
    names = ("prompt_tokens_total", "generation_tokens_total", "tokens_predicted_total", "request_success_total")
    for name in names:
        was, now = before.total(name), after.total(name)
        if was is not None and now is not None and now < was:
            return True
    return False


def _remarks(after: Page, found: Facts, restarted: bool) -> Iterator[str]:
    if restarted:
        yield (
            "A counter is lower than at the first read: the server was started again between the two. Only what came "
            "after that is judged; look into its log for why it stopped."
        )
    if after.engines > 1:
        yield f"{after.engines} engines answer here; their numbers are added up, and the fullest KV pool counts."
    if after.kind == "llamacpp":
        yield (
            "llama.cpp's page has no histograms and no KV usage: it tells whether requests wait and how fast tokens "
            "come, not why; its counters of answers move when a request ends. A load test tells more."
        )
    elif any(after.distribution(f"{name}_seconds") is None for name in ("time_to_first_token", "inter_token_latency")):
        yield "The page has no histograms of latency, so I can only say what its gauges and counters show."
    elif not found.begun:
        yield "No request got a first token in this window; what slow requests suffer from shows only under load."
    broken_off = (found.begun or 0) - (found.finished or 0)
    if found.finished is not None and broken_off > 0 and not any((*found.running, *found.waiting)):
        yield (
            f"{broken_off:,.0f} of {found.begun:,.0f} answers began and did not end, and nobody runs: their clients "
            "hung up. No counter shows that, and their times are not in the histograms of finished requests."
        )


@dataclass(frozen=True)
class _Window:
    """Differences between two reads, or since the start."""

    before: Page | None
    after: Page

    def moved(self, name: str, **labels: str) -> float | None:
        """By how much a counter rose."""
        now = self.after.total(name, **labels)
        if now is None or self.before is None:
            return now
        return now - (self.before.total(name, **labels) or 0.0)

    def spread(self, name: str) -> Distribution | None:
        """What a histogram got; None where that is nothing."""
        now = self.after.distribution(name)
        if now is None:
            return None
        gained = now.minus(None if self.before is None else self.before.distribution(name))
        return gained if gained.count > 0 else None

    def levels(self, name: str, *, fullest: bool = False) -> tuple[float, ...]:
        """A gauge at each read."""
        pages = [page for page in (self.before, self.after) if page is not None]
        values = [page.largest(name) if fullest else page.total(name) for page in pages]
        return tuple(value for value in values if value is not None)


def _from_vllm(before: Page | None, after: Page) -> Facts:
    window, whole = _Window(before, after), _Window(None, after)
    ended, began = after.total("e2e_request_latency_seconds_count"), after.total("time_to_first_token_seconds_count")
    queries, hits = (window.moved(f"prefix_cache_{each}_total") for each in ("queries", "hits"))
    caching = after.label("cache_config_info", "enable_prefix_caching")
    return Facts(
        engine=after.kind,
        running=window.levels("num_requests_running"),
        waiting=window.levels("num_requests_waiting"),
        kv_usage=window.levels("kv_cache_usage_perc", fullest=True),
        pool_tokens=_pool_tokens(after),
        block_size=_number(after.label("cache_config_info", "block_size")),
        prefix_caching=None if caching not in ("True", "False") else caching == "True",
        attempts=_attempts(window),
        begun=window.moved("time_to_first_token_seconds_count"),
        finished=window.moved("e2e_request_latency_seconds_count"),
        served=began,
        unfinished=None if ended is None or began is None else began - ended,
        prompt_tokens=window.moved("prompt_tokens_total"),
        output_tokens=window.moved("generation_tokens_total"),
        steps=window.moved("iteration_tokens_total_count"),
        prompts=whole.spread("request_prompt_tokens"),
        answers=whole.spread("request_generation_tokens"),
        ttft=window.spread("time_to_first_token_seconds"),
        queue=window.spread("request_queue_time_seconds"),
        prefill=window.spread("request_prefill_time_seconds"),
        itl=window.spread("inter_token_latency_seconds"),
        preemptions=window.moved("num_preemptions_total"),
        prefix_queries=queries,
        prefix_hits=hits,
        rejections=window.moved("admission_rejections_total"),
        failures=_failures(window),
        drafts=window.moved("spec_decode_num_drafts_total"),
        draft_tokens=window.moved("spec_decode_num_draft_tokens_total"),
        accepted_tokens=window.moved("spec_decode_num_accepted_tokens_total"),
        **_earlier(before),
    )


def _earlier(before: Page | None) -> dict[str, Any]:
    """How the server did before the window: what a window is compared with."""
    if before is None:
        return {}
    itl, steps = before.distribution("inter_token_latency_seconds"), before.total("iteration_tokens_total_count")
    queries, hits = before.total("prefix_cache_queries_total"), before.total("prefix_cache_hits_total")
    known = itl is not None and itl.count > 0
    return {
        "itl_before": itl if known else None,
        "batch_before": itl.count / steps if known and itl is not None and steps else None,
        "hit_rate_before": (hits or 0.0) / queries if queries else None,
    }


def _attempts(window: _Window) -> float | None:
    """Requests by HTTP where they are counted; else those that began."""
    posts = window.moved("http_requests_total", method="POST")
    began = window.moved("time_to_first_token_seconds_count")
    return max(posts or 0.0, began or 0.0) if posts is not None or began is not None else None


def _failures(window: _Window) -> dict[str, float]:
    """By class of status; errors inside a stream count as 2xx there, and as a reason to finish here."""
    kinds = {status: window.moved("http_requests_total", method="POST", status=status) for status in ("4xx", "5xx")}
    kinds["error"] = window.moved("request_success_total", finished_reason="error")
    return {kind: count for kind, count in kinds.items() if count}


def _pool_tokens(page: Page) -> float | None:
    size = _number(page.label("cache_config_info", "kv_cache_size_tokens"))
    blocks, block = (_number(page.label("cache_config_info", each)) for each in ("num_gpu_blocks", "block_size"))
    return size or (blocks * block if blocks and block else None)


def _number(text: str | None) -> float | None:
    """Labels are strings, and may say None."""
    try:
        return float(text or "")
    except ValueError:
        return None


def _from_llamacpp(before: Page | None, after: Page) -> Facts:
    window = _Window(before, after)
    tokens, seconds = window.moved("tokens_predicted_total"), window.moved("tokens_predicted_seconds_total")
    return Facts(
        engine=after.kind,
        running=window.levels("requests_processing"),
        waiting=window.levels("requests_deferred"),
        prompt_tokens=window.moved("prompt_tokens_total"),
        output_tokens=tokens,
        itl=Distribution(tokens, seconds) if tokens and seconds else None,
        drafts=window.moved("spec_decode_num_drafts_total"),
        draft_tokens=window.moved("spec_decode_num_draft_tokens_total"),
        accepted_tokens=window.moved("spec_decode_num_accepted_tokens_total"),
    )


def together(server: Facts, client: Facts) -> Facts:
    """A metrics page and a load test of the same minutes: times and counts of the server, artefacts of the client.

    Args:
        server: from the page.
        client: from the load test.
    """
    only_client = {each.name: getattr(client, each.name) for each in fields(Facts) if _empty(server, each.name)}
    joined = {"sources": server.sources + client.sources, "notes": server.notes + client.notes}
    failures = {"failures": client.failures, "attempts": client.attempts} if client.failures else {}
    return replace(server, **(only_client | joined | failures))


def _empty(facts: Facts, name: str) -> bool:
    value = getattr(facts, name)
    return value is None or value == () or value == {}


def with_hardware(known: Facts, model: str, hardware: str) -> Facts:
    """The same, with what a decode step should take on this hardware.

    Args:
        known: with a batch and a length of prompts.
        model: a preset name.
        hardware: a slug.

    Raises:
        ConfigError: a name is unknown, or the facts have no batch to compute a step of.
    """
    from kvlab.cost import decode_pass, pass_time

    if not known.batch:
        raise ConfigError("--model and --hardware judge the decode step, and nothing decoded here; leave them out")
    context = int((known.mean_prompt or 0) + (known.answers.mean / 2 if known.answers else 0))
    step = decode_pass(context, max(round(known.batch), 1))
    return replace(known, step_floor=pass_time(model, step, hardware).seconds)
