"""What a load test found: figures, warnings, and forms to keep them in."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import kvlab
from kvlab.errors import MeasureError, one_line
from kvlab.operate.artefacts import Caution, cautions
from kvlab.operate.record import Record
from kvlab.timing import figures, goodput, pooled_itl

KIND, VERSION = "kvlab-loadtest", 1


@dataclass(frozen=True)
class LoadTestResult:
    """Everything that a load test found.

    Args:
        settings: what was sent to whom.
        records: one a request that was sent, in the order in which they were due.
        interrupted: the run ended before everything was sent and answered.
        loop_lags: how late the client's own event loop woke up, in seconds, again and again during the run.
    """

    settings: Mapping[str, Any]
    records: list[Record]
    interrupted: bool = False
    loop_lags: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From the start of the run to the end of its last request."""
        return max((record.end_s for record in self.records if record.end_s is not None), default=0.0)

    @property
    def completed(self) -> list[Record]:
        """The requests that were answered to the end: latencies are of these alone."""
        return [record for record in self.records if record.completed]

    def report(self) -> dict[str, Any]:
        """All figures: seconds, tokens, requests; latencies None where nothing came to its end.

        Latencies are of the requests that were answered to the end; tokens are of all. Prompt tokens count where an
        answer began. Goodput counts requests that were answered to the end within what was promised.
        """
        records, good, seconds = self.records, self.completed, self.seconds
        slo = {"ttft_s": self.settings.get("slo_ttft_s"), "tpot_s": self.settings.get("slo_tpot_s")}
        rate = 1 / seconds if seconds else 0.0
        return {
            "ttft_s": figures(_known(record.ttft for record in good)),
            "tpot_s": figures(_known(record.tpot for record in good)),
            "itl_s": figures(pooled_itl([record.times for record in good])),
            "e2e_s": figures(_known(record.e2e for record in good)),
            "send_lag_s": figures(_known(record.send_lag for record in records)),
            "loop_lag_s": figures(self.loop_lags),
            "requests": len(records),
            "completed": len(good),
            "failed": len(records) - len(good),
            "requests_per_s": len(good) * rate,
            "prompt_tokens_per_s": sum(_prompt_tokens(record) for record in records) * rate,
            "output_tokens_per_s": sum(record.output_tokens for record in records) * rate,
            "goodput_per_s": goodput(good, seconds, ttft=slo["ttft_s"], tpot=slo["tpot_s"]) if seconds else 0.0,
            "slo": slo,
            "errors": dict(Counter(record.error.kind for record in records if record.error).most_common()),
            "finish_reasons": dict(Counter(r.finish_reason for r in records if r.finish_reason).most_common()),
        }

    def warnings(self) -> list[Caution]:
        """What in these figures is not the server's doing, or not what it seems."""
        return cautions(self.settings, self.records, self.loop_lags, interrupted=self.interrupted)

    def to_json(self) -> dict[str, Any]:
        """Everything, as a JSON object."""
        return {
            "kind": KIND,
            "version": VERSION,
            "kvlab": kvlab.__version__,
            "settings": dict(self.settings),
            "interrupted": self.interrupted,
            "seconds": self.seconds,
            "figures": self.report(),
            "warnings": [{"kind": each.kind, "message": each.message} for each in self.warnings()],
            "requests": [record.to_json() for record in self.records],
        }

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """From the JSON object of :meth:`to_json`; figures and warnings are computed anew.

        Args:
            data: the object.

        Raises:
            MeasureError: it is no result of a load test, or of another version.
        """
        if not isinstance(data, dict) or (data.get("kind"), data.get("version")) != (KIND, VERSION):
            raise MeasureError(f"this is no {KIND} of version {VERSION}; write one with: kvlab loadtest --json")
        try:
            records = [Record.from_json(each) for each in data["requests"]]
            return cls(data["settings"], records, data["interrupted"])
        except (KeyError, TypeError) as failure:
            raise MeasureError(f"a part of this {KIND} is missing or wrong: {one_line(failure)}") from None

    def markdown(self) -> str:
        """A report for people."""
        return "\n".join(_markdown(self)) + "\n"

    def save(self, folder: Path) -> list[Path]:
        """Write ``loadtest.json``, ``loadtest.md`` and the figures, each whole or not at all.

        Args:
            folder: is made where it does not exist; files in it are replaced.

        Returns:
            What was written.

        Raises:
            MeasureError: the folder cannot be written to, or matplotlib is not installed; what came before is written.
        """
        from kvlab.operate.pictures import pictures

        try:
            folder.mkdir(parents=True, exist_ok=True)
            written = [_put(folder / "loadtest.json", json.dumps(self.to_json(), indent=1).encode())]
            written.append(_put(folder / "loadtest.md", self.markdown().encode()))
            written += [_put(folder / name, image) for name, image in pictures(self)]
        except OSError as failure:
            raise MeasureError(f"{folder} cannot be written to: {one_line(failure)}") from None
        return written


