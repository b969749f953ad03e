"""The engine: what it says is what each request says alone, whatever fails, comes or goes meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from statistics import fmean

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from symbolic import SymbolicExecutor, alone, next_token

from kvlab.cache import BlockPool
from kvlab.cost import Row
from kvlab.errors import ConfigError, RequestRefused
from kvlab.generation import (
    Draft,
    Drafter,
    ModelDrafter,
    NGramDrafter,
    Sampling,
    generate,
    speculate,
    truncated,
)
from kvlab.model import GPT
from kvlab.serving import (
    CostModelExecutor,
    Engine,
    Event,
    ModelExecutor,
    Order,
    Plan,
    Policy,
    Request,
    Scheduler,
    StepRecord,
    TokenRequest,
)
from kvlab.timing import VirtualClock
from toys import random_gpt, small_config


@dataclass
class Notes:
    """A listener that writes everything down."""

    events: list[Event] = field(default_factory=list)
    all: list[Event | StepRecord] = field(default_factory=list)
    #: Tokens that a request finds in the cache, each time that it is scheduled.
    found: list[tuple[Hashable, int]] = field(default_factory=list)

    def event(self, event: Event) -> None:
        if event.kind == "scheduled":
            self.found.append((event.request.id, event.request.num_computed_tokens))
        self.events.append(event)
        self.all.append(event)

    def step(self, record: StepRecord) -> None:
        self.all.append(record)

    def of(self, id: Hashable) -> list[str]:
        return [event.kind for event in self.events if event.request.id == id]

    def times(self, kind: str) -> list[float]:
        return [event.time for event in self.events if event.kind == kind]


@dataclass
class Linear:
    """So many seconds for each decode row and for each token of a prompt; what it is asked is written down."""

    decode: float = 0.25
    prompt: float = 0.125
    held: float = 0.0
    asked: list[tuple[int, int, tuple[Row, ...]]] = field(default_factory=list)

    def seconds(self, decodes: int, held: int, prompts: Sequence[Row] = ()) -> float:
        self.asked.append((decodes, held, tuple(prompts)))
        return decodes * self.decode + held * self.held + self.prompt * sum(row.new for row in prompts)


def symbolic(
    n_blocks: int = 50, block_size: int = 4, *, fails: Callable[[Request, int], bool] = lambda request, call: False,
    guess: Callable[[TokenRequest], Sequence[int]] = lambda request: (), **options: object,
) -> Engine:  # fmt: skip
    scheduler = Scheduler(BlockPool(n_blocks, block_size), **options)  # type: ignore[arg-type]
    return Engine(scheduler, SymbolicExecutor(scheduler.pool, fails, guess), VirtualClock(), [Notes()])


def simulated(
    times: Linear, n_blocks: int = 1000, executor: type[CostModelExecutor] = CostModelExecutor, **options: object
) -> Engine:
    clock, scheduler = VirtualClock(), Scheduler(BlockPool(n_blocks, 4), **options)  # type: ignore[arg-type]
    return Engine(scheduler, executor(times, clock), clock, [Notes()])


def notes(engine: Engine) -> Notes:
    (listener,) = engine.listeners
    assert isinstance(listener, Notes)
    return listener


def send(engine: Engine, id: Hashable, prompt: Sequence[int], new: int = 5, **options: object) -> TokenRequest:
    request = TokenRequest.of(id, prompt, new, **options)  # type: ignore[arg-type]
    engine.add_request(request)
    return request


def serve(engine: Engine) -> list[StepRecord]:
    records = list(engine.run())
    engine.scheduler.check()
    assert engine.scheduler.pool.n_free == engine.scheduler.pool.n_blocks
    return records


# The clock.


def test_ttft_is_linear_in_concurrent_prompts_that_are_read_one_at_a_time() -> None:
    """vllm 8086. Ten prompts of 2 s each: 2, 4, ..., 20 s, 11 s on average."""
    engine = simulated(Linear(prompt=2 / 100), policy="continuous", token_budget=100)
    list(engine.run((0.0, Request(id, 100, 1)) for id in range(10)))
    assert notes(engine).times("first_token") == pytest.approx([2.0 * n for n in range(1, 11)])
    assert fmean(notes(engine).times("first_token")) == pytest.approx(11)


def test_a_step_costs_its_decodes_what_they_hold_and_its_prompts() -> None:
    times = Linear()
    engine = simulated(times, token_budget=8)
    for id, prompt, new in (("a", 3, 9), ("b", 1, 9), ("c", 10, 2)):
        engine.add_request(Request(id, prompt, new))
    assert engine.step(0.0) is not None
    assert times.asked[-1] == (1, 0, (Row(3, 0, 1), Row(4, 0, 0)))  # b's prompt is a row of one token
    engine.step(0.0)
    assert times.asked[-1] == (2, 3 + 1, (Row(6, 4, 1),))
    assert engine.clock.now() == 0.25 + 7 * 0.125 + 2 * 0.25 + 6 * 0.125


def test_who_arrives_during_a_step_joins_after_it_and_idle_time_is_waited_for() -> None:
    engine = simulated(Linear(decode=1.0, prompt=1.0))
    coming = [(0.0, Request("a", 3, 2)), (1.0, Request("b", 2, 1)), (100.0, Request("c", 2, 1))]
    records = list(engine.run(coming))
    assert [(record.start, record.end) for record in records] == [(0, 3), (3, 6), (100, 102)]
    assert [sorted(request.id for request in record.fed) for record in records] == [["a"], ["a", "b"], ["c"]]
    assert notes(engine).times("queued") == [0, 1, 100]


def test_arrivals_are_in_seconds_from_when_the_run_begins() -> None:
    engine = simulated(Linear(prompt=1.0))
    engine.clock.wait_until(50.0)
    [record] = engine.run([(7.0, Request("a", 2, 1))])
    assert (record.start, record.end) == (57, 59)


def test_a_run_goes_on_when_one_is_refused_and_stops_at_an_id_that_is_taken() -> None:
    engine = simulated(Linear())
    records = list(engine.run([(0.0, Request("a", 0, 2)), (1.0, Request("b", 2, 2)), (1.0, Request("c", 9999, 2))]))
    assert sum(len(record.fed) for record in records) == 2
    assert [notes(engine).of(id) for id in "ac"] == [["refused"], ["refused"]]
    with pytest.raises(ConfigError, match="waits or runs already"):
        list(engine.run([(0.0, Request("d", 2, 2)), (0.0, Request("d", 2, 2))]))


def test_an_engine_with_nothing_to_do_takes_no_step() -> None:
    engine = symbolic()
    assert engine.step() is None
    assert list(engine.run()) == []
    assert notes(engine).all == []


# Steps in a row.


class OneByOne(CostModelExecutor):
    """Takes every step by itself."""

    def repeats(self, plan: Plan, seconds: float | None) -> int:
        return 1


@dataclass(eq=False, slots=True)
class Talk(Request):
    """Its prompt begins like those of the same talk; its answer is its own."""

    talk: int = 0

    def block_key(self, index: int, block_size: int) -> Hashable:
        return (self.talk if (index + 1) * block_size <= self.prompt_tokens else f"answer {self.id}"), index


@st.composite
def traffic(draw: st.DrawFn) -> list[tuple[float, int, int, int]]:
    gaps = draw(st.lists(st.sampled_from([0.0, 0.125, 1.0, 7.5]), min_size=1, max_size=8))
    sizes = st.tuples(st.integers(1, 20), st.integers(1, 40), st.integers(0, 2))
    return [(sum(gaps[: index + 1]), *draw(sizes)) for index in range(len(gaps))]


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(
    traffic(), st.integers(15, 40), st.integers(1, 4), st.sampled_from(Policy), st.sampled_from(Order), st.booleans()
)
def test_repeated_steps_are_steps_one_by_one(
    sent: list[tuple[float, int, int, int]], n_blocks: int, max_running: int, policy: Policy, order: Order, reuse: bool
) -> None:
    """Every event at the same time, every table as long at the end, and as many tokens, in fewer records."""
    played = []
    for executor in (CostModelExecutor, OneByOne):
        engine = simulated(
            Linear(), n_blocks, executor, policy=policy, order=order, token_budget=64, max_running=max_running,
            reuse_prefixes=reuse, ageing=1.0,
        )  # fmt: skip
        requests = [Talk(id, prompt, new, talk) for id, (_, prompt, new, talk) in enumerate(sent)]
        records = list(engine.run((at, request) for (at, *_), request in zip(sent, requests, strict=True)))
        engine.scheduler.check()
        told = [(event.kind, event.time, event.request.id) for event in notes(engine).events]
        steps = sum(record.repeats for record in records)
        tokens = sum(sum(record.fed.values()) * record.repeats for record in records)
        said = sum(len(emitted) for record in records for emitted in record.emitted.values())
        played.append((told, steps, tokens, said, [(request.finish, request.preemptions) for request in requests]))
    assert played[0] == played[1]


def test_steps_that_cost_nothing_are_taken_in_a_row() -> None:
    clock = VirtualClock()

    class Free:
        def seconds(self, decodes: int, held: int, prompts: Sequence[Row] = ()) -> float:
            return 0.0

    engine = Engine(Scheduler(BlockPool(9, 4)), CostModelExecutor(Free(), clock), clock)
    request = Request("a", 2, 9)
    assert len(list(engine.run([(0.0, request), (1.0, Request("b", 2, 9))]))) == 4
    assert request.finish == "length"


def test_tables_grow_over_repeated_steps_as_over_single_ones() -> None:
    engine = simulated(Linear(decode=0.5), max_running=8)
    requests = [Request(id, 3 + id, 30) for id in range(3)]
    for request in requests:
        engine.add_request(request)
    engine.step()
    start = engine.clock.now()
    record = engine.step(until=start + 9 * 1.5)
    assert record is not None
    assert record.repeats == 9
    assert [request.num_computed_tokens for request in requests] == [3 + 9, 4 + 9, 5 + 9]
    assert [len(request.table) for request in requests] == [3, 4, 4]
    assert [len(emitted) for emitted in record.emitted.values()] == [9, 9, 9]
    assert record.end - record.start == 9 * 1.5
    engine.scheduler.check()


@given(st.integers(1, 400), st.integers(0, 3), st.integers(1, 500))
def test_repeated_steps_begin_before_the_time_is_up_although_each_takes_longer(
    prompt: int, growth: int, seconds: int
) -> None:
    """Two rows, so that the step in the middle is the mean of all, to the second."""
    engine = simulated(Linear(decode=1, prompt=0, held=growth), token_budget=1000)
    for id in range(2):
        engine.add_request(Request(id, prompt, 300))
    engine.step()
    record = engine.step(until=engine.clock.now() + seconds)
    assert record is not None
    each = [Fraction(2 + growth * 2 * (prompt + step)) for step in range(record.repeats)]
    assert sum(each[:-1]) < seconds
    assert record.end - record.start == sum(each)


# What listeners are told.


def test_listeners_are_told_everything_in_order() -> None:
    engine = symbolic()
    request = send(engine, "a", [1, 2, 3], 2)
    first, second = engine.step(), engine.step()
    kinds = [each.kind if isinstance(each, Event) else "step" for each in notes(engine).all]
    assert kinds == ["queued", "scheduled", "first_token", "step", "step", "finished"]
    assert [each for each in notes(engine).all if isinstance(each, StepRecord)] == [first, second]
    assert first is not None
    assert (first.fed, list(first.emitted[request])) == ({request: 3}, request.answer[:1])
    assert (first.waiting, first.running, first.kv_usage, first.repeats) == (0, 1, 1 / 50, 1)
    assert second is not None
    assert (second.running, second.kv_usage) == (0, 0.0)


def test_times_never_run_backwards_and_a_preempted_request_is_scheduled_again() -> None:
    engine = simulated(Linear(), n_blocks=6, policy="chunked")
    list(engine.run((0.0, Request(id, 4, 16)) for id in range(3)))
    told = notes(engine)
    assert told.of(0) == ["queued", "scheduled", "first_token", "finished"]
    again = [id for id in range(3) if "preempted" in told.of(id)]
    assert again
    for id in again:
        kinds = told.of(id)
        assert kinds[:2] == ["queued", "scheduled"]
        assert kinds[kinds.index("preempted") + 1 :][0] == "scheduled"
        assert kinds.count("first_token") == 1
        assert kinds[-1] == "finished"
    assert all(a.time <= b.time for a, b in pairwise(told.events))


# Aborts.


def test_blocks_leak_on_abort_not_100_requests_with_aborts_leave_free_equal_to_total() -> None:
    """imp 1115, sglang 105: aborted while they wait, in the middle of a prompt, and while they decode."""
    engine = symbolic(n_blocks=30, token_budget=16, max_running=8)
    requests = [send(engine, id, [id % 7] * (1 + id % 23), 1 + id % 11) for id in range(100)]
    for step in range(400):
        if requests[(step * 37) % 100].finish is None and step % 3 == 0:
            engine.abort((step * 37) % 100)
        engine.step()
        engine.scheduler.check()
    assert engine.scheduler.pool.n_free == engine.scheduler.pool.n_blocks
    ends = [request.finish for request in requests]
    assert ends.count("abort") > 10
    assert ends.count("length") > 10
    assert len(ends) == ends.count("abort") + ends.count("length")
    assert isinstance(engine.executor, SymbolicExecutor)
    assert sorted(request.id for request in engine.executor.forgotten) == list(range(100))  # type: ignore[type-var]


def test_a_request_is_aborted_wherever_it_stands() -> None:
    engine = symbolic(max_running=1)
    a, b = send(engine, "a", [1, 2]), send(engine, "b", [1, 2])
    engine.step()
    engine.abort("b")
    engine.abort("a")
    assert (a.finish, b.finish, len(a.answer)) == ("abort", "abort", 1)
    assert [notes(engine).of(id)[-1] for id in "ab"] == ["finished", "finished"]
    assert engine.step() is None
    for id in ("a", "nobody"):
        with pytest.raises(ConfigError, match=f"no request '{id}' waits or runs; it never came, or has ended"):
            engine.abort(id)


# Streams.


def test_a_stream_has_the_answer_while_others_are_served() -> None:
    engine = symbolic()
    other = send(engine, "b", [3], 9)
    send(engine, "a", [1, 2], 5)
    assert list(engine.stream("a")) == alone([1, 2], 5)
    assert len(other.answer) == 5


def test_streams_side_by_side_lose_nothing() -> None:
    engine = symbolic()
    for id in (1, 2):
        send(engine, id, [id], 5)
    engine.step()
    assert list(zip(engine.stream(1), engine.stream(2), strict=True)) == list(
        zip(alone([1], 5), alone([2], 5), strict=True)
    )


def test_a_stream_ends_when_its_request_is_aborted() -> None:
    engine = symbolic()
    send(engine, "a", [1, 2], 50)
    said = list[int]()
    for token in engine.stream("a"):
        said.append(token)
        if len(said) == 3:
            engine.abort("a")
    assert said == alone([1, 2], 3)


def test_streams_of_nobody_and_of_nothing_are_refused_at_once() -> None:
    engine = symbolic()
    with pytest.raises(ConfigError, match="no request 'a' waits or runs"):
        engine.stream("a")
    engine.add_request(Request("b", 3, 3))
    with pytest.raises(ConfigError, match="request 'b' has no tokens"):
        engine.stream("b")


# Failures.


def test_an_executor_that_raises_ends_the_guilty_and_nobody_else() -> None:
    engine = symbolic(fails=lambda request, call: request.id == "bad" and call >= 3)
    good = [send(engine, id, [id, id + 1], 8) for id in range(3)]
    bad = send(engine, "bad", [9, 9], 8)
    good.append(send(engine, 3, [5], 8))
    serve(engine)
    assert bad.finish == "error"
    assert bad.error.startswith("RuntimeError: the device lost 'bad'")
    assert bad.answer == alone([9, 9], 8)[:2]
    assert all(request.answer == alone(request.tokens[: request.prompt_tokens], 8) for request in good)
    assert notes(engine).of("bad") == ["queued", "scheduled", "first_token", "finished"]


def test_a_failure_that_goes_away_costs_nobody_anything() -> None:
    engine = symbolic(fails=lambda request, call: call == 2 and request.id == 1)
    requests = [send(engine, id, [id, 7], 5) for id in range(3)]
    records = serve(engine)
    assert all(request.answer == alone(request.tokens[:2], 5) for request in requests)
    assert [record.failure.startswith("RuntimeError: the device lost 1") for record in records[:3]] == [
        False, True, False,
    ]  # fmt: skip


def test_ctrl_c_while_forks_part_takes_nothing_from_either() -> None:
    """The copy that the broken step was to make is made by the next one."""
    engine = symbolic(block_size=4, reuse_prefixes=False)
    a = send(engine, "a", [1, 2, 3, 4, 5], 6)
    engine.step()
    twin = engine.fork("a", "twin")
    work, engine.executor.execute = engine.executor.execute, interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.executor.execute = work  # type: ignore[method-assign]
    serve(engine)
    assert a.answer == twin.answer == alone([1, 2, 3, 4, 5], 6)


def interrupted(plan: Plan) -> dict[Request, Sequence[int]]:
    raise KeyboardInterrupt


def test_an_executor_that_always_fails_ends_everybody() -> None:
    engine = symbolic(fails=lambda request, call: True)
    requests = [send(engine, id, [id]) for id in range(5)]
    records = serve(engine)
    assert len(records) == 1
    assert records[0].fed == records[0].emitted == {}
    assert all(request.finish == "error" and not request.answer for request in requests)
    assert [notes(engine).of(id) for id in range(5)] == [["queued", "scheduled", "finished"]] * 5
    later = send(engine, "later", [1])
    serve(engine)
    assert later.finish == "error"


def test_a_request_that_fails_alone_is_tried_once() -> None:
    engine = symbolic(fails=lambda request, call: True)
    request = send(engine, "a", [1, 2])
    serve(engine)
    assert isinstance(engine.executor, SymbolicExecutor)
    assert engine.executor.calls == 1
    assert request.error == "RuntimeError: the device lost 'a' after 0 others"


@pytest.mark.parametrize("guilty", ["a", "twin", "none"])
def test_a_failure_while_forks_part_takes_nothing_from_either(guilty: str) -> None:
    """The copy into one's block must not be made again once it has written there."""
    engine = symbolic(
        block_size=4, reuse_prefixes=False,
        fails=lambda request, call: request.id == guilty or (call == 2 and request.id == "a"),
    )  # fmt: skip
    send(engine, "other", [8, 8, 8], 6)
    a = send(engine, "a", [1, 2, 3, 4, 5], 6)
    if guilty == "a":
        engine.executor._fails = lambda request, call: call >= 2 and request.id == "a"  # type: ignore[attr-defined]
    engine.step()
    twin = engine.fork("a", "twin")
    serve(engine)
    for request in (a, twin):
        if request.id == guilty:
            assert request.finish == "error"
        else:
            assert request.answer == alone([1, 2, 3, 4, 5], 6)


