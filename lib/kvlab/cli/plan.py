"""``kvlab plan``: from a promise to cards, replicas and flags."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvlab.cli.app import app, teller

if TYPE_CHECKING:
    from rich.console import Console

    from kvlab.operate.plan import CapacityPlan

_WEIGHTS = typer.Option(help="Format of the weights: `fp8` or `int8` (made at load), `int4` (a checkpoint of its own).")
_KV = typer.Option(help="Format of the KV cache: `fp8`, `int8`, `int4`; left out, that of the model.")
_EFFICIENCY = typer.Option(
    help="Part of the data sheet's peaks that a real server reaches, such as `0.6`; 1 is a limit."
)
_EMIT = typer.Option(metavar="vllm|ray|k8s", help="Print what starts it, and nothing else.")


@app.command()
def plan(
    model: Annotated[str, typer.Option(help="A preset, such as `llama-3.1-8b`.")],
    hardware: Annotated[str, typer.Option(help="The card: a preset, such as `h100-sxm`.")],
    prompt_tokens: Annotated[int, typer.Option(help="Of each request.")],
    output_tokens: Annotated[int, typer.Option(help="Of each answer.")],
    rate: Annotated[float, typer.Option(help="Requests per second, of all users together.")],
    gpus: Annotated[int | None, typer.Option(help="Cards there are; left out, as many as it takes.")] = None,
    gpus_per_node: Annotated[int, typer.Option(help="Cards of one machine.")] = 8,
    slo_ttft: Annotated[float | None, typer.Option(help="Promise: seconds to the first token.")] = None,
    slo_tpot: Annotated[float | None, typer.Option(help="Promise: seconds for each token after it.")] = None,
    attainment: Annotated[float, typer.Option(help="Part of the requests that must keep the promises.")] = 0.99,
    weights: Annotated[str | None, _WEIGHTS] = None,
    kv_dtype: Annotated[str | None, _KV] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest request; left out, what the tokens need.")] = None,
    utilization: Annotated[float, typer.Option(help="Part of a card's memory that vLLM may claim.")] = 0.92,
    efficiency: Annotated[float, _EFFICIENCY] = 1.0,
    price_per_hour: Annotated[float | None, typer.Option(help="Of one card, for a price of the tokens.")] = None,
    emit: Annotated[str | None, _EMIT] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead; bytes and seconds.")] = False,
) -> None:
    """Plan a deployment: does it fit, how fast is it at best, how many replicas does the rate need, with which flags.

    Memory is counted card by card. Replicas are counted by simulation: the scheduler of the engine on a virtual clock,
    requests as a Poisson process, 99 % of them within the promises. What does not fit or cannot be kept comes with the
    reason and with changes that were computed to help. No GPU is needed and nothing is downloaded.

    Peaks of a data sheet make the times limits and the replicas the fewest: give `--efficiency` what you measured.

    Examples:

    - `kvlab plan --model llama-3.1-8b --hardware h100-sxm --prompt-tokens 1000 --output-tokens 200 --rate 100
      --slo-ttft 0.5 --slo-tpot 0.02`
    - The same with `--efficiency 0.6`, or `--weights fp8`: how many replicas less?
    - `kvlab plan --model llama-3.1-70b --hardware h100-sxm --gpus 2 --prompt-tokens 1000 --output-tokens 200 --rate 20`
    - The first with `--emit k8s > vllm.yaml`, `--emit ray > serve.py` or `--emit vllm`.
    """
    from kvlab.operate.plan import Deployment, Goal
    from kvlab.operate.plan import plan as make

    deployment = Deployment(
        model=model, hardware=hardware, gpus=gpus, gpus_per_node=gpus_per_node, weights=weights, kv=kv_dtype,
        max_model_len=max_model_len, utilization=utilization, efficiency=efficiency, price_per_hour=price_per_hour,
    )  # fmt: skip
    goal = Goal(
        prompt_tokens=prompt_tokens, output_tokens=output_tokens, rate=rate, ttft=slo_ttft, tpot=slo_tpot,
        attainment=attainment,
    )  # fmt: skip
    tell = teller()
    found = make(deployment, goal, tell)
    tell("")
    if emit is not None:
        print(found.emit(emit), end="")
    elif as_json:
        print(json.dumps(found.report()))
    else:
        _print_plan(found)


def _print_plan(found: CapacityPlan) -> None:
    from rich.console import Console

    console, report = Console(), found.report()
    console.print(found.verdict, style="bold", highlight=False, markup=False)
    if report["replica"]:
        _print_memory(console, report)
        _print_speed(console, report)
    if report["planned"]:
        _print_flags(console, report)
    for title, lines in (("what would help, each computed anew", _remedies(report)), ("to know", report["notes"])):
        if lines:
            console.print(f"\n[italic]{title}[/]")
        for line in lines:
            console.print(f"- {line}", highlight=False, markup=False)


def _print_memory(console: Console, report: dict[str, Any]) -> None:
    replica, settings = report["replica"], report["settings"]
    cut = f"tensor parallel {replica['tensor_parallel']}, pipeline parallel {replica['pipeline_parallel']}"
    table = _table(f"memory of each card: {settings['model']} on {settings['hardware']}, {cut}", "", "GB", "GiB")
    names = {
        "unclaimed": "left unclaimed", "weights": f"weights ({settings['weights']})",
        "activations": "activations of the largest step", "non_torch": "driver and communication",
        "kv_pool": f"KV pool ({settings['kv']})", "device": "the card",
    }  # fmt: skip
    for name, title in names.items():
        held = replica["memory_bytes"][name]
        table.add_row(title, f"{held / 1e9:,.1f}", f"{held / 2**30:,.1f}", end_section=name == "kv_pool")
    console.print(table)
    pool, batch = replica["kv_pool"], replica["largest_batch"]
    for line in (
        f"KV pool: {pool['tokens']:,} tokens, {replica['concurrency_at_max_model_len']:.1f} requests of "
        f"max-model-len {replica['max_model_len']:,}; largest context of one request: {replica['largest_context']:,}",
        f"largest batch: {batch['in_memory']:,} requests in memory, {batch['within_tpot']:,} within the TPOT",
    ):
        console.print(line, highlight=False, markup=False)


def _print_speed(console: Console, report: dict[str, Any]) -> None:
    """What one request sees that is alone, and what users see at the rate."""
    alone = report["replica"]["alone"]
    table = _table("milliseconds", "", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "kept")
    alone_ms = (f"{alone[name] * 1e3:,.1f}" for name in ("ttft_s", "ttft_s", "tpot_s", "tpot_s"))
    table.add_row("one request alone", *alone_ms, "")
    for load in (report["planned"], report["one_less"]):
        if load:
            title = f"{load['replicas']:,} replica{'' if load['replicas'] == 1 else 's'}"
            table.add_row(title, *_milliseconds(load), f"{load['kept']:.1%}")
    console.print(table)
    for line in _load_lines(report):
        console.print(line, highlight=False, markup=False)


def _milliseconds(load: dict[str, Any]) -> list[str]:
    figures = [(load[name], at) for name in ("ttft_s", "tpot_s") for at in ("p50", "p99")]
    return [f"{found[at] * 1e3:,.1f}" if found else "-" for found, at in figures]


def _load_lines(report: dict[str, Any]) -> list[str]:
    planned, split, cost = report["planned"], report["disaggregated"], report["cost_per_million_output_tokens"]
    lines: list[str] = []
    if planned:
        lines.append(
            f"a replica: {planned['rate_per_replica']:.3g} requests/s, {planned['output_tokens_per_s']:,.0f} tokens/s "
            f"out, {planned['running_mean']:.1f} at once on average, {planned['kv_usage']['peak']:.0%} of the KV pool "
            "at most"
        )
    if split:
        pays = f"it pays: together {split['together']:.1%} do" if split["pays"] else "it does not pay"
        lines.append(
            f"{split['prefill']} replicas that read prompts and {split['decode']} that decode: {split['kept']:.1%} "
            f"keep the promises; {pays}"
        )
    if cost is not None:
        lines.append(f"a million tokens of answers cost {cost:,.2f}")
    return lines


def _print_flags(console: Console, report: dict[str, Any]) -> None:
    table = _table("flags of vllm serve 0.32", "flag", "value", "why")
    table.columns[1].justify, table.columns[2].justify = "right", "left"
    for flag in report["flags"]:
        table.add_row(flag["name"], flag["value"], flag["why"])
    console.print(table)


def _remedies(report: dict[str, Any]) -> list[str]:
    return [f"{remedy['change']}: {remedy['result']}" for remedy in report["remedies"]]


def _table(title: str, first: str, *columns: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for name in columns:
        table.add_column(name, justify="right")
    return table
