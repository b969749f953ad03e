"""The server without a socket: clients get what the engine did, when it did it, and nobody waits in vain."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served import Linear, Told, ask, asked, clean, serve, simulated

import kvlab
from kvlab.cache import BlockPool
from kvlab.errors import MeasureError
from kvlab.operate.engine_server import EngineServer
from kvlab.operate.exchange import Dialect, Target
from kvlab.operate.in_process import InProcess
from kvlab.operate.loadtest import run
from kvlab.operate.prometheus import read_page
from kvlab.operate.schedule import Load
from kvlab.operate.virtual_time import VirtualLoop, run_virtually
from kvlab.serving import CostModelExecutor, Engine, ModelExecutor, Plan, Request, Scheduler, TokenRequest


def test_an_event_a_token_then_usage_then_done() -> None:
    engine, _ = simulated()
    (found,) = serve(engine, {"prompt": 5, "answer": 3})
    assert found.status == 200
    assert [choice["finish_reason"] for choice in found.choices] == [None, None, "length"]
    assert found.events[-1] == "[DONE]"
    assert found.events[-2]["choices"] == []
    assert found.events[-2]["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    assert {event["id"] for event in found.events[:-1]} == {found.events[0]["id"]}
    assert found.events[0]["object"] == "text_completion"
    clean(engine)


def test_without_being_asked_there_is_no_usage() -> None:
    (found,) = serve(simulated()[0], {"stream_options": None})
    assert len(found.events) == 3 + 1
    assert "usage" not in json.dumps(found.events)


def test_tokens_arrive_when_their_steps_end() -> None:
    """A prompt of 8 takes half a second, a step 0.25 s; the second request joins at the next step's begin."""
    engine, _ = simulated()
    first, second = serve(
        engine,
        {"after": 1.0, "prompt": 8, "answer": 4},
        {"after": 1.625, "prompt": [9] * 8, "answer": 1},
    )
    # 1.0 read until 1.5; 1.5 to 1.75 alone; 1.75 to 2.5 beside the second prompt; then alone again.
    assert first.times[:4] == [1.5, 1.75, 2.5, 2.75]
    assert second.times[0] == 2.5


def test_a_text_of_a_model_is_what_the_engine_says_alone() -> None:
    """The tiny model on the real clock: many at once, steps in a thread, and the tokens of each by itself."""
    loaded = kvlab.load("tiny")
    tokenizer = loaded.tokenizer
    prompts = ["To be, or not", "ROMEO:", "O Romeo, Romeo! wherefore", "Once more unto the breach"]

    def engine() -> Engine:
        pool = BlockPool(32, 16)
        scheduler = Scheduler(pool, token_budget=16, max_len=loaded.config.max_seq_len)
        return Engine(scheduler, ModelExecutor(loaded.model, pool, n_vocab=loaded.vocab_size))

    async def main(made: Engine) -> list[Told]:
        async with EngineServer(made, "m", tokenizer) as server:
            texts = (ask(server, prompt=prompt, answer=12) for prompt in prompts)
            ids = (ask(server, prompt=tokenizer.encode(prompt), answer=12) for prompt in prompts)
            return list(await asyncio.gather(*texts, *ids))

    served = engine()
    found = asyncio.run(main(served))
    clean(served)
    alone = engine()
    for n, prompt in enumerate(prompts):
        request = TokenRequest.of(n, tokenizer.encode(prompt), 12)
        alone.add_request(request)
        answer = list(alone.stream(n))
        for each in (found[n], found[n + len(prompts)]):
            assert each.text == tokenizer.decode(answer)
            assert len(each.choices) == 12
            assert each.events[-2]["usage"]["prompt_tokens"] == request.prompt_tokens


def test_an_answer_ends_at_the_end_of_text_unless_told_otherwise() -> None:
    """The end-of-text token is an event of its own, without text, as vLLM sends it."""
    loaded = kvlab.load("tiny")
    end = loaded.tokenizer.eos_token_ids[0]

    class Ending(CostModelExecutor):
        def execute(self, plan: Plan) -> dict[Request, Sequence[int]]:
            return {request: [end] if tokens else () for request, tokens in super().execute(plan).items()}

    async def main(**fields: Any) -> Told:
        engine, _ = simulated()
        engine.executor = Ending(Linear(), engine.clock)  # type: ignore[arg-type]
        async with EngineServer(engine, "m", loaded.tokenizer) as server:
            return await ask(server, **fields)

    stopped = run_virtually(main(ignore_eos=False))
    assert [choice["finish_reason"] for choice in stopped.choices] == ["stop"]
    assert stopped.text == ""
    assert len(run_virtually(main()).choices) == 3


