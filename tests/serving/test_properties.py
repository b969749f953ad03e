"""Whatever comes, in whatever order: each request says what it says alone, and the books are right after every step."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from symbolic import SymbolicExecutor, alone, next_token

from kvlab.cache import BlockPool
from kvlab.errors import RequestRefused
from kvlab.generation import NGramDrafter, generate
from kvlab.model import GPT
from kvlab.serving import Engine, ModelExecutor, Order, Policy, Request, Scheduler, TokenRequest
from kvlab.timing import VirtualClock
from toys import random_gpt, small_config


@dataclass(frozen=True)
class Case:
    """A machine, and what happens to it."""

    prompts: list[list[int]]
    caps: list[int]
    arrive_at: list[int]
    n_blocks: int
    block_size: int
    token_budget: int
    max_running: int
    policy: Policy
    order: Order
    reuse: bool
    stop_ids: frozenset[int]
    aborts: dict[int, list[int]] = field(default_factory=dict)
    forks: dict[int, list[int]] = field(default_factory=dict)


@st.composite
def cases(draw: st.DrawFn, vocab: int = 97, longest: int = 14) -> Case:
    count, block_size = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    # Prompts that begin alike, so that blocks are shared.
    stem = draw(st.lists(st.integers(0, vocab - 1), max_size=longest))
    tails = st.lists(st.integers(0, vocab - 1), min_size=0, max_size=longest)
    prompts = [(stem[: draw(st.integers(0, len(stem)))] + draw(tails))[:longest] or [1] for _ in range(count)]
    caps = [draw(st.integers(1, 16)) for _ in range(count)]
    # Mostly just enough blocks for the largest request, so that the others are in its way.
    largest = -(-max(len(prompt) + cap - 1 for prompt, cap in zip(prompts, caps, strict=True)) // block_size)
    indices = st.lists(st.integers(0, count - 1), max_size=2)
    return Case(
        prompts=prompts,
        caps=caps,
        arrive_at=[draw(st.integers(0, 6)) for _ in range(count)],
        n_blocks=draw(st.integers(largest, largest + 3) | st.integers(1, 20)),
        block_size=block_size,
        token_budget=draw(st.integers(1, 40)),
        max_running=draw(st.integers(1, 6)),
        policy=draw(st.sampled_from(Policy)),
        order=draw(st.sampled_from(Order)),
        reuse=draw(st.booleans()),
        stop_ids=draw(st.frozensets(st.integers(0, vocab - 1), max_size=8)),
        aborts=draw(st.dictionaries(st.integers(0, 25), indices, max_size=3)),
        forks=draw(st.dictionaries(st.integers(0, 15), indices, max_size=2)),
    )


def bound(requests: list[TokenRequest]) -> int:
    """Steps within which everybody must have ended: each feeds its own tokens, and again after each preemption.

    Whoever joined first is never preempted, so each of them is thrown out once at most for each token that those
    before it feed.
    """
    work = sum(request.longest + 1 for request in requests)
    return 30 + work * (len(requests) + 1)


def play(case: Case, engine: Engine) -> list[TokenRequest]:
    """Serve a case to its end, looking at the books after every step."""
    scheduler, served, step = engine.scheduler, list[TokenRequest](), 0
    coming = sorted(range(len(case.prompts)), key=lambda index: case.arrive_at[index])
    while coming or scheduler.unfinished:
        while coming and case.arrive_at[coming[0]] <= step:
            index = coming.pop(0)
            request = TokenRequest.of(index, case.prompts[index], case.caps[index], stop_ids=case.stop_ids)
            if impossible(case, request):
                with pytest.raises(RequestRefused, match="is refused"):
                    engine.add_request(request)
            else:
                engine.add_request(request)
                served.append(request)
        live = {request.id: request for request in served if request.finish is None}
        for index in case.aborts.get(step, ()):
            if index in live and live[index].finish is None:
                engine.abort(index)
        for index in case.forks.get(step, ()) if case.policy is not Policy.STATIC else ():
            if live.get(index) in scheduler.running and len(scheduler.running) < case.max_running:
                served.append(engine.fork(index, ("twin", index, len(served))))
        record = engine.step()
        scheduler.check()
        if record is not None:
            assert 0 <= sum(record.fed.values()) <= case.token_budget
            assert all(tokens >= 1 for tokens in record.fed.values())
            assert len(scheduler.running) <= case.max_running
        step += 1
        assert step <= bound(served), "somebody never ends"
    return served


def impossible(case: Case, request: Request) -> bool:
    """Whether no machine of this kind could serve it, in the words of the issue rather than of the scheduler."""
    room = case.n_blocks * case.block_size
    whole = {Policy.STATIC: request.prompt_tokens, Policy.CONTINUOUS: request.longest}.get(case.policy, 0)
    return request.longest > room or whole > case.token_budget


def scheduler_of(case: Case) -> Scheduler:
    return Scheduler(
        BlockPool(case.n_blocks, case.block_size),
        policy=case.policy,
        token_budget=case.token_budget,
        max_running=case.max_running,
        order=case.order,
        reuse_prefixes=case.reuse,
    )


@settings(max_examples=2000, suppress_health_check=list(HealthCheck))
@given(cases(), st.sets(st.integers(1, 40), max_size=2), st.integers(0, 3))
def test_everybody_says_what_they_say_alone(case: Case, failing_calls: set[int], drafted: int) -> None:
    scheduler = scheduler_of(case)

    def fails(request: Request, call: int) -> bool:
        return call in failing_calls and request is list(executor.plans[-1].tokens)[-1]

    def guess(request: TokenRequest) -> list[int]:
        """Right for the most part, and wrong where the answer so far is a multiple of 3."""
        said = list[int]()
        for _ in range(drafted):
            said.append((next_token(request.tokens + said) + (request.new_tokens % 3 == 0)) % 97)
        return said

    executor = SymbolicExecutor(scheduler.pool, fails, guess)
    served = play(case, Engine(scheduler, executor, VirtualClock()))
    for request in served:
        expected = alone(case.prompts[_origin(request)], request.max_new_tokens, case.stop_ids)
        if request.finish in ("length", "stop"):
            assert request.answer == expected
            assert (request.finish == "stop") == (expected[-1] in case.stop_ids)
        else:
            assert request.finish in ("abort", "error")
            assert request.answer == expected[: len(request.answer)]
    assert scheduler.pool.n_free == scheduler.pool.n_blocks
    assert set(executor.forgotten) == set(served)
    event(f"preemptions: {min(sum(request.preemptions for request in served), 3)}")
    event(f"errors: {sum(request.finish == 'error' for request in served)}")


def _origin(request: TokenRequest) -> int:
    return request.id[1] if isinstance(request.id, tuple) else request.id  # type: ignore[return-value]


@pytest.fixture(scope="module")
def toy() -> GPT:
    return random_gpt(small_config(n_layer=2, windows=(None, 5)), torch.float64)


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(case=cases(vocab=61), drafting=st.booleans(), failing_calls=st.sets(st.integers(1, 20), max_size=1))
def test_a_float64_model_says_in_company_what_it_says_alone(
    toy: GPT, case: Case, drafting: bool, failing_calls: set[int]
) -> None:
    scheduler = scheduler_of(case)
    executor = ModelExecutor(toy, scheduler.pool, drafter=NGramDrafter if drafting else None)
    executor.storage.slots[:, :, :, : executor.storage.beyond] = torch.nan  # poison: nothing unwritten may be read
    calls, work, surprises = 0, executor._forward, list[Exception]()

    def sometimes_fails(*arguments):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        if calls in failing_calls:
            raise RuntimeError("the device is gone")
        try:
            return work(*arguments)
        except Exception as failure:  # the engine would take the step request by request, and nobody would know
            surprises.append(failure)
            raise

    executor._forward = sometimes_fails  # type: ignore[method-assign]
    for request in play(case, Engine(scheduler, executor, VirtualClock())):
        if request.finish in ("length", "stop"):
            prompt = case.prompts[_origin(request)]
            expected = generate(toy, [prompt], max_new_tokens=request.max_new_tokens, ignore_eos=True).run().tokens[0]
            ends = [index for index, token in enumerate(expected) if token in case.stop_ids]
            assert request.answer == expected[: ends[0] + 1 if ends else None]
        else:
            assert request.finish == "abort" or request.error == "RuntimeError: the device is gone"
    assert not surprises
    assert scheduler.pool.n_free == scheduler.pool.n_blocks
