"""Result files on the page: what is read, what is refused, tables that say what the file says, pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from bs4 import BeautifulSoup
from matplotlib.axes import Axes

from kvlab.book import results as files
from kvlab.cost import Calibration, Curve, Hardware, Kernels, hardware_of
from kvlab.errors import MeasureError


def device(kind: str = "cpu") -> Hardware:
    curve = Curve((1, 2048), (1e10, 3e11))
    kernels = Kernels(((2**20, curve), (2**29, curve)), curve, curve, {"norm": curve}, 1e-5, 1e-3)
    read = Curve((2**20, 2**29), (9e10, 2e10))
    calibration = Calibration({"float32": kernels, "bfloat16": kernels}, read, kind != "cpu", 0.03)
    return Hardware("d", "A device", kind, 2**34, 2e10, {"float32": 3e11}, "here", calibration=calibration)


def case(dtype: str, batch: int, prompt: int, ttft: float = 0.5, off: float = 1.1) -> dict[str, Any]:
    return {
        "model": "tiny", "dtype": dtype, "batch": batch, "prompt_tokens": prompt, "new_tokens": 17,
        "ttft_s": ttft, "predicted_ttft_s": ttft * off, "tpot_s": 0.03, "predicted_tpot_s": 0.03,
        "mfu": 0.7, "mbu": 0.4,
    }  # fmt: skip


def data(kind: str = "cpu") -> dict[str, Any]:
    return {
        "suite": "device", "device": "A <device>", "machine": "x86_64",
        "versions": {"python": "3.11", "torch": "2.13.0+cpu"},
        "commit": "abc", "command": "kvlab bench --suite device", "seconds": 300.0, "rounds": 3,
        "noise": {"calibration": 0.03, "ttft": 0.02, "tpot": None},
        "hardware": device(kind).to_json(),
        "rows": [
            case("bfloat16", 4, 32), case("float32", 4, 32, 12.0, 0.5),
            case("float32", 1, 2048), case("float32", 1, 32),
        ],
    }  # fmt: skip


@pytest.fixture
def result(tmp_path: Path) -> files.Result:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data()))
    return files.read_result(path)


@pytest.fixture
def axes() -> Iterator[Axes]:
    drawing, made = plt.subplots()
    yield made
    plt.close(drawing)


def test_cases_stand_by_dtype_batch_and_prompt(result: files.Result) -> None:
    assert result.dtypes == ["float32", "bfloat16"]
    order = [(row["dtype"], row["batch"], row["prompt_tokens"]) for row in result.rows()]
    assert order == [("float32", 1, 32), ("float32", 1, 2048), ("float32", 4, 32), ("bfloat16", 4, 32)]
    assert [row["batch"] for row in result.rows("bfloat16")] == [4]


def test_residuals_have_no_sign_and_follow_the_rows(result: files.Result) -> None:
    assert result.off("ttft") == pytest.approx([0.1, 0.1, 0.5, 0.1])
    assert result.off("tpot") == [0.0] * 4


def test_files_are_read_by_name_and_other_files_are_left(tmp_path: Path) -> None:
    for name in ("b.json", "a.json"):
        (tmp_path / name).write_text(json.dumps(data("cuda")))
    (tmp_path / "README.md").write_text("words")
    found = files.read_results(tmp_path)
    assert [result.name for result in found] == ["a", "b"]
    assert all(result.on_gpu for result in found)
    assert files.read_results(tmp_path / "none") == []


def test_the_results_that_ship_can_be_read() -> None:
    assert all(result.rows() for result in files.read_results())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting"),
        ("[]", "it lacks"),
        ('{"suite": "device"}', "it lacks device"),
        (json.dumps(data() | {"hardware": {}}), "required"),
    ],
)
def test_what_is_no_result_is_refused_with_the_command_that_makes_one(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(MeasureError, match=f"(?s){reason}.*write one with: kvlab bench --suite device --out mine.json"):
        files.read_result(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match="No such file"):
        files.read_result(tmp_path / "gone.json")


def test_the_label_says_where_a_result_comes_from(result: files.Result) -> None:
    page = BeautifulSoup(files.label(result).source, "html.parser")
    lines = {row.th.text: row.td.text for row in page.select("tr") if row.th and row.td}
    assert lines["device"] == "A <device>"
    assert lines["command"] == "kvlab bench --suite device"
    assert lines["versions"] == "python 3.11, torch 2.13.0+cpu"
    assert lines["took"] == "5 minutes, 3 rounds"
    assert set(lines) == {"file", "device", "machine", "model", "versions", "commit", "command", "took"}


def test_the_table_holds_every_case_in_a_box_that_scrolls(result: files.Result) -> None:
    page = BeautifulSoup(files.cases(result).source, "html.parser")
    groups = {group.select("th")[0].text: group.select("tr")[1:] for group in page.select("tbody")}
    rows = {name: [[cell.text for cell in row.select("td")] for row in found] for name, found in groups.items()}
    assert rows["float32"][2] == ["4", "32", "12,000", "6,000", "-50%", "70%", "30.0", "30.0", "+0%", "40%"]
    assert {name: len(found) for name, found in rows.items()} == {"float32": 3, "bfloat16": 1}
    assert len(page.select("thead tr")[1].select("th")) == len(rows["bfloat16"][0])
    box = page.div
    assert box is not None
    assert (box["tabindex"], "overflow-x:auto" in str(box["style"])) == ("0", True)


def test_the_summary_sets_the_noise_beside_the_residuals(result: files.Result) -> None:
    assert files.summary(result).splitlines() == [
        "TTFT: off by 10% (median), 50% (worst); measured twice 2.0% apart",
        "TPOT: off by 0% (median), 0% (worst); not measured twice",
    ]


def test_figures_are_stamped_with_the_device_that_was_measured(result: files.Result) -> None:
    assert result.stamp == "measured: A <device> · python 3.11 · torch 2.13.0 · kvlab abc"


def test_every_case_is_a_point_on_the_diagonal(result: files.Result, axes: Axes) -> None:
    files.draw_diagonal(axes, [result], "ttft")
    points = {line.get_label(): line.get_xydata() for line in axes.lines[1:]}
    assert {name: len(found) for name, found in points.items()} == {"mine, float32": 3, "mine, bfloat16": 1}
    assert points["mine, bfloat16"][0].tolist() == pytest.approx([500, 550])
    assert axes.get_xlim() == axes.get_ylim()
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_curves_are_those_of_the_calibration(result: files.Result, axes: Axes) -> None:
    files.draw_rates(axes, result.hardware)
    assert [line.get_ydata().tolist() for line in axes.lines] == [[10, 300]] * 4  # type: ignore[union-attr]
    axes.clear()
    files.draw_bandwidth(axes, result.hardware)
    assert axes.lines[0].get_ydata().tolist() == [90, 20]  # type: ignore[union-attr]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "512"]


def test_a_data_sheet_has_no_curves(axes: Axes) -> None:
    with pytest.raises(MeasureError, match="t4 has no curves"):
        files.draw_rates(axes, hardware_of("t4"))
