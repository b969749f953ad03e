"""Build the book: without options the whole, with `--page NAME` one chapter and the reference pages."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from kvbook.layout import BUILD, ROOT, SITE


def jupyter_book(toc: Path, strict: bool) -> int:
    """Run Jupyter Book over chapters/; strict makes a warning an error."""
    command = [
        sys.executable,
        "-c",
        "from jupyter_book.cli.main import main; main()",
        "build",
        "chapters",
        "--path-output",
        ".",
    ]
    command += ["--config", "_config.yml", "--toc", str(toc), *(["-W", "--keep-going"] if strict else [])]
    return subprocess.run(command, cwd=ROOT).returncode


def only(page: str) -> Path:
    """A table of contents with one chapter and the reference pages, for a writer in a hurry."""
    toc: dict[str, Any] = yaml.safe_load((ROOT / "_toc.yml").read_text("utf8"))
    reference = next(part for part in toc["parts"] if part["caption"] == "Reference")
    # The myths lead into every chapter: in a draft without the chapters they would only warn.
    reference["chapters"] = [item for item in reference["chapters"] if item["file"] not in (page, "myths")]
    toc["parts"] = [{"caption": "Draft", "chapters": [{"file": page}]}, reference]
    path = BUILD / "toc_draft.yml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(toc, sort_keys=False), "utf8")
    return path


def show_failures(began: float) -> None:
    """What ended the chapters that failed since then; and forget the state, or the next build would hide warnings.

    Args:
        began: seconds since the epoch.
    """
    shutil.rmtree(BUILD / ".doctrees", ignore_errors=True)
    for report in sorted((SITE / "reports").glob("*.log")):
        if report.stat().st_mtime > began:
            print(f"\n--- {report.name}", *report.read_text("utf8").splitlines()[-25:], sep="\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", help="a chapter by its file name without .md")
    page = parser.parse_args().page
    start, began = time.perf_counter(), time.time()
    toc = only(page) if page else ROOT / "_toc.yml"
    code = jupyter_book(toc, strict=not page)
    if code and not page:
        show_failures(began)
        # Chapters that ran to their end are kept. The others get a second chance: a claim about time can fall to
        # another program's burst of work once, a wrong one falls twice.
        print("\nOnce more, what failed:", flush=True)
        began = time.time()
        code = jupyter_book(toc, strict=True)
    if code:
        show_failures(began)
        print("\nThe book was not built: see the warnings above, and what ended the chapters.")
        return code
    print(f"\nThe book is at {SITE / 'index.html'} ({time.perf_counter() - start:.0f} s).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
