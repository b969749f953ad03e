"""Calibration: every curve is work over time on the given clock, and the rounds say how much that is worth."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from kvlab.cost import Hardware, decode_pass, operators, pass_time, prefill_pass
from kvlab.errors import MeasureError
from kvlab.measure import Calibrator, calibrate, default_dtypes
from kvlab.timing import Clock
from toys import small_config

SMALL = 2**21


def ticking(ticks: Iterator[float]) -> Clock:
    """A clock that moves on by the next tick at every second reading: each timing takes exactly one tick."""
    state = {"now": 0.0, "odd": False}

    def read() -> float:
        if state["odd"]:
            state["now"] += next(ticks)
        state["odd"] = not state["odd"]
        return state["now"]

    return Clock(read=read)


def constant(tick: float) -> Iterator[float]:
    while True:
        yield tick


@pytest.fixture(scope="module")
def device() -> Hardware:
    """A device on which everything takes one second."""
    calibrator = Calibrator(dtypes=(torch.float32,), clock=ticking(constant(1.0)), largest=SMALL)
    calibrator.round()
    calibrator.round()
    return calibrator.result()


def test_a_rate_is_operations_over_time(device: Hardware) -> None:
    """The four matrices of a block of width 768 have 6,291,456 weights; a row costs two operations a weight."""
    assert device.calibration is not None
    weights = 768 * (1280 + 768 + 4096) + 2048 * 768
    for _, curve in device.calibration.kernels["float32"].linear:
        assert curve.x == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
        assert curve.y == tuple(2 * rows * weights for rows in curve.x)
    assert device.flops == {"float32": 2 * 2048 * weights}


def test_a_bandwidth_is_bytes_over_time(device: Hardware) -> None:
    assert device.calibration is not None
    kernels = device.calibration.kernels["float32"]
    assert device.bandwidth == SMALL
    assert device.calibration.read_bandwidth.y == device.calibration.read_bandwidth.x
    assert kernels.decode_attention.x[0] == 32 * 2 * 4 * 64 * 4
    assert kernels.decode_attention.y == kernels.decode_attention.x
    for curve in kernels.elementwise.values():
        assert curve.y == curve.x


def test_causal_attention_counts_visible_pairs(device: Hardware) -> None:
    assert device.calibration is not None
    curve = device.calibration.kernels["float32"].prefill_attention
    assert curve.y[-1] == 4 * 8 * 64 * 2048 * 2049 / 2


def test_two_equal_rounds_have_no_noise_and_a_doubled_one_has(device: Hardware) -> None:
    assert device.calibration is not None
    assert device.calibration.noise == 0.0
    ticks = constant(1.0)
    calibrator = Calibrator(dtypes=(torch.float32,), clock=ticking(ticks), largest=SMALL)
    calibrator.round()
    slow = Calibrator(dtypes=(torch.float32,), clock=ticking(constant(2.0)), largest=SMALL)
    slow.round()
    for ours, other in zip(calibrator._points, slow._points, strict=True):
        ours.seconds += other.seconds
    assert calibrator.noise == 1.0


def test_where_nothing_is_left_of_a_step_a_launch_costs_nothing(device: Hardware) -> None:
    """Both probes take a second on this clock, so more layers cost no more: the difference must not become negative."""
    assert device.calibration is not None
    assert device.calibration.kernels["float32"].launch_s == 0.0


def test_the_host_s_part_comes_out_of_the_steps() -> None:
    """Kernels of no time, and steps of 1 ms and 4 ms: the launches between them share the 3 ms."""
    calibrator = Calibrator(dtypes=(torch.float32,), clock=ticking(constant(1.0)), largest=SMALL)
    steps = [p for p in calibrator._points if p.curve[0] == "step"]
    for point in calibrator._points:
        point.seconds = [1e-30]
    steps[0].seconds, steps[1].seconds = [1e-3], [4e-3]
    found = calibrator.result().calibration
    assert found is not None
    kernels = found.kernels["float32"]
    each_layer = sum(
        op.calls * op.launches for op in operators(small_config(n_layer=1, windows=()), decode_pass(0))
    ) - sum(op.calls * op.launches for op in operators(small_config(n_layer=2, windows=()), decode_pass(0)))
    assert kernels.launch_s == pytest.approx(3e-3 / (12 * -each_layer))
    assert kernels.pass_s > 0


def test_a_calibration_survives_its_file_and_predicts_the_same(device: Hardware) -> None:
    again = Hardware.from_json(json.loads(json.dumps(device.to_json())))
    assert again == device
    for rows in (prefill_pass(32), decode_pass(16, 2)):
        there, here = (pass_time(small_config(), rows, d, "float32").seconds for d in (again, device))
        assert there == here


def test_the_real_clock_gives_positive_finite_curves_in_both_dtypes() -> None:
    heard: list[str] = []
    calibrator = Calibrator(largest=SMALL)
    calibrator.round()
    found = calibrator.result()
    assert set(found.flops) == {"float32", "bfloat16"} if found.kind == "cpu" else len(found.flops) == 2
    assert all(0 < rate < 1e18 for rate in found.flops.values())
    assert 0 < pass_time(small_config(), decode_pass(8), found, "float32").seconds < 10
    assert heard == []


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(MeasureError, match="rounds is 0"):
        calibrate(rounds=0)
    with pytest.raises(MeasureError, match="call round"):
        Calibrator(dtypes=(torch.float32,), clock=ticking(constant(1.0)), largest=SMALL).result()


def test_a_cpu_runs_in_float32_and_bfloat16() -> None:
    assert default_dtypes(torch.device("cpu")) == (torch.float32, torch.bfloat16)
