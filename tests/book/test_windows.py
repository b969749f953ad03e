"""The window explorer: the page's slots hold what the library's cache holds, and its answer is what was recorded."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from kvbook import browser

import kvlab.book.calculators as calculators
from kvlab.book.calculators import WindowExplorer
from kvlab.book.calculators.windows import recorded
from kvlab.cache import StreamingCache
from kvlab.errors import ConfigError
from kvlab.resources import resource
from toys import small_config

from .panels import answers_of, choose, clean, enter, page_of

FOLDER = Path(calculators.__file__).parent
SETTINGS = [(sinks, slots) for slots in (64, 128, 256) for sinks in (0, 1, 4)]


def random_case(chance: random.Random) -> dict[str, Any]:
    """Sinks, a window, and after how many tokens to look."""
    sinks, window = chance.randint(0, 5), chance.randint(1, 12)
    sizes = [chance.choice([1, 1, 1, 2, 3, 7, 30]) for _ in range(chance.randint(1, 24))]
    return {"sinks": sinks, "window": window, "ends": [sum(sizes[: at + 1]) for at in range(len(sizes))]}


CASES = [random_case(random.Random(seed)) for seed in range(80)]


def in_the_cache(sinks: int, window: int, ends: list[int]) -> list[list[int | None]]:
    """What stands in the slots of the library's cache, where every token is written with its position as its value."""
    config = small_config()
    cache = StreamingCache(config, 1, torch.float32, sinks=sinks, window=window)
    found = []
    for seen, end in pairwise([0, *ends]):
        positions = torch.arange(seen, end)[None]
        step = cache.begin(positions)
        named = (positions + 1.0)[:, None, :, None].expand(1, config.n_kv_head, -1, config.head_dim).contiguous()
        for layer in range(config.n_layer):
            cache.append(layer, named, named, step)
        cache.commit(step)
        values = cache.storage[1, 0, 0, 0, :, 0].tolist()
        found.append([int(value) - 1 if value else None for value in values])
    return found


@pytest.mark.browser
def test_the_page_holds_what_the_cache_holds() -> None:
    job = {"folder": FOLDER.as_uri(), "cases": CASES}
    answers = browser.node(Path(__file__).parent / "stream_cases.mjs", given=json.dumps(job))
    wrapped = 0
    for case, answer in zip(CASES, answers, strict=True):
        sinks, window = case["sinks"], case["window"]
        ends = sorted({end + more for end in case["ends"] for more in (0, 1)})
        by_end = dict(zip(ends, in_the_cache(sinks, window, ends), strict=True))
        for end, there in zip(case["ends"], answer, strict=True):
            assert there["slots"] == by_end[end], f"after {end} tokens of {case}"
            assert by_end[end + 1][there["next"]] == end, "the next token goes where the page says"
            rolling = [held for held in by_end[end] if held is not None and held >= sinks]
            assert rolling == [] or there["start"] == min(rolling)
            wrapped += end > 2 * (sinks + window)
    assert wrapped > 100, "most cases must go round"


def random_explorer(seed: int) -> WindowExplorer:
    chance = random.Random(seed)
    sinks, slots = chance.choice(SETTINGS)
    last = len(recorded()["tokens"]) - 1
    read = chance.choice([1, 2, 3, 4, 5, slots - 1, slots, slots + 1, last, chance.randint(1, last)])
    return WindowExplorer(read=read, sinks=sinks, slots=slots)


