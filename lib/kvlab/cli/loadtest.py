"""``kvlab loadtest``: what users of a running server see."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlab.cli.app import app
from kvlab.errors import ConfigError

if TYPE_CHECKING:
    from kvlab.operate.loadtest import Progress as Now
    from kvlab.operate.loadtest import Tell
    from kvlab.operate.report import LoadTestResult

_WORKLOAD = typer.Option(
    help="`azure-conv`, `azure-code` (lengths of real traffic), `fixed:PROMPT/OUTPUT`, "
    "`uniform:LOW-HIGH/LOW-HIGH`, `shared-prefix`, `multi-turn`."
)
_PROMPT, _OUTPUT = 256, 64

#: Seconds between two lines about progress where nothing can be overwritten.
_LINE_S = 5.0


@app.command()
def loadtest(
    url: Annotated[str, typer.Option(help="Of the server, such as `http://127.0.0.1:8000`.")],
    model: Annotated[str, typer.Option(help="By the server's name for it (`GET /v1/models` lists them).")],
    rate: Annotated[
        float | None, typer.Option(help="Open loop: requests per second, sent when they are due, whatever happens.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Closed loop: so many at once, each after its last answer; left out, 1.")
    ] = None,
    requests: Annotated[int, typer.Option(help="How many are sent; of a trace, at most.")] = 100,
    prompt_tokens: Annotated[int | None, typer.Option(help=f"Of each prompt; left out, {_PROMPT}.")] = None,
    output_tokens: Annotated[int | None, typer.Option(help=f"Of each answer; left out, {_OUTPUT}.")] = None,
    workload: Annotated[str | None, _WORKLOAD] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Replay a file: JSONL or CSV with `time`, `prompt_tokens`, `output_tokens`; Azure's too."),
    ] = None,
    burstiness: Annotated[
        float | None, typer.Option(help="Coefficient of variation of the gaps between arrivals; 1 is Poisson.")
    ] = None,
    endpoint: Annotated[
        str, typer.Option(help="`completions`, or `chat` (with the server's template).")
    ] = "completions",
    slo_ttft: Annotated[float | None, typer.Option(help="Promise: seconds to the first token.")] = None,
    slo_tpot: Annotated[float | None, typer.Option(help="Promise: seconds for each token after it.")] = None,
    warmup: Annotated[int, typer.Option(help="Requests before, all at once, that count for nothing.")] = 1,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A `tokenizer.json`: text prompts of exact length without asking the server.")
    ] = None,
    silence: Annotated[float, typer.Option(help="Give a request up after so many seconds without a byte.")] = 120.0,
    limit: Annotated[float, typer.Option(help="Give a request up after so many seconds, whatever it does.")] = 600.0,
    api_key_env: Annotated[
        str, typer.Option(metavar="NAME", help="Environment variable that holds the API key; it is never shown.")
    ] = "OPENAI_API_KEY",
    seed: Annotated[int, typer.Option(help="Of lengths and arrivals; prompts are new in every run.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for the result as JSON, Markdown and figures.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead, every request included; times in seconds.")
    ] = False,
) -> None:
    """Load a running server (vLLM, llama.cpp, `transformers serve`, anything with OpenAI's API) and measure it.

    TTFT, TPOT, ITL and E2E as users see them, throughput in and out, goodput (requests per second that kept the
    promises), errors by kind, and what in these figures is the client's or a proxy's doing.

    An open loop (`--rate`) sends each request when it is due: latencies count from then, so a queue shows. A closed
    loop (`--concurrency`) waits for answers: it finds the throughput, and hides the queue that its users would be in.

    Ctrl-C ends the run and reports what there is. Exit code 2: the server cannot be reached; 1: not one request was
    answered to its end; 0: some were, and the report says loudly what failed.

    Examples:

    - `kvlab loadtest --url http://127.0.0.1:8000 --model smollm2 --concurrency 8 --requests 96`
    - `kvlab loadtest --url http://127.0.0.1:8000 --model smollm2 --rate 4 --slo-ttft 0.2 --slo-tpot 0.05 --out results`
    - The same at twice the rate: which figure breaks first, and does the send lag stay small?
    - `kvlab loadtest --url http://127.0.0.1:8000 --model smollm2 --rate 2 --workload shared-prefix --json > run.json`
    """
    from kvlab.operate.exchange import Target
    from kvlab.operate.loadtest import loadtest as run
    from kvlab.operate.schedule import Load

    target = Target(
        url,
        model,
        endpoint,
        api_key=os.environ.get(api_key_env),
        silence_s=silence,
        limit_s=limit,
    )
    load = Load(
        requests=requests, rate=rate, concurrency=concurrency, trace=trace, burstiness=burstiness, seed=seed,
        workload=_workload(workload, prompt_tokens, output_tokens), warmup=warmup, slo_ttft=slo_ttft, slo_tpot=slo_tpot,
        tokenizer=tokenizer,
    )  # fmt: skip
    with _progress() as tell:
        found = run(target, load, tell=tell)
    if out is not None:
        found.save(out)
    print(json.dumps(found.to_json())) if as_json else _print_result(found)
    if found.interrupted:
        raise typer.Exit(130)
    if not found.completed:
        raise typer.Exit(1)


def _workload(name: str | None, prompt_tokens: int | None, output_tokens: int | None) -> str:
    """The workload's name; stated lengths are one too."""
    if name is None:
        return f"fixed:{_or(prompt_tokens, _PROMPT)}/{_or(output_tokens, _OUTPUT)}"
    if prompt_tokens is not None or output_tokens is not None:
        raise ConfigError(f"--workload {name} has lengths of its own; leave --prompt-tokens and --output-tokens out")
    return name


def _or(tokens: int | None, otherwise: int) -> int:
    return otherwise if tokens is None else tokens


def in_a_terminal() -> bool:
    """Whether somebody watches standard error."""
    return sys.stderr.isatty()


@contextmanager
def _progress() -> Iterator[Tell]:
    """Progress on standard error: a bar in a terminal, a line now and then elsewhere."""
    if not in_a_terminal():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    # Drawn only when it is told to: a thread that draws by itself would take time from the requests.
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}")
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bar:
        task = bar.add_task("load test", total=None, said="asking the server")

        def tell(now: Now) -> None:
            bar.update(task, total=now.total, completed=now.completed + now.failed, said=_said(now))
            bar.refresh()

        yield tell


