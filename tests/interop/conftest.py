"""Shapes of the drop-in caches are checked at run time, as those of the library are."""

from __future__ import annotations

from jaxtyping import install_import_hook

install_import_hook("kvlab.interop", "beartype.beartype")
