"""What is played against a running vLLM: each scene loads the server, asks the tools, and judges their answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from processes import PeerError, end, foreign_cpu_seconds, gone, last_error, log_of, start
from rounds import Figures
from verdicts import Check, agreement, counted, failed, findable, named, times_of_benches, times_of_loadtests, told
from vllm_server import KV_SPACE_GIB, Environment, Server, unhurried, until

from kvlab.cost import GIB, Hardware, Pool
from kvlab.errors import KvlabError
from kvlab.operate.exchange import Dialect, Target
from kvlab.operate.facts import facts
from kvlab.operate.loadtest import loadtest
from kvlab.operate.plan import Deployment, Goal, plan
from kvlab.operate.prometheus import Page, read_page
from kvlab.operate.report import LoadTestResult
from kvlab.operate.schedule import Load
from kvlab.operate.scrape import scrape
from kvlab.operate.sizing import instance
from kvlab.timing import Clock

#: The model by the name that clients use, and as a preset of its shape.
MODEL, PRESET = "smollm2", "smollm2-135m"
#: Seconds that a program of a scene may take, and a state of the server until it is there.
_PROGRAM_S, _STATE_S = 300, 120
PROMPT, OUTPUT = 64, 64


@dataclass
class Lab:
    """A running server, and the programs that are pointed at it.

    Args:
        environment: that vLLM is in.
        server: that runs.
        folder: of the model.
        logs: folder for everything that is written.
        hardware: this device as it was calibrated.
        rounds: of the comparison.
        results: what is worth keeping beside the verdicts.
    """

    environment: Environment
    server: Server
    folder: Path
    logs: Path
    hardware: Hardware
    rounds: int
    results: Figures = field(default_factory=dict)

    def page(self) -> Page:
        """The server's metrics page, now."""
        return read_page(scrape(f"{self.server.url}/metrics", Clock()))

    def kept(self, name: str) -> Path:
        """The metrics page, now, in a file.

        Args:
            name: of the file, without its ending.
        """
        path = self.logs / f"{name}.prom"
        path.write_text(scrape(f"{self.server.url}/metrics", Clock()), "utf8")
        return path

    def settled(self) -> Page:
        """The metrics page when nobody runs any more."""
        until(lambda: self.gauge("num_requests_running") == 0, _STATE_S, "no request runs")
        return self.page()

    def gauge(self, name: str) -> float:
        """A number of the metrics page.

        Args:
            name: without ``vllm:``.
        """
        return self.page().total(name) or 0.0

    def when(self, name: str, least: float) -> None:
        """Wait for a number of the metrics page.

        Args:
            name: without ``vllm:``.
            least: that it has to reach.

        Raises:
            PeerError: it does not.
        """
        until(lambda: self.gauge(name) >= least, _STATE_S, f"{name} is {least:g} or more")

    @contextmanager
    def loading(self, name: str, *arguments: str) -> Iterator[Job]:
        """``kvlab loadtest`` beside what is done meanwhile.

        Args:
            name: of its files.
            arguments: of the command, beside the server's.
        """
        asked = ["loadtest", "--url", self.server.url, "--model", MODEL, "--json", *arguments]
        with running(_kvlab(*asked), self.logs, name) as job:
            yield job

    def loadtest(self, name: str, *arguments: str) -> Figures:
        """``kvlab loadtest`` to its end.

        Args:
            name: of its files.
            arguments: of the command, beside the server's.
        """
        with self.loading(name, *arguments) as job:
            return job.report()

    def diagnose(self, name: str, *arguments: str) -> Figures:
        """``kvlab diagnose``.

        Args:
            name: of its files.
            arguments: of the command.
        """
        with running(_kvlab("diagnose", "--json", *arguments), self.logs, name) as job:
            return job.report()

    def live(self, name: str, seconds: float) -> Figures:
        """``kvlab diagnose`` on the server as it is.

        Args:
            name: of its files.
            seconds: between the two reads.
        """
        return self.diagnose(name, "--url", f"{self.server.url}/metrics", "--seconds", f"{seconds:g}")


@dataclass
class Job:
    """A program that runs, and answers with JSON.

    Args:
        process: it.
        name: of its files.
        logs: the folder that they are in.
    """

    process: subprocess.Popen[str]
    name: str
    logs: Path

    def report(self, said: str = "") -> Figures:
        """What it prints, when it has ended.

        Args:
            said: on its standard input.

        Raises:
            PeerError: it does not end, or does not print JSON.
        """
        log = log_of(self.name, self.logs)
        try:
            text, _ = self.process.communicate(said, timeout=_PROGRAM_S)
        except subprocess.TimeoutExpired:
            raise PeerError(f"{self.name} gave no answer in {_PROGRAM_S} s; its log: {log}") from None
        try:
            found: Figures = json.loads(text)
        except ValueError:
            raise PeerError(f"{self.name} ended with {self.process.returncode}: {last_error(log)}") from None
        (self.logs / f"{self.name}.json").write_text(text, "utf8")
        return found


