"""Generation: prefill, decode, sampling, speculation, and text as it arrives."""

from kvlab.generation.beam import Beam, beam_search
from kvlab.generation.compiled import CompiledDecode, compile_step, package
from kvlab.generation.compiled_paged import CompiledPagedStep, compile_paged_step, paged_package
from kvlab.generation.endless import endless
from kvlab.generation.fixed import FixedDecode
from kvlab.generation.generate import Generation, Timing, TokenStep, decode, generate, prefill
from kvlab.generation.sampling import Sampler, Sampling, probabilities
from kvlab.generation.speculative import (
    Draft,
    Drafter,
    ModelDrafter,
    NGramDrafter,
    Speculation,
    accept,
    speculate,
    truncated,
)
from kvlab.generation.text import TextStream

__all__ = [
    "Beam",
    "CompiledDecode",
    "CompiledPagedStep",
    "Draft",
    "Drafter",
    "FixedDecode",
    "Generation",
    "ModelDrafter",
    "NGramDrafter",
    "Sampler",
    "Sampling",
    "Speculation",
    "TextStream",
    "Timing",
    "TokenStep",
    "accept",
    "beam_search",
    "compile_paged_step",
    "compile_step",
    "decode",
    "endless",
    "generate",
    "package",
    "paged_package",
    "prefill",
    "probabilities",
    "speculate",
    "truncated",
]
