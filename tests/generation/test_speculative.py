"""Speculative decoding: the same tokens, the same distribution, and books that balance."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlab.errors import ConfigError, PromptError, SamplingError
from kvlab.generation import (
    Draft,
    Drafter,
    ModelDrafter,
    NGramDrafter,
    Sampling,
    accept,
    generate,
    probabilities,
    speculate,
    truncated,
)
from kvlab.generation.sampling import stream_of
from kvlab.generation.speculative import settle
from kvlab.model import GPT
from kvlab.quantize import Int4, quantize
from kvlab.weights import LoadedModel, load
from toys import random_gpt, small_config

PROMPT = [1, 2, 3, 1, 2]
TARGET = random_gpt(small_config())


class Foreknowing:
    """Drafts the answer that is known to come, or one off it."""

    def __init__(self, answer: Sequence[int], shift: int = 0, drafted: int = 4) -> None:
        self.answer, self.shift, self.drafted = answer, shift, drafted

    def propose(self, tokens: Sequence[int], most: int) -> Draft:
        done = len(tokens) - len(PROMPT)
        coming = self.answer[done : done + min(self.drafted, most)]
        return Draft([(token + self.shift) % TARGET.config.vocab_size for token in coming])


class Dice:
    """Drafts of random length and tokens, with random distributions or none."""

    def __init__(self, seed: int, vocab: int = 61) -> None:
        self.stream, self.vocab = stream_of(seed), vocab

    def propose(self, tokens: Sequence[int], most: int) -> Draft:
        n = min(most, int(torch.randint(6, (1,), generator=self.stream)))
        if n and torch.rand(1, generator=self.stream) < 0.5:
            probs = torch.rand(n, self.vocab, generator=self.stream).softmax(1)
            return Draft(torch.multinomial(probs, 1, generator=self.stream)[:, 0].tolist(), probs)
        return Draft(torch.randint(self.vocab, (n,), generator=self.stream).tolist())


def rounded() -> GPT:
    """A quantized decoder, of widths that groups of 16 divide."""
    return quantize(random_gpt(small_config(hidden_size=32, intermediate_size=64)), Int4(group_size=16))


def drafters(answer: list[int]) -> Iterator[tuple[str, Drafter]]:
    """Good ones, bad ones and mad ones."""
    yield "right", Foreknowing(answer)
    yield "wrong", Foreknowing(answer, shift=1)
    yield "silent", Foreknowing([])
    yield "dice", Dice(0)
    yield "n-gram", NGramDrafter()
    yield "itself", ModelDrafter(TARGET)
    yield "itself, sampled", ModelDrafter(TARGET, 3, Sampling(temperature=0.7, seed=1))
    yield "truncated", ModelDrafter(truncated(TARGET, 1))
    yield "stranger", ModelDrafter(random_gpt(small_config(n_layer=1), seed=5), 2, Sampling(temperature=1.0, seed=0))
    yield "quantized stranger", ModelDrafter(rounded())
    yield "one token", ModelDrafter(TARGET, 1)


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load("tiny", dtype="float32", device="cpu")


GREEDY = generate(TARGET, PROMPT, max_new_tokens=24).run().tokens[0]


# Greedy: token for token


@pytest.mark.parametrize(("name", "drafter"), list(drafters(GREEDY)))
def test_greedy_tokens_are_those_of_generate(name: str, drafter: Drafter) -> None:
    run = speculate(TARGET, PROMPT, drafter, max_new_tokens=24).run()
    assert run.tokens == [GREEDY]
    assert run.finish_reasons == ["length"]
    assert run.cache.length == run.cache.tokens_seen == len(PROMPT) + 24 - 1
    assert run.timing.kv_bytes == run.cache.used_bytes
    assert 1 + run.accepted + run.passes == 24


@settings(max_examples=15)
@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    n=st.integers(1, 16),
    drafted=st.integers(1, 9),
    seed=st.integers(0, 3),
    window=st.sampled_from([None, 4]),
)
def test_any_prompt_and_draft_length_gives_the_greedy_tokens(
    prompt: list[int], n: int, drafted: int, seed: int, window: int | None
) -> None:
    model = random_gpt(small_config(windows=(None, window), vocab_size=7), seed=seed)
    alone = generate(model, prompt, max_new_tokens=n).run().tokens
    for drafter in (NGramDrafter(drafted), ModelDrafter(truncated(model, 1), drafted), Dice(seed, vocab=7)):
        run = speculate(model, prompt, drafter, max_new_tokens=n).run()
        assert run.tokens == alone
        assert run.cache.rows_seen == [len(prompt) + n - 1]


def test_a_draft_that_is_always_right_saves_its_passes_and_one_that_is_always_wrong_saves_none() -> None:
    right = speculate(TARGET, PROMPT, Foreknowing(GREEDY), max_new_tokens=21).run()
    assert (right.passes, right.drafted, right.accepted) == (4, 16, 16)
    assert (right.acceptance, right.tokens_per_pass) == (1.0, 5.0)
    wrong = speculate(TARGET, PROMPT, Foreknowing(GREEDY, shift=1), max_new_tokens=21).run()
    assert (wrong.passes, wrong.accepted) == (20, 0)
    assert (wrong.acceptance, wrong.tokens_per_pass) == (0.0, 1.0)


def test_without_drafts_there_is_no_acceptance() -> None:
    run = speculate(TARGET, PROMPT, Foreknowing([]), max_new_tokens=4)
    assert (run.acceptance, run.tokens_per_pass) == (None, None)
    run.run()
    assert (run.acceptance, run.tokens_per_pass, run.passes) == (None, 1.0, 3)


# Limits, ends and books


class Asked(Foreknowing):
    """Notes how much it was asked for."""

    def __init__(self, answer: Sequence[int]) -> None:
        super().__init__(answer, drafted=9)
        self.most: list[int] = []

    def propose(self, tokens: Sequence[int], most: int) -> Draft:
        self.most.append(most)
        return super().propose(tokens, most)


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_a_draft_never_reaches_beyond_max_new_tokens(n: int) -> None:
    drafter = Asked(GREEDY)
    run = speculate(TARGET, PROMPT, drafter, max_new_tokens=n).run()
    assert run.tokens == [GREEDY[:n]]
    assert run.cache.nbytes == run.timing.kv_bytes == (len(PROMPT) + n - 1) * run.cache.bytes_per_token
    assert drafter.most == [n - 2] * (n > 1)


def test_a_draft_never_reaches_beyond_the_context() -> None:
    prompt = [7, 8] * 29
    alone = generate(TARGET, prompt, max_new_tokens=50).run()
    for drafter in (NGramDrafter(9), ModelDrafter(TARGET, 9)):
        run = speculate(TARGET, prompt, drafter, max_new_tokens=50).run()
        assert run.tokens == alone.tokens
        assert (len(run.tokens[0]), run.finish_reasons, run.cache.tokens_seen) == (7, ["length"], 64)


def test_a_draft_model_with_a_shorter_context_falls_silent_at_its_end() -> None:
    drafter = ModelDrafter(random_gpt(small_config(max_seq_len=16)))
    run = speculate(TARGET, PROMPT, drafter, max_new_tokens=40).run()
    assert run.tokens == generate(TARGET, PROMPT, max_new_tokens=40).run().tokens
    assert drafter.propose([1] * 16, 4).tokens != []
    assert drafter.propose([1] * 17, 4).tokens == []


@pytest.mark.parametrize("at", range(1, 8))
def test_an_end_of_sequence_inside_a_draft_ends_the_answer_there(at: int) -> None:
    """vllm 4180's neighbour: whatever was accepted after the end is neither answer nor cache."""
    end = GREEDY[at]
    first = GREEDY.index(end)
    ending = copy.copy(TARGET)
    ending.config = TARGET.config.with_(eos_token_ids=(end,))
    run = speculate(ending, PROMPT, Foreknowing(GREEDY), max_new_tokens=24).run()
    assert run.tokens == [GREEDY[: first + 1]] == generate(ending, PROMPT, max_new_tokens=24).run().tokens
    assert run.finish_reasons == ["stop"]
    assert run.cache.rows_seen == [len(PROMPT) + first]
    passes, rest = divmod(first, 5)
    assert run.passes == passes + (rest > 0)
    assert run.accepted == first - passes
    ignored = speculate(ending, PROMPT, Foreknowing(GREEDY), max_new_tokens=24, ignore_eos=True).run()
    assert ignored.tokens == [GREEDY]


