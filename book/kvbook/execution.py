"""How notebooks are executed: in the build's own mode, from a cache that knows the library."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.metadata import version
from pathlib import Path

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


def connect(app: Sphinx) -> None:
    app.add_config_value("kvbook_outputs_key", "", "env")
    app.connect("config-inited", configure, priority=100)


def configure(app: Sphinx, config: Config) -> None:
    os.environ[BUILD_VARIABLE] = "1"
    config.kvbook_outputs_key = outputs_key()
    config.nb_execution_cache_path = str(BUILD / ".jupyter_cache" / config.kvbook_outputs_key)
    config.suppress_warnings = []
