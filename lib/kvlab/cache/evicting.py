"""What caches that keep what is looked at have in common: :mod:`~kvlab.cache.heavy_hitter`, :mod:`~kvlab.cache.snapkv`.

They watch how much attention each held token receives, for every row and every KV head on its own, and keep those that
receive most beside the newest. Tokens that stay keep their positions. What has left is gone: nothing can be taken back.

Attention kernels do not hand out their weights, so the cache computes them once more from the queries, a block of
queries at a time. Only these caches ask for queries, and only they pay for it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlab.cache.base import UNWRITTEN, KVCache, Step, View, Visibility, visible
from kvlab.config import ModelConfig
from kvlab.errors import ConfigError

#: Queries whose weights are in memory at once.
QUERIES = 128
#: Slots that a compressed prompt's cache grows by.
GROWTH = 64


@dataclass(frozen=True)
class EvictingStep(Step):
    """A pass over a cache that evicts.

    Args:
        whole: what every layer's queries see, where no mask is needed; else None.
        key_positions: of the slots that attention reads, in each layer; a single token is in its slot, several follow.
        real: rows that bring a token, where each brings one at most.
        held: tokens of each row after the pass.
        read: keys and values that a layer's attention reads; gone once its queries were observed.
        received: of each layer, the attention that its slots received in a pass of one token.
        kept: of each layer, keys, values, positions and scores that stay after a pass of several.
    """

    whole: View | None
    key_positions: Int[Tensor, "n_layer batch n_kv_head keys"]
    real: Bool[Tensor, "batch 1"]
    held: tuple[int, ...]
    read: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    received: dict[int, Tensor] = field(default_factory=dict)
    kept: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=dict)

    @property
    def single(self) -> bool:
        """Whether each row brings one token at most."""
        return self.positions.shape[1] == 1

    def view(self, layer: int) -> View:
        """What the queries see in a layer: its heads hold different tokens."""
        if self.whole is not None:
            return self.whole
        return View(Visibility.MASK, visible(self.key_positions[layer], self.positions, None))


class EvictingCache(KVCache):
    """Keeps ``budget`` tokens of each row and KV head: the newest, and those with the highest scores.

    Args:
        config: the model's shape.
        batch: rows.
        max_len: tokens a row may come to; positions are the text's, so the model's context is the end.
        dtype: of keys and values.
        device: where they live.
        budget: tokens of a row that stay.
        recent: of these, the newest, whatever their scores.

    Raises:
        ConfigError: a size is impossible, or layers of the model have windows.
    """

    needs_queries = True
    #: Whether a token that is generated pushes another out.
    evicts_singles: ClassVar[bool]

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        budget: int,
        recent: int,
    ) -> None:
        super().__init__(config, batch, max_len, dtype, device)
        if budget > config.max_seq_len:
            raise ConfigError(
                f"a cache of {budget} tokens for {config.name}, whose context is {config.max_seq_len}; make it smaller"
            )
        if any(window is not None for window in config.windows):
            raise ConfigError(
                f"layers of {config.name} have windows, which bound their cache already; take one that does not evict"
            )
        self.budget, self.recent = budget, recent
        self.rows_held = [0] * batch
        self._width = 0  # slots from 0 that hold everything; some of them may be empty
        # One slot more than the budget: the newest token is written before another leaves.
        shape = (config.n_layer, batch, config.n_kv_head, min(budget, max_len) + 1)
        self.storage = torch.zeros((2, *shape, config.head_dim), dtype=dtype, device=self.device)
        self.positions = torch.full(shape, UNWRITTEN, device=self.device)
        self.scores = torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32), device=self.device)
        self._free = torch.zeros(shape[:3], dtype=torch.long, device=self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, with their positions and scores."""
        return self.storage.nbytes + self.positions.nbytes + self.scores.nbytes + self._free.nbytes

    @property
    def lengths(self) -> list[int]:
        """Tokens held for each row, the same number in every head."""
        return list(self.rows_held)

    @property
    def max_rollback(self) -> int:
        """None: what was evicted is gone, and the scores know what came after."""
        return 0

    def _lay_out(self, positions: Int[Tensor, "batch time"], n_new: tuple[int, ...]) -> EvictingStep:
        single, held = positions.shape[1] == 1, max(self.rows_held)
        self._make_room(held + 1 if single else 0)
        new = torch.where(positions < 0, UNWRITTEN, positions).to(self.device)
        new = new[:, None].expand(*self.positions.shape[:3], -1)
        if single:
            key_positions = self.positions[..., : held + 1].scatter(3, self._free[..., None], new)
        else:
            key_positions = torch.cat((self.positions[..., : self._width], new), dim=3)
        keep_all = single and not self.evicts_singles
        after = [h + n if keep_all else min(h + n, self.budget) for h, n in zip(self.rows_held, n_new, strict=True)]
        return EvictingStep(
            positions=positions.to(self.device),
            n_new=n_new,
            views={},
            windows=self.config.windows,
            whole=self._whole(positions, single),
            key_positions=key_positions,
            real=(positions[:, :1] >= 0).to(self.device),
            held=tuple(after),
        )

    def _whole(self, positions: Int[Tensor, "batch time"], single: bool) -> View | None:
        """The view of a pass whose rows are alike, and that sees all it reads, or nothing but itself."""
        if bool((positions < 0).any()) or len(set(self.rows_held)) > 1:
            return None
        if single:
            return View(Visibility.ALL)
        return View(Visibility.CAUSAL) if self._width == 0 else None

    def _make_room(self, slots: int) -> None:
        """Grow to so many slots, in steps."""
        more = slots - self.positions.shape[3]
        if more > 0:
            more = -(-more // GROWTH) * GROWTH
            self.storage = F.pad(self.storage, (0, 0, 0, more))
            # Not F.pad: it takes the number through a float, and this one does not survive that.
            empty = self.positions.new_full((*self.positions.shape[:3], more), UNWRITTEN)
            self.positions = torch.cat((self.positions, empty), dim=3)
            self.scores = F.pad(self.scores, (0, more))

    def append(
        self,
        layer: int,
        k: Float[Tensor, "batch n_kv_head time head_dim"],
        v: Float[Tensor, "batch n_kv_head time head_dim"],
        step: Step,
    ) -> tuple[Float[Tensor, "batch n_kv_head keys head_dim"], Float[Tensor, "batch n_kv_head keys head_dim"]]:
        """Write a single token into a free slot of each head, or lay several behind the slots that are held."""
        assert isinstance(step, EvictingStep)
        n_keys, (keys, values) = step.key_positions.shape[3], self.storage[:, layer]
        if step.single:
            rows = torch.arange(k.shape[0], device=k.device)[:, None]
            heads = torch.arange(k.shape[1], device=k.device)
            keys[rows, heads, self._free[layer]], values[rows, heads, self._free[layer]] = k[:, :, 0], v[:, :, 0]
            keys, values = keys[:, :, :n_keys], values[:, :, :n_keys]
        else:
            keys = torch.cat((keys[:, :, : self._width], k), dim=2)
            values = torch.cat((values[:, :, : self._width], v), dim=2)
        step.read[layer] = keys, values
        return keys, values

    def observe(self, layer: int, queries: Float[Tensor, "batch n_head time head_dim"], step: Step) -> None:
        """Count the attention that each held token received, and choose what a pass of several tokens leaves behind."""
        assert isinstance(step, EvictingStep)
        keys, values = step.read.pop(layer)
        positions = step.key_positions[layer]
        if step.single:
            if self.evicts_singles:
                step.received[layer] = received(queries, keys, positions, step.positions)
            return
        before = self.scores[layer, :, :, : self._width]
        scores = self._scores(F.pad(before, (0, queries.shape[2])), queries, keys, positions, step.positions)
        index = self._best(scores, positions, step.held)
        wide = index[..., None].expand(*index.shape, keys.shape[3])
        step.kept[layer] = (
            keys.gather(2, wide), values.gather(2, wide), positions.gather(2, index), scores.gather(2, index)
        )  # fmt: skip

    @abstractmethod
    def _scores(
        self,
        before: Float[Tensor, "batch n_kv_head keys"],
        queries: Float[Tensor, "batch n_head time head_dim"],
        keys: Float[Tensor, "batch n_kv_head keys head_dim"],
        key_positions: Int[Tensor, "batch n_kv_head keys"],
        positions: Int[Tensor, "batch time"],
    ) -> Float[Tensor, "batch n_kv_head keys"]:
        """Scores after a pass of several tokens, from those before it; new tokens come with 0."""

    def _best(
        self,
        scores: Float[Tensor, "batch n_kv_head keys"],
        positions: Int[Tensor, "batch n_kv_head keys"],
        held: tuple[int, ...],
    ) -> Int[Tensor, "batch n_kv_head kept"]:
        """Slots that stay, in the order of their positions; empty ones last."""
        written = positions < UNWRITTEN
        newest = torch.where(written, positions, -1).amax(dim=2, keepdim=True)
        rank = scores.masked_fill(positions > newest - self.recent, torch.inf).masked_fill(~written, -torch.inf)
        index = rank.topk(max(held), dim=2).indices
        return index.gather(2, positions.gather(2, index).argsort(dim=2))

    def commit(self, step: Step) -> None:
        """The pass went through: what it keeps is kept, in every layer."""
        assert isinstance(step, EvictingStep)
        if step.single:
            self._commit_single(step)
        else:
            self._commit_several(step)
        self.rows_held = list(step.held)
        super().commit(step)

    def _commit_single(self, step: EvictingStep) -> None:
        self._width = n_keys = step.key_positions.shape[3]
        held = torch.tensor(step.held, device=self.device)
        self.positions[..., :n_keys] = step.key_positions
        self._free = torch.where(step.real, held[:, None], self._free)
        if not self.evicts_singles:
            return
        self.scores[..., :n_keys] += torch.stack([step.received[layer] for layer in range(self.config.n_layer)])
        full = torch.tensor(self.ends(step.n_new), device=self.device)[:, None] > self.budget
        safe = self.positions > (step.positions - self.recent)[..., None]
        leaving = self.scores.masked_fill(safe, torch.inf).argmin(dim=3)
        leaving = torch.where(full & step.real, leaving, self._free)
        self.positions.scatter_(3, leaving[..., None], UNWRITTEN)
        self.scores.scatter_(3, leaving[..., None], 0)
        self._free = leaving

    def _commit_several(self, step: EvictingStep) -> None:
        self._width = count = max(step.held)
        self.positions.fill_(UNWRITTEN)
        self.scores.zero_()
        for layer, (keys, values, positions, scores) in step.kept.items():
            self.storage[0, layer, :, :, :count], self.storage[1, layer, :, :, :count] = keys, values
            self.positions[layer, :, :, :count], self.scores[layer, :, :, :count] = positions, scores
        self._free = torch.tensor(step.held, device=self.device)[:, None].expand(self._free.shape).clone()

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, repeats allowed; copies them."""
        index = torch.tensor(rows, device=self.device)
        self.storage = self.storage.index_select(2, index)
        self.positions, self.scores = self.positions.index_select(1, index), self.scores.index_select(1, index)
        self._free = self._free.index_select(1, index)
        self.rows_seen = [self.rows_seen[row] for row in rows]
        self.rows_held = [self.rows_held[row] for row in rows]

    def reset(self) -> None:
        """Forget everything; the next token has position 0."""
        super().reset()
        self.rows_held, self._width = [0] * self.batch, 0
        self.positions.fill_(UNWRITTEN)
        self.scores.zero_()
        self._free.zero_()

    def fork(self) -> EvictingCache:
        """A full copy."""
        twin = copy(self)
        for name in ("storage", "positions", "scores", "_free"):
            setattr(twin, name, getattr(self, name).clone())
        twin.rows_seen, twin.rows_held = list(self.rows_seen), list(self.rows_held)
        return twin


def received(
    queries: Float[Tensor, "batch n_head time head_dim"],
    keys: Float[Tensor, "batch n_kv_head keys head_dim"],
    key_positions: Int[Tensor, "batch n_kv_head keys"],
    positions: Int[Tensor, "batch time"],
) -> Float[Tensor, "batch n_kv_head keys"]:
    """Attention that each key receives from all queries of its group together; float32 at least.

    Args:
        queries: rotated.
        keys: rotated.
        key_positions: ``UNWRITTEN`` where a slot is empty.
        positions: of the queries, -1 for those that do not count.
    """
    batch, n_kv_head, n_keys, head_dim = keys.shape
    wide = torch.promote_types(keys.dtype, torch.float32)
    total = torch.zeros(batch, n_kv_head, n_keys, dtype=wide, device=keys.device)
    grouped = queries.unflatten(1, (n_kv_head, -1))
    for part, at in zip(grouped.split(QUERIES, dim=3), positions.split(QUERIES, dim=1), strict=True):
        seen = visible(key_positions, at, None)[:, :, None]
        # The queries of a group are rows of one matrix: its keys are read once.
        scores = (part.flatten(2, 3) @ keys.transpose(2, 3)).unflatten(2, part.shape[2:4]).to(wide) * head_dim**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        # A query that sees nothing divides zero by zero.
        total += torch.where(seen, weights, 0).sum(dim=(2, 3))
    return total
