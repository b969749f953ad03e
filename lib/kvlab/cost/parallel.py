"""A model that several devices share: what one of them holds, and what it costs them to agree.

Tensor parallelism (Megatron-LM, arXiv:1909.08053) cuts every matrix: each device has its share of the heads and of the
width of the MLPs, and two all-reduces a layer put the partial sums together. Pipeline parallelism (GPipe,
arXiv:1811.06965) gives each device some of the layers, and hands the residual stream on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvlab.config import ModelConfig, Shape, shape_of
from kvlab.cost.flops import Row
from kvlab.cost.formats import Format, format_of
from kvlab.cost.hardware import Device, hardware_of
from kvlab.cost.memory import kv_elements_of_a_layer
from kvlab.cost.steps import StepTimes
from kvlab.errors import ConfigError, at_least

#: Seconds that a small all-reduce takes however few bytes it moves. No data sheet has it; it is an assumption. Kernels
#: made for small messages need a few microseconds inside a machine, NCCL's rings 10 to 20. It is what limits tensor
#: parallelism in decode: 160 of them make 1.3 ms of a step of Llama-3-70B.
ALL_REDUCE_LATENCY_S = 8e-6


@dataclass(frozen=True)
class Link:
    """What joins devices.

    Args:
        title: what it is.
        bytes_per_second: in one direction; vendors add both.
        latency_s: of one exchange, beside its bytes.

    Raises:
        ConfigError: it moves nothing, or the latency is negative.
    """

    title: str
    bytes_per_second: float
    latency_s: float = ALL_REDUCE_LATENCY_S

    def __post_init__(self) -> None:
        if not (self.bytes_per_second > 0 and self.latency_s >= 0):
            raise ConfigError(
                f"{self.title} moves {self.bytes_per_second} bytes a second with a latency of {self.latency_s} s; "
                "the first must be above 0, the second 0 or more"
            )


#: Links inside one machine, by the slug of the card: half of what the data sheet says, which adds both directions.
#: NVLink 2, 3, 4, 5: 300, 600, 900, 1,800 GB/s; MI300X: 7 Infinity Fabric links of 128 GB/s; PCIe 3, 4, 5 x16: 32, 64,
#: 128 GB/s. Cards that are sold with and without NVLink are taken with the one that their preset names.
_LINKS = {
    "v100-sxm": Link("NVLink 2", 150e9),
    "a100-40gb": Link("NVLink 3", 300e9),
    "a100-80gb": Link("NVLink 3", 300e9),
    "h100-sxm": Link("NVLink 4", 450e9),
    "h200-sxm": Link("NVLink 4", 450e9),
    "b200-sxm": Link("NVLink 5", 900e9),
    "mi300x": Link("Infinity Fabric", 448e9),
    "t4": Link("PCIe 3 x16", 16e9),
    "h100-pcie": Link("PCIe 5 x16", 64e9),
    "rtx-5090": Link("PCIe 5 x16", 64e9),
}


def link_of(device: Device) -> Link:
    """What joins the cards of one machine; PCIe 4 where nothing else is known.

    Args:
        device: a slug or a device.

    Raises:
        ConfigError: no preset has this name.
    """
    return _LINKS.get(hardware_of(device).name, Link("PCIe 4 x16", 32e9))


def shard(model: Shape, tensor_parallel: int = 1, pipeline_parallel: int = 1) -> ModelConfig:
    """What one device computes, as the shape of a smaller model: all of ``kvlab.cost`` then counts for one device.

    Of a pipeline it is the last stage, which holds the most: the LM head, a share of the layers rounded up, and no
    dense layers of a model with experts where it can be without. KV heads are copied where there are fewer of them than
    devices, and a latent (MLA) always. The vocabulary is padded until it divides.

    Args:
        model: a preset name, a Hub config, or a shape.
        tensor_parallel: devices that share every matrix.
        pipeline_parallel: stages that share the layers.

    Raises:
        ConfigError: heads or widths do not divide, or there are more stages than layers.
    """
    config = shape_of(model)
    ranks, stages = at_least(1, "tensor_parallel", tensor_parallel), at_least(1, "pipeline_parallel", pipeline_parallel)
    if stages > config.n_layer:
        raise ConfigError(f"pipeline_parallel is {stages}; {config.name} has {config.n_layer} layers to share")
    kv_elements_of_a_layer(config, ranks)  # which checks the KV heads
    layers = -(-config.n_layer // stages)
    moe = config.moe
    if moe is not None:
        kept = max(moe.n_dense_layers - (config.n_layer - layers), 0)
        width = _share(config, "moe.intermediate_size", moe.intermediate_size, ranks)
        moe = replace(moe, intermediate_size=width, n_dense_layers=kept)
    return config.with_(
        n_head=_share(config, "n_head", config.n_head, ranks),
        n_kv_head=max(config.n_kv_head // ranks, 1),
        intermediate_size=_share(config, "intermediate_size", config.intermediate_size, ranks),
        vocab_size=-(-config.vocab_size // ranks),
        n_layer=layers,
        windows=config.windows[-layers:],
        moe=moe,
    )


def _share(config: ModelConfig, name: str, value: int, ranks: int) -> int:
    if value % ranks:
        raise ConfigError(f"tensor_parallel is {ranks}; {name} of {config.name} is {value}, which it does not divide")
    return value // ranks


def all_reduce_seconds(
    model: Shape, tokens: int, tensor_parallel: int, link: Link, dtype: str | Format = "bfloat16"
) -> float:
    """Seconds of a pass in which devices add up their partial sums: twice a layer, the residual stream of every token.

    A ring sends ``2 (n - 1) / n`` of the bytes over each link (Patarasuk and Yuan, 2009). Nothing is overlapped with
    the arithmetic, and gathering the logits is left out.

    Args:
        model: a preset name, a Hub config, or a shape.
        tokens: of the pass.
        tensor_parallel: devices; a single one has nobody to agree with.
        link: between them.
        dtype: of the activations.

    Raises:
        ConfigError: the model or the dtype is unknown.
    """
    if tensor_parallel == 1:
        return 0.0
    config = shape_of(model)
    moved = tokens * config.hidden_size * format_of(dtype).bytes_per_element
    ring = 2 * (tensor_parallel - 1) / tensor_parallel * moved / link.bytes_per_second
    return 2 * config.n_layer * (ring + link.latency_s)


class ParallelTimes:
    """How long the steps of devices take that share a model; of one device alone those of :class:`StepTimes`.

    A pipeline takes a step stage by stage, so it is no faster for the one who waits for it; that several steps are
    under way at once shows in how many of them it takes, not here.

    Args:
        model: a preset name, a Hub config, or a shape.
        device: a slug or a device, each of them.
        dtype: of the arithmetic and of the activations.
        weights: format of the weights; by default ``dtype``.
        kv: format of the cache; by default ``dtype``.
        tensor_parallel: devices that share every matrix.
        pipeline_parallel: stages that share the layers.
        link: inside a stage; by default that of the device.
        network: between stages.

    Raises:
        ConfigError: a name is unknown, or the model cannot be shared so.
    """

    def __init__(
        self,
        model: Shape,
        device: Device,
        dtype: str = "bfloat16",
        *,
        weights: str | Format | None = None,
        kv: str | Format | None = None,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        link: Link | None = None,
        network: Link,
    ) -> None:
        self._config, self._ranks, self._hops = shape_of(model), tensor_parallel, pipeline_parallel - 1
        self._link, self._network, self._dtype = link or link_of(device), network, dtype
        self._width = self._config.hidden_size * format_of(dtype).bytes_per_element
        self._times = StepTimes(shard(model, tensor_parallel), device, dtype, weights=weights, kv=kv)

    def seconds(self, decodes: int, held: int, prompts: Sequence[Row] = ()) -> float:
        """The time of one step, from its first stage to its last.

        Args:
            decodes: rows of one token.
            held: tokens that their caches hold together, before the step.
            prompts: the other rows.

        Raises:
            ConfigError: there is no row, or a number is impossible.
        """
        tokens = decodes + sum(row.new for row in prompts)
        agree = all_reduce_seconds(self._config, tokens, self._ranks, self._link, self._dtype)
        hand_on = self._hops * (tokens * self._width / self._network.bytes_per_second + self._network.latency_s)
        return self._times.seconds(decodes, held, prompts) + agree + hand_on
