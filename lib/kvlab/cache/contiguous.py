"""The plain cache: one slot a position, allocated once. And the empty one, for a pass without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlab.cache.base import UNWRITTEN, KVCache, Step
from kvlab.config import ModelConfig


@dataclass(frozen=True)
class ContiguousStep(Step):
    """A pass over a contiguous cache.

    Args:
        n_keys: slots that attention reads, from slot 0.
        slots: the slots that all rows write, where all write the same; else None.
        ragged: row, column and slot of every token that is written, where rows differ; else None.
    """

    n_keys: int
    slots: Int[Tensor, "time"] | None
    ragged: tuple[Int[Tensor, "tokens"], Int[Tensor, "tokens"], Int[Tensor, "tokens"]] | None


class ContiguousCache(KVCache):
    """Slot i of a row holds the token at position i. Preallocated, so that a token costs one write and no copy."""

    def __init__(
        self, config: ModelConfig, batch: int, max_len: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(config, batch, max_len, dtype, device)
        # Born zero: a masked slot is still multiplied, and 0 x garbage would be NaN if the garbage were.
        shape = (2, config.n_layer, batch, config.n_kv_head, max_len, config.head_dim)
        self.storage = torch.zeros(shape, dtype=dtype, device=self.device)

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated: all slots, used or not."""
        return self.storage.nbytes

    def _lay_out(self, positions: Int[Tensor, "batch time"], n_new: tuple[int, ...]) -> ContiguousStep:
        n_keys = max(self.ends(n_new))
        on_device = positions.to(self.device)
        uniform = bool((positions == positions[0]).all()) and all(n == positions.shape[1] for n in n_new)
        return ContiguousStep(
            positions=on_device,
            n_new=n_new,
            views=self._views(positions, n_new, lambda: self._slot_positions(n_new)),
            windows=self.config.windows,
            n_keys=n_keys,
            slots=on_device[0] if uniform else None,
            ragged=None if uniform else self._targets(positions),
        )

    def _targets(
        self, positions: Int[Tensor, "batch time"]
    ) -> tuple[Int[Tensor, "tokens"], Int[Tensor, "tokens"], Int[Tensor, "tokens"]]:
        rows, columns = torch.where(positions >= 0)
        slots = positions[rows, columns]
        return rows.to(self.device), columns.to(self.device), slots.to(self.device)

    def append(
        self,
        layer: int,
        k: Float[Tensor, "batch n_kv_head time head_dim"],
        v: Float[Tensor, "batch n_kv_head time head_dim"],
        step: Step,
    ) -> tuple[Float[Tensor, "batch n_kv_head keys head_dim"], Float[Tensor, "batch n_kv_head keys head_dim"]]:
        """Write a layer's new keys and values into their slots, and return the slots up to the longest row."""
        assert isinstance(step, ContiguousStep)
        return write(self.storage[0, layer], k, step), write(self.storage[1, layer], v, step)

    def fork(self) -> ContiguousCache:
        """A full copy: as many bytes again. Paged caches share instead."""
        twin = type(self)(self.config, self.batch, self.max_len, self.dtype, self.device)
        twin.storage.copy_(self.storage)
        twin.rows_seen = list(self.rows_seen)
        return twin

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, repeats allowed; copies them."""
        self.storage = self.storage.index_select(2, torch.tensor(rows, device=self.device))
        self.rows_seen = [self.rows_seen[row] for row in rows]


def write(
    held: Float[Tensor, "batch n_kv_head max_len head_dim"],
    new: Float[Tensor, "batch n_kv_head time head_dim"],
    step: ContiguousStep,
) -> Float[Tensor, "batch n_kv_head keys head_dim"]:
    """Put new keys, or values, into their slots, and return the slots that attention reads.

    Args:
        held: the slots of a layer, changed in place.
        new: of this pass.
        step: says where they go.
    """
    if step.slots is not None:
        held.index_copy_(2, step.slots, new)
    elif step.ragged is not None:
        rows, columns, slots = step.ragged
        held[rows, :, slots] = new[rows, :, columns]
    return held[:, :, : step.n_keys]


class NoCache(KVCache):
    """Remembers nothing: a forward pass over whole rows, whose keys are exactly its own.

    Args:
        config: the model's shape.
        batch: rows.
        dtype: of the model.
        device: of the model.
    """

    def __init__(self, config: ModelConfig, batch: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__(config, batch, config.max_seq_len, dtype, device)

    @property
    def nbytes(self) -> int:
        """Nothing is allocated."""
        return 0

    def _lay_out(self, positions: Int[Tensor, "batch time"], n_new: tuple[int, ...]) -> Step:
        views = self._views(positions, n_new, lambda: torch.where(positions < 0, UNWRITTEN, positions)[:, None])
        return Step(positions.to(self.device), n_new, views, self.config.windows)

    def append(
        self,
        layer: int,
        k: Float[Tensor, "batch n_kv_head time head_dim"],
        v: Float[Tensor, "batch n_kv_head time head_dim"],
        step: Step,
    ) -> tuple[Float[Tensor, "batch n_kv_head keys head_dim"], Float[Tensor, "batch n_kv_head keys head_dim"]]:
        """Hand the keys and values straight back."""
        return k, v

    def commit(self, step: Step) -> None:
        """Nothing to remember."""

    def fork(self) -> NoCache:
        """Another that remembers nothing."""
        return type(self)(self.config, self.batch, self.dtype, self.device)

    def select(self, rows: Sequence[int]) -> None:
        """Take the number of rows."""
        self.rows_seen = [0] * len(rows)
