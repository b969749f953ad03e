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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", help="a chapter by its file name without .md")
    page = parser.parse_args().page
    start = time.perf_counter()
    code = jupyter_book(only(page) if page else ROOT / "_toc.yml", strict=not page)
    if code:
        # A failed build leaves a pickled environment, from which the next one would pass without the warning.
        shutil.rmtree(BUILD / ".doctrees", ignore_errors=True)
        print(f"\nThe book was not built: see the warnings above, and the reports in {SITE / 'reports'}.")
        return code
    print(f"\nThe book is at {SITE / 'index.html'} ({time.perf_counter() - start:.0f} s).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
