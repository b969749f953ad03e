"""A window that rolls for ever, with attention sinks (StreamingLLM, arXiv:2309.17453), in constant memory.

A row keeps its first ``sinks`` tokens and its last ``window``. Positions count inside the cache: a query at position t
is t - j tokens away from token j of the window, and min(t, sinks + window - 1) - s from sink s, however far the text
has come. So no distance is ever longer than sinks + window - 1, whatever the model was trained on.

Keys arrive rotated to their positions in the text, and only differences of positions count. So the window stays as it
is, and the sinks are turned after it. With one query their keys are turned, a few of them. With many queries every one
would need its own, so the queries are turned back instead, see :class:`SinkView`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlab.cache.base import ENDLESS, UNWRITTEN, KVCache, Step, View, Visibility, visible
from kvlab.cache.contiguous import ContiguousStep, Places, places, uniform, write
from kvlab.config import ModelConfig
from kvlab.errors import ConfigError, at_least
from kvlab.rope import angles, rotate


@dataclass(frozen=True)
class SinkView(View):
    """What many queries see that have come past their window: each its own rotation of the sinks.

    Args:
        sinks: keys from slot 0 that are sinks, rotated to their own positions.
        back: cosines and sines that turn each query back, to where it stands beside the sinks.
    """

    sinks: int = 0
    back: tuple[Float[Tensor, "batch 1 time half"], Float[Tensor, "batch 1 time half"]] | None = None


@dataclass(frozen=True)
class StreamingStep(ContiguousStep):
    """A pass over a streaming cache.

    Args:
        rope: cosines and sines of its positions: a model's table ends, a stream does not.
        firsts: row, column and slot of the new tokens that are sinks.
        sinks: the sinks of all layers turned to where one query sees them; None where they stand as they came.
        kept: row, column and slot of the new tokens that the window keeps, where writing them must wait for the commit.
        tails: of each layer, their keys and values.
    """

    rope: tuple[Tensor, Tensor]
    firsts: Places
    sinks: Float[Tensor, "n_layer batch n_kv_head sinks head_dim"] | None = None
    kept: Places | None = None
    tails: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def rotation(self, table: Callable[[Int[Tensor, "batch time"]], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the pass's positions, past the end of the model's table too."""
        return self.rope


