"""The cache protocol and the one attention rule.

A forward pass asks a cache three things: ``begin`` once (on the host: is there room, who sees what), ``append`` in
every layer (pure tensor code), ``commit`` at the end. Until ``commit`` nothing happened, so a pass that fails half-way
leaves the cache as it was.

The rule that defines attention everywhere in kvlab, for a prompt, a chunk, one token or a ragged batch::

    visible = (key_position <= query_position)  and  (key_position > query_position - window)

A window with attention sinks lets the first tokens through as well, see :mod:`kvlab.cache.streaming`. Positions are
token counts from the start of a row; -1 is padding, which is never written and sees nothing.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlab.config import ModelConfig
from kvlab.errors import CacheFull, CannotCrop, ConfigError

PADDING = -1
#: ``max_len`` of a cache whose rows may go on for ever, in constant memory.
ENDLESS = sys.maxsize
#: The position of a slot that holds no token: above every query, so that the rule hides it.
UNWRITTEN = torch.iinfo(torch.int64).max


class Visibility(Enum):
    """What the rule comes to in a layer, so that attention can take the cheapest kernel that obeys it."""

    ALL = "one query sees every key: no mask"
    CAUSAL = "as many keys as queries, each sees itself and those before"
    CAUSAL_TAIL = "the queries are the last of the keys: causal, aligned to the lower right"
    MASK = "anything else: an explicit mask built from the rule"
    BLOCKS = "queries of many requests in one row: each sees the blocks of its own, see kvlab.cache.ragged"


@dataclass(frozen=True)
class View:
    """What the queries of one forward pass see in one layer.

    Args:
        visibility: the class of the rule.
        mask: the rule as a tensor for ``MASK``, else None. True is visible.

    Raises:
        ConfigError: the class is ``MASK`` and there is no mask, or the other way round.
    """

    visibility: Visibility
    mask: Bool[Tensor, "batch heads time keys"] | None = None

    def __post_init__(self) -> None:
        # Attention takes a missing mask for "no mask": every query would see every key, and nothing would complain.
        if (self.mask is None) == (self.visibility is Visibility.MASK):
            raise ConfigError(
                f"a view of class {self.visibility.name} {'lacks' if self.mask is None else 'has'} a mask"
            )


@dataclass(frozen=True)
class Step:
    """One forward pass, as a cache laid it out in ``begin``.

    Args:
        positions: where each token stands in its row, -1 for padding; on the device of the cache.
        n_new: tokens of each row that are not padding; host integers.
        views: what the queries see, for each window that some layer has.
        windows: the window of each layer.
    """

    positions: Int[Tensor, "batch time"]
    n_new: tuple[int, ...]
    views: dict[int | None, View]
    windows: tuple[int | None, ...]

    def view(self, layer: int) -> View:
        """What the queries see in a layer."""
        return self.views[self.windows[layer]]

    def rotation(self, table: Callable[[Int[Tensor, "batch time"]], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the pass's positions.

        Args:
            table: the model's, which ends with its context.
        """
        return table(self.positions)

    def outputs(self) -> tuple[Int[Tensor, "out"], Int[Tensor, "out"]]:
        """Row and column of the tokens that continue a sequence: the last of each row, or of each request.

        Of a row that is all padding it is the last column.
        """
        rows = torch.arange(len(self.positions), device=self.positions.device)
        order = torch.arange(self.positions.shape[1], device=self.positions.device)
        best = torch.where(self.positions >= 0, order, PADDING).amax(dim=1)
        return rows, torch.where(best < 0, order[-1], best)


def visible(
    key_positions: Int[Tensor, "batch heads keys"],
    positions: Int[Tensor, "batch time"],
    window: int | None,
    sinks: int = 0,
) -> Bool[Tensor, "batch heads time keys"]:
    """The one attention rule as a tensor: which key each query sees.

    Args:
        key_positions: position of each held key, ``UNWRITTEN`` where a slot is empty.
        positions: position of each query, -1 for padding.
        window: tokens a query sees, itself included; None for all before it.
        sinks: first tokens of a row that a window never hides.
    """
    keys, queries = key_positions[:, :, None, :], positions[:, None, :, None]
    seen = keys <= queries
    return seen if window is None else seen & ((keys > queries - window) | (keys < sinks))


def positions_from_mask(mask: Bool[Tensor, "batch time"], seen: Sequence[int]) -> Int[Tensor, "batch time"]:
    """Positions of the tokens that come next in each row; padding, left or right, gets -1.

    Args:
        mask: True for a token, False for padding.
        seen: how many tokens each row has had before.
    """
    count = mask.long().cumsum(dim=1) + torch.tensor(seen)[:, None]
    return torch.where(mask, count - 1, PADDING)