def test_a_drafter_that_raises_ends_its_own_request() -> None:
    def guess(request: TokenRequest) -> Sequence[int]:
        if request.id == "bad":
            raise ValueError("no\nidea")
        return [next_token(request.tokens)]

    engine = symbolic(guess=guess)
    bad, good = send(engine, "bad", [1], 5), send(engine, "good", [2], 5)
    serve(engine)
    assert (bad.finish, bad.error, len(bad.answer)) == ("error", "ValueError: no idea", 1)
    assert good.answer == alone([2], 5)
    assert notes(engine).of("bad") == ["queued", "scheduled", "first_token", "finished"]


# A model.


@pytest.fixture(scope="module")
def toy() -> GPT:
    return random_gpt(small_config(n_layer=2, windows=(None, 5)), torch.float64)


def modelled(
    model: GPT, n_blocks: int = 100, block_size: int = 4, *, drafter: Callable[[], Drafter] | None = None,
    **options: object,
) -> Engine:  # fmt: skip
    """An engine over a model, whose slots hold NaN until they are written, and whose passes may not fail unseen."""
    scheduler = Scheduler(BlockPool(n_blocks, block_size), **options)  # type: ignore[arg-type]
    executor = ModelExecutor(model, scheduler.pool, drafter=drafter)
    executor.storage.slots[:, :, :, : executor.storage.beyond] = torch.nan
    return Engine(scheduler, executor, VirtualClock(), [Notes()])