class _Lines:
    """A line about progress every few seconds, and the last one."""

    def __init__(self) -> None:
        self._said = 0.0

    def __call__(self, now: Now) -> None:
        """Say how far it has come, if it is time again."""
        if now.seconds - self._said >= _LINE_S or now.completed + now.failed == now.total:
            self._said = now.seconds
            print(_said(now), file=sys.stderr)


def _said(now: Now) -> str:
    failed = f", {now.failed:,} FAILED" if now.failed else ""
    answered = f"{now.completed:,} answered{failed}, {now.tokens:,} chunks"
    return f"{now.seconds:.0f} s: {now.sent:,} of {now.total:,} sent, {answered}"


def _print_result(result: LoadTestResult) -> None:
    from rich.console import Console
    from rich.table import Table

    from kvlab.operate.report import LATENCIES, headline, lines

    table = Table(title=headline(result.settings), title_justify="left")
    table.add_column("milliseconds")
    for name in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    figures, colours = result.report(), {"ttft_s": "#D55E00", "tpot_s": "#0072B2", "itl_s": "#0072B2"}
    for name, title in LATENCIES.items():
        row = figures[name]
        shown = (f"{row[each] * 1e3:,.1f}" if row else "-" for each in ("mean", "p50", "p90", "p99", "max"))
        table.add_row(f"[{colours.get(name, 'default')}]{title}[/]", *shown)
    console = Console()
    console.print(table)
    for line in lines(result):
        console.print(line, highlight=False, markup=False, style="bold red" if line.startswith("FAILED") else None)
    for caution in result.warnings():
        console.print(f"{caution.kind}: {caution.message}", highlight=False, markup=False, style="yellow")
