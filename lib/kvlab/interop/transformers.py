"""The caches of kvlab as drop-ins for ``generate`` of ``transformers`` 5.0.0 to 5.24.0, on stock models.

Without padding, a cache that needs no queries is simply passed::

    from kvlab.interop.transformers import attention, heavy_hitter, streaming

    cache = streaming(model, sinks=4, window=1020)
    model.generate(**inputs, **cache.argument, max_new_tokens=10_000)

``argument`` is ``{"past_key_values": cache}``, or ``{"cache": cache}`` where ``transformers`` calls it so. Everything
else needs attention that knows the cache: prompts longer than sinks and window, padded batches, and heavy hitters::

    with attention(model, heavy_hitter(model, heavy=64, recent=64)) as cache:
        model.generate(**inputs, **cache.argument)

Inside, the model's own attention function is replaced through the registry of ``transformers``; outside, registry and
config are what they were. What stock attention would get wrong is refused with these two lines. One thing cannot be
seen from a cache outside: left padding of a single token, in versions 5.0 to 5.23; a padded batch belongs inside.

A stock model hands over keys that are rotated to their positions in the text, so a streaming cache turns the sinks
after the window, by angles taken in float64. The model's own angles are float32: near position 100,000 they are
off by 0.004 to 0.008 rad, depending on the base.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import transformers
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvlab.cache import (
    ENDLESS,
    HeavyHitterCache,
    KVCache,
    QuantizedCache,
    SnapKVCache,
    Step,
    StreamingCache,
    View,
    positions_from_mask,
)
from kvlab.config import ModelConfig
from kvlab.errors import CannotCrop, ConfigError
from kvlab.model.attention import attend

#: Makes a cache for a batch, a dtype and a device.
Maker = Callable[[ModelConfig, int, torch.dtype, torch.device], KVCache]

_INSIDE = "write `with attention(model, cache): model.generate(**inputs, **cache.argument)`"


def streaming(model: Any, *, sinks: int = 4, window: int = 1020) -> DropInCache:
    """The first ``sinks`` tokens and the last ``window``, for as long as you like, in constant memory.

    Prompts that fit, and single tokens, are right under the model's own attention. A longer prompt belongs inside
    :func:`attention`; or give ``generate`` ``prefill_chunk_size=1``, which reads it token by token.

    Args:
        model: a stock model with RoPE.
        sinks: first tokens of each row that stay; 0 for a plain window.
        window: last tokens of each row that stay; a token sees so many, itself included.

    Raises:
        ConfigError: see :class:`kvlab.cache.StreamingCache`.
    """
    return DropInCache(model, partial(StreamingCache, sinks=sinks, window=window))


def quantized(model: Any, *, max_len: int, bits: int = 8, residual: int = 32) -> DropInCache:
    """Codes for all but the newest tokens, see :class:`kvlab.cache.QuantizedCache`.

    Args:
        model: a stock model.
        max_len: tokens a row may come to, prompt and answer together; room for them is allocated.
        bits: of a code: 8, 4 or 2.
        residual: newest tokens that stay exact, at least.

    Raises:
        ConfigError: a head is not whole groups of 32, or a number is impossible.
    """

    def make(config: ModelConfig, batch: int, dtype: torch.dtype, device: torch.device) -> KVCache:
        return QuantizedCache(config, batch, max_len, dtype, device, bits=bits, residual=residual)

    return DropInCache(model, make)


def heavy_hitter(model: Any, *, heavy: int, recent: int) -> DropInCache:
    """The tokens that received most attention, and the newest. For use inside :func:`attention`.

    Args:
        model: a stock model without windows.
        heavy: tokens of each row and KV head that stay for the attention they received.
        recent: newest tokens that stay.

    Raises:
        ConfigError: see :class:`kvlab.cache.HeavyHitterCache`.
    """
    return _evicting(model, partial(HeavyHitterCache, heavy=heavy, recent=recent))


def snapkv(model: Any, *, budget: int, observed: int = 16, pool: int = 7) -> DropInCache:
    """Of a prompt, what its last queries look at; the answer is kept whole. For use inside :func:`attention`.

    Args:
        model: a stock model without windows.
        budget: tokens of a prompt that stay, in each row and KV head.
        observed: last queries of a prompt that vote; their tokens stay.
        pool: neighbours that share their votes; odd.

    Raises:
        ConfigError: see :class:`kvlab.cache.SnapKVCache`.
    """
    return _evicting(model, partial(SnapKVCache, budget=budget, observed=observed, pool=pool))


def _evicting(model: Any, kind: Callable[..., KVCache]) -> DropInCache:
    """What stays keeps its position, so the model's context is the end."""
    return DropInCache(
        model, lambda config, batch, dtype, device: kind(config, batch, config.max_seq_len, dtype, device)
    )


