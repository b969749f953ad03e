"""The application that every command joins, and its entry point."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import kvlab
from kvlab.errors import KvlabError

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
