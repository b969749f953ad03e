"""``kvlab simulate`` as a person meets it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import replace
from time import monotonic, sleep

import pytest
from typer.testing import CliRunner

from kvlab.cli import app, main
from kvlab.serving import Replica, simulate, simulate_disaggregated, workload
from test_cli import KVLAB
from test_cli import kvlab as run

FIELDS = (
    "model", "hardware", "policy", "workload", "rate", "token_budget", "kv_blocks", "block_size", "replicas", "seed",
    "requests", "finished", "refused", "refusals", "preemptions", "seconds", "ttft_s", "tpot_s", "itl_s", "e2e_s",
    "requests_per_s", "prompt_tokens_per_s", "output_tokens_per_s", "goodput_per_s", "slo", "kv_usage", "running_mean",
    "steps", "tokens_fed",
)  # fmt: skip


def alive(group: int) -> bool:
    """Whether a process of this group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def said(*words: str) -> str:
    done = CliRunner().invoke(app, ["simulate", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_json_is_one_object_with_the_figures_of_the_library() -> None:
    done = run("simulate", "--rate", "15", "--requests", "200", "--replicas", "2", "--seed", "3", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found) == list(FIELDS)
    replica = Replica(model="llama-3-8b", hardware="h100-sxm")
    ours = simulate(replica, workload("azure-conv"), rate=15, requests=200, replicas=2, seed=3).report()
    assert {name: found[name] for name in ours} == ours
    assert found["kv_blocks"] == replica.n_blocks
    assert found["token_budget"] == 2048
    assert done.stderr.splitlines()[-1] == "2 of 2 replicas"


def test_every_option_reaches_the_simulator() -> None:
    found = json.loads(said(
        "--model", "qwen2.5-7b", "--hardware", "a100-80gb", "--policy", "continuous", "--workload", "uniform:9-99/1-40",
        "--rate", "30", "--requests", "80", "--token-budget", "3000", "--max-running", "7", "--kv-blocks", "500",
        "--block-size", "8", "--order", "shortest", "--burstiness", "3", "--max-new-tokens", "20", "--weights", "int4",
        "--kv-dtype", "int8", "--slo-ttft", "0.2", "--slo-tpot", "0.03", "--seed", "2", "--dtype", "float16", "--json",
    ))  # fmt: skip
    replica = Replica(
        model="qwen2.5-7b", hardware="a100-80gb", policy="continuous", token_budget=3000, max_running=7, blocks=500,
        block_size=8, order="shortest", max_new_tokens=20, weights="int4", kv="int8", dtype="float16",
    )  # fmt: skip
    bursts = replace(workload("uniform:9-99/1-40"), gap_cv=3.0)
    ours = simulate(replica, bursts, rate=30, requests=80, seed=2).report(ttft=0.2, tpot=0.03)
    assert {name: found[name] for name in ours} == ours


def test_pools_of_their_own() -> None:
    words = ("--rate", "20", "--requests", "80", "--disaggregate", "2:3", "--link-gb-s", "50")
    found = json.loads(said(*words, "--json"))
    replica = Replica(model="llama-3-8b", hardware="h100-sxm")
    ours = simulate_disaggregated(
        replica, replica, workload("azure-conv"), rate=20, requests=80, prefill_replicas=2, decode_replicas=3,
        bytes_per_second=50e9,
    ).report()  # fmt: skip
    assert {name: found[name] for name in ours} == ours
    assert found["replicas"] == [2, 3]
    assert "2 prefill and 3 decode x llama-3-8b" in " ".join(said(*words).split())


def test_a_person_gets_a_table_and_what_it_has_no_room_for() -> None:
    shown = said("--rate", "15", "--requests", "150", "--slo-ttft", "0.5", "--replicas", "2")
    for word in (
        "2 x llama-3-8b on h100-sxm, chunked", "azure-conv at 15/s", "TTFT", "TPOT", "ITL", "E2E", "p50", "p90", "p99",
        "requests: 150 in", "finished: 1", "throughput:", "tokens/s out", "goodput:", "within TTFT 0.5 s", "KV pool:",
        "held on average", "preemptions: 0", "running:",
    ):  # fmt: skip
        assert word in " ".join(shown.split()), word


def test_refusals_are_shown_with_a_reason() -> None:
    shown = " ".join(said("--workload", "fixed:400/8", "--requests", "12", "--kv-blocks", "10").split())
    assert "refused: 12, such as: its cache may come to 407 tokens, 26 blocks of 16, and the pool has 10" in shown
    assert "finished: none" in shown


def test_one_token_answers_have_no_tpot() -> None:
    shown = said("--workload", "fixed:40/1", "--requests", "5")
    (line,) = (line for line in shown.splitlines() if "TPOT" in line)
    assert line.count("-") == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "llama-3-70b"], "llama-3-70b does not fit NVIDIA H100 SXM: weights of 2 bytes an element take"),
        (["--model", "lama"], "lama"),
        (["--hardware", "h100"], "no hardware is called 'h100'"),
        (["--policy", "magic"], "policy is 'magic'; it must be one of static, continuous, chunked"),
        (["--workload", "azure"], "no workload is called 'azure'"),
        (["--workload", "fixed:9"], "write fixed:PROMPT/OUTPUT"),
        (["--rate", "0"], "rate is 0.0 requests per second"),
        (["--requests", "0"], "requests is 0"),
        (["--order", "random"], "order is 'random'"),
        (["--burstiness", "0"], "gap_cv is 0.0"),
        (["--token-budget", "-1"], "token_budget is -1"),
        (["--weights", "int3"], "int3"),
        (["--disaggregate", "1:1"], "--disaggregate P:D and --link-gb-s go together"),
        (["--link-gb-s", "5"], "--disaggregate P:D and --link-gb-s go together"),
        (["--disaggregate", "1:0", "--link-gb-s", "5"], "write P:D, as in 1:2"),
        (["--disaggregate", "1:1", "--link-gb-s", "5", "--replicas", "2"], "leave --replicas out"),
        (["--disaggregate", "1:1", "--link-gb-s", "0"], "bytes_per_second is 0.0"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["kvlab", "simulate", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert ended.value.code == 2
    assert line.startswith("kvlab: ")
    assert message in line


def test_ctrl_c_ends_every_process_without_a_traceback() -> None:
    words = ["simulate", "--requests", "60000", "--rate", "40", "--replicas", "4"]
    started = subprocess.Popen(
        [*KVLAB, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    sleep(5)
    os.killpg(started.pid, signal.SIGINT)
    output, errors = started.communicate(timeout=30)
    assert started.returncode == 130
    assert output == ""
    assert "Traceback" not in errors
    assert len(errors.splitlines()) <= 6, errors
    until = monotonic() + 20
    while alive(started.pid) and monotonic() < until:
        sleep(0.1)
    assert not alive(started.pid)


def test_help_teaches() -> None:
    shown = " ".join(said("--help").split())
    for word in ("--policy", "decodes first", "--disaggregate", "P:D", "Examples", "goodput", "--slo-ttft"):
        assert word in shown, word