def test_half_a_character_is_an_event_without_text() -> None:
    loaded = kvlab.load("tiny")
    smile = [token for token in loaded.tokenizer.encode("\U0001f600") if token not in loaded.tokenizer.encode("")]
    assert len(smile) > 1

    class Smiling(CostModelExecutor):
        def execute(self, plan: Plan) -> dict[Request, Sequence[int]]:
            found = super().execute(plan)
            return {each: [smile[each.new_tokens]] if tokens else () for each, tokens in found.items()}

    async def main() -> Told:
        engine, _ = simulated()
        engine.executor = Smiling(Linear(), engine.clock)  # type: ignore[arg-type]
        async with EngineServer(engine, "m", loaded.tokenizer) as server:
            return await ask(server, answer=len(smile))

    found = run_virtually(main())
    assert [choice["text"] for choice in found.choices] == [""] * (len(smile) - 1) + ["\U0001f600"]


def test_an_answer_that_ends_within_a_character_ends_in_a_mark_for_it() -> None:
    loaded = kvlab.load("tiny")
    smile = [token for token in loaded.tokenizer.encode("\U0001f600") if token not in loaded.tokenizer.encode("")]

    class Smiling(CostModelExecutor):
        def execute(self, plan: Plan) -> dict[Request, Sequence[int]]:
            return {request: smile[:1] if tokens else () for request, tokens in super().execute(plan).items()}

    async def main() -> Told:
        engine, _ = simulated()
        engine.executor = Smiling(Linear(), engine.clock)  # type: ignore[arg-type]
        async with EngineServer(engine, "m", loaded.tokenizer) as server:
            return await ask(server, answer=1)

    assert run_virtually(main()).text == "\ufffd"


def test_tokens_of_one_step_are_events_of_their_own_and_the_last_one_says_why() -> None:
    """As after a draft that was accepted: three tokens a step, of which the third step gives the first two."""

    class Drafting(CostModelExecutor):
        def execute(self, plan: Plan) -> dict[Request, Sequence[int]]:
            return {request: (1, 2, 3) if tokens else () for request, tokens in super().execute(plan).items()}

    engine, _ = simulated()
    engine.executor = Drafting(Linear(), engine.clock)  # type: ignore[arg-type]
    (found,) = serve(engine, {"answer": 8})
    assert found.text == " 1 2 3 1 2 3 1 2"
    assert [choice["finish_reason"] for choice in found.choices] == [None] * 7 + ["length"]
    assert found.times[0] == found.times[2] < found.times[3]


def test_an_answer_is_cut_at_the_end_of_the_context_and_a_prompt_that_fills_it_is_refused() -> None:
    engine, _ = simulated(max_len=20)
    cut, fits, full, longer = serve(
        engine, {"prompt": 15, "answer": 9}, {"prompt": 19, "answer": 1}, {"prompt": 20}, {"prompt": 33}
    )
    assert (len(cut.choices), cut.choices[-1]["finish_reason"]) == (5, "length")
    assert len(fits.choices) == 1
    for each in (full, longer):
        assert (each.status, each.error["code"], each.error["type"]) == (400, 400, "BadRequestError")
        assert "max_len 20" in each.error["message"]
    clean(engine)


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"model": "nope"}, 404, "The model `nope` does not exist"),
        ({"stream": False}, 400, "stream: true"),
        ({"prompt": "a text"}, 400, "list of token ids"),
        ({"prompt": [[1, 2]]}, 400, "list of token ids"),
        ({"prompt": []}, 400, "0 prompt tokens"),
        ({"answer": 0}, 400, "max_new_tokens 0"),
        ({"answer": 2.5}, 400, "max_tokens is 2.5"),
        ({"answer": True}, 400, "max_tokens is True"),
        ({"temperature": "warm"}, 400, "temperature is 'warm'"),
        ({"temperature": -1}, 400, "temperature is -1"),
        ({"prompt": 150, "answer": 150, "blocks": 4}, 400, "the pool has 4"),
    ],
)
def test_what_cannot_be_served_is_refused_in_words(fields: dict[str, Any], status: int, message: str) -> None:
    engine, _ = simulated(fields.pop("blocks", 64))
    (found,) = serve(engine, fields)
    assert (found.status, found.error["code"]) == (status, status)
    assert message in found.error["message"]
    clean(engine)


def test_a_full_queue_is_503_and_an_impossible_request_400_even_then() -> None:
    engine, _ = simulated(max_running=1, max_waiting=2)
    first = {"prompt": 40, "answer": 9}
    found = serve(engine, first, *({"after": 0.1 + n / 100} for n in range(4)), {"after": 0.2, "prompt": 300})
    assert [each.status for each in found] == [200, 200, 200, 503, 503, 400]
    assert found[3].error["type"] == "Service Unavailable"
    assert "max_waiting is 2" in found[3].error["message"]
    clean(engine)


