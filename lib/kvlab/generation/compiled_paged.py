"""A compiled step of the serving engine: one token of each of many requests, over the blocks of a pool.

The number of requests is fixed, so an engine rounds it up to the next bucket for which there is a package; rows without
a request see no key, and write where nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvlab.cache import BlockStorage, BlockView, NoCache, RaggedBatch, Step
from kvlab.cache.ragged import RaggedStep, padded_tables
from kvlab.errors import ConfigError, DeviceError
from kvlab.generation.packages import empty_layers, load_package, make_package, package_of, require_cpu
from kvlab.kernels import enabled
from kvlab.model import GPT


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
        path = paged_package(model, rows, storage.block_size)
        if not path.exists():
            raise DeviceError(
                f"no step of {rows} request(s) over blocks of {storage.block_size} tokens is compiled for "
                f"{model.config.name}; run: kvlab compile --serving"
            )
        self.rows = rows
        self._loader = load_package(path, _PagedStep(model, rows, storage.block_size))
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
    require_cpu(model)
    if not enabled():
        raise DeviceError("a step over blocks needs the kernels; build them first with: kvlab compile")
    target = paged_package(model, rows, block_size)
    if target.exists():
        return target
    config = model.config
    held = empty_layers(model, config.n_kv_head, 4 * block_size, config.head_dim)
    pool, blocks = torch.export.Dim("slots", min=2), torch.export.Dim("blocks", min=2)
    args = (*(torch.zeros(shape, dtype=torch.long) for shape in ((1, rows), (1, rows), rows, (rows, 2), rows)), held)
    dynamic = (None, None, None, {1: blocks}, None, [{1: pool}] * len(held))
    return make_package(_PagedStep(model, rows, block_size), args, dynamic, target)


def paged_package(model: GPT, rows: int, block_size: int = 16) -> Path:
    """Where the compiled step is, or will be.

    Args:
        model: the decoder.
        rows: tokens of the step, one a request.
        block_size: tokens of a block.
    """
    return package_of(model, rows, f"-blocks-of-{block_size}", Path(__file__))


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
