"""What is really allocated: every cache kind to the byte, and the peak of a real forward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvlab.cache import NoCache, make_cache
from kvlab.config import ModelConfig
from kvlab.cost import Row, activation_bytes, kv_bytes, logits_bytes, prefill_pass
from kvlab.errors import ConfigError
from toys import random_gpt, small_config

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Caches.


@settings(max_examples=60)
@given(st.data())
def test_allocated_and_used_bytes_are_the_formula(data: st.DataObject) -> None:
    """lingua 44, torchtune 38 sized a cache by n_head. A contiguous cache keeps what a window has passed."""
    n_kv_head, n_layer = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    config = small_config(
        n_kv_head=n_kv_head,
        n_head=n_kv_head * data.draw(st.integers(1, 3)),
        n_layer=n_layer,
        head_dim=2 * data.draw(st.integers(1, 8)),
        windows=(data.draw(st.sampled_from([None, 3])),) * n_layer,
    )
    dtype = data.draw(st.sampled_from(DTYPES[1:]))
    batch, max_len = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 40))
    cache = make_cache("contiguous", config, batch, max_len, dtype)
    assert cache.nbytes == kv_bytes(config, [max_len] * batch, name_of(dtype), honour_windows=False)
    lengths = data.draw(st.lists(st.integers(0, max_len), min_size=batch, max_size=batch))
    cache.rows_seen = lengths
    assert cache.used_bytes == kv_bytes(config, lengths, name_of(dtype), honour_windows=False)


def test_used_bytes_follow_a_ragged_batch() -> None:
    model = random_gpt(small_config(), torch.float32)
    cache = make_cache("contiguous", model.config, 2, 9, torch.float32)
    for _ in range(2):
        model(torch.zeros(2, 3, dtype=torch.long), cache)
    cache.crop([5, 2])
    assert cache.used_bytes == kv_bytes(model.config, [5, 2], "float32") == 7 * 2 * 32 * 4
    assert cache.nbytes == kv_bytes(model.config, [9, 9], "float32")


def test_a_pass_without_a_cache_allocates_none() -> None:
    cache = NoCache(small_config(), 3, torch.float32)
    assert cache.nbytes == cache.used_bytes == kv_bytes(small_config(), [0, 0, 0]) == 0


class Written(TorchDispatchMode):
    """Elements that operators write: into a tensor of their own, or into one that they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.index_copy_.default:
            self.elements += args[3].numel()
        elif not func.is_view:
            self.elements += sum(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point())
        return out


def test_concatenating_cache_copies_what_a_preallocated_one_does_not() -> None:
    """transformers PR 30536: 512 appends copy 131,328 rows by torch.cat, and 512 here."""
    config = small_config(n_layer=1)
    cache = make_cache("contiguous", config, 1, 512, torch.float32)
    row = torch.ones(1, 2, 1, 8)
    with Written() as written:
        for _ in range(512):
            step = cache.begin(cache.next_positions(1))
            cache.append(0, row, row, step)
            cache.commit(step)
    assert written.elements == 2 * 512 * row.numel()
    with Written() as copied:
        keys = row[:, :, :0]
        for _ in range(512):
            keys = torch.cat([keys, row], dim=2)
    assert copied.elements == 131_328 * row.numel()


# Activations.


