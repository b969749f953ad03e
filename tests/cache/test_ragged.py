"""A pass over many requests end to end: each gets the logits that it gets alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlab import kernels
from kvlab.cache import BlockPool, BlockStorage, RaggedBatch, Span, Visibility
from kvlab.errors import ConfigError
from kvlab.model import GPT
from toys import random_gpt, small_config

EXACT = {"rtol": 0, "atol": 1e-12}


@dataclass
class Machine:
    """Requests whose keys and values lie in one storage; slots that nobody wrote hold NaN."""

    model: GPT
    n_blocks: int = 300
    block_size: int = 4
    rows: list[list[int]] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.n_blocks, self.block_size)
        self.storage = BlockStorage(self.model.config, self.pool, self.model.dtype)
        self.storage.slots[:, :, :, : self.storage.beyond] = torch.nan
        self.pool.allocate(1)  # nobody's: slot 0 stays NaN, should anything read there for want of a block

    def feed(self, fed: Sequence[tuple[int, int, int]], seed: int = 0) -> list[Tensor]:
        """A pass in which some requests bring tokens, as (request, new, wanted); the wanted logits of each."""
        spans, brought = list[Span](), list[int]()
        for request, new, wanted in fed:
            while request >= len(self.rows):
                self.rows.append([])
                self.tables.append([])
            row, table = self.rows[request], self.tables[request]
            tokens = torch.randint(61, (new,), generator=torch.Generator().manual_seed(seed + request)).tolist()
            self.pool.extend(table, len(row), new)
            spans.append(Span(table, len(row), new, wanted))
            row += tokens
            brought += tokens
        batch = RaggedBatch(self.model.config, self.storage, spans)
        logits = self.model.run(torch.tensor([brought]), batch, batch.step(), last_only=True)[:, 0]
        return list(logits.split([wanted for _, _, wanted in fed]))

    def alone(self, request: int, wanted: int) -> Tensor:
        """What the last tokens of a request give when the whole of it is computed anew."""
        row = self.rows[request]
        return self.model(torch.tensor([row]))[0, len(row) - wanted :]

    def check(self, fed: Sequence[tuple[int, int, int]], seed: int = 0, **tolerance: float) -> None:
        for (request, _, wanted), got in zip(fed, self.feed(fed, seed), strict=True):
            if wanted:
                torch.testing.assert_close(got, self.alone(request, wanted).to(got.dtype), **(tolerance or EXACT))


@settings(max_examples=60)
@given(st.data())
def test_any_mix_of_prompts_chunks_tokens_and_drafts_equals_a_full_recompute(data: st.DataObject) -> None:
    """With windows and without; lengths on both sides of where spans are attended at once."""
    windows = data.draw(st.sampled_from([(None, None), (None, 3), (1, 12)]))
    machine = Machine(random_gpt(small_config(windows=windows)), block_size=data.draw(st.integers(1, 5)))
    for step in range(data.draw(st.integers(1, 4))):
        requests = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True))
        fed = []
        for request in requests:
            new = data.draw(st.one_of(st.just(1), st.integers(2, 8), st.integers(9, 14)))
            fed.append((request, new, data.draw(st.sampled_from([0, 1, new]))))
        machine.check(fed, seed=100 * step)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("chunk", [1, 2, 7, 8, 9, 40])
def test_chunk_attends_with_the_full_prompt_length_chunk_logits_equal_full(chunk: int, window: int | None) -> None:
    """A prompt in chunks beside a request that decodes: every logit is that of one pass (nano-vllm 212)."""
    machine = Machine(random_gpt(small_config(windows=(window, None))))
    machine.feed([(1, 5, 1)])
    for start in range(0, 40, chunk):
        new = min(chunk, 40 - start)
        machine.check([(0, new, new), (1, 1, 1)] if len(machine.rows[1]) < 64 else [(0, new, new)], seed=start)


@pytest.mark.parametrize("new", [8, 9])
def test_short_and_long_spans_are_attended_in_the_two_ways(new: int) -> None:
    machine = Machine(random_gpt(small_config()))
    machine.feed([(0, 6, 1)])
    machine.pool.extend(machine.tables[0], 6, new)
    step = RaggedBatch(machine.model.config, machine.storage, [Span(machine.tables[0], 6, new)]).step()
    view = step.view(0)
    assert view.visibility is Visibility.BLOCKS
    assert (len(view.few), len(view.many)) == ((8, 0) if new == 8 else (0, 1))  # type: ignore[attr-defined]
    assert step.positions.tolist() == [list(range(6, 6 + new))]
    assert step.outputs()[1].tolist() == [new - 1]


def test_the_wanted_logits_are_the_last_of_each_span_in_order() -> None:
    machine = Machine(random_gpt(small_config()))
    fed = [(0, 3, 2), (1, 12, 0), (2, 1, 1), (3, 10, 10)]
    got = machine.feed(fed)
    assert [len(logits) for logits in got] == [2, 0, 1, 10]
    for (request, _, wanted), logits in zip(fed, got, strict=True):
        if wanted:
            torch.testing.assert_close(logits, machine.alone(request, wanted), **EXACT)


def test_a_pass_in_which_nobody_wants_logits_gives_none() -> None:
    machine = Machine(random_gpt(small_config()))
    assert [len(logits) for logits in machine.feed([(0, 10, 0), (1, 2, 0)])] == [0, 0]
    machine.check([(0, 1, 1), (1, 1, 1)])


def test_learned_positions_follow_each_request() -> None:
    machine = Machine(random_gpt(small_config(position="learned")))
    machine.check([(0, 9, 9), (1, 3, 3)])
    machine.check([(1, 2, 2), (0, 1, 1)], seed=50)


def test_blocks_of_others_are_not_read_nor_what_lies_beyond_the_tokens() -> None:
    """Large finite numbers in the free part of a request's own last block, NaN in everything else that is free."""
    machine = Machine(random_gpt(small_config(windows=(None, 6))))
    machine.feed([(0, 10, 1), (1, 3, 1)])
    for row, table in zip(machine.rows, machine.tables, strict=True):
        beyond = machine.storage.slots_of(table, len(row), len(table) * 4)
        machine.storage.slots[:, :, :, beyond] = 1e30
    machine.check([(0, 1, 1), (1, 9, 9)], seed=7)
    assert machine.storage.slots[:, :, :, machine.storage.beyond :].abs().max() == 0


