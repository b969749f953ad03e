"""A decode step of one shape, which a compiler compiles once and a CUDA graph can record.

The plain step reads as many keys as are held: one more each time, so every step has another shape. Here every step
reads all slots of the cache, hides the empty ones with a mask, and takes whatever changes from buffers that stay where
they are (gpt-fast does it so). The price is the reading of slots that hold nothing.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlab.cache import ContiguousCache, View, Visibility
from kvlab.cache.base import visible
from kvlab.cache.contiguous import ContiguousStep
from kvlab.errors import CacheFull, ConfigError, DeviceError
from kvlab.model import GPT


class FixedDecode:
    """Decodes rows of one length over a contiguous cache, every step with the same shapes and the same buffers.

    Args:
        model: the decoder.
        cache: holds the prompts, all of the same length; advances by one with each call.

    Raises:
        ConfigError: the rows differ in length, or the cache is longer than the model's context.
    """

    def __init__(self, model: GPT, cache: ContiguousCache) -> None:
        if len(set(cache.rows_seen)) > 1:
            raise ConfigError(f"rows have seen {cache.rows_seen} tokens; a step of one shape needs rows of one length")
        if cache.max_len > model.config.max_seq_len:
            raise ConfigError(
                f"max_len is {cache.max_len}; the context of {model.config.name} is {model.config.max_seq_len}"
            )
        self.cache, self._model = cache, model
        self._tokens = torch.zeros(cache.batch, 1, dtype=torch.long, device=cache.device)
        self._positions = torch.zeros(cache.batch, 1, dtype=torch.long, device=cache.device)
        self._slots = torch.arange(cache.max_len, device=cache.device)[None, None]
        shape = (1, 1, 1, cache.max_len)
        self._masks = {
            window: torch.zeros(shape, dtype=torch.bool, device=cache.device) for window in set(model.config.windows)
        }
        self._step = ContiguousStep(
            positions=self._positions,
            n_new=(1,) * cache.batch,
            views={window: View(Visibility.MASK, mask) for window, mask in self._masks.items()},
            windows=model.config.windows,
            n_keys=cache.max_len,
            slots=self._positions[0],
            ragged=None,
        )
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor | None = None

    def __call__(self, tokens: Int[Tensor, "batch"]) -> Float[Tensor, "batch vocab_size"]:
        """Feed each row its newest token and get the logits of the next one.

        A recorded graph answers in the same memory every time: use the logits, or copy them, before the next call.

        Args:
            tokens: one id a row.

        Raises:
            CacheFull: there is no slot left.
        """
        self._aim(self.cache.tokens_seen)
        self._tokens.copy_(tokens[:, None])
        if self._graph is None:
            logits = self.run()
        else:
            self._graph.replay()
            assert self._logits is not None
            logits = self._logits
        self.cache.commit(self._step)
        return logits

    def run(self) -> Float[Tensor, "batch vocab_size"]:
        """The tensor part: no size and no address in it changes from step to step."""
        with torch.inference_mode():
            return self._model.run(self._tokens, self.cache, self._step, last_only=True)[:, 0]

    def record(self) -> None:
        """Record the step as a CUDA graph; calls replay it from then on.

        Raises:
            DeviceError: the model is not on a CUDA device.
            CacheFull: there is no slot left to try it on.
        """
        if self.cache.device.type != "cuda":
            raise DeviceError(f"a CUDA graph cannot record work on {self.cache.device.type}; run the step as it is")
        # What it writes, the next call overwrites: nothing is committed.
        self._aim(self.cache.tokens_seen)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):  # libraries allocate their workspaces in the first passes
                self.run()
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = self.run()

    def _aim(self, position: int) -> None:
        """Write into the buffers where the next token goes and what it sees."""
        if position >= self.cache.max_len:
            raise CacheFull(
                f"all {self.cache.max_len} slots are taken; a step of one shape needs a cache as long as the answer"
            )
        self._positions.fill_(position)
        for window, mask in self._masks.items():
            mask.copy_(visible(self._slots, self._positions[:1], window))
