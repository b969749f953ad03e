"""Explorables without a kernel: the page's scheduler plans what the library's does, its panels say what Python says."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from kvbook import browser

import kvlab.book.calculators as calculators
from kvlab.book.calculators import Asked, BlockMapExplorer, Explorable, SchedulerPlayground, Timed, WindowExplorer
from kvlab.book.calculators.base import bundle
from kvlab.cache import BlockPool
from kvlab.errors import ConfigError, RequestRefused
from kvlab.serving import Policy, Scheduler, TokenRequest

from .panels import answers_of, choose, clean, enter, page_of

FOLDER = Path(calculators.__file__).parent


# --- the rules ------------------------------------------------------------------------------------------------------


def random_case(chance: random.Random) -> dict[str, Any]:
    """Prompts that begin alike, and mostly a pool that is too small for all of them."""
    block_size = chance.randint(1, 5)
    stems = [[chance.randrange(50) for _ in range(20)] for _ in range(2)]
    requests, step = [], 0
    for _ in range(chance.randint(1, 8)):
        stem = chance.choice(stems)
        prompt = stem[: chance.randint(0, 20)] + [chance.randrange(50) for _ in range(chance.randint(0, 8))]
        step += chance.randint(0, 4)
        requests.append({"step": step, "prompt": prompt or [1], "answer": chance.randint(1, 20)})
    largest = max(-(-(len(each["prompt"]) + each["answer"] - 1) // block_size) for each in requests)
    return {
        "blocks": max(largest + chance.randint(-1, 6), 1),
        "block_size": block_size,
        "policy": chance.choice([*Policy]).value,
        "token_budget": chance.choice([1, 2, 4, 8, 16, 32, 64]),
        "max_running": chance.choice([1, 2, 4, 64]),
        "reuse": chance.random() < 0.75,
        "requests": requests,
    }


CASES = [random_case(random.Random(seed)) for seed in range(600)]


def planned(case: dict[str, Any]) -> list[dict[str, Any]]:
    """What the library's scheduler does, step by step."""
    pool = BlockPool(case["blocks"], case["block_size"])
    options = {name: case[name] for name in ("policy", "token_budget", "max_running")}
    scheduler = Scheduler(pool, reuse_prefixes=case["reuse"], **options)
    coming = list(enumerate(case["requests"]))
    steps = list[dict[str, Any]]()
    while coming or scheduler.unfinished:
        refused = []
        while coming and coming[0][1]["step"] <= len(steps):
            id, asked = coming.pop(0)
            try:
                scheduler.add(TokenRequest.of(id, asked["prompt"], asked["answer"]))
            except RequestRefused:
                refused.append(id)
        plan = scheduler.schedule()
        emitted = []
        for request, fed in plan.tokens.items():
            # Tokens of an answer are nobody else's.
            made = [1000 + 100 * int(str(request.id)) + request.num_tokens] if fed == request.remaining else []
            scheduler.computed(request, fed, request.append(made))
            emitted += [request.id] * len(made)
        scheduler.check()
        steps.append(
            {
                "refused": refused,
                "fed": [[request.id, fed] for request, fed in plan.tokens.items()],
                "admitted": [[request.id, found] for request, found in plan.admitted.items()],
                "preempted": [request.id for request in plan.preempted],
                "emitted": emitted,
                "tables": [[request.id, list(request.table)] for request in scheduler.running],
                "waiting": [request.id for request in scheduler.waiting],
                "holders": [pool.holders(block) for block in range(pool.n_blocks)],
                "found": [scheduler.prefix_queries, scheduler.prefix_hits],
            }
        )
    return steps


