"""The browser checks, from Python: is everything there, run it, and tell what the theme brings from what is ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from kvbook.layout import ROOT

TOOLS = ROOT / "book"
BASELINE = TOOLS / "axe_baseline.json"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
INSTALL = "apt-get install chromium nodejs npm"


def find_browser() -> str | None:
    """The browser to use: KVLAB_CHROMIUM, or Chromium by one of its names."""
    named = os.environ.get("KVLAB_CHROMIUM")
    return named or next((found for name in BROWSERS if (found := shutil.which(name))), None)


def missing() -> list[str]:
    """What the checks need and this machine has not."""
    wanted = {"chromium": find_browser(), "node": shutil.which("node"), "npm": shutil.which("npm")}
    return [name for name, found in wanted.items() if not found]


def required() -> bool:
    """In CI the browser is not optional."""
    return os.environ.get("CI", "").lower() in ("1", "true")


def node(script: Path, *arguments: str, given: str = "") -> Any:
    """What a script prints as JSON; the packages that scripts of this folder import are installed first."""
    if not (TOOLS / "node_modules" / "playwright-core").is_dir():
        subprocess.run(["npm", "ci", "--ignore-scripts", "--silent"], cwd=TOOLS, check=True, stdin=subprocess.DEVNULL)
    done = subprocess.run(["node", str(script), *arguments], input=given, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise RuntimeError(f"{script.name} stopped: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def look_at(site: Path, pages: list[str]) -> list[dict[str, Any]]:
    """Open the pages; one result for each page, width and colour scheme."""
    results: list[dict[str, Any]] = node(TOOLS / "browser.mjs", str(site), str(find_browser()), *pages)
    return results


def drive(site: Path, steps: list[list[str]], path: str = "index.html", **view: Any) -> dict[str, Any]:
    """Open a page and do what the steps say (`drive.mjs`); what was read there, and what the page complained about."""
    job = {"path": path, "width": 1280, "scheme": "light", **view, "steps": steps}
    seen: dict[str, Any] = node(TOOLS / "drive.mjs", str(site), str(find_browser()), given=json.dumps(job))
    return seen


def violations(results: list[dict[str, Any]]) -> set[tuple[str, str]]:
    """Accessibility rules that were broken, each with the kind of element that broke it."""
    return {(found["rule"], found["kind"]) for result in results for found in result["axe"]}


def read_baseline() -> set[tuple[str, str]]:
    """What an empty page of the theme breaks."""
    return {(rule, kind) for rule, kind in json.loads(BASELINE.read_text("utf8"))["violations"]}


def empty_book(folder: Path) -> Path:
    """A book of one empty page, with the theme and its options and nothing of ours; returns the built site."""
    ours = yaml.safe_load((ROOT / "_config.yml").read_text("utf8"))
    config = {name: ours[name] for name in ("title", "author", "copyright", "repository", "launch_buttons")}
    config["logo"] = str(TOOLS / "static" / "logo.svg")
    config["html"] = {name: value for name, value in ours["html"].items() if name.startswith("use_")}
    options = ours["sphinx"]["config"]["html_theme_options"]
    config["sphinx"] = {"recursive_update": True, "config": {"html_theme_options": options}}
    (folder / "_config.yml").write_text(yaml.safe_dump(config), "utf8")
    (folder / "_toc.yml").write_text("format: jb-book\nroot: index\n", "utf8")
    (folder / "index.md").write_text("# Empty\n", "utf8")
    command = [str(Path(sys.executable).parent / "jupyter-book"), "build", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "_build" / "html"


def make_baseline() -> None:
    """Write down what an empty page of the theme breaks."""
    with tempfile.TemporaryDirectory() as folder:
        site = empty_book(Path(folder))
        found = violations(look_at(site, ["index.html", "genindex.html", "search.html"]))
    made = {"made_by": "make axe-baseline", "of": "an empty page of the theme", "violations": sorted(found)}
    BASELINE.write_text(json.dumps(made, indent=2) + "\n", "utf8")
    print(f"{len(found)} violations of the theme written to {BASELINE.relative_to(ROOT)}")


if __name__ == "__main__":
    make_baseline()
