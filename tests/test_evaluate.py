"""What quality is measured by, on models whose answers are known."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kvlab
from kvlab.cache import KVCache, NoCache, QuantizedCache, make_cache
from kvlab.errors import PromptError
from kvlab.evaluate import agreement, logits_of, losses, perplexity, recall
from kvlab.model import GPT
from kvlab.weights import LoadedModel


def text_of(model: GPT, time: int = 40) -> Tensor:
    return torch.randint(model.config.vocab_size, (time,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return kvlab.load("tiny", device="cpu", dtype="float32")


def test_a_model_that_knows_nothing_has_the_vocabulary_for_perplexity(model: GPT) -> None:
    model.head.weight.zero_()
    assert perplexity(model, text_of(model)) == pytest.approx(61)


def test_a_model_that_is_certain_and_right_has_perplexity_one(model: GPT) -> None:
    """The head sees nothing but the last norm's output, so one row of it can win always."""
    text = torch.full((12,), 7)
    model.head.weight.copy_(-model.head.weight)
    model.norm.weight.zero_()
    model.head = torch.nn.Linear(24, 61).double()
    model.head.bias.data = torch.where(torch.arange(61) == 7, 50.0, 0.0).double()
    assert perplexity(model, text) == pytest.approx(1)


@pytest.mark.parametrize("chunk", [1, 7, 16, 40, 256])
def test_chunks_through_the_plain_cache_are_one_pass(model: GPT, chunk: int) -> None:
    text = text_of(model)
    want = model(text[None])[0]
    torch.testing.assert_close(logits_of(model, text, chunk=chunk), want.float())
    loss = F.cross_entropy(want[:-1].float(), text[1:], reduction="none")
    torch.testing.assert_close(losses(model, text, chunk=chunk), loss)
    assert perplexity(model, text, chunk=chunk) == pytest.approx(math.exp(loss.double().mean().item()))


def test_the_cache_that_is_judged_is_the_one_that_is_made(make_model: Callable[..., GPT]) -> None:
    """It is asked for once, for the whole text, and later chunks see earlier ones through it."""
    model = make_model(head_dim=32, max_seq_len=200)
    text, made = text_of(model, 150), []

    def maker(given: GPT, tokens: int) -> KVCache:
        made.append(QuantizedCache(given.config, 1, tokens, given.dtype, bits=2, residual=0))
        return made[-1]

    rounded, exact = losses(model, text, maker, chunk=32), losses(model, text, chunk=32)
    assert len(made) == 1
    assert made[0].max_len == made[0].tokens_seen == 150
    torch.testing.assert_close(rounded[:32], exact[:32], rtol=0, atol=1e-6)
    assert not torch.allclose(rounded[40:], exact[40:], atol=1e-3)


@pytest.mark.parametrize("chunk", [1, 7, 30, 149])
def test_a_stream_is_judged_past_the_context_and_token_by_token_agrees_with_one_pass(model: GPT, chunk: int) -> None:
    """The one pass has its queries rotated twice; token by token the sinks' keys are turned instead."""
    text = text_of(model, 150)
    one, chunked = (losses(model, text, "streaming:3+20", size) for size in (150, chunk))
    assert len(one) == 149 > model.config.max_seq_len
    torch.testing.assert_close(chunked, one, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (0, r"0 token\(s\); a loss needs a token"),
        (1, r"1 token\(s\); a loss needs"),
        (65, "65 tokens; small takes 1 to 64"),
    ],
)
def test_a_text_that_is_too_short_or_too_long_is_refused(model: GPT, count: int, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        perplexity(model, text_of(model, count))
    if count != 1:
        with pytest.raises(PromptError, match=f"has {count} tokens"):
            logits_of(model, text_of(model, count))


def test_agreement_is_the_share_of_equal_first_choices() -> None:
    one = torch.eye(4)
    assert agreement(one, one) == 1
    assert agreement(one, one * 3 - 1) == 1
    other = one[[0, 1, 3, 2]]
    assert agreement(one, other) == 0.5


def test_recall_hides_the_fact_at_its_depth_and_asks_for_it(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt that the model reads, piece by piece; the tiny model itself cannot answer."""
    fed: list[int] = []
    plain = tiny.model.run

    def heard(tokens: Tensor, *others: object) -> Tensor:
        fed.extend(tokens[0].tolist())
        return plain(tokens, *others)

    monkeypatch.setattr(tiny.model, "run", heard)
    places = []
    for depth in (0.0, 0.5, 1.0):
        fed.clear()
        made: list[KVCache] = []

        def maker(model: GPT, tokens: int, made: list[KVCache] = made) -> KVCache:
            made.append(make_cache("contiguous", model.config, 1, tokens, model.dtype))
            return made[-1]

        found = recall(tiny, 300, depth, seed=3, cache=maker, chunk=64)
        prompt = tiny.tokenizer.decode(fed[: found.tokens])
        assert found.tokens == pytest.approx(300, abs=2)
        assert prompt.count(found.key) == 2
        assert prompt.endswith("What is the pass key? The pass key is")
        assert f"The pass key is {found.key}. Remember it." in prompt
        assert len(fed) == found.tokens + 7  # eight tokens of answer, of which the last is never fed
        assert made[0].tokens_seen == len(fed)
        places.append(prompt.index(found.key) / len(prompt))
        assert found.depth == depth
        assert found.right == (found.key in found.answer)
    assert places[0] < 0.1 < 0.4 < places[1] < 0.6 < 0.8 < places[2]


def test_another_seed_is_another_fact(tiny: LoadedModel) -> None:
    keys = {recall(tiny, 80, 0.5, seed=seed).key for seed in (0, 0, 1)}
    assert len(keys) == 2
    assert all(len(key) == 5 for key in keys)


def test_an_answer_is_right_if_it_holds_the_fact(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    import kvlab.evaluate as evaluate

    class Said:
        def __init__(self, text: str) -> None:
            self.text = text

        def run(self) -> Said:
            return self

    for text, right in ((" 12345.", False), (f" {recall(tiny, 80, 0.5).key}.", True)):
        with monkeypatch.context() as patch:
            patch.setattr(evaluate, "generate", lambda *given, text=text, **named: Said(text))
            assert recall(tiny, 80, 0.5).right is right


def test_a_prompt_beyond_the_context_is_refused(tiny: LoadedModel) -> None:
    with pytest.raises(PromptError, match="more than the context of tiny, 512"):
        recall(tiny, 600, 0.5)


def test_a_pass_without_a_cache_can_be_judged_too(model: GPT) -> None:
    text = text_of(model)
    whole = logits_of(model, text, lambda given, tokens: NoCache(given.config, 1, given.dtype))
    torch.testing.assert_close(whole, model(text[None])[0].float())
