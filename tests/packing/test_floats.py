"""Small floating point formats, beside those that torch has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.errors import ConfigError
from kvlab.packing import E2M1, E4M3, E5M2, FloatFormat

TORCH = {"e4m3": (E4M3, torch.float8_e4m3fn), "e5m2": (E5M2, torch.float8_e5m2)}


@pytest.mark.parametrize("kind", TORCH)
def test_every_number_of_the_format_is_itself(kind: str) -> None:
    ours, theirs = TORCH[kind]
    every = torch.arange(256, dtype=torch.uint8).view(theirs).float()
    every = every[torch.isfinite(every)]
    assert torch.equal(ours.round(every), every)
    assert every.max() == ours.largest


@pytest.mark.parametrize("kind", TORCH)
def test_rounding_is_the_cast_of_torch_ties_and_subnormals_too(kind: str) -> None:
    ours, theirs = TORCH[kind]
    every = torch.arange(256, dtype=torch.uint8).view(theirs).float()
    points = every[torch.isfinite(every)].sort().values
    ties = (points[1:] + points[:-1]) / 2
    spread = torch.randn(4000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 2.5, 4000)
    for values in (ties, ties * (1 + 1e-6), ties * (1 - 1e-6), spread):
        assert torch.equal(ours.round(values), values.clamp(-ours.largest, ours.largest).to(theirs).float())


def test_e2m1_has_eight_magnitudes() -> None:
    fine = torch.linspace(-8, 8, 6401)
    rounded = E2M1.round(fine)
    assert rounded.abs().unique().tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    points = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = (fine.abs().clamp(max=6)[:, None] - points).abs().amin(dim=1)
    torch.testing.assert_close((rounded - fine.clamp(-6, 6)).abs(), nearest)
    assert E2M1.round(torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])).tolist() == [0, 1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("bits", [(E4M3, 8), (E5M2, 8), (E2M1, 4)], ids=lambda pair: str(pair[1]))
def test_bits_count_the_sign(bits: tuple[FloatFormat, int]) -> None:
    assert bits[0].bits == bits[1]


@settings(max_examples=60)
@given(st.floats(-(2.0**100), 2.0**100, width=32), st.sampled_from([E4M3, E5M2, E2M1]))
def test_what_is_too_large_becomes_the_largest(value: float, kind: FloatFormat) -> None:
    rounded = kind.round(torch.tensor([value])).item()
    assert abs(rounded) <= kind.largest
    if abs(value) >= kind.largest:
        assert abs(rounded) == kind.largest
    assert rounded * value >= 0


def test_a_scale_a_group_uses_the_whole_format() -> None:
    """A plain cast of small weights to E2M1 makes zeros of them; with a scale their pattern stays."""
    weights = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 0.02
    assert E2M1.round(weights).abs().max() == 0
    scaled = E2M1.round_scaled(weights, 32)
    assert ((scaled - weights).norm() / weights.norm()).item() < 0.15
    groups, rounded = weights.unflatten(1, (2, 32)), scaled.unflatten(1, (2, 32))
    torch.testing.assert_close(rounded.abs().amax(-1), groups.abs().amax(-1))
    assert torch.equal(E4M3.round_scaled(weights), E4M3.round_scaled(weights, 64))


def test_zero_groups_stay_zero() -> None:
    assert E4M3.round_scaled(torch.zeros(2, 32), 8).abs().max() == 0


def test_groups_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="groups of 48 do not divide rows of 64"):
        E4M3.round_scaled(torch.zeros(1, 64), 48)


@pytest.mark.parametrize("shape", [(0, 3, 1.0), (4, -1, 1.0), (4, 3, 0.0)])
def test_impossible_formats_are_refused(shape: tuple[int, int, float]) -> None:
    with pytest.raises(ConfigError, match="no floating point format"):
        FloatFormat(*shape)
