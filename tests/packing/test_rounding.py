"""Rounding to a grid: how far off it may be, and what happens at the edges."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlab.errors import ConfigError
from kvlab.packing import Grid, Quantized, quantize, unpack

GRIDS = [Grid(bits, group, symmetric) for bits in (2, 4, 8) for group in (None, 8) for symmetric in (True, False)]
HALF, FULL = torch.float16, torch.float32


def within_half_a_step(made: Quantized, values: Tensor) -> None:
    """The step is the kept scale; float32 itself is off by a few parts in ten million of the magnitude."""
    step = made.scale.float().repeat_interleave(made.columns // made.scale.shape[-1], dim=-1)
    slack = 1e-6 * (values.abs() + step)
    off = (made.dequantize() - values).abs()
    assert (off <= step / 2 + slack).all(), (off / step).max()


@settings(max_examples=150)
@given(
    st.lists(st.floats(-6e4, 6e4, width=32), min_size=16, max_size=16),
    st.sampled_from(GRIDS),
    st.sampled_from([FULL, HALF, torch.bfloat16]),
)
@example([1e-5] * 8 + [1.04e-5] * 8, Grid(8), HALF)  # a scale that float16 can only hold coarsely
@example([100.0, 100.03, 99.99, 100.01] * 4, Grid(8, 8, symmetric=False), HALF)  # far from zero, narrow
@example([3.3333] * 16, Grid(4, 8, symmetric=False), HALF)  # constant, and not a float16
@example([1e-40, 0.0] * 8, Grid(4, 8), FULL)
def test_no_value_is_off_by_more_than_half_a_step(
    values: Sequence[float], grid: Grid, scale_dtype: torch.dtype
) -> None:
    given_ = torch.tensor(values)[None]
    made = quantize(given_, grid, scale_dtype=scale_dtype)
    within_half_a_step(made, given_)


@settings(max_examples=60)
@given(st.lists(st.floats(-100, 100, width=32), min_size=8, max_size=8), st.sampled_from([2, 4, 8]))
def test_an_asymmetric_grid_covers_the_whole_range(values: list[float], bits: int) -> None:
    """The smallest value has code 0, the largest the last, whatever their signs."""
    given_ = torch.tensor(values)[None]
    made = quantize(given_, Grid(bits, symmetric=False))
    codes = unpack(made.codes, bits)[0]
    assert codes[given_[0].argmin()] == 0
    if max(values) - min(values) > 1e-3:
        assert codes[given_[0].argmax()] == 2**bits - 1
    torch.testing.assert_close(made.dequantize().amin(), given_.amin(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(made.dequantize().amax(), given_.amax(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_symmetric_grid_is_the_same_on_both_sides_of_zero(bits: int) -> None:
    given_ = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    made, mirrored = quantize(given_, Grid(bits)), quantize(-given_, Grid(bits))
    assert torch.equal(made.dequantize(), -mirrored.dequantize())
    assert unpack(made.codes, bits).amin() >= 1  # the code below -top is never used
    assert made.minimum is None


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("scale_dtype", [FULL, HALF])
def test_a_zero_or_constant_group_gives_no_nan(grid: Grid, scale_dtype: torch.dtype) -> None:
    """llama.cpp 7311, lmdeploy 1786: zeros stay zeros, a constant 3 stays 3."""
    for constant in (0.0, 3.0, -3.0):
        made = quantize(torch.full((2, 16), constant), grid, scale_dtype=scale_dtype)
        torch.testing.assert_close(made.dequantize(), torch.full((2, 16), constant), rtol=2e-3, atol=0)
        if constant == 0:
            assert made.dequantize().abs().max() == 0
        assert made.scale.min() > 0
    beside = torch.cat((torch.zeros(1, 8), torch.ones(1, 8)), dim=1)
    assert torch.isfinite(quantize(beside, grid, scale_dtype=scale_dtype).dequantize()).all()


def test_a_group_size_that_does_not_divide_is_said_early_with_the_name() -> None:
    """torchchat 1362: 576 columns in groups of 128 leave 64 over, and nothing is skipped in silence."""
    message = r"blocks\.3\.mlp\.down has rows of 576 = 4 x 128 \+ 64; groups of 128 do not divide them"
    with pytest.raises(ConfigError, match=message):
        quantize(torch.zeros(2, 576), Grid(4, 128), "blocks.3.mlp.down")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_with_the_name(bad: float) -> None:
    values = torch.zeros(3, 8)
    values[1, 5] = bad
    with pytest.raises(ConfigError, match="the keys of layer 2 holds NaN or infinity"):
        quantize(values, Grid(8), "the keys of layer 2")


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_scale_that_underflows_float16_does_not_become_zero(symmetric: bool) -> None:
    values = torch.tensor([[1e-9, -1e-9, 0.0, 5e-10]])
    made = quantize(values, Grid(8, symmetric=symmetric), scale_dtype=HALF)
    assert made.scale.min() > 0
    assert made.dequantize().abs().max() < 6e-8  # the smallest number of float16


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_scale_beyond_float16_is_refused_with_the_magnitude(symmetric: bool) -> None:
    values = torch.tensor([[-3e7, 3e7, 0.0, 1.0]])
    with pytest.raises(ConfigError, match=r"head reaches .*, more than scales in torch\.float16 can stand for"):
        quantize(values, Grid(8, symmetric=symmetric), "head", scale_dtype=HALF)
    within_half_a_step(quantize(values, Grid(8, symmetric=symmetric)), values)


def test_groups_are_rounded_apart() -> None:
    """What is large in one group coarsens no other."""
    values = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    loud = values.clone()
    loud[:, 40] = 1000.0
    quiet, changed = (quantize(each, Grid(4, 32)).dequantize() for each in (values, loud))
    assert torch.equal(quiet[:, :32], changed[:, :32])
    assert not torch.equal(quiet[:, 32:40], changed[:, 32:40])


def test_one_outlier_channel_ruins_a_scale_that_spans_channels() -> None:
    """vllm PR 11906: keys of 512 tokens by 128 channels, one of them 50 times larger, in eight bits.

    Relative error on the other channels: 0.32 with one scale, 0.11 with a scale a token, 0.008 with one a channel.
    """
    keys = torch.randn(512, 128, generator=torch.Generator().manual_seed(0))
    keys[:, 17] *= 50
    others = torch.arange(128) != 17

    def error(rounded: Tensor) -> float:
        return ((rounded - keys)[:, others].norm() / keys[:, others].norm()).item()

    whole = error(quantize(keys.reshape(1, -1), Grid(8)).dequantize().view_as(keys))
    token = error(quantize(keys, Grid(8)).dequantize())
    channel = error(quantize(keys.T.contiguous(), Grid(8)).dequantize().T)
    assert whole == pytest.approx(0.32, abs=0.08)
    assert token == pytest.approx(0.11, abs=0.02)
    assert channel == pytest.approx(0.008, abs=0.002)


def test_bytes_are_codes_and_scales() -> None:
    values = torch.randn(6, 64)
    assert quantize(values, Grid(4, 32), scale_dtype=HALF).nbytes == 6 * (32 + 2 * 2)
    assert quantize(values, Grid(4, 32, symmetric=False), scale_dtype=HALF).nbytes == 6 * (32 + 2 * 2 * 2)
    assert quantize(values, Grid(8)).nbytes == 6 * (64 + 4)


@pytest.mark.parametrize("grid", GRIDS)
def test_a_slice_of_the_codes_stands_for_a_slice_of_the_values(grid: Grid) -> None:
    made = quantize(torch.randn(5, 3, 16), grid)
    part = made.map(lambda tensor: tensor[1:3])
    assert part.columns == made.columns == 16
    assert torch.equal(part.dequantize(), made.dequantize()[1:3])
    target = quantize(torch.zeros(2, 3, 16), grid)
    target.copy_(part)
    assert torch.equal(target.dequantize(), part.dequantize())
    assert target.dequantize(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("grid", GRIDS)
def test_widening_is_dequantizing(grid: Grid) -> None:
    """Also where kernels have been compiled, which may round the last bit otherwise."""
    made = quantize(torch.randn(2, 3, 64), Grid(grid.bits, 32, grid.symmetric), scale_dtype=HALF)
    torch.testing.assert_close(made.widen(), made.dequantize(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"bits": 3}, "bits is 3; codes have 2, 4 or 8"),
        ({"bits": 4, "group": 0}, "group is 0; it must be 1 or more"),
        ({"bits": 4, "group": -32}, "group is -32"),
    ],
)
def test_impossible_grids_are_refused(settings_: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Grid(**settings_)
