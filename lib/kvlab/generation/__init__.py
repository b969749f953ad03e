"""Generation: prefill, decode, sampling, and text as it arrives."""

from kvlab.generation.beam import Beam, beam_search
from kvlab.generation.compiled import CompiledDecode, compile_step, package
from kvlab.generation.fixed import FixedDecode
from kvlab.generation.generate import Generation, Timing, TokenStep, decode, generate, prefill
from kvlab.generation.sampling import Sampler, Sampling, probabilities
from kvlab.generation.text import TextStream

__all__ = [
    "Beam",
    "CompiledDecode",
    "FixedDecode",
    "Generation",
    "Sampler",
    "Sampling",
    "TextStream",
    "Timing",
    "TokenStep",
    "beam_search",
    "compile_step",
    "decode",
    "generate",
    "package",
    "prefill",
    "probabilities",
]
