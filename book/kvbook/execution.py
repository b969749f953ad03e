"""How notebooks are executed: in the build's own mode, from a cache that knows the library."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.metadata import version
from pathlib import Path

import nbformat
from jupyter_cache import get_cache
from nbformat import NotebookNode
from sphinx.application import Sphinx
from sphinx.config import Config

from kvbook.layout import BUILD, ROOT
from kvlab.book.stage import BUILD_VARIABLE

# What a cell's output depends on beside its code: the packages it may import, the library, the data.
PACKAGES = (
    "torch",
    "numpy",
    "matplotlib",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "ipywidgets",
    "ipykernel",
)
IGNORED = {"statements.csv"}
# The key of the last build, for whoever wants its outputs.
KEY_NOTE = BUILD / "outputs_key.txt"


def outputs_key(root: Path = ROOT) -> str:
    """A hash of lib/, data/ and the versions: outputs of another key are stale."""
    digest = hashlib.sha256(platform.python_version().encode())
    for name in PACKAGES:
        digest.update(f"{name}=={version(name)}\n".encode())
    for folder in ("lib", "data"):
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.name not in IGNORED:
                digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def cache_path(key: str) -> Path:
    """Where the outputs of this key are kept."""
    return BUILD / ".jupyter_cache" / key


def executed(page: str, key: str) -> NotebookNode:
    """The executed notebook of a page, from the cache: the builder writes one without outputs when it ran earlier.

    Raises:
        FileNotFoundError: the page was not built.
        KeyError: its notebook failed, or was never executed with this library and these data.
    """
    source = nbformat.read(BUILD / "jupyter_execute" / f"{page}.ipynb", as_version=4)
    merged: NotebookNode = get_cache(str(cache_path(key))).merge_match_into_notebook(source)[1]
    return merged


def connect(app: Sphinx) -> None:
    app.add_config_value("kvbook_outputs_key", "", "env")
    app.connect("config-inited", configure, priority=100)


def configure(app: Sphinx, config: Config) -> None:
    os.environ[BUILD_VARIABLE] = "1"
    config.kvbook_outputs_key = outputs_key()
    config.nb_execution_cache_path = str(cache_path(config.kvbook_outputs_key))
    config.suppress_warnings = []
    BUILD.mkdir(exist_ok=True)
    KEY_NOTE.write_text(config.kvbook_outputs_key)
