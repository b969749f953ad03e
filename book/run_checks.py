"""Everything that is checked, one step after the other, and one summary at the end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque

from kvbook import browser
from kvbook.layout import ROOT

#: Several processes share the tests by file. More threads in each of them would only wait for each other.
SHARED = ["-n", "auto", "--maxprocesses=4", "--dist=loadfile"]

#: What each step is called, its command, and what it is told by its environment.
STEPS: tuple[tuple[str, list[str], dict[str, str]], ...] = (
    ("lint", ["make", "lint"], {}),
    ("book", [sys.executable, "book/build_book.py"], {}),
    ("tests", [sys.executable, "-m", "pytest", "--durations=8", *SHARED], {"OMP_NUM_THREADS": "1"}),
)

LAST_LINES = 60  # of a step that failed: they are repeated at the end, where a log that was cut still has them


def run(name: str, command: list[str], environment: dict[str, str]) -> tuple[str, bool, float, deque[str]]:
    print(f"\n=== {name}", flush=True)
    start, last = time.perf_counter(), deque[str](maxlen=LAST_LINES)
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as step:
        assert step.stdout is not None
        for line in step.stdout:
            print(line, end="", flush=True)
            last.append(line)
    if step.returncode < 0:
        print(f"{name} was ended by signal {-step.returncode}")
    return name, step.returncode == 0, time.perf_counter() - start, last


def main() -> int:
    environment = {**os.environ, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
    results = []
    for name, command, more in STEPS:
        results.append(run(name, command, environment | more))
        if name == "book":
            environment["KVLAB_BOOK_IS_BUILT"] = "yes" if results[-1][1] else "failed"
    for name, good, _, last in results:
        if not good:
            print(f"\n=== {name} failed; its last lines again")
            print(*(f"{name} | {line.rstrip()}" for line in last), sep="\n")
    print("\n=== summary")
    for name, good, seconds, _ in results:
        print(f"{'ok  ' if good else 'FAIL'} {name:<8} {seconds:6.0f} s")
    if environment.get("KVLAB_BOOK_IS_BUILT") == "failed":
        print("not run: the checks of the built pages; the book was not built")
    if browser.missing() and not browser.required():
        print(f"not run: the pages in a browser ({', '.join(browser.missing())} not found); {browser.INSTALL}")
    return int(not all(good for _, good, *_ in results))


if __name__ == "__main__":
    sys.exit(main())
