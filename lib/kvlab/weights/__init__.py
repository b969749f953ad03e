"""Where weights come from: the bundled model, folders, the Hub, GGUF files."""

from kvlab.weights.folder import read_config, read_model, write_folder
from kvlab.weights.loading import WEIGHTS, LoadedModel, Weights, load
from kvlab.weights.tokenizer import Message, Tokenizer, read_tokenizer

__all__ = [
    "WEIGHTS", "LoadedModel", "Message", "Tokenizer", "Weights", "load", "read_config", "read_model", "read_tokenizer",
    "write_folder",
]  # fmt: skip
