"""Keys and values in blocks: a sequence takes a block when it needs one, and may share blocks with others.

A block table says where the tokens of a sequence lie (PagedAttention, arXiv:2309.06180). :class:`PagedCache` keeps the
protocol of all caches, rows padded to one length; :mod:`kvlab.cache.ragged` lays many requests end to end instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlab.cache.base import KVCache, Step
from kvlab.cache.block_pool import BlockPool
from kvlab.config import ModelConfig
from kvlab.errors import CacheFull, at_least


class BlockStorage:
    """The tensors behind a pool: a slot a token, ``block_size`` slots a block, in every layer.

    Args:
        config: the model's shape.
        pool: how many blocks, and of what size.
        dtype: of keys and values.
        device: where they live.
    """

    def __init__(
        self, config: ModelConfig, pool: BlockPool, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.block_size = pool.block_size
        # One block more, never written: what stands beyond the end of a row is read from there, and is zero.
        self.beyond = pool.n_blocks * pool.block_size
        slots = self.beyond + pool.block_size
        shape = (2, config.n_layer, config.n_kv_head, slots, config.head_dim)
        self.slots = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return self.slots.nbytes

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks in all layers.

        Args:
            copies: pairs of block numbers, from and to.
        """
        for source, target in copies:
            ours, theirs = self._span(target), self._span(source)
            self.slots[:, :, :, ours] = self.slots[:, :, :, theirs]

    def slots_of(self, table: Sequence[int], start: int, end: int) -> Int[Tensor, "tokens"]:
        """Slots of the tokens at positions ``start`` to ``end`` of a sequence.

        Args:
            table: its blocks.
            start: first position.
            end: one past the last.
        """
        positions = torch.arange(start, end)
        return torch.tensor(table)[positions // self.block_size] * self.block_size + positions % self.block_size

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Int[Tensor, "tokens"]) -> None:
        """Put keys and values of a layer into slots.

        Args:
            layer: its index.
            k: keys, [n_kv_head, tokens, head_dim].
            v: values, of the same shape.
            slots: one a token.
        """
        self.slots[0, layer].index_copy_(1, slots, k)
        self.slots[1, layer].index_copy_(1, slots, v)

    def _span(self, block: int) -> slice:
        return slice(block * self.block_size, (block + 1) * self.block_size)


@dataclass(frozen=True)
class PagedStep(Step):
    """A pass over a paged cache, rows padded to one length.

    Args:
        tokens: row and column of every token that is written.
        slots: where each of them goes.
        held: the slots that attention reads, one row of them for each row of the batch.
    """

    tokens: tuple[Int[Tensor, "tokens"], Int[Tensor, "tokens"]]
    slots: Int[Tensor, "tokens"]
    held: Int[Tensor, "batch keys"]


