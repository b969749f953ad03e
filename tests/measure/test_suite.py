"""The device suite: rounds of calibration and measurement in turn, one labelled file, whole or not at all."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlab.cost import Hardware
from kvlab.errors import MeasureError
from kvlab.measure import Calibrator, Case
from kvlab.measure import suite as suite_module
from kvlab.measure.suite import CASES, device_suite, write_result


@pytest.fixture(scope="module")
def result() -> tuple[dict[str, Any], list[str]]:
    heard: list[str] = []
    calibrator = Calibrator(dtypes=(torch.float32,), largest=2**21)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite_module, "_LONG", 40)
        found = device_suite(
            "tiny", calibrator=calibrator, cases=(Case(16, 3), Case(24, 3, 2)), rounds=3, tell=heard.append
        )
    return found, heard


def test_the_cases_cover_prompts_of_32_to_2048_and_batches_of_1_to_16() -> None:
    assert {case.prompt_tokens for case in CASES} >= {32, 128, 512, 2048}
    assert {case.batch for case in CASES} >= {1, 4, 16}
    assert Case(2048, 9, 16) in CASES


def test_every_case_is_repeated_but_the_long_ones(result: tuple[dict[str, Any], list[str]]) -> None:
    short, long = result[0]["rows"]
    assert [len(row["ttft_repeats_s"]) for row in (short, long)] == [3, 1]
    assert len(long["tpot_repeats_s"]) == 1


def test_calibration_and_measurement_take_turns(result: tuple[dict[str, Any], list[str]]) -> None:
    lines = [line.split(": ")[1] for line in result[1] if line.startswith("round")]
    assert lines == [
        "calibrating", "1 x 16 tokens, float32",
        "calibrating", "1 x 16 tokens, float32", "2 x 24 tokens, float32",
        "calibrating", "1 x 16 tokens, float32",
    ]  # fmt: skip


def test_residuals_are_those_of_the_rows(result: tuple[dict[str, Any], list[str]]) -> None:
    found = result[0]
    for figure in ("ttft", "tpot"):
        off = [abs(row[f"predicted_{figure}_s"] / row[f"{figure}_s"] - 1) for row in found["rows"]]
        assert found["residuals"][figure] == {"median": pytest.approx(sum(off) / 2), "worst": max(off)}
    first = found["rows"][0]["ttft_repeats_s"]
    assert found["noise"]["ttft"] == pytest.approx(sum(abs(b / a - 1) for a, b in pairwise(first)) / 2)


def test_a_result_says_where_it_comes_from_and_survives_its_file(
    result: tuple[dict[str, Any], list[str]], tmp_path: Path
) -> None:
    write_result(result[0], tmp_path / "mine.json")
    again = json.loads((tmp_path / "mine.json").read_text("utf8"))
    assert again == json.loads(json.dumps(result[0]))
    assert {"device", "machine", "versions", "commit", "command", "seconds", "rounds"} <= set(again)
    assert Hardware.from_json(again["hardware"]).calibration is not None


def test_a_result_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    write_result({"a": 1}, path)
    with pytest.raises(TypeError):
        write_result({"a": object()}, path)
    assert json.loads(path.read_text("utf8")) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["mine.json"]


def test_no_round_is_refused() -> None:
    with pytest.raises(MeasureError, match="rounds is 0"):
        device_suite("tiny", rounds=0)