class KVCache(ABC):
    """Keys and values of every layer for a batch of rows.

    Args:
        config: the model's shape.
        batch: rows.
        max_len: tokens a row may come to; ``ENDLESS`` where there is no limit.
        dtype: of keys and values; floating point.
        device: where they live.

    Raises:
        ConfigError: a size is below 1, the dtype is not floating point, or the kind cannot serve this model.
    """

    #: Whether attention must call ``observe`` after each layer. The others pay nothing for it.
    needs_queries = False

    def __init__(
        self, config: ModelConfig, batch: int, max_len: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        if batch < 1 or max_len < 1:
            raise ConfigError(f"a cache of batch {batch} and max_len {max_len}: both must be 1 or more")
        if not dtype.is_floating_point:
            raise ConfigError(f"a cache of dtype {dtype}: keys and values are floating point; pass the model's dtype")
        if config.mla is not None:
            raise ConfigError(f"{config.name} caches a latent (MLA); kvlab counts such models and does not run them")
        self.config, self.max_len, self.dtype = config, max_len, dtype
        self.device = torch.device(device)
        self.rows_seen = [0] * batch

    @property
    def batch(self) -> int:
        """Rows."""
        return len(self.rows_seen)

    @property
    def tokens_seen(self) -> int:
        """How far the longest row has come; positions continue from here."""
        return max(self.rows_seen)

    @property
    def lengths(self) -> list[int]:
        """Tokens held for each row. A cache that forgets holds fewer than it has seen."""
        return list(self.rows_seen)

    @property
    def length(self) -> int:
        """Tokens held for the longest row."""
        return max(self.lengths)

    @property
    def endless(self) -> bool:
        """Whether rows may go on past any length, past the model's context too."""
        return self.max_len == ENDLESS

    @property
    def max_rollback(self) -> int:
        """How many of its recent tokens this cache can take back."""
        return self.tokens_seen

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token in all layers."""
        config = self.config
        return 2 * config.n_layer * config.n_kv_head * config.head_dim * self.dtype.itemsize

    @property
    def used_bytes(self) -> int:
        """Bytes that the held tokens need."""
        return sum(self.lengths) * self.bytes_per_token

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that are allocated."""

    def next_positions(self, time: int) -> Int[Tensor, "batch time"]:
        """Positions of the next ``time`` tokens of every row, without padding."""
        return torch.tensor(self.rows_seen)[:, None] + torch.arange(time)

    def begin(self, positions: Int[Tensor, "batch time"]) -> Step:
        """Lay out a forward pass: check that there is room and decide what each query sees. Writes nothing.

        Args:
            positions: on the host; each row continues from its ``rows_seen``, -1 is padding.

        Raises:
            CacheFull: a row would become longer than ``max_len``.
            ConfigError: the positions do not continue the rows.
        """
        n_new = self._check(positions)
        self._require_room(n_new)
        return self._lay_out(positions, n_new)

    @abstractmethod
    def _lay_out(self, positions: Int[Tensor, "batch time"], n_new: tuple[int, ...]) -> Step:
        """Slots, key positions and views of a pass that has been checked."""

    @abstractmethod
    def append(
        self,
        layer: int,
        k: Float[Tensor, "batch n_kv_head time head_dim"],
        v: Float[Tensor, "batch n_kv_head time head_dim"],
        step: Step,
    ) -> tuple[Float[Tensor, "batch n_kv_head keys head_dim"], Float[Tensor, "batch n_kv_head keys head_dim"]]:
        """Write a layer's new keys and values, and return all that its queries may read.

        Args:
            layer: index of the layer.
            k: rotated keys of the new tokens.
            v: their values.
            step: from ``begin``.
        """

    def observe(self, layer: int, queries: Float[Tensor, "batch n_head time head_dim"], step: Step) -> None:
        """See a layer's queries, after it attended: how a cache learns which tokens are looked at.

        Args:
            layer: index of the layer.
            queries: rotated, of the new tokens.
            step: from ``begin``.

        Raises:
            ConfigError: this kind does not look at queries.
        """
        raise ConfigError(f"{type(self).__name__} keeps tokens whatever is looked at; call observe where needs_queries")

    def commit(self, step: Step) -> None:
        """The pass went through: its tokens count from now on."""
        self.rows_seen = self.ends(step.n_new)

    @abstractmethod
    def fork(self) -> KVCache:
        """A cache with the same contents that can go its own way. Appending never changes a fork."""

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, repeats allowed: what beam search does at every step."""

    def reset(self) -> None:
        """Forget everything; the next token has position 0."""
        self.rows_seen = [0] * self.batch

    def crop(self, lengths: Sequence[int]) -> None:
        """Go back to these numbers of tokens, row by row, as if later ones had never come.

        Args:
            lengths: tokens of each row that stay, at most what the row has seen.

        Raises:
            CannotCrop: a row would grow, or would lose more than ``max_rollback`` tokens.
        """
        if len(lengths) != self.batch:
            raise CannotCrop(f"{len(lengths)} lengths were given for {self.batch} rows; give one a row")
        for row, (seen, keep) in enumerate(zip(self.rows_seen, lengths, strict=True)):
            if not 0 <= keep <= seen or seen - keep > self.max_rollback:
                raise CannotCrop(
                    f"row {row} has seen {seen} tokens and was to keep {keep}; "
                    f"this cache keeps between {max(seen - self.max_rollback, 0)} and {seen}"
                )
        self.rows_seen = list(lengths)

    def _views(
        self,
        positions: Int[Tensor, "batch time"],
        n_new: tuple[int, ...],
        key_positions: Callable[[], Int[Tensor, "batch heads keys"]],
    ) -> dict[int | None, View]:
        """What the queries see, for each window of the layers, where every row holds its keys from position 0."""
        return {
            window: self._view_within(positions, n_new, key_positions, window) for window in set(self.config.windows)
        }

    def _view_within(
        self,
        positions: Int[Tensor, "batch time"],
        n_new: tuple[int, ...],
        key_positions: Callable[[], Int[Tensor, "batch heads keys"]],
        window: int | None,
    ) -> View:
        """What the queries see. The key positions are asked for only where the rule needs a mask."""
        kind = classify(positions, n_new, 0, window)
        mask = visible(key_positions(), positions, window) if kind is Visibility.MASK else None
        return View(kind, None if mask is None else mask.to(self.device))

    def ends(self, n_new: Sequence[int]) -> list[int]:
        """Tokens that each row will have seen once a pass is committed.

        Args:
            n_new: tokens that the pass brings to each row.
        """
        return [seen + new for seen, new in zip(self.rows_seen, n_new, strict=True)]

    def _slot_positions(self, n_new: tuple[int, ...]) -> Int[Tensor, "batch 1 keys"]:
        """Position of the token in each slot once a pass is written, where slot i holds the token at position i."""
        ends = self.ends(n_new)
        slots = torch.arange(max(ends))
        return torch.where(slots < torch.tensor(ends)[:, None], slots, UNWRITTEN)[:, None]

    def _check(self, positions: Int[Tensor, "batch time"]) -> tuple[int, ...]:
        """New tokens of each row, after checking that the positions continue the rows."""
        if positions.dim() != 2 or positions.shape[0] != self.batch or positions.shape[1] == 0:
            raise ConfigError(
                f"positions have shape {tuple(positions.shape)}; the cache wants [{self.batch}, time >= 1]"
            )
        real = positions >= 0
        if not torch.equal(positions, positions_from_mask(real, self.rows_seen)):
            raise ConfigError(
                f"positions start at {[row[row >= 0][:1].tolist() for row in positions]} and must rise by one "
                f"from what the rows have seen, {self.rows_seen}; reset() or crop() the cache first"
            )
        return tuple(real.sum(dim=1).tolist())

    def _require_room(self, n_new: tuple[int, ...]) -> None:
        for row, (seen, new) in enumerate(zip(self.rows_seen, n_new, strict=True)):
            if seen + new > self.max_len:
                raise CacheFull(
                    f"row {row} holds {seen} tokens and {new} more make {seen + new}, but the cache was made for "
                    f"max_len {self.max_len}; make a larger one or send fewer tokens"
                )


def classify(
    positions: Int[Tensor, "batch time"], n_new: tuple[int, ...], first_key: int, window: int | None
) -> Visibility:
    """What the rule comes to when every row holds the keys ``first_key`` to its last position.

    Args:
        positions: on the host.
        n_new: new tokens of each row.
        first_key: lowest position that is held.
        window: of the layer.
    """
    time = positions.shape[1]
    start, end = int(positions[0, 0]), int(positions[0, -1])
    uniform = all(n == time for n in n_new) and bool((positions[:, 0] == start).all())
    if not uniform or (window is not None and end - first_key + 1 > window):
        return Visibility.MASK
    if time == 1:
        return Visibility.ALL
    return Visibility.CAUSAL if start == first_key else Visibility.CAUSAL_TAIL