class Live(TorchDispatchMode):
    """Bytes of the storages that operators made and that something still holds, and their peak."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.born(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return out

    def born(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.now += storage.nbytes()
            weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())

    def gone(self, key: int, nbytes: int) -> None:
        self.known.remove(key)
        self.now -= nbytes


def measured_peak(config: ModelConfig, rows: list[Row], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of one pass of kvlab's own decoder over rows of one length."""
    model, batch, row = random_gpt(config, dtype), len(rows), rows[0]
    cache = make_cache("contiguous", config, batch, row.past + row.new, dtype)
    tokens = torch.zeros(batch, row.new, dtype=torch.long)
    live = Live([*model.parameters(), *model.buffers(), cache.storage, tokens])
    # Made outside of the mode, whose tensors cannot become the subclass that carries the causal rule.
    rules: dict[tuple[int, int], Tensor] = {}
    lower_right: Callable[[int, int], Tensor] = torch.nn.attention.bias.causal_lower_right
    if row.new > 1 and row.past:
        rules[row.new, row.past + row.new] = lower_right(row.new, row.past + row.new)
    monkeypatch.setattr("kvlab.model.attention._lower_right", lambda *shape: rules[shape])
    with torch.no_grad():
        if row.past:
            model(torch.zeros(batch, row.past, dtype=torch.long), cache)
        with live:
            model(tokens, cache, last_only=row.logits == 1)
    return live.peak


WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 352, "vocab_size": 500, "max_seq_len": 512}
GPT2: dict[str, Any] = {
    "family": "gpt2", "norm": "layernorm", "position": "learned", "gated_mlp": False, "activation": "gelu_tanh",
    "qkv_bias": True, "out_bias": True, "mlp_bias": True, "n_head": 4, "n_kv_head": 4, "head_dim": 32,
}  # fmt: skip
SHAPES = {
    "llama": small_config(**WIDE, n_head=4, n_kv_head=4, head_dim=32),
    "grouped": small_config(**WIDE, n_head=8, n_kv_head=2, head_dim=16),
    "qwen3": small_config(**WIDE, family="qwen3", qk_norm=True, n_head=8, n_kv_head=2, head_dim=32),
    "gpt2": small_config(**WIDE | {"intermediate_size": 512}, **GPT2),
    "many heads, narrow MLP": small_config(**WIDE | {"intermediate_size": 128}, n_head=16, n_kv_head=2, head_dim=32),
    "wide MLP": small_config(**WIDE | {"intermediate_size": 1024}, n_head=4, n_kv_head=2, head_dim=32),
    "large vocabulary": small_config(**WIDE | {"vocab_size": 20_000}, n_head=4, n_kv_head=2, head_dim=32),
    "window": small_config(**WIDE, family="mistral", windows=(32, 32), n_head=8, n_kv_head=2, head_dim=16),
    "half windowed": small_config(
        **WIDE, family="qwen2", windows=(None, 32), qkv_bias=True, n_head=8, n_kv_head=2, head_dim=16
    ),
}
PASSES = {
    "prompt": prefill_pass(128),
    "three prompts": prefill_pass(40, 3),
    "chunk": [Row(48, 160)],
    "step": [Row(1, 96)] * 3,
    "every logit": [Row(64, 0, 64)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("rows", PASSES)
@pytest.mark.parametrize("shape", SHAPES)
def test_activations_are_what_a_real_pass_holds_at_its_peak(
    shape: str, rows: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, fed = SHAPES[shape], PASSES[rows]
    peak = measured_peak(config, fed, dtype, monkeypatch)
    counted = activation_bytes(config, fed, name_of(dtype))
    # Where this was written all but one were equal to the byte: two masks at once, of which the formula names one.
    assert counted == pytest.approx(peak, rel=0.1 if (shape, rows) == ("half windowed", "chunk") else 0.01)


def test_logits_of_every_position_are_most_of_the_peak() -> None:
    """transformers 30860: keep the last position."""
    one, every = (activation_bytes("llama-3-8b", [Row(8192, 0, logits)]) for logits in (1, 8192))
    assert logits_bytes("llama-3-8b", 8192, "bfloat16") / every > 0.9
    assert every > 1.9 * one


def test_half_of_a_prompt_needs_half_of_the_room() -> None:
    """Statement 143: what a chunk saves is the peak of the activations, not the cache."""
    whole, half = (activation_bytes("llama-2-7b", prefill_pass(n)) for n in (4096, 2048))
    assert half == pytest.approx(whole / 2, rel=0.01)


def test_no_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="a pass has no rows"):
        activation_bytes("llama-3-8b", [])
