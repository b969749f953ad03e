"""Beam search against brute force."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvlab.errors import PromptError, SamplingError
from kvlab.generation import beam_search, generate
from kvlab.model import GPT
from toys import random_gpt, small_config


def log_prob(model: GPT, prompt: list[int], tokens: tuple[int, ...]) -> float:
    """Of an answer, recomputed without a cache."""
    rows = model(torch.tensor([[*prompt, *tokens]]))[0].float().log_softmax(-1)
    at = range(len(prompt) - 1, len(prompt) + len(tokens) - 1)
    return sum(float(rows[i, token]) for i, token in zip(at, tokens, strict=True))


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_enough_beams_find_the_very_likeliest_answer(length_penalty: float) -> None:
    """5 tokens, at most 3 of them, id 0 ends: all answers tried."""
    model = random_gpt(small_config(vocab_size=5))
    prompt = [1, 2]
    answers = [
        a
        for n in (1, 2, 3)
        for a in itertools.product(range(5), repeat=n)
        if 0 not in a[:-1] and (a[-1] == 0 or n == 3)
    ]
    best = max(answers, key=lambda a: log_prob(model, prompt, a) / len(a) ** length_penalty)
    [first, *_] = beam_search(
        model, prompt, n_beams=125, max_new_tokens=3, length_penalty=length_penalty, eos_token_ids=[0]
    )
    assert first.tokens == best
    assert first.log_prob == pytest.approx(log_prob(model, prompt, best), abs=1e-4)


def test_one_beam_is_greedy(model: GPT) -> None:
    [beam] = beam_search(model, [1, 2, 3], n_beams=1, max_new_tokens=9)
    assert list(beam.tokens) == generate(model, [1, 2, 3], max_new_tokens=9).run().tokens[0]


def test_scores_are_those_of_the_answers_recomputed(model: GPT) -> None:
    beams = beam_search(model, [1, 2, 3], n_beams=4, max_new_tokens=6, eos_token_ids=[7])
    assert len({beam.tokens for beam in beams}) == 4
    for beam in beams:
        assert beam.log_prob == pytest.approx(log_prob(model, [1, 2, 3], beam.tokens), abs=1e-4)
        assert beam.finished == (beam.tokens[-1] == 7)
    scores = [beam.score(1.0) for beam in beams]
    assert scores == sorted(scores, reverse=True)


def test_the_context_limits_the_beams(model: GPT) -> None:
    [beam] = beam_search(model, [1] * 62, n_beams=1, max_new_tokens=50)
    assert len(beam.tokens) == 3


def test_bad_input_is_refused(model: GPT) -> None:
    with pytest.raises(SamplingError, match="n_beams is 0"):
        beam_search(model, [1], n_beams=0)
    with pytest.raises(PromptError, match="empty"):
        beam_search(model, [], n_beams=2)
