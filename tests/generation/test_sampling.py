"""Sampling: the edges that others fell off, and the distribution itself."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvlab.errors import KvlabError, SamplingError
from kvlab.generation import Sampler, Sampling, probabilities
from kvlab.generation.sampling import draw


def kept(probs: list[float], **settings: float) -> int:
    out = probabilities(torch.tensor([probs]).log(), [Sampling(temperature=1.0, **settings)])  # type: ignore[arg-type]
    return int((out > 0).sum())


@pytest.mark.parametrize("top_p", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-300])
def test_temperature_0_is_greedy_for_every_top_p(temperature: float, top_p: float) -> None:
    """litgpt 2238; and a tiny temperature overflows nothing (vllm 890)."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 40
    settings = [Sampling(temperature=temperature, top_p=top_p, seed=row) for row in range(4)]
    probs = probabilities(logits, settings)
    assert probs.isfinite().all()
    assert Sampler(settings)(logits) == logits.argmax(dim=1).tolist()


@pytest.mark.parametrize(
    ("probs", "top_p", "count"),
    [
        ([0.5, 0.41, 0.09], 0.9, 2),
        ([0.4, 0.3, 0.2, 0.1], 0.8, 3),
        ([0.5, 0.3, 0.2], 1e-9, 1),
        ([0.5, 0.3, 0.2], 1.0, 3),
    ],
)
def test_top_p_edges(probs: list[float], top_p: float, count: int) -> None:
    """reasoning-from-scratch 164."""
    assert kept(probs, top_p=top_p) == count


def test_top_p_applies_to_what_top_k_left() -> None:
    assert kept([0.4, 0.3, 0.2, 0.1], top_k=2, top_p=0.6) == 2  # 0.4 of the 0.7 that is left is 0.57
    assert kept([0.4, 0.3, 0.2, 0.1], top_k=2, top_p=0.5) == 1


def test_ties_at_the_edge_of_top_k_keep_exactly_k() -> None:
    assert kept([0.25, 0.25, 0.25, 0.25], top_k=2) == 2


def test_min_p_is_relative_to_the_likeliest() -> None:
    assert kept([0.5, 0.3, 0.15, 0.05], min_p=0.3) == 3
    assert kept([0.5, 0.3, 0.15, 0.05], min_p=1.0) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_vocabulary_is_never_sampled(temperature: float) -> None:
    """vllm 340: an embedding padded to 64 rows for a tokenizer of 50 ids."""
    logits = torch.zeros(2, 64)
    logits[:, 50:] = 100.0
    settings = [Sampling(temperature=temperature, seed=1)] * 2
    assert probabilities(logits, settings, n_vocab=50)[:, 50:].abs().max() == 0
    sampler = Sampler(settings, n_vocab=50)
    assert all(token < 50 for _ in range(50) for token in sampler(logits))


def test_rows_have_their_own_settings() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().expand(3, 4)
    settings = [Sampling(), Sampling(temperature=1.0, top_k=2), Sampling(temperature=1.0)]
    assert (probabilities(logits, settings) > 0).sum(dim=1).tolist() == [1, 2, 4]


def test_a_seed_makes_a_row_independent_of_its_neighbours() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(5))
    settings = [Sampling(temperature=1.0, seed=row) for row in (7, 8, 9)]
    together = Sampler(settings)
    batch = [together(logits) for _ in range(20)]
    for row in range(3):
        alone = Sampler([settings[row]])
        assert [tokens[row] for tokens in batch] == [alone(logits[row : row + 1])[0] for _ in range(20)]
    assert len({tuple(tokens[row] for tokens in batch) for row in range(3)}) == 3


def test_draws_follow_the_distribution() -> None:
    """20,000 draws: every frequency within five standard deviations of its probability."""
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(2)).expand(20_000, 12)
    setting = Sampling(temperature=0.7, top_k=8)
    probs = probabilities(logits[:1], [setting])[0]
    uniform = torch.rand(20_000, 1, generator=torch.Generator().manual_seed(3))
    counts = torch.bincount(torch.tensor(draw(probs.expand(20_000, 12), uniform)), minlength=12)
    spread = (20_000 * probs * (1 - probs)).sqrt()
    assert ((counts - 20_000 * probs).abs() <= 5 * spread).all()
    assert counts[probs == 0].sum() == 0


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_the_ends_of_the_unit_interval_hit_possible_tokens(uniform: float) -> None:
    probs = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]])
    assert draw(probs, torch.tensor([[uniform]])) == [1 if uniform == 0 else 3]


@example([-4.5e-30, 0.0], 1.0, 1, 0.0)  # one probability, two logits
@given(st.lists(st.floats(-50, 50), min_size=2, max_size=30), st.floats(0.05, 1.0), st.integers(1, 30), st.floats(0, 1))
def test_any_filter_leaves_a_distribution_that_holds_the_argmax(
    logits: list[float], top_p: float, top_k: int, min_p: float
) -> None:
    row = torch.tensor([logits])
    probs = probabilities(row, [Sampling(temperature=0.5, top_p=top_p, top_k=top_k, min_p=min_p)])
    assert math.isclose(float(probs.sum()), 1.0, abs_tol=1e-5)
    assert probs[0, int(row.argmax())] > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"top_k": 0},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"seed": -1},
    ],
)
def test_settings_out_of_range_are_refused_by_name(wrong: dict[str, float]) -> None:
    [name] = wrong
    with pytest.raises(SamplingError, match=f"{name} is"):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_logits_that_are_not_numbers_are_an_error_and_not_a_token() -> None:
    with pytest.raises(KvlabError, match="not finite"):
        Sampler([Sampling()])(torch.full((1, 5), torch.nan))
