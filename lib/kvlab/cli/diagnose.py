"""``kvlab diagnose``: what ails a server, and what to do about it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlab.cli.app import app, teller
from kvlab.errors import ConfigError, MeasureError

if TYPE_CHECKING:
    from kvlab.operate.diagnose import Diagnosis, Finding
    from kvlab.operate.facts import Facts

_URL = typer.Option(help="Of a metrics page, such as `http://localhost:8000/metrics`: read twice.")
_FILE = typer.Option(help="A metrics page that was stored. Given twice: an earlier one and a later one.")
_ERROR = typer.Option(help="Text of an error, or a whole log; `-` reads it from standard input.")


@app.command()
def diagnose(
    url: Annotated[str | None, _URL] = None,
    seconds: Annotated[float, typer.Option(help="With `--url`: between the two reads; 0 reads once.")] = 10.0,
    file: Annotated[list[Path] | None, _FILE] = None,
    loadtest: Annotated[Path | None, typer.Option(help="What `kvlab loadtest --json` wrote.")] = None,
    error: Annotated[str | None, _ERROR] = None,
    model: Annotated[str | None, typer.Option(help="With `--hardware`: a preset; judges the decode step.")] = None,
    hardware: Annotated[str | None, typer.Option(help="With `--model`: a preset, such as `h100-sxm`.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Say what ails a server: ranked causes, each with its evidence, what to check next, the remedy and the chapter.

    From a metrics page (vLLM's, llama.cpp's, or of the engine of this library), from the result of a load test, from
    both (only both tell a slow client or a proxy from a slow server), or from the text of an error. It says that
    nothing is wrong where nothing is. Exit code 0 when it could look, 2 when it could not.

    Examples:

    - `kvlab diagnose --url http://localhost:8000/metrics --seconds 30`
    - `kvlab diagnose --file before.prom --file after.prom --loadtest result.json`
    - `vllm serve MODEL 2>&1 | tee log; kvlab diagnose --error - < log`
    """
    from kvlab.operate import diagnose as doctor

    if error is not None:
        if url or file or loadtest or model or hardware:
            raise ConfigError("--error stands alone: the text says everything; leave the other options out")
        found = doctor.diagnose_error(sys.stdin.read() if error == "-" else error)
    else:
        known = _facts(url, seconds, file or [], loadtest)
        found = doctor.diagnose(_judged(known, model, hardware))
    print(json.dumps(found.report())) if as_json else _print(found)


def _facts(url: str | None, seconds: float, files: list[Path], loadtest: Path | None) -> Facts:
    from kvlab.operate.facts import together

    if (url is not None and files) or not (url or files or loadtest):
        raise ConfigError("give --url, or --file (once or twice), or --loadtest beside them or alone, or --error")
    client = None if loadtest is None else _of_client(loadtest)
    server = _of_server(url, seconds, files) if url or files else None
    if server and client:
        return together(server, client)
    found = server or client
    assert found is not None
    return found


def _of_server(url: str | None, seconds: float, files: list[Path]) -> Facts:
    from kvlab.operate.facts import facts
    from kvlab.operate.prometheus import read_page
    from kvlab.operate.scrape import address_of, scrape, watch
    from kvlab.timing import Clock

    if url is not None:
        clock, address = Clock(), address_of(url)
        return watch(lambda: scrape(address, clock), seconds, clock, teller())
    if len(files) > 2:
        raise ConfigError(f"{len(files)} files; give an earlier and a later read of the same server, or one")
    pages = [read_page(_text(path)) for path in files]
    return facts(pages[0] if len(pages) == 2 else None, pages[-1])


def _of_client(path: Path) -> Facts:
    from kvlab.operate.client import facts_of_loadtest

    try:
        return facts_of_loadtest(json.loads(_text(path)))
    except json.JSONDecodeError as failure:
        raise MeasureError(f"{path} is not JSON ({failure}); give what kvlab loadtest --json wrote") from None


def _text(path: Path) -> str:
    try:
        return path.read_text("utf8", errors="replace")
    except OSError as failure:
        raise MeasureError(f"{path} cannot be read ({failure.strerror}); give a file that exists") from None


def _judged(known: Facts, model: str | None, hardware: str | None) -> Facts:
    from kvlab.operate.facts import with_hardware

    if (model is None) != (hardware is None):
        raise ConfigError("--model and --hardware go together: a step's bytes over the bandwidth that reads them")
    return known if model is None or hardware is None else with_hardware(known, model, hardware)


def _print(found: Diagnosis) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    if not found.causes:
        console.print(Text(found.verdict, style="bold"))
    for rank, finding in enumerate(found.causes, 1):
        console.print(Text(f"{rank}. {finding.title}", style="bold"))
        for line in _lines(finding):
            console.print(Text(f"   {line}"), soft_wrap=True)
    for note in found.notes:
        console.print(Text(f"note: {note}", style="dim"), soft_wrap=True)
    console.print(Text(f"read: {', '.join(found.sources)}", style="dim"), soft_wrap=True)


def _lines(finding: Finding) -> Iterator[str]:
    for each in finding.evidence:
        yield f"evidence: {each}"
    yield f"check next: {finding.check}"
    yield f"remedy: {finding.remedy}"
    if finding.flags:
        yield f"flags: {' '.join(finding.flags)}"
    yield f"cause: {finding.cause}, strength {finding.strength:.2f}; chapter: {finding.chapter}"
