"""``python -m kvlab`` is the console script ``kvlab``."""

from kvlab.cli import main

main()