def says(model: GPT, request: TokenRequest) -> list[int]:
    """What a request says alone, through :func:`kvlab.generate`."""
    prompt, new = request.tokens[: request.prompt_tokens], request.max_new_tokens
    return generate(model, [prompt], max_new_tokens=new, sampling=request.sampling, ignore_eos=True).run().tokens[0]


PROMPTS = [[1, 2, 3], [4], list(range(20)), list(range(11)), [1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("budget", [7, 64])
def test_seeds_say_in_company_what_they_say_alone(toy: GPT, policy: Policy, budget: int) -> None:
    """Greedy ones among them; settings of all kinds; one step serves them all."""
    kinds = [
        Sampling(), Sampling(temperature=1.0, seed=1), Sampling(temperature=2.0, top_k=9, seed=2),
        Sampling(temperature=0.7, top_p=0.8, seed=1), Sampling(temperature=1.0, min_p=0.05, seed=7),
    ]  # fmt: skip
    engine = modelled(toy, policy=policy, token_budget=64 if policy is not Policy.CHUNKED else budget)
    requests = [
        send(engine, id, prompt, 12, sampling=kind)
        for id, (prompt, kind) in enumerate(zip(PROMPTS, kinds, strict=True))
    ]
    serve(engine)
    for request in requests:
        assert (request.error, request.answer) == ("", says(toy, request))


def test_recompute_loses_no_tokens_a_tiny_pool_says_what_a_big_one_says(toy: GPT) -> None:
    """vllm 16832. Preempted requests compute their tokens again and go on, their random numbers too."""
    answers = []
    for n_blocks in (8, 500):
        engine = modelled(toy, n_blocks, 3, token_budget=16)
        requests = [
            send(engine, id, prompt[:9], 12, sampling=Sampling(temperature=1.0, seed=id))
            for id, prompt in enumerate(PROMPTS)
        ]
        serve(engine)
        answers.append([request.answer for request in requests])
        assert any(request.preemptions for request in requests) == (n_blocks == 8)
    assert answers[0] == answers[1]
    assert answers[0] == [says(toy, request) for request in requests]


def test_preempt_resume_same_tokens_with_the_prefix_that_is_found_again(toy: GPT) -> None:
    """nano-vllm 207."""
    engine = modelled(toy, 9, 2, token_budget=16)
    a, b = send(engine, "a", [1, 2, 3], 10), send(engine, "b", [4, 5, 6], 10)
    serve(engine)
    (first, nothing), *again = [found for found in notes(engine).found if found[0] == "b"]
    assert (first, nothing, b.preemptions) == ("b", 0, len(again))
    assert any(tokens > 0 for _, tokens in again)
    assert (a.answer, b.answer) == (says(toy, a), says(toy, b))


def test_a_prompt_that_is_found_whole_says_the_same(toy: GPT) -> None:
    """nano-vllm 144."""
    engine = modelled(toy)
    answers = []
    for id in range(3):
        request = send(engine, id, list(range(12)), 6)
        serve(engine)
        answers.append(request.answer)
    assert engine.scheduler.prefix_hits == 2 * 8
    assert answers == [says(toy, request)] * 3


@pytest.mark.parametrize("budget", [3, 9, 16, 64])
def test_chunk_logits_equal_full(toy: GPT, budget: int) -> None:
    """nano-vllm 212, through the engine: a prompt in chunks of any size, beside requests that decode."""
    engine = modelled(toy, token_budget=budget)
    for id in range(2):
        send(engine, id, [id], 60)
    engine.step()
    seen, executor = list[torch.Tensor](), engine.executor
    assert isinstance(executor, ModelExecutor)
    work = executor._forward
    executor._forward = lambda *given: seen.append(work(*given)) or seen[-1]  # type: ignore[method-assign]
    prompt = list(range(40))
    late = send(engine, "late", prompt, 1)
    while late.finish is None:
        engine.step()
    torch.testing.assert_close(seen[-1][-1], toy(torch.tensor([prompt]))[0, -1], rtol=0, atol=1e-12)
    assert len(seen[-1]) == 3


def test_a_second_answer_goes_on_from_where_the_first_stands(toy: GPT) -> None:
    engine = modelled(toy)
    a = send(engine, "a", [1, 2, 3, 4, 5], 10)
    for _ in range(4):
        engine.step()
    begun = list(a.tokens)
    twin = engine.fork("a", "twin")
    drawn = engine.fork("a", "drawn", Sampling(temperature=1.5, seed=4))
    assert notes(engine).of("twin") == ["queued", "scheduled"]
    serve(engine)
    assert a.answer == twin.answer == says(toy, a)
    rest = generate(toy, [begun], max_new_tokens=6, sampling=drawn.sampling, ignore_eos=True).run().tokens[0]
    assert drawn.tokens == begun + rest
    assert drawn.answer != a.answer
    with pytest.raises(ConfigError, match="no request 'a' waits or runs"):
        engine.fork("a", "another")


def test_answers_end_at_stop_ids(toy: GPT) -> None:
    engine = modelled(toy)
    whole = says(toy, TokenRequest.of("a", [1, 2], 12))
    stop = whole[5]
    a = send(engine, "a", [1, 2], 12, stop_ids=frozenset({stop, 60_000}))
    serve(engine)
    assert a.answer == whole[: whole.index(stop) + 1]
    assert a.finish == "stop"


@pytest.mark.parametrize(
    ("request_of", "message"),
    [
        (lambda: Request("a", 3, 3), "request 'a' is refused: it has no tokens; a model answers"),
        (lambda: TokenRequest.of("a", [1] * 60, 6), "60 prompt tokens and up to 6 new ones are more than the context"),
        (lambda: TokenRequest.of("a", [1, 61, -1], 3), r"token ids \[61, -1\] are not below 61"),
        (lambda: TokenRequest.of("a", [], 3), "0 prompt tokens"),
    ],
)
def test_requests_that_the_model_cannot_answer_are_refused(
    toy: GPT, request_of: Callable[[], Request], message: str
) -> None:
    engine = modelled(toy)
    with pytest.raises(RequestRefused, match=message):
        engine.add_request(request_of())
    assert notes(engine).of("a") == ["refused"]
    assert engine.scheduler.unfinished == 0


def test_the_context_is_used_to_its_end(toy: GPT) -> None:
    engine = modelled(toy)
    a = send(engine, "a", [1] * 60, 5)
    serve(engine)
    assert a.answer == says(toy, a)


def test_padded_ids_are_never_said(toy: GPT) -> None:
    scheduler = Scheduler(BlockPool(50, 4))
    engine = Engine(scheduler, ModelExecutor(toy, scheduler.pool, n_vocab=5), VirtualClock())
    requests = [send(engine, id, [1], 20, sampling=Sampling(temperature=float(id), seed=1)) for id in range(3)]
    serve(engine)
    assert all(token < 5 for request in requests for token in request.answer)
    with pytest.raises(RequestRefused, match=r"token ids \[5\] are not below 5"):
        send(engine, "a", [5])


def test_weights_that_give_no_numbers_end_the_request_with_the_reason(toy: GPT) -> None:
    """One whose token is NaN in the embedding; the others do not notice."""
    model = random_gpt(toy.config, torch.float64)
    model.embedding.weight.data[9] = torch.nan
    model.head.weight = torch.nn.Parameter(toy.head.weight.clone())
    engine = modelled(model, reuse_prefixes=False)
    bad, good = send(engine, "bad", [1, 9], 5), send(engine, "good", [1, 2], 5)
    serve(engine)
    assert bad.finish == "error"
    assert "the logits are not finite" in bad.error
    assert good.error == ""
    assert len(good.answer) == 5


# Speculation.


def drafters(model: GPT) -> dict[str, Callable[[], Drafter]]:
    return {
        "n-gram": NGramDrafter,
        "model": lambda: ModelDrafter(truncated(model, 1), sampling=Sampling(temperature=1.0, seed=5)),
        "itself": lambda: ModelDrafter(model, drafted=3),
    }


@pytest.mark.parametrize("name", ["n-gram", "model", "itself"])
@pytest.mark.parametrize(("budget", "n_blocks"), [(64, 100), (6, 100), (64, 9)])
def test_greedy_speculation_says_what_greedy_says(toy: GPT, name: str, budget: int, n_blocks: int) -> None:
    engine = modelled(toy, n_blocks, drafter=drafters(toy)[name], token_budget=budget)
    requests = [send(engine, id, prompt, 12) for id, prompt in enumerate(PROMPTS)]
    serve(engine)
    for request in requests:
        assert (request.error, request.answer) == ("", says(toy, request))


def test_a_draft_that_is_right_saves_steps(toy: GPT) -> None:
    engine = modelled(toy, drafter=drafters(toy)["itself"])
    send(engine, "a", [1, 2, 3], 13)
    assert [len(emitted) for record in serve(engine) for emitted in record.emitted.values()] == [1, 4, 4, 4]


@pytest.mark.parametrize("name", ["n-gram", "model"])
def test_sampled_speculation_reproduces_and_says_in_company_what_it_says_alone(toy: GPT, name: str) -> None:
    settings_of = [Sampling(temperature=1.0, seed=id) for id in range(len(PROMPTS))]
    answers = []
    for _ in range(2):
        engine = modelled(toy, drafter=drafters(toy)[name], token_budget=100)
        requests = [send(engine, id, prompt, 12, sampling=settings_of[id]) for id, prompt in enumerate(PROMPTS)]
        serve(engine)
        answers.append([request.answer for request in requests])
    assert answers[0] == answers[1]
    for prompt, sampling, answer in zip(PROMPTS, settings_of, answers[0], strict=True):
        drafter = drafters(toy)[name]()
        spoken = speculate(toy, prompt, drafter, max_new_tokens=12, sampling=sampling, ignore_eos=True).run()
        assert answer == spoken.tokens[0]


def test_each_request_has_one_drafter_of_its_own_and_it_is_forgotten(toy: GPT) -> None:
    made = list[NGramDrafter]()

    def drafter() -> NGramDrafter:
        made.append(NGramDrafter())
        return made[-1]

    engine = modelled(toy, drafter=drafter)
    for id in range(3):
        send(engine, id, [id], 6, sampling=Sampling(temperature=1.0))
    serve(engine)
    assert len(made) == 3
    executor = engine.executor
    assert isinstance(executor, ModelExecutor)
    assert not executor._drafters
    assert not executor._drafts
    assert not executor._streams


def test_a_drafter_that_guesses_nonsense_ends_its_own_request(toy: GPT) -> None:
    class Nonsense:
        def propose(self, tokens: Sequence[int], most: int) -> Draft:
            return Draft([1000] if tokens[0] == 9 else [])

    engine = modelled(toy, drafter=Nonsense)
    bad, good = send(engine, "bad", [9], 5), send(engine, "good", [1, 2], 5)
    serve(engine)
    assert bad.finish == "error"
    assert good.answer == says(toy, good)
