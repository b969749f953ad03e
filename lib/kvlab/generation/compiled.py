"""A decode step compiled ahead of time: one package a shape, kept in the cache folder, loaded in milliseconds.

An eager step of a small model spends a third of its time between the kernels. ``torch.export`` writes the step down as
a graph and AOTInductor compiles it with everything fused that can be. The graph knows shapes and formats, no weights:
the package takes those of the model in memory, so it is small, serves every model of the shape, and nothing is held
twice. The number of keys is a size of an input, rounded up to a bucket: one package serves every length.
"""

from __future__ import annotations

import hashlib
import inspect
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvlab.cache import (
    BlockStorage,
    BlockView,
    ContiguousCache,
    NoCache,
    RaggedBatch,
    Step,
    View,
    Visibility,
    ragged,
    visible,
)
from kvlab.cache.contiguous import ContiguousStep, write
from kvlab.cache.ragged import RaggedStep, padded_tables
from kvlab.config import ModelConfig
from kvlab.devices import dtype_name
from kvlab.errors import CacheFull, ConfigError, DeviceError, PromptError, one_line
from kvlab.kernels import built, direct_calls, enabled, instruction_set, library
from kvlab.model import GPT, attention, gpt, layers, rope
from kvlab.quantize import RowAwareLinear, linears
from kvlab.quantize import layers as quantized_layers
from kvlab.store import cache_folder, publish, staging

#: Attention reads whole buckets of keys, the last one partly empty and hidden by the mask.
BUCKET = 128


