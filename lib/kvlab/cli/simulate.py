"""``kvlab simulate``: what users of a cluster would see, on a virtual clock."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvlab.cli.app import app, teller
from kvlab.errors import ConfigError

if TYPE_CHECKING:
    from kvlab.serving.log import Summary
    from kvlab.serving.simulate import Replica
    from kvlab.serving.workload import Workload

_WORKLOAD = typer.Option(
    help="`azure-conv`, `azure-code` (lengths of real traffic), `fixed:PROMPT/OUTPUT`, "
    "`uniform:LOW-HIGH/LOW-HIGH`, `shared-prefix`, `multi-turn`."
)
_POLICY = typer.Option(
    help="`static` (nobody joins before the batch has left), `continuous` (whole prompts first), "
    "`chunked` (decodes first, prompts in pieces)."
)


@app.command()
def simulate(
    model: Annotated[str, typer.Option(help="A preset, such as `llama-3-8b`.")] = "llama-3-8b",
    hardware: Annotated[str, typer.Option(help="A preset, such as `h100-sxm`.")] = "h100-sxm",
    policy: Annotated[str, _POLICY] = "chunked",
    workload: Annotated[str, _WORKLOAD] = "azure-conv",
    rate: Annotated[float, typer.Option(help="Requests per second, of all replicas together.")] = 10.0,
    requests: Annotated[int, typer.Option(help="How many are sent.")] = 2000,
    token_budget: Annotated[
        int | None,
        typer.Option(help="Tokens of a step; left out, 2048, or the model's context where prompts are read whole."),
    ] = None,
    max_running: Annotated[int, typer.Option(help="Requests that run at once on a replica.")] = 256,
    kv_blocks: Annotated[
        int | None, typer.Option(help="Blocks of the KV pool; left out, what fits beside the weights.")
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    replicas: Annotated[int, typer.Option(help="Equal instances; conversations are dealt out among them.")] = 1,
    order: Annotated[str, typer.Option(help="`fcfs`, or `shortest` (with ageing).")] = "fcfs",
    burstiness: Annotated[
        float | None, typer.Option(help="Coefficient of variation of the gaps between arrivals; 1 is Poisson.")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Cap every answer.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the arithmetic: `bfloat16`, `float16`, `float32`.")] = "bfloat16",
    weights: Annotated[str | None, typer.Option(help="Format of the weights, such as `fp8`, `int8`, `int4`.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Format of the KV cache, such as `fp8`, `int8`.")] = None,
    slo_ttft: Annotated[float | None, typer.Option(help="Promise: seconds to the first token.")] = None,
    slo_tpot: Annotated[float | None, typer.Option(help="Promise: seconds for each token after it.")] = None,
    disaggregate: Annotated[
        str | None, typer.Option(metavar="P:D", help="P replicas read prompts and D others decode, as in `1:2`.")
    ] = None,
    link_gb_s: Annotated[
        float | None, typer.Option(help="With `--disaggregate`: GB/s of each prefill replica's link.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead; times in seconds.")] = False,
) -> None:
    """Simulate a cluster: the scheduler of the engine, the cost model instead of a model.

    TTFT, TPOT, ITL and E2E as users would see them, throughput, goodput (requests per second that kept the promises),
    what was held of the KV pool, preemptions, and what was refused and why. Peaks of a data sheet make the times
    limits: a real server takes longer. Nothing is downloaded and no GPU is needed.

    A thousand requests take about a second. Many requests for several replicas use all CPU cores.

    Examples:

    - `kvlab simulate --model llama-3-8b --hardware h100-sxm --workload azure-conv --rate 20`
    - The same with `--policy continuous`, or `--token-budget 512`: whose ITL does a budget help?
    - `kvlab simulate --workload azure-conv --rate 60 --slo-ttft 0.5 --slo-tpot 0.02 --disaggregate 2:1 --link-gb-s 50`
    - `kvlab simulate --workload shared-prefix --rate 40 --kv-blocks 2000 --json`
    """
    from kvlab.serving.simulate import Replica

    replica = Replica(
        model=model, hardware=hardware, policy=policy, token_budget=token_budget, max_running=max_running,
        blocks=kv_blocks, block_size=block_size, order=order, dtype=dtype, weights=weights, kv=kv_dtype,
        max_new_tokens=max_new_tokens,
    )  # fmt: skip
    pools, asked, tell = _pools(disaggregate, link_gb_s, replicas), _workload(workload, burstiness), teller()
    found = _run(replica, asked, pools, replicas, {"rate": rate, "requests": requests, "seed": seed, "tell": tell})
    tell("")
    settings = {
        "model": model, "hardware": hardware, "policy": policy, "workload": workload, "rate": rate,
        "token_budget": replica.budget, "kv_blocks": replica.n_blocks, "block_size": block_size,
        "replicas": list(pools[:2]) if pools else replicas, "seed": seed,
    }  # fmt: skip
    report = settings | found.report(ttft=slo_ttft, tpot=slo_tpot)
    print(json.dumps(report)) if as_json else _print_report(report)


def _pools(disaggregate: str | None, link_gb_s: float | None, replicas: int) -> tuple[int, int, float] | None:
    """Prefill replicas, decode replicas and bytes per second of a link; None where every replica does both."""
    if (disaggregate is None) != (link_gb_s is None):
        raise ConfigError("--disaggregate P:D and --link-gb-s go together: caches move over that link; give both")
    if disaggregate is None or link_gb_s is None:
        return None
    found = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", disaggregate)
    if not found or replicas != 1:
        raise ConfigError(
            f"--disaggregate is {disaggregate!r} and --replicas {replicas}; write P:D, as in 1:2, each 1 or more, and "
            "leave --replicas out: the two numbers say how many there are"
        )
    return int(found[1]), int(found[2]), link_gb_s * 1e9


def _workload(name: str, burstiness: float | None) -> Workload:
    from kvlab.serving.workload import workload

    found = workload(name)
    return found if burstiness is None else replace(found, gap_cv=burstiness)


def _run(
    replica: Replica, workload: Workload, pools: tuple[int, int, float] | None, replicas: int, asked: dict[str, Any]
) -> Summary:
    from kvlab.serving.disaggregated import simulate_disaggregated
    from kvlab.serving.simulate import simulate

    if pools is None:
        return simulate(replica, workload, replicas=replicas, **asked)
    prefill, decode, link = pools
    return simulate_disaggregated(
        replica, replica, workload, prefill_replicas=prefill, decode_replicas=decode, bytes_per_second=link, **asked
    )


def _print_report(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    replicas = report["replicas"]
    several = f"{replicas[0]} prefill and {replicas[1]} decode x " if isinstance(replicas, list) else f"{replicas} x "
    title = f"{'' if replicas == 1 else several}{report['model']} on {report['hardware']}, {report['policy']}"
    table = Table(title=f"{title}, {report['workload']} at {report['rate']:g}/s", title_justify="left")
    table.add_column("milliseconds")
    for name in ("p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    for name, colour in (("TTFT", "#D55E00"), ("TPOT", "#0072B2"), ("ITL", "#0072B2"), ("E2E", "default")):
        figures = report[f"{name.lower()}_s"]
        shown = (f"{figures[each] * 1e3:,.1f}" if figures else "-" for each in ("p50", "p90", "p99", "max"))
        table.add_row(f"[{colour}]{name}[/]", *shown)
    console = Console()
    console.print(table)
    for line in _lines(report):
        console.print(line, highlight=False, markup=False)


def _lines(report: dict[str, Any]) -> Iterator[str]:
    """What the table has no room for, a line each."""
    finished = ", ".join(f"{count:,} {reason}" for reason, count in report["finished"].items()) or "none"
    yield f"requests: {report['requests']:,} in {report['seconds']:,.1f} s; finished: {finished}"
    for example, count in report["refusals"].items():
        yield f"refused: {count:,}, such as: {example}"
    yield (
        f"throughput: {report['prompt_tokens_per_s']:,.0f} prompt tokens/s in, "
        f"{report['output_tokens_per_s']:,.0f} tokens/s out, {report['requests_per_s']:,.2f} requests/s"
    )
    promised = [f"{name[:4].upper()} {limit:g} s" for name, limit in report["slo"].items() if limit is not None]
    if promised:
        yield f"goodput: {report['goodput_per_s']:,.2f} requests/s within {' and '.join(promised)}"
    usage = report["kv_usage"]
    yield (
        f"KV pool: {report['kv_blocks']:,} blocks of {report['block_size']}, {usage['mean']:.0%} held on average, "
        f"{usage['peak']:.0%} at most; preemptions: {report['preemptions']:,}"
    )
    yield f"running: {report['running_mean']:.1f} on average; steps: {report['steps']:,}"
