"""A forward pass over many requests, end to end: prompts, chunks and single tokens mixed, and no padding computed.

Orca batches the linear layers of requests that stand at different places, and runs attention request by request
("selective batching", OSDI 2022). Here the tokens of all requests make one long row; attention follows, for each query,
the block table of its own request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlab.cache.base import UNWRITTEN, Step, View, Visibility, classify, visible
from kvlab.cache.contiguous import NoCache
from kvlab.cache.paged import BlockStorage
from kvlab.config import ModelConfig
from kvlab.errors import ConfigError

#: Spans of up to so many queries (a token, or a draft to verify) are attended query by query; longer ones at once.
_FEW = 8


@dataclass(frozen=True)
class Span:
    """The new tokens of one request in a ragged pass.

    Args:
        table: blocks of the request, enough for the new tokens too.
        seen: tokens that it holds already.
        new: tokens that it brings, 1 or more.
        wanted: how many of its last tokens need logits.

    Raises:
        ConfigError: a number is impossible, or the table is too short.
    """

    table: Sequence[int]
    seen: int
    new: int
    wanted: int = 1

    def __post_init__(self) -> None:
        if self.seen < 0 or self.new < 1 or not 0 <= self.wanted <= self.new:
            raise ConfigError(
                f"a span of {self.new} new tokens after {self.seen}, {self.wanted} of them with logits; "
                "it brings 1 token or more, and at most all of them have logits"
            )

    @property
    def end(self) -> int:
        """Tokens that the request holds after the pass."""
        return self.seen + self.new


@dataclass(frozen=True, kw_only=True)
class BlockView(View):
    """What the queries of a ragged pass see: the blocks of their own request, up to themselves.

    Args:
        block_size: tokens of a block.
        window: of the layer.
        beyond: a slot that is zero, for what stands beyond the end of a table.
        few: indices of the queries that are attended one by one.
        tables: blocks of the requests that those belong to; -1 beyond the end.
        rows: the table that each of those reads.
        lengths: keys that each of those sees or would see without a window.
        many: for each longer span its first query, one past its last, the slots of its keys, and what it sees of them.
    """

    visibility: Visibility = Visibility.BLOCKS
    block_size: int
    window: int | None
    beyond: int
    few: Int[Tensor, "few"]
    tables: Int[Tensor, "requests blocks"]
    rows: Int[Tensor, "few"]
    lengths: Int[Tensor, "few"]
    many: tuple[tuple[int, int, Int[Tensor, "_"], View], ...]

    @cached_property
    def gathered(self) -> tuple[Int[Tensor, "few keys"], View]:
        """The slots of all keys of the queries that are attended one by one, and what each sees of them.

        For where no kernel follows a block table: the keys are copied together first.
        """
        positions = torch.arange(int(self.lengths.max()), device=self.lengths.device)
        blocks = self.tables[self.rows][:, positions // self.block_size]
        slots = blocks * self.block_size + positions % self.block_size
        held = positions < self.lengths[:, None]
        key_positions = torch.where(held, positions, UNWRITTEN)[:, None]
        mask = visible(key_positions, self.lengths[:, None] - 1, self.window)
        return torch.where(held, slots, self.beyond), View(Visibility.MASK, mask)


@dataclass(frozen=True)
class RaggedStep(Step):
    """A pass over the new tokens of many requests, end to end in one row.

    Args:
        slots: where each token goes.
        wanted: columns of the tokens that need logits.
    """

    slots: Int[Tensor, "time"]
    wanted: Int[Tensor, "out"]

    def outputs(self) -> tuple[Int[Tensor, "out"], Int[Tensor, "out"]]:
        """Row and column of the tokens that need logits."""
        return torch.zeros_like(self.wanted), self.wanted


class RaggedBatch(NoCache):
    """One forward pass over many requests whose keys and values lie in the blocks of one storage.

    The batch of the tensors is 1: ``time`` runs over the tokens of all requests. Linear layers see one long row;
    attention reads, for each query, the blocks of its own request.

    Args:
        config: the model's shape.
        storage: the blocks.
        spans: what each request brings.

    Raises:
        ConfigError: there is no span, or a table is too short for its tokens.
    """

    def __init__(self, config: ModelConfig, storage: BlockStorage, spans: Sequence[Span]) -> None:
        super().__init__(config, 1, storage.slots.dtype, storage.slots.device)
        self.storage, self.spans = storage, spans
        for span in spans:
            if span.end > len(span.table) * storage.block_size:
                raise ConfigError(f"a table of {len(span.table)} blocks does not hold {span.end} tokens")
        if not spans:
            raise ConfigError("a pass over no request; give it one span or more")

    def step(self) -> RaggedStep:
        """Lay the pass out: where each token goes, what it sees, and which logits are wanted."""
        spans, device = self.spans, self.device
        starts = [0]
        for span in spans:
            starts.append(starts[-1] + span.new)
        wanted = [
            column for span, end in zip(spans, starts[1:], strict=True) for column in range(end - span.wanted, end)
        ]
        slots = [self.storage.slots_of(span.table, span.seen, span.end) for span in spans]
        return RaggedStep(
            positions=torch.cat([torch.arange(span.seen, span.end) for span in spans])[None].to(device),
            n_new=(starts[-1],),
            views={window: self._view(window, starts) for window in set(self.config.windows)},
            windows=self.config.windows,
            slots=torch.cat(slots).to(device),
            wanted=torch.tensor(wanted, dtype=torch.long, device=device),
        )

    def append(
        self,
        layer: int,
        k: Float[Tensor, "1 n_kv_head time head_dim"],
        v: Float[Tensor, "1 n_kv_head time head_dim"],
        step: Step,
    ) -> tuple[Float[Tensor, "1 n_kv_head slots head_dim"], Float[Tensor, "1 n_kv_head slots head_dim"]]:
        """Write a layer's new keys and values into their slots, and return all slots: the view says who reads which."""
        assert isinstance(step, RaggedStep)
        self.storage.write(layer, k[0], v[0], step.slots)
        return self.storage.slots[0, layer][None], self.storage.slots[1, layer][None]

    def _view(self, window: int | None, starts: Sequence[int]) -> BlockView:
        few = [index for index, span in enumerate(self.spans) if span.new <= _FEW]
        spans = [self.spans[index] for index in few]
        columns = [starts[index] + i for index, span in zip(few, spans, strict=True) for i in range(span.new)]
        rows = [row for row, span in enumerate(spans) for _ in range(span.new)]
        lengths = [position + 1 for span in spans for position in range(span.seen, span.end)]
        on_device = lambda numbers: torch.tensor(numbers, dtype=torch.long, device=self.device)  # noqa: E731
        return BlockView(
            block_size=self.storage.block_size,
            window=window,
            beyond=self.storage.beyond,
            few=on_device(columns),
            tables=padded_tables([span.table for span in spans]).to(self.device),
            rows=on_device(rows),
            lengths=on_device(lengths),
            many=tuple(
                (starts[index], starts[index + 1], *self._long(span, window))
                for index, span in enumerate(self.spans)
                if span.new > _FEW
            ),
        )

    def _long(self, span: Span, window: int | None) -> tuple[Int[Tensor, "keys"], View]:
        """The slots of a longer span's keys, and what its queries see of them."""
        positions = torch.arange(span.seen, span.end)[None]
        kind = classify(positions, (span.new,), 0, window)
        mask = None
        if kind is Visibility.MASK:
            mask = visible(torch.arange(span.end)[None, None], positions, window).to(self.device)
        return self.storage.slots_of(span.table, 0, span.end).to(self.device), View(kind, mask)


def padded_tables(tables: Sequence[Sequence[int]]) -> Int[Tensor, "requests blocks"]:
    """Tables of one length, -1 beyond the end of each.

    Args:
        tables: blocks of each request.
    """
    longest = max(map(len, tables), default=0)
    rows = [[*table, *[-1] * (longest - len(table))] for table in tables]
    return torch.tensor(rows, dtype=torch.long).reshape(len(tables), longest)
