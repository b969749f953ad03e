"""A decode step of one shape: the same logits as the plain one, and one shape only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvlab.cache import ContiguousCache, make_cache
from kvlab.errors import CacheFull, ConfigError, DeviceError
from kvlab.generation import FixedDecode, decode, prefill
from kvlab.model import GPT

SHAPES: dict[str, dict[str, object]] = {
    "full": {},
    "window": {"windows": (5, 5)},
    "mixed": {"windows": (5, None)},
    "learned": {"position": "learned", "norm": "layernorm", "gated_mlp": False, "activation": "gelu_tanh"},
}


def filled(model: GPT, batch: int = 1, prompt: int = 7, max_len: int = 20) -> ContiguousCache:
    cache = make_cache("contiguous", model.config, batch, max_len, model.dtype, model.device)
    assert isinstance(cache, ContiguousCache)
    generator = torch.Generator().manual_seed(1)
    prefill(model, torch.randint(61, (batch, prompt), generator=generator), cache)
    return cache


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("bucket", [None, 4, 8])
def test_every_step_equals_the_plain_one(
    make_model: Callable[..., GPT], shape: str, batch: int, bucket: int | None
) -> None:
    model = make_model(**SHAPES[shape])
    cache = filled(model, batch)
    step, plain = FixedDecode(model, cache, bucket), cache.fork()
    tokens = torch.arange(batch)
    for _ in range(13):
        got, want = step(tokens), decode(model, tokens, plain)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
        tokens = want.argmax(dim=1)
    assert cache.rows_seen == plain.rows_seen == [20] * batch


def test_empty_slots_do_not_matter(model: GPT) -> None:
    cache = filled(model)
    plain = cache.fork()
    cache.storage[..., 8:, :] = 1e6  # finite, and masked
    torch.testing.assert_close(FixedDecode(model, cache)(torch.tensor([3])), decode(model, torch.tensor([3]), plain))


def test_no_shape_and_no_address_changes_between_steps(model: GPT) -> None:
    """The plain step reads one more key each time, and that is what a recorded graph could not follow."""

    class Shapes(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[object] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.seen += [(str(func), tuple(arg.shape)) for arg in args if isinstance(arg, torch.Tensor)]
            return func(*args, **(kwargs or {}))

    def shapes(work: Callable[[], object]) -> list[object]:
        with Shapes() as heard:
            work()
        return heard.seen

    cache = filled(model)
    plain, step, token = cache.fork(), FixedDecode(model, cache), torch.tensor([3])
    first, second = (shapes(lambda: step(token)) for _ in range(2))
    assert first == second
    assert shapes(lambda: decode(model, token, plain)) != shapes(lambda: decode(model, token, plain))


def test_a_full_cache_is_refused_with_numbers_and_nothing_changes(model: GPT) -> None:
    cache = filled(model, max_len=8)
    step = FixedDecode(model, cache)
    step(torch.tensor([3]))
    kept = cache.storage.clone()
    with pytest.raises(CacheFull, match="all 8 slots are taken"):
        step(torch.tensor([3]))
    assert torch.equal(cache.storage, kept)
    assert cache.tokens_seen == 8


def test_rows_of_different_lengths_and_a_cache_beyond_the_context_are_refused(model: GPT) -> None:
    ragged = filled(model, batch=2)
    ragged.crop([3, 7])
    with pytest.raises(ConfigError, match=r"rows have seen \[3, 7\] tokens"):
        FixedDecode(model, ragged)
    with pytest.raises(ConfigError, match="max_len is 65; the context of small is 64"):
        FixedDecode(model, filled(model, max_len=65))


def test_a_graph_cannot_record_the_cpu(model: GPT) -> None:
    with pytest.raises(DeviceError, match="cannot record work on cpu"):
        FixedDecode(model, filled(model)).record()
