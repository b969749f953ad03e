"""What a planner has to know about vLLM 0.32: defaults, names of formats, and what it keeps for itself.

Flags and defaults are those of ``vllm serve --help=all`` of that release, and of what it resolves them to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from kvlab.cost import GIB, Hardware
from kvlab.errors import ConfigError

T = TypeVar("T")

#: Tokens of a block of the KV pool.
BLOCK_SIZE = 16

#: How each format of weights gets into a server: the value of ``--quantization``, or None where nothing is to be said.
#: The flag names the format of a checkpoint, and is left out because the checkpoint says so itself. Only the online
#: methods make something narrower of a 16-bit checkpoint while they load it; int4 is none of them.
_QUANTIZATION = {
    "bfloat16": None,
    "float16": None,
    "float32": None,
    "fp8": "fp8_per_tensor",
    "int8": "int8_per_channel_weight_only",
    "int4": None,
}

#: Presets whose published checkpoint has such weights already.
PUBLISHED = {"deepseek-v3": "fp8"}

#: Names of ``--kv-cache-dtype``; ``auto`` is the model's own.
_KV_DTYPES = {
    "bfloat16": "auto",
    "float16": "auto",
    "float32": "auto",
    "fp8": "fp8",
    "int8": "int8_per_token_head",
    "int4": "int4_per_token_head",
}


@dataclass(frozen=True)
class Flag:
    """A flag of ``vllm serve`` with its reason.

    Args:
        name: with its dashes.
        value: what is given.
        why: where the value comes from, in one line.
    """

    name: str
    value: str
    why: str


def quantization(weights: str) -> str | None:
    """The value of ``--quantization`` for a 16-bit checkpoint, or None where the flag is left out.

    Args:
        weights: a name of :data:`kvlab.cost.FORMATS`.

    Raises:
        ConfigError: this release has no such format.
    """
    return _known(_QUANTIZATION, weights, "weights")


def kv_cache_dtype(kv: str) -> str:
    """The value of ``--kv-cache-dtype``.

    Args:
        kv: a name of :data:`kvlab.cost.FORMATS`.

    Raises:
        ConfigError: this release has no such format.
    """
    return _known(_KV_DTYPES, kv, "a KV cache")


def _known(names: Mapping[str, T], form: str, what: str) -> T:
    if form not in names:
        raise ConfigError(f"vLLM 0.32 has no {form} for {what}; choose one of {', '.join(names)}")
    return names[form]


def default_token_budget(card: Hardware) -> int:
    """Tokens of a step of the API server where ``--max-num-batched-tokens`` is not given.

    Args:
        card: that it runs on.
    """
    if card.memory_bytes >= 160 * GIB:
        return 16_384
    return 8_192 if _large(card) else 2_048


def default_max_num_seqs(card: Hardware) -> int:
    """Requests that run at once where ``--max-num-seqs`` is not given.

    Args:
        card: that it runs on.
    """
    return 1024 if _large(card) else 256


def non_torch_bytes(card: Hardware, tensor_parallel: int) -> int:
    """What the driver, the kernels and the buffers of NCCL take on a card beside the tensors; profiled, not derived.

    On large cards 1.79 GiB for one and 3.58 for two that share a model (the log in vllm PR 10511, H100); on cards of
    24 GiB 0.20 (PR 14447, RTX 3090). CUDA graphs come on top, from what the server leaves unclaimed.

    Args:
        card: each of them.
        tensor_parallel: cards that share the model.
    """
    if not _large(card) and card.memory_bytes < 40 * GIB:
        return round(0.2 * GIB)
    return round((1.79 if tensor_parallel == 1 else 3.58) * GIB)


def serves(card: Hardware) -> bool:
    """Whether ``vllm serve`` runs on such a card with these flags: CUDA and ROCm cards, neither Apple nor a bare CPU.

    Args:
        card: that is asked about.
    """
    return card.kind.startswith(("datacenter", "consumer"))


def _large(card: Hardware) -> bool:
    """70 GiB or more and not an A100, as vLLM draws the line."""
    return card.memory_bytes >= 70 * GIB and not card.name.startswith("a100")
