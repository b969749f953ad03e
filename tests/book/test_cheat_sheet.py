"""The cheat sheet says what the diagnosis says, and every row leads to an experiment that exists."""

from __future__ import annotations

import ast
import re

import pytest
from kvbook import checks
from kvbook.layout import CHAPTERS

from kvlab.book.claims import slug_of
from kvlab.operate.causes import CAUSES, cause

SHEET = (CHAPTERS / "cheat_sheet.md").read_text("utf8")
TABLES = [re.findall(r"^\| (.*) \|$", table, re.M)[1:] for table in re.findall(r"```\{table\}\n(.*?)```", SHEET, re.S)]
SYMPTOMS, GOALS = ([[cell.strip() for cell in row.split("|")] for row in table] for table in TABLES)
ROLE = re.compile(r"\{(ref|claim|doc)\}`(?:[^`<]* <([^`>]+)>|([^`]+))`")


def codes(cell: str) -> list[str]:
    """What stands in code type."""
    return re.findall(r"(?<!\})`([^`]+)`", cell)


def experiments(cell: str) -> list[str]:
    """Where its links lead that name a place, not a whole page."""
    return [target or name for role, target, name in ROLE.findall(cell) if role != "doc"]


def claims_of(page: str) -> set[str]:
    """The slugs of the claims in a chapter's cells."""
    found = set()
    for cell in checks.cells((CHAPTERS / f"{page}.md").read_text("utf8")):
        for call in ast.walk(ast.parse(re.sub(r"^[%!].*$", "", cell.code, flags=re.M))):
            made = isinstance(call, ast.Call) and getattr(call.func, "id", "") == "claim"
            if made and isinstance(call.args[0], ast.Constant):
                found.add(slug_of(call.args[0].value))
    return found


def test_the_tables_are_found() -> None:
    assert all(len(row) == 5 for row in SYMPTOMS)
    assert all(len(row) == 3 for row in GOALS)
    goals = [row[0].strip("*").split("*")[0] for row in GOALS if row[0]]
    assert goals == ["TTFT", "Speed", "Memory", "Throughput"]


def test_every_cause_of_the_diagnosis_stands_there_once_and_no_other() -> None:
    named = [name for row in SYMPTOMS for name in codes(row[1])]
    assert sorted(named) == sorted(each.id for each in CAUSES)


@pytest.mark.parametrize("row", SYMPTOMS, ids=lambda row: codes(row[1])[0])
def test_the_flags_of_a_row_are_those_of_the_diagnosis(row: list[str]) -> None:
    """Those that a row has room for; `--error` is the tool's own."""
    meant = {flag for name in codes(row[1]) for flag in cause(name).flags}
    said = {flag for code in codes(row[3]) for flag in re.findall(r"--[a-z-]+", code)} - {"--error"}
    assert said <= meant


@pytest.mark.parametrize("row", SYMPTOMS, ids=lambda row: codes(row[1])[0])
def test_a_metric_of_a_row_is_one_that_the_diagnosis_names(row: list[str]) -> None:
    """Or one that stands on a page of a real server, in chapter 21."""
    known = (CHAPTERS / "21_observability.md").read_text("utf8") + "".join(each.check for each in CAUSES)
    metrics = [code for code in codes(row[2]) if re.fullmatch(r"[a-z]+(_[a-z]+)+", code)]
    assert [name for name in metrics if name not in known and name not in ("max_tokens", "quantization_config")] == []


@pytest.mark.parametrize("row", SYMPTOMS + GOALS, ids=lambda row: re.sub(r"\W+", "-", "".join(row))[:40])
def test_every_row_leads_to_an_experiment_that_exists(row: list[str]) -> None:
    targets = experiments("".join(row[-1:] if len(row) == 5 else row[1:]))
    assert targets
    pages = {path.stem: path.read_text("utf8") for path in CHAPTERS.glob("*.md")}
    for target in targets:
        if "#" in target:
            page, slug = target.split("#")
            assert slug in claims_of(page), target
        else:
            assert [page for page, text in pages.items() if f"({target})=\n" in text and page != "cheat_sheet"], target
