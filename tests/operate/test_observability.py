"""The rule file and the dashboard of chapter 21, held against pages and runs of a real server.

There is no Prometheus here: what can be checked without one is. Names and labels must be on the page, functions must
fit the kind of metric, and every threshold must part the states that are well from the one it is for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import combinations
from math import inf
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import yaml

from kvlab.operate.prometheus import Page, read_page
from kvlab.resources import resource

PAGE = read_page(resource("servers", "vllm-load.prom").read_text("utf8"))
RUNS: dict[str, Any] = json.loads(resource("servers", "vllm-runs.json").read_text("utf8"))["runs"]
RULES = [
    rule
    for group in yaml.safe_load(resource("observability", "alerts.yml").read_text("utf8"))["groups"]
    for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
BOARD: dict[str, Any] = json.loads(resource("observability", "dashboard.json").read_text("utf8"))
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
TARGETS = [target for panel in PANELS for target in panel["targets"]]
EXPRESSIONS = [rule["expr"] for rule in RULES] + [target["expr"] for target in TARGETS]

SELECTOR = re.compile(r"\b(?P<name>(?:vllm|llm|http)[:_]\w[\w:]*)(?:\{(?P<labels>[^}]*)\})?(?P<range>\[[^\]]+\])?")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
# Prometheus adds it to every sample; it is on no page.
OF_PROMETHEUS = {"instance"}
# What these may say is known from the server's code; no page of ours happens to have every value.
OPEN_VALUES = {"status": {"2xx", "3xx", "4xx", "5xx"}}


def on_page(name: str) -> list[dict[str, str]]:
    """The labels of the samples of this name."""
    return [dict(labels) for labels, _ in PAGE.samples.get(name.removeprefix("vllm:"), ())]


def label_problems(name: str, matchers: str) -> Iterator[str]:
    """Labels that the samples of a name do not have, and values that none of them has."""
    for label, operator, value in MATCHER.findall(matchers):
        values = {labels[label] for labels in on_page(name) if label in labels}
        if not values:
            yield f"{name} has no label {label}"
        elif operator == "=" and value not in values | OPEN_VALUES.get(label, set()):
            yield f"{name} has no {label}={value}"


def selector_problems(found: re.Match[str]) -> Iterator[str]:
    """What is wrong with one metric in an expression."""
    name, before = found["name"], found.string[: found.start()]
    if name.startswith("llm:"):
        if name not in RECORDED:
            yield f"{name} is recorded by no rule"
        return
    if not on_page(name):
        yield f"{name} is not on the page"
        return
    yield from label_problems(name, found["labels"] or "")
    counted = name.endswith(("_total", "_bucket", "_sum", "_count"))
    function = re.search(r"(\w+)\($", before)
    if counted and (not found["range"] or not function or function[1] not in ("rate", "increase")):
        yield f"{name} only ever rises; take its rate"
    if not counted and found["range"] and (not function or not function[1].endswith("_over_time")):
        yield f"{name} is a gauge; a rate of it means nothing"


def problems(expression: str) -> list[str]:
    """Everything that is wrong with an expression, as far as a page can tell."""
    expression = " ".join(expression.split()).replace("( ", "(")
    found = [problem for each in SELECTOR.finditer(expression) for problem in selector_problems(each)]
    if not SELECTOR.search(expression):
        found.append("asks for no metric")
    stack: list[str] = []
    for sign in re.sub(r'"[^"]*"', "", expression):
        if sign in "([{":
            stack.append({"(": ")", "[": "]", "{": "}"}[sign])
        elif sign in ")]}" and (not stack or stack.pop() != sign):
            found.append("brackets do not balance")
            break
    if stack:
        found.append("brackets do not balance")
    for grouped, inner in re.findall(r"by \(([^)]*)\) \((?=(.*))", expression):
        name = SELECTOR.search(inner)
        labels = {label for each in on_page(name["name"]) for label in each} if name else set()
        missing = {label.strip() for label in grouped.split(",")} - labels - OF_PROMETHEUS
        found += [f"{name['name'] if name else inner} has no label {label}" for label in sorted(missing)]
    if "histogram_quantile" in expression and "by (le" not in expression:
        found.append("a quantile needs sums by le")
    return found


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_query_asks_for_what_the_page_has(expression: str) -> None:
    assert problems(expression) == []


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("sum(rate(vllm:time_to_first_token_ms_bucket[5m]))", "not on the page"),
        ("sum(vllm:gpu_cache_usage_perc)", "not on the page"),
        ("sum(rate(vllm:prompt_tokens_created[5m]))", "not on the page"),
        ("sum(rate(vllm:time_to_first_token_seconds[5m]))", "not on the page"),
        ('rate(vllm:time_to_first_token_seconds_bucket{le="2"}[5m])', "no le=2"),
        ('rate(http_requests_total{model_name="smollm2"}[5m])', "no label model_name"),
        ("sum by (model_name) (rate(http_requests_total[5m]))", "no label model_name"),
        ("sum(vllm:generation_tokens_total) > 5", "take its rate"),
        ("rate(vllm:num_requests_waiting[5m])", "is a gauge"),
        ("sum(rate(vllm:generation_tokens_total[5m])", "balance"),
        ("sum(rate(vllm:generation_tokens_total[5m)])", "balance"),
        ("histogram_quantile(0.9, sum(rate(vllm:e2e_request_latency_seconds_bucket[5m])))", "by le"),
        ("llm:first_token_late:ratio_rate2h > 1", "recorded by no rule"),
        ("vector(1)", "no metric"),
    ],
)
def test_a_query_that_cannot_answer_is_found(expression: str, problem: str) -> None:
    assert any(problem in found for found in problems(expression))


# --- rules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ALERTS.values(), ids=list(ALERTS))
def test_an_alert_says_whom_it_wakes_why_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert set(rule["annotations"]) == {"summary", "reason", "remedy"}
    assert all(isinstance(text, str) and text for text in rule["annotations"].values())
    assert rule["annotations"]["summary"].count("{{") == rule["annotations"]["summary"].count("}}")


def test_names_are_unique_and_every_share_that_is_recorded_is_asked_for() -> None:
    assert len(ALERTS) + len(RECORDED) == len(RULES)
    asked = " ".join(rule["expr"] for rule in ALERTS.values())
    assert [name for name in RECORDED if name not in asked] == []


def test_a_recorded_share_has_the_window_that_its_name_says() -> None:
    for name, expression in RECORDED.items():
        assert set(re.findall(r"\[(\w+)\]", expression)) == {name.rpartition("rate")[2]}


def test_what_lasts_is_asked_to_last() -> None:
    """The budget rules have a short window for that; every other alert waits, so that one read wakes nobody."""
    assert {name for name, rule in ALERTS.items() if "for" not in rule} == {
        "FirstTokenBudgetBurnsFast",
        "FirstTokenBudgetBurns",
    }


def page_of(run: str) -> Page:
    """What a run added to the page."""
    kept: dict[str, list[tuple[dict[str, str], float]]] = {}
    for name, each in RUNS[run]["histograms"].items():
        kept[f"{name}_count"] = [({}, each["count"])]
        kept[f"{name}_sum"] = [({}, each["sum"])]
        kept[f"{name}_bucket"] = [({"le": edge}, count) for edge, count in each["le"].items()]
    for name, value in RUNS[run]["counters"].items():
        bare, _, labels = name.partition("{")
        kept.setdefault(bare, []).append((dict(re.findall(r'(\w+)="([^"]*)"', labels)), value))
    return Page("vllm", kept)


def beyond(name: str, edge: float) -> Callable[[str], float]:
    """The share of a run's samples above an edge."""

    def share(run: str) -> float:
        spread = page_of(run).distribution(name)
        assert spread is not None
        return 1 - dict(spread.buckets)[edge] / spread.count

    return share


