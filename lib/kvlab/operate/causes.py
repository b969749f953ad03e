"""What can be wrong with a server, one rule a cause: read this file from top to bottom to learn the diagnosis.

A rule looks at the :class:`~kvlab.operate.facts.Facts` and says how strong the cause is and what shows it. The strength
is the same for all: the part of their time that the requests lose to the cause, or the part of the requests that it
fails, 0 to 1. Thresholds are ratios, never seconds: they hold for a laptop and for an H100. Where one cause makes
another (a preempted request waits, so preemption looks like a queue), the maker names what it makes in ``makes``.

The flags are those of ``vllm serve`` 0.32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvlab.operate.facts import Facts
from kvlab.operate.prometheus import Distribution


@dataclass(frozen=True)
class Found:
    """What a rule saw.

    Args:
        strength: part of the requests' time, or of the requests, that is lost to it, 0 to 1.
        evidence: sentences with the numbers.
    """

    strength: float
    evidence: tuple[str, ...]


Rule = Callable[[Facts], Found | None]
# Part of the time between tokens that may pass in stalls before anybody is to blame.
_STALLS = 0.12
# Part of what a client measures that is lost at least where streams come in bursts: TTFT too late, ITL too short.
_LOST_IN_BURSTS = 0.5


@dataclass(frozen=True)
class Cause:
    """One thing that can be wrong.

    Args:
        id: its name.
        title: in a sentence.
        when: the rule; None where only an error text shows it.
        check: what to look at next.
        remedy: what to do.
        flags: of ``vllm serve`` that the remedy sets.
        chapter: of the book that explains it.
        makes: causes that this one brings about, and before which it is named.
    """

    id: str
    title: str
    when: Rule | None
    check: str
    remedy: str
    flags: tuple[str, ...] = ()
    chapter: str = "22_troubleshooting"
    makes: tuple[str, ...] = ()


def seconds(value: float) -> str:
    """A time as people read it.

    Args:
        value: in seconds.
    """
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


# --- the wait for the first token ---------------------------------------------------------------------------------


def _queueing(f: Facts) -> Found | None:
    """Requests wait before they are computed.

    Two views. Now: who waits, of those in the house; by Little's law that is the part of their time they lose. Past:
    the queue time of those who finished; it moves at their end, so it is 0 while a new queue grows. A tenth counts. So
    does a queue that is half of the first token and worth ten tokens: then the first token is late, however long the
    answers are. (Real vLLM, healthy: 0.1 % of the time. 12 requests/s where it serves 5: 79 %.)
    """
    queue, ttft = f.queue, f.ttft
    past = f.share(queue.sum) if queue else 0.0
    late = queue and ttft and queue.mean >= 0.5 * ttft.mean and queue.mean >= 10 * (f.typical_gap or 0.0)
    if f.engine is None:
        # A client only estimates the wait: requests of one length that differ threefold did wait.
        estimated = f.queue and f.prefill and f.queue.mean >= 3 * f.prefill.mean and past >= 0.1
        late, past = bool(estimated), past if estimated else 0.0
    if f.waiting_share < 0.1 and past < 0.1 and not late:
        return None
    evidence = []
    if f.waiting_share:
        evidence.append(f"{_levels(f.waiting)} requests wait while {_levels(f.running)} run")
    if queue and ttft and (past >= 0.05 or late):
        evidence.append(
            f"a first token takes {seconds(ttft.mean)} on average, {seconds(queue.mean)} of it in the queue"
        )
    if f.waiting_share and f.kv_usage and max(f.kv_usage) < 0.5 and len(set(f.running)) == 1:
        evidence.append(
            f"the KV pool is {max(f.kv_usage):.0%} full and {f.running[0]:.0f} run at every read: the seats are the "
            "limit (--max-num-seqs), not the memory"
        )
    return Found(max(past, f.waiting_share), tuple(evidence))


def _admission_limit(f: Facts) -> Found | None:
    """The server turns requests away because its queue is full. One is enough: somebody got no answer."""
    busy = sum(count for text, count in f.failure_texts.items() if "cannot accept new requests" in text)
    refused = sum(f.failures.get(kind, 0.0) for kind in ("http-429", "http-503"))
    rejected = max(f.rejections or 0.0, refused, float(busy))
    if not rejected:
        return None
    came = max(f.attempts or 0.0, rejected)
    return Found(rejected / came, (f"{rejected:,.0f} of {came:,.0f} requests were turned away: the queue was full",))


def _long_prefill(f: Facts) -> Found | None:
    """Reading the prompts is what takes the time.

    A first token that takes ten times as long to compute as a later one, and a tenth of the requests' time or more.
    Healthy: 3 to 4 times for 64 tokens on a CPU; on an H100 an 8B model reads about 3,000 tokens in ten decode steps.
    """
    if f.prefill is None or not f.prefill.count:
        return None
    share, gap = f.share(f.prefill.sum), f.typical_gap
    slow = f.prefill.mean >= 10 * gap if gap else (f.mean_prompt or 0) >= 2048
    if not slow or share < 0.1:
        return None
    tokens = f"prompts have {f.mean_prompt:,.0f} tokens on average; " if f.mean_prompt else ""
    beside = f", a later token {seconds(gap)} or less" if gap else ""
    return Found(share, (f"{tokens}reading one takes {seconds(f.prefill.mean)}{beside}",))


def _cold_start(f: Facts) -> Found | None:
    """The first requests after the start pay for compiling, loading and capturing; the others do not.

    Few first tokens since the start; some of them five times as slow as the median at least, with prompts that are
    much alike and no queue to explain it. Or: slower than reading the prompt one token at a time would have been, which
    no prefill is.
    """
    if f.early_ttft is not None and f.late_ttft is not None:
        if f.early_ttft < 5 * f.late_ttft:
            return None
        lost = f.share(3 * (f.early_ttft - f.late_ttft))
        return Found(
            max(lost, 0.05),
            (f"the first three requests took {seconds(f.early_ttft)} to a token, the others {seconds(f.late_ttft)}",),
        )
    if f.ttft is None or f.served is None or f.served > 50 or f.waiting_share:
        return None
    waited = f.queue.sum if f.queue else 0.0
    if waited >= 0.5 * f.ttft.sum:
        return None
    return _slow_beginning(f, f.ttft)


def _slow_beginning(f: Facts, ttft: Distribution) -> Found | None:
    median, top, gap = ttft.bounds(50), ttft.bounds(100), f.typical_gap
    one_by_one = (f.mean_prompt or 0) * gap if gap else 0.0
    seen = f"{f.served:,.0f} first tokens since the start"
    if one_by_one and ttft.mean > 2 * one_by_one and ttft.mean > 10 * (gap or 0):
        text = f"they took {seconds(ttft.mean)} on average, more than reading the prompt token by token would"
        return Found(f.share(ttft.sum), (seen, text))
    alike = f.prompts is not None and _spread(f.prompts) <= 5
    if median and top and alike and top[0] >= 5 * median[1]:
        slow, lost = ttft.above(5 * median[1])
        if slow <= 0.5 * ttft.count and lost >= 0.3 * ttft.sum:
            text = f"{slow:,.0f} of them took {seconds(top[0])} or more, half at most {seconds(median[1])}"
            return Found(f.share(lost), (seen, text))
    return None


# --- the gaps between tokens --------------------------------------------------------------------------------------


def _prefill_interference(f: Facts) -> Found | None:
    """Streams stall while the prompts of others are read in the same steps.

    An eighth of the time between tokens or so passes in gaps of 1.5 typical gaps or more, prompts were read meanwhile,
    and their reading is long enough for it: a second of prefill stalls every stream in the batch for a second, and
    stalls beyond that have another reason, such as preemption. Real vLLM: 0.6 to 5 % healthy, 17 % with prompts of
    1,900 tokens read at once; with a budget of 256 tokens the gaps are shorter, and more. A single step that was slow
    for everybody is no stutter: it takes two stalls a stream.
    """
    edge, n, lost = f.stalls
    read = _read_meanwhile(f, lost)
    if f.itl is None or f.itl.sum <= 0 or read / f.itl.sum < _STALLS or not f.prompt_tokens:
        return None
    if n < 2 * max(f.batch or 1.0, 1.0):
        return None
    typical = f.typical_gap or 0.0
    evidence = [
        f"{n:,.0f} of {f.itl.count:,.0f} gaps between tokens lasted {seconds(edge)} or more, half of them "
        f"{seconds(typical)} or less; at least {f.stall_share:.0%} of the time passed in them"
    ]
    if f.mean_prompt:
        evidence.append(f"meanwhile {f.begun or 0:,.0f} prompts of {f.mean_prompt:,.0f} tokens on average were read")
    return Found(f.share(read), tuple(evidence))


def _read_meanwhile(f: Facts, stalled: float) -> float:
    """Of the seconds in which streams stalled, those that the reading of prompts accounts for: all, if nothing says
    otherwise."""
    if f.prefill is None or not f.prefill.count or f.batch is None:
        return stalled
    return min(stalled, 1.5 * f.prefill.sum * max(f.batch, 1.0))


def _decode_batch_growth(f: Facts) -> Found | None:
    """More requests in a step make every token slower, without any prompt in between.

    Needs something to compare with: the same server with half the batch or less (before the window, or while fewer
    answers streamed in a load test), or a promise that the median answer breaks. The gap must have grown by 60 %: real
    vLLM grows by a third from 1 to 16 on a CPU, and that is a good bargain.
    """
    if f.itl is None or f.stall_share >= _STALLS:
        return None
    few, many, fast, slow = _compared(f)
    if few and many >= 2 * few and slow >= 1.6 * fast:
        text = f"a token takes {seconds(slow)} with {many:.3g} requests in a step, {seconds(fast)} with {few:.3g}"
        return Found(f.share(f.itl.sum * (1 - fast / slow)), (text,))
    median = f.client_tpot.bounds(50) if f.client_tpot else None
    if f.slo_tpot and median and median[0] > f.slo_tpot and (f.batch or many) >= 2:
        over = 1 - f.slo_tpot / median[1]
        text = f"half of the answers take {seconds(median[1])} a token or more, {seconds(f.slo_tpot)} are promised"
        return Found(f.share(f.itl.sum * over), (text, f"{f.batch or many:.3g} requests are in a step"))
    return None


def _compared(f: Facts) -> tuple[float, float, float, float]:
    """The smaller batch and the larger, the gap with the one and with the other."""
    if f.batch_gaps:
        (few, fast), (many, slow) = f.batch_gaps
        return few, many, fast, slow
    if f.itl_before and f.batch_before and f.batch and f.itl:
        return f.batch_before, f.batch, f.itl_before.mean, f.itl.mean
    return 0.0, f.batch or 0.0, 0.0, 0.0


def _speculation_loses(f: Facts) -> Found | None:
    """Drafts cost more than they bring.

    A draft token costs a part of a step, drafted and verified: with less than three in ten kept it does not pay. (Three
    tokens accepted with probability 0.39 each keep 0.2 a token and are slower, vLLM issue 8439; real vLLM with n-grams
    on a text that repeats keeps 0.83.)
    """
    if not f.drafts or f.drafts < 20 or not f.draft_tokens or f.accepted_tokens is None:
        return None
    kept, length = f.accepted_tokens / f.draft_tokens, f.draft_tokens / f.drafts
    if kept >= 0.3:
        return None
    brought = 1 + f.accepted_tokens / f.drafts
    text = f"{kept:.0%} of {f.draft_tokens:,.0f} draft tokens were kept"
    more = f"a step with {length:.3g} drafts yields {brought:.2f} tokens, and 1 without them"
    return Found(0.5 * (1 - kept / 0.3) + 0.05, (text, more))


def _host_overhead(f: Facts) -> Found | None:
    """A step takes far longer than reading its bytes: the host, not the device, sets the pace. Needs the hardware.

    Real servers reach half to four fifths of the bandwidth, so a third of it is not explained by bytes.
    """
    median = f.itl.bounds(50) if f.itl else None
    if f.step_floor is None or f.itl is None or median is None:
        return None
    # The average is exact, but stalls are in it; the median's bucket may begin at 0.
    step = f.itl.mean if f.stall_share < _STALLS else median[0]
    if step < 3 * f.step_floor:
        return None
    text = f"a step takes {seconds(step)}; its bytes need {seconds(f.step_floor)}"
    wasted = f.itl.sum * (1 - f.step_floor / step)
    return Found(f.share(wasted), (text, f"{f.batch or 1:.3g} requests are in a step"))


# --- the KV cache -------------------------------------------------------------------------------------------------


def _preemption(f: Facts) -> Found | None:
    """The KV pool ran out while requests ran: some were thrown out and are computed again.

    vLLM counts a preemption when the request emits its next token, which may be half a minute late. So there is a live
    sign as well: somebody waits, the pool is four fifths full or more, and either requests that had begun do not run,
    or no prompt was read between two reads. A client alone sees it too: gaps within answers that no reading of prompts
    explains, and that last ten times as long as one takes.
    """
    if f.engine is None:
        return _unexplained_stalls(f)
    served = max(f.finished or 0.0, f.begun or 0.0, 1.0)
    counted = (f.preemptions or 0.0) / served
    live = f.waiting_share > 0 and bool(f.kv_usage) and f.kv_usage[-1] >= 0.8
    still = len(f.waiting) == 2 and f.prompt_tokens == 0 and f.evicted is None
    thrown_out = min(f.evicted or 0.0, f.waiting[-1]) if live else 0.0
    if counted < 0.01 and not (live and (still or thrown_out >= 1)):
        return None
    evidence = []
    if counted >= 0.01:
        evidence.append(f"{f.preemptions:,.0f} preemptions for {served:,.0f} requests")
    if live:
        evidence.append(
            f"{_levels(f.waiting)} wait, {_levels(f.running)} run, the pool is {_percents(f.kv_usage)} full"
        )
    if thrown_out:
        evidence.append(f"{thrown_out:,.0f} of those who wait had begun: they were preempted, the counter comes late")
    elif live and still:
        evidence.append("no prompt was read between the two reads, so nobody new came in")
    return Found(max(f.waiting_share, f.share(f.stalls[2]), min(counted / 2, 0.5)), tuple(evidence))


def _unexplained_stalls(f: Facts) -> Found | None:
    edge, n, lost = f.stalls
    longest = f.itl.bounds(100) if f.itl else None
    if longest is None or f.stall_share < _STALLS or not f.prefill or _read_meanwhile(f, lost) >= lost:
        return None
    if longest[1] < 10 * f.prefill.mean:
        return None
    text = (
        f"{n:,.0f} gaps within answers lasted {seconds(edge)} or more, up to {seconds(longest[1])}, and reading a "
        f"prompt takes {seconds(f.prefill.mean)}: the answers were thrown out and computed again, or the network "
        f"stalled"
    )
    return Found(f.share(lost), (text,))


def _kv_pool_nearly_full(f: Facts) -> Found | None:
    """Nine tenths of the KV pool are held: the next long answers will be preempted, or wait."""
    if not f.kv_usage or f.kv_usage[-1] < 0.9:
        return None
    return Found(max(0.1, f.waiting_share), (f"the KV pool is {_percents(f.kv_usage)} full",))


def _prefix_cache_off(f: Facts) -> Found | None:
    """The prefix cache is switched off, and reading prompts takes a seventh of the time, with the stalls that it makes.

    It is on by default, so somebody chose this. Real vLLM, four prompts of 1,130 tokens at once, 1,000 shared: 18 %.
    """
    reading = f.share(f.prefill.sum if f.prefill else None)
    lost = min(reading + f.share(f.stalls[2]), 1.0)
    if f.prefix_caching is not False or lost < 0.15 or not _spans_blocks(f):
        return None
    text = f"enable_prefix_caching is False; reading prompts of {f.mean_prompt:,.0f} tokens takes {reading:.0%} of the"
    return Found(lost, (f"{text} time, and {f.share(f.stalls[2]):.0%} passes in stalls of others",))


def _prefix_cache_useless(f: Facts) -> Found | None:
    """The prefix cache is on and finds nothing, although every prompt is longer than several blocks.

    Eight requests at least, so that they could have shared something; a tenth of the time goes into reading, a quarter
    with the stalls that it makes for others. Less is what reading costs on a healthy server; and where streams lose
    twice as much as those who wait for their prompt, the stalls are the trouble. Prompts that are longer than a step
    holds (2,048 tokens, vLLM's smallest default) are long whoever shares them: then this comes after the length.
    """
    reading = f.share(f.prefill.sum if f.prefill else None)
    if f.prefix_caching is False or f.hit_rate is None or f.hit_rate >= 0.05 or reading < 0.1:
        return None
    stalls = f.share(f.stalls[2])
    lost = min(reading + stalls, 1.0)
    if (f.begun or 0) < 8 or not _spans_blocks(f) or lost < 0.25 or reading < 0.5 * stalls:
        return None
    text = f"{f.prefix_hits or 0:,.0f} of {f.prefix_queries:,.0f} prompt tokens were found ({f.hit_rate:.1%})"
    more = f"prompts have {f.mean_prompt:,.0f} tokens, and reading them takes {reading:.0%} of the time"
    return Found(lost if (f.mean_prompt or 0) <= 2048 else lost / 2, (text, more))


def _spans_blocks(f: Facts) -> bool:
    """Whether prompts are long enough to share whole blocks; vLLM has 128 tokens in one at most (on a CPU)."""
    return (f.mean_prompt or 0) >= 4 * (f.block_size or 128)


def _prefix_cache_leak(f: Facts) -> Found | None:
    """Blocks are held by nobody's requests.

    Nobody runs and nobody waits, and yet a twentieth of the pool is held.
    """
    if not f.kv_usage or not f.running or not f.waiting:
        return None
    if any((*f.running, *f.waiting)):
        return _more_than_requests_hold(f)
    held = min(f.kv_usage)
    if held < 0.05:
        return None
    return Found(held, (f"{_percents(f.kv_usage)} of the KV pool are held, and no request runs or waits",))


def _more_than_requests_hold(f: Facts) -> Found | None:
    """More is held than those who run could fill with the longest prompt and the longest answer that was seen, half as
    much again; and it grows while they do not, or the prefix cache finds less than it did."""
    fell = f.hit_rate is not None and f.hit_rate_before is not None and f.hit_rate < 0.8 * f.hit_rate_before
    grew = f.kv_usage[-1] > f.kv_usage[0] and f.running[-1] <= f.running[0] and not f.waiting[-1]
    if f.prompts is None or f.answers is None or not f.pool_tokens or not (fell or grew):
        return None
    longest = sum(top[1] for each in (f.prompts, f.answers) if (top := each.bounds(100))) + (f.block_size or 16)
    most, tokens = max(f.running) * longest, min(f.kv_usage) * f.pool_tokens
    if min(f.kv_usage) < 0.3 or tokens < 1.5 * most:
        return None
    text = f"{tokens:,.0f} tokens of KV are held by {max(f.running):,.0f} requests of {longest:,.0f} tokens at most"
    evidence = [text]
    if fell:
        evidence.append(f"the hit rate of the prefix cache fell from {f.hit_rate_before:.0%} to {f.hit_rate:.0%}")
    return Found(1 - most / tokens, tuple(evidence))


# --- answers that fail --------------------------------------------------------------------------------------------


def _server_errors(f: Facts) -> Found | None:
    """Requests fail. A failure of the server's own counts from one in a hundred; a bad request (4xx) costs nobody else
    any time, so it counts from one in twenty, and half."""
    came = f.attempts or 0.0
    bad = {kind: n for kind, n in f.failures.items() if kind == "4xx" or kind.startswith("http-4")}
    own = {kind: n for kind, n in f.failures.items() if kind not in bad}
    n_own, n_bad = sum(own.values()), sum(bad.values())
    came = max(came, n_own + n_bad)
    if not came or (n_own < 0.01 * came and n_bad < 0.05 * came):
        return None
    kinds = ", ".join(f"{n:,.0f} {kind}" for kind, n in sorted(f.failures.items(), key=lambda each: -each[1]))
    return Found((n_own + n_bad / 2) / came, (f"{n_own + n_bad:,.0f} of {came:,.0f} requests failed: {kinds}",))


def _context_overflow(f: Facts) -> Found | None:
    """Answers end at the limit of the context, shorter than asked: vLLM answers 200 and says ``length``."""
    if not f.capped or not f.attempts:
        return None
    text = f"{f.capped:,.0f} answers ended by length before they had the tokens that were asked for"
    return Found(f.capped / f.attempts, (text,))


# --- what is not the server's fault -------------------------------------------------------------------------------


def _client_lag(f: Facts) -> Found | None:
    """The client is the bottleneck: it sends late, or first tokens lie about between the server and it.

    A fifth of the first token's time. A client and its server differ by a few milliseconds on one machine; so half of
    the time between them counts only where it is also worth five tokens.
    """
    if lag := _spoiling_lag(f):
        text = f"requests left {seconds(lag.mean)} after they were meant to, on average"
        # Whoever sends late reads late: then its streams come in bursts, and no proxy is needed for that.
        if f.buffered:
            return Found(max(f.share(lag.sum), _LOST_IN_BURSTS), (text, f.buffered))
        return Found(f.share(lag.sum), (text,))
    if f.engine and f.client_ttft and f.ttft:
        between = f.client_ttft.mean - f.ttft.mean
        if between >= 0.5 * f.client_ttft.mean and between >= 5 * (f.typical_gap or 0):
            text = (
                f"a first token takes {seconds(f.client_ttft.mean)} at the client, {seconds(f.ttft.mean)} at the server"
            )
            return Found(f.share(between * f.client_ttft.count), (text,))
    return None


def _spoiling_lag(f: Facts) -> Distribution | None:
    """The send lag, where requests leave late enough to spoil the first token's time."""
    if f.send_lag and f.client_ttft and 0 < f.send_lag.mean >= 0.2 * f.client_ttft.mean:
        return f.send_lag
    return None


def _buffering_proxy(f: Facts) -> Found | None:
    """Tokens arrive in bursts: something between server and client holds the stream back.

    The load test sees it in the rhythm of the chunks (:mod:`kvlab.operate.artefacts`); a server that puts several
    tokens into a chunk keeps a rhythm. It spoils every time that a client measures: half is lost, or what the server
    says. A client that sends late reads in bursts itself.
    """
    if f.buffered is None or _spoiling_lag(f):
        return None
    evidence, lost = [f.buffered], _LOST_IN_BURSTS
    if f.engine and f.client_ttft and f.ttft:
        lost = max(lost, 1 - f.ttft.mean / f.client_ttft.mean)
        evidence.append(f"a first token takes {seconds(f.client_ttft.mean)} here, {seconds(f.ttft.mean)} at the server")
    return Found(lost, tuple(evidence))


def _slow_client(f: Facts) -> Found | None:
    """The server has given tokens faster than the client took them. Needs both sides."""
    if f.engine is None or f.client_tpot is None or f.itl is None or not f.itl.count:
        return None
    if f.client_tpot.mean < 1.5 * f.itl.mean:
        return None
    text = f"a token takes {seconds(f.client_tpot.mean)} at the client and {seconds(f.itl.mean)} at the server"
    return Found(1 - f.itl.mean / f.client_tpot.mean, (text,))


def _levels(values: tuple[float, ...]) -> str:
    """Of a gauge, at each read."""
    return " then ".join(dict.fromkeys(f"{value:,.0f}" for value in values))


def _percents(values: tuple[float, ...]) -> str:
    return " then ".join(dict.fromkeys(f"{value:.0%}" for value in values))


def _spread(values: Distribution) -> float:
    """How much larger the largest is than the median, at least."""
    top, median = values.bounds(100), values.bounds(50)
    return top[0] / median[1] if top and median and median[1] > 0 else 1.0


_TIMES_OF_A_CLIENT = ("queueing", "long-prefill", "prefill-interference", "cold-start", "decode-batch-growth")

#: Of two that are equally strong the one that stands first here is named first.
CAUSES: tuple[Cause, ...] = (
    Cause(
        "queueing",
        "Requests wait in the queue before their prompt is read",
        _queueing,
        "Does the queue grow while the rate stays the same? Then more comes than the server can do; no setting helps.",
        "Send less at once, or add replicas. Where seats are the limit and the KV pool has room, raise --max-num-seqs: "
        "each step then serves more. Put a limit on the queue, so that late answers are refused instead of computed.",
        ("--max-num-seqs", "--max-num-queued-reqs", "--data-parallel-size"),
        "12_batching",
    ),
    Cause(
        "admission-limit",
        "The server refuses requests because its queue is full",
        _admission_limit,
        "vllm:admission_rejections_total by reason. A stream that had begun gets its refusal inside a 200 answer.",
        "Let clients retry with growing pauses; raise the limit only if waiting longer is worth it to them, otherwise "
        "add replicas. Long prompts have a limit of their own, in tokens.",
        ("--max-num-queued-reqs", "--max-num-queued-tokens"),
        "20_load_testing",
        ("queueing", "server-errors"),
    ),
    Cause(
        "prefix-cache-off",
        "The prefix cache is switched off, and prompts are read whole every time",
        _prefix_cache_off,
        "Do prompts share a beginning, such as a system prompt, few-shot examples or earlier turns?",
        "Switch it on; it is on by default, and costs next to nothing where nothing is shared.",
        ("--enable-prefix-caching",),
        "13_paged_kv",
        ("long-prefill", "prefill-interference"),
    ),
    Cause(
        "prefix-cache-useless",
        "The prefix cache finds nothing: every prompt is read from its first token",
        _prefix_cache_useless,
        "Compare two prompts token by token: a date, a user's name or an id at the front makes all that follows new. "
        "Only whole blocks are shared.",
        "Put what is the same first and what differs last; send the turns of a conversation to the same replica. If "
        "the prompts have nothing in common, the cache cannot help: shorten them, or spread the reading.",
        ("--enable-prefix-caching", "--block-size"),
        "13_paged_kv",
        ("prefill-interference",),
    ),
    Cause(
        "long-prefill",
        "Reading the prompts takes the time: they are long",
        _long_prefill,
        "request_prefill_time_seconds against request_prompt_tokens: is the time in proportion to the tokens?",
        "Send shorter prompts; put what they share first, so that the prefix cache has it; raise the token budget of a "
        "step if streams can bear the longer gaps; spread the model over more devices.",
        ("--max-num-batched-tokens", "--tensor-parallel-size"),
        "14_chunked_prefill",
    ),
    Cause(
        "prefill-interference",
        "Streams stutter: they stall while prompts of others are read",
        _prefill_interference,
        "Do the long gaps fall together with first tokens of long prompts? iteration_tokens_total books a prompt "
        "whole.",
        "Lower the token budget of a step: gaps become shorter and first tokens of long prompts later. Cap what one "
        "long prompt may take of a step. With much of both kinds, read prompts on other replicas than decode.",
        ("--max-num-batched-tokens", "--long-prefill-token-threshold", "--kv-transfer-config"),
        "14_chunked_prefill",
    ),
    Cause(
        "decode-batch-growth",
        "Every token is slower because more requests share each step",
        _decode_batch_growth,
        "inter_token_latency_seconds against num_requests_running over time; throughput should have grown with it.",
        "If the streams are too slow for their readers, lower --max-num-seqs: fewer share a step, more wait. Fewer "
        "bytes a step help as well: quantized weights for short contexts, a quantized KV cache for long ones.",
        ("--max-num-seqs", "--kv-cache-dtype", "--quantization"),
        "12_batching",
    ),
    Cause(
        "preemption",
        "The KV pool is too small: running requests are thrown out and computed again",
        _preemption,
        "num_preemptions_total (it comes late), and gaps of seconds within an answer while the median looks good.",
        "Let fewer run at once, or make the pool larger: a larger memory fraction, a narrower KV format, a smaller "
        "--max-model-len if the profile needs less then, more devices. --watermark keeps some blocks free at "
        "admission.",
        ("--max-num-seqs", "--gpu-memory-utilization", "--kv-cache-dtype", "--watermark", "--tensor-parallel-size"),
        "13_paged_kv",
        ("queueing", "kv-pool-nearly-full", "prefill-interference", "decode-batch-growth"),
    ),
    Cause(
        "kv-pool-nearly-full",
        "The KV pool is nearly full",
        _kv_pool_nearly_full,
        "Do preemptions follow, and do requests wait while seats are free? Compare pool tokens with what requests "
        "need.",
        "Make the pool larger or let fewer run: a larger memory fraction, a narrower KV format, a lower "
        "--max-num-seqs.",
        ("--gpu-memory-utilization", "--kv-cache-dtype", "--max-num-seqs"),
        "13_paged_kv",
        ("queueing",),
    ),
    Cause(
        "cold-start",
        "The first requests after the start are slow: kernels are compiled and loaded on first use",
        _cold_start,
        "Send the same request again: is it fast now? Leave the first ones out of every measurement.",
        "Warm up with requests of the real shapes before the server gets traffic, and let the readiness probe wait for "
        "that; keep the compile cache between starts.",
        ("--optimization-level",),
        "20_load_testing",
        ("queueing", "long-prefill", "prefill-interference", "prefix-cache-useless"),
    ),
    Cause(
        "prefix-cache-leak",
        "Blocks of the KV pool are held by no request: something does not give them back",
        _prefix_cache_leak,
        "Does kv_cache_usage_perc go back to 0 when nobody runs? Which requests ended when it rose: aborted ones?",
        "Start the server again to get the blocks back, and report it with the kind of requests that ended badly; "
        "until it is repaired, switch off what holds the blocks.",
        ("--no-enable-prefix-caching",),
        "13_paged_kv",
        ("kv-pool-nearly-full", "preemption", "queueing", "prefix-cache-useless"),
    ),
    Cause(
        "speculation-loses",
        "Speculative decoding loses: too few draft tokens are kept",
        _speculation_loses,
        "spec_decode_num_accepted_tokens_per_pos_total: which positions of a draft are still worth drafting?",
        "Draft fewer tokens, use a draft that knows the text better, or switch it off; with a full batch it loses "
        "sooner.",
        ("--speculative-config", "--spec-tokens"),
        "15_speculative_decoding",
    ),
    Cause(
        "host-overhead",
        "Steps take far longer than their bytes need: the host sets the pace",
        _host_overhead,
        "A profile of one step: are there gaps between the kernels? Does a batch of 16 take as long as one of 1?",
        "Let the engine capture and compile (no --enforce-eager), keep its CPU cores free, and schedule ahead of the "
        "device.",
        ("--async-scheduling", "--optimization-level", "--api-server-count"),
        "09_profiling",
    ),
    Cause(
        "server-errors",
        "Requests fail",
        _server_errors,
        "The bodies of the answers say why: a prompt too long and an unknown model are 400 and 404. Errors inside a "
        "stream are counted as 2xx, and refused requests never reach the vllm: counters.",
        "Give one of the messages to kvlab diagnose --error. 5xx: read the log of the server from its first traceback.",
        ("--enable-log-requests",),
        "21_observability",
    ),
    Cause(
        "context-overflow",
        "Prompt and answer together are longer than the context",
        _context_overflow,
        "usage.completion_tokens against max_tokens: an answer may be cut silently and end with finish_reason length.",
        "Ask for at most --max-model-len minus the prompt; shorten the prompt; raise --max-model-len if the model and "
        "the KV pool allow it.",
        ("--max-model-len",),
        "06_counting",
        ("server-errors",),
    ),
    Cause(
        "client-lag",
        "The client is late: the time is lost before the server has the request, or after it has answered",
        _client_lag,
        "The send lag of the load test, the CPU of the client, the size of its connection pool.",
        "Use a client that can hold so many connections, or several; do not tokenize in the loop that sends; measure "
        "near the server.",
        (),
        "20_load_testing",
        _TIMES_OF_A_CLIENT,
    ),
    Cause(
        "buffering-proxy",
        "A proxy between server and client holds the stream back and lets it through in bursts",
        _buffering_proxy,
        "Ask the server without the proxy: do the bursts go away?",
        "Switch buffering off for this route (nginx: proxy_buffering off, or the header X-Accel-Buffering: no), and "
        "compression as well.",
        ("--sse-keep-alive-interval",),
        "20_load_testing",
        (*_TIMES_OF_A_CLIENT, "client-lag", "slow-client"),
    ),
    Cause(
        "slow-client",
        "The client takes the tokens more slowly than the server gives them",
        _slow_client,
        "Does the client do work between two reads, such as drawing or storing?",
        "Read the stream in a loop of its own and do the work elsewhere; --stream-interval sends fewer, larger chunks.",
        ("--stream-interval",),
        "20_load_testing",
        _TIMES_OF_A_CLIENT,
    ),
    # What only the text of an error shows: see kvlab.operate.error_texts.
    Cause(
        "weights-out-of-memory",
        "The weights do not fit, or leave no room for the KV pool",
        None,
        "Bytes of the weights (parameters times bytes each, over the devices) against the memory of one device.",
        "Use fewer bytes a weight, more devices, or a smaller model. A larger memory fraction helps where a little is "
        "missing; it does not shrink the weights.",
        ("--tensor-parallel-size", "--quantization", "--gpu-memory-utilization"),
        "06_counting",
    ),
    Cause(
        "activations-out-of-memory",
        "Memory ran out while computing: the pool left too little for activations",
        None,
        "How many tokens a step may have, and how large the logits are: positions x vocabulary x 4 bytes.",
        "Lower the memory fraction, so that more is left beside the pool, or the tokens and requests of a step. This "
        "is the opposite of what a failed start needs.",
        ("--gpu-memory-utilization", "--max-num-batched-tokens", "--max-num-seqs"),
        "06_counting",
    ),
    Cause(
        "max-model-len-over-pool",
        "The KV pool cannot hold a single request of the greatest length",
        None,
        "Pool tokens = blocks x block size; one request of --max-model-len must fit.",
        "Lower --max-model-len (answers to shorter requests stay the same), or make the pool larger: a larger memory "
        "fraction, a narrower KV format, more devices.",
        ("--max-model-len", "--gpu-memory-utilization", "--kv-cache-dtype", "--tensor-parallel-size"),
        "13_paged_kv",
    ),
    Cause(
        "quantization-flag",
        "The quantization flag does not describe this checkpoint",
        None,
        "quantization_config in the checkpoint's config.json: --quantization says what is there, it does not quantize.",
        "Leave --quantization out, and vLLM reads it from the checkpoint; for 4 bits take a checkpoint that was "
        "quantized so; to quantize a 16-bit one while it loads, name one of the online methods.",
        ("--quantization",),
        "10_weight_quantization",
    ),
    Cause(
        "memory-taken",
        "Somebody else holds memory of the device",
        None,
        "nvidia-smi: which processes hold it? Engine processes outlive a server that was killed.",
        "End the process that holds it (after a kill -9 the engine's workers live on), or lower the memory fraction.",
        ("--gpu-memory-utilization",),
        "06_counting",
    ),
    Cause(
        "dtype-unsupported",
        "The device has no bfloat16",
        None,
        "Its compute capability: bfloat16 needs 8.0 (Ampere). A T4 has 7.5 and a V100 7.0.",
        "Use --dtype float16.",
        ("--dtype",),
        "08_on_the_gpu",
    ),
    Cause(
        "heads-not-divisible",
        "The heads cannot be split over so many devices",
        None,
        "num_attention_heads in config.json, and its divisors.",
        "Choose a tensor parallel size that divides the heads, and use the other devices for pipeline or data "
        "parallel.",
        ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"),
        "19_engines",
    ),
    Cause(
        "model-not-found",
        "There is no model of this name here, or it may not be read",
        None,
        "GET /v1/models lists the names that the server answers to; a gated repository needs a token.",
        "Give the name as the server or the Hub has it; for a gated model accept its terms and set HF_TOKEN; offline, "
        "give the path of a local folder.",
        ("--served-model-name",),
        "19_engines",
    ),
    Cause(
        "port-in-use",
        "The port is taken",
        None,
        "Which process listens there: ss -ltnp. A server that was killed may have left one.",
        "Stop that process, or choose another port.",
        ("--port",),
        "19_engines",
    ),
    Cause(
        "command-line",
        "The command line is not what it looks like",
        None,
        "A backslash continues a line only as its last character: with a blank or a comment after it the command ends "
        "there, and the rest is another command.",
        "Put comments on lines of their own above the command, and write every flag as vllm serve --help=all has it.",
        (),
        "19_engines",
    ),
)


def cause(id: str) -> Cause:
    """A cause by its name.

    Args:
        id: one of those in ``CAUSES``.
    """
    return _BY_ID[id]


_BY_ID = {each.id: each for each in CAUSES}
