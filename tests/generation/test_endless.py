"""Answers without an end: the tokens of an ordinary answer, in the same memory."""

from __future__ import annotations

from itertools import islice

import pytest

import kvlab
from kvlab.cache import StreamingCache, make_cache
from kvlab.errors import ConfigError, PromptError
from kvlab.generation import Sampling, endless
from kvlab.timing import VirtualClock
from kvlab.weights import LoadedModel


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return kvlab.load("tiny", device="cpu", dtype="float32")


def test_it_begins_as_an_ordinary_answer_and_goes_on_past_the_context(tiny: LoadedModel) -> None:
    sampling = Sampling(temperature=0.9, seed=3)
    steps = list(islice(endless(tiny, "O Romeo", cache="streaming:4+28", sampling=sampling), 600))
    full = kvlab.generate(
        tiny, "O Romeo", cache="streaming:4+28", sampling=sampling, max_new_tokens=600, ignore_eos=True
    )
    assert [step.token for step in steps] == full.run().tokens[0]
    assert len(steps) > tiny.config.max_seq_len
    assert full.text.startswith("".join(step.text for step in steps))
    assert [step.phase for step in steps[:3]] == ["prefill", "decode", "decode"]


def test_before_the_window_rolls_it_is_the_answer_of_a_full_cache(tiny: LoadedModel) -> None:
    plain = kvlab.generate(tiny, "O Romeo", max_new_tokens=20, ignore_eos=True).run()
    steps = islice(endless(tiny, "O Romeo", cache="window:64"), 20)
    assert [step.token for step in steps] == plain.tokens[0]


def test_a_cache_that_is_handed_in_is_continued(tiny: LoadedModel) -> None:
    cache = make_cache("streaming:2+20", tiny.config, 1, 1, tiny.model.dtype)
    assert isinstance(cache, StreamingCache)
    first = list(islice(endless(tiny, "To be", cache=cache), 40))
    seen = cache.tokens_seen
    assert seen == len(tiny.tokenizer.encode("To be")) + 39  # the last one was not fed back
    list(islice(endless(tiny, [first[-1].token], cache=cache), 2))
    assert (cache.tokens_seen, cache.length) == (seen + 2, 22)


def test_nothing_that_grows_is_kept(tiny: LoadedModel) -> None:
    """The detokenizer holds the tokens of a few steps, the generator no list of its own."""
    steps = endless(tiny, "O", cache="window:16", clock=VirtualClock())
    held = set()
    for _ in islice(steps, 200):
        frame = steps.gi_frame.f_locals  # type: ignore[attr-defined]
        held.add(len(frame["text"]._ids))
        assert not [name for name, value in frame.items() if isinstance(value, list)]
    assert max(held) < 12


@pytest.mark.parametrize(
    ("cache", "error", "message"),
    [
        ("contiguous", ConfigError, "ContiguousCache ends after .* tokens; .* streaming:4\\+252"),
        ("h2o:4+4", ConfigError, "HeavyHitterCache ends after"),
        ("streaming:0+0", ConfigError, "window is 0"),
    ],
)
def test_a_cache_that_ends_is_refused_at_once(
    tiny: LoadedModel, cache: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        endless(tiny, "O", cache=cache)


def test_an_empty_prompt_is_refused(tiny: LoadedModel) -> None:
    with pytest.raises(PromptError, match="empty"):
        endless(tiny, "", cache="window:16")