@pytest.mark.browser
def test_the_page_plans_what_the_library_plans() -> None:
    job = {"folder": FOLDER.as_uri(), "cases": CASES}
    answers = browser.node(Path(__file__).parent / "scheduler_cases.mjs", given=json.dumps(job))
    seen = {"preempted": 0, "shared": 0, "found": 0, "refused": 0}
    for case, answer in zip(CASES, answers, strict=True):
        steps = planned(case)
        for number, (there, here) in enumerate(zip(answer, steps, strict=True)):
            assert there == here, f"step {number} of {case}"
        seen["preempted"] += any(step["preempted"] for step in steps)
        seen["refused"] += any(step["refused"] for step in steps)
        seen["shared"] += any(max(step["holders"]) > 1 for step in steps)
        seen["found"] += steps[-1]["found"][1] > 0
    assert min(seen.values()) > 50, "the cases must have what they are to test"


# --- the block map --------------------------------------------------------------------------------------------------


def random_explorer(seed: int) -> BlockMapExplorer:
    chance = random.Random(seed)
    requests = [
        Asked(chance.randint(0, 20), chance.choice(["S", "T", ""]), chance.randint(1, 20), chance.randint(1, 40))
        for _ in range(chance.randint(0, 12))
    ]
    return BlockMapExplorer(
        requests,
        step=chance.randint(0, 90),
        blocks=chance.randint(8, 32),
        block_size=chance.randint(1, 8),
        budget=chance.choice([1, 8, 16, 64]),
        policy=chance.choice([*Policy]).value,
    )