@pytest.mark.parametrize("when", ["before it is admitted", "in the queue", "in its prompt", "in its answer"])
def test_who_hangs_up_frees_everything_and_disturbs_nobody(when: str) -> None:
    engine, log = simulated(max_running=1 if when == "in the queue" else 8, token_budget=8)
    moment = {"before it is admitted": 0.3, "in the queue": 1.0, "in its prompt": 2.0, "in its answer": 6.0}[when]

    async def main() -> Told:
        async with EngineServer(engine, "m") as server:
            stays = asyncio.create_task(ask(server, prompt=8, answer=30))
            leaves = asyncio.create_task(ask(server, after=0.2, prompt=[7] * 40, answer=100))
            await asyncio.sleep(moment)
            leaves.cancel()
            found = await stays
            await asyncio.sleep(1.0)
            clean(engine)
            return found

    assert len(run_virtually(main()).choices) == 30
    ended = {event.request.prompt_tokens: event.request.finish for event in log.events if event.kind == "finished"}
    assert ended == {8: "length"} | ({} if when == "before it is admitted" else {40: "abort"})


def test_closing_a_body_hangs_up_whether_it_was_read_or_not() -> None:
    engine, _ = simulated()

    async def main(pieces: int) -> None:
        async with EngineServer(engine, "m") as server:
            reply = await server.answer(asked(answer=100))
            async with aclosing(cast(Any, reply.body)):
                for _ in range(pieces):
                    await anext(reply.body)
            await asyncio.sleep(1.0)
            clean(engine)

    run_virtually(main(0))
    run_virtually(main(2))


def test_who_leaves_at_the_moment_of_admission_leaves_nothing_behind() -> None:
    engine, log = simulated()

    async def main() -> None:
        async with EngineServer(engine, "m") as server:
            asking = asyncio.create_task(server.answer(asked(answer=100)))
            while not engine.scheduler.unfinished:
                await asyncio.sleep(0)
            assert asking.cancel()
            await asyncio.sleep(2.0)
            clean(engine)

    run_virtually(main())
    assert [event.request.finish for event in log.events if event.kind == "finished"] == ["abort"]


def test_a_client_that_was_busy_is_served_from_when_it_sends() -> None:
    """The loop stands still for ten seconds, in which the server's own step ended: its clock does not run on by it."""
    engine, log = simulated()

    async def main() -> tuple[Told, Told]:
        async with EngineServer(engine, "m") as server:
            first = asyncio.create_task(ask(server, answer=2))
            await asyncio.sleep(0.375)
            cast(VirtualLoop, asyncio.get_running_loop()).skip(10.0)
            second = await ask(server, prompt=[5] * 4, answer=1)
            return await first, second

    first, second = run_virtually(main())
    assert first.times[:2] == [0.25, 10.375]
    assert [step.end for step in log.steps] == [0.25, 0.5, 10.625]
    assert second.times[0] == 10.625


def test_stopping_breaks_off_every_answer() -> None:
    engine, _ = simulated(max_running=1)

    async def main() -> list[Told]:
        async with EngineServer(engine, "m") as server:
            asks = [asyncio.create_task(ask(server, answer=100)) for _ in range(2)]
            await asyncio.sleep(2.1)
            asks.append(asyncio.create_task(ask(server)))
            await asyncio.sleep(0.1)
        late = await ask(server)
        return [*await asyncio.gather(*asks), late]

    running, waiting, came, late = run_virtually(main())
    assert len(running.choices) > 1
    assert running.error["message"] == waiting.error["message"] == "the server was stopped"
    assert running.events[-1] == "[DONE]"
    assert (came.status, came.error["message"]) == (503, "the server was stopped")
    assert late.status == 503
    clean(engine)


def test_a_request_that_fails_says_so_and_the_others_go_on() -> None:
    class Failing(CostModelExecutor):
        def execute(self, plan: Plan) -> dict[Request, Sequence[int]]:
            if any(request.prompt_tokens == 13 and request.new_tokens == 2 for request in plan.tokens):
                raise RuntimeError("an illegal address")
            return super().execute(plan)

    engine, _ = simulated()
    engine.executor = Failing(Linear(), engine.clock)  # type: ignore[arg-type]
    good, bad = serve(engine, {"answer": 6}, {"prompt": [3] * 13, "answer": 6})
    assert len(good.choices) == 6
    assert len(bad.choices) == 2
    assert bad.error == {
        "message": "RuntimeError: an illegal address", "type": "InternalServerError", "param": None, "code": 500
    }  # fmt: skip
    assert bad.events[-1] == "[DONE]"
    clean(engine)


