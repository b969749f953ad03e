"""Everything that is checked, one step after the other, and one summary at the end."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from kvbook import browser
from kvbook.layout import ROOT

STEPS = (
    ("lint", ["make", "lint"]),
    ("book", [sys.executable, "book/build_book.py"]),
    ("tests", [sys.executable, "-m", "pytest", "--durations=8"]),
)


def run(name: str, command: list[str], environment: dict[str, str]) -> tuple[str, bool, float]:
    print(f"\n=== {name}", flush=True)
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL)
    if done.returncode < 0:
        print(f"{name} was ended by signal {-done.returncode}")
    return name, done.returncode == 0, time.perf_counter() - start


def main() -> int:
    # A terminal that shows no colour reads better without their codes.
    environment = dict(os.environ) if sys.stdout.isatty() else {**os.environ, "NO_COLOR": "1"}
    results = []
    for name, command in STEPS:
        results.append(run(name, command, environment))
        if name == "book":
            environment["KVLAB_BOOK_IS_BUILT"] = "yes" if results[-1][1] else "failed"
    print("\n=== summary")
    for name, good, seconds in results:
        print(f"{'ok  ' if good else 'FAIL'} {name:<8} {seconds:6.0f} s")
    if browser.missing() and not browser.required():
        print(f"not run: the pages in a browser ({', '.join(browser.missing())} not found); {browser.INSTALL}")
    return int(not all(good for _, good, _ in results))


if __name__ == "__main__":
    sys.exit(main())
