"""Devices: peaks with their marks, curves, and the way through a file."""

from __future__ import annotations

import json
from dataclasses import replace
from math import exp, log
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.cost import (
    Calibration,
    Curve,
    Hardware,
    Kernels,
    PassTime,
    Row,
    decode_pass,
    hardware_names,
    hardware_of,
    operators,
    pass_time,
    prefill_pass,
)
from kvlab.errors import ConfigError
from toys import small_config

CARD: dict[str, Any] = {
    "name": "card", "title": "A card", "kind": "imagined", "memory_bytes": 2**30, "bandwidth": 1e9,
    "flops": {"float16": 1e12}, "source": "a test",
}  # fmt: skip


def level(value: float) -> Curve:
    """The same value everywhere."""
    return Curve((1.0,), (value,))


def kernels(**changes: Any) -> Kernels:
    """Every rate 1e9, nothing for the host."""
    fields: dict[str, Any] = {
        "linear": ((1e6, level(1e9)),),
        "prefill_attention": level(1e9),
        "decode_attention": level(1e9),
        "elementwise": {name: level(1e9) for name in ("norm", "rotate", "copy", "activation", "add")},
        "launch_s": 0.0,
        "pass_s": 0.0,
    }
    return Kernels(**fields | changes)


def calibrated(**changes: Any) -> Hardware:
    """A device that was measured."""
    measured = Calibration({"float16": kernels(**changes)}, level(1e9), asynchronous=False, noise=0.02)
    return Hardware(**CARD, status="measured", calibration=measured)


# Curves.


def test_a_curve_is_straight_on_logarithmic_axes() -> None:
    curve = Curve((1, 100, 10_000), (2, 200, 50))
    assert curve.at(10) == pytest.approx(20)
    assert curve.at(1000) == pytest.approx(100)
    assert curve.at(200) == pytest.approx(exp(log(200) + log(2) / log(100) * log(50 / 200)))


def test_a_curve_is_level_beyond_its_ends() -> None:
    curve = Curve((2, 8), (5, 3))
    assert [curve.at(x) for x in (0, 0.1, 2)] == [5, 5, 5]
    assert [curve.at(x) for x in (8.001, 9, 1e12)] == [3, 3, 3]
    assert level(7).at(1e-9) == level(7).at(1e9) == 7


points = st.lists(
    st.tuples(st.floats(1e-3, 1e12), st.floats(1e-3, 1e15)), min_size=1, max_size=6, unique_by=lambda p: p[0]
)


@given(points, st.floats(1e-4, 1e13))
def test_a_curve_meets_its_points_and_stays_between_neighbours(found: list[tuple[float, float]], x: float) -> None:
    xs, ys = zip(*sorted(found), strict=True)
    curve = Curve(xs, ys)
    assert [curve.at(a) for a in xs] == pytest.approx(list(ys))
    below = max((i for i, a in enumerate(xs) if a <= x), default=0)
    above = min((i for i, a in enumerate(xs) if a >= x), default=len(xs) - 1)
    low, high = sorted((ys[below], ys[above]))
    assert low * (1 - 1e-9) <= curve.at(x) <= high * (1 + 1e-9)


@pytest.mark.parametrize(
    ("x", "y"),
    [((), ()), ((1,), ()), ((1, 2), (1,)), ((2, 1), (1, 1)), ((1, 1), (1, 1)), ((0, 1), (1, 1)), ((1,), (0,))],
)
def test_curves_that_are_none_are_refused(x: tuple[float, ...], y: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="give it rising positive x and as many positive y"):
        Curve(x, y)


def test_linear_rate_lies_between_working_sets_and_between_rows() -> None:
    found = kernels(linear=((1e6, Curve((1, 100), (1e9, 1e11))), (1e8, Curve((1, 100), (4e9, 4e11)))))
    assert found.linear_rate(1, 1e6) == 1e9
    assert found.linear_rate(10, 1e6) == pytest.approx(1e10)
    assert found.linear_rate(1, 1e7) == pytest.approx(2e9)
    assert found.linear_rate(10, 1e9) == pytest.approx(4e10)


# Devices.


def test_base_units() -> None:
    """80 GiB is what the driver of an 80 GB card shows; peaks are dense."""
    h100 = hardware_of("h100-sxm")
    assert (h100.memory_bytes, h100.bandwidth) == (80 * 2**30, 3.35e12)
    assert h100.peak("bfloat16") == 989e12
    assert h100.ridge("bfloat16") == pytest.approx(295.2, abs=0.05)


def test_every_device_has_a_source_and_plausible_figures() -> None:
    assert len(hardware_names()) == 24
    for name in hardware_names():
        device = hardware_of(name)
        assert device.name == name
        assert device.source
        assert device.status
        assert 2**33 <= device.memory_bytes <= 2**40
        assert 2e10 <= device.bandwidth <= 1e13
        assert all(1e11 <= peak <= 1e16 for peak in device.flops.values())


