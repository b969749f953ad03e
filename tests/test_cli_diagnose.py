"""``kvlab diagnose`` as a person meets it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvlab.cli import app, main
from kvlab.errors import MeasureError
from kvlab.operate.scrape import address_of, scrape, watch
from kvlab.timing import Clock, VirtualClock

PAGES = Path(__file__).parent / "operate" / "fixtures" / "metrics"
IDLE, BUSY = PAGES / "vllm_idle_fresh.prom", PAGES / "vllm_load32_during.prom"


def said(*words: str, text: str | None = None) -> str:
    done = CliRunner().invoke(app, ["diagnose", *words], input=text)
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.setattr("sys.argv", ["kvlab", "diagnose", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("kvlab: ")
    assert told.err.count("\n") == 1
    return told.err


def test_a_stored_page_is_diagnosed() -> None:
    text = said("--file", str(BUSY))
    assert text.startswith("1. Requests wait in the queue")
    for part in (
        "evidence: 16 requests wait while 16 run",
        "check next: ",
        "remedy: ",
        "--max-num-seqs",
        "12_batching",
    ):
        assert part in text
    assert "one metrics page of vllm" in text


def test_two_stored_pages_are_a_window() -> None:
    text = said("--file", str(IDLE), "--file", str(BUSY))
    assert text.startswith("1. Requests wait in the queue")
    assert "two metrics pages of vllm" in text


def test_an_idle_server_has_nothing() -> None:
    assert said("--file", str(IDLE)).startswith("nothing is wrong\n")


def test_json_is_one_object_and_nothing_else() -> None:
    report = json.loads(said("--file", str(BUSY), "--json"))
    assert report["causes"][0]["cause"] == "queueing"
    assert report["verdict"].startswith("Requests wait")
    assert json.loads(said("--file", str(IDLE), "--json"))["verdict"] == "nothing is wrong"


def test_an_error_comes_as_an_option_or_from_standard_input() -> None:
    words = "max seq len (4096) is larger than the maximum number of tokens that can be stored in KV cache (3664)"
    assert "--max-model-len to 3664" in said("--error", words)
    assert "--max-model-len to 3664" in said("--error", "-", text=f"INFO\nValueError: {words}.\n")
    assert said("--error", "no idea").startswith("no message in this text is known here\n")


def test_a_load_test_is_read_alone_and_beside_a_page(tmp_path: Path) -> None:
    result = {
        "kind": "kvlab-loadtest", "settings": {"warmup": 1}, "figures": {}, "warnings": [], "interrupted": False,
        "requests": [
            {"id": n, "intended_s": n * 0.1, "sent_s": n * 0.1, "error": None, "finish_reason": "length",
             "chunks_s": [n * 0.1 + 2.0 + 1e-5 * token for token in range(30)], "output_tokens": 30}
            for n in range(20)
        ],
    }  # fmt: skip
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result))
    assert said("--loadtest", str(path)).startswith("1. A proxy between server and client")
    both = json.loads(said("--file", str(IDLE), "--loadtest", str(path), "--json"))
    assert len(both["sources"]) == 2
    assert both["causes"][0]["cause"] == "buffering-proxy"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "give --url"),
        (["--url", "http://localhost:1", "--file", str(IDLE)], "give --url"),
        (["--error", "x", "--file", str(IDLE)], "--error stands alone"),
        (["--error", ""], "empty"),
        (["--file", "nowhere.prom"], "nowhere.prom cannot be read"),
        (["--file", str(IDLE), "--file", str(IDLE), "--file", str(IDLE)], "3 files"),
        (["--loadtest", str(IDLE)], "is not JSON"),
        (["--file", str(PAGES / "deltas" / "load32.json")], "this is JSON"),
        (["--file", str(BUSY), "--model", "llama-3-8b"], "--model and --hardware go together"),
        (["--file", str(IDLE), "--model", "llama-3-8b", "--hardware", "h100-sxm"], "nothing decoded here"),
        (["--url", "http://localhost:1", "--seconds", "-3"], "wait 0"),
        (["--url", "http://localhost:1", "--seconds", "nan"], "wait 0"),
        (["--url", "nonsense"], "does not answer"),
    ],
)
def test_what_it_cannot_look_at_is_one_line_and_exit_code_2(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert says in refused(capsys, monkeypatch, *words)


# --- reading from a server ----------------------------------------------------------------------------------------


class _Server(BaseHTTPRequestHandler):
    pages: list[tuple[int, bytes]]

    def do_GET(self) -> None:
        status, body = self.pages.pop(0) if self.path == "/metrics" else (404, b'{"detail":"Not Found"}')
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    _Server.pages = [(200, BUSY.read_bytes()), (501, b"off")]
    server = HTTPServer(("127.0.0.1", 0), _Server)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_is_asked_for_its_page(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said("--url", address, "--seconds", "0").startswith("1. Requests wait in the queue")
    assert "answers 501: start llama.cpp's server with --metrics" in refused(capsys, monkeypatch, "--url", address)
    assert "answers 404" in refused(capsys, monkeypatch, "--url", f"{address}/v1")


def test_a_server_that_is_not_there_is_an_answer_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "does not answer (ConnectError" in refused(capsys, monkeypatch, "--url", "http://127.0.0.1:9/metrics")


def test_a_page_that_never_ends_is_given_up(address: str) -> None:
    class Hasty(Clock):
        def __init__(self) -> None:
            super().__init__(read=iter(range(0, 1000, 20)).__next__)

    with pytest.raises(MeasureError, match="still sending after 10 s"):
        scrape(f"{address}/metrics", Hasty())


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("http://h:8000", "http://h:8000/metrics"),
        ("http://h:8000/", "http://h:8000/metrics"),
        ("http://h:8000/metrics", "http://h:8000/metrics"),
        ("http://h/engine/metrics", "http://h/engine/metrics"),
    ],
)
def test_an_address_without_a_path_gets_one(given: str, asked: str) -> None:
    assert address_of(given) == asked


def test_it_waits_between_two_reads_and_says_so() -> None:
    clock, texts, told = VirtualClock(), [IDLE.read_text(), BUSY.read_text()], list[str]()
    found = watch(lambda: texts.pop(0), 3.0, clock, told.append)
    assert clock.now() == 3.0
    assert told == ["reading again in 3 s", "reading again in 2 s", "reading again in 1 s", ""]
    assert found.sources == ("two metrics pages of vllm, 3 s apart",)
    assert found.running == (0, 16)


def test_ctrl_c_during_the_wait_leaves_the_first_read() -> None:
    class Interrupted(VirtualClock):
        def wait_until(self, time: float) -> None:
            if time > 2:
                raise KeyboardInterrupt
            super().wait_until(time)

    texts = [BUSY.read_text()]
    found = watch(lambda: texts.pop(0), 10.0, Interrupted(), lambda _: None)
    assert found.notes[0].startswith("Interrupted after 2 s: this is the first read alone")
    assert found.running == (16,)


def test_a_server_that_dies_between_the_reads_leaves_the_first() -> None:
    texts = iter([BUSY.read_text()])

    def read() -> str:
        for text in texts:
            return text
        raise MeasureError("http://h does not answer (ConnectError)")

    found = watch(read, 2.0, VirtualClock(), lambda _: None)
    assert found.notes[0].startswith("The second read failed (http://h does not answer (ConnectError))")
    assert found.waiting == (16,)


def test_a_first_read_that_is_no_page_is_refused_before_any_wait() -> None:
    clock = VirtualClock()
    with pytest.raises(MeasureError, match="HTML"):
        watch(lambda: "<html>", 10.0, clock, lambda _: None)
    assert clock.now() == 0
