"""The decoder, built from its parts."""

from kvlab.model.attention import Attention, attend
from kvlab.model.gpt import GPT, Block
from kvlab.model.layers import MLP, GatedMLP, RMSNorm
from kvlab.rope import Rope, rotate

__all__ = ["GPT", "MLP", "Attention", "Block", "GatedMLP", "RMSNorm", "Rope", "attend", "rotate"]
