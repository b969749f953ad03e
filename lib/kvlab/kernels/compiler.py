"""Compile the C++ sources for this machine, once, into one library."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from kvlab.errors import DeviceError
from kvlab.store import cache_folder, publish, staging

SOURCE = Path(__file__).with_name("linear.cpp")
SOURCES = (SOURCE, SOURCE.with_name("attention.cpp"))
HEADERS = (SOURCE.with_name("tiles.h"), SOURCE.with_name("vectors.h"))

#: Not -ffast-math: it would stop the whole process from having subnormal numbers. Sums are split by hand instead.
FLAGS = (
    "-O3", "-march=native", "-mprefer-vector-width=512", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
    "-fopenmp", "-std=c++20", "-fPIC", "-DAT_PARALLEL_OPENMP=1",
)  # fmt: skip


def instruction_set() -> str:
    """The processor's instruction set, as torch sees it, in one word: ``x86_64-AVX512``."""
    return f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability().replace(' ', '')}"


def library() -> Path:
    """Where the compiled library is, or will be: one for each state of the sources, torch, instruction set, flags."""
    sources = [path.read_text("utf8") for path in (*SOURCES, *HEADERS)]
    key = "\n".join((*sources, torch.__version__, instruction_set(), _processor(), *FLAGS))
    return cache_folder() / "kernels" / f"kernels-{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"


def built() -> bool:
    """Whether :func:`build` has been here before."""
    return library().exists()


def require_compiler() -> str:
    """The C++ compiler: ``CXX``, or g++, or clang++.

    Raises:
        DeviceError: there is none.
    """
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise DeviceError(
        "no C++ compiler was found (CXX, g++, clang++); install one, for example with: apt install g++. "
        "Without it kvlab runs by torch's operators, only slower"
    )


def build() -> Path:
    """Compile the kernels, unless that has been done; ten seconds.

    Raises:
        DeviceError: there is no compiler, or it fails.
    """
    target = library()
    if target.exists():
        return target
    compiler, root = require_compiler(), Path(torch.__file__).parent
    with staging(target) as work:
        made = work / target.name
        includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
        parts = [work / f"{source.stem}.o" for source in SOURCES]
        commands = [(*FLAGS, *includes, "-c", str(s), "-o", str(o)) for s, o in zip(SOURCES, parts, strict=True)]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda command: _run(compiler, *command), commands))
        # Linked without -fopenmp: the threads shall be torch's own, not those of a second OpenMP library.
        where = [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}"]
        _run(compiler, "-shared", *map(str, parts), "-o", str(made), *where, "-ltorch_cpu", "-lc10")
        return publish(made, target)


def _run(compiler: str, *arguments: str) -> None:
    ran = subprocess.run([compiler, *arguments], capture_output=True, text=True)
    if ran.returncode:
        reason = next((line for line in ran.stderr.splitlines() if "error" in line), ran.stderr[-300:])
        raise DeviceError(f"{compiler} cannot compile the kernels: {reason.strip()}")


def _processor() -> str:
    """Flags of the processor: what ``-march=native`` depends on, where the cache folder is shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
