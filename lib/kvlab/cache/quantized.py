"""A cache of low-bit codes: keys per channel, values per token, the newest tokens exact (KIVI, arXiv:2402.02750).

Keys have channels that are large in every token: a scale a channel keeps them from coarsening the others. Values have
no such channels, and a scale a token needs no waiting. A channel's scale spans a block of 32 tokens, so the newest
tokens stay exact until their block is full, and at least ``residual`` of them always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlab.cache.base import KVCache, Step
from kvlab.config import ModelConfig
from kvlab.errors import at_least
from kvlab.packing import Grid, Quantized, quantize

#: Tokens that share the scale of a key channel, and elements of a value that share one.
BLOCK = 32
#: Codes are in whole blocks, their scales and minima in this dtype.
SCALES = torch.float16


@dataclass(frozen=True)
class QuantizedStep(Step):
    """A pass over a quantized cache.

    Args:
        n_keys: slots that attention reads, from slot 0.
        cold: tokens of each row that are codes before the pass.
        cold_after: and after it.
        exact: rows, slots and places in the tail of the tokens that are exact before the pass.
        new: rows, columns and slots of the tokens of the pass.
        kept: rows, slots and places of the tokens that are exact after it.
        tails: of each layer, what the tail will hold; it takes them at commit.
    """

    n_keys: int
    cold: tuple[int, ...]
    cold_after: tuple[int, ...]
    exact: tuple[Int[Tensor, "exact"], ...]
    new: tuple[Int[Tensor, "new"], ...]
    kept: tuple[Int[Tensor, "kept"], ...]
    tails: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class QuantizedCache(KVCache):
    """Codes for all but the newest tokens.

    Within one pass queries see the pass's own keys exactly; what is older than the tail they see rounded.

    Args:
        config: the model's shape.
        batch: rows.
        max_len: tokens a row may come to.
        dtype: of the keys and values that come in and go out.
        device: where they live.
        bits: of a code: 8, 4 or 2.
        residual: newest tokens of each row that stay exact; up to 31 more do, until their block is full.

    Raises:
        ConfigError: a head is not whole groups of 32, or a number is impossible.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        bits: int = 8,
        residual: int = 32,
    ) -> None:
        super().__init__(config, batch, max_len, dtype, device)
        self.grid, self.residual = Grid(bits, BLOCK, symmetric=False), at_least(0, "residual", residual)
        self.grid.group_of(config.head_dim, "a head")
        self._cold = [0] * batch
        blocks = max(max_len - residual, 0) // BLOCK
        heads = (config.n_layer, batch, config.n_kv_head)
        # Keys: a row is a channel, its elements are the tokens of a block. Values: a row is a token.
        self.keys = self._empty((*heads, blocks, config.head_dim), BLOCK)
        self.values = self._empty((*heads, blocks, BLOCK), config.head_dim)
        room = min(residual + BLOCK, max_len)
        self.tail = torch.zeros((2, *heads, room, config.head_dim), dtype=dtype, device=self.device)

    def _empty(self, rows: tuple[int, ...], width: int) -> Quantized:
        codes = torch.zeros((*rows, width * self.grid.bits // 8), dtype=torch.uint8, device=self.device)
        scale = torch.zeros((*rows, width // BLOCK), dtype=SCALES, device=self.device)
        return Quantized(codes, scale, torch.zeros_like(scale), self.grid)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and the exact tail: all slots, used or not."""
        return self.keys.nbytes + self.values.nbytes + self.tail.nbytes

    @property
    def used_bytes(self) -> int:
        """Bytes that the held tokens need: codes with their scales for the old ones, the others exact."""
        cold = sum(self._cold)
        elements = self.bytes_per_token // self.dtype.itemsize
        narrow = elements * (self.grid.bits + 2 * 8 * SCALES.itemsize / BLOCK) / 8
        return round(cold * narrow) + (sum(self.rows_seen) - cold) * self.bytes_per_token

    @property
    def max_rollback(self) -> int:
        """Tokens of the exact tail: what became codes cannot become exact again."""
        return min(seen - cold for seen, cold in zip(self.rows_seen, self._cold, strict=True))

    def _lay_out(self, positions: Int[Tensor, "batch time"], n_new: tuple[int, ...]) -> QuantizedStep:
        ends = self.ends(n_new)
        after = [max(cold, self._whole(end)) for cold, end in zip(self._cold, ends, strict=True)]
        rows, columns = torch.where(positions >= 0)
        return QuantizedStep(
            positions=positions.to(self.device),
            n_new=n_new,
            views=self._views(positions, n_new, lambda: self._slot_positions(n_new)),
            windows=self.config.windows,
            n_keys=max(ends),
            cold=tuple(self._cold),
            cold_after=tuple(after),
            exact=self._places(self._cold, self.rows_seen),
            new=tuple(index.to(self.device) for index in (rows, columns, positions[rows, columns])),
            kept=self._places(after, ends),
        )

    def _whole(self, seen: int) -> int:
        """Tokens in whole blocks that are older than the residual."""
        return max(seen - self.residual, 0) // BLOCK * BLOCK

    def _places(self, starts: Sequence[int], ends: Sequence[int]) -> tuple[Int[Tensor, "tokens"], ...]:
        """Rows, slots and places in the tail of the tokens between; the tail is a ring."""
        spans = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        rows = torch.cat([torch.full_like(span, row) for row, span in enumerate(spans)])
        slots = torch.cat(spans)
        return tuple(index.to(self.device) for index in (rows, slots, slots % self.tail.shape[4]))

    def append(
        self,
        layer: int,
        k: Float[Tensor, "batch n_kv_head time head_dim"],
        v: Float[Tensor, "batch n_kv_head time head_dim"],
        step: Step,
    ) -> tuple[Float[Tensor, "batch n_kv_head keys head_dim"], Float[Tensor, "batch n_kv_head keys head_dim"]]:
        """Widen a layer's codes, lay the exact tokens over them, and round the blocks that became full.

        Every pass widens all codes: time for bytes.
        """
        assert isinstance(step, QuantizedStep)
        rows, slots, places = step.exact
        new_rows, columns, new_slots = step.new
        both = []
        for side, fresh in enumerate((k, v)):
            seen = self._widened(side, layer, max(step.cold), step.n_keys)
            seen[rows, :, slots] = self.tail[side, layer][rows, :, places]
            seen[new_rows, :, new_slots] = fresh[new_rows, :, columns]
            both.append(seen)
        keys, values = both
        # Codes beyond the committed blocks belong to nobody, so they may be written before the commit.
        for row, (start, end) in enumerate(zip(step.cold, step.cold_after, strict=True)):
            if end > start:
                self._round(layer, row, start, keys[row, :, start:end], values[row, :, start:end])
        rows, slots, _ = step.kept
        step.tails[layer] = keys[rows, :, slots], values[rows, :, slots]
        return keys, values

    def _widened(self, side: int, layer: int, cold: int, n_keys: int) -> Float[Tensor, "batch n_kv_head keys head_dim"]:
        """What the codes of a layer stand for, one slot a position; zero beyond them."""
        shape = (self.batch, self.config.n_kv_head, n_keys, self.config.head_dim)
        out = torch.zeros(shape, dtype=self.dtype, device=self.device)
        if cold:
            codes = (self.keys, self.values)[side]
            blocks = codes.map(lambda tensor: tensor[layer, :, :, : cold // BLOCK].contiguous()).widen(self.dtype)
            out[:, :, :cold] = (blocks.transpose(-1, -2) if side == 0 else blocks).flatten(2, 3)
        return out

    def _round(
        self,
        layer: int,
        row: int,
        start: int,
        keys: Float[Tensor, "n_kv_head tokens head_dim"],
        values: Float[Tensor, "n_kv_head tokens head_dim"],
    ) -> None:
        """Turn whole blocks into codes."""
        first, last = start // BLOCK, start // BLOCK + keys.shape[1] // BLOCK
        blocks = keys.unflatten(1, (-1, BLOCK)).transpose(-1, -2), values.unflatten(1, (-1, BLOCK))
        for name, store, exact in zip(("keys", "values"), (self.keys, self.values), blocks, strict=True):
            made = quantize(exact, self.grid, f"the {name} of layer {layer}", SCALES)
            store.map(lambda tensor: tensor[layer, row, :, first:last]).copy_(made)

    def commit(self, step: Step) -> None:
        """The pass went through: the tail takes its newest tokens, and full blocks count as codes."""
        assert isinstance(step, QuantizedStep)
        rows, _, places = step.kept
        for layer, newest in step.tails.items():
            for side in (0, 1):
                self.tail[side, layer][rows, :, places] = newest[side]
        self._cold = list(step.cold_after)
        super().commit(step)

    def fork(self) -> QuantizedCache:
        """A full copy."""
        twin = type(self)(
            self.config, self.batch, self.max_len, self.dtype, self.device, bits=self.grid.bits, residual=self.residual
        )
        twin.keys, twin.values, twin.tail = (
            self.keys.map(Tensor.clone),
            self.values.map(Tensor.clone),
            self.tail.clone(),
        )
        twin.rows_seen, twin._cold = list(self.rows_seen), list(self._cold)
        return twin

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, repeats allowed; copies them."""
        index = torch.tensor(rows, device=self.device)
        self.keys = self.keys.map(lambda tensor: tensor.index_select(1, index))
        self.values = self.values.map(lambda tensor: tensor.index_select(1, index))
        self.tail = self.tail.index_select(2, index)
        self.rows_seen = [self.rows_seen[row] for row in rows]
        self._cold = [self._cold[row] for row in rows]

    def reset(self) -> None:
        """Forget everything; the next token has position 0."""
        super().reset()
        self._cold = [0] * self.batch