def test_the_answer_tells_what_is_held_and_what_it_cost() -> None:
    losses = recorded()["losses"]
    paid, every = losses["streaming:4+124"], losses["contiguous"]
    means = [torch.tensor(each[:420]).double().div(1000).mean().exp().item() for each in (paid, every)]
    assert str(WindowExplorer(read=420, sinks=4, slots=128)) == (
        "After 420 tokens, 4 sinks and a window of 124 hold 128: 0 to 3 and 296 to 419. The next one, “ a”, costs "
        f"{paid[419] / 1000:.3f} nats. Perplexity so far: {means[0]:.1f}; with all tokens kept {means[1]:.1f}."
    )
    assert "1 sink and a window of 63 hold 64: 0 and 38 to 100." in str(WindowExplorer(read=101, sinks=1, slots=64))
    assert "After 1 token, a window of 64 without sinks holds 1: 0." in str(WindowExplorer(read=1, slots=64))
    assert "4 sinks and a window of 60 hold 64: 0 to 63." in str(WindowExplorer(read=64, sinks=4, slots=64))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"read": 0}, "read is 0"),
        ({"read": 1024}, "1 to 1023"),
        ({"sinks": 2}, "2 sinks among 128 slots were not recorded"),
        ({"slots": 100}, "100 slots were not recorded"),
    ],
)
def test_bad_input_is_named(setting: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        WindowExplorer(**setting)


def test_the_recording_is_of_the_text_and_tells_where_it_came_from() -> None:
    found = recorded()
    assert {"device", "machine", "versions", "commit", "command", "model", "dtype"} <= found.keys()
    assert resource("texts", "macbeth.txt").read_text("utf8").startswith("".join(found["tokens"]))
    assert set(found["losses"]) == {"contiguous", *(f"streaming:{a}+{b - a}" for a, b in SETTINGS)}
    assert {len(each) for each in found["losses"].values()} == {len(found["tokens"]) - 1}


@pytest.mark.parametrize("slots", [64, 128, 256])
def test_every_setting_is_the_dense_model_until_a_token_leaves(slots: int) -> None:
    losses = {kind: torch.tensor(each) for kind, each in recorded()["losses"].items()}
    for sinks in (0, 1, 4):
        off = (losses[f"streaming:{sinks}+{slots - sinks}"] - losses["contiguous"]).abs()
        assert off[:slots].max() <= 1, "float32 and a rounded thousandth"
        assert off[slots:].max() > 100
    apart = [losses[f"streaming:{sinks}+{slots - sinks}"].double().mean() / 1000 for sinks in (0, 4)]
    assert apart[0] > apart[1] + 0.5, "what the panel is there to show"


@pytest.mark.browser
def test_the_panel_says_what_python_says(tmp_path: Path) -> None:
    shown = [WindowExplorer(), *map(random_explorer, range(12))]
    assert answers_of(tmp_path, shown) == [str(each) for each in shown]


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
def test_the_window_is_stepped_and_sinks_are_switched(width: int, tmp_path: Path) -> None:
    def press(name: str) -> list[str]:
        return ["press", f"button:text-is('{name}')", "Enter"]

    answer = ["text", ".kvc-answer"]
    steps = [
        *[press("One token")] * 3, press("Back"), answer,
        choose("Sinks", "4"), answer,
        choose("Slots, sinks and window together", "64"), press("First one leaves"), press("One token"), answer,
        ["text", ".kvc-text"], ["text", ".kvc-sums"],
        press("A window on"), answer,
        enter("Tokens read", 1023), press("One token"), answer, ["attribute", "svg >> nth=1", "aria-label"],
    ]  # fmt: skip
    read = clean(browser.drive(page_of(tmp_path, WindowExplorer(read=500)), steps, width=width))["read"]
    text, sums, label = read.pop(3), read.pop(3), read.pop()
    ends = [(502, 0, 128), (502, 4, 128), (65, 4, 64), (125, 4, 64), (1023, 4, 64)]
    assert read == [str(WindowExplorer(read=n, sinks=sinks, slots=slots)) for n, sinks, slots in ends]
    tokens = [each.replace("\n", "⏎") for each in recorded()["tokens"]]
    first, second, *_, last = filter(None, text.splitlines())
    assert [first, second, last] == [f"sinks {''.join(tokens[:4])}", f"forgotten {tokens[4]}", f"next {tokens[65]}"]
    assert "token 65 goes to slot 4 + (65 − 4) mod 60 = 5, where token 5 is overwritten" in sums
    assert "it sees the first sink 63 positions away, in the text 65" in sums
    assert label.startswith("Perplexity after 1,023 tokens, 64 slots: all kept 41.2, no sinks 261")