@contextmanager
def running(command: Sequence[str], logs: Path, name: str, environment: Environment | None = None) -> Iterator[Job]:
    """A program, and afterwards nothing of it.

    Args:
        command: that starts it.
        logs: folder for what it writes.
        name: of its files.
        environment: that it is in; None for ours.
    """
    process = start(command, environment.variables if environment else {}, log_of(name, logs))
    try:
        yield Job(process, name, logs)
    finally:
        with unhurried():
            end(process, 0)


def _kvlab(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvlab", *arguments]


def idle(lab: Lab) -> list[Check]:
    """Nobody asks anything: nothing may be wrong."""
    return [named("idle", "of an idle server", [lab.live("idle", 3)], None)]


def same_as_vllm(lab: Lab) -> list[Check]:
    """vLLM's own load test and ours, in turns, with an open and with a closed loop.

    In the open loop ours sends when theirs did: of two draws of arrivals one meets more of its own requests, and thirty
    of them have medians that differ by a fifth for that alone.
    """
    lab.loadtest("warm-up", "--concurrency", "8", "--requests", "8", *_size(PROMPT, 16))
    loads = {"rate 1/s": Load(rate=1.0, requests=30), "closed loop 8": Load(concurrency=8, requests=64)}
    checks: list[Check] = []
    for name, load in loads.items():
        turns = [_turn(lab, name, load, number) for number in range(lab.rounds)]
        ours = [turn.ours for turn in turns]
        checks += agreement(name, times_of_loadtests(ours), times_of_benches([turn.theirs for turn in turns]))
        checks.append(counted(name, ours, [turn.pages for turn in turns]))
        lab.results[name] = [turn.report() for turn in turns]
    return checks


@dataclass(frozen=True)
class Turn:
    """A round of both clients, one after the other.

    Args:
        ours: what ``kvlab loadtest`` found.
        theirs: what ``vllm bench serve`` found.
        pages: of the server, before and after ours.
        foreign_cpu_s: CPU seconds that other programs took during ours and during theirs.
    """

    ours: LoadTestResult
    theirs: Figures
    pages: tuple[Page, Page]
    foreign_cpu_s: tuple[float, float]

    def report(self) -> Figures:
        """The figures of both, without the single requests."""
        theirs = {name: value for name, value in self.theirs.items() if isinstance(value, int | float)}
        return {"ours": self.ours.report(), "theirs": theirs, "foreign_cpu_s": list(self.foreign_cpu_s)}


def _turn(lab: Lab, name: str, load: Load, number: int) -> Turn:
    asked = replace(load, workload=f"fixed:{PROMPT}/{OUTPUT}", seed=number, warmup=0)
    stem = f"bench-{name.replace('/', '-').replace(' ', '-')}-{number}"
    lab.settled()
    if not load.rate and number % 2:  # whoever comes second meets a warmer server: they take turns
        ours, pages, more = _ours(lab, asked)
        theirs, foreign = _theirs(lab, asked, stem)
    else:
        theirs, foreign = _theirs(lab, asked, stem)
        if load.rate:
            asked = same_arrivals(asked, theirs["start_times"], lab.logs / f"{stem}.jsonl")
        ours, pages, more = _ours(lab, asked)
    return Turn(ours, theirs, pages, (more, foreign))


def same_arrivals(load: Load, times: Sequence[float], path: Path) -> Load:
    """A load of an open loop that sends when another client did.

    Args:
        load: with all its other settings.
        times: when the other client sent, in seconds of any clock.
        path: of the trace that is written for it.
    """
    sizes = {"prompt_tokens": PROMPT, "output_tokens": OUTPUT}
    lines = [json.dumps({"time": time - min(times), **sizes}) for time in sorted(times)]
    path.write_text("\n".join(lines) + "\n", "utf8")
    return replace(load, rate=None, trace=path, requests=len(lines))


def _foreign(lab: Lab) -> float:
    return foreign_cpu_seconds([lab.server.process.pid])


def _ours(lab: Lab, load: Load) -> tuple[LoadTestResult, tuple[Page, Page], float]:
    """Without a probe and without a warm-up, so that the server counts nothing else; prompts are text, as theirs are.

    Returns the result, the server's pages before and after it, and the CPU seconds of other programs meanwhile.
    """
    before, begun = lab.page(), _foreign(lab)
    found = loadtest(Target(lab.server.url, MODEL, dialect=Dialect()), replace(load, tokenizer=lab.folder))
    if found.interrupted:
        raise KeyboardInterrupt
    return found, (before, lab.settled()), _foreign(lab) - begun


def _theirs(lab: Lab, load: Load, name: str) -> tuple[Figures, float]:
    """Their result, and the CPU seconds of other programs meanwhile."""
    begun = _foreign(lab)
    loop = ["--request-rate", f"{load.rate:g}"] if load.rate else ["--max-concurrency", str(load.concurrency)]
    command = lab.environment.command(
        "bench", "serve", "--backend", "openai", "--base-url", lab.server.url, "--endpoint", "/v1/completions",
        "--model", MODEL, "--tokenizer", str(lab.folder), "--dataset-name", "random", "--random-input-len", str(PROMPT),
        "--random-output-len", str(OUTPUT), "--random-range-ratio", "0", "--ignore-eos", "--temperature", "0",
        "--num-prompts", str(load.requests), *loop, "--seed", str(load.seed), "--disable-tqdm", "--save-result",
        "--save-detailed", "--result-dir", str(lab.logs), "--result-filename", f"{name}.json",
    )  # fmt: skip
    with running(command, lab.logs, name, lab.environment) as job:
        try:
            text, _ = job.process.communicate(timeout=_PROGRAM_S)
        except subprocess.TimeoutExpired:
            raise PeerError(f"vllm bench serve was not ready in {_PROGRAM_S} s") from None
        (lab.logs / f"{name}.txt").write_text(text, "utf8")
        if job.process.returncode:
            raise PeerError(
                f"vllm bench serve ended with {job.process.returncode}: {last_error(log_of(name, lab.logs))}"
            )
    found: Figures = json.loads((lab.logs / f"{name}.json").read_text("utf8"))
    if found["completed"] != load.requests:
        raise PeerError(f"vllm bench serve completed {found['completed']} of {load.requests} requests")
    lab.settled()
    return found, _foreign(lab) - begun


def overload(lab: Lab) -> list[Check]:
    """Twice as many at once as there are seats."""
    before = lab.kept("overload-before")
    with lab.loading("overload", "--concurrency", "32", "--requests", "96", *_size(64, 128), *_COLD) as job:
        lab.when("num_requests_waiting", 8)
        live = lab.live("overload-live", 5)
        result = job.report()
    after = lab.kept("overload-after")
    pages = ["--file", str(before), "--file", str(after)]
    both = lab.diagnose("overload-after", *pages, "--loadtest", str(lab.logs / "overload.json"))
    lab.results["overload"] = result["figures"]
    return [
        named("overload", "while 32 ask for 16 seats", [live], "queueing"),
        named("overload", "afterwards, pages and load test", [both], "queueing"),
    ]


def prefixes(lab: Lab) -> list[Check]:
    """Prompts that begin alike, and prompts that do not."""
    shared = Load(requests=24, concurrency=8, workload="shared-prefix")
    possible = findable(shared.arrivals())
    checks = []
    for name, workload in (("shared prefix", ["--workload", "shared-prefix"]), ("unique prompts", _size(1056, 32))):
        stem = name.replace(" ", "-")
        before = lab.kept(f"{stem}-before")
        lab.loadtest(stem, "--concurrency", "8", "--requests", "24", *workload, *_COLD)
        after = lab.kept(f"{stem}-after")
        rate = facts(read_page(before.read_text("utf8")), read_page(after.read_text("utf8"))).hit_rate
        report = lab.diagnose(f"{stem}-diagnosis", "--file", str(before), "--file", str(after))
        causes = [finding["cause"] for finding in report["causes"]]
        said = f"{rate or 0:.1%} of the prompt tokens were found; diagnosis: {', '.join(causes) or 'nothing is wrong'}"
        if name == "shared prefix":
            asked = f"hit rate half or more of the {possible:.1%} that could be found, and no useless cache named"
            good = rate is not None and possible / 2 <= rate <= possible and "prefix-cache-useless" not in causes
        else:
            asked, good = "prompts that share nothing: hit rate 0", rate == 0
        checks.append(Check("prefix cache", asked, said, good, {"hit_rate": rate, "possible": possible}))
    return checks


def interference(lab: Lab) -> list[Check]:
    """Four streams, and prompts of 1,900 tokens that are read beside them."""
    alone = ["--concurrency", "4", "--requests", "4", *_size(64, 600), *_COLD]
    with lab.loading("streams", *alone) as streams:
        lab.when("num_requests_running", 4)
        before = lab.kept("interference-before")
        paced = ["--rate", "0.6", "--burstiness", "0.2", "--requests", "6", *_size(1900, 8)]
        lab.loadtest("long-prompts", *paced, *_COLD)
        after = lab.kept("interference-after")
        result = streams.report()
    report = lab.diagnose("interference", "--file", str(before), "--file", str(after))
    lab.results["interference"] = result["figures"]
    return [named("long prompts", "while they are read", [report], "prefill-interference")]


def pool(lab: Lab) -> list[Check]:
    """The planner's KV pool against the server's own account."""
    page, space = lab.page(), KV_SPACE_GIB * GIB
    size = int(page.label("cache_config_info", "block_size") or 0)
    blocks = int(page.label("cache_config_info", "num_gpu_blocks") or 0)
    arithmetic = Pool.of(PRESET, space, block_size=size)
    made = plan(with_space(lab.hardware, space), Goal(prompt_tokens=PROMPT, output_tokens=OUTPUT, rate=1.0))
    planned = made.replica.pool.tokens if made.replica and made.replica.pool else 0
    asked = f"KV pool of {KV_SPACE_GIB} GiB in blocks of {size}"
    figures = {"tokens": arithmetic.tokens, "server_tokens": size * blocks, "planned_tokens": planned}
    report = made.report()
    lab.results["plan"] = {name: report[name] for name in ("verdict", "replica", "planned", "notes")}
    return [
        Check("plan", asked, f"{arithmetic.tokens:,} tokens; the server has {size * blocks:,}",
              arithmetic.blocks == blocks, figures),
        Check("plan", "kvlab plan's pool is the server's, up to one of its blocks",
              f"{planned:,} tokens in blocks of 16; {made.verdict}", abs(planned - size * blocks) <= size),
        _limits(lab, report),
    ]  # fmt: skip


def with_space(hardware: Hardware, space: int) -> Deployment:
    """This device with as much memory as leaves such a pool: on a CPU the pool is asked for, not what is left.

    Of the calibration its peaks alone: the curves are those of kvlab's own kernels and of its host, not of vLLM's.

    Args:
        hardware: this device.
        space: bytes of the pool.
    """
    peaks = replace(hardware, calibration=None, memory_bytes=16 * GIB)
    whole = Deployment(model=PRESET, hardware=peaks, gpus=1, utilization=1.0)
    ledger = instance(whole, 1, 1).ledger
    memory = space + ledger.weights + ledger.activations + ledger.non_torch
    return replace(whole, hardware=replace(peaks, memory_bytes=memory))


def _limits(lab: Lab, report: Figures) -> Check:
    """The planner's times are those of the device's peaks: a server that were faster would refute them."""
    alone = report["replica"]["alone"]
    seen = lab.results.get("rate 1/s")
    asked = "the planner's limits, from this device's peaks, lie below what was measured"
    if not seen:
        return Check("plan", asked, "nothing was measured", False)
    found = {name: min(each["ours"][name]["p50"] for each in seen) for name in ("ttft_s", "tpot_s")}
    said = ", ".join(
        f"{name[:4].upper()} {alone[name] * 1e3:.1f} ms, measured {found[name] * 1e3:.1f}" for name in found
    )
    return Check("plan", asked, said, all(alone[name] <= found[name] for name in found), {"measured": found})


def preemption(lab: Lab) -> list[Check]:
    """Sixteen answers that together need three times the pool."""
    before = lab.kept("preemption-before")
    with lab.loading("preemption", "--concurrency", "16", "--requests", "16", *_size(64, 512), *_COLD) as job:
        lab.when("num_requests_waiting", 1)
        live = lab.live("preemption-live", 8)
        result = job.report()
    after = lab.kept("preemption-after")
    later = lab.diagnose("preemption-after", "--file", str(before), "--file", str(after))
    lab.results["preemption"] = result["figures"]
    thrown_out = lab.gauge("num_preemptions_total")
    whole = result["figures"]["completed"] == 16
    return [
        named("tiny pool", "during or after", [live, later], "preemption"),
        Check("tiny pool", "every answer came to its end all the same",
              f"{result['figures']['completed']} of 16, after {thrown_out:,.0f} preemptions", whole and thrown_out > 0),
    ]  # fmt: skip


def admission(lab: Lab) -> list[Check]:
    """Forty at once, where twenty may be in the house."""
    before = lab.kept("admission-before")
    result = lab.loadtest("admission", "--concurrency", "40", "--requests", "40", *_size(PROMPT, OUTPUT), *_COLD)
    lab.settled()
    after = lab.kept("admission-after")
    pages = ["--file", str(before), "--file", str(after)]
    both = lab.diagnose("admission-both", *pages, "--loadtest", str(lab.logs / "admission.json"))
    figures = result["figures"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in figures["errors"].items())
    every = figures["completed"] + figures["failed"] == 40 == len(result["requests"])
    known = bool(figures["errors"]) and set(figures["errors"]) <= {"http-503", "in-band"}
    lab.results["admission"] = figures
    return [
        named("admission limit", "by pages and load test", [both], "admission-limit"),
        Check("admission limit", "every refusal is told: 503, or an error inside a 200",
              f"{figures['completed']} of 40 answered; {kinds or 'none refused'}", every and known, figures["errors"]),
    ]  # fmt: skip


def killed(lab: Lab) -> list[Check]:
    """``kill -9`` of the server in the middle of a run."""
    done = lab.gauge("request_success_total")
    with lab.loading("killed", "--concurrency", "8", "--requests", "48", *_size(64, 128), *_COLD) as job:
        # The probe and the first eight have ended, and the next ones stream.
        lab.when("request_success_total", done + 9)
        lab.when("num_requests_running", 4)
        until(lambda: lab.gauge("num_requests_running") >= 4, _STATE_S, "answers stream")
        os.kill(lab.server.process.pid, signal.SIGKILL)
        result = job.report()
    report = lab.diagnose("killed-diagnosis", "--loadtest", str(lab.logs / "killed.json"))
    with unhurried():
        end(lab.server.process, 0)
    nothing = gone(lab.server.process, 0, 1.0)
    words = "its process group is gone" if nothing else "processes of it still run"
    lab.results["killed"] = result["figures"]
    return [
        *told("kill -9", result, 48),
        named("kill -9", "of the load test alone", [report], "server-errors"),
        Check("kill -9", "nothing of the server is left running", words, nothing),
    ]


def start_up_error(server: Server, logs: Path, tokens: int) -> list[Check]:
    """A server whose pool cannot hold one request of its greatest length: its own log, diagnosed.

    Args:
        server: that was started so; it ends by itself.
        logs: folder for what is written.
        tokens: that its pool can serve.
    """
    status = server.ended()
    text = server.log.read_text("utf8", errors="replace")
    with running(_kvlab("diagnose", "--json", "--error", "-"), logs, "start-up-diagnosis") as job:
        report = job.report(text)
    remedy = report["causes"][0]["remedy"] if report["causes"] else ""
    told_so = str(tokens) in remedy.replace(",", "")
    return [
        named("start-up error", "of its log", [report], "max-model-len-over-pool"),
        Check("start-up error", f"it ended, and the remedy names the {tokens:,} tokens that fit",
              f"exit status {status}; {remedy or 'no remedy'}", status != 0 and told_so),
    ]  # fmt: skip


#: Nothing is sent before a run: the server's counters start with it, up to one probe.
_COLD = ("--warmup", "0")


def _size(prompt: int, output: int) -> list[str]:
    return ["--prompt-tokens", str(prompt), "--output-tokens", str(output)]


Scene = Callable[[Lab], list[Check]]

#: A server with its flags, and what is played on it.
COMMON = ("--max-num-seqs", "16")
TINY_BLOCKS, TINY_BLOCK = 80, 32
_TINY = ("--enforce-eager", "--block-size", str(TINY_BLOCK), "--num-gpu-blocks-override", str(TINY_BLOCKS))
SERVERS: dict[str, tuple[tuple[str, ...], tuple[Scene, ...]]] = {
    "main": (
        (*COMMON, "--max-model-len", "2048"),
        (idle, same_as_vllm, pool, overload, prefixes, interference),
    ),
    "tiny": (
        (*COMMON, "--max-model-len", "2048", *_TINY, "--max-num-queued-reqs", "20"),
        (preemption, admission, killed),
    ),
}
#: A request of the greatest length needs three times this pool.
IMPOSSIBLE = (*COMMON, "--max-model-len", "8192", *_TINY)


def played(scene: Scene, lab: Lab) -> list[Check]:
    """A scene, or why it could not be played to its end.

    Args:
        scene: to play.
        lab: to play it in.
    """
    try:
        return scene(lab)
    except (PeerError, KvlabError) as failure:
        return [failed(scene.__name__.replace("_", " "), str(failure))]
