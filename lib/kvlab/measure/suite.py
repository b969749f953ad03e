"""Everything that the results page shows of one device, in one run and one file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kvlab.devices import dtype_name
from kvlab.errors import MeasureError
from kvlab.measure.bench import Bench, Case, provenance, report
from kvlab.measure.calibrate import Calibrator
from kvlab.timing import clock_for, noise_floor
from kvlab.weights import load

#: Prompts of 32 to 2,048 tokens in batches of 1 to 16.
CASES = (
    *(Case(prompt, 17, 1) for prompt in (32, 128, 512, 2048)),
    *(Case(prompt, 17, 4) for prompt in (32, 128, 512)),
    *(Case(prompt, 17, 16) for prompt in (32, 128)),
    Case(2048, 9, 4), Case(512, 9, 16), Case(2048, 9, 16),
)  # fmt: skip

#: Prompt tokens of a batch above which a case is run once: on two CPU cores it takes up to two minutes.
_LONG = 4096


def device_suite(
    model: str = "smollm2",
    *,
    calibrator: Calibrator | None = None,
    cases: Sequence[Case] = CASES,
    rounds: int = 3,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Calibrate a device and measure a model on it, turn by turn, and set the predictions beside the measurements.

    Each round measures every point of the calibration and then every case once, so that a slow minute of the machine
    falls on both. Nothing is fitted to a case.

    Args:
        model: a name, a Hub id or a path, as for ``kvlab.load``.
        calibrator: of the device, fresh; by default of the best that is there. The model runs in its dtypes.
        cases: what is measured; those of more than 4,096 prompt tokens are measured once.
        rounds: of calibration and measurement.
        tell: hears what is going on.

    Raises:
        MeasureError: no round is asked for.
        WeightsError: the model cannot be had.
    """
    if rounds < 1:
        raise MeasureError(f"rounds is {rounds}; measure 1 or more")
    tell("calibrating: allocating and warming up")
    calibrator = calibrator or Calibrator()
    clock = clock_for(calibrator.device)
    start = clock.now()
    places = {kind: load(model, device=str(calibrator.device), dtype=dtype_name(kind)) for kind in calibrator.dtypes}
    ready = [Bench(places[kind].model, case) for case in cases for kind in calibrator.dtypes]
    for number in range(rounds):
        tell(f"round {number + 1} of {rounds}: calibrating")
        calibrator.round()
        for one in ready:
            _measure(one, number, rounds, tell)
    hardware = calibrator.result()
    rows = [report(one.model, model, one.measured, hardware) for one in ready]
    return {
        "suite": "device",
        **provenance(calibrator.device),
        "seconds": clock.now() - start,
        "rounds": rounds,
        "noise": {
            "calibration": calibrator.noise,
            **{name: noise_floor(row[f"{name}_repeats_s"] for row in rows) for name in ("ttft", "tpot")},
        },
        "residuals": {name: _residuals(rows, name) for name in ("ttft", "tpot")},
        "hardware": hardware.to_json(),
        "rows": rows,
    }


def write_result(result: dict[str, Any], path: Path) -> None:
    """Write a result as JSON, whole or not at all.

    Args:
        result: what to write.
        path: where; an existing file is replaced.

    Raises:
        OSError: the folder does not exist or cannot be written to.
    """
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_text(json.dumps(result, indent=1) + "\n", "utf8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _measure(one: Bench, number: int, rounds: int, tell: Callable[[str], None]) -> None:
    """A case of this round; a long one in the round in the middle alone."""
    tokens = one.case.batch * one.case.prompt_tokens
    if tokens > _LONG and number != rounds // 2:
        return
    what = f"{one.case.batch} x {one.case.prompt_tokens} tokens, {dtype_name(one.model.dtype)}"
    tell(f"round {number + 1} of {rounds}: {what}")
    if number == 0 and tokens <= _LONG:
        one.run(keep=False)
    one.run()


def _residuals(rows: Sequence[dict[str, Any]], figure: str) -> dict[str, float]:
    """How far predictions were off, ``|predicted / measured - 1|``."""
    off = [abs(row[f"predicted_{figure}_s"] / row[f"{figure}_s"] - 1) for row in rows]
    return {"median": median(off), "worst": max(off)}