def _known(values: Iterator[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _prompt_tokens(record: Record) -> int:
    if not record.chunks_s:
        return 0
    return record.asked_prompt_tokens if record.prompt_tokens is None else record.prompt_tokens


def _put(path: Path, data: bytes) -> Path:
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_bytes(data)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def headline(settings: Mapping[str, Any]) -> str:
    """What was sent to whom, in a line.

    Args:
        settings: of the result.
    """
    what, loop = settings["trace"] or settings["workload"], "as recorded"
    if settings["concurrency"]:
        loop = f"{settings['concurrency']} at a time"
    elif settings["rate"]:
        loop = f"{settings['rate']:g}/s"
    return f"{settings['model']} at {settings['url']}, {settings['endpoint']}, {what}, {loop}"


def lines(result: LoadTestResult) -> Iterator[str]:
    """What a table of latencies has no room for, a line each.

    Args:
        result: of a load test.
    """
    found = result.report()
    if found["failed"]:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in found["errors"].items())
        yield f"FAILED: {found['failed']:,} of {found['requests']:,} requests ({kinds}); latencies are of the others"
        for kind in found["errors"]:
            record = next(record for record in result.records if record.error and record.error.kind == kind)
            yield f"{kind}, such as request {record.id}: {record.error.message if record.error else ''}"
    finished = ", ".join(f"{count:,} {reason}" for reason, count in found["finish_reasons"].items()) or "none"
    came = f"{found['requests']:,} in {result.seconds:,.1f} s, {found['completed']:,} completed"
    yield f"requests: {came}; finish reasons: {finished}"
    yield (
        f"throughput: {found['prompt_tokens_per_s']:,.0f} prompt tokens/s in, "
        f"{found['output_tokens_per_s']:,.0f} tokens/s out, {found['requests_per_s']:,.2f} requests/s"
    )
    promised = [f"{name[:4].upper()} {limit:g} s" for name, limit in found["slo"].items() if limit is not None]
    if promised:
        yield f"goodput: {found['goodput_per_s']:,.2f} requests/s within {' and '.join(promised)}"


#: The latencies of a report, and what each is, in words.
LATENCIES = {
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "itl_s": "ITL",
    "e2e_s": "E2E",
    "send_lag_s": "send lag",
}


_FOOTNOTE = (
    "Latencies count from the moment a request was due. TTFT: first chunk with anything generated. TPOT:",
    "(E2E - TTFT) / (n - 1), n by the server's count. ITL: gaps between chunks that carry tokens, of all requests",
    "together. Send lag: how late the client sent.",
)


def _markdown(result: LoadTestResult) -> Iterator[str]:
    columns = ("mean", "p50", "p90", "p95", "p99", "max")
    yield f"# Load test: {headline(result.settings)}"
    yield ""
    if result.interrupted:
        yield "**Interrupted: this is a part of what was asked for.**"
        yield ""
    yield f"| milliseconds | {' | '.join(columns)} |"
    yield f"|---|{'--:|' * len(columns)}"
    found = result.report()
    for name, title in LATENCIES.items():
        row = found[name]
        shown = (f"{row[each] * 1e3:,.1f}" if row else "-" for each in columns)
        yield f"| {title} | {' | '.join(shown)} |"
    yield ""
    yield from (f"- {line}" for line in lines(result))
    yield from (f"- **{each.kind}**: {each.message}" for each in result.warnings())
    yield ""
    yield from _FOOTNOTE
