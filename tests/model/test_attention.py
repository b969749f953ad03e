"""The one rule, and every kernel against it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvlab.cache import View, Visibility, visible
from kvlab.cache.base import UNWRITTEN
from kvlab.model import attend


def by_the_rule(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """Attention written out, one query at a time, in float64; a query that sees nothing gets zero."""
    out = torch.zeros(*q.shape, dtype=torch.float64)
    group = q.shape[1] // keys.shape[1]
    for b, h, t in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        at = seen[b, 0, t].nonzero()[:, 0]
        if len(at):
            scores = keys[b, h // group, at].double() @ q[b, h, t].double() / math.sqrt(q.shape[3])
            out[b, h, t] = scores.softmax(0) @ values[b, h // group, at].double()
    return out


def qkv(time: int, keys: int, n_head: int = 6, n_kv_head: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(time + keys)
    q = torch.randn(2, n_head, time, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, n_kv_head, keys, 8, dtype=torch.float64).unbind()
    return q, k, v


def test_is_causal_aligned_top_left_two_queries_over_five_keys() -> None:
    keys = torch.arange(5)[None, None]
    two = visible(keys, torch.tensor([[3, 4]]), None)[0, 0]
    assert two.int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert visible(keys, torch.tensor([[4]]), None).all()


def test_a_window_counts_the_token_itself() -> None:
    seen = visible(torch.arange(5)[None, None], torch.tensor([[3, 4]]), 2)[0, 0]
    assert seen.int().tolist() == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]


def test_padding_sees_nothing_and_empty_slots_are_seen_by_nobody() -> None:
    keys = torch.tensor([[[0, 1, UNWRITTEN]]])
    assert visible(keys, torch.tensor([[-1, 1]]), None)[0, 0].int().tolist() == [[0, 0, 0], [1, 1, 0]]


@pytest.mark.parametrize(("n_head", "n_kv_head"), [(6, 2), (4, 4), (4, 1)])
@pytest.mark.parametrize(
    ("visibility", "time", "n_keys"),
    [
        (Visibility.ALL, 1, 7),
        (Visibility.CAUSAL, 5, 5),
        (Visibility.CAUSAL_TAIL, 2, 5),
        (Visibility.CAUSAL_TAIL, 4, 9),
        (Visibility.MASK, 3, 6),
    ],
)
def test_every_class_equals_the_rule(
    visibility: Visibility, time: int, n_keys: int, n_head: int, n_kv_head: int
) -> None:
    q, k, v = qkv(time, n_keys, n_head, n_kv_head)
    positions = torch.arange(n_keys - time, n_keys).expand(2, time)
    window = 2 if visibility is Visibility.MASK else None
    seen = visible(torch.arange(n_keys).expand(2, 1, n_keys), positions, window)
    view = View(visibility, seen if visibility is Visibility.MASK else None)
    torch.testing.assert_close(attend(q, k, v, view), by_the_rule(q, k, v, seen), rtol=0, atol=1e-12)


def test_tile_for_repeat_interleave_head_h_uses_kv_head_h_over_3() -> None:
    q, k, v = qkv(4, 4)
    for visibility in (Visibility.CAUSAL, Visibility.ALL):
        part = q[:, :, :1] if visibility is Visibility.ALL else q
        want = attend(part, k, v, View(visibility))
        for head in range(6):
            only = slice(head // 3, head // 3 + 1)
            got = attend(part[:, head : head + 1], k[:, only], v[:, only], View(visibility))
            torch.testing.assert_close(got[:, 0], want[:, head], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_fully_masked_row_is_exactly_zero(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in qkv(3, 5))
    mask = torch.ones(2, 1, 3, 5, dtype=torch.bool)
    mask[:, :, 1] = False
    out = attend(q, k, v, View(Visibility.MASK, mask))
    assert out[:, :, 1].abs().max() == 0
    assert out.isfinite().all()


@pytest.mark.parametrize("visibility", list(Visibility))
def test_float16_scores_of_6e4_stay_finite(visibility: Visibility) -> None:
    """Scores near the largest float16: a mask of float16's minimum added to them would be -inf."""
    time = 1 if visibility is Visibility.ALL else 4
    q = torch.full((1, 2, time, 4), 173.0, dtype=torch.float16)
    k = torch.full((1, 2, 4, 4), 173.0, dtype=torch.float16)
    k[:, :, 2:] *= -1
    mask = torch.ones(1, 1, time, 4, dtype=torch.bool).tril() if visibility is Visibility.MASK else None
    out = attend(q, k, torch.ones_like(k), View(visibility, mask))
    assert out.isfinite().all()
    torch.testing.assert_close(out, torch.ones_like(out))
