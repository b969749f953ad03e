"""The application that every command joins, and its entry point."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

import kvlab
from kvlab.errors import KvlabError

if TYPE_CHECKING:
    from kvlab.generation import CompiledDecode
    from kvlab.weights import LoadedModel

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of the console script: an error of ours is one line and exit code 2."""
    try:
        app()
    except KvlabError as error:
        print(f"kvlab: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def teller() -> Callable[[str], None]:
    """Progress on standard error, so that ``--json`` stays clean; in a terminal one line that overwrites itself."""
    if not sys.stderr.isatty():
        return lambda line: print(line, file=sys.stderr) if line else None
    return lambda line: print(f"\r\x1b[K{line}", end="" if line else "\n", file=sys.stderr, flush=True)


def compiled_step(loaded: LoadedModel, batch: int) -> CompiledDecode | None:
    """The compiled step of a model, ready to run; None if `kvlab compile` has made none.

    Args:
        loaded: the model; its layers become row-aware.
        batch: rows of the step.
    """
    from kvlab.generation import CompiledDecode, package
    from kvlab.quantize import row_aware

    if loaded.model.device.type != "cpu":
        return None
    wide = row_aware(loaded.model)
    return CompiledDecode(wide, batch) if package(wide, batch).exists() else None


def _version(asked: bool) -> None:
    if asked:
        print(f"kvlab {kvlab.__version__}")
        raise typer.Exit


@app.callback()
def kvlab_(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """How large language models answer: **prefill**, **decode** and the **KV cache** between them.

    Start with `kvlab generate --model tiny --prompt "O Romeo"`: it needs no network.
    """