def test_the_answer_tells_who_runs_and_what_is_shared() -> None:
    assert str(BlockMapExplorer([])) == (
        "After 0 steps: nobody runs. 0 of 20 blocks are held, 0 of them by more than one. "
        "Found in the cache: 0 of 0 prompt tokens. Thrown out so far: 0."
    )
    two = [Asked(0, "S", 1, 9), Asked(2, "S", 1, 9)]
    assert str(BlockMapExplorer(two, step=3, budget=32)) == (
        "After 3 steps: A and B run. 6 of 20 blocks are held, 4 of them by more than one. "
        "Found in the cache: 16 of 34 prompt tokens. Thrown out so far: 0."
    )
    assert "After 11 steps: nobody runs" in str(BlockMapExplorer(two, step=999, budget=32)), "the end is the end"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: BlockMapExplorer([Asked(0, "S", 1, 1)] * 13), "13 requests"),
        (lambda: BlockMapExplorer([Asked(0, "U", 1, 1)]), "begins with"),
        (lambda: BlockMapExplorer(blocks=1), "blocks"),
        (lambda: BlockMapExplorer(step=-1), "step"),
        (lambda: BlockMapExplorer(policy="fast"), "policy"),
        (lambda: SchedulerPlayground([]), "0 requests"),
        (lambda: SchedulerPlayground([Timed("A", 0, 1, 1)] * 2), "a name of its own"),
        (lambda: SchedulerPlayground(policy="fast"), "policy"),
        (lambda: SchedulerPlayground(budget=0), "budget"),
    ],
)
def test_bad_input_is_named(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


@pytest.mark.browser
def test_the_panel_says_what_the_library_does(tmp_path: Path) -> None:
    shown = [BlockMapExplorer(), *map(random_explorer, range(24))]
    assert answers_of(tmp_path, shown) == [str(each) for each in shown]


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
def test_requests_are_added_and_steps_are_taken(width: int, tmp_path: Path) -> None:
    start = BlockMapExplorer([Asked(0, "S", 6, 20)], step=3)
    steps = [
        ["press", "button:text-is('Add a request')", "Enter"],
        *[["press", "button:text-is('One step')", "Enter"]] * 4,
        ["text", ".kvc-answer"],
        choose("The next one begins with", ""),
        enter("Its own prompt tokens", 30),
        ["press", "button:text-is('Add a request')", "Enter"],
        enter("Step", 14),
        enter("Blocks in the pool", 17),
        ["text", ".kvc-answer"],
        ["press", "button:text-is('Take all away')", "Enter"],
        ["text", ".kvc-answer"],
    ]
    read = clean(browser.drive(page_of(tmp_path, start), steps, width=width))["read"]
    two = [Asked(0, "S", 6, 20), Asked(3, "S", 6, 24)]
    three = [*two, Asked(7, "", 30, 24)]
    ends = (
        BlockMapExplorer(two, step=7),
        BlockMapExplorer(three, step=14, blocks=17),
        BlockMapExplorer([], step=0, blocks=17),
    )
    assert read == [str(end) for end in ends]


# --- the playground -------------------------------------------------------------------------------------------------


def random_playground(seed: int) -> SchedulerPlayground:
    chance = random.Random(seed)
    requests = [
        Timed(chr(65 + index), chance.randint(0, 40) * 25, int(2 ** chance.uniform(0, 11)), chance.randint(1, 80))
        for index in range(chance.randint(1, 7))
    ]
    return SchedulerPlayground(
        requests,
        policy=chance.choice([*Policy]).value,
        budget=int(2 ** chance.uniform(0, 11)),
        blocks=chance.choice([20, 60, 150, 400]),
        step_us=chance.choice([0, 1000, 12_500]),
        token_us=chance.choice([10, 125, 1000]),
    )


def test_a_smaller_budget_shortens_the_gaps_of_others_and_not_the_long_one_s_wait() -> None:
    small, large = (str(SchedulerPlayground(budget=budget)) for budget in (64, 2048))
    assert (
        "C with the longest prompt has its first token after 568 ms; the longest gap in the answers of the others is "
        "17.6 ms" in small
    )
    assert "after 313 ms; the longest gap in the answers of the others is 308 ms" in large
    assert "C with the longest prompt can never fit" in str(SchedulerPlayground(blocks=16))


@pytest.mark.browser
def test_the_playground_says_what_the_engine_does(tmp_path: Path) -> None:
    shown = [SchedulerPlayground(), *map(random_playground, range(40))]
    assert answers_of(tmp_path, shown) == [str(each) for each in shown]


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
def test_a_changed_policy_gives_the_engine_s_answer(width: int, tmp_path: Path) -> None:
    requests = [Timed("A", 0, 60, 90), Timed("B", 0, 100, 60), Timed("C", 250, 700, 20), Timed("D", 550, 80, 20)]
    end = SchedulerPlayground(requests, policy="continuous", budget=64, blocks=70, step_us=4000, token_us=80)
    steps = [
        choose("Policy", "continuous"),
        enter("Token budget of a step", 64),
        enter("Prompt tokens of the longest", 700),
        enter("It comes at, ms", 250),
        enter("Blocks of 16 tokens", 70),
        enter("A step takes, µs", 4000),
        enter("And each token, µs", 80),
        ["text", ".kvc-answer"],
        ["text", ".kvc-warnings"],
    ]
    read = clean(browser.drive(page_of(tmp_path, SchedulerPlayground()), steps, width=width))["read"]
    assert read[0] == str(end)
    assert "a step must hold 719 tokens: the budget was raised" in read[1]


# --- all ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [BlockMapExplorer, SchedulerPlayground, WindowExplorer])
def test_an_output_needs_nothing_from_elsewhere(kind: type[Any]) -> None:
    script = bundle(kind.kind)
    assert not re.search(r"^\s*(import|export)\b", script, re.MULTILINE)
    addresses = set(re.findall(r"https?://[^\s\"'`]+", kind()._repr_html_()))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    names = re.findall(r"^(?:const|let|class|(?:async )?function) (\w+)", script, re.MULTILINE)
    assert len(names) == len(set(names)), "two modules have a name in common"
    assert kind().answer in kind()._repr_html_().replace("&#x27;", "'")


@pytest.mark.browser
def test_the_panels_are_accessible_and_fit_a_phone(tmp_path: Path) -> None:
    shown: list[Explorable] = [BlockMapExplorer(), SchedulerPlayground(), WindowExplorer(read=300, sinks=4)] * 2
    for result in browser.look_at(page_of(tmp_path, *shown), ["index.html"]):
        for key in ("console", "outside", "missing", "dead", "twice", "axe"):
            assert result[key] == [], (result["view"], result["scheme"], key)
        assert result["overflow"] <= 0
