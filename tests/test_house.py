"""The house itself: floors, light imports, one clock, one place for devices."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[1] / "lib" / "kvlab"
FLOORS = {
    "errors": 0, "resources": 0, "provenance": 0, "config": 0, "timing": 0, "cost": 0, "devices": 0, "store": 0,
    "packing": 1, "kernels": 1, "rope": 1, "cache": 1, "model": 2, "quantize": 3, "weights": 4, "generation": 4,
    "evaluate": 5, "serving": 5, "measure": 6, "operate": 6, "interop": 6, "book": 7, "cli": 8, "__main__": 8,
}  # fmt: skip


def room(module: str) -> str:
    return module.split(".")[1] if module.count(".") else "__init__"


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path} imports by dots"
            yield from (f"kvlab.{a.name}" for a in node.names if node.module == "kvlab" and a.name in FLOORS)
            yield node.module


def test_modules_import_from_their_own_floor_or_below() -> None:
    for path in LIBRARY.rglob("*.py"):
        here = path.relative_to(LIBRARY).parts[0].removesuffix(".py")
        if here == "__init__":
            continue
        for module in imports(path):
            if module.startswith("kvlab."):
                assert FLOORS[room(module)] <= FLOORS[here], f"{path} imports {module}"


def test_rooms_do_not_import_each_other_in_a_circle() -> None:
    needs: dict[str, set[str]] = {}
    for path in LIBRARY.rglob("*.py"):
        here = path.relative_to(LIBRARY).parts[0].removesuffix(".py")
        found = {room(m) for m in imports(path) if m.startswith("kvlab.")} - {here}
        needs.setdefault(here, set()).update(found)
    needs.pop("__init__")
    while free := [name for name, others in needs.items() if not others & needs.keys()]:
        for name in free:
            del needs[name]
    assert not needs


@pytest.mark.parametrize("pattern", [r"\btime\.(time|perf_counter|monotonic)\(", r"\bperf_counter\b"])
def test_only_timing_reads_the_clock(pattern: str) -> None:
    readers = {p.name for p in LIBRARY.rglob("*.py") if re.search(pattern, p.read_text("utf8"))}
    assert readers <= {"timing.py"}


def test_nothing_names_a_device_or_unpickles() -> None:
    for path in LIBRARY.rglob("*.py"):
        text = path.read_text("utf8")
        assert not re.search(r"\.cuda\(|torch\.load\(|import pickle", text), path


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import kvlab, kvlab.config, kvlab.timing, kvlab.cli", {"torch", "transformers", "numpy", "huggingface_hub"}),
        (
            "import kvlab.cost; kvlab.cost.predict('llama-3-8b', 'h100-sxm', prompt_tokens=9)",
            {"torch", "transformers", "numpy", "matplotlib"},
        ),
        ("import kvlab.weights, kvlab.generation", {"transformers", "gguf", "matplotlib", "huggingface_hub"}),
    ],
)
def test_imports_stay_light(statement: str, unwanted: set[str]) -> None:
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not unwanted & set(done.stdout.split())