class DropInCache(Cache):
    """A kvlab cache where ``transformers`` expects one of its own.

    ``generate`` feeds it, beam search reorders it and assisted generation crops it, where its kind can be. A prefix
    that is used twice is kept by ``fork``, or by ``copy.deepcopy``, which comes to the same.

    Args:
        model: the stock model that it is for: Llama and SmolLM2, Mistral, Qwen2 and Qwen3, GPT-2.
        make: makes the kvlab cache, once a pass says how many rows there are.

    Raises:
        ConfigError: the model is of a family that kvlab does not run, ``transformers`` is older than 5, or the kind of
            cache cannot serve the model.
    """

    def __init__(self, model: Any, make: Maker) -> None:
        if int(transformers.__version__.split(".")[0]) < 5:
            raise ConfigError(f"transformers {transformers.__version__} is older than 5.0.0; update it")
        self.config, self._make = _shape_of(model), make
        names = inspect.signature(model.forward).parameters
        self._name = "cache" if "cache" in names else "past_key_values"
        self._attended = False
        self.reset()
        # Made on no device, it says at once what would otherwise be found out in the middle of a pass.
        self._kind = make(self.config, 1, torch.float32, torch.device("meta"))
        super().__init__(layers=[_Layer(self, layer) for layer in range(self.config.n_layer)])

    @property
    def argument(self) -> dict[str, DropInCache]:
        """This cache under the name by which ``generate`` and ``forward`` take it."""
        return {self._name: self}

    @property
    def kv(self) -> KVCache | None:
        """The kvlab cache, for its ``length``, ``tokens_seen`` and ``nbytes``; None before the first pass."""
        self._settle()
        return self._kv

    @property
    def columns(self) -> int:
        """Tokens that were fed, padding included: what ``transformers`` calls the sequence length."""
        self._settle()
        return self._columns

    def __repr__(self) -> str:
        return f"DropInCache({type(self._kind).__name__}, {self.columns} tokens)"

    def fork(self) -> DropInCache:
        """A cache with the same contents that can go its own way, outside any :func:`attention` block."""
        kv = self.kv
        twin = copy.copy(self)
        twin.layers = [_Layer(twin, layer) for layer in range(self.config.n_layer)]
        twin._attended = False
        twin._drop_pass()
        with torch.inference_mode(False):
            twin._kv = None if kv is None else kv.fork()
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> DropInCache:
        return self.fork()

    # What transformers asks

    @property
    def is_croppable(self) -> bool:
        """Whether the tokens of a pass can be taken back, which assisted generation must."""
        return self.kv is None or self.kv.max_rollback > 0

    def reset(self) -> None:
        """Forget everything; the next batch may have another size."""
        self._kv: KVCache | None = None
        self._columns = self._padded = 0
        self._drop_pass()

    def reorder_cache(self, beam_idx: Int[Tensor, "batch"]) -> None:
        """Keep these rows, in this order: what beam search does at every step.

        Args:
            beam_idx: rows, repeats allowed.
        """
        if (kv := self.kv) is not None:
            kv.select(beam_idx.tolist())
        self._drop_pass()

    def batch_select_indices(self, indices: Int[Tensor, "batch"]) -> None:
        """Keep these rows.

        Args:
            indices: of the rows.
        """
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row so many times.

        Args:
            repeats: copies of a row, itself included.
        """
        if (kv := self.kv) is not None:
            self.reorder_cache(torch.arange(kv.batch).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int | Int[Tensor, ""]) -> None:
        """Take back the newest tokens of every row.

        Args:
            tokens_to_remove: how many, as a negative number; a positive one is the length to keep, as it was in
                ``transformers`` 5.0.

        Raises:
            CannotCrop: the kind of cache cannot take so many back, or padding came among them.
        """
        change = int(tokens_to_remove)
        kept = change if change > 0 else max(self.columns + change, 0)
        kv, removed = self.kv, self.columns - kept
        if kv is None or removed <= 0:
            return
        if kept < self._padded:
            raise CannotCrop(
                f"{kept} columns were to stay, and padding came until column {self._padded}: rows would lose different "
                "numbers of tokens; crop less, or reset() the cache"
            )
        kv.crop([seen - removed for seen in kv.rows_seen])
        self._columns = kept
        self._drop_pass()

    # A pass, layer by layer

    def _settle(self) -> None:
        """Commit the pass that went through all layers. Late, because the last layer attends after it appends."""
        if self._step is not None and self._kv is not None and self._done:
            self._kv.commit(self._step)
            time = self._step.positions.shape[1]
            self._columns += time
            if min(self._step.n_new) < time:
                self._padded = self._columns
            self._drop_pass()

    def _drop_pass(self) -> None:
        self._step: Step | None = None
        self._positions: Int[Tensor, "batch time"] | None = None
        self._next, self._done = 0, False

    def _append(
        self,
        layer: int,
        k: Float[Tensor, "batch n_kv_head time head_dim"],
        v: Float[Tensor, "batch n_kv_head time head_dim"],
        position_ids: Int[Tensor, "rows time"] | None,
    ) -> tuple[Float[Tensor, "batch n_kv_head keys head_dim"], Float[Tensor, "batch n_kv_head keys head_dim"]]:
        """A layer's new keys and values; all that its queries may read. The first layer begins the pass."""
        if layer == 0:
            self._begin(k, position_ids)
        if self._kv is None or self._step is None or layer != self._next:
            raise ConfigError(f"layer {layer} came and layer {self._next} was next; run all layers, in their order")
        held = self._kv.append(layer, k, v, self._step)
        self._next = layer + 1
        # Where attention is kvlab's, it says when the last layer has attended.
        self._done = not self._attended and self._next == self.config.n_layer
        return held

    def _begin(
        self, k: Float[Tensor, "batch n_kv_head time head_dim"], position_ids: Int[Tensor, "rows time"] | None
    ) -> None:
        self._settle()
        if k.requires_grad:
            raise ConfigError("the keys want gradients and a cache keeps none; call the model under torch.no_grad()")
        kv = self._kv_for(k)
        if self._attended:
            if self._positions is None:
                raise ConfigError("this pass is not one of the model that attention(model, cache) was given")
            self._step = kv.begin(self._positions)
        else:
            _refuse_padding(k, position_ids, kv)
            # Planned already, where the mask was asked for.
            if self._step is None or self._next or self._step.positions.shape != (len(k), k.shape[2]):
                self._step = self._plain_step(kv, k.shape[2])
        self._positions, self._next, self._done = None, 0, False

    def _kv_for(self, k: Float[Tensor, "batch n_kv_head time head_dim"]) -> KVCache:
        """The kvlab cache, made if this is its first pass, for the rows and the device of the keys."""
        if self._kv is None:
            # Born outside inference mode, it can be written in and out of it.
            with torch.inference_mode(False):
                self._kv = self._make(self.config, len(k), k.dtype, k.device)
        kv = self._kv
        if (kv.batch, kv.device, kv.dtype) != (len(k), k.device, k.dtype):
            raise ConfigError(
                f"the cache holds {kv.batch} rows of {kv.dtype} on {kv.device} and got {len(k)} rows of {k.dtype} on "
                f"{k.device}; reset() it or make another"
            )
        return kv

    def _mask_sizes(self, time: int) -> tuple[int, int]:
        """How many keys a pass of the model's own attention will read, and the position that the first stands for."""
        if (kv := self.kv) is None:
            return time, 0
        self._step, self._next, self._done = self._plain_step(kv, time), 0, False
        # A cache that does not say forgets nothing.
        n_keys = getattr(self._step, "n_keys", max(kv.ends(self._step.n_new)))
        return n_keys, self._columns + time - n_keys

    def _plain_step(self, kv: KVCache, time: int) -> Step:
        """A pass under the model's own attention.

        Its masks are causal, over keys that stand in the order of their positions.

        Raises:
            ConfigError: that would not be right.
        """
        if kv.needs_queries:
            raise ConfigError(f"{type(kv).__name__} needs the queries, and a stock model keeps them; {_INSIDE}")
        if any(seen != self._columns for seen in kv.rows_seen):
            raise ConfigError(f"the cache holds rows that came with padding, {kv.rows_seen} tokens each; {_INSIDE}")
        step = kv.begin(kv.next_positions(time))
        if any(type(view) is not View for view in step.views.values()):
            raise ConfigError(
                f"{time} tokens in one pass after {self._columns} are more than {type(kv).__name__} holds: each would "
                f"need its own rotation of the sinks, which stock attention cannot give; {_INSIDE}, or give generate "
                "prefill_chunk_size=1, which is slower"
            )
        return step

    def _expect(self, given: Mapping[str, Any]) -> Int[Tensor, "batch time"]:
        """Positions of the tokens of a pass, -1 at padding, from what the model's ``forward`` was given.

        Raises:
            ConfigError: the pass is given another cache, or its mask or positions do not continue this one.
        """
        if given.get("cache", given.get("past_key_values")) is not self:
            raise ConfigError(f"inside attention(model, cache) the model takes that cache, in every pass; {_INSIDE}")
        tokens = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
        batch, time = tokens.shape[:2]
        seen = [0] * batch if self.kv is None else self.kv.rows_seen
        if len(seen) != batch:
            raise ConfigError(f"the cache holds {len(seen)} rows and got {batch}; reset() it or make another")
        positions = positions_from_mask(self._new_columns(given.get("attention_mask"), batch, time), seen)
        if (ids := given.get("position_ids")) is not None:
            ids = ids.cpu().expand(batch, -1)
            if not torch.equal(torch.where(positions < 0, positions, ids), positions):
                raise ConfigError(
                    f"position_ids {ids.tolist()} do not continue rows that have seen {seen} tokens; leave them out"
                )
        self._positions = positions
        return positions

    def _new_columns(self, mask: Tensor | None, batch: int, time: int) -> Bool[Tensor, "batch time"]:
        """Which of the new columns are tokens."""
        if mask is None:
            return torch.ones(batch, time, dtype=torch.bool)
        if mask.shape != (batch, self._columns + time):
            raise ConfigError(
                f"attention_mask has shape {tuple(mask.shape)}; after {self._columns} columns and with {time} new ones "
                f"it must be [{batch}, {self._columns + time}], 0 at padding"
            )
        return mask[:, -time:].bool().cpu()

    def _attend(
        self,
        module: Any,
        query: Float[Tensor, "batch n_head time head_dim"],
        keys: Float[Tensor, "batch n_kv_head keys head_dim"],
        values: Float[Tensor, "batch n_kv_head keys head_dim"],
        attention_mask: Tensor | None,
        **settings: Any,
    ) -> tuple[Float[Tensor, "batch time n_head head_dim"], None]:
        """An attention function for the registry of ``transformers``."""
        kv, step, layer = self._kv, self._step, module.layer_idx
        if kv is None or step is None or self._next != layer + 1:
            raise ConfigError(f"inside attention(model, cache) the model takes that cache, in every pass; {_INSIDE}")
        if settings.get("dropout"):
            raise ConfigError(
                f"kvlab's attention has no dropout, the model asks for {settings['dropout']}; call eval()"
            )
        mixed = attend(query, keys, values, step.view(layer))
        if kv.needs_queries:
            kv.observe(layer, query, step)
        self._done = self._next == self.config.n_layer
        return mixed.transpose(1, 2).contiguous(), None