def test_requests_that_share_blocks_read_the_same_prefix() -> None:
    machine = Machine(random_gpt(small_config()))
    machine.feed([(0, 8, 1)])
    machine.pool.hold(machine.tables[0])
    machine.rows.append(list(machine.rows[0]))
    machine.tables.append(list(machine.tables[0]))
    machine.check([(0, 1, 1), (1, 11, 11)], seed=3)
    assert machine.tables[0][:2] == machine.tables[1][:2]
    machine.check([(0, 1, 1), (1, 1, 1)], seed=4)


# The kernel that follows block tables.


def by_hand(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, rows: Tensor, lengths: Tensor, size: int, window: int
) -> Tensor:
    """What the compiled kernel does, query by query."""
    out = torch.empty_like(q)
    for index, query in enumerate(q):
        length = int(lengths[index])
        positions = torch.arange(max(length - window, 0) if window else 0, length)
        slots = tables[rows[index]][positions // size] * size + positions % size
        group = len(query) // len(keys)
        k, v = (held[:, slots].repeat_interleave(group, 0) for held in (keys, values))
        weights = (torch.einsum("hd,hsd->hs", query, k) / query.shape[1] ** 0.5).softmax(-1)
        out[index] = torch.einsum("hs,hsd->hd", weights, v)
    return out


def two_passes(machine: Machine) -> None:
    fed = [(0, 3, 3), (1, 14, 2), (2, 8, 8)]
    machine.check(fed, rtol=0, atol=2e-3)
    machine.check([(0, 1, 1), (1, 4, 4), (3, 9, 1), (2, 12, 12)], seed=9, rtol=0, atol=2e-3)


@pytest.mark.parametrize("window", [None, 5])
def test_the_kernel_is_told_tables_rows_lengths_and_window(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for it, so that what it is handed is judged on a machine without a compiler too."""
    calls = list[tuple[Tensor, ...]]()

    def stand_in(*arguments: Tensor) -> Tensor:
        calls.append(arguments)
        return by_hand(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels, "enabled", lambda: True)
    monkeypatch.setattr(kernels, "paged_attention", stand_in, raising=False)
    monkeypatch.setattr(kernels, "ready", lambda width, group: False)
    machine = Machine(random_gpt(small_config(windows=(window, window)), torch.float32))
    two_passes(machine)
    assert len(calls) == 2 * 2  # passes, layers
    q, keys, _, tables, rows, lengths, size, seen = calls[-1]
    assert q.shape == (1 + 4, 6, 8)
    assert keys.shape == (2, 301 * 4, 8)
    assert tables.tolist() == [[*machine.tables[0], *[-1] * 4], machine.tables[1]]
    assert rows.tolist() == [0, 1, 1, 1, 1]
    assert lengths.tolist() == [4, 15, 16, 17, 18]
    assert (size, seen) == (4, window or 0)


@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 5])
def test_the_compiled_kernel_gives_what_the_gathered_keys_give(
    window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 against a full recompute; in bfloat16 no further from it than without the kernel, times two."""
    exact = random_gpt(small_config(windows=(window, window)))
    off = list[float]()
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr(kernels, "enabled", lambda: False)
        machine = Machine(random_gpt(exact.config, dtype))
        machine.feed([(0, 30, 1), (1, 3, 1)])
        got = torch.cat(machine.feed([(0, 1, 1), (1, 6, 6), (2, 9, 1)], seed=5))
        machine.model = exact
        want = torch.cat([machine.alone(0, 1), machine.alone(1, 6), machine.alone(2, 1)])
        off.append(float((got - want).abs().max()))
    assert off[0] <= 2 * off[1] + 1e-4, off


# Spans that cannot be.


@pytest.mark.parametrize(("seen", "new", "wanted"), [(-1, 1, 1), (0, 0, 0), (0, -2, 0), (3, 2, 3), (3, 2, -1)])
def test_impossible_spans_are_refused(seen: int, new: int, wanted: int) -> None:
    with pytest.raises(ConfigError, match=f"a span of {new} new tokens after {seen}, {wanted} of them with logits"):
        Span([0, 1], seen, new, wanted)


def test_a_table_that_is_too_short_is_refused() -> None:
    machine = Machine(random_gpt(small_config()))
    fits: Callable[[int], Span] = lambda new: Span([0, 1], 3, new)  # noqa: E731
    RaggedBatch(machine.model.config, machine.storage, [fits(5)])
    with pytest.raises(ConfigError, match="a table of 2 blocks does not hold 9 tokens"):
        RaggedBatch(machine.model.config, machine.storage, [fits(1), fits(6)])


def test_a_pass_over_nobody_is_refused() -> None:
    machine = Machine(random_gpt(small_config()))
    with pytest.raises(ConfigError, match="a pass over no request"):
        RaggedBatch(machine.model.config, machine.storage, [])


def test_tokens_lie_end_to_end_in_the_slots_of_their_tables() -> None:
    machine = Machine(random_gpt(small_config()))
    spans = [Span([3, 0], 2, 4), Span([5], 0, 1)]
    step = RaggedBatch(machine.model.config, machine.storage, spans).step()
    assert step.n_new == (5,)
    assert step.slots.tolist() == [14, 15, 0, 1, 20]
    assert step.outputs()[1].tolist() == [end - 1 for end in accumulate(span.new for span in spans)]
