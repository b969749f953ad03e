"""kvlab beside the engines that a user would pick instead: one model, the same requests, one run, taken in turns."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, NoReturn

from processes import Contender, LlamaCpp, PeerError, Worker, foreign_cpu_seconds, quantization_of
from rounds import TRANSFORMERS, Case, Figures, Rates, Ratio, cases_of, goals, medians, rates, ratio
from vllm_server import unhurried, variables_of

from kvlab.cost import Format, Hardware, flops, middle_step, predict, prefill_pass, step_bytes
from kvlab.errors import ConfigError

HERE = Path(__file__).resolve().parent
#: kvlab's contenders: the arguments of ``kvlab.load``, and the weights as the cost model names them.
FORMATS: dict[str, tuple[Figures, str | Format]] = {
    "float32": ({"dtype": "float32"}, "float32"),
    "bfloat16": ({"dtype": "bfloat16"}, "bfloat16"),
    "int8": ({"dtype": "bfloat16", "weights": "int8"}, Format(8)),
    "int4": ({"dtype": "bfloat16", "weights": "stored"}, "q4_1"),
}
#: Seconds of CPU time of other programs in one round from which its figures are suspect.
DISTURBED = 1.0
#: Seconds that are no part of any rate.
WAITS = ("load_s", "first_call_s")


def contenders(options: argparse.Namespace, cases: Sequence[Case], folder: Path, logs: Path) -> list[Contender]:
    """Everybody that takes part, in the order of a round.

    Args:
        options: of the command line.
        cases: what each runs.
        folder: the model as transformers and vLLM read it.
        logs: folder for what they print.
    """
    threads = options.threads
    environment = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    vocab = json.loads((folder / "config.json").read_text("utf8"))["vocab_size"]
    common = {"threads": threads, "vocab": vocab, "cases": [asdict(case) for case in cases]}

    def ours(name: str, **job: Any) -> Worker:
        command = [sys.executable, str(HERE / "contenders.py"), json.dumps({**job, **common})]
        return Worker(name, command, environment, logs)

    dtypes = sorted({FORMATS[name][0]["dtype"] for name in options.formats})
    found: list[Contender] = [
        ours("device", contender="device", dtypes=dtypes),
        ours(TRANSFORMERS[0], contender="transformers", folder=str(folder), static=False),
        ours(TRANSFORMERS[1], contender="transformers", folder=str(folder), static=True),
    ]
    if options.llama_cpp:
        found += [LlamaCpp(options.llama_cpp, gguf, cases, threads, logs) for gguf in options.gguf]
    if options.vllm:
        found.append(vllm(options.vllm, folder, common, environment, logs))
    for name in options.formats:
        found.append(ours(f"kvlab {name}", contender="kvlab", model=options.model, load=FORMATS[name][0]))
    return found


def vllm(python: Path, folder: Path, common: Mapping[str, Any], environment: Mapping[str, str], logs: Path) -> Worker:
    """vLLM, which takes over a minute to start and therefore stays.

    Args:
        python: interpreter of its environment.
        folder: the model.
        common: threads, vocab and cases.
        environment: on top of ours.
        logs: folder for what it prints.
    """
    cases = common["cases"]
    job = {
        "folder": str(folder),
        "max_len": max(case["prompt"] + case["new"] for case in cases),
        "batch": max(case["batch"] for case in cases),
        "vocab": common["vocab"],
        "cases": cases,
    }
    command = [str(python), str(HERE / "vllm_worker.py"), json.dumps(job)]
    return Worker("vLLM", command, {**environment, **variables_of(python, common["threads"])}, logs, stays=True)


def run(everybody: Sequence[Contender], rounds: int) -> tuple[dict[str, list[Figures]], dict[str, str]]:
    """Ask everybody in turn, round after round; who fails is left out from then on.

    Args:
        everybody: in the order of a round.
        rounds: how many.

    Returns:
        The answers by name, and the errors of those who failed, by name.
    """
    answers: dict[str, list[Figures]] = {}
    failed: dict[str, str] = {}
    done = False
    try:
        for number in range(rounds):
            for one in everybody:
                if one.name in failed:
                    continue
                tell(f"round {number + 1} of {rounds}: {one.name}")
                before = foreign_cpu_seconds([other.group for other in everybody if other.group])
                try:
                    answer = one.round()
                    after = foreign_cpu_seconds([other.group for other in everybody if other.group])
                    answers.setdefault(one.name, []).append(answer | {"foreign_cpu_s": after - before})
                except PeerError as failure:
                    failed[one.name] = str(failure)
                    answers.pop(one.name, None)
                    print(f"{one.name} is left out: {failure}", file=sys.stderr)
        done = True
    finally:
        with unhurried():
            for one in everybody:
                one.close(20 if done else 0)
    return answers, failed


def fastest(device: Sequence[Figures]) -> Hardware:
    """The calibration of the round in which memory was the fastest: a neighbour only ever makes it slower.

    Args:
        device: its rounds.
    """
    return max((Hardware.from_json(one["hardware"]) for one in device), key=lambda hardware: hardware.bandwidth)


def limits(
    config: Mapping[str, Any], cases: Sequence[Case], answers: Mapping[str, Sequence[Figures]]
) -> tuple[list[Ratio], Figures]:
    """How near bfloat16 comes to what the device can do, measured in the same rounds; and what that is.

    Args:
        config: the model's Hub config.
        cases: that were run.
        answers: of all contenders.
    """
    device, ours = answers.get("device"), answers.get("kvlab bfloat16")
    if not device:
        return [], {}
    hardware = fastest(device)
    assert hardware.calibration is not None
    read = hardware.calibration.read_bandwidth
    step = next(case for case in cases if case.new > 1 and case.batch == 1)
    (row,) = middle_step(step.prompt, step.new)
    needed = step_bytes(config, row.past)
    matmul = max(one["matmul_flops"] for one in device)
    facts = {
        "step_bytes": needed,
        "read_bandwidth": {str(int(size)): rate for size, rate in zip(read.x, read.y, strict=True)},
        "read_bandwidth_at_step_bytes": read.at(needed),
        "matmul_2048_flops": matmul,
        "noise": hardware.calibration.noise,
    }
    if not ours:
        return [], facts
    seconds = [one["cases"][step.name]["tpot_s"] for one in ours]
    reached = [
        Ratio(
            f"MBU of {step.name}, against reading {size / 2**20:,.0f} MiB at {rate / 1e9:.1f} GB/s",
            tuple(needed / took / rate for took in seconds),
            goal,
        )
        for size, rate, goal in ((read.x[-1], read.y[-1], 0.75), (needed, read.at(needed), None))
    ]
    for case in cases:
        if case.new == 1:
            work = flops(config, prefill_pass(case.prompt)).total
            reached.append(
                Ratio(
                    f"MFU of {case.name}, against a bf16 product of 2,048 cubed at {matmul / 1e9:,.0f} GFLOP/s",
                    tuple(work / one["cases"][case.name]["ttft_s"] / matmul for one in ours),
                    0.4 if case.prompt == 512 else None,
                )
            )
    return reached, facts


def parts(
    options: argparse.Namespace, config: Mapping[str, Any], cases: Sequence[Case], logs: Path, matmul: float
) -> dict[str, Rates]:
    """Attention's share of each prefill in bfloat16, by torch's profiler, and how the rest uses the device.

    Args:
        options: of the command line.
        config: the model's Hub config.
        cases: that were run.
        logs: folder for what is printed.
        matmul: operations per second that utilisation is measured against.
    """
    long = [case for case in cases if case.new == 1]
    job = {
        "contender": "profile",
        "model": options.model,
        "load": FORMATS["bfloat16"][0],
        "threads": options.threads,
        "prompts": [case.prompt for case in long],
    }
    tell("the parts of a prefill")
    command = [sys.executable, str(HERE / "contenders.py"), json.dumps(job)]
    answers, _ = run([Worker("profile", command, {"OMP_NUM_THREADS": str(options.threads)}, logs)], 1)
    made: dict[str, Rates] = {}
    for case, one in zip(long, answers["profile"][0]["profiles"] if answers else (), strict=bool(answers)):
        work = flops(config, prefill_pass(case.prompt))
        rest = (work.total - work.attention) / one["seconds"] / (1 - one["attention"]) / matmul
        made[case.name] = {**one, "mfu_of_the_rest": rest}
    return made


def predictions(
    config: Mapping[str, Any], cases: Sequence[Case], formats: Sequence[str], device: Hardware
) -> dict[str, Rates]:
    """What the cost model foresees for kvlab on the device, in tokens per second.

    Args:
        config: the model's Hub config.
        cases: that were run.
        formats: of kvlab's contenders.
        device: calibrated.
    """
    found: dict[str, Rates] = {}
    for name in formats:
        load, weights = FORMATS[name]
        took = {}
        try:
            for case in cases:
                one = predict(
                    config,
                    device,
                    prompt_tokens=case.prompt,
                    new_tokens=case.new,
                    batch=case.batch,
                    dtype=load["dtype"],
                    weights=weights,
                )
                took[case.name] = {"ttft_s": one.ttft, "tpot_s": one.tpot, "e2e_s": one.e2e}
        except ConfigError as failure:
            tell(f"no prediction for {name}: {failure}")
        found[f"kvlab {name}"] = rates(cases, took)
    return found


def shown(command: Sequence[str]) -> str:
    """A command without the folders of this machine.

    Args:
        command: its parts; JSON among them is looked into.
    """

    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: bare(one) for key, one in value.items()}
        return Path(value).name if isinstance(value, str) and os.path.isabs(value) else value

    parts = [json.dumps(bare(json.loads(part))) if part.startswith("{") else bare(part) for part in command]
    return " ".join(part if part == ";" else shlex.quote(part) for part in parts)


def tell(line: str) -> None:
    """Progress, on standard error.

    Args:
        line: of it.
    """
    print(line, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""\
What is measured, in tokens per second (medians over rounds):
  decode 1     one request, after a prompt of 32 tokens; --new tokens, the first is not counted
  decode 16    the same with --batch requests in every step
  output 16    all their tokens over all their time, prefill included: what a server calls output throughput
  prefill N    one prompt of N tokens, up to its first token
  load, first  seconds to load the model, and of the first short answer: compiling and packing happen there

Each round runs every contender once, in a process of its own; vLLM and the calibration of the device stay between
rounds and wait. Nothing else should run: look at the spread of the ratios.

Examples:
  python benchmarks/peers.py                                     # kvlab and transformers
  python benchmarks/peers.py --formats bfloat16 --rounds 3
  python benchmarks/peers.py --llama-cpp build/bin --gguf a-bf16.gguf a-q8_0.gguf a-q4_1.gguf \\
      --vllm vllm-env/bin/python --json peers.json               # everybody, 10 to 20 minutes

benchmarks/README.md says how llama.cpp and vLLM are built.""",
    )
    made.add_argument("--model", default="smollm2", help="what kvlab loads: a name, a Hub id or a path (smollm2)")
    made.add_argument("--hf", type=Path, metavar="FOLDER", help="the same model in the Hub's layout; made if not given")
    made.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="of kvlab (all)")
    made.add_argument("--llama-cpp", type=Path, metavar="DIR", help="folder with llama-bench")
    made.add_argument("--gguf", type=Path, nargs="+", default=[], metavar="FILE", help="what llama.cpp runs")
    made.add_argument("--vllm", type=Path, metavar="PYTHON", help="interpreter of a vLLM environment")
    made.add_argument("--prompt", type=int, nargs="+", default=[512, 1024], metavar="N", help="prefills (512 1024)")
    made.add_argument("--new", type=int, default=64, help="tokens of an answer (64)")
    made.add_argument("--batch", type=int, default=16, help="requests of the batched case (16)")
    made.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of every contender (all)")
    made.add_argument("--rounds", type=int, default=5, help="(5)")
    made.add_argument("--json", type=Path, metavar="OUT", help="write everything that was measured here")
    return made