def test_a_stop_string_inside_a_draft_ends_the_answer_there(tiny: LoadedModel) -> None:
    prompt = "ROMEO:\nWhat light"
    free = generate(tiny, prompt, max_new_tokens=24).run()
    stop = [free.text[20:25]]
    alone = generate(tiny, prompt, max_new_tokens=24, stop=stop).run()
    drafter = ModelDrafter(tiny.model, 7)
    run = speculate(tiny, prompt, drafter, max_new_tokens=24, stop=stop).run()
    assert (run.text, run.tokens, run.finish_reasons) == (alone.text, alone.tokens, ["stop"])
    assert run.cache.rows_seen == alone.cache.rows_seen
    assert "".join(step.text for step in speculate(tiny, prompt, drafter, max_new_tokens=24)) == free.text


def test_padded_ids_of_the_embedding_are_never_drawn(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm 340: not even when the drafter proposes them."""
    monkeypatch.setattr(LoadedModel, "vocab_size", 400)
    drafter = ModelDrafter(tiny.model, 3, Sampling(temperature=2.0, seed=0))
    run = speculate(tiny, [1, 2, 3], drafter, max_new_tokens=30, sampling=Sampling(temperature=2.0, seed=0)).run()
    assert max(run.tokens[0]) < 400
    assert 0 < run.accepted < run.drafted


def test_steps_come_in_passes_and_an_iteration_can_be_taken_up_again() -> None:
    run = speculate(TARGET, PROMPT, Foreknowing(GREEDY), max_new_tokens=11)
    assert run.cache.length == 0
    steps = list(itertools.islice(run, 3))
    assert (run.passes, run.cache.length) == (1, len(PROMPT) + 5)
    steps += list(run)
    assert [step.token for step in steps] == GREEDY[:11]
    assert [step.phase for step in steps] == ["prefill"] + ["decode"] * 10
    seconds = [step.seconds for step in steps]
    assert run.timing.requests[0].tokens == seconds == sorted(seconds)
    assert len(set(seconds[1:6])) == len(set(seconds[6:])) == 1


# Acceptance: exact, by enumeration

VOCAB = 3


def quarters(counts: Sequence[int]) -> Tensor:
    return torch.tensor(counts) / 4


def outcomes(n: int, grid: int) -> Iterator[Tensor]:
    """Equally likely random numbers for a verdict: the middles of a grid on whose lines every threshold lies."""
    for cells in itertools.product(range(grid), repeat=n):
        yield (torch.tensor(cells) + 0.5) / grid


FEW = [counts for counts in itertools.product(range(5), repeat=VOCAB) if sum(counts) == 4]


@pytest.mark.parametrize("p", FEW)
def test_the_first_token_is_distributed_as_the_target_whatever_was_drafted(p: tuple[int, ...]) -> None:
    """Distributions in quarters over three tokens, all drafts, all random numbers: thresholds are twelfths."""
    probs = torch.stack([quarters(p), quarters((4, 0, 0))])
    for q in FEW[sum(p[:2]) % 4 :: 4]:
        total: Counter[int] = Counter()
        for token in range(VOCAB):
            if q[token]:
                draft = Draft([token], quarters(q)[None])
                for uniform in outcomes(2, 12):
                    total[settle(probs, draft, uniform)[0]] += q[token]
        assert [Fraction(total[t], 4 * 12**2) for t in range(VOCAB)] == [Fraction(n, 4) for n in p]


# By the token before, in quarters. No 3 in Q and in what remains of P: all thresholds are quarters too.
P = {None: (2, 1, 1), 0: (1, 3, 0), 1: (0, 2, 2), 2: (4, 0, 0)}
Q = {None: (1, 1, 2), 0: (2, 2, 0), 1: (1, 1, 2), 2: (1, 1, 2)}


@pytest.mark.parametrize("certain", [False, True])
def test_pairs_of_tokens_are_distributed_as_the_target(certain: bool) -> None:
    """Drafts of two, each from its own conditional; where a verdict is one token, the target continues."""
    pairs: Counter[tuple[int, int]] = Counter()
    for first, second in [(0, 1)] if certain else itertools.product(range(VOCAB), repeat=2):
        chance = 1.0 if certain else Q[None][first] * Q[first][second] / 16
        rows = torch.stack([quarters(P[before]) for before in (None, first, second)])
        q = None if certain else torch.stack([quarters(Q[before]) for before in (None, first)])
        for uniform in outcomes(3, 4) if chance else ():
            verdict = settle(rows, Draft([first, second], q), uniform)
            shares = P[verdict[0]] if len(verdict) == 1 else [4 * (token == verdict[1]) for token in range(VOCAB)]
            for token, share in enumerate(shares):
                pairs[verdict[0], token] += chance / 4**3 * share / 4
    for a, b in itertools.product(range(VOCAB), repeat=2):
        assert pairs[a, b] == pytest.approx(P[None][a] * P[a][b] / 16, abs=1e-6), (a, b)


def chi_square(counts: Counter[int], probs: Tensor, n: int) -> float:
    """Standard deviations that the statistic lies above its mean."""
    expected = {token: n * p for token, p in enumerate(probs.tolist()) if p > 0}
    assert set(counts) <= set(expected)
    statistic = sum((counts[token] - e) ** 2 / e for token, e in expected.items())
    freedom = len(expected) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_random_numbers_of_a_stream_give_the_distribution(temperature: float) -> None:
    torch.manual_seed(0)
    p, q = torch.randn(8).softmax(0), (torch.randn(8) / temperature).softmax(0)
    stream, guesses = stream_of(3), stream_of(4)
    n, counts = 2000, Counter[int]()
    for token in torch.multinomial(q, n, replacement=True, generator=guesses).tolist():
        counts[accept(torch.stack([p, p]), Draft([token], q[None]), stream)[0]] += 1
    assert chi_square(counts, p, n) < 4


@pytest.mark.parametrize(
    "mine",
    [Sampling(temperature=1.0), Sampling(temperature=0.8, top_p=0.8), Sampling(temperature=1.5, top_k=3)],
    ids=["plain", "top-p", "top-k"],
)
def test_answers_are_distributed_as_the_model_says_with_one_seed_for_both(mine: Sampling) -> None:
    """The draft draws otherwise and from the same seed: were the streams one, guesses would decide their acceptance."""
    model = random_gpt(small_config(vocab_size=4), torch.float32, seed=2)
    draft, n, seconds, thirds = truncated(model, 1), 400, Counter[int](), Counter[int]()
    for seed in range(n):
        drafter = ModelDrafter(draft, 2, Sampling(temperature=1.5, top_k=3, seed=seed))
        sampling = dataclasses.replace(mine, seed=seed)
        _, second, third = speculate(model, [1, 2], drafter, max_new_tokens=3, sampling=sampling).run().tokens[0]
        seconds[second] += 1
        thirds[third] += 1
    law = joint(model, [1, 2], mine)
    assert chi_square(seconds, law.sum(dim=(0, 2)), n) < 4
    assert chi_square(thirds, law.sum(dim=(0, 1)), n) < 4


def joint(model: GPT, prompt: list[int], sampling: Sampling) -> Tensor:
    """The exact law of three tokens."""
    vocab = model.config.vocab_size
    rows = [[*prompt, a, b] for a, b in itertools.product(range(vocab), repeat=2)]
    logits = model(torch.tensor(rows))[:, len(prompt) - 1 :]
    probs = probabilities(logits.flatten(0, 1), [sampling] * (3 * len(rows))).view(vocab, vocab, 3, vocab)
    a = probs[0, 0, 0]
    return a[:, None, None] * probs[:, 0, 1][:, :, None] * probs[:, :, 2]


def test_equal_distributions_accept_everything() -> None:
    torch.manual_seed(1)
    probs = torch.randn(200, 50).softmax(1)
    tokens = torch.multinomial(probs, 1)[:, 0].tolist()
    uniform = torch.full((201,), 1 - 2**-24)
    assert settle(torch.cat([probs, probs[:1]]), Draft(tokens, probs), uniform)[:-1] == tokens


def test_a_rejection_by_rounding_alone_leaves_the_target_itself() -> None:
    """p and q differ by what float32 sums are off; what p has more than q is nothing."""
    p = torch.tensor([[0.5 - 2**-20, 0.5, 0.0], [1.0, 0.0, 0.0]])
    q = torch.tensor([[0.5, 0.5, 0.0]])
    assert settle(p, Draft([0], q), torch.tensor([1 - 2**-24, 0.0])) == [0]
    assert settle(p, Draft([0], q), torch.tensor([1 - 2**-24, 0.9])) == [1]
    almost = torch.tensor([[1 - 2**-24, 0.0, 0.0], [1.0, 0.0, 0.0]])
    assert settle(almost, Draft([0]), torch.tensor([1 - 2**-24, 0.5])) == [0]


def test_greedy_acceptance_is_comparison_with_argmax() -> None:
    torch.manual_seed(2)
    for _ in range(100):
        logits = torch.randn(5, 4)
        best = logits.argmax(1).tolist()
        q = torch.randn(4, 4).softmax(1)
        tokens = torch.multinomial(q, 1)[:, 0].tolist()
        kept = next((i for i in range(4) if tokens[i] != best[i]), 4)
        for draft in (Draft(tokens), Draft(tokens, q)):
            assert accept(probabilities(logits, [Sampling()] * 5), draft, stream_of(0)) == best[: kept + 1]


def test_what_the_target_excludes_is_never_kept_and_never_drawn() -> None:
    p = torch.tensor([[0.0, 0.4, 0.6], [0.0, 1.0, 0.0]])
    for cells in itertools.product([0.0, 0.3, 0.999999], repeat=2):
        assert settle(p, Draft([0]), torch.tensor(cells))[0] in (1, 2)
        assert settle(p, Draft([0], torch.tensor([[1.0, 0.0, 0.0]])), torch.tensor(cells))[0] in (1, 2)


# Seeds


def test_without_drafts_sampled_tokens_are_those_of_generate() -> None:
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=7)
    alone = generate(TARGET, PROMPT, max_new_tokens=20, sampling=sampling).run()
    assert speculate(TARGET, PROMPT, Foreknowing([]), max_new_tokens=20, sampling=sampling).run().tokens == alone.tokens


def test_seeds_reproduce_and_differ() -> None:
    def tokens(seed: int, draft_seed: int) -> list[int]:
        drafter = ModelDrafter(truncated(TARGET, 1), 3, Sampling(temperature=1.0, seed=draft_seed))
        sampling = Sampling(temperature=1.0, seed=seed)
        return speculate(TARGET, PROMPT, drafter, max_new_tokens=20, sampling=sampling).run().tokens[0]

    assert tokens(1, 2) == tokens(1, 2)
    assert len({tuple(tokens(*seeds)) for seeds in [(1, 2), (1, 3), (2, 2)]}) == 3


# N-grams


def scanned(tokens: list[int], drafted: int, longest: int, shortest: int) -> list[int]:
    """Every place compared with the end, the latest first, and the continuation copied token by token."""
    for n in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - 1, n - 1, -1):
            if len(tokens) > n and tokens[start - n : start] == tokens[-n:]:
                text = list(tokens)
                for i in range(drafted):
                    text.append(text[start + i])
                return text[len(tokens) :]
    return []


@settings(max_examples=200)
@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    cuts=st.sets(st.integers(1, 40)),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
    drafted=st.integers(1, 6),
    most=st.integers(0, 8),
)
def test_an_n_gram_draft_is_what_a_scan_of_everything_finds(
    tokens: list[int], cuts: set[int], shortest: int, more: int, drafted: int, most: int
) -> None:
    drafter = NGramDrafter(drafted, shortest + more, shortest)
    for cut in sorted({min(cut, len(tokens)) for cut in cuts} | {len(tokens)}):
        found = drafter.propose(tokens[:cut], most)
        assert found.tokens == scanned(tokens[:cut], min(drafted, most), shortest + more, shortest)
        assert found.probs is None


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], [4, 5, 1, 2]),
        ([1, 2, 9, 7, 2, 8, 1, 2], [9, 7, 2, 8]),  # the longer match wins over the later one
        ([5, 1, 5, 2, 5, 3, 5], [3, 5, 3, 5]),  # the later one of the same length; a loop goes on
        ([4, 4], [4, 4, 4, 4]),
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_n_gram_drafts_by_hand(tokens: list[int], draft: list[int]) -> None:
    assert NGramDrafter().propose(tokens, 10).tokens == draft


def test_an_n_gram_drafter_begins_anew_with_a_shorter_sequence() -> None:
    drafter = NGramDrafter()
    drafter.propose([1, 2, 3, 4] * 5, 4)
    assert drafter.propose([1, 2, 3], 4).tokens == []


# Draft models


def test_a_draft_model_returns_what_it_drew_from() -> None:
    sampling = Sampling(temperature=0.7, top_k=9, seed=3)
    draft = ModelDrafter(TARGET, 4, sampling).propose(PROMPT, 3)
    assert len(draft.tokens) == 3
    logits = TARGET(torch.tensor([PROMPT + draft.tokens]))[0, len(PROMPT) - 1 : -1]
    assert draft.probs is not None
    torch.testing.assert_close(draft.probs, probabilities(logits, [sampling] * 3))
    assert (draft.probs[range(3), draft.tokens] > 0).all()


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=12), min_size=1, max_size=5), st.integers(0, 6))
def test_a_draft_model_copes_with_any_sequence_after_any_other(sequences: list[list[int]], most: int) -> None:
    """Its cache goes back to what they share: the draft is that of a fresh one."""
    used = ModelDrafter(TARGET)
    for tokens in sequences:
        assert used.propose(tokens, most).tokens == ModelDrafter(TARGET).propose(tokens, most).tokens


@pytest.mark.parametrize("drafted", [1, 4])
def test_a_model_that_drafts_for_itself_is_always_right(drafted: int) -> None:
    """Its cache outgrows its first size on the way, several times."""
    run = speculate(TARGET, PROMPT[:1], ModelDrafter(TARGET, drafted), max_new_tokens=61).run()
    assert (run.acceptance, run.passes) == (1.0, 60 // (drafted + 1))


def test_a_draft_model_reads_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    run = GPT.run
    monkeypatch.setattr(
        GPT, "run", lambda self, tokens, *rest: read.append(tokens.shape[1]) or run(self, tokens, *rest)
    )
    drafter = ModelDrafter(TARGET, 3)
    [a, b, c] = drafter.propose(PROMPT, 3).tokens
    drafter.propose([*PROMPT, a, b, c, 9], 3)
    drafter.propose([*PROMPT, a, b, c, 9, (drafter._fed[-2] + 1) % 61], 3)
    assert read == [5, 1, 1, 2, 1, 1, 1, 1, 1]


def test_a_truncated_model_shares_its_weights_and_is_its_first_layers() -> None:
    for model in (
        TARGET,
        quantize(random_gpt(small_config(hidden_size=32, intermediate_size=64)), Int4(group_size=16)),
    ):
        short = truncated(model, 1)
        assert short.config.n_layer == len(short.blocks) == 1
        pointers = {t.data_ptr() for t in model.state_dict().values()}
        assert {t.data_ptr() for t in short.state_dict().values()} <= pointers
        cut = copy.deepcopy(model)
        del cut.blocks[1:]
        torch.testing.assert_close(short(torch.tensor([PROMPT])), cut(torch.tensor([PROMPT])))
    whole = truncated(TARGET, 2)
    assert torch.equal(whole(torch.tensor([PROMPT])), TARGET(torch.tensor([PROMPT])))
    assert not whole.training
    learned = random_gpt(small_config(position="learned", norm="layernorm", gated_mlp=False, windows=(4, None)))
    assert truncated(learned, 1).config.windows == (4,)
    assert truncated(learned, 1)(torch.tensor([PROMPT])).isfinite().all()


def test_a_model_can_be_its_own_quantized_draft(tiny: LoadedModel) -> None:
    """Rounded weights guess most tokens; no other model is needed."""
    draft = quantize(copy.deepcopy(tiny.model), Int4())
    run = speculate(tiny, "ROMEO:", ModelDrafter(draft), max_new_tokens=40).run()
    assert run.tokens == generate(tiny, "ROMEO:", max_new_tokens=40).run().tokens
    assert run.acceptance is not None
    assert run.acceptance > 0.5


# Refusals


class Says:
    def __init__(self, draft: Draft) -> None:
        self.draft = draft

    def propose(self, tokens: Sequence[int], most: int) -> Draft:
        return self.draft


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft([1, 2, 3, 4]), "asked for 3 tokens at most and gave 4"),
        (Draft([61]), "holds the id 61; the target's ids are 0 to 60"),
        (Draft([-1]), "holds the id -1"),
        (Draft([1], torch.ones(1, 60) / 60), "vocabulary has 60 tokens, the target's 61"),
        (Draft([1], torch.eye(61)[:1]), "the token 1, and its own distribution gives it probability 0"),
    ],
)
def test_what_cannot_be_a_draft_is_refused(draft: Draft, message: str) -> None:
    with pytest.raises(SamplingError, match=message):
        speculate(TARGET, PROMPT, Says(draft), max_new_tokens=5).run()


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(SamplingError, match="a draft of 2 tokens has 1 distributions"):
        Draft([1, 2], torch.ones(1, 4) / 4)
    with pytest.raises(SamplingError, match="2 distributions for a draft of 2 tokens"):
        accept(torch.ones(2, 4) / 4, Draft([1, 2]), stream_of(0))
    with pytest.raises(ConfigError, match="drafted is 0; it must be 1 or more"):
        NGramDrafter(0)
    with pytest.raises(ConfigError, match="longest is 1; it must be 2 or more"):
        NGramDrafter(longest=1, shortest=2)
    with pytest.raises(ConfigError, match="drafted is 0"):
        ModelDrafter(TARGET, 0)
    for n_layer in (0, 3):
        with pytest.raises(ConfigError, match=f"n_layer is {n_layer}; small has 2 layers"):
            truncated(TARGET, n_layer)
    with pytest.raises(PromptError, match="is empty"):
        speculate(TARGET, [], NGramDrafter())


def test_a_draft_model_of_another_vocabulary_is_refused_before_anything_runs() -> None:
    other = random_gpt(small_config(vocab_size=60))
    with pytest.raises(ConfigError, match="a vocabulary of 60, small one of 61; choose a draft of the same family"):
        speculate(TARGET, PROMPT, ModelDrafter(other))
