"""Contenders as processes: asked for a round, timed by themselves, and never left running."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Protocol

from rounds import Case, Figures

#: Seconds without an answer after which a contender has failed.
PATIENCE = 900


class PeerError(Exception):
    """A contender cannot be measured; the message is one line."""


class Contender(Protocol):
    """Somebody who can be asked for a round."""

    name: str
    command: list[str]

    def round(self) -> Figures:
        """Measure every case once; ``cases`` holds the seconds."""

    @property
    def group(self) -> int | None:
        """Its process group, while it is running."""

    def close(self, patience: float = 20) -> None:
        """Leave nothing running.

        Args:
            patience: seconds that an orderly end may take.
        """


class _Owner:
    """Holds at most one process group."""

    _process: subprocess.Popen[str] | None = None

    @property
    def group(self) -> int | None:
        """See :class:`Contender`."""
        return None if self._process is None else self._process.pid

    def close(self, patience: float = 20) -> None:
        """See :class:`Contender`."""
        process, self._process = self._process, None
        if process is not None:
            end(process, patience)


class Worker(_Owner):
    """A contender in a process group of its own, which answers every line on its standard input with one of JSON.

    Args:
        name: in the table.
        command: starts it.
        environment: on top of ours.
        logs: folder for what it prints.
        stays: keep it between rounds, because its start takes too long.
    """

    def __init__(
        self, name: str, command: list[str], environment: Mapping[str, str], logs: Path, *, stays: bool = False
    ) -> None:
        self.name, self.command = name, command
        self._environment = {**environment, "TMPDIR": str(logs)}
        self._log = log_of(name, logs)
        self._stays = stays

    def round(self) -> Figures:
        """See :class:`Contender`.

        Raises:
            PeerError: it does not answer; the message is the error that it printed.
        """
        if self._process is None:
            self._process = start(self.command, self._environment, self._log)
        answer = self._answer(self._process)
        if not answer or not self._stays:
            self.close()
        if not answer:
            raise PeerError(last_error(self._log))
        found: Figures = json.loads(answer)
        return found

    def _answer(self, process: subprocess.Popen[str]) -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write("\n")
            process.stdin.flush()
        except BrokenPipeError:
            return ""
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE)
        return process.stdout.readline() if ready else ""


class LlamaCpp(_Owner):
    """llama.cpp's own benchmarks on one GGUF file, started anew each round; both warm up by themselves.

    Args:
        folder: holds ``llama-bench``, and ``llama-batched-bench`` if it was built.
        gguf: the model.
        cases: what to run.
        threads: to use.
        logs: folder for what it prints.
    """

    def __init__(self, folder: Path, gguf: Path, cases: Sequence[Case], threads: int, logs: Path) -> None:
        self.name = f"llama.cpp {quantization_of(gguf)}"
        self._cases, self._log = cases, log_of(self.name, logs)
        libraries = os.pathsep.join([str(folder), os.environ.get("LD_LIBRARY_PATH", "")])
        self._environment = {"LD_LIBRARY_PATH": libraries}
        self._commands = {case.name: self._command(folder, gguf, case, threads) for case in cases}
        self.command = [part for command in self._commands.values() for part in (*command, ";")][:-1]
        self._version = [str(folder / "llama-bench"), "--version"]

    def round(self) -> Figures:
        """See :class:`Contender`.

        Raises:
            PeerError: a program is missing or fails.
        """
        said = self._run(self._version) + self._log.read_text("utf8")
        version = said.strip().split("\n")[0].removeprefix("version: ")
        found: Figures = {"cases": {}, "versions": {"llama.cpp": version}}
        for case in self._cases:
            command = self._commands[case.name]
            if case.batch > 1 and not Path(command[0]).is_file():
                found["note"] = "llama-batched-bench is not built"
                continue
            text = self._run(command)
            found["cases"][case.name] = batched_bench(text, case) if case.batch > 1 else llama_bench(text, case)
        return found

    def close(self, patience: float = 0) -> None:
        """Its programs have nothing to put in order."""
        super().close(0)

    @staticmethod
    def _command(folder: Path, gguf: Path, case: Case, threads: int) -> list[str]:
        common = ["-m", str(gguf), "-t", str(threads)]
        if case.batch > 1:
            size = ["-npp", str(case.prompt), "-ntg", str(case.new), "-npl", str(case.batch)]
            return [str(folder / "llama-batched-bench"), *common, *size, "--output-format", "jsonl"]
        size = ["-p", str(case.prompt), "-n", "0"]
        if case.new > 1:
            size = ["-p", "0", "-n", str(case.new), "-d", str(case.prompt)]
        return [str(folder / "llama-bench"), *common, "-r", "1", "-o", "json", *size]

    def _run(self, command: list[str]) -> str:
        self._process = start(command, self._environment, self._log)
        name = Path(command[0]).name
        try:
            text, _ = self._process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self.close()
            raise PeerError(f"{name} gave no answer in {PATIENCE} s") from None
        status, self._process = self._process.returncode, None
        if status:
            raise PeerError(f"{name} ended with {status}: {last_error(self._log)}")
        return text


def start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[str]:
    """Start a program as the leader of a process group.

    Args:
        command: its parts.
        environment: on top of ours.
        log: where its standard error goes.

    Raises:
        PeerError: it cannot be started.
    """
    pipe = subprocess.PIPE
    try:
        with log.open("w") as errors:
            return subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                stderr=errors,
                text=True,
                env={**os.environ, **environment},
                start_new_session=True,
            )
    except OSError as failure:
        raise PeerError(f"{command[0]} cannot be started: {failure.strerror}") from None


def end(process: subprocess.Popen[str], patience: float) -> None:
    """End a whole process group: by closing its standard input, and where that is not enough by signals.

    Args:
        process: the group's leader.
        patience: seconds that the orderly end may take.
    """
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    for sign, wait in ((0, patience), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        if gone(process, sign, wait):
            return


def gone(process: subprocess.Popen[str], sign: int, patience: float) -> bool:
    """Send a signal to a whole process group and wait for its last member to end.

    Args:
        process: the group's leader.
        sign: the signal; 0 sends none.
        patience: seconds to wait.
    """
    latest = monotonic() + patience
    while True:
        process.poll()  # a leader that has ended still counts until somebody asks
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            return True
        if monotonic() > latest:
            return False
        sign = 0
        sleep(0.05)


def foreign_cpu_seconds(groups: Sequence[int]) -> float:
    """CPU time of this machine that is not ours, since it started: what a neighbour takes shows as a rise.

    Args:
        groups: process groups of ours that are running; whatever has ended counts by itself.

    Returns:
        Seconds; 0 where there is no ``/proc``.
    """
    stat = Path("/proc/stat")
    if not stat.is_file():
        return 0.0
    user, nice, system, _, _, interrupts, soft, stolen = map(int, stat.read_text("utf8").split()[1:9])
    ticks = user + nice + system + interrupts + soft + stolen
    for one in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = one.read_text("utf8").rpartition(")")[2].split()
            if int(fields[2]) in groups:
                ticks -= sum(map(int, fields[11:15]))  # its own time, and that of its children that have ended
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return ticks / os.sysconf("SC_CLK_TCK") - sum(usage.ru_utime + usage.ru_stime for usage in usages)


def log_of(name: str, logs: Path) -> Path:
    """Where a contender's standard error goes.

    Args:
        name: of the contender.
        logs: the folder.
    """
    return logs / f"{name.replace(' ', '-')}.log"


def last_error(log: Path) -> str:
    """The last line of a log that speaks of an error, or its last line.

    Args:
        log: the file.
    """
    lines = [line.strip() for line in log.read_text("utf8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"error", line, re.IGNORECASE)]
    return ([*lines[-1:], *errors[-1:]] or ["it ended without a word"])[-1][:300]


def quantization_of(gguf: Path) -> str:
    """How llama.cpp calls what is in a GGUF file, by the file's name; the whole name where it does not say.

    Args:
        gguf: the file.
    """
    found = re.findall(r"(?:BF16|F16|F32|I?Q\d\w*)", gguf.stem.upper())
    return str(found[-1]) if found else gguf.stem


def llama_bench(text: str, case: Case) -> Figures:
    """Seconds from the JSON of ``llama-bench``.

    Args:
        text: what it printed.
        case: that it ran.

    Raises:
        PeerError: the case is not in it.
    """
    rows = json.loads(text)
    for row in rows:
        if case.new == 1 and (row["n_prompt"], row["n_gen"]) == (case.prompt, 0):
            return {"ttft_s": row["avg_ns"] / 1e9, "tpot_s": None}
        if case.new > 1 and (row["n_prompt"], row["n_gen"], row["n_depth"]) == (0, case.new, case.prompt):
            return {"tpot_s": row["avg_ns"] / 1e9 / case.new}
    raise PeerError(f"llama-bench printed {len(rows)} rows and none of them is {case.name}")


def batched_bench(text: str, case: Case) -> Figures:
    """Seconds from the lines of ``llama-batched-bench``.

    It decodes as many steps as an answer has tokens, while the first token of ours comes from the prefill.

    Args:
        text: what it printed.
        case: that it ran.

    Raises:
        PeerError: the case is not in it.
    """
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    for row in rows:
        if (row["pp"], row["tg"], row["pl"]) == (case.prompt, case.new, case.batch):
            step = row["t_tg"] / case.new
            return {"ttft_s": row["t_pp"], "tpot_s": step, "e2e_s": row["t_pp"] + (case.new - 1) * step}
    raise PeerError(f"llama-batched-bench printed {len(rows)} rows and none of them is {case.name}")
