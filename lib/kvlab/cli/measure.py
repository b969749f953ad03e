"""``kvlab calibrate`` and ``kvlab bench``: what the device at hand does, beside what was predicted for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import kvlab
from kvlab.cli.app import app, compiled_step, teller
from kvlab.errors import MeasureError, one_line

if TYPE_CHECKING:
    from kvlab.cost import Hardware
    from kvlab.generation import CompiledDecode
    from kvlab.weights import LoadedModel

_DEVICE = typer.Option(help="`auto`, `cpu`, `cuda`, `cuda:1`, `mps`.")


@app.command()
def calibrate(
    device: Annotated[str, _DEVICE] = "auto",
    rounds: Annotated[int, typer.Option(help="Times that every point is measured; the noise floor needs 2.")] = 3,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the device as JSON, for `bench --calibration`.")
    ] = False,
) -> None:
    """Measure what this device can do: rates by rows, bandwidth by working set, attention by length, launches.

    Takes 10 to 30 seconds on two CPU cores. The noise floor at the end says how far two measurements of the same
    thing lie apart: no prediction can be held to less.

    Examples:

    - `kvlab calibrate`
    - `kvlab calibrate --json > device.json`, then `kvlab bench --model smollm2 --calibration device.json`
    """
    from kvlab.measure import calibrate as measured

    hardware = measured(_pick(device), rounds=rounds, report=teller())
    print(json.dumps(hardware.to_json())) if as_json else _print_hardware(hardware)


@app.command()
def bench(
    model: Annotated[str, typer.Option(help="As for `kvlab generate`.")] = "smollm2",
    weights: Annotated[
        str,
        typer.Option(
            help="What the weights are held in: `auto`, `float32`, `bfloat16`, `float16`, or codes: `int8`, `int4`, "
            "`stored` (a GGUF file's own). Codes use the step of `kvlab compile` where there is one."
        ),
    ] = "auto",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 33,
    batch: Annotated[int, typer.Option(help="Requests that start together.")] = 1,
    repeats: Annotated[int, typer.Option(help="Times that the case is run, after one warm-up.")] = 3,
    device: Annotated[str, _DEVICE] = "auto",
    calibration: Annotated[Path | None, typer.Option(help="Use this file of `kvlab calibrate --json`.")] = None,
    suite: Annotated[str | None, typer.Option(help="`device`: everything that the results page shows.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the suite's result goes.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Measure prefill and decode of a model beside the prediction of the cost model.

    The device is calibrated first (or read from a file), the prediction comes from that alone. `mfu` is the share of
    the measured peak that prefill reaches, `mbu` the share of the memory's bandwidth that decode does.

    Examples:

    - `kvlab bench --model smollm2 --prompt-tokens 512 --new-tokens 33`
    - `kvlab bench --model tiny --batch 8 --json`
    - `kvlab bench --suite device --out data/results/mine.json` (3 to 8 minutes)
    """
    if suite is not None:
        _run_suite(suite, model, device, out, as_json)
        return
    if out is not None:
        raise MeasureError("--out belongs to --suite device; for one case use --json and redirect it")
    from kvlab.measure import Case
    from kvlab.measure import bench as measure
    from kvlab.measure import report as reported

    case, tell = Case(prompt_tokens, new_tokens, batch), teller()
    loaded, compiled = _loaded(model, weights, device, batch)
    hardware = _read_hardware(calibration) if calibration else _calibrated(loaded.model, tell)
    tell(f"{batch} x {prompt_tokens} prompt tokens, {new_tokens} new tokens, {repeats} times")
    found = reported(
        loaded.model, loaded.name, measure(loaded.model, case, repeats=repeats, compiled=compiled), hardware
    )
    print(json.dumps(found)) if as_json else _print_bench(found)


def _loaded(model: str, weights: str, device: str, batch: int) -> tuple[LoadedModel, CompiledDecode | None]:
    from kvlab.weights import WEIGHTS

    if weights not in WEIGHTS:
        return kvlab.load(model, device=device, dtype=weights), None
    loaded = kvlab.load(model, device=device, weights=weights)  # type: ignore[arg-type]
    return loaded, compiled_step(loaded, batch)


def _run_suite(suite: str, model: str, device: str, out: Path | None, as_json: bool) -> None:
    if suite != "device":
        raise MeasureError(f"no suite is called {suite!r}; there is 'device'")
    if out is None and not as_json:
        raise MeasureError("--suite device needs --out FILE for its result, or --json to print it")
    if out is not None and not out.absolute().parent.is_dir():
        raise MeasureError(f"{out.parent} is not a folder; create it first, the suite runs for minutes")
    from kvlab.measure import Calibrator
    from kvlab.measure.suite import device_suite, write_result

    result = device_suite(model, calibrator=Calibrator(_pick(device)), tell=teller())
    if out is not None:
        write_result(result, out)
    print(json.dumps(result)) if as_json else _print_suite(result)


