"""``kvlab plan`` as a person meets it."""

from __future__ import annotations

import json
import shlex

import pytest
import yaml
from typer.testing import CliRunner

from kvlab.cli import app, main
from kvlab.operate.plan import Deployment, Goal, plan
from test_cli import kvlab

ASKED = ("--model", "qwen2.5-7b", "--hardware", "h100-sxm", "--prompt-tokens", "100", "--output-tokens", "5")
FITS_NOT = (
    "--model",
    "llama-3-70b",
    "--hardware",
    "l4",
    "--gpus",
    "1",
    "--prompt-tokens",
    "99",
    "--output-tokens",
    "9",
)


def said(*words: str) -> str:
    done = CliRunner().invoke(app, ["plan", *words])
    assert done.exit_code == 0, done.output
    return " ".join(done.stdout.split())


def test_json_is_one_object_and_progress_is_elsewhere() -> None:
    done = kvlab(
        "plan", *ASKED, "--rate", "3", "--gpus", "4", "--gpus-per-node", "4", "--slo-ttft", "0.5", "--slo-tpot", "0.05",
        "--attainment", "0.95", "--weights", "fp8", "--kv-dtype", "fp8", "--max-model-len", "4096", "--utilization",
        "0.8", "--efficiency", "0.5", "--price-per-hour", "2", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    deployment = Deployment(
        model="qwen2.5-7b", hardware="h100-sxm", gpus=4, gpus_per_node=4, weights="fp8", kv="fp8", max_model_len=4096,
        utilization=0.8, efficiency=0.5, price_per_hour=2.0,
    )  # fmt: skip
    goal = Goal(prompt_tokens=100, output_tokens=5, rate=3, ttft=0.5, tpot=0.05, attainment=0.95)
    assert found == plan(deployment, goal).report()
    assert found["replica"]["max_model_len"] == 4096
    assert "simulating 1 replicas in steps of 8192 tokens" in done.stderr


def test_a_person_gets_the_answer_first_then_memory_times_and_flags() -> None:
    shown = said(*ASKED, "--rate", "2", "--slo-ttft", "0.5")
    assert shown.startswith("1 card (1 replica of 1 card) serves 2 requests/s; 100.0% keep the promises.")
    for word in (
        "memory of each card", "weights (bfloat16)", "GiB", "KV pool", "the card", "85.9", "80.0",
        "largest context of one", "one request alone", "TTFT p99", "1 replica", "flags of vllm serve 0.32",
        "--max-num-seqs", "Times are limits",
    ):  # fmt: skip
        assert word in shown, word


def test_what_does_not_fit_says_why_and_what_would() -> None:
    shown = said(*FITS_NOT, "--rate", "1")
    assert shown.startswith("It does not fit: llama-3-70b is too large for 1 card of NVIDIA L4")
    assert "what would help, each computed anew - --gpus 8: fits 8 cards" in shown


def test_emitted_text_stands_alone() -> None:
    """It goes into a file: nothing else is on standard output."""
    words = shlex.split(
        CliRunner().invoke(app, ["plan", *ASKED, "--rate", "2", "--emit", "vllm"]).stdout, comments=True
    )
    assert words[:3] == ["vllm", "serve", "Qwen/Qwen2.5-7B"]
    manifest = CliRunner().invoke(app, ["plan", *ASKED, "--rate", "2", "--emit", "k8s"]).stdout
    assert [each["kind"] for each in yaml.safe_load_all(manifest)] == ["Deployment", "Service"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*ASKED, "--rate", "0"], "rate is 0.0 requests per second; it must be above 0"),
        ([*ASKED, "--rate", "1", "--hardware", "h100"], "no hardware is called 'h100'; the nearest are"),
        ([*ASKED, "--rate", "1", "--model", "qwen2.5-8b"], "qwen2.5-7b"),
        ([*ASKED, "--rate", "1", "--gpus", "-1"], "gpus is -1; it must be 1 or more"),
        ([*ASKED, "--rate", "1", "--slo-ttft", "-1"], "the promised TTFT is -1.0 s"),
        ([*ASKED, "--rate", "1", "--output-tokens", "0"], "output_tokens is 0"),
        ([*ASKED, "--rate", "1", "--prompt-tokens", "999999"], "has a context of"),
        ([*ASKED, "--rate", "1", "--emit", "helm"], "no form is called 'helm'; choose vllm, ray, k8s"),
        ([*FITS_NOT, "--rate", "1", "--emit", "vllm"], "there is nothing to start: llama-3-70b is too large"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_exit_code_2(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["kvlab", "plan", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert ended.value.code == 2
    assert line.startswith("kvlab: ")
    assert message in line


def test_help_teaches() -> None:
    shown = said("--help")
    for word in ("--slo-ttft", "Examples", "--emit", "vllm|ray|k8s", "limits", "Poisson", "--efficiency"):
        assert word in shown, word
