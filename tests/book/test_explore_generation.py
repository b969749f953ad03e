"""The explorer of chapter 1: it shows the generation that ran, and its controls move it."""

from __future__ import annotations

import re
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch

import kvlab
from kvlab.book.chips import Chip, Markup, playback, token_line, watch
from kvlab.book.colours import CACHE, DECODE, PREFILL
from kvlab.book.explore_generation import Recording, explore, picture, record, step_html
from kvlab.generation import Generation, Sampling
from kvlab.weights import LoadedModel

PROMPT, NEW = "To be, or not to be", 6


@pytest.fixture(scope="module")
def lm() -> LoadedModel:
    return kvlab.load("tiny", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def recorded(lm: LoadedModel) -> tuple[Generation, Recording]:
    return record(lm, lm.tokenizer.encode(PROMPT), max_new_tokens=NEW, ignore_eos=True)


def filled(page: str, colour: str) -> int:
    return len(re.findall(f'width:7px[^"]*background:{colour}', page))


def test_the_recording_is_the_generation(lm: LoadedModel, recorded: tuple[Generation, Recording]) -> None:
    generation, recording = recorded
    prompt = lm.tokenizer.encode(PROMPT)
    again = kvlab.generate(lm, prompt, max_new_tokens=NEW, ignore_eos=True).run()
    assert generation.tokens == again.tokens
    assert [m.text for m in recording.moments] == lm.tokenizer.tokens(generation.tokens[0])
    assert [m.phase for m in recording.moments] == ["prefill"] + ["decode"] * (NEW - 1)
    assert [m.fed for m in recording.moments] == [len(prompt)] + [1] * (NEW - 1)
    assert recording.columns == generation.cache.length == len(prompt) + NEW - 1
    end = recording.moments[-1].start + recording.moments[-1].seconds
    assert end == pytest.approx(generation.timing.requests[0].e2e)


def test_candidates_are_the_models_own(lm: LoadedModel, recorded: tuple[Generation, Recording]) -> None:
    logits = lm.model(torch.tensor([lm.tokenizer.encode(PROMPT)]), last_only=True)[0, 0]
    best = logits[: lm.vocab_size].softmax(0).topk(5)
    first = recorded[1].moments[0].candidates
    assert [c.probability for c in first] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert [c.text for c in first] == lm.tokenizer.tokens(best.indices.tolist())
    assert [c.chosen for c in first] == [True, False, False, False, False]  # greedy


def test_the_chosen_token_is_always_among_the_candidates(lm: LoadedModel) -> None:
    settings = {"max_new_tokens": 12, "sampling": Sampling(temperature=4.0, seed=3), "ignore_eos": True}
    _, recording = record(lm, lm.tokenizer.encode(PROMPT), top=2, **settings)
    for moment in recording.moments:
        assert [c.text for c in moment.candidates if c.chosen] == [moment.text]
        assert len(moment.candidates) == 2


def test_recording_leaves_no_hook(lm: LoadedModel, recorded: tuple[Generation, Recording]) -> None:
    assert not lm.model.head._forward_hooks


def test_the_controls_move_the_screen(recorded: tuple[Generation, Recording]) -> None:
    recording = recorded[1]
    row, screen = explore(recording).children
    back, onward, slider, player = row.children
    assert (slider.min, slider.max, player.max) == (1, NEW, NEW)
    assert f"Step 1 of {NEW}: prefill" in screen.value
    slider.value = 4
    assert f"Step 4 of {NEW}: decode" in screen.value
    assert screen.value == step_html(recording, 4)
    onward.click()
    assert (slider.value, screen.value) == (5, step_html(recording, 5))
    for _ in range(9):
        onward.click()
    assert slider.value == NEW
    for _ in range(9):
        back.click()
    assert slider.value == 1
    assert f"Step 1 of {NEW}: prefill" in screen.value


def test_the_screen_shows_the_cache_as_it_fills(recorded: tuple[Generation, Recording]) -> None:
    recording = recorded[1]
    n = len(recording.prompt)
    first, third = step_html(recording, 1), step_html(recording, 3)
    assert (filled(first, CACHE), filled(first, PREFILL), filled(first, DECODE)) == (0, n, 0)
    assert (filled(third, CACHE), filled(third, PREFILL), filled(third, DECODE)) == (n + 1, 0, 1)
    assert f"{n} of {n + NEW - 1} columns filled" in first
    assert third.count("← taken") == 1


def test_tokens_cannot_break_the_page() -> None:
    line = token_line([Chip("<b>&", "prompt"), Chip("a\nb", "part")], "<i>").source
    assert "&lt;b&gt;&amp;" in line
    assert "&lt;i&gt;" in line
    assert "a⏎b" in line


def test_playback_delays_each_chip_and_spares_who_wants_less_motion() -> None:
    chips = [Chip("The", "prefill", 0.25), Chip(" sky", "decode", 0.5)]
    first, second = playback(chips, "An answer"), playback(chips)
    assert re.findall(r"animation-delay:([\d.]+)s", first.source) == ["0.250", "0.500"]
    assert "prefers-reduced-motion:reduce" in first.source
    assert first.plain == "The sky"
    ids = [re.findall(r'id="([^"]+)"', page.source)[0] for page in (first, second)]
    assert ids[0] != ids[1]


def test_an_answer_is_shown_while_it_is_made(lm: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[Markup] = []

    class Screen:
        update = staticmethod(frames.append)

    def display(first: Markup, display_id: bool) -> Screen:
        frames.append(first)
        return Screen()

    monkeypatch.setattr("IPython.display.display", display)
    generation = kvlab.generate(lm, PROMPT, max_new_tokens=NEW, ignore_eos=True)
    watch(generation)
    shown = [frame.plain.replace("|", "") for frame in frames]
    assert shown[0] == ""
    assert shown[-1] == generation.text
    assert all(later.startswith(earlier) for earlier, later in pairwise(shown))
    assert [frame for frame in frames if "@keyframes" in frame.source] == frames[-1:]


def test_the_picture_draws_any_token(recorded: tuple[Generation, Recording], monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a glyph that the font lacks warns
        picture(recorded[1], 3)
        picture(_with_text(recorded[1], "天$ \n"), 1)
    assert [item.name for item in shown] == ["fig-explorer", "fig-explorer"]
    assert f"Step 3 of {NEW}" in shown[0].alt


def _with_text(recording: Recording, text: str) -> Recording:
    from dataclasses import replace

    first = recording.moments[0]
    strange = replace(first, candidates=tuple(replace(c, text=text) for c in first.candidates))
    return replace(recording, moments=(strange, *recording.moments[1:]))
