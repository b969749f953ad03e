"""``kvlab compile``: make decode fast on this machine, once."""

from __future__ import annotations

from typing import Annotated

import typer

import kvlab
from kvlab.cli.app import app, teller


@app.command()
def compile(
    model: Annotated[str, typer.Option(help="As for `kvlab generate`.")] = "smollm2",
    weights: Annotated[
        str | None, typer.Option(help="`stored`, `int8`, `int4`; left out, the weights stay wide.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="`auto`, `float32`, `bfloat16`.")] = "auto",
    batch: Annotated[int, typer.Option(help="Rows of the step.")] = 1,
    serving: Annotated[
        bool, typer.Option("--serving", help="Also the step of the serving engine, for up to `--batch` requests.")
    ] = False,
) -> None:
    """Make decode fast on this CPU: compile the kernels, find the crossovers, compile the model's decode step.

    Three things are done, each once and kept in the cache folder (`KVLAB_CACHE`). The kernels for few rows, in C++,
    take ten seconds. The crossovers say which matrix product is the fastest for how many rows, and take half a minute.
    The decode step of this model, format and batch takes a minute. `kvlab generate` with the same options then finds
    them; without them it runs the same model by torch's operators.

    Needs a C++ compiler (`apt install g++`).

    Examples:

    - `kvlab compile --model smollm2 --weights stored`
    - `kvlab compile --model smollm2 --dtype bfloat16 --batch 16`
    - `kvlab compile --model smollm2 --dtype bfloat16 --batch 16 --serving`, for `kvlab.serving.ModelExecutor`
    """
    from kvlab import kernels
    from kvlab.generation import compile_paged_step, compile_step
    from kvlab.measure.crossovers import crossovers
    from kvlab.quantize import measured, remember, row_aware

    tell = teller()
    tell("compiling the kernels")
    kernels.build()
    kernels.enable()
    loaded = kvlab.load(model, device="cpu", dtype=dtype, weights=weights)  # type: ignore[arg-type]
    network = row_aware(loaded.model)
    if not measured(network):
        remember(crossovers(network, tell=lambda line: tell(f"crossovers: {line}")))
    tell(f"compiling the decode step of {loaded.name}, {batch} row(s)")
    made = compile_step(network, batch)
    if serving:
        tell(f"compiling the engine's step of {loaded.name}, up to {batch} request(s)")
        made = compile_paged_step(network, batch)
    tell("")
    print(f"{loaded.name} is ready: {made}")