def checked(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, after checking them before anything is started.

    Args:
        arguments: of the command line.
    """
    made = parser()
    options = made.parse_args(arguments)
    if min(*options.prompt, options.rounds, options.threads) < 1 or options.new < 4 or options.batch < 2:
        made.error("--prompt, --rounds and --threads are 1 or more, --new 4 or more, --batch 2 or more")
    if bool(options.llama_cpp) != bool(options.gguf):
        made.error("--llama-cpp and --gguf belong together: a folder with llama-bench, and the files that it runs")
    if len({quantization_of(gguf) for gguf in options.gguf}) < len(options.gguf):
        made.error("--gguf: two files have the same quantization in their names, and would be one row of the table")
    if options.hf and not (options.hf / "config.json").is_file():
        made.error(f"--hf {options.hf} has no config.json; leave it out, and the folder is made")
    if options.json and not options.json.absolute().parent.is_dir():
        made.error(f"--json {options.json}: there is no such folder; the run takes minutes, so create it first")
    return options


def interrupted(*_: Any) -> NoReturn:
    """A request to end is the same as Ctrl-C: everything that was started is stopped."""
    raise KeyboardInterrupt


def main() -> None:
    """Measure, print, write."""
    options = checked()
    signal.signal(signal.SIGTERM, interrupted)
    with tempfile.TemporaryDirectory(prefix="peers-") as scratch:
        try:
            compare(options, Path(scratch))
        except KeyboardInterrupt:
            raise SystemExit("stopped; nothing is left running") from None


def compare(options: argparse.Namespace, scratch: Path) -> None:
    """The whole run.

    Args:
        options: of the command line.
        scratch: a folder that goes away afterwards.
    """
    import torch

    import kvlab
    from kvlab.measure.bench import provenance
    from kvlab.measure.suite import write_result

    begun = monotonic()
    folder = options.hf
    if folder is None:
        tell(f"writing {options.model} as a folder in the Hub's layout")
        folder = kvlab.load(options.model, device="cpu", dtype="bfloat16").save(scratch / "model")
    config = json.loads((folder / "config.json").read_text("utf8"))
    cases = cases_of(options.prompt, options.new, options.batch)
    everybody = contenders(options, cases, folder.absolute(), scratch)
    answers, failed = run(everybody, options.rounds)
    rounds = {
        name: [rates(cases, one["cases"]) for one in given] for name, given in answers.items() if name != "device"
    }
    found = [ratio(goal, rounds) or goal for goal in goals(options.prompt, options.batch)]
    reached, facts = limits(config, cases, answers)
    if facts and "kvlab bfloat16" in rounds:
        facts["parts"] = parts(options, config, cases, scratch, facts["matmul_2048_flops"])
    foreseen = {}
    if "device" in answers:
        foreseen = predictions(config, cases, options.formats, fastest(answers["device"]))
    result = {
        "suite": "peers",
        **provenance(torch.device("cpu")),
        "command": shown(["python", "benchmarks/peers.py", *sys.argv[1:]]),
        "commands": {one.name: shown(one.command) for one in everybody},
        "peers": {name: given[-1]["versions"] for name, given in answers.items() if "versions" in given[-1]},
        "model": options.model,
        "threads": options.threads,
        "seconds": monotonic() - begun,
        "cases": [asdict(case) for case in cases],
        "limits": facts,
        "contenders": {
            name: {
                "tokens_per_second": medians(rounds[name]),
                "predicted_tokens_per_second": foreseen.get(name),
                "rounds": rounds[name],
                "raw": answers[name],
            }
            for name in rounds
        },
        "device_rounds": answers.get("device", []),
        "failed": failed,
        "ratios": [
            {"title": one.title, "median": one.median, "rounds": one.rounds, "at_least": one.at_least}
            if isinstance(one, Ratio)
            else {"title": one.title, "median": None, "rounds": [], "at_least": one.at_least}
            for one in (*found, *reached)
        ],
    }
    show(result)
    if options.json:
        write_result(result, options.json)
    if not rounds:
        raise SystemExit("nothing could be measured")


def show(result: Mapping[str, Any]) -> None:
    """Print what was found.

    Args:
        result: as it is written.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=max(Console().width, 130))
    names = list(dict.fromkeys(name for one in result["contenders"].values() for name in one["tokens_per_second"]))
    table = Table(title=f"{result['model']}, tokens per second, {result['device']}", title_justify="left")
    for title in ("", *(name.replace("_", " ") for name in names), "load, s", "first call, s"):
        table.add_column(title, justify="right" if title else "left")
    for name, one in result["contenders"].items():
        waits = [median(raw[key] for raw in one["raw"]) if key in one["raw"][0] else None for key in WAITS]
        cells = [amount(one["tokens_per_second"].get(rate)) for rate in names]
        table.add_row(name, *cells, *("" if wait is None else f"{wait:.1f}" for wait in waits))
        if one["predicted_tokens_per_second"]:
            table.add_row("  predicted", *(amount(one["predicted_tokens_per_second"].get(rate)) for rate in names))
    console.print(table)
    table = Table(title="ratios, median of the rounds", title_justify="left")
    for title in ("", "ratio", "lowest", "highest", "wanted", ""):
        table.add_column(title, justify="left" if title == "" else "right")
    for one in result["ratios"]:
        wanted = "" if one["at_least"] is None else f"{one['at_least']:g}"
        if one["median"] is None:
            table.add_row(one["title"], "", "", "", wanted, "not measured")
            continue
        verdict = "" if one["at_least"] is None else ("reached" if one["median"] >= one["at_least"] else "missed")
        table.add_row(
            one["title"], f"{one['median']:.2f}", f"{min(one['rounds']):.2f}", f"{max(one['rounds']):.2f}", wanted,
            verdict,
        )  # fmt: skip
    console.print(table)
    facts = result["limits"]
    if "parts" in facts:
        for name, one in facts["parts"].items():
            console.print(
                f"{name} of kvlab bfloat16: attention takes {one['attention']:.0%} of the time; "
                f"MFU of all the rest {one['mfu_of_the_rest']:.2f}"
            )
    if facts.get("noise"):
        console.print(f"noise floor of the device: the same measurement twice differs by {facts['noise']:.1%} (median)")
    raws = {name: one["raw"] for name, one in result["contenders"].items()} | {"device": result["device_rounds"]}
    for name, raw in raws.items():
        busy = max((one["foreign_cpu_s"] for one in raw), default=0.0)
        if busy > DISTURBED:
            console.print(f"{name} was disturbed: others took up to {busy:.1f} s of CPU time during one of its rounds")
        notes = {one["note"] for one in raw if one.get("note")}
        if notes:
            console.print(f"{name}: {'; '.join(sorted(notes))}", markup=False)
    for name, command in result["commands"].items():
        versions = ", ".join(f"{what} {which}" for what, which in result["peers"].get(name, {}).items())
        console.print(f"{name}{f' ({versions})' if versions else ''}: {command}", markup=False, soft_wrap=True)
    for name, why in result["failed"].items():
        console.print(f"{name} is left out: {why}", markup=False)


def amount(rate: float | None) -> str:
    """A rate for the table.

    Args:
        rate: tokens per second, or None.
    """
    return "" if rate is None else f"{rate:,.1f}" if rate < 1000 else f"{rate:,.0f}"


if __name__ == "__main__":
    main()