class PagedCache(KVCache):
    """Rows take blocks as they grow; a fork shares them and copies one only when it writes into it.

    Args:
        config: the model's shape.
        batch: rows.
        max_len: tokens a row may come to.
        dtype: of keys and values.
        device: where they live.
        n_blocks: of the pool; by default as many as all rows need at full length.
        block_size: tokens of a block.

    Raises:
        ConfigError: a size is below 1.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        n_blocks: int | None = None,
        block_size: int = 16,
    ) -> None:
        super().__init__(config, batch, max_len, dtype, device)
        per_row = -(-max_len // at_least(1, "block_size", block_size))
        self.pool = BlockPool(batch * per_row if n_blocks is None else n_blocks, block_size)
        self.storage = BlockStorage(config, self.pool, dtype, self.device)
        self.tables: list[list[int]] = [[] for _ in range(batch)]

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated: the whole pool, which forks share."""
        return self.storage.nbytes

    def _require_room(self, n_new: tuple[int, ...]) -> None:
        super()._require_room(n_new)
        needed = self._blocks_needed(n_new)
        if needed > self.pool.n_free:
            raise CacheFull(
                f"{sum(n_new)} new tokens need {needed} more blocks of {self.pool.block_size} tokens, and "
                f"{self.pool.n_free} of {self.pool.n_blocks} are free; make a larger pool, or reset() a fork"
            )

    def _blocks_needed(self, n_new: tuple[int, ...]) -> int:
        """Blocks that a pass takes. Of those who share a block and all write into it, the last one may keep it."""
        pool = self.pool
        writers: Counter[int] = Counter()
        missing = 0
        for table, seen, new in zip(self.tables, self.rows_seen, n_new, strict=True):
            if new:
                missing += max(pool.blocks_for(seen + new) - len(table), 0)
                writers.update(table[seen // pool.block_size : pool.blocks_for(seen + new)])
        return missing + sum(min(times, pool.holders(block) - 1) for block, times in writers.items())

    def _lay_out(self, positions: Int[Tensor, "batch time"], n_new: tuple[int, ...]) -> PagedStep:
        slots = list[Tensor]()
        for table, seen, new in zip(self.tables, self.rows_seen, n_new, strict=True):
            if new:
                self.storage.copy(self.pool.extend(table, seen, new))
                slots.append(self.storage.slots_of(table, seen, seen + new))
        rows, columns = torch.where(positions >= 0)
        return PagedStep(
            positions=positions.to(self.device),
            n_new=n_new,
            views=self._views(positions, n_new, lambda: self._slot_positions(n_new)),
            windows=self.config.windows,
            tokens=(rows.to(self.device), columns.to(self.device)),
            slots=torch.cat(slots).to(self.device) if slots else torch.empty(0, dtype=torch.long, device=self.device),
            held=self._held(self.ends(n_new)).to(self.device),
        )

    def _held(self, ends: Sequence[int]) -> Int[Tensor, "batch keys"]:
        """Slots of each row's tokens; beyond its end, slots that are zero."""
        held = torch.full((self.batch, max(ends)), self.storage.beyond)
        for row, (table, end) in enumerate(zip(self.tables, ends, strict=True)):
            if end:
                held[row, :end] = self.storage.slots_of(table, 0, end)
        return held

    def append(
        self,
        layer: int,
        k: Float[Tensor, "batch n_kv_head time head_dim"],
        v: Float[Tensor, "batch n_kv_head time head_dim"],
        step: Step,
    ) -> tuple[Float[Tensor, "batch n_kv_head keys head_dim"], Float[Tensor, "batch n_kv_head keys head_dim"]]:
        """Write a layer's new keys and values into their slots, and gather what each row holds: a copy."""
        assert isinstance(step, PagedStep)
        rows, columns = step.tokens
        self.storage.write(layer, k[rows, :, columns].transpose(0, 1), v[rows, :, columns].transpose(0, 1), step.slots)
        keys, values = self.storage.slots[:, layer][:, :, step.held].transpose(1, 2)
        return keys, values

    def fork(self) -> PagedCache:
        """A cache that shares all blocks with this one, and the pool. ``reset()`` it to give its share back."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.rows_seen, twin.tables = list(self.rows_seen), [list(table) for table in self.tables]
        for table in twin.tables:
            self.pool.hold(table)
        return twin

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, repeats allowed; nothing is copied until a shared block is written."""
        kept = [list(self.tables[row]) for row in rows]
        for table in kept:
            self.pool.hold(table)
        for table in self.tables:
            self.pool.release(table)
        self.tables, self.rows_seen = kept, [self.rows_seen[row] for row in rows]

    def reset(self) -> None:
        """Forget everything and give all blocks back."""
        for table in self.tables:
            self.pool.release(table)
        self.tables = [[] for _ in self.tables]
        super().reset()

    def crop(self, lengths: Sequence[int]) -> None:
        """Go back to these numbers of tokens, row by row; blocks that hold nothing any more are given back.

        Raises:
            CannotCrop: a row would grow.
        """
        super().crop(lengths)
        for table, keep in zip(self.tables, lengths, strict=True):
            kept = self.pool.blocks_for(keep)
            self.pool.release(table[kept:])
            del table[kept:]