class StreamingCache(KVCache):
    """The first ``sinks`` tokens and the last ``window``, for as long as you like. No sinks: a plain window.

    Slots: the sinks, then a ring. A token costs one write, and nothing is ever moved.

    Args:
        config: the model's shape.
        batch: rows.
        dtype: of keys and values.
        device: where they live.
        sinks: first tokens of each row that stay.
        window: last tokens of each row that stay; a query sees so many, itself included.

    Raises:
        ConfigError: together they are 0 or more than the context, a layer's own window is smaller, or the model cannot
            be streamed: learned positions cannot be turned.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        sinks: int,
        window: int,
    ) -> None:
        rope = config.position == "rope"
        super().__init__(config, batch, ENDLESS if rope else config.max_seq_len, dtype, device)
        self.sinks, self.window = at_least(0, "sinks", sinks), at_least(1, "window", window)
        _check_shape(config, sinks, window)
        shape = (config.n_layer, batch, config.n_kv_head)
        self.storage = torch.zeros((2, *shape, self.slots, config.head_dim), dtype=dtype, device=self.device)
        # As they came: turned from here in every pass, so that roundings do not add up.
        self.sink_keys = torch.zeros((*shape, sinks, config.head_dim), dtype=dtype, device=self.device)

    @property
    def slots(self) -> int:
        """Tokens that a row can hold."""
        return self.sinks + self.window

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated: the slots, and the keys of the sinks as they came."""
        return self.storage.nbytes + self.sink_keys.nbytes

    @property
    def lengths(self) -> list[int]:
        """Tokens held for each row: at most sinks + window."""
        return [min(seen, self.slots) for seen in self.rows_seen]

    @property
    def max_rollback(self) -> int:
        """All tokens while nothing was overwritten, none afterwards."""
        return self.tokens_seen if self.tokens_seen <= self.slots else 0

    def _slots_of(self, positions: Int[Tensor, "batch time"]) -> Int[Tensor, "batch time"]:
        """Where tokens go: a sink has its own slot, the others go round."""
        return torch.where(positions < self.sinks, positions, self.sinks + (positions - self.sinks) % self.window)

    def _held(self, seen: Sequence[int]) -> Int[Tensor, "batch slots"]:
        """Position of the token in each slot, when the rows have come so far; ``UNWRITTEN`` where there is none."""
        slots, count = torch.arange(self.slots), torch.tensor(seen)[:, None]
        rounds = (count - 1 - slots) // self.window
        latest = torch.where(slots < self.sinks, slots, slots + rounds * self.window)
        return torch.where(slots < count, latest, UNWRITTEN)

    def _lay_out(self, positions: Int[Tensor, "batch time"], n_new: tuple[int, ...]) -> StreamingStep:
        ends = self.ends(n_new)
        if max(ends) <= self.slots:
            return self._fitting(positions, n_new)
        return self._single(positions, n_new) if positions.shape[1] == 1 else self._many(positions, n_new)

    def _fitting(self, positions: Int[Tensor, "batch time"], n_new: tuple[int, ...]) -> StreamingStep:
        """Nothing has to leave: slot i holds token i, and a query sees all before it."""
        view = self._view_within(positions, n_new, lambda: self._slot_positions(n_new), None)
        return self._step(positions, n_new, view, max(self.ends(n_new)))

    def _single(self, positions: Int[Tensor, "batch 1"], n_new: tuple[int, ...]) -> StreamingStep:
        """One query a row: its token takes the place of the one that leaves its window, the sinks are turned to it."""
        held = self._held(self.ends(n_new))[:, None]
        seen = visible(held, positions, self.window, self.sinks)
        view = View(Visibility.ALL) if bool(seen.all()) else View(Visibility.MASK, seen.to(self.device))
        turned = rotate(self.sink_keys, *self._angles(self._turn(positions)))
        return self._step(positions, n_new, view, self.slots, sinks=turned)

    def _many(self, positions: Int[Tensor, "batch time"], n_new: tuple[int, ...]) -> StreamingStep:
        """Many queries: they see the old window and the new tokens; the ring changes at the commit."""
        ends = torch.tensor(self.ends(n_new))[:, None]
        # A new token that is a sink is found in the slots of the sinks.
        fresh = torch.where(positions < self.sinks, UNWRITTEN, positions)  # padding, too, is written nowhere
        slots = self._held(self.rows_seen)
        slots[:, : self.sinks] = self._held(self.ends(n_new))[:, : self.sinks]
        held = torch.cat((slots, fresh), dim=1)[:, None]
        seen = visible(held, positions, self.window, self.sinks)
        back = self._angles(-self._turn(positions))
        view = SinkView(Visibility.MASK, seen.to(self.device), self.sinks, back)
        newest = (fresh >= ends - self.window) & (fresh < UNWRITTEN)
        kept = places(newest, self._slots_of(positions), self.device)
        return self._step(positions, n_new, view, held.shape[2], kept=kept)

    def _turn(self, positions: Int[Tensor, "batch time"]) -> Int[Tensor, "batch time"]:
        """How far the sinks have moved for each query: its position in the text less that in the cache."""
        return (positions - (self.slots - 1)).clamp(min=0)

    def _angles(self, positions: Int[Tensor, "batch time"]) -> tuple[Tensor, Tensor]:
        """Cosines and sines of any positions, [batch, 1, time, head_dim / 2]."""
        cos, sin = angles(self.config, positions)
        return cos[:, None].to(self.device), sin[:, None].to(self.device)

    def _step(
        self, positions: Int[Tensor, "batch time"], n_new: tuple[int, ...], view: View, n_keys: int, **others: Any
    ) -> StreamingStep:
        together, slots = uniform(positions), self._slots_of(positions)
        real = positions >= 0
        return StreamingStep(
            positions=positions.to(self.device),
            n_new=n_new,
            views={None: view},
            windows=(None,) * self.config.n_layer,
            n_keys=n_keys,
            slots=slots[0].to(self.device) if together else None,
            ragged=None if together else places(real, slots, self.device),
            rope=self._angles(positions.clamp(min=0)),
            firsts=places(real & (positions < self.sinks), slots, self.device),
            **others,
        )

    def append(
        self,
        layer: int,
        k: Float[Tensor, "batch n_kv_head time head_dim"],
        v: Float[Tensor, "batch n_kv_head time head_dim"],
        step: Step,
    ) -> tuple[Float[Tensor, "batch n_kv_head keys head_dim"], Float[Tensor, "batch n_kv_head keys head_dim"]]:
        """Write a layer's new keys and values, and return the slots; with many queries, the new tokens after them."""
        assert isinstance(step, StreamingStep)
        held_keys, held_values = self.storage[0, layer], self.storage[1, layer]
        rows, columns, slots = step.firsts
        if len(rows):
            self.sink_keys[layer, rows, :, slots] = k[rows, :, columns]
            held_values[rows, :, slots] = v[rows, :, columns]
        if step.kept is not None:
            rows, columns, _ = step.kept
            step.tails[layer] = k[rows, :, columns], v[rows, :, columns]
            keys = torch.cat((self.sink_keys[layer], held_keys[:, :, self.sinks :], k), dim=2)
            return keys, torch.cat((held_values, v), dim=2)
        if step.sinks is not None:
            held_keys[:, :, : self.sinks] = step.sinks[layer]
        return write(held_keys, k, step), write(held_values, v, step)

    def commit(self, step: Step) -> None:
        """The pass went through: the window takes its newest tokens."""
        assert isinstance(step, StreamingStep)
        if step.kept is not None:
            rows, _, slots = step.kept
            for layer, (keys, values) in step.tails.items():
                self.storage[0, layer][rows, :, slots] = keys
                self.storage[1, layer][rows, :, slots] = values
        super().commit(step)

    def fork(self) -> StreamingCache:
        """A full copy."""
        twin = type(self)(self.config, self.batch, self.dtype, self.device, sinks=self.sinks, window=self.window)
        twin.storage.copy_(self.storage)
        twin.sink_keys.copy_(self.sink_keys)
        twin.rows_seen = list(self.rows_seen)
        return twin

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, repeats allowed; copies them."""
        index = torch.tensor(rows, device=self.device)
        self.storage, self.sink_keys = self.storage.index_select(2, index), self.sink_keys.index_select(1, index)
        self.rows_seen = [self.rows_seen[row] for row in rows]


def _check_shape(config: ModelConfig, sinks: int, window: int) -> None:
    if sinks + window > config.max_seq_len:
        raise ConfigError(
            f"{sinks} sinks and a window of {window} are {sinks + window} tokens, more than the context of "
            f"{config.name}, {config.max_seq_len}: it would see distances it was not trained on; make them smaller"
        )
    if sinks and config.position != "rope":
        raise ConfigError(
            f"{config.name} has learned positions, which are part of a token's embedding and cannot be turned: sinks "
            "would keep the distance they came with. Take a model with RoPE, or a window without sinks"
        )
    if narrower := [w for w in config.windows if w is not None and w < window]:
        raise ConfigError(
            f"layers of {config.name} see {min(narrower)} tokens, and the window of the cache is {window}; "
            f"make it {min(narrower)} or less"
        )
