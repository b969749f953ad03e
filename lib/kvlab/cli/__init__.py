"""The command line: ``kvlab generate``, ``kvlab calibrate``, ``kvlab bench``, ``kvlab compile``, ``kvlab simulate``,
``kvlab plan``, ``kvlab diagnose``, ``kvlab loadtest``."""

from kvlab.cli import compile, diagnose, generate, loadtest, measure, plan, simulate
from kvlab.cli.app import app, main

__all__ = ["app", "compile", "diagnose", "generate", "loadtest", "main", "measure", "plan", "simulate"]