def _pick(device: str) -> Any:
    from kvlab.devices import pick_device

    return pick_device(device)


def _calibrated(model: Any, tell: Callable[[str], None]) -> Hardware:
    from kvlab.measure import calibrate as measured

    return measured(model.device, (model.dtype,), rounds=2, report=lambda line: tell(f"calibrating: {line}"))


def _read_hardware(path: Path) -> Hardware:
    from kvlab.cost import Hardware

    try:
        return Hardware.from_json(json.loads(path.read_text("utf8")))
    except (OSError, ValueError, KeyError, TypeError) as failure:
        raise MeasureError(
            f"{path} is not a calibration ({one_line(failure)}); write one with: kvlab calibrate --json > {path.name}"
        ) from None


def _print_hardware(hardware: Hardware) -> None:
    from rich.console import Console
    from rich.table import Table

    measured = hardware.calibration
    assert measured is not None
    table = Table(title=f"{hardware.title}, {hardware.source}", title_justify="left")
    table.add_column("what")
    for dtype in measured.kernels:
        table.add_column(dtype, justify="right")
    for rows in (1, 8, 64, 512, 2048):
        rates = (kernels.linear[-1][1].at(rows) for kernels in measured.kernels.values())
        table.add_row(
            f"linear layer, {rows:,} row{'s' if rows > 1 else ''}, GFLOP/s", *(f"{rate / 1e9:,.0f}" for rate in rates)
        )
    for keys in (128, 2048):
        rates = (kernels.prefill_attention.at(keys) for kernels in measured.kernels.values())
        table.add_row(f"causal attention, {keys:,} keys, GFLOP/s", *(f"{rate / 1e9:,.0f}" for rate in rates))
    launches = (kernels.launch_s for kernels in measured.kernels.values())
    table.add_row("host time a launch, microseconds", *(f"{launch * 1e6:.1f}" for launch in launches))
    ridges = (hardware.ridge(dtype) for dtype in measured.kernels)
    table.add_row("ridge, FLOP/byte", *(f"{ridge:.1f}" for ridge in ridges))
    console = Console()
    _end_of_progress()
    console.print(table)
    read = measured.read_bandwidth
    places = ", ".join(
        f"{rate / 1e9:.0f} of {size / 2**20:,.0f} MiB" for size, rate in zip(read.x, read.y, strict=True)
    )
    console.print(f"read bandwidth, GB/s: {places}", highlight=False)
    console.print(f"noise floor: the same measurement twice differs by {measured.noise:.1%} (median)", highlight=False)


def _print_bench(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = (
        f"{found['model']} on {found['device']}, {found['dtype']}, {found['batch']} x {found['prompt_tokens']} tokens"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in (
        "measured",
        "limit" if found["predicted_by"] == "limit" else "predicted",
        "off",
        "tokens/s",
        "of the peak",
    ):
        table.add_column(name, justify="right")
    for name, figure, speed, share in (
        ("[#D55E00]TTFT[/] (prefill)", "ttft_s", "prefill_tok_s", "mfu"),
        ("[#0072B2]TPOT[/] (decode)", "tpot_s", "decode_tok_s", "mbu"),
    ):
        took, foreseen = found[figure], found[f"predicted_{figure}"]
        table.add_row(
            name, f"{took * 1e3:,.1f} ms", f"{foreseen * 1e3:,.1f} ms", f"{foreseen / took - 1:+.0%}",
            f"{found[speed]:,.1f}", f"{share.upper()} {found[share]:.0%}",
        )  # fmt: skip
    _end_of_progress()
    console = Console()
    console.print(table)
    console.print(f"weights {found['weight_bytes']:,} bytes, KV cache {found['kv_bytes']:,} bytes", highlight=False)


def _print_suite(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['device']}, {result['machine']}", title_justify="left")
    for name in ("dtype", "batch", "prompt", "TTFT ms", "off", "TPOT ms", "off", "MFU", "MBU"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        table.add_row(
            row["dtype"], str(row["batch"]), f"{row['prompt_tokens']:,}",
            f"{row['ttft_s'] * 1e3:,.1f}", f"{row['predicted_ttft_s'] / row['ttft_s'] - 1:+.0%}",
            f"{row['tpot_s'] * 1e3:,.1f}", f"{row['predicted_tpot_s'] / row['tpot_s'] - 1:+.0%}",
            f"{row['mfu']:.0%}", f"{row['mbu']:.0%}",
        )  # fmt: skip
    _end_of_progress()
    console = Console()
    console.print(table)
    for name, off in result["residuals"].items():
        line = f"{name.upper()}: |predicted / measured - 1| median {off['median']:.0%}, worst {off['worst']:.0%}"
        console.print(f"{line}; measured twice {result['noise'][name]:.0%}", highlight=False)


def _end_of_progress() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
