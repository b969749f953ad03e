"""A decode step of few shapes, which a compiler compiles once each and CUDA graphs can record.

The plain step reads as many keys as are held: one more each time, so every step has another shape. Here a step reads
whole buckets of slots, hides the empty ones with a mask, and takes whatever changes from buffers that stay where they
are (gpt-fast does it so). The price is the reading of slots that hold nothing, at most a bucket of them.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlab.cache import ContiguousCache, View, Visibility
from kvlab.cache.base import visible
from kvlab.cache.contiguous import ContiguousStep
from kvlab.errors import CacheFull, ConfigError, DeviceError, at_least
from kvlab.model import GPT


class FixedDecode:
    """Decodes rows of one length over a contiguous cache, with one set of shapes for each bucket of keys.

    Args:
        model: the decoder.
        cache: holds the prompts, all of the same length; advances by one with each call.
        bucket: keys are read in multiples of this; None reads all slots always, in one shape.

    Raises:
        ConfigError: the rows differ in length, the cache is longer than the model's context, or the bucket is below 1.
    """

    def __init__(self, model: GPT, cache: ContiguousCache, bucket: int | None = None) -> None:
        if len(set(cache.rows_seen)) > 1:
            raise ConfigError(f"rows have seen {cache.rows_seen} tokens; a step of one shape needs rows of one length")
        if cache.max_len > model.config.max_seq_len:
            raise ConfigError(
                f"max_len is {cache.max_len}; the context of {model.config.name} is {model.config.max_seq_len}"
            )
        self.cache, self._model = cache, model
        self._bucket = cache.max_len if bucket is None else at_least(1, "bucket", bucket)
        self._tokens = torch.zeros(cache.batch, 1, dtype=torch.long, device=cache.device)
        self._positions = torch.zeros(cache.batch, 1, dtype=torch.long, device=cache.device)
        # Made now, not when a bucket is reached: the steps of a bucket shall not differ.
        sizes = [*range(self._bucket, cache.max_len, self._bucket), cache.max_len]
        self._steps = {n_keys: self._make_step(n_keys) for n_keys in sizes}
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def __call__(self, tokens: Int[Tensor, "batch"]) -> Float[Tensor, "batch vocab_size"]:
        """Feed each row its newest token and get the logits of the next one.

        A recorded graph answers in the same memory every time: use the logits, or copy them, before the next call.

        Args:
            tokens: one id a row.

        Raises:
            CacheFull: there is no slot left.
        """
        step = self._aim(self.cache.tokens_seen)
        self._tokens.copy_(tokens[:, None])
        if step.n_keys in self._graphs:
            graph, logits = self._graphs[step.n_keys]
            graph.replay()
        else:
            logits = self.run(step)
        self.cache.commit(step)
        return logits

    def run(self, step: ContiguousStep) -> Float[Tensor, "batch vocab_size"]:
        """The tensor part: no size and no address in it changes from step to step of a bucket.

        Args:
            step: of the bucket.
        """
        with torch.inference_mode():
            return self._model.run(self._tokens, self.cache, step, last_only=True)[:, 0]

    def record(self) -> None:
        """Record a CUDA graph for every bucket from here to the end of the cache; calls replay them from then on.

        Raises:
            DeviceError: the model is not on a CUDA device.
            CacheFull: there is no slot left to try it on.
        """
        if self.cache.device.type != "cuda":
            raise DeviceError(f"a CUDA graph cannot record work on {self.cache.device.type}; run the step as it is")
        position = self.cache.tokens_seen
        # What it writes, the next call overwrites: nothing is committed.
        step = self._aim(position)
        while step.n_keys not in self._graphs:
            self._graphs[step.n_keys] = self._record(step)
            step = self._aim(min(step.n_keys, self.cache.max_len - 1))
        self._aim(position)

    def _record(self, step: ContiguousStep) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):  # libraries allocate their workspaces in the first passes
                self.run(step)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self.run(step)
        return graph, logits

    def _aim(self, position: int) -> ContiguousStep:
        """The step of the bucket that holds a position, with buffers that say where the token goes and what it sees."""
        if position >= self.cache.max_len:
            raise CacheFull(
                f"all {self.cache.max_len} slots are taken; a step of one shape needs a cache as long as the answer"
            )
        n_keys = min((position // self._bucket + 1) * self._bucket, self.cache.max_len)
        step = self._steps[n_keys]
        self._positions.fill_(position)
        slots = torch.arange(n_keys, device=self.cache.device)[None, None]
        for window, view in step.views.items():
            assert view.mask is not None
            view.mask.copy_(visible(slots, self._positions[:1], window))
        return step

    def _make_step(self, n_keys: int) -> ContiguousStep:
        windows, shape = self._model.config.windows, (1, 1, 1, n_keys)
        masks = {window: torch.zeros(shape, dtype=torch.bool, device=self.cache.device) for window in set(windows)}
        return ContiguousStep(
            positions=self._positions,
            n_new=(1,) * self.cache.batch,
            views={window: View(Visibility.MASK, mask) for window, mask in masks.items()},
            windows=windows,
            n_keys=n_keys,
            slots=self._positions[0],
            ragged=None,
        )
