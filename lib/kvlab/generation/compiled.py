"""A decode step compiled ahead of time: one package a shape, kept in the cache folder, loaded in milliseconds.

An eager step of a small model spends a third of its time between the kernels. ``torch.export`` writes the step down as
a graph and AOTInductor compiles it with everything fused that can be. The graph knows shapes and formats, no weights:
the package takes those of the model in memory, so it is small, serves every model of the shape, and nothing is held
twice. The number of keys is a size of an input, rounded up to a bucket: one package serves every length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvlab.cache import ContiguousCache, NoCache, Step, View, Visibility, visible
from kvlab.cache.contiguous import ContiguousStep, Places, write
from kvlab.devices import dtype_name
from kvlab.errors import CacheFull, ConfigError, DeviceError, PromptError
from kvlab.generation.packages import empty_layers, load_package, make_package, package_of, require_cpu
from kvlab.model import GPT

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
        self._loader = load_package(path, _Step(model, rows))
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
    require_cpu(model)
    target = package(model, rows)
    if target.exists():
        return target
    config = model.config
    held = empty_layers(model, rows, config.n_kv_head, 2 * BUCKET, config.head_dim)
    length, slots = torch.export.Dim("max_len", min=2), torch.export.Dim("slots", min=2)
    args = (torch.zeros(rows, 1, dtype=torch.long), torch.zeros(rows, 1, dtype=torch.long), torch.arange(BUCKET), held)
    dynamic = (None, None, {0: slots}, [{2: length}] * len(held))
    return make_package(_Step(model, rows), args, dynamic, target)


def package(model: GPT, rows: int) -> Path:
    """Where the compiled step is, or will be.

    Args:
        model: the decoder.
        rows: of the batch.
    """
    return package_of(model, rows, "", Path(__file__))


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
            ragged=None if self.rows == 1 else Places(each, torch.zeros_like(each), positions[:, 0]),
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
