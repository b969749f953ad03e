"""The command line: ``kvlab generate``, ``kvlab calibrate``, ``kvlab bench``, ``kvlab compile``, ``kvlab simulate``."""

from kvlab.cli import compile, generate, measure, simulate
from kvlab.cli.app import app, main

__all__ = ["app", "compile", "generate", "main", "measure", "simulate"]
