"""The plain cache: one slot a position, allocated once. And the empty one, for a pass without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlab.cache.base import UNWRITTEN, KVCache, Step
from kvlab.config import ModelConfig


class Places(NamedTuple):
    """Where some tokens of a pass come from and go to.

    Args:
        rows: of each token.
        columns: in the pass.
        slots: of the cache.
    """

    rows: Int[Tensor, "tokens"]
    columns: Int[Tensor, "tokens"]
    slots: Int[Tensor, "tokens"]


@dataclass(frozen=True)
class ContiguousStep(Step):
    """A pass over a contiguous cache.

    Args:
        n_keys: slots that attention reads, from slot 0.
        slots: the slots that all rows write, where all write the same; else None.
        ragged: of every token that is written, where rows differ; else None.
    """

    n_keys: int
    slots: Int[Tensor, "time"] | None
    ragged: Places | None


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
        on_device, together = positions.to(self.device), uniform(positions)
        return ContiguousStep(
            positions=on_device,
            n_new=n_new,
            views=self._views(positions, n_new, lambda: self._slot_positions(n_new)),
            windows=self.config.windows,
            n_keys=n_keys,
            slots=on_device[0] if together else None,
            ragged=None if together else places(positions >= 0, positions, self.device),
        )

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


def uniform(positions: Int[Tensor, "batch time"]) -> bool:
    """Whether all rows of a pass bring the same positions, and no padding.

    Args:
        positions: on the host.
    """
    return bool((positions == positions[0]).all()) and bool((positions >= 0).all())


def places(which: Bool[Tensor, "batch time"], slots: Int[Tensor, "batch time"], device: torch.device) -> Places:
    """Row, column and slot of the tokens that are asked for.

    Args:
        which: of the tokens of a pass, on the host.
        slots: where each goes.
        device: of the cache.
    """
    rows, columns = torch.where(which)
    return Places(rows.to(device), columns.to(device), slots[rows, columns].to(device))


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
