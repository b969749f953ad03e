"""The shape of a decoder: what a model is before it has weights."""

from kvlab.config.parts import MLA, MoE, RopeScaling
from kvlab.config.presets import PresetSource, preset_names, preset_source
from kvlab.config.shape import RUNNABLE_FAMILIES, ModelConfig, Shape, shape_of

__all__ = [
    "MLA",
    "RUNNABLE_FAMILIES",
    "MoE",
    "ModelConfig",
    "PresetSource",
    "RopeScaling",
    "Shape",
    "preset_names",
    "preset_source",
    "shape_of",
]
