"""The profile of both phases: every operator has its part, and the parts add up."""

from __future__ import annotations

import pytest
import torch

from kvlab.errors import MeasureError
from kvlab.measure import Case, PhaseProfile, profile
from kvlab.measure.profile import OperatorTime
from kvlab.model import GPT
from toys import random_gpt, small_config


@pytest.fixture(scope="module")
def model() -> GPT:
    return random_gpt(small_config(), torch.float32)


def test_products_are_counted_by_part(model: GPT) -> None:
    """Two blocks of four matrices, and one head; attention itself once a block."""
    found = profile(model, Case(16), passes=2)
    for phase in (found.prefill, found.decode):
        calls = {(o.name, o.part): o.calls for o in phase.operators}
        assert calls["aten::linear", "head"] == 1
        assert calls["aten::linear", "linear"] == 8
        assert calls["aten::scaled_dot_product_attention", "attention"] == 2


def test_the_shares_add_up_to_one(model: GPT) -> None:
    phase = profile(model, Case(16), passes=1).prefill
    parts = ("linear", "attention", "head", "elementwise", "overhead")
    assert sum(phase.share(part) for part in parts) == pytest.approx(1)
    assert all(0 <= phase.share(part) <= 1 for part in parts)
    assert phase.share("linear") > 0


def test_what_no_operator_accounts_for_is_overhead() -> None:
    mm = OperatorTime("aten::mm", "linear", 1, 3.0)
    assert PhaseProfile(4.0, (mm,)).share("overhead") == pytest.approx(0.25)
    assert PhaseProfile(2.0, (mm,)).share("overhead") == 0.0
    assert PhaseProfile(2.0, (mm,)).share("linear") == 1.0


def test_the_model_is_left_as_it_was(model: GPT) -> None:
    profile(model, Case(4), passes=1)
    assert not model.head._forward_hooks
    assert not model.head._forward_pre_hooks


def test_nothing_is_written_to_the_terminal(model: GPT, capfd: pytest.CaptureFixture[str]) -> None:
    profile(model, Case(4), passes=1)
    assert capfd.readouterr() == ("", "")


def test_no_pass_is_refused(model: GPT) -> None:
    with pytest.raises(MeasureError, match="passes is 0"):
        profile(model, Case(4), passes=0)
