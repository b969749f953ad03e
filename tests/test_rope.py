"""Rotary positions: tables, layouts, precision."""

from __future__ import annotations

import torch

from kvlab.config import RopeScaling
from kvlab.rope import Rope, frequencies, rotate, unpermute
from toys import random_gpt, small_config


def test_rope_tables_stay_float32_when_the_model_is_cast() -> None:
    """In bfloat16 positions 256 and 257 would share their angles (transformers 29285, gpt-neox 1016)."""
    model = random_gpt(small_config(max_seq_len=300), torch.bfloat16)
    assert model.rope is not None
    assert model.rope.cos.dtype == model.rope.sin.dtype == torch.float32
    assert not torch.equal(model.rope.cos[256], model.rope.cos[257])
    assert model.embedding.weight.dtype == torch.bfloat16


def test_scores_depend_on_the_distance_alone() -> None:
    """rope(rope(k, 6), -2) == rope(k, 4), as scores: q at 9 against k at 6 equals q at 7 against k at 4."""
    rope = Rope(small_config())
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).unbind()

    def score(i: int, j: int) -> torch.Tensor:
        turned = [rotate(x, *rope(torch.tensor([[at]]))) for x, at in ((q, i), (k, j))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(9, 6), score(7, 4), rtol=0, atol=1e-6)
    assert (score(9, 6) - score(9, 4)).abs() > 1e-3


def test_interleaved_against_half_split_permuted_weights_give_identical_scores() -> None:
    """The interleaved layout turns pairs (2i, 2i + 1); unpermuted weights turn the same pairs, half-split."""
    torch.manual_seed(0)
    n_head, head_dim, hidden = 3, 8, 16
    interleaved = torch.randn(2, n_head * head_dim, hidden, dtype=torch.float64)  # queries and keys
    x = torch.randn(1, 5, hidden, dtype=torch.float64)
    cos, sin = (table.double() for table in Rope(small_config())(torch.arange(5)[None]))

    def heads(weight: torch.Tensor) -> torch.Tensor:
        return (x @ weight.T).view(1, 5, n_head, head_dim).transpose(1, 2)

    def turn_pairs(y: torch.Tensor) -> torch.Tensor:
        even, odd = y[..., 0::2], y[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)

    q, k = (turn_pairs(heads(w)) for w in interleaved)
    q2, k2 = (rotate(heads(unpermute(w, n_head)), cos, sin) for w in interleaved)
    torch.testing.assert_close(q @ k.mT, q2 @ k2.mT, rtol=0, atol=1e-12)


def test_linear_scaling_divides_every_frequency() -> None:
    plain = frequencies(small_config())
    scaled = frequencies(small_config(rope_scaling=RopeScaling(kind="linear", factor=4.0)))
    torch.testing.assert_close(scaled, plain / 4)


def test_padding_gets_a_finite_angle() -> None:
    cos, sin = Rope(small_config())(torch.tensor([[-1, 0]]))
    assert torch.equal(cos[0, 0, 0], cos[0, 0, 1])
    assert torch.equal(sin[0, 0, 0], sin[0, 0, 1])
