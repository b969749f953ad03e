"""What a run against a real server has to show: from records, pages and reports to lines that pass or fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rounds import Figures

from kvlab.operate.prometheus import Page
from kvlab.operate.report import LoadTestResult
from kvlab.serving.workload import Arrival

#: Medians of two clients of the same server may differ by this part.
TOLERANCE = 0.10
#: What a server counts, by the name that a client has for it.
_COUNTERS = {
    "requests": "request_success_total",
    "prompt_tokens": "prompt_tokens_total",
    "output_tokens": "generation_tokens_total",
}


@dataclass(frozen=True)
class Check:
    """A line of the table.

    Args:
        scene: where it belongs.
        asked: what has to hold.
        found: what was found, in words.
        passed: whether it holds.
        figures: the numbers.
    """

    scene: str
    asked: str
    found: str
    passed: bool
    figures: Figures = field(default_factory=dict)


def times_of_loadtests(results: Sequence[LoadTestResult]) -> dict[str, list[float]]:
    """TTFT and TPOT in seconds of every request that was answered to its end, all rounds together.

    Args:
        results: of ``kvlab loadtest``, one a round.
    """
    good = [record for result in results for record in result.completed]
    return {
        "ttft_s": [record.ttft for record in good if record.ttft is not None],
        "tpot_s": [record.tpot for record in good if record.tpot is not None],
    }


def times_of_benches(results: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The same as ``vllm bench serve`` measured it: TPOT is (latency - TTFT) / (tokens - 1), a value a request.

    Args:
        results: its JSON with ``--save-detailed``, one a round.
    """
    found: dict[str, list[float]] = {"ttft_s": [], "tpot_s": []}
    for result in results:
        found["ttft_s"] += result["ttfts"]
        rows = zip(result["latencies"], result["ttfts"], result["output_lens"], strict=True)
        found["tpot_s"] += [(latency - ttft) / (tokens - 1) for latency, ttft, tokens in rows if tokens > 1]
    return found


def agreement(
    scene: str,
    ours: Mapping[str, Sequence[float]],
    theirs: Mapping[str, Sequence[float]],
) -> list[Check]:
    """Whether the medians of two clients of the same server are near each other.

    Args:
        scene: where it belongs.
        ours: from :func:`times_of_loadtests`.
        theirs: from :func:`times_of_benches`.
    """
    checks = []
    for name, title in (("ttft_s", "TTFT"), ("tpot_s", "TPOT")):
        asked = f"median {title} within {TOLERANCE:.0%} of vllm bench serve"
        if not ours[name] or not theirs[name]:
            checks.append(Check(scene, asked, "one of the two measured nothing", False))
            continue
        a, b = median(ours[name]), median(theirs[name])
        found = f"{a * 1e3:.1f} ms against {b * 1e3:.1f} ms: {a / b - 1:+.1%}"
        figures = {"ours_s": a, "theirs_s": b, "requests": [len(ours[name]), len(theirs[name])]}
        checks.append(Check(scene, asked, found, abs(a / b - 1) <= TOLERANCE, figures))
    return checks


def counted(scene: str, results: Sequence[LoadTestResult], pages: Sequence[tuple[Page, Page]]) -> Check:
    """Whether client and server count the same requests and tokens: nothing lost, nothing twice.

    Args:
        scene: where it belongs.
        results: of load tests that sent nothing else, not even a warm-up.
        pages: of the server, before and after each of them.
    """
    client, server = dict.fromkeys(_COUNTERS, 0), dict.fromkeys(_COUNTERS, 0)
    sent = sum(len(result.records) for result in results)
    for result in results:
        client["requests"] += len(result.completed)
        client["prompt_tokens"] += sum(record.prompt_tokens or 0 for record in result.records)
        client["output_tokens"] += sum(record.output_tokens for record in result.records)
    for before, after in pages:
        for name, counter in _COUNTERS.items():
            server[name] += round((after.total(counter) or 0.0) - (before.total(counter) or 0.0))
    found = "; ".join(f"{name.replace('_', ' ')} {client[name]:,} = {server[name]:,}" for name in _COUNTERS)
    same = client == server and client["requests"] == sent
    asked = "client's counts equal the server's counters, every request answered"
    return Check(scene, asked, found if same else found.replace("=", "/"), same, {"client": client, "server": server})


def named(scene: str, when: str, reports: Sequence[Mapping[str, Any]], cause: str | None) -> Check:
    """Whether the first cause of one of the diagnoses is the right one.

    Args:
        scene: where it belongs.
        when: they were made, in words.
        reports: of ``kvlab diagnose --json``.
        cause: id; None where nothing is wrong.
    """
    causes = [[finding["cause"] for finding in report["causes"]] for report in reports]
    firsts = [names[0] if names else None for names in causes]
    found = "; ".join(", ".join(names) or "nothing is wrong" for names in causes)
    asked = f"diagnosis {when}: {cause + ' first' if cause else 'nothing is wrong'}"
    evidence = [finding["evidence"] for report in reports for finding in report["causes"][:1]]
    return Check(scene, asked, found, cause in firsts, {"causes": causes, "evidence": evidence})


def findable(arrivals: Sequence[Arrival]) -> float:
    """Part of all prompt tokens that an earlier request of the same run had at the front of its prompt.

    Args:
        arrivals: the requests, in order.
    """
    seen: set[int] = set()
    again = 0
    for arrival in arrivals:
        again += arrival.system_tokens if arrival.system in seen else 0
        seen.add(arrival.system)
    return again / sum(arrival.prompt_tokens for arrival in arrivals)


def told(scene: str, result: Mapping[str, Any], requests: int) -> list[Check]:
    """Whether the report of a run whose server was killed has every request, and says what became of each.

    Args:
        scene: where it belongs.
        result: of ``kvlab loadtest --json``.
        requests: that were to be sent.
    """
    figures, records = result["figures"], result["requests"]
    silent = [each["id"] for each in records if not each["error"] and not each["finish_reason"]]
    whole = len(records) == requests == figures["completed"] + figures["failed"] and not silent
    words = f"{len(records)} of {requests} requests: {figures['completed']} completed, {figures['failed']} failed"
    kinds = figures["errors"]
    cut = [each for each in records if each["error"] and each["error"]["kind"] == "closed" and each["chunks_s"]]
    lost = f"{len(cut)} of them after their first tokens, which were kept"
    said = f"{', '.join(f'{count} {kind}' for kind, count in kinds.items())}; {lost}" if kinds else "nothing failed"
    right = bool(cut) and set(kinds) <= {"closed", "refused"} and sum(kinds.values()) == figures["failed"]
    return [
        Check(scene, "the report has every request, completed or failed", words, whole, {"errors": kinds}),
        Check(scene, "it says what failed: answers cut short, then refused connections", said, right),
    ]


def failed(scene: str, why: str) -> Check:
    """A line for a scene that could not be played to its end.

    Args:
        scene: which.
        why: in one line.
    """
    return Check(scene, "the scene is played to its end", why, False)