def test_what_is_from_memory_keeps_its_mark() -> None:
    assert hardware_of("a10g").label == "NVIDIA A10G (AWS g5) (TFLOP/s from memory; memory and bandwidth verified)"
    for name in hardware_names():
        device = hardware_of(name)
        if "from memory" in device.status or "third-party" in device.status or "derived" in device.status:
            assert device.status in device.label, name
    for name in ("t4", "v100-sxm", "h100-sxm", "desktop-cpu", "vm-2vcpu-amx"):
        assert hardware_of(name).label == hardware_of(name).title


def test_t4_has_no_bfloat16() -> None:
    """Soup 385: it "supports" it by emulation."""
    with pytest.raises(ConfigError, match="no bfloat16 peak of t4 is known; it has float32, float16, int8"):
        hardware_of("t4").ridge("bfloat16")
    with pytest.raises(ConfigError, match="no float32 peak of server-cpu-epyc is known; it has none"):
        hardware_of("server-cpu-epyc").peak("float32")


def test_an_unknown_card_offers_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no hardware is called 'H100'; the nearest are h100-sxm, h100-pcie"):
        hardware_of("H100")


def test_a_device_that_is_given_stays() -> None:
    device = Hardware(**CARD)
    assert hardware_of(device) is device


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"memory_bytes": 0}, "memory_bytes"),
        ({"bandwidth": -1.0}, "bandwidth"),
        ({"flops": {"float16": 0}}, "float16"),
        ({"bandwidth": float("nan")}, "bandwidth"),
    ],
)
def test_impossible_figures_are_refused_by_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} of card is .*; it must be above 0"):
        Hardware(**CARD | changes)


@pytest.mark.parametrize("device", [hardware_of("a10g"), hardware_of("server-cpu-epyc"), calibrated(launch_s=2e-6)])
def test_through_json_and_back(device: Hardware) -> None:
    back = Hardware.from_json(json.loads(json.dumps(device.to_json())))
    assert back == device
    assert back.label == device.label
    if device.calibration is not None:
        assert back.calibration is not None
        assert back.calibration.kernels["float16"].linear_rate(3, 1e5) == 1e9
        assert replace(back, calibration=None) != device


# A pass on a device that was measured.


def parts(timed: PassTime) -> dict[str, float]:
    """Seconds of the kernels, by the name of their operator."""
    return {t.operator.name: t.kernel_s for t in timed.operators}


@pytest.mark.parametrize("rows", [prefill_pass(30, 2), decode_pass(30, 4)])
def test_on_a_cpu_kernels_and_host_add_up_and_on_a_gpu_the_longer_counts(rows: list[Row]) -> None:
    config, device = small_config(n_head=2), calibrated(launch_s=1e-5, pass_s=3e-3)
    found = operators(config, rows, "float16")
    kernel_s = 0.0
    for operator in found:
        moved, done = operator.bytes / 1e9, operator.flops / 1e9
        if operator.part == "attention":
            kernel_s += done if rows[0].new > 1 else moved
        else:
            kernel_s += max(moved, done)
    host_s = 3e-3 + 1e-5 * sum(operator.calls * operator.launches for operator in found)
    timed = pass_time(config, rows, device, "float16")
    assert (timed.kernels_s, timed.host_s) == (pytest.approx(kernel_s), pytest.approx(host_s))
    assert timed.seconds == pytest.approx(kernel_s + host_s)
    assert timed.share("overhead") == pytest.approx(host_s / (kernel_s + host_s))
    ahead = pass_time(config, rows, asynchronously(device), "float16")
    assert ahead.seconds == pytest.approx(max(kernel_s, host_s))
    for one in (timed, ahead):
        every: tuple[Any, ...] = ("linear", "attention", "head", "elementwise", "overhead")
        assert sum(one.share(part) for part in every) == pytest.approx(1)


def asynchronously(device: Hardware) -> Hardware:
    assert device.calibration is not None
    return replace(device, calibration=replace(device.calibration, asynchronous=True))


def test_curves_are_asked_at_the_right_place() -> None:
    """Attention of a prompt at its keys, of a step at the bytes of a layer's cache; matrices at their rows."""
    rise = Curve((1, 1e6), (1.0, 1e6))  # the value is the place
    config = small_config(windows=(None, 5))
    device = calibrated(prefill_attention=rise, decode_attention=rise, linear=((1e6, rise),))
    prompt = pass_time(config, prefill_pass(20), device, "float16")
    found = {o.name: o for o in operators(config, prefill_pass(20), "float16")}
    assert parts(prompt)["attention"] == pytest.approx(found["attention"].flops / 20)
    assert parts(prompt)["qkv"] == pytest.approx(found["qkv"].flops / 20)
    assert parts(prompt)["head"] == pytest.approx(found["head"].flops / 1)
    step = parts(pass_time(config, decode_pass(50, 3), device, "float16"))
    # Bytes over a rate that equals them.
    assert [step["attention"], step["attention(5)"]] == pytest.approx([1, 1])


def test_a_dtype_that_was_not_calibrated_is_refused() -> None:
    with pytest.raises(ConfigError, match="card was calibrated for float16, not for bfloat16"):
        pass_time(small_config(), [Row(1)], calibrated())
