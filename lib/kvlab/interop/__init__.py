"""kvlab's parts inside other people's programs. ``kvlab.interop.transformers`` has the caches, as drop-ins."""
