"""The cost model: numbers in, numbers out, no tensors.

Every function takes a model as a preset name, a parsed Hub ``config.json`` or a
:class:`~kvlab.config.ModelConfig`, and a device as a slug or a :class:`Hardware`.
"""

from kvlab.cost.activations import activation_bytes
from kvlab.cost.flops import (
    Flops,
    Row,
    chunks,
    decode_pass,
    flops,
    middle_step,
    prefill_pass,
    tokens_read_again,
    visible_pairs,
)
from kvlab.cost.formats import FORMATS, Format, format_of
from kvlab.cost.hardware import Calibration, Curve, Device, Hardware, Kernels, hardware_names, hardware_of
from kvlab.cost.memory import (
    GB,
    GIB,
    experts_touched,
    kv_bytes,
    kv_bytes_per_token,
    kv_elements_per_token,
    logits_bytes,
    weight_bytes,
    weight_bytes_read,
)
from kvlab.cost.operators import Operator, cache_bytes_read, operators
from kvlab.cost.parallel import Link, ParallelTimes, all_reduce_seconds, link_of, shard
from kvlab.cost.parameters import Parameters, parameters
from kvlab.cost.pool import Pool, clamp_max_tokens, pool_bytes
from kvlab.cost.predict import Memory, Prediction, largest_batch, predict, tokens_per_verification
from kvlab.cost.roofline import (
    PassTime,
    Timed,
    critical_batch,
    mbu,
    mfu,
    pass_time,
    step_bytes,
    weight_read_seconds,
)
from kvlab.cost.steps import StepCurves, StepTimes, transfer_seconds

__all__ = [
    "FORMATS", "GB", "GIB", "Calibration", "Curve", "Device", "Flops", "Format", "Hardware", "Kernels", "Link",
    "Memory", "Operator", "ParallelTimes", "Parameters", "PassTime", "Pool", "Prediction", "Row", "StepCurves",
    "StepTimes", "Timed", "activation_bytes", "all_reduce_seconds", "cache_bytes_read", "chunks", "clamp_max_tokens",
    "critical_batch", "decode_pass", "experts_touched", "flops", "format_of", "hardware_names", "hardware_of",
    "kv_bytes", "kv_bytes_per_token", "kv_elements_per_token", "largest_batch", "link_of", "logits_bytes", "mbu", "mfu",
    "middle_step", "operators", "parameters", "pass_time", "pool_bytes", "predict", "prefill_pass", "shard",
    "step_bytes", "tokens_per_verification", "tokens_read_again", "transfer_seconds", "visible_pairs", "weight_bytes",
    "weight_bytes_read", "weight_read_seconds",
]  # fmt: skip