class CompiledDecode:
    """A compiled decode step with the weights of one model.

    Args:
        model: the decoder; its weights are used where they are.
        rows: of the batch.

    Raises:
        DeviceError: there is no package for this model and batch; ``kvlab compile`` makes one.
    """

    def __init__(self, model: GPT, rows: int) -> None:
        path = package(model, rows)
        if not path.exists():
            raise DeviceError(f"no step of {rows} row(s) is compiled for {model.config.name}; run: kvlab compile")
        self.rows, self._config, self._dtype = rows, model.config, model.dtype
        self._loader = _load(path, _Step(model, rows))
        self._storage, self._held = torch.empty(0), list[Tensor]()

    def __call__(self, tokens: Int[Tensor, "batch"], cache: ContiguousCache) -> Float[Tensor, "batch vocab_size"]:
        """Feed each row its newest token and get the logits of the next one.

        Args:
            tokens: one id a row.
            cache: of as many rows; advances by one.

        Raises:
            CacheFull: a row has no slot left.
            PromptError: a row has come to the end of the model's context.
            ConfigError: the cache has another number of rows, another shape or another dtype.
        """
        self._require_fit(cache)
        positions = torch.tensor(cache.rows_seen)[:, None]
        held = min(-(-(cache.tokens_seen + 1) // BUCKET) * BUCKET, cache.max_len)
        if self._storage is not cache.storage:
            self._storage = cache.storage
            self._held = [cache.storage[side, layer] for layer in range(cache.config.n_layer) for side in (0, 1)]
        with torch.inference_mode():
            (logits,) = self._loader.boxed_run([tokens[:, None], positions, torch.arange(held), *self._held])
        cache.rows_seen = [seen + 1 for seen in cache.rows_seen]
        return logits

    def _require_fit(self, cache: ContiguousCache) -> None:
        """Compiled code checks nothing: it would read beyond the end of whatever it is given."""
        if cache.batch != self.rows:
            raise ConfigError(f"the step was compiled for {self.rows} row(s), the cache has {cache.batch}")
        same = cache.config is self._config or replace(cache.config, name="") == replace(self._config, name="")
        if not same or cache.dtype != self._dtype:
            shape = cache.config.name if cache.dtype != self._dtype else "another shape,"
            raise ConfigError(
                f"the step was compiled for {self._config.name} in {dtype_name(self._dtype)}, "
                f"the cache is for {shape} in {dtype_name(cache.dtype)}; make one from the model's config and dtype"
            )
        if cache.tokens_seen >= cache.max_len:
            raise CacheFull(f"all {cache.max_len} slots are taken; make a longer cache")
        if cache.tokens_seen >= self._config.max_seq_len:
            raise PromptError(
                f"{cache.tokens_seen + 1} tokens are more than the context of {self._config.name}, "
                f"{self._config.max_seq_len}"
            )


class CompiledPagedStep:
    """A compiled step of single tokens of many requests, with the weights of one model.

    Args:
        model: the decoder; its weights are used where they are.
        rows: requests of a step; fewer are filled up.
        storage: the blocks.

    Raises:
        DeviceError: there is no package for this model, number of rows and block size; ``kvlab compile`` makes one.
    """

    def __init__(self, model: GPT, rows: int, storage: BlockStorage) -> None:
        path = package(model, rows, storage.block_size)
        if not path.exists():
            raise DeviceError(
                f"no step of {rows} request(s) over blocks of {storage.block_size} tokens is compiled for "
                f"{model.config.name}; run: kvlab compile --serving"
            )
        self.rows = rows
        self._loader = _load(path, _PagedStep(model, rows, storage.block_size))
        self._nowhere = storage.beyond
        layers_ = range(model.config.n_layer)
        self._held = [storage.slots[side, layer] for layer in layers_ for side in (0, 1)]

    def __call__(self, tokens: Sequence[int], batch: RaggedBatch) -> Float[Tensor, "requests vocab_size"]:
        """Feed each request its newest token and get the logits of the next one.

        Args:
            tokens: one id a request.
            batch: as many spans of a single token, over the storage that the step was made for.

        Raises:
            ConfigError: a span has another number of tokens, or there are more than the step has rows.
        """
        spans = batch.spans
        if len(spans) > self.rows or any(span.new != 1 for span in spans):
            raise ConfigError(f"the step feeds one token of up to {self.rows} requests, not {[s.new for s in spans]}")
        empty, size = [0] * (self.rows - len(spans)), batch.storage.block_size
        slots = [span.table[span.seen // size] * size + span.seen % size for span in spans]
        # A row without a request writes where nobody reads, and sees no key. Two columns at least, for the graph.
        tables = padded_tables([*(span.table for span in spans), *[(0, 0)] * (len(empty) + 1)])[: self.rows]
        inputs = [
            torch.tensor([[*tokens, *empty]]),
            torch.tensor([[*(span.seen for span in spans), *empty]]),
            torch.tensor([*slots, *[self._nowhere] * len(empty)]),
            tables,
            torch.tensor([*(span.end for span in spans), *empty]),
        ]
        with torch.inference_mode():
            (logits,) = self._loader.boxed_run([*inputs, *self._held])
        return logits[: len(spans)]


def compile_step(model: GPT, rows: int = 1) -> Path:
    """Compile the decode step of a model, unless that has been done; half a minute to a minute for 30 layers.

    Args:
        model: the decoder, on a CPU.
        rows: of the batch.

    Returns:
        The package.

    Raises:
        DeviceError: the model is elsewhere, or there is no compiler.
    """
    _require_cpu(model)
    target = package(model, rows)
    if target.exists():
        return target
    config = model.config
    held = _empty(config, model.dtype, (rows, config.n_kv_head, 2 * BUCKET, config.head_dim))
    length, slots = torch.export.Dim("max_len", min=2), torch.export.Dim("slots", min=2)
    args = (torch.zeros(rows, 1, dtype=torch.long), torch.zeros(rows, 1, dtype=torch.long), torch.arange(BUCKET), held)
    dynamic = (None, None, {0: slots}, [{2: length}] * len(held))
    return _compile(_Step(model, rows), args, dynamic, target)


def compile_paged_step(model: GPT, rows: int, block_size: int = 16) -> Path:
    """Compile a step of single tokens of many requests, over the blocks of a pool, unless that has been done.

    Args:
        model: the decoder, on a CPU.
        rows: tokens of the step, one a request.
        block_size: tokens of a block.

    Returns:
        The package.

    Raises:
        DeviceError: the model is elsewhere, the kernels are not loaded, or there is no compiler.
    """
    _require_cpu(model)
    if not enabled():
        raise DeviceError("a step over blocks needs the kernels; build them first with: kvlab compile")
    target = package(model, rows, block_size)
    if target.exists():
        return target
    config = model.config
    held = _empty(config, model.dtype, (config.n_kv_head, 4 * block_size, config.head_dim))
    pool, blocks = torch.export.Dim("slots", min=2), torch.export.Dim("blocks", min=2)
    # Five tensors: the exporter takes two arguments that are one tensor for one input.
    args = (*(torch.zeros(shape, dtype=torch.long) for shape in ((1, rows), (1, rows), rows, (rows, 2), rows)), held)
    dynamic = (None, None, None, {1: blocks}, None, [{1: pool}] * len(held))
    return _compile(_PagedStep(model, rows, block_size), args, dynamic, target)


def _require_cpu(model: GPT) -> None:
    if model.device.type != "cpu":
        raise DeviceError(f"the model is on {model.device}; packages are for a CPU, a GPU records CUDA graphs")


def _empty(config: ModelConfig, dtype: torch.dtype, shape: tuple[int, ...]) -> list[Tensor]:
    """Keys and values of each layer in turn."""
    return [torch.zeros(shape, dtype=dtype) for _ in range(2 * config.n_layer)]


def _compile(step: _Step | _PagedStep, args: tuple[Any, ...], dynamic: tuple[Any, ...], target: Path) -> Path:
    """Write a step down for arguments of these shapes, compile it, and put the package into its place."""
    configs = {
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.custom_ops_to_c_shims": direct_calls(),
    }
    with staging(target) as work, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's, about itself
        made = work / target.name
        try:
            exported = torch.export.export(step, args, dynamic_shapes=dynamic)
            torch._inductor.aoti_compile_and_package(exported, package_path=str(made), inductor_configs=configs)
        except Exception as failure:  # the compiler's own, of many kinds
            raise DeviceError(
                f"the step of {step.model.config.name} cannot be compiled here: {one_line(failure)[:300]}"
            ) from failure
        return publish(made, target)


def _load(path: Path, step: _Step | _PagedStep) -> torch._C._aoti.AOTIModelPackageLoader:
    """A package with the weights of a model, used where they are."""
    # The loader itself: the wrapper around it imports the compiler (a second) and parses its call at every step.
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
    state: dict[str, Tensor] = {**dict(step.named_parameters(remove_duplicate=False))}
    state |= dict(step.named_buffers(remove_duplicate=False))
    weights = {name: state[name].data for name in loader.get_constant_fqns()}
    loader.load_constants(weights, False, True, True)
    return loader


def package(model: GPT, rows: int, block_size: int | None = None) -> Path:
    """Where the compiled step is, or will be: one for each shape, formats, rows, instruction set, torch and source.

    Args:
        model: the decoder.
        rows: of the batch.
        block_size: of a step over blocks; None for one over a contiguous cache.
    """
    layers_ = [f"{name} {_route(layer, rows, model.dtype)}" for name, layer in linears(model)]
    layers_ += [f"{name} {held.dtype} {tuple(held.shape)}" for name, held in model.state_dict().items()]
    sources = [inspect.getsource(module) for module in (gpt, layers, attention, rope, ragged, quantized_layers)]
    sources.append(Path(__file__).read_text("utf8"))
    kernels = library().stem if built() else "torch"
    shape = repr(replace(model.config, name=""))
    key = [shape, *layers_, dtype_name(model.dtype), f"{rows} {block_size}", torch.__version__, instruction_set()]
    key.append(kernels)
    digest = hashlib.sha256("\n".join(key + sources).encode()).hexdigest()[:24]
    name = f"{model.config.name.replace('/', '-')}-{rows}{'' if block_size is None else '-paged'}"
    return cache_folder() / "steps" / f"{name}-{digest}.pt2"


def _route(layer: nn.Module, rows: int, dtype: torch.dtype) -> str:
    """Format of a layer and the product that it takes: another product is another graph."""
    if not isinstance(layer, RowAwareLinear):
        return "plain"
    return f"{layer.format} {layer.route(rows, dtype)}"


class _Step(nn.Module):
    """A decode step as a function of tensors: what ``torch.export`` can write down.

    Args:
        model: the decoder.
        rows: of the batch.
    """

    def __init__(self, model: GPT, rows: int) -> None:
        super().__init__()
        self.model, self.rows = model, rows

    def forward(
        self,
        tokens: Int[Tensor, "batch 1"],
        positions: Int[Tensor, "batch 1"],
        slots: Int[Tensor, "keys"],
        held: Sequence[Float[Tensor, "batch n_kv_head max_len head_dim"]],
    ) -> Float[Tensor, "batch vocab_size"]:
        """Logits of the next tokens; keys and values are written into ``held``."""
        config = self.model.config
        torch._check(slots.shape[0] <= held[0].shape[2])
        each = torch.arange(self.rows)
        step = ContiguousStep(
            positions=positions,
            n_new=(1,) * self.rows,
            views={w: View(Visibility.MASK, visible(slots[None, None], positions, w)) for w in set(config.windows)},
            windows=config.windows,
            n_keys=slots.shape[0],
            slots=positions[0] if self.rows == 1 else None,
            ragged=None if self.rows == 1 else (each, torch.zeros_like(each), positions[:, 0]),
        )
        return self.model.run(tokens, _Held(self.model, held), step, last_only=False)[:, 0]


class _Held(NoCache):
    """Slots that were handed in.

    Args:
        model: the decoder.
        held: keys and values of each layer in turn.
    """

    def __init__(self, model: GPT, held: Sequence[Tensor]) -> None:
        super().__init__(model.config, len(held[0]), model.dtype)
        self._held = held

    def append(
        self,
        layer: int,
        k: Float[Tensor, "batch n_kv_head time head_dim"],
        v: Float[Tensor, "batch n_kv_head time head_dim"],
        step: Step,
    ) -> tuple[Float[Tensor, "batch n_kv_head keys head_dim"], Float[Tensor, "batch n_kv_head keys head_dim"]]:
        """Write into the slots."""
        assert isinstance(step, ContiguousStep)
        return write(self._held[2 * layer], k, step), write(self._held[2 * layer + 1], v, step)


class _PagedStep(nn.Module):
    """A step over blocks as a function of tensors.

    Args:
        model: the decoder.
        rows: tokens, one a request.
        block_size: tokens of a block.
    """

    def __init__(self, model: GPT, rows: int, block_size: int) -> None:
        super().__init__()
        self.model, self.rows, self.block_size = model, rows, block_size

    def forward(
        self,
        tokens: Int[Tensor, "1 rows"],
        positions: Int[Tensor, "1 rows"],
        slots: Int[Tensor, "rows"],
        tables: Int[Tensor, "rows blocks"],
        lengths: Int[Tensor, "rows"],
        held: Sequence[Float[Tensor, "n_kv_head slots head_dim"]],
    ) -> Float[Tensor, "rows vocab_size"]:
        """Logits of the next tokens; keys and values are written into ``held``."""
        config, each = self.model.config, torch.arange(self.rows)
        step = RaggedStep(
            positions=positions,
            n_new=(self.rows,),
            views={window: self._view(window, each, tables, lengths) for window in set(config.windows)},
            windows=config.windows,
            slots=slots,
            wanted=each,
        )
        return self.model.run(tokens, _HeldBlocks(self.model, held), step, last_only=False)[0]

    def _view(self, window: int | None, each: Tensor, tables: Tensor, lengths: Tensor) -> BlockView:
        return BlockView(
            block_size=self.block_size, window=window, beyond=0, few=each, tables=tables, rows=each, lengths=lengths,
            many=(),
        )  # fmt: skip


class _HeldBlocks(NoCache):
    """Blocks that were handed in.

    Args:
        model: the decoder.
        held: keys and values of each layer in turn.
    """

    def __init__(self, model: GPT, held: Sequence[Tensor]) -> None:
        super().__init__(model.config, 1, model.dtype)
        self._held = held

    def append(
        self,
        layer: int,
        k: Float[Tensor, "1 n_kv_head time head_dim"],
        v: Float[Tensor, "1 n_kv_head time head_dim"],
        step: Step,
    ) -> tuple[Float[Tensor, "1 n_kv_head slots head_dim"], Float[Tensor, "1 n_kv_head slots head_dim"]]:
        """Write into the slots, and return all of them."""
        assert isinstance(step, RaggedStep)
        keys, values = self._held[2 * layer : 2 * layer + 2]
        return keys.index_copy_(1, step.slots, k[0])[None], values.index_copy_(1, step.slots, v[0])[None]
