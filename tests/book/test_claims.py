"""A claim passes when it is true, fails when it is not, and NaN never passes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from kvlab.book.claims import CLAIM_KEY, ClaimFailed, claim, judge, slug_of
from kvlab.book.stage import BUILD_VARIABLE

NAN = math.nan


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (5, 5),
        ("gravity", "gravity"),
        (True, True),
        (None, None),
        (np.int64(7), 7),
        (torch.tensor(7), 7),
        ([1, 2, 3], [1, 2, 3]),
        ((1, 2), [1, 2]),
        (torch.arange(3), [0, 1, 2]),
        (["a", "b"], ["a", "b"]),
    ],
)
def test_equal_holds(measured: Any, expected: Any) -> None:
    assert judge("equal", measured, expected).holds


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (5, 6),
        ("a", "b"),
        (True, False),
        (1, True),
        (0, None),
        ([1, 2], [1, 2, 3]),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (NAN, NAN),
        ([1.0, NAN], [1.0, NAN]),
        (np.array([NAN]), np.array([NAN])),
    ],
)
def test_unequal_fails(measured: Any, expected: Any) -> None:
    assert not judge("unequal", measured, expected).holds


def test_tolerance_is_absolute_and_inclusive() -> None:
    assert judge("near", 1.5, 1.0, 0.5).holds
    assert not judge("near", 1.51, 1.0, 0.5).holds


def test_relative_tolerance_is_a_share_of_the_expected_value() -> None:
    assert judge("near", 105, 100, relative=0.05).holds
    assert not judge("near", 106, 100, relative=0.05).holds
    assert judge("near", -105, -100, relative=0.05).holds


def test_every_element_of_an_array_must_be_near() -> None:
    full = torch.ones(2, 3, dtype=torch.float64)
    off = full.clone()
    off[1, 2] += 1e-9
    assert judge("near", off, full, 1e-8).holds
    result = judge("near", off, full, 1e-12)
    assert not result.holds
    assert "largest difference 1e-09 in 6 numbers" in result.measured


def test_half_precision_tensors_can_be_measured() -> None:
    assert judge("near", torch.ones(2, dtype=torch.bfloat16), 1.0, 0.0).holds


def test_masked_scores_of_minus_infinity_compare_equal() -> None:
    scores = np.array([-np.inf, 1.0])
    assert judge("near", scores, scores.copy(), 1e-9).holds
    assert not judge("near", scores, np.array([0.0, 1.0]), 1e-9).holds


def test_shapes_must_agree() -> None:
    assert not judge("near", np.zeros((2, 3)), np.zeros((3,)), 1.0).holds


@pytest.mark.parametrize("limits", [{"at_least": 0.0}, {"at_most": 10.0}, {"at_least": -1.0, "at_most": 1.0}])
def test_nan_is_in_no_order(limits: dict[str, float]) -> None:
    assert not judge("order", NAN, **limits).holds
    assert not judge("order", [0.5, NAN], **limits).holds


def test_nan_is_near_nothing() -> None:
    assert not judge("near", NAN, NAN, 1e9).holds
    assert not judge("near", [1.0, NAN], [1.0, 1.0], 1e9).holds


def test_bounds() -> None:
    assert judge("order", 3, at_least=3).holds
    assert not judge("order", 2.9, at_least=3).holds
    assert judge("order", 3, at_most=3).holds
    assert not judge("order", 3.1, at_most=3).holds
    assert judge("order", [1, 2, 3], at_least=1, at_most=3).holds
    assert not judge("order", [1, 2, 4], at_least=1, at_most=3).holds
    assert not judge("order", [], at_least=1).holds


@pytest.mark.parametrize(
    ("measured", "bound", "holds", "narrow"),
    [
        (2.0, {"at_least": 1}, True, False),
        (1.9, {"at_least": 1}, True, True),
        (0.9, {"at_least": 1}, False, False),
        (0.5, {"at_most": 1}, True, False),
        (0.6, {"at_most": 1}, True, True),
        (1.1, {"at_most": 1}, False, False),
        ([2.0, 1.5], {"at_least": 1}, True, True),
    ],
)
def test_a_sentence_fails_with_its_bound_and_is_narrow_without_its_room(
    measured: Any, bound: dict[str, float], holds: bool, narrow: bool
) -> None:
    found = judge("order", measured, spare=2, **bound)
    assert (found.holds, found.narrow) == (holds, narrow)
    assert ("without a factor of 2 to spare" in found.expected) == narrow


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"expected": 1, "at_least": 1},
        {"at_least": 1, "tolerance": 0.1},
        {"at_least": 0, "spare": 2},
        {"at_least": 1, "spare": 0.5},
        {"expected": 1, "tolerance": NAN},
        {"expected": 1, "tolerance": -1},
    ],
)
def test_a_claim_that_says_nothing_clear_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        judge("unclear", 1, **arguments)


def test_a_false_claim_fails_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BUILD_VARIABLE, "1")
    with pytest.raises(ClaimFailed, match="two is three"):
        claim("two is three", 2, 3)


def test_a_false_claim_lets_a_reader_go_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(BUILD_VARIABLE, raising=False)
    claim("two is three", 2, 3)
    assert capsys.readouterr().out.startswith("✗ two is three")


def test_what_the_notebook_gets() -> None:
    bundle, metadata = judge("`k` < 2 & more", 1, 1)._repr_mimebundle_()
    assert 'id="claim-k-2-more"' in bundle["text/html"]
    assert "<code>k</code> &lt; 2 &amp; more" in bundle["text/html"]
    assert bundle["text/plain"].startswith("✓")
    assert metadata[CLAIM_KEY]["slug"] == "claim-k-2-more"
    assert metadata[CLAIM_KEY]["holds"] is True


def test_slugs_are_stable_and_distinct() -> None:
    assert slug_of("The cache holds N + M - 1 entries") == "claim-the-cache-holds-n-m-1-entries"
    long = "A sentence that goes on and on and would make an anchor too long to link to from any page"
    assert slug_of(long) == slug_of(long) != slug_of(f"{long}!!")
    assert len(slug_of(long)) < 75
    assert slug_of("预填充") != slug_of("解码")
