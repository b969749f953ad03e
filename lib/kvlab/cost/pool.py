"""The KV pool of an engine that allocates its memory once: how large it is, and what it can hold.

This is the arithmetic behind the start-up messages of vLLM and SGLang. The pool is taken at the start, whether requests
come or not, so the memory that is in use says nothing about the need.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.config import Shape
from kvlab.cost.formats import Format
from kvlab.cost.memory import kv_bytes
from kvlab.errors import ConfigError, at_least


def pool_bytes(memory_bytes: int, fraction: float, weight_bytes: int, peak_bytes: int = 0) -> int:
    """What is left for the KV pool; negative where the weights do not even fit.

    Args:
        memory_bytes: of the device.
        fraction: of it that the instance may claim (``gpu_memory_utilization`` of vLLM, ``mem_fraction_static`` of
            SGLang, which leaves ``peak_bytes`` outside).
        weight_bytes: of the weights on this device.
        peak_bytes: of activations and everything else, as the engine profiles it.

    Raises:
        ConfigError: a number is negative, or the fraction is not between 0 and 1.
    """
    if not 0 < fraction <= 1:
        raise ConfigError(f"fraction is {fraction}; it must be above 0 and at most 1")
    for name, value in (("memory_bytes", memory_bytes), ("weight_bytes", weight_bytes), ("peak_bytes", peak_bytes)):
        at_least(0, name, value)
    return int(memory_bytes * fraction) - weight_bytes - peak_bytes


@dataclass(frozen=True)
class Pool:
    """Blocks of KV cache on one device.

    Args:
        blocks: in the pool.
        block_size: tokens of a block.

    Raises:
        ConfigError: there is no block, or a block holds no token.
    """

    blocks: int
    block_size: int = 16

    def __post_init__(self) -> None:
        if self.blocks < 1 or self.block_size < 1:
            raise ConfigError(
                f"a pool of {self.blocks} blocks of {self.block_size} tokens holds nothing; leave more memory to it: "
                "raise the memory fraction, shrink or split the weights, or narrow the KV format"
            )

    @classmethod
    def of(
        cls,
        model: Shape,
        available_bytes: int,
        kv: str | Format = "bfloat16",
        *,
        block_size: int = 16,
        tensor_parallel: int = 1,
    ) -> Pool:
        """As many whole blocks of a model's cache as fit.

        Args:
            model: a preset name, a Hub config, or a shape; windows are not honoured, as in a pool without groups.
            available_bytes: for the pool, on one device; see :func:`pool_bytes`.
            kv: format of the cache.
            block_size: tokens of a block.
            tensor_parallel: devices that share the KV heads.

        Raises:
            ConfigError: not one block fits, the model or the format is unknown, or a size is impossible.
        """
        each = kv_bytes(model, block_size, kv, honour_windows=False, tensor_parallel=tensor_parallel)
        return cls(available_bytes // each, block_size)

    @property
    def tokens(self) -> int:
        """That the pool holds, of all requests together."""
        return self.blocks * self.block_size

    def holds(self, max_len: int) -> bool:
        """Whether one request of the greatest length fits: an engine refuses to start where it does not.

        Args:
            max_len: tokens of the longest request, prompt and answer (``max_model_len``).
        """
        return self.blocks_of(max_len) <= self.blocks

    def blocks_of(self, tokens: int) -> int:
        """Blocks that a request of so many tokens needs; the last one may be partly empty.

        Args:
            tokens: of the request.
        """
        return -(-tokens // self.block_size)

    def concurrency(self, max_len: int) -> float:
        """Requests of the greatest length that fit at once, as engines print it at the start.

        A worst case: blocks are taken on demand, and shorter requests leave room for more.

        Args:
            max_len: tokens of the longest request.

        Raises:
            ConfigError: ``max_len`` is below 1.
        """
        return self.tokens / at_least(1, "max_len", max_len)


def clamp_max_tokens(prompt_tokens: int, requested: int, limit: int) -> int:
    """The largest answer that may still be asked for.

    Args:
        prompt_tokens: of the prompt.
        requested: tokens that were asked for.
        limit: tokens of prompt and answer together (``max_model_len``).

    Raises:
        ConfigError: the prompt alone fills the limit, or no token was asked for.
    """
    if requested < 1:
        raise ConfigError(f"requested is {requested}; an answer has 1 token or more")
    if prompt_tokens >= limit:
        raise ConfigError(
            f"a prompt of {prompt_tokens} tokens leaves no room for an answer below the limit of {limit}; "
            "shorten the prompt or raise the limit"
        )
    return min(requested, limit - prompt_tokens)