class _Layer(CacheLayerMixin):
    """One layer's side of a drop-in cache: ``transformers`` asks layers, and the cache answers."""

    def __init__(self, owner: DropInCache, layer: int) -> None:
        super().__init__()
        # A circle would keep the keys and values in memory until Python looks for circles.
        self.owner, self.layer = weakref.proxy(owner), layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the first pass makes the cache, for all layers."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append, and hand back all that the queries may read."""
        # Transformers 5.24 hands on what the layer was given, in ``kwargs``.
        position_ids = (kwargs.get("kwargs") or {}).get("position_ids")
        return self.owner._append(self.layer, key_states, value_states, position_ids)

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Keys and offset of the next pass; until ``transformers`` 5.3 its positions are given, not its length."""
        return self.owner._mask_sizes(query_length if isinstance(query_length, int) else len(query_length))

    def get_seq_length(self) -> int:
        """Tokens that were fed, held or not."""
        return self.owner.columns

    def get_max_length(self) -> int:
        """Tokens a row may come to, -1 for no limit."""
        kind = self.owner._kind
        return -1 if kind.max_len == ENDLESS else kind.max_len

    get_max_cache_shape = get_max_length  # its name until transformers 5.14


@contextmanager
def attention(model: Any, cache: DropInCache) -> Iterator[DropInCache]:
    """Let a stock model attend as kvlab does, to what a cache holds, until the block ends.

    Padding, left or right, is then read from ``attention_mask`` and never stored: each row of a batch gives what it
    gives alone. Positions are worked out from it. A cache that wants queries gets them.

    Args:
        model: the stock model.
        cache: made for it; in every pass inside the block the model must be given it.

    Raises:
        ConfigError: the cache was made for a model of another shape, the cache or the model is in such a block already,
            or the model's attention cannot be replaced.
    """
    shape = _shape_of(model)
    if shape != cache.config:
        raise ConfigError(f"the cache was made for {cache.config}, and the model is {shape}; make one for it")
    if cache._attended:
        raise ConfigError(
            "the cache is inside attention(model, cache) already; use the block around it, or another cache"
        )
    # No two blocks share a name: a model and its draft model may each be in one.
    name, before = f"kvlab_{id(cache)}", model.config._attn_implementation
    if str(before).startswith("kvlab_"):
        raise ConfigError("the model is inside attention(model, cache) already, with another cache; end that first")
    with ExitStack() as undo:
        ALL_ATTENTION_FUNCTIONS[name] = cache._attend
        undo.callback(ALL_ATTENTION_FUNCTIONS.pop, name)
        undo.callback(model.set_attn_implementation, before)
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            raise ConfigError(f"{type(model).__name__} does not let its attention be replaced; take a stock model")
        # The decoder without its head: every way into the model passes it.
        decoder = model.base_model
        names = tuple(inspect.signature(decoder.forward).parameters)
        hook = decoder.register_forward_pre_hook(partial(_before_forward, cache, names), with_kwargs=True)
        undo.callback(hook.remove)
        undo.callback(setattr, cache, "_attended", False)
        undo.callback(cache._settle)
        cache._settle()
        cache._attended = True
        yield cache


def _before_forward(
    cache: DropInCache, names: tuple[str, ...], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Tell a cache the positions of the pass that comes, and the model too, where it was not told."""
    given = dict(zip(names, args, strict=False)) | kwargs
    positions = cache._expect(given)
    if given.get("position_ids") is None:
        kwargs["position_ids"] = positions.clamp(min=0).to(next(module.parameters()).device)
    return args, kwargs


def _shape_of(model: Any) -> ModelConfig:
    config = ModelConfig.from_hf(model.config.to_dict())
    config.require_runnable()
    return config


def _refuse_padding(
    k: Float[Tensor, "batch n_kv_head time head_dim"], position_ids: Int[Tensor, "rows time"] | None, kv: KVCache
) -> None:
    """Refuse left padding under stock attention, as far as it can be seen there: it would be stored.

    Its positions do not rise; where they are not handed on, the first keys tell: pads are one token at one position.

    Raises:
        ConfigError: there is padding.
    """
    if k.shape[2] == 1:
        return
    if position_ids is not None:
        rising = position_ids.cpu() == kv.next_positions(k.shape[2])
        padded = not bool(rising.all())
    else:
        first, second = k[:, :, 0].flatten(1), k[:, :, 1].flatten(1)
        same = (first - second).abs().amax(1) < 1e-3 * first.abs().amax(1)
        padded = kv.tokens_seen == 0 and bool(same.any())
    if padded:
        raise ConfigError(
            "the batch is padded, or has positions of its own, and stock attention would hide that from the cache; "
            f"{_INSIDE}"
        )
