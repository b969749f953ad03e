"""kvlab's serving engine beside vLLM's: equal requests, all at once, one run, taken in turns."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

from peers import run, shown, tell, vllm
from processes import Contender, Worker
from rounds import Figures

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Measure, print, write."""
    made = argparse.ArgumentParser(
        description=__doc__,
        epilog="Output tokens per second are all tokens of all answers over the time from the first request to the "
        "last token, prompts included. README.md says what to compile before, and how vLLM is installed.",
    )
    made.add_argument("--model", default="smollm2", help="what kvlab loads (smollm2)")
    made.add_argument(
        "--vllm", type=Path, metavar="PYTHON", help="interpreter of a vLLM environment; left out if absent"
    )
    made.add_argument("--requests", type=int, default=16, help="that are sent together (16)")
    made.add_argument("--prompt", type=int, default=64, help="tokens of each prompt (64)")
    made.add_argument("--new", type=int, default=128, help="tokens of each answer (128)")
    made.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of every contender (all)")
    made.add_argument("--rounds", type=int, default=5, help="(5)")
    made.add_argument("--json", type=Path, metavar="OUT", help="write everything that was measured here")
    options = made.parse_args()
    if min(options.requests, options.prompt, options.threads, options.rounds) < 1 or options.new < 4:
        made.error("--requests, --prompt, --threads and --rounds are 1 or more, --new is 4 or more")
    if options.json and not options.json.absolute().parent.is_dir():
        made.error(f"--json {options.json}: there is no such folder; create it first")
    with tempfile.TemporaryDirectory(prefix="serving-") as scratch:
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

    tell(f"writing {options.model} as a folder in the Hub's layout")
    folder = kvlab.load(options.model, device="cpu", dtype="bfloat16").save(scratch / "model")
    vocab = json.loads((folder / "config.json").read_text("utf8"))["vocab_size"]
    case = {"name": "together", "prompt": options.prompt, "new": options.new, "batch": options.requests}
    environment = {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    job = {"contender": "serving", "model": options.model, "load": {"dtype": "bfloat16"}, "case": case}
    job |= {"threads": options.threads, "vocab": vocab}
    everybody: list[Contender] = [
        Worker("kvlab", [sys.executable, str(HERE / "contenders.py"), json.dumps(job)], environment, scratch)
    ]
    if options.vllm:
        common = {"threads": options.threads, "vocab": vocab, "cases": [case]}
        everybody.append(vllm(options.vllm, folder, common, environment, scratch))
    answers, failed = run(everybody, options.rounds)
    rates = tokens_per_second(answers, options.requests * options.new)
    for name, values in rates.items():
        print(f"{name:<28}{median(values):8.1f} tokens/s   rounds: {', '.join(f'{value:.0f}' for value in values)}")
    ours = rates.get("kvlab together", [])
    for name in ("kvlab one after another", "vLLM together"):
        if ours and name in rates:
            print(f"kvlab together / {name}: {median(a / b for a, b in zip(ours, rates[name], strict=True)):.2f}")
    if options.json:
        result = {
            "suite": "serving",
            **provenance(torch.device("cpu")),
            "command": shown(["python", "benchmarks/serving.py", *sys.argv[1:]]),
            "commands": {one.name: shown(one.command) for one in everybody},
            "case": case,
            "output_tokens_per_second": {name: median(values) for name, values in rates.items()},
            "rounds": rates,
            "raw": answers,
            "failed": failed,
        }
        write_result(result, options.json)


def tokens_per_second(answers: dict[str, list[Figures]], tokens: int) -> dict[str, list[float]]:
    """Rates of every contender and way of serving, one a round.

    Args:
        answers: of the rounds, by contender.
        tokens: of all answers together.
    """
    found: dict[str, list[float]] = {}
    for name, rounds in answers.items():
        for one in rounds:
            for case, seconds in one["cases"].items():
                found.setdefault(f"{name} {case}", []).append(tokens / seconds["e2e_s"])
    return found


if __name__ == "__main__":
    main()