def test_an_engine_that_breaks_leaves_nobody_waiting_and_says_why() -> None:
    engine, _ = simulated(max_running=1)

    class Broken(Exception):
        pass

    found = list[Told]()

    async def main() -> None:
        async with EngineServer(engine, "m") as server:
            asks = [asyncio.create_task(ask(server, answer=100)) for _ in range(2)]
            await asyncio.sleep(2.1)
            engine.scheduler.schedule = breaking  # type: ignore[method-assign]
            asks.append(asyncio.create_task(ask(server, answer=100)))
            found.extend(await asyncio.gather(*asks))
            found.append(await ask(server))

    def breaking() -> Plan:
        raise Broken("no such block")

    with pytest.raises(Broken):
        run_virtually(main())
    *there, late = found
    assert [each.error["message"] for each in there] == ["the engine failed: Broken: no such block"] * 3
    assert late.status == 503


def test_a_pool_that_nobody_fits_any_more_costs_patience_and_no_processor() -> None:
    """Blocks that are lost for ever: requests wait, nothing turns, and each client's own limit ends it."""
    engine, log = simulated(blocks=8)
    engine.scheduler.pool.allocate(7)

    async def main() -> tuple[Any, int]:
        async with EngineServer(engine, "m") as server:
            target = Target("http://lab", "m", silence_s=60, dialect=Dialect(token_ids=True))
            load = Load(rate=1, requests=3, workload="fixed:12/4", warmup=0)
            result = await run(target, load, transport=InProcess(server.answer))
            await asyncio.sleep(1.0)
            return result, engine.scheduler.unfinished

    result, unfinished = run_virtually(main())
    assert result.report()["errors"] == {"timeout": 3}
    assert unfinished == 0
    assert len(log.steps) < 10


def test_a_model_that_waits_for_itself_is_told_apart_from_one_that_works() -> None:
    """On the virtual loop a client without any patience would wait for ever; the loop says so."""
    engine, _ = simulated(blocks=8)
    engine.scheduler.pool.allocate(7)
    with pytest.raises(MeasureError, match="everything waits"):
        serve(engine, {"prompt": 12})


def test_the_page_counts_what_was_served() -> None:
    engine, _ = simulated()

    async def main() -> tuple[str, str]:
        async with EngineServer(engine, "m") as server:
            before = server.page()
            await asyncio.gather(*(ask(server, prompt=[n] * 9, answer=4) for n in range(3)))
            return before, server.page()

    before, after = (read_page(text) for text in run_virtually(main()))
    assert before.total("generation_tokens_total") == 0
    assert after.total("generation_tokens_total") == 12
    assert after.total("prompt_tokens_total") == 27
    assert after.total("request_success_total", finished_reason="length") == 3


def test_a_shared_beginning_is_found() -> None:
    engine, _ = simulated()
    serve(engine, {"prompt": 17}, {"after": 5.0, "prompt": 17})
    assert engine.scheduler.prefix_hits == 16


traffic = st.lists(
    st.tuples(
        st.floats(0, 4, allow_nan=False), st.integers(1, 40), st.integers(1, 12), st.one_of(st.none(), st.floats(0, 9))
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40)
@given(traffic, st.integers(13, 24), st.integers(1, 4), st.integers(4, 64))
def test_whatever_comes_and_goes_tokens_are_counted_right_and_nothing_leaks(
    asks: list[tuple[float, int, int, float | None]], blocks: int, max_running: int, token_budget: int
) -> None:
    """Every stream has its tokens at the ends of the engine's steps; whoever stays has all; no block is kept."""
    engine, log = simulated(blocks, max_running=max_running, token_budget=token_budget)

    async def client(server: EngineServer, number: int) -> Told | None:
        after, prompt, answer, patience = asks[number]
        whole: Coroutine[Any, Any, Told] = ask(server, after, prompt=[number] * prompt, answer=answer)
        try:
            return await asyncio.wait_for(whole, None if patience is None else after + patience)
        except TimeoutError:
            return None

    async def main() -> list[Told | None]:
        async with EngineServer(engine, "m") as server:
            found = await asyncio.gather(*(client(server, number) for number in range(len(asks))))
            await asyncio.sleep(100.0)
            clean(engine)
            return list(found)

    answers = run_virtually(main())
    times = {request.tokens[0]: each for request, each in log.times().items() if isinstance(request, TokenRequest)}
    for number, found in enumerate(answers):
        if found is None:
            assert asks[number][3] is not None
            continue
        arrived = found.times[: len(found.choices)]
        assert len(arrived) == asks[number][2]
        assert arrived == pytest.approx(times[number].tokens, abs=1e-9)
        assert times[number].sent == pytest.approx(asks[number][0], abs=1e-9)
        assert all(a < b for a, b in pairwise(arrived))
