"""The address of the repository and of the site: read from `_config.yml`, changed everywhere by one command.

`addresses.py REPO SITE` rewrites `_config.yml` and what repeats the addresses; `make` makes the notebooks again.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from kvbook.layout import ROOT
from kvlab.provenance import repository_in

# Files that repeat the addresses, beside `_config.yml` and the notebooks, which are made from it.
FOLLOWERS = ("README.md", "CONTRIBUTING.md", "pyproject.toml", "chapters/index.md")


@dataclass(frozen=True)
class Addresses:
    """Both without a closing slash."""

    repository: str
    site: str


def read(root: Path = ROOT) -> Addresses:
    config = (root / "_config.yml").read_text("utf8")
    repository = repository_in(config)
    site = re.search(r"^\s+baseurl:\s*(\S+)", config, re.MULTILINE)
    if repository is None or site is None:
        raise SystemExit("_config.yml must hold repository.url and html.baseurl")
    return Addresses(repository, site[1].rstrip("/"))


def change(new: Addresses, root: Path = ROOT) -> list[str]:
    """Write new addresses in place of the old ones; returns the files that changed."""
    old = read(root)
    changed = []
    for name in ("_config.yml", *FOLLOWERS):
        path = root / name
        before = path.read_text("utf8") if path.exists() else ""
        after = before.replace(_short(old.repository), _short(new.repository)).replace(old.repository, new.repository)
        after = after.replace(old.site, new.site)
        if after != before:
            path.write_text(after, "utf8")
            changed.append(name)
    return changed


def _short(repository: str) -> str:
    """The form in which Colab names a repository of GitHub."""
    return f"/github/{repository.split('github.com/')[-1]}/"


def main(arguments: list[str]) -> None:
    if len(arguments) != 2 or not all(re.fullmatch(r"https://\S+", text) for text in arguments):
        raise SystemExit("usage: make address REPO=https://github.com/OWNER/kvlab SITE=https://OWNER.github.io/kvlab/")
    print("changed:", ", ".join(change(Addresses(*(text.rstrip("/") for text in arguments)))) or "nothing")


if __name__ == "__main__":
    main(sys.argv[1:])
