"""``kvlab generate``: answer a prompt, and show what its two phases cost."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

import kvlab
from kvlab.cli.app import app, compiled_step

if TYPE_CHECKING:
    from kvlab.generation import Generation, Sampling
    from kvlab.weights import LoadedModel


@app.command()
def generate(
    prompt: Annotated[str, typer.Option(help="What to continue or answer; `-` reads standard input.")],
    model: Annotated[
        str,
        typer.Option(
            help="`tiny` (bundled), `smollm2` (135M, chat), a Hub id such as `Qwen/Qwen2.5-0.5B-Instruct`, "
            "or the path of a safetensors folder or a .gguf file."
        ),
    ] = "tiny",
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Stop after this many tokens at the latest.")] = 128,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's own end.")] = False,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; 1 samples as trained.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k likeliest tokens.")] = None,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens that reach this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this fraction of the likeliest.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    device: Annotated[str, typer.Option(help="`auto`, `cpu`, `cuda`, `cuda:1`, `mps`.")] = "auto",
    dtype: Annotated[str, typer.Option(help="`auto`, `float32`, `bfloat16`, `float16`.")] = "auto",
    weights: Annotated[
        str | None,
        typer.Option(help="`int8` or `int4` rounds them after loading; `stored` keeps the codes of a GGUF file."),
    ] = None,
    cache: Annotated[
        str,
        typer.Option(
            help="What the KV cache keeps: `full`; `window:WINDOW` the newest tokens; `streaming:SINKS+WINDOW` the "
            "first as well, as in `streaming:4+252`; `h2o:HEAVY+RECENT` those that are looked at; `snapkv:BUDGET` of "
            "the prompt, those that its end looks at."
        ),
    ] = "full",
    kv: Annotated[
        str, typer.Option(help="Layout of a full cache: `contiguous`, `paged`, `int8`, `int4`.")
    ] = "contiguous",
    endless: Annotated[
        bool, typer.Option("--endless", help="Never stop, until Ctrl-C; needs a window or streaming cache.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Answer a prompt, and show what its two phases cost.

    Text streams as it comes. The table at the end has prefill (the whole prompt in one pass, until the first token)
    and decode (one pass a token), with the bytes that the KV cache needs. After `kvlab compile` with the same model,
    weights and dtype, decode runs compiled.

    Examples:

    - `kvlab generate --model smollm2 --chat --prompt "What is gravity?"`
    - `kvlab generate --model tiny --prompt "O Romeo" --temperature 0.8 --top-p 0.9 --seed 1`
    - `kvlab generate --model smollm2 --weights stored --kv int8 --chat --prompt "What is gravity?"`
    - `kvlab generate --prompt "O Romeo" --cache streaming:4+252 --endless --temperature 0.8`
    """
    from kvlab.generation.sampling import Sampling

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    loaded = kvlab.load(model, device=device, dtype=dtype, weights=weights)  # type: ignore[arg-type]
    text = sys.stdin.read() if prompt == "-" else prompt
    ids: Any = loaded.tokenizer.chat([{"role": "user", "content": text}]) if chat else text
    kind = _kind(cache, kv)
    if endless:
        _run_endless(loaded, ids, kind, sampling, quiet=as_json)
        return
    generation = kvlab.generate(
        loaded, ids, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos, sampling=sampling, cache=kind,
        compiled=compiled_step(loaded, 1) if kind == "contiguous" else None,
    )  # fmt: skip
    interrupted = False
    try:
        for step in generation:
            _write(step.text, quiet=as_json)
    except KeyboardInterrupt:
        interrupted = True
    report = _report(generation, loaded, interrupted)
    print(json.dumps(report, ensure_ascii=False)) if as_json else _print_table(generation, loaded, report)
    if interrupted:
        raise typer.Exit(130)


def _kind(cache: str, kv: str) -> str:
    """The one kind that both options name; ``make_cache`` refuses those that exclude each other."""
    if cache == "full":
        return kv
    return cache if kv == "contiguous" else f"{cache}:{kv}"


def _write(text: str, quiet: bool) -> None:
    if not quiet:
        sys.stdout.write(text)
        sys.stdout.flush()


def _run_endless(loaded: LoadedModel, prompt: Any, kind: str, sampling: Sampling, quiet: bool) -> None:
    """Write until Ctrl-C, then say how far it came; nothing of the answer is kept."""
    from kvlab.cache import make_cache
    from kvlab.generation import endless

    model = loaded.model
    cache = make_cache(kind, model.config, 1, model.config.max_seq_len, model.dtype, model.device)
    count, seconds, first = 0, 0.0, 0.0
    try:
        for step in endless(loaded, prompt, cache=cache, sampling=sampling):
            count, seconds = count + 1, step.seconds
            first = first or seconds
            _write(step.text, quiet)
    except KeyboardInterrupt:
        report = {
            "new_tokens": count, "seconds": seconds, "tpot_s": (seconds - first) / (count - 1) if count > 1 else None,
            "tokens_held": cache.length, "kv_bytes": cache.nbytes, "model": loaded.name,
            "finish_reason": "interrupted",
        }  # fmt: skip
        line = f"\n\n{count:,} tokens in {seconds:,.1f} s; the cache holds {cache.length:,} in {cache.nbytes:,} bytes"
        print(json.dumps(report) if quiet else line)
        raise typer.Exit(130) from None


def _report(generation: Generation, loaded: LoadedModel, interrupted: bool) -> dict[str, Any]:
    """The figures of a generation, as ``--json`` prints them; times in seconds."""
    from kvlab.devices import dtype_name

    timing = generation.timing
    return {
        "text": generation.text,
        "prompt_tokens": timing.prompt_tokens[0],
        "new_tokens": len(generation.tokens[0]),
        "ttft_s": timing.ttft,
        "tpot_s": timing.tpot,
        "kv_bytes": timing.kv_bytes,
        "model": loaded.name,
        "device": str(loaded.model.device),
        "dtype": dtype_name(loaded.model.dtype),
        "finish_reason": "interrupted" if interrupted else generation.finish_reasons[0],
    }


def _print_table(generation: Generation, loaded: LoadedModel, report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    print("\n")
    if not report["new_tokens"]:
        return
    times = generation.timing.requests[0]
    table = Table(title=f"{report['model']} on {report['device']}, {report['dtype']}", title_justify="left")
    table.add_column("phase")
    for name in ("tokens", "seconds", "tokens/s", "KV bytes"):
        table.add_column(name, justify="right")
    each = generation.cache.bytes_per_token
    first, rest = times.ttft or 0.0, sum(times.itl)
    _add_phase(table, "[#D55E00]prefill[/]", report["prompt_tokens"], first, each)
    _add_phase(table, "[#0072B2]decode[/]", report["new_tokens"] - 1, rest, each)
    console = Console()
    console.print(table)
    console.print(f"[dim]finish reason: {report['finish_reason']}; weights: {loaded.source}[/]", highlight=False)


def _add_phase(table: Any, name: str, tokens: int, seconds: float, bytes_per_token: int) -> None:
    rate = f"{tokens / seconds:,.1f}" if seconds > 0 else "-"
    table.add_row(name, f"{tokens:,}", f"{seconds:.3f}", rate, f"{tokens * bytes_per_token:,}")
