"""What a plan is asked for: a model on cards, and what its users were promised."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvlab.config import ModelConfig, Shape, shape_of
from kvlab.cost import Device, Hardware, Link, format_of, hardware_of
from kvlab.errors import ConfigError, at_least

#: Arithmetic, the first of which a card has hardware for is taken.
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What users ask for, how often, and what they were promised.

    Args:
        prompt_tokens: of each request.
        output_tokens: of each answer.
        rate: requests per second, of all users together; they arrive as a Poisson process.
        ttft: the longest time to first token that was promised, in seconds; None for no promise.
        tpot: the longest time per output token after the first; None for no promise.
        attainment: part of the requests that must keep the promises.

    Raises:
        ConfigError: a number is impossible.
    """

    prompt_tokens: int
    output_tokens: int
    rate: float
    ttft: float | None = None
    tpot: float | None = None
    attainment: float = 0.99

    def __post_init__(self) -> None:
        at_least(1, "prompt_tokens", self.prompt_tokens)
        at_least(1, "output_tokens", self.output_tokens)
        if not 0 < self.rate < float("inf"):
            raise ConfigError(f"rate is {self.rate} requests per second; it must be above 0")
        for name, promised in (("TTFT", self.ttft), ("TPOT", self.tpot)):
            if promised is not None and not 0 < promised < float("inf"):
                raise ConfigError(f"the promised {name} is {promised} s; it must be above 0, or be left out")
        if not 0 < self.attainment <= 1:
            raise ConfigError(f"attainment is {self.attainment}; it must be above 0 and at most 1")

    @property
    def tokens(self) -> int:
        """Of a whole request, prompt and answer."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A model, the cards it may have, and how it is stored on them.

    Args:
        model: a preset name, a Hub config, or a shape.
        hardware: a slug or a device, each of the cards.
        gpus: cards there are in all; None for as many as it takes.
        gpus_per_node: cards of one machine, joined by their own links.
        weights: format of the weights; by default that of the arithmetic.
        kv: format of the KV cache; by default that of the arithmetic.
        max_model_len: tokens of the longest request that the server shall take; None for what the goal needs.
        utilization: part of a card's memory that the server may claim (``--gpu-memory-utilization``).
        efficiency: what a real server reaches of the peaks of the data sheet, compute and bandwidth alike. 1 makes all
            times limits; a measured share makes them an estimate.
        network: between machines; by default one card of 400 Gbit/s.
        price_per_hour: of one card, in any currency; None for no price.

    Raises:
        ConfigError: a name is unknown, or a number is impossible.
    """

    model: Shape
    hardware: Device
    gpus: int | None = None
    gpus_per_node: int = 8
    weights: str | None = None
    kv: str | None = None
    max_model_len: int | None = None
    utilization: float = 0.92
    efficiency: float = 1.0
    network: Link = field(default=Link("400 Gbit/s network", 50e9, 20e-6))
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        shape_of(self.model)
        hardware_of(self.hardware)
        at_least(1, "gpus_per_node", self.gpus_per_node)
        if self.gpus is not None:
            at_least(1, "gpus", self.gpus)
        for form in (self.weights, self.kv):
            format_of(form or "bfloat16")
        for name in ("utilization", "efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0 and at most 1")
        if self.price_per_hour is not None and not self.price_per_hour >= 0:
            raise ConfigError(f"price_per_hour is {self.price_per_hour}; it must be 0 or more, or be left out")
        limit = self.config.max_seq_len
        if self.max_model_len is not None and not 1 <= self.max_model_len <= limit:
            raise ConfigError(f"max_model_len is {self.max_model_len}; {self.config.name} has a context of {limit}")

    @property
    def config(self) -> ModelConfig:
        """The shape of the model."""
        return shape_of(self.model)

    @property
    def card(self) -> Hardware:
        """The card as its data sheet has it."""
        return hardware_of(self.hardware)

    @property
    def slowed(self) -> Hardware:
        """The card with the rates that are counted with: its peaks times the efficiency."""
        card = self.card
        flops = {dtype: peak * self.efficiency for dtype, peak in card.flops.items()}
        return replace(card, bandwidth=card.bandwidth * self.efficiency, flops=flops)

    @property
    def dtype(self) -> str:
        """Of the arithmetic: bfloat16 where the card has hardware for it, else float16, else float32."""
        return next((dtype for dtype in _DTYPES if dtype in self.card.flops), _DTYPES[0])

    @property
    def weight_format(self) -> str:
        """Of the weights."""
        return self.weights or self.dtype

    @property
    def kv_format(self) -> str:
        """Of the cache."""
        return self.kv or self.dtype
