"""``kvlab loadtest`` as a person meets it, against a small server on a socket."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from kvlab.cli import app, main
from test_cli import KVLAB


class Server(ThreadingHTTPServer):
    """Answers at once; or refuses, or holds an answer back for as long as it lives."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.refuse = False
        #: Requests after which answers stop in the middle.
        self.hold_after = 1_000_000
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.holding, self.over = Event(), Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(asked)
        self.server.keys.append(self.headers["authorization"])
        refuse = self.server.refuse
        self.send_response(404 if refuse else 200)
        self.end_headers()
        if refuse:
            self.wfile.write(b'{"error": {"message": "The model `nope` does not exist."}}')
            return
        tokens = asked["max_tokens"]
        for index in range(tokens):
            if index and len(self.server.asked) > self.server.hold_after:
                self.server.holding.set()
                self.server.over.wait(60)
                return
            self._say({"choices": [{"text": "x", "finish_reason": "length" if index == tokens - 1 else None}]})
        self._say({"choices": [], "usage": {"prompt_tokens": len(asked["prompt"]), "completion_tokens": tokens}})

    def _say(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        """Nobody reads it."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as found:
        thread = Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.over.set()
        found.shutdown()
        thread.join()


def run(*words: str, code: int = 0) -> Any:
    done = CliRunner().invoke(app, ["loadtest", *words])
    assert done.exit_code == code, done.output
    return done


def test_json_is_one_object(server: Server) -> None:
    done = run("--url", server.url, "--model", "m", "--concurrency", "3", "--requests", "12", "--prompt-tokens", "9",
               "--output-tokens", "5", "--slo-ttft", "5", "--slo-tpot", "1", "--json")  # fmt: skip
    found = json.loads(done.stdout)
    assert (found["kind"], found["interrupted"]) == ("kvlab-loadtest", False)
    assert found["figures"]["completed"] == len(found["requests"]) == 12
    assert found["settings"]["workload"] == "fixed:9/5"
    assert {each["output_tokens"] for each in found["requests"]} == {5}
    assert {each["prompt_tokens"] for each in found["requests"]} == {9}
    assert found["figures"]["requests_per_s"] > 0
    assert found["figures"]["goodput_per_s"] == pytest.approx(found["figures"]["requests_per_s"])
    assert "12 of 12 sent, 12 answered" in done.stderr.splitlines()[-1]


def test_a_person_gets_a_table_and_what_it_has_no_room_for(server: Server) -> None:
    shown = " ".join(run("--url", server.url, "--model", "m", "--requests", "4", "--slo-ttft", "5").stdout.split())
    for word in ("m at http://127.0.0.1", "completions, fixed:256/64, 1 at a time", "TTFT", "TPOT", "ITL", "E2E",
                 "send lag", "requests: 4 in", "4 completed", "throughput:", "goodput:",
                 "within TTFT 5 s"):  # fmt: skip
        assert word in shown, word
    assert "FAILED" not in shown


def test_every_option_reaches_the_test(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sesame")
    done = run("--url", server.url, "--model", "m", "--rate", "200", "--requests", "9", "--workload", "uniform:4-9/2-3",
               "--burstiness", "2", "--warmup", "2", "--silence", "9", "--limit", "19", "--api-key-env", "MY_KEY",
               "--seed", "3", "--out", str(tmp_path / "out"), "--json")  # fmt: skip
    found = json.loads(done.stdout)
    wanted = {
        "loop": "open", "rate": 200.0, "requests": 9, "workload": "uniform:4-9/2-3", "burstiness": 2.0, "warmup": 2,
        "silence_s": 9.0, "limit_s": 19.0, "seed": 3, "concurrency": None,
    }  # fmt: skip
    assert {name: found["settings"][name] for name in wanted} == wanted
    assert set(server.keys) == {"Bearer sesame"}
    assert len(server.asked) == 1 + 2 + 9
    assert json.loads((tmp_path / "out" / "loadtest.json").read_text("utf8")) == found
    assert "sesame" not in done.output


def test_a_trace_is_replayed(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("time,prompt_tokens,output_tokens\n5,7,2\n5.01,8,3\n", "utf8")
    found = json.loads(run("--url", server.url, "--model", "m", "--trace", str(path), "--json").stdout)
    assert [(each["prompt_tokens"], each["output_tokens"]) for each in found["requests"]] == [(7, 2), (8, 3)]
    assert found["settings"]["trace"] == str(path)


def test_a_chat_and_a_tokenizer(server: Server) -> None:
    tokenizer = str(Path(__file__).parents[1] / "data" / "tiny" / "tokenizer.json")
    found = json.loads(
        run("--url", server.url, "--model", "m", "--requests", "2", "--tokenizer", tokenizer, "--json").stdout
    )
    assert not found["settings"]["token_ids"]
    assert all(isinstance(asked["prompt"], str) for asked in server.asked)


def test_when_everything_fails_the_report_says_so_and_the_exit_code_too(server: Server) -> None:
    server.refuse = True
    shown = " ".join(run("--url", server.url, "--model", "nope", "--requests", "3", code=1).stdout.split())
    assert "FAILED: 3 of 3 requests (3 http-404)" in shown
    assert "The model `nope` does not exist." in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", "127.0.0.1:8000"], "write an address such as http://127.0.0.1:8000"),
        (
            ["--url", "http://127.0.0.1:9", "--requests", "1"],
            "http://127.0.0.1:9/v1/completions cannot be reached (refused",
        ),
        (["--rate", "1", "--concurrency", "2"], "rate and concurrency are given"),
        (["--rate", "0"], "rate is 0.0"),
        (["--requests", "0"], "requests is 0"),
        (["--workload", "azure"], "no workload is called 'azure'"),
        (["--workload", "azure-conv", "--prompt-tokens", "9"], "--workload azure-conv has lengths of its own"),
        (["--endpoint", "embeddings"], "endpoint is 'embeddings'"),
        (["--trace", "missing.csv"], "trace missing.csv cannot be read"),
        (["--silence", "0"], "silence_s is 0.0"),
        (["--prompt-tokens", "0"], "the shortest length is 0"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = [] if "--url" in words else ["--url", "http://127.0.0.1:9"]
    monkeypatch.setattr("sys.argv", ["kvlab", "loadtest", *url, "--model", "m", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2
    assert line.startswith("kvlab: ")
    assert message in line


def test_ctrl_c_keeps_what_there_is(server: Server) -> None:
    """The fourth answer and those after it stop in the middle; then somebody loses patience."""
    server.hold_after = 5  # a probe, a warm-up, three requests
    words = ["loadtest", "--url", server.url, "--model", "m", "--requests", "50", "--concurrency", "2", "--json"]
    started = subprocess.Popen([*KVLAB, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.holding.wait(60)
    os.kill(started.pid, signal.SIGINT)
    output, errors = started.communicate(timeout=30)
    assert started.returncode == 130, errors
    found = json.loads(output)
    assert found["interrupted"]
    assert found["figures"]["completed"] >= 2
    assert found["figures"]["errors"] == {"cancelled": found["figures"]["failed"]}
    assert "Traceback" not in errors


def test_help_teaches() -> None:
    shown = " ".join(run("--help").stdout.split())
    for word in (
        "--rate",
        "Open loop",
        "Closed loop",
        "goodput",
        "Examples",
        "--slo-ttft",
        "Ctrl-C",
        "Exit code 2",
        "--out",
    ):
        assert word in shown, word


def test_the_bar_of_a_terminal_says_the_same(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    monkeypatch.setattr("kvlab.cli.loadtest.in_a_terminal", lambda: True)
    done = run("--url", server.url, "--model", "m", "--requests", "3", "--json")
    assert json.loads(done.stdout)["figures"]["completed"] == 3