def gauge(name: str) -> Callable[[str], float]:
    """A gauge in the middle half of a run, on average."""

    def level(run: str) -> float:
        values = RUNS[run]["timeline"][name]
        return mean(values[len(values) // 4 : 3 * len(values) // 4])

    return level


def waiting_to_running(run: str) -> float:
    return gauge("waiting")(run) / gauge("running")(run)


def preemptions_a_request(run: str) -> float:
    page = page_of(run)
    return (page.total("num_preemptions_total") or 0.0) / (page.total("time_to_first_token_seconds_count") or inf)


def thresholds(alert: str) -> list[float]:
    """Every number that something must exceed; a product is one number."""
    found = re.findall(r"> ([\d.]+)(?: \* ([\d.]+))?", ALERTS[alert]["expr"])
    return [float(one) * float(other or 1) for one, other in found]


WELL = ("control", "cancelled", "shared prefix")


@pytest.mark.parametrize(
    ("alert", "which", "measured", "well", "ill"),
    [
        ("FirstTokenBudgetBurnsFast", 0, beyond("time_to_first_token_seconds", 2.5), WELL, ("load", "preempting")),
        ("FirstTokenBudgetBurns", 0, beyond("time_to_first_token_seconds", 2.5), WELL, ("load", "preempting")),
        ("StreamsStall", 0, beyond("inter_token_latency_seconds", 1.0), (*WELL, "load"), ("preempting",)),
        ("SeatsFull", 0, waiting_to_running, WELL, ("load",)),
        ("SeatsFull", 1, gauge("kv"), (*WELL, "load"), ("preempting",)),
        ("PoolFull", 0, gauge("kv"), (*WELL, "load"), ("preempting",)),
        ("PoolFull", 1, waiting_to_running, WELL, ("preempting",)),
        ("Preempting", 0, preemptions_a_request, (*WELL, "load"), ("preempting",)),
    ],
)
def test_a_threshold_parts_the_states(
    alert: str, which: int, measured: Callable[[str], float], well: tuple[str, ...], ill: tuple[str, ...]
) -> None:
    limit = thresholds(alert)[which]
    assert max(measured(run) for run in well) <= limit < min(measured(run) for run in ill)


def test_refused_prompts_are_a_tenth_and_more_of_the_rush() -> None:
    rows = {
        status: PAGE.total("http_requests_total", method="POST", status=status) or 0.0
        for status in ("2xx", "4xx", "5xx")
    }
    assert rows["4xx"] > thresholds("ClientErrors")[0] * sum(rows.values())
    assert rows["5xx"] <= thresholds("RequestsFail")[0] * sum(rows.values())


def test_a_budget_can_burn_as_fast_as_an_alert_asks() -> None:
    """With too generous a promise the threshold exceeds 1, and the alert never rings."""
    for alert in ("FirstTokenBudgetBurnsFast", "FirstTokenBudgetBurns"):
        shares = thresholds(alert)[:2]
        assert shares[0] == shares[1]
        assert 0 < shares[0] < 1


def test_both_windows_of_a_budget_alert_ask_for_the_same_pace() -> None:
    for alert, windows in {"FirstTokenBudgetBurnsFast": ("1h", "5m"), "FirstTokenBudgetBurns": ("6h", "30m")}.items():
        assert re.findall(r"ratio_rate(\w+)", ALERTS[alert]["expr"]) == list(windows)


# --- dashboard ------------------------------------------------------------------------------------------------------


def test_the_dashboard_has_what_grafana_initialises() -> None:
    """The fields of https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/."""
    expected = {"id", "uid", "title", "tags", "timezone", "editable", "graphTooltip", "panels", "time", "timepicker"}
    expected |= {"templating", "annotations", "refresh", "schemaVersion", "version", "links"}
    assert expected <= set(BOARD)
    assert BOARD["id"] is None, "an id belongs to one Grafana; an import needs none"
    assert isinstance(BOARD["schemaVersion"], int)
    assert set(BOARD["time"]) == {"from", "to"}


def test_panels_have_places_of_their_own_on_a_grid_of_24() -> None:
    places = [panel["gridPos"] for panel in BOARD["panels"]]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 and place["h"] > 0 for place in places)
    for one, other in combinations(places, 2):
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert apart or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"], (one, other)
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
def test_a_panel_asks_the_data_source_of_the_reader_and_says_what_it_shows(panel: dict[str, Any]) -> None:
    assert panel["type"] in ("timeseries", "heatmap", "stat", "gauge", "table")
    assert panel["description"]
    assert panel["targets"]
    for part in (panel, *panel["targets"]):
        assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    references = [target["refId"] for target in panel["targets"]]
    assert len(set(references)) == len(references)
    assert {"fieldConfig", "options"} <= set(panel)
    assert set(panel["fieldConfig"]) == {"defaults", "overrides"}


def test_every_variable_that_is_used_is_defined_and_the_other_way_round() -> None:
    defined = {variable["name"]: variable for variable in BOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(BOARD["panels"]))) - {"__rate_interval"}
    assert used == set(defined)
    assert (defined["datasource"]["type"], defined["datasource"]["query"]) == ("datasource", "prometheus")
    (metric, label) = re.findall(r"label_values\(([\w:]+), (\w+)\)", defined["model"]["definition"])[0]
    assert all(label in labels for labels in on_page(metric))
    assert defined["model"]["query"]["query"] == defined["model"]["definition"]
    assert defined["model"]["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_fractions_end_at_one_and_are_shown_as_such() -> None:
    fractions = [panel for panel in PANELS if panel["fieldConfig"]["defaults"].get("unit") == "percentunit"]
    assert {"KV pool in use", "First tokens later than 2.5 s"} <= {panel["title"] for panel in fractions}
    assert all(panel["fieldConfig"]["defaults"]["max"] == 1 for panel in fractions)


def test_the_dashboard_draws_the_promise_that_the_rules_keep() -> None:
    (panel,) = (panel for panel in PANELS if "later than" in panel["title"])
    edges = {edge for rule in RECORDED.values() for edge in re.findall(r'le="([\d.]+)"', rule)}
    assert edges == set(re.findall(r'le="([\d.]+)"', panel["targets"][0]["expr"]))
    assert f"{edges.pop()} s" in panel["title"]


# --- the kept runs, and the chapter's tables --------------------------------------------------------------------------


def test_kept_histograms_are_whole() -> None:
    for run in RUNS.values():
        for kept in run["histograms"].values():
            counts = list(kept["le"].values())
            assert counts == sorted(counts)
            assert kept["le"]["+Inf"] == kept["count"]


def test_kept_runs_agree_with_their_clients() -> None:
    for name, run in RUNS.items():
        seen = [seconds for seconds in run["clients"]["ttft_s"] if seconds is not None]
        kept = run["histograms"]["time_to_first_token_seconds"]
        assert kept["count"] == run["clients"]["requests"] == len(seen), name
        assert 0 <= mean(seen) - kept["sum"] / kept["count"] < 0.1, name


def test_a_timeline_ends_where_its_counters_do() -> None:
    for run in RUNS.values():
        ends = {name: values[-1] for name, values in run["timeline"].items()}
        assert len({len(values) for values in run["timeline"].values()}) == 1
        assert ends["generation_tokens"] == run["counters"]["generation_tokens_total"]
        assert ends["preemptions"] == run["counters"].get("num_preemptions_total", 0)
        assert ends["begun"] == run["histograms"]["time_to_first_token_seconds"]["count"]


CHAPTER = (Path(__file__).parents[2] / "chapters" / "21_observability.md").read_text("utf8")


def test_the_tables_of_the_chapter_name_what_is_there() -> None:
    cells = re.findall(r"`([^`]+)`", "\n".join(line for line in CHAPTER.splitlines() if line.startswith("|")))
    stems = {re.sub(r"_(bucket|sum|count)$", "", name) for name in PAGE.samples}
    names = [cell.removeprefix("vllm:") for cell in cells if re.fullmatch(r"(vllm:|http_)\w+", cell)]
    assert len(names) >= 20
    assert [name for name in names if name not in stems] == []


def test_the_queries_of_the_chapter_ask_for_what_the_page_has() -> None:
    (block,) = re.findall(r"^\(obs-queries\)=\n\n~~~text\n(.*?)^~~~$", CHAPTER, re.M | re.S)
    lines = [line.partition("  #")[0].rstrip() for line in block.splitlines() if line]
    queries = re.split(r"\n(?! )", "\n".join(lines))
    assert len(queries) >= 10
    assert [problem for query in queries for problem in problems(query)] == []
