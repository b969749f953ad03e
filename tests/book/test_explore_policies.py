"""The policy explorer: it shows what the caches hold and what the model answers through them, and its knobs move it."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch

import kvlab
from kvlab.book.colours import CACHE, CACHE_SURFACE
from kvlab.book.explore_policies import (
    PASS_KEY,
    POLICIES,
    CachePolicyExplorer,
    Course,
    fact_places,
    follow,
    held_tokens,
    kind_of,
    policy_html,
    policy_picture,
    sample_prompts,
)
from kvlab.cache import make_cache
from kvlab.errors import ConfigError
from kvlab.evaluate import losses
from kvlab.weights import LoadedModel
from toys import small_config

PROMPT, NEW = "To be, or not to be: that is the question. Whether <'tis> nobler in the mind to suffer\n" * 2, 4
KINDS = ("contiguous", "window:24", "streaming:4+20", "h2o:12+12", "snapkv:24")


@pytest.fixture(scope="module")
def lm() -> LoadedModel:
    return kvlab.load("tiny", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def full(lm: LoadedModel) -> Course:
    return follow(lm, PROMPT, "contiguous", new_tokens=NEW)


@pytest.fixture(scope="module")
def courses(lm: LoadedModel, full: Course) -> dict[str, Course]:
    others = {kind: follow(lm, PROMPT, kind, new_tokens=NEW, reference=full.answer) for kind in KINDS[1:]}
    return {"contiguous": full, **others}


def test_policies_are_kinds_of_caches() -> None:
    assert [kind_of(policy, 64, 4, 16) for policy in POLICIES] == [
        "contiguous", "window:64", "streaming:4+60", "h2o:48+16", "snapkv:64",
    ]  # fmt: skip


@pytest.mark.parametrize("given", [("lru", 64, 4, 16), ("streaming", 4, 4, 1), ("h2o", 24, 4, 24)])
def test_numbers_that_leave_nothing_are_refused(given: tuple[str, int, int, int]) -> None:
    with pytest.raises(ConfigError, match=f"'{given[0]}' with .* of {given[1]} tokens"):
        kind_of(*given)


@pytest.mark.parametrize("kind", ["contiguous", "window:7", "streaming:3+5", "h2o:4+5", "snapkv:20"])
@pytest.mark.parametrize("sizes", [[30, 1, 1, 1], [1] * 33, [12, 12, 6, 3]])
def test_what_is_called_held_is_in_the_cache(kind: str, sizes: list[int]) -> None:
    """Every token is written with its position as its value; then the slots are read."""
    config, chance = small_config(), torch.Generator().manual_seed(5)
    cache, seen = make_cache(kind, config, 1, 40, torch.float32), 0
    for size in sizes:
        step = cache.begin(torch.arange(seen, seen + size)[None])
        values = torch.arange(seen + 1.0, seen + size + 1)[None, None, :, None]
        values = values.expand(1, config.n_kv_head, -1, config.head_dim).contiguous()
        for layer in range(config.n_layer):
            cache.append(layer, torch.randn(values.shape, generator=chance), values, step)
            if cache.needs_queries:
                shape = (1, config.n_head, size, config.head_dim)
                cache.observe(layer, torch.randn(shape, generator=chance), step)
        cache.commit(step)
        seen += size
        held = held_tokens(cache)
        assert held.shape == (config.n_layer, config.n_kv_head, seen)
        assert (held.sum(dim=2) == cache.length).all()
        for layer in range(config.n_layer):
            for head in range(config.n_kv_head):
                stored = set(cache.storage[1, layer, 0, head, :, 0].tolist())  # type: ignore[attr-defined]
                assert {at + 1.0 for at in held[layer, head].nonzero().flatten().tolist()} <= stored


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_is_the_cache_s_own(lm: LoadedModel, courses: dict[str, Course], kind: str) -> None:
    course = courses[kind]
    [tokens] = kvlab.generate(lm, PROMPT, max_new_tokens=NEW, ignore_eos=True, cache=kind).run().tokens
    assert list(course.answer) == tokens
    n_prompt = len(lm.tokenizer.encode(PROMPT))
    assert [held.shape[2] for held in course.held] == [n_prompt + at for at in range(NEW)]
    assert [int(held[0, 0].sum()) for held in course.held] == list(course.lengths)
    grows = kind in ("contiguous", "snapkv:24")
    assert (course.lengths[-1] - course.lengths[0] == NEW - 1) == grows


@pytest.mark.parametrize("kind", ["contiguous", "window:24", "streaming:4+20"])
def test_the_loss_is_that_of_the_full_cache_s_answer(
    lm: LoadedModel, full: Course, courses: dict[str, Course], kind: str
) -> None:
    text = torch.tensor([*lm.tokenizer.encode(PROMPT), *full.answer])
    paid = losses(lm.model, text, cache=kind, chunk=len(text))[-NEW:]
    assert courses[kind].loss == pytest.approx(paid.mean().item(), abs=1e-4)


def test_a_prompt_in_pieces_leaves_other_tokens(lm: LoadedModel) -> None:
    whole, pieces = (follow(lm, PROMPT, "h2o:12+12", new_tokens=2, chunk=chunk) for chunk in (None, 7))
    assert whole.held[0].shape == pieces.held[0].shape
    assert not torch.equal(whole.held[0], pieces.held[0])


def test_the_prompts_have_a_fact_and_a_question() -> None:
    prompts = sample_prompts()
    assert prompts["a pass key"].count(PASS_KEY) == 2
    assert prompts["a pass key"].endswith("The pass key is")
    assert len(prompts["a play"]) == 1000


def test_a_fact_is_found_wherever_it_is_said() -> None:
    assert fact_places(["The", " key", " 73", "914", "; 73914", "."], "73914") == [(2, 4), (4, 5)]
    assert fact_places(["a", "b"], "") == fact_places(["a", "b"], "c") == []


@pytest.fixture
def lab(lm: LoadedModel) -> CachePolicyExplorer:
    return CachePolicyExplorer(lm, {"hamlet": PROMPT, "short": "Who's there? " * 12}, NEW)


def test_knobs_choose_the_cache_and_places_move_the_view(lab: CachePolicyExplorer, lm: LoadedModel) -> None:
    assert "<b>h2o:32+32</b>" in lab.view.value
    lab.budget.value = 24
    assert (lab.recent.value, lab.kind) == (23, "h2o:1+23")
    lab.policy.value = "streaming"
    assert (lab.kind, lab.sinks.disabled, lab.recent.disabled) == ("streaming:4+20", False, True)
    own = follow(lm, PROMPT, "streaming:4+20", new_tokens=NEW, reference=lab.full.answer)
    assert lab.view.value == policy_html(own, lab.full, NEW, 0, 0)
    lab.step.value, lab.layer.value, lab.head.value = 2, 1, 1
    assert lab.view.value == policy_html(own, lab.full, 2, 1, 1)
    assert "step 2 of 4: layer 1, KV head 1 holds 24 of" in lab.view.value
    lab.policy.value = "full"
    assert lab.budget.disabled
    assert "The whole answer is the same." in lab.view.value
    lab.prompt.value = "short"
    assert "there?" in lab.view.value
    lab.policy.value, lab.chunk.value = "h2o", 16
    assert lab.course.answer == follow(lm, "Who's there? " * 12, lab.kind, new_tokens=NEW, chunk=16).answer


def test_a_setting_is_run_once(lab: CachePolicyExplorer) -> None:
    before = lab.course
    lab.policy.value = "window"
    lab.policy.value = "h2o"
    assert lab.course is before


def test_the_controls_are_all_in_the_box(lab: CachePolicyExplorer) -> None:
    panel, view = lab.box.children
    assert view is lab.view
    assert [child.description for child in panel.children] == [
        "prompt", "policy", "tokens kept", "sinks", "recent", "prompt is read", "step", "layer", "KV head",
    ]  # fmt: skip


def test_the_view_marks_what_is_held(full: Course, courses: dict[str, Course]) -> None:
    page = policy_html(courses["streaming:4+20"], full, NEW, 0, 0)
    tokens = [*full.prompt, *courses["streaming:4+20"].pieces[: NEW - 1]]
    spans = re.findall(rf"background:{CACHE_SURFACE};color:#fff[^>]*>([^<]*)<", page)
    wanted = "".join([*tokens[:4], *tokens[-20:]]).replace("\n", "⏎")
    assert "".join(spans).replace("&lt;", "<").replace("&gt;", ">").replace("&#x27;", "'") == wanted
    widths = [float(width) for width in re.findall(rf"width:([\d.]+)%;background:{CACHE}", page)]
    assert sum(widths) == pytest.approx(full.held[0].shape[1] * 100 * 24 / len(tokens), abs=0.1)
    assert "<'tis>" not in page


def test_the_picture_says_in_words_what_it_shows(courses: dict[str, Course], monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a glyph that the font lacks warns
        policy_picture(courses, 1, fact="question")
    total = len(courses["contiguous"].prompt) + NEW - 1
    assert shown[0].alt.startswith(f"Which of {total} tokens the ")
    assert f"contiguous holds {total} and answers" in shown[0].alt
    assert "h2o:12+12 holds 24 and answers" in shown[0].alt
    assert "orange" in shown[0].caption
    assert shown[0].name == "fig-policies"
