"""The comparison with other engines: what its seconds come to, and that nothing of it stays behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from peers import checked, shown  # noqa: E402
from processes import PeerError, Worker, batched_bench, last_error, llama_bench, quantization_of  # noqa: E402
from rounds import Case, Goal, cases_of, medians, rates, ratio  # noqa: E402

DECODE, BATCHED, PREFILL = cases_of([512], 64, 16)
#: Recorded from llama-bench and llama-batched-bench, the fields that are read.
LLAMA_DECODE = '[{"n_prompt": 0, "n_gen": 64, "n_depth": 32, "avg_ns": 504445681, "avg_ts": 126.871936}]'
LLAMA_PREFILL = '[{"n_prompt": 512, "n_gen": 0, "n_depth": 0, "avg_ns": 1793307170, "avg_ts": 285.506024}]'
LLAMA_BATCHED = (
    "build: 0\n"
    '{"pp": 32, "tg": 64, "pl": 1, "t_pp": 0.076311, "t_tg": 0.976358, "speed_tg": 65.549728}\n'
    '{"pp": 32, "tg": 64, "pl": 16, "t_pp": 0.902479, "t_tg": 3.761104, "speed_tg": 272.260468}\n'
)


def test_rates_are_those_that_llama_cpp_prints_itself() -> None:
    figures = {
        DECODE.name: llama_bench(LLAMA_DECODE, DECODE),
        PREFILL.name: llama_bench(LLAMA_PREFILL, PREFILL),
        BATCHED.name: batched_bench(LLAMA_BATCHED, BATCHED),
    }
    found = rates([DECODE, BATCHED, PREFILL], figures)
    assert found["decode_1"] == pytest.approx(126.871936, rel=1e-4)
    assert found["prefill_512"] == pytest.approx(285.506024, rel=1e-4)
    assert found["decode_16"] == pytest.approx(272.260468, rel=1e-4)
    assert found["output_16"] == pytest.approx(16 * 64 / (0.902479 + 63 * 3.761104 / 64))


def test_a_row_of_another_case_is_not_taken() -> None:
    """A depth of 0 would time a decode step over an empty cache."""
    shallow = json.dumps([{"n_prompt": 0, "n_gen": 64, "n_depth": 0, "avg_ns": 1}])
    with pytest.raises(PeerError, match="none of them is decode_1"):
        llama_bench(shallow, DECODE)
    with pytest.raises(PeerError, match="none of them is decode_8"):
        batched_bench(LLAMA_BATCHED, Case("decode_8", 32, 64, 8))


def test_rates_leave_out_what_a_contender_cannot_say() -> None:
    assert rates([DECODE, BATCHED], {"decode_1": {"tpot_s": 0.5}}) == {"decode_1": 2.0}


def test_a_ratio_pairs_the_rounds() -> None:
    """The machine was twice as slow in the second round, for both: the ratio did not move."""
    rounds = {"ours": [{"decode_1": 30.0}, {"decode_1": 15.0}], "theirs": [{"decode_1": 10.0}, {"decode_1": 5.0}]}
    found = ratio(Goal("decode_1", "ours", ("theirs",), 3.2), rounds)
    assert found is not None
    assert found.rounds == (3.0, 3.0)
    assert found.median == 3.0
    assert medians(rounds["ours"]) == {"decode_1": 22.5}


def test_a_ratio_is_against_the_faster_of_two() -> None:
    rounds = {"ours": [{"x": 60.0}], "slow": [{"x": 10.0}], "fast": [{"x": 20.0}]}
    found = ratio(Goal("x", "ours", ("slow", "fast"), 1.0), rounds)
    assert found is not None
    assert (found.median, found.title) == (3.0, "x: ours / fast")


@pytest.mark.parametrize("missing", ["ours", "theirs"])
def test_a_ratio_needs_both_sides(missing: str) -> None:
    rounds = {"ours": [{"x": 1.0}], "theirs": [{"x": 1.0}]}
    del rounds[missing]
    assert ratio(Goal("x", "ours", ("theirs",), 1.0), rounds) is None


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"), ("smollm2-q8_0.gguf", "Q8_0"), ("smollm2-bf16.gguf", "BF16"),
     ("a-Q4_K_M.gguf", "Q4_K_M"), ("other.gguf", "other")],
)  # fmt: skip
def test_a_file_says_its_quantization(name: str, quantization: str) -> None:
    assert quantization_of(Path("/models") / name) == quantization


def test_no_folder_of_this_machine_is_written() -> None:
    command = ["/opt/a/llama-bench", "-m", "/data/m.gguf", ";", "/opt/a/x", json.dumps({"folder": "/data/hf", "n": 1})]
    assert shown(command) == """llama-bench -m m.gguf ; x '{"folder": "hf", "n": 1}'"""


def test_an_error_is_its_last_line_that_says_so(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Traceback\nValueError: no such model\nshutting down\n", "utf8")
    assert last_error(log) == "ValueError: no such model"
    log.write_text("", "utf8")
    assert last_error(log) == "it ended without a word"


def test_a_worker_answers_each_round_and_leaves_nothing_running(tmp_path: Path) -> None:
    """After SIGKILL of vLLM its engine processes live on: the whole group has to go."""
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True)"
    answers = "for n, _ in enumerate(sys.stdin): print('[' + str(n) + ']', flush=True)"
    code = f"{child}\n{answers}\nimport time; time.sleep(600)"
    worker = Worker("one", [sys.executable, "-c", code], {}, tmp_path, stays=True)
    grandchild = worker.round()
    assert [worker.round(), worker.round()] == [[0], [1]]
    leader = worker.group
    assert leader is not None
    worker.close(patience=0)
    assert worker.group is None
    assert not running(leader)
    assert not running(int(str(grandchild)))


def running(pid: int) -> bool:
    """Whether a process is there and has not ended; one that nobody has asked after yet has."""
    try:
        return subprocess.check_output(["ps", "-o", "stat=", "-p", str(pid)], text=True)[0] != "Z"
    except subprocess.CalledProcessError:
        return False


def test_a_worker_that_fails_says_why(tmp_path: Path) -> None:
    worker = Worker("one", [sys.executable, "-c", "raise ValueError('no weights')"], {}, tmp_path)
    with pytest.raises(PeerError, match="ValueError: no weights"):
        worker.round()
    missing = Worker("two", ["/nowhere/python"], {}, tmp_path)
    with pytest.raises(PeerError, match=r"/nowhere/python cannot be started: No such file"):
        missing.round()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--llama-cpp", "bin"], "belong together"), (["--rounds", "0"], "1 or more"),
     (["--hf", "nowhere"], "has no config.json"), (["--json", "nowhere/x.json"], "no such folder"),
     (["--llama-cpp", "b", "--gguf", "a-q4_1.gguf", "b-q4_1.gguf"], "same quantization")],
)  # fmt: skip
def test_bad_options_are_said_before_anything_starts(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        checked(arguments)
    assert said in " ".join(capsys.readouterr().err.split())
