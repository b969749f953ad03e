"""``kvlab calibrate`` and ``kvlab bench`` as a person meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import kvlab.measure
from kvlab.cli import app, main
from kvlab.cost import Hardware
from kvlab.measure import Calibrator
from test_cli import kvlab as run

FIELDS = (
    "prefill_tok_s", "decode_tok_s", "ttft_s", "tpot_s", "predicted_ttft_s", "predicted_tpot_s", "weight_bytes",
    "kv_bytes", "mbu", "mfu", "device", "dtype", "versions",
)  # fmt: skip


@pytest.fixture(scope="module")
def device() -> Hardware:
    calibrator = Calibrator(torch.device("cpu"), (torch.float32,), largest=2**21)
    calibrator.round()
    calibrator.round()
    return calibrator.result()


@pytest.fixture(scope="module")
def calibration(device: Hardware, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("calibration") / "device.json"
    path.write_text(json.dumps(device.to_json()), "utf8")
    return str(path)


def test_bench_gives_one_json_object_with_these_fields(calibration: str) -> None:
    words = ["--model", "tiny", "--device", "cpu", "--prompt-tokens", "32", "--new-tokens", "5", "--batch", "2"]
    done = run("bench", *words, "--repeats", "1", "--calibration", calibration, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(FIELDS) <= set(found)
    assert found["kv_bytes"] == 2 * (32 + 5 - 1) * 2 * 6 * 2 * 32 * 4
    assert found["weight_bytes"] == 4 * 4_459_776
    assert found["prefill_tok_s"] == pytest.approx(2 * 32 / found["ttft_s"])
    assert found["command"].startswith("kvlab bench --model tiny")


def test_bench_shows_measured_beside_predicted(calibration: str) -> None:
    words = ["--model", "tiny", "--device", "cpu", "--prompt-tokens", "16", "--new-tokens", "3", "--repeats", "1"]
    done = run("bench", *words, "--calibration", calibration)
    assert done.returncode == 0, done.stderr
    for word in ("TTFT", "TPOT", "measured", "predicted", "MFU", "MBU", "KV cache"):
        assert word in done.stdout
    assert "16 prompt tokens" in done.stderr


def test_calibrate_prints_the_curves_and_the_noise_floor(device: Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvlab.measure, "calibrate", lambda *_, **__: device)
    shown = CliRunner().invoke(app, ["calibrate", "--device", "cpu"])
    assert shown.exit_code == 0, shown.output
    for word in ("linear layer, 2,048 rows", "read bandwidth", "noise floor", "ridge", "host time a launch"):
        assert word in shown.output
    asked = CliRunner().invoke(app, ["calibrate", "--json"])
    assert Hardware.from_json(json.loads(asked.output)) == device


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["calibrate", "--rounds", "0"], "rounds is 0"),
        (["calibrate", "--device", "tpu"], "device"),
        (["bench", "--model", "tiny", "--prompt-tokens", "0"], "a case has 1 prompt token"),
        (["bench", "--model", "tiny", "--weights", "int3"], "dtype 'int3' is not one of"),
        (["bench", "--model", "tiny", "--calibration", "nowhere.json"], "kvlab calibrate --json > nowhere.json"),
        (["bench", "--out", "x.json"], "--out belongs to --suite device"),
        (["bench", "--suite", "device"], "needs --out FILE"),
        (["bench", "--suite", "kitchen", "--out", "x.json"], "no suite is called 'kitchen'"),
        (["bench", "--suite", "device", "--out", "no/such/x.json"], "create it first"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["kvlab", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert ended.value.code == 2
    assert said.startswith("kvlab: ")
    assert message in said


def test_a_file_that_is_no_calibration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"name": "x"}', "utf8")
    done = run("bench", "--model", "tiny", "--calibration", str(path))
    assert done.returncode == 2
    assert "is not a calibration" in done.stderr
