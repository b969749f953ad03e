"""The command line: ``kvlab generate``, ``kvlab calibrate``, ``kvlab bench``."""

from kvlab.cli import generate, measure
from kvlab.cli.app import app, main

__all__ = ["app", "generate", "main", "measure"]
