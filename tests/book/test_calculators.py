"""Calculators: their arithmetic is kvlab.cost's, and the page answers what Python answers."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from bs4 import BeautifulSoup
from kvbook import browser

import kvlab.book.calculators as calculators
from kvlab import cost
from kvlab.book.calculators import (
    Calculator,
    DecodeStepCalculator,
    KVCacheCalculator,
    LatencyCalculator,
    MemoryCalculator,
    RooflineCalculator,
)
from kvlab.book.calculators import words as spelled
from kvlab.book.calculators.base import bundle
from kvlab.book.calculators.catalogue import catalogue
from kvlab.config import ModelConfig, preset_names
from kvlab.errors import ConfigError

from .panels import ANSWER, choose, clean, control, enter, page_of

FOLDER = Path(calculators.__file__).parent
KINDS: dict[str, type[Any]] = {
    kind.kind: kind
    for kind in (KVCacheCalculator, MemoryCalculator, LatencyCalculator, RooflineCalculator, DecodeStepCalculator)
}
SHAPES = {"llama-3.1-8b", "deepseek-v2", "deepseek-v3", "gemma-3-27b", "mixtral-8x7b-v0.1", "gpt-2-xl", "phi-3-mini-4k"}


# --- arithmetic -----------------------------------------------------------------------------------------------------


@cache
def everything() -> dict[str, Any]:
    return catalogue("llama-3.1-8b", "h100-sxm")


def random_cases() -> list[dict[str, Any]]:
    """Every preset, every device that has a peak, formats that the model can have."""
    chance = random.Random(2)
    timed = [device for device in everything()["devices"].values() if device["flops"]]
    cases = []
    for number, name in enumerate([*preset_names(), *sorted(SHAPES)] * 8):
        model, device = everything()["models"][name], timed[number % len(timed)]
        longest = model["max_seq_len"]
        prompt = min(int(2 ** chance.uniform(0, 17)), longest - 1)
        case = {
            "model": name,
            "device": device["name"],
            "dtype": chance.choice([dtype for dtype in device["flops"] if dtype != "int8"]),
            "weights": chance.choice([f for f in cost.FORMATS if f not in model["weights_refused"]]),
            "kv": chance.choice([f for f in cost.FORMATS if f not in model["cache_refused"]]),
            "prompt": prompt,
            "answer": chance.randint(1, longest - prompt + 1),
            "batch": int(2 ** chance.uniform(0, 10)),
            "fraction": chance.choice([0.5, 0.9, 1.0]),
            "launch": chance.choice([0.0, 5e-6, 30e-6]),
        }
        cases.append(case)
    return cases


def expected(case: dict[str, Any]) -> dict[str, float]:
    """The same figures from kvlab.cost."""
    model, device, dtype = case["model"], cost.hardware_of(case["device"]), case["dtype"]
    weights, kv, batch, prompt = case["weights"], case["kv"], case["batch"], case["prompt"]
    stored = {"weights": weights, "kv": kv}
    found = cost.predict(
        model, device, prompt_tokens=prompt, new_tokens=case["answer"], batch=batch, dtype=dtype, **stored
    )
    step = cost.pass_time(model, cost.decode_pass(prompt, batch), device, dtype, **stored)
    launches = [case["launch"] * timed.operator.calls * timed.operator.launches for timed in step.operators]
    started = tuple(replace(timed, launch_s=s) for timed, s in zip(step.operators, launches, strict=True))
    step = replace(step, operators=started, asynchronous=device.kind != "cpu")
    seconds = {part: step.seconds * step.share(part) for part in ("linear", "head", "attention", "overhead")}  # type: ignore[arg-type]

    def moved(pass_time: cost.PassTime) -> tuple[float, float]:
        kept = [timed.operator for timed in pass_time.operators if timed.operator.part != "elementwise"]
        return sum(operator.flops for operator in kept), sum(operator.bytes for operator in kept)

    return {
        "kv_bytes": cost.kv_bytes(model, prompt, kv),
        "token_bytes": cost.kv_bytes_per_token(model, kv),
        "weight_bytes": cost.weight_bytes(model, weights),
        "largest_batch": cost.largest_batch(model, device, tokens=prompt, fraction=case["fraction"], **stored),
        "ttft": found.ttft,
        "tpot": found.tpot,
        "e2e": found.e2e,
        "prefill_flops": moved(found.prefill)[0],
        "prefill_bytes": moved(found.prefill)[1],
        "decode_flops": moved(found.decode)[0],
        "decode_bytes": moved(found.decode)[1],
        "ridge": device.ridge(dtype),
        "critical_batch": cost.critical_batch(device, dtype, weights),
        "step": step.seconds,
        "step_weights": seconds["linear"] + seconds["head"],
        "step_cache": seconds["attention"],
        "step_overhead": seconds["overhead"],
    }


@pytest.fixture(scope="module")
def in_node() -> dict[str, Any]:
    job = {"folder": FOLDER.as_uri(), "catalogue": everything(), "cases": random_cases(), "numbers": numbers()}
    result: dict[str, Any] = browser.node(Path(__file__).parent / "cost_cases.mjs", given=json.dumps(job))
    return result


@pytest.mark.browser
def test_the_script_counts_as_the_library(in_node: dict[str, Any]) -> None:
    cases = random_cases()
    assert len(cases) > 300
    for case, answer in zip(cases, in_node["answers"], strict=True):
        for name, value in expected(case).items():
            scale = answer["step"] if name.startswith("step") else 0.0
            assert answer[name] == pytest.approx(value, rel=1e-11, abs=1e-11 * scale), f"{name} of {case}"
        for name in ("kv_bytes", "weight_bytes", "largest_batch"):
            assert answer[name] == expected(case)[name], f"{name} of {case}"


@pytest.mark.browser
def test_the_longest_context_fits_and_one_token_more_does_not(in_node: dict[str, Any]) -> None:
    for case, answer in zip(random_cases(), in_node["answers"], strict=True):
        model, longest = case["model"], answer["longest_context"]
        room = cost.hardware_of(case["device"]).memory_bytes * case["fraction"]
        room -= cost.weight_bytes(model, case["weights"])
        assert longest == 0 or case["batch"] * cost.kv_bytes(model, longest, case["kv"]) <= room
        if longest < ModelConfig.preset(model).max_seq_len:
            assert case["batch"] * cost.kv_bytes(model, longest + 1, case["kv"]) > room


def numbers() -> list[float]:
    chance = random.Random(3)
    ties = [0, 0.125, 1.125, 2.5, 0.9995, 9.995, 99.95, 999.5, 1000, 1023, 1024, 1.125 * 2**30, 0.5, 1e-7, 12345678]
    return [*ties, *(10 ** chance.uniform(-7, 14) for _ in range(400)), *(n / 64 for n in range(1, 400))]


@pytest.mark.browser
def test_the_script_spells_numbers_as_the_library(in_node: dict[str, Any]) -> None:
    spoken = [[spelled.count(n), spelled.three(n), spelled.binary(n), spelled.duration(n)] for n in numbers()]
    assert in_node["spoken"] == spoken
    assert [spelled.three(n) for n in (0.0123, 1.125, 9.996, 12_345.6)] == ["0.0123", "1.13", "10.0", "12,346"]


@pytest.mark.parametrize("name", sorted({"smollm2-135m", *SHAPES}))
def test_a_refused_format_is_one_that_the_library_refuses(name: str) -> None:
    model = everything()["models"][name]
    for kind in cost.FORMATS:
        for refused, count in (("weights_refused", cost.weight_bytes), ("cache_refused", cost.kv_bytes)):
            arguments = (name, kind) if refused == "weights_refused" else (name, 64, kind)
            if kind in model[refused]:
                with pytest.raises(ConfigError, match=re.escape(model[refused][kind])):
                    count(*arguments)  # type: ignore[arg-type]
            else:
                assert count(*arguments) > 0  # type: ignore[arg-type]


# --- what a notebook gets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_needs_nothing_from_elsewhere(kind: str) -> None:
    script = bundle(kind)
    assert not re.search(r"^\s*(import|export)\b", script, re.MULTILINE)
    addresses = set(re.findall(r"https?://[^\s\"'`]+", KINDS[kind]()._repr_html_()))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    names = re.findall(r"^(?:const|let|class|(?:async )?function) (\w+)", script, re.MULTILINE)
    assert len(names) == len(set(names)), "two modules have a name in common"


@pytest.mark.parametrize("kind", KINDS)
def test_without_script_there_is_the_answer(kind: str) -> None:
    calculator = KINDS[kind]()
    page = BeautifulSoup(calculator._repr_html_(), "html.parser")
    [root] = page.select(".kvlab-calculator")
    answer = root.select_one(".kvc-answer")
    assert answer is not None
    assert answer.text == str(calculator) == calculator.answer
    assert not page.select("[id], [src], link")


def test_the_answers_are_the_library_s() -> None:
    assert str(KVCacheCalculator()) == (
        "The KV cache of llama-3.1-8b takes 1.00 GiB (1,073,741,824 bytes) for 1 request of 8,192 tokens in bfloat16."
    )
    assert "takes 8.00 GiB (8,589,934,592 bytes) for 4 requests" in str(
        KVCacheCalculator("llama-2-7b", tokens=4096, batch=4, kv="float16")
    )
    assert "does not fit into 100 % of NVIDIA T4 (16.0 GiB), which has room for 0 such requests" in str(
        MemoryCalculator("llama-2-13b", device="t4", tokens=4096, weights="float16", fraction=1)
    )
    assert "overhead 0 %" in str(DecodeStepCalculator(launch_us=0))


def test_figures_from_memory_keep_their_mark() -> None:
    for kind in (MemoryCalculator, LatencyCalculator, RooflineCalculator, DecodeStepCalculator):
        assert cost.hardware_of("a10g").label in str(kind(device="a10g"))
    assert "from memory" in everything()["devices"]["a10g"]["label"]
    assert "from memory" in everything()["models"]["deepseek-v3"]["status"]


def test_a_model_a_device_and_a_format_of_one_s_own_join_the_lists() -> None:
    shape = ModelConfig.preset("smollm2-135m").with_(name="</script><b>mine", n_kv_head=9)
    device = replace(cost.hardware_of("t4"), name="mine", title="Mine")
    calculator = LatencyCalculator(shape, device=device, kv="int8-g64", weights="int8-g64")
    page = BeautifulSoup(calculator._repr_html_(), "html.parser")
    data = page.select_one(".kvlab-calculator script")
    assert data is not None
    own = json.loads(data.text)
    assert own["setting"]["model"] == "</script><b>mine"
    assert own["catalogue"]["models"]["</script><b>mine"]["n_kv_head"] == 9
    assert own["catalogue"]["devices"]["mine"]["bandwidth"] == device.bandwidth
    assert own["catalogue"]["formats"]["int8-g64"]["group"] == 64
    assert page.find("b") is None


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: KVCacheCalculator("llama-3.1-9b"), "llama-3.1-8b"),
        (lambda: KVCacheCalculator(tokens=0), "tokens is 0"),
        (lambda: KVCacheCalculator(kv="int5"), "int5"),
        (lambda: KVCacheCalculator("smollm2-135m", kv="int8"), "head_dim"),
        (lambda: MemoryCalculator(fraction=0), "fraction"),
        (lambda: LatencyCalculator(device="h100"), "h100-sxm"),
        (lambda: LatencyCalculator(device="server-cpu-epyc"), "no peak of server-cpu-epyc"),
        (lambda: LatencyCalculator("llama-2-7b", prompt_tokens=5000), "llama-2-7b holds 4096"),
        (lambda: RooflineCalculator(batch=0), "batch is 0"),
        (lambda: RooflineCalculator(device="t4", dtype="fp8"), "no fp8 peak"),
        (lambda: DecodeStepCalculator(past=-1), "past is -1"),
    ],
)
def test_bad_input_is_named(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        make()


# --- in a browser ---------------------------------------------------------------------------------------------------


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize(
    ("start", "steps", "end"),
    [
        (
            KVCacheCalculator(),
            [
                choose("Model", "gemma-3-27b"),
                choose("KV cache stored as", "q8_0"),
                enter("Tokens of a request", 50_000),
                enter("Requests", 3),
            ],
            KVCacheCalculator("gemma-3-27b", tokens=50_000, batch=3, kv="q8_0"),
        ),
        (
            MemoryCalculator(),
            [
                choose("Model", "deepseek-v3"),
                choose("Device", "b200-sxm"),
                choose("Weights stored as", "int4"),
                enter("Tokens of a request", 100_000),
                enter("Share of the memory to use, %", 75),
            ],
            MemoryCalculator("deepseek-v3", device="b200-sxm", tokens=100_000, weights="int4", fraction=0.75),
        ),
        (
            LatencyCalculator(),
            [
                choose("Model", "qwen3-30b-a3b"),
                choose("Device", "a10g"),
                enter("Tokens of a prompt", 3000),
                enter("Tokens of an answer", 77),
                enter("Requests at once", 5),
            ],
            LatencyCalculator("qwen3-30b-a3b", device="a10g", prompt_tokens=3000, new_tokens=77, batch=5),
        ),
        (
            RooflineCalculator(),
            [choose("Device", "t4"), enter("Prompt tokens", 700), enter("Requests in the batch", 24)],
            RooflineCalculator(device="t4", prompt_tokens=700, batch=24, weights="bfloat16", kv="bfloat16"),
        ),
        (
            DecodeStepCalculator(),
            [
                choose("Model", "smollm2-135m"),
                choose("Device", "desktop-cpu"),
                enter("Tokens that each cache holds", 0),
                enter("Time to start one kernel, µs", 3),
            ],
            DecodeStepCalculator(
                "smollm2-135m", device="desktop-cpu", past=0, launch_us=3, weights="bfloat16", kv="bfloat16"
            ),
        ),
    ],
    ids=list(KINDS),
)
def test_a_changed_control_gives_the_library_s_answer(
    start: Calculator, steps: list[list[str]], end: Calculator, width: int, tmp_path: Path
) -> None:
    seen = clean(browser.drive(page_of(tmp_path, start), [ANSWER, *steps, ANSWER], width=width))
    assert seen["read"] == [str(start), str(end)]


@pytest.mark.browser
def test_a_slider_and_the_arrow_keys_move_a_number(tmp_path: Path) -> None:
    field = control("Requests")
    steps = [
        ["press", f"{field} input[type=range]", "ArrowRight"],
        ["value", f"{field} input[type=number]"],
        ANSWER,
        ["press", f"{field} input[type=range]", "End"],
        ["value", f"{field} input[type=number]"],
        ["fill", f"{field} input[type=number]", "5000"],
        ["press", f"{field} input[type=number]", "Tab"],
        ["value", f"{field} input[type=number]"],
        choose("Model", "gpt-2-small"),
        ["value", f"{control('Tokens of a request')} input[type=number]"],
    ]
    read = clean(browser.drive(page_of(tmp_path, KVCacheCalculator(batch=8)), steps))["read"]
    assert read == ["12", str(KVCacheCalculator(batch=12)), "1024", "1024", "1024"]


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
def test_dots_can_be_dragged(width: int, tmp_path: Path) -> None:
    prompt, batch = (f"{control(label)} input[type=number]" for label in ("Prompt tokens", "Requests in the batch"))
    steps = [
        ["drag", ".kvc-handle.kvc-decode", str(width // 12)],
        ["value", prompt],
        ["value", batch],
        ANSWER,
        ["drag", ".kvc-handle.kvc-prefill", str(-width // 12)],
        ["value", prompt],
        ["value", batch],
        ANSWER,
        ["press", ".kvc-handle.kvc-decode", "Home"],
        ["value", batch],
        ["press", ".kvc-handle.kvc-prefill", "ArrowRight"],
        ["attribute", ".kvc-handle.kvc-prefill", "aria-valuenow"],
        ["value", prompt],
    ]
    read = clean(browser.drive(page_of(tmp_path, RooflineCalculator()), steps, width=width))["read"]
    assert int(read[0]) == 1024
    assert int(read[1]) >= 4, "the decode dot went right: a larger batch"
    assert read[2] == str(RooflineCalculator(prompt_tokens=1024, batch=int(read[1])))
    assert int(read[3]) <= 512, "the prefill dot went left: a shorter prompt"
    assert read[4] == read[1]
    assert read[5] == str(RooflineCalculator(prompt_tokens=int(read[3]), batch=int(read[4])))
    assert read[6] == "1"
    assert int(read[7]) == int(read[8]) > int(read[3])


@pytest.mark.browser
def test_a_format_that_does_not_fit_is_replaced_and_said(tmp_path: Path) -> None:
    steps = [choose("KV cache stored as", "int8"), choose("Model", "smollm2-135m"), ANSWER, ["text", ".kvc-warnings"]]
    read = clean(browser.drive(page_of(tmp_path, KVCacheCalculator()), steps))["read"]
    assert read[0] == str(KVCacheCalculator("smollm2-135m", kv="q8_0"))
    assert "groups of 128 do not divide head_dim, which has 64 elements" in read[1]


@pytest.mark.browser
def test_what_does_not_fit_on_the_device_is_said(tmp_path: Path) -> None:
    steps = [["text", ".kvc-warnings"], choose("Device", "t4"), ["text", ".kvc-warnings"]]
    read = clean(browser.drive(page_of(tmp_path, LatencyCalculator("llama-2-13b", prompt_tokens=100)), steps))["read"]
    assert read[0] == ""
    assert "the device has 16.0 GiB: this does not run there" in read[1]


@pytest.mark.browser
def test_two_of_each_share_a_page(tmp_path: Path) -> None:
    """No id twice, nothing inaccessible, nothing wider than a phone, no request, in light and dark."""
    site = page_of(tmp_path, *(kind() for kind in [*KINDS.values(), *KINDS.values()]))
    for result in browser.look_at(site, ["index.html"]):
        for key in ("console", "outside", "missing", "dead", "twice", "axe"):
            assert result[key] == [], (result["view"], result["scheme"], key)
        assert result["overflow"] <= 0
    live = "document.querySelectorAll('.kvlab-calculator[data-live] select').length"
    change = [choose("Model", "llama-2-7b")[0], f":nth-match({control('Model')} select, 1)", "llama-2-7b"]
    answers = "[...document.querySelectorAll('[data-kind=kv-cache] .kvc-answer')].map((node) => node.textContent)"
    small = (
        "[...document.querySelectorAll('.kvlab-calculator :is(select, input)')]"
        ".filter((node) => node.getBoundingClientRect().height < 44).length"
    )
    fixed = ["fill", f":nth-match({control('Tokens of a request')} input[type=number], 1)", "4096"]
    read = clean(
        browser.drive(site, [["evaluate", live], change, fixed, ["evaluate", answers], ["evaluate", small]], width=390)
    )["read"]
    assert read[0] == 2 * (2 + 4 + 5 + 5 + 4)
    assert read[1] == [str(KVCacheCalculator("llama-2-7b", tokens=4096)), str(KVCacheCalculator())]
    assert read[2] == 0


@pytest.mark.browser
@pytest.mark.parametrize(
    ("attributes", "scheme", "dark"),
    [
        (' data-theme="dark"', "light", True),
        (' data-theme="light"', "dark", False),
        (' theme="dark"', "light", True),
        ("", "dark", True),
        ("", "light", False),
    ],
)
def test_the_ground_follows_the_host(attributes: str, scheme: str, dark: bool, tmp_path: Path) -> None:
    site = page_of(tmp_path, KVCacheCalculator(), attributes=attributes)
    ground = "getComputedStyle(document.querySelector('.kvlab-calculator')).backgroundColor"
    [colour] = clean(browser.drive(site, [["evaluate", ground]], scheme=scheme))["read"]
    assert colour == ("rgb(27, 32, 38)" if dark else "rgb(255, 255, 255)")
