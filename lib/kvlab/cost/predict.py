"""What a request will cost before it is run: first token, every further token, memory, and how many fit."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.config import Shape, shape_of
from kvlab.cost.activations import activation_bytes
from kvlab.cost.flops import middle_step, prefill_pass
from kvlab.cost.formats import Format
from kvlab.cost.hardware import Device, hardware_of
from kvlab.cost.memory import kv_bytes, weight_bytes
from kvlab.cost.roofline import PassTime, pass_time
from kvlab.errors import ConfigError, at_least


@dataclass(frozen=True)
class Memory:
    """Bytes that a batch needs at its peak.

    Args:
        weights: of the model.
        kv: of all requests, at full length.
        activations: between the layers, logits included.
        device: that the device has.
    """

    weights: int
    kv: int
    activations: int
    device: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv + self.activations

    @property
    def fits(self) -> bool:
        """Whether the device has as much; what the runtime itself takes is not in it."""
        return self.total <= self.device


@dataclass(frozen=True)
class Prediction:
    """What a batch of equal requests costs, all started at once.

    Args:
        prefill: the pass that reads the prompts and gives every first token.
        decode: a step in the middle of the answers.
        batch: requests.
        prompt_tokens: of each.
        new_tokens: of each answer.
        memory: at the end of the answers.
    """

    prefill: PassTime
    decode: PassTime
    batch: int
    prompt_tokens: int
    new_tokens: int
    memory: Memory

    @property
    def ttft(self) -> float:
        """Seconds to the first token of every request; nobody waits in a queue here."""
        return self.prefill.seconds

    @property
    def tpot(self) -> float:
        """Seconds for each token after the first."""
        return self.decode.seconds

    @property
    def e2e(self) -> float:
        """Seconds to the last token."""
        return self.ttft + (self.new_tokens - 1) * self.tpot

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens of the batch, over the time of its prefill."""
        return self.batch * self.prompt_tokens / self.ttft

    @property
    def decode_tokens_per_second(self) -> float:
        """Answer tokens of the batch, over the time of a step."""
        return self.batch / self.tpot


def predict(
    model: Shape,
    device: Device,
    *,
    prompt_tokens: int,
    new_tokens: int = 128,
    batch: int = 1,
    dtype: str = "bfloat16",
    weights: str | Format | None = None,
    kv: str | Format | None = None,
) -> Prediction:
    """What a batch of equal requests will cost: a limit with a data sheet, a prediction with a calibrated device.

    Args:
        model: a preset name, a Hub config, or a shape.
        device: a slug or a device.
        prompt_tokens: of each request.
        new_tokens: of each answer.
        batch: requests that start together.
        dtype: of the arithmetic and of the activations.
        weights: format of the weights; by default ``dtype``.
        kv: format of the cache; by default ``dtype``.

    Raises:
        ConfigError: a name is unknown, a size is below 1, or the request is longer than the model's context.
    """
    config = shape_of(model)
    if new_tokens < 1 or prompt_tokens + new_tokens > config.max_seq_len + 1:
        raise ConfigError(
            f"{prompt_tokens} prompt tokens and {new_tokens} new ones: {config.name} holds {config.max_seq_len}, "
            "and an answer has 1 token or more"
        )
    prefill, step = prefill_pass(prompt_tokens, batch), middle_step(prompt_tokens, new_tokens, batch)
    return Prediction(
        prefill=pass_time(config, prefill, device, dtype, weights=weights, kv=kv),
        decode=pass_time(config, step, device, dtype, weights=weights, kv=kv),
        batch=batch,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        memory=_memory(config, device, prompt_tokens, new_tokens, batch, dtype, weights, kv),
    )


def largest_batch(
    model: Shape,
    device: Device,
    *,
    tokens: int,
    dtype: str = "bfloat16",
    weights: str | Format | None = None,
    kv: str | Format | None = None,
    fraction: float = 1.0,
) -> int:
    """Requests of so many tokens that fit beside the weights; 0 where not even the weights do.

    Counts weights and cache. Activations of a step are small beside them; leave room with ``fraction``.

    Args:
        model: a preset name, a Hub config, or a shape.
        device: a slug or a device.
        tokens: of each request, prompt and answer.
        dtype: of the weights and the cache where they are not named.
        weights: format of the weights.
        kv: format of the cache.
        fraction: of the device's memory that may be used.

    Raises:
        ConfigError: a name is unknown, ``tokens`` is below 1, or the fraction is not above 0 and at most 1.
    """
    at_least(1, "tokens", tokens)
    if not 0 < fraction <= 1:
        raise ConfigError(f"fraction is {fraction}; it must be above 0 and at most 1")
    free = hardware_of(device).memory_bytes * fraction - weight_bytes(model, weights or dtype)
    return max(int(free // kv_bytes(model, tokens, kv or dtype)), 0)


def tokens_per_verification(acceptance: float, drafted: int) -> float:
    """Tokens that one pass of speculative decoding yields, expected: (1 - a^(g+1)) / (1 - a).

    The pass verifies ``drafted`` tokens at once, keeps those before the first that is rejected, and adds one of its
    own (arXiv:2211.17192, equation 1). What it gains is this, over the time of the drafts and of a pass of g + 1 rows.

    Args:
        acceptance: probability that a draft token is kept, each independently.
        drafted: tokens of a draft.

    Raises:
        ConfigError: the probability is not between 0 and 1, or ``drafted`` is negative.
    """
    if not 0 <= acceptance <= 1 or drafted < 0:
        raise ConfigError(
            f"acceptance is {acceptance} and drafted {drafted}; one lies between 0 and 1, the other is 0 or more"
        )
    return sum(acceptance**kept for kept in range(drafted + 1))


def _memory(
    model: Shape,
    device: Device,
    prompt_tokens: int,
    new_tokens: int,
    batch: int,
    dtype: str,
    weights: str | Format | None,
    kv: str | Format | None,
) -> Memory:
    config = shape_of(model)
    return Memory(
        weights=weight_bytes(config, weights or dtype),
        kv=batch * kv_bytes(config, prompt_tokens + new_tokens - 1, kv or dtype),
        activations=activation_bytes(config, prefill_pass(prompt_tokens, batch), dtype),
        device=hardware_of(device).memory_bytes,
    )
