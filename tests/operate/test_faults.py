"""The faults: each does what it says, exactly, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from itertools import accumulate, pairwise
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served import DECODE_S, TOKEN_S, Told, ask, asked, clean, serve, simulated, told

import kvlab
from kvlab.cache import BlockPool
from kvlab.errors import KvlabError
from kvlab.operate.engine_server import EngineServer
from kvlab.operate.faults import BufferingProxy, BusyClient, ColdStart, HostOverhead, LeakyPool, PathFault, SlowReader
from kvlab.operate.in_process import Reply
from kvlab.operate.virtual_time import run_virtually
from kvlab.serving import Engine, ModelExecutor, Scheduler


async def pieces(*parts: bytes, every: float = 1.0) -> AsyncIterator[bytes]:
    """A body whose parts come a second apart, the first at once."""
    for number, part in enumerate(parts):
        await asyncio.sleep(every if number else 0.0)
        yield part


def received(fault: PathFault, *parts: bytes, every: float = 1.0) -> list[tuple[float, bytes]]:
    """What comes through a fault, and when."""

    async def answer(_: dict[str, Any]) -> Reply:
        return Reply(pieces(*parts, every=every))

    async def main() -> list[tuple[float, bytes]]:
        loop, reply = asyncio.get_running_loop(), await fault.between(answer)({})
        return [(loop.time(), piece) async for piece in reply.body]

    return run_virtually(main())


def test_a_cold_start_costs_once_for_each_power_of_two() -> None:
    """A prompt of 5 (as 8), decode steps of 1, then a prompt of 7 (as 8) and one of 9 (as 16)."""
    engine, log = simulated(token_budget=64)
    ColdStart(10.0).spoil(engine)
    serve(
        engine,
        {"prompt": 5, "answer": 3},
        {"after": 100.0, "prompt": [9] * 7, "answer": 2},
        {"after": 200.0, "prompt": [8] * 9, "answer": 2},
    )
    took = [step.end - step.start for step in log.steps]
    usual = [5 * TOKEN_S, DECODE_S, DECODE_S, 7 * TOKEN_S, DECODE_S, 9 * TOKEN_S, DECODE_S]
    assert [a - b for a, b in zip(took, usual, strict=True)] == [10, 10, 0, 0, 0, 10, 0]


def test_a_slow_host_costs_the_same_at_every_step() -> None:
    plain, slow = simulated(), simulated()
    HostOverhead(2.0).spoil(slow[0])
    for engine, _ in (plain, slow):
        serve(engine, {"prompt": 9, "answer": 4}, {"prompt": [7] * 3, "answer": 2})
    took, took_slow = ([step.end - step.start for step in log.steps] for _, log in (plain, slow))
    assert [b - a for a, b in zip(took, took_slow, strict=True)] == [2.0] * len(took)


def test_a_leak_keeps_the_last_blocks_of_every_sequence_and_the_check_finds_it() -> None:
    engine, _ = simulated(blocks=64)
    LeakyPool(2).spoil(engine)
    serve(engine, *({"after": 10.0 * n, "prompt": [n] * 12, "answer": 8} for n in range(5)))
    assert engine.scheduler.unfinished == 0
    assert engine.scheduler.pool.n_used == 5 * 2
    with pytest.raises(KvlabError, match="counts 1 holders, 0 sequences have it"):
        engine.scheduler.check()


def test_a_leak_gives_back_what_others_hold() -> None:
    """Two holders of the same two blocks: the first release is whole, the second one leaves the last block behind."""
    engine, _ = simulated(blocks=8)
    LeakyPool(1).spoil(engine)
    pool: BlockPool = engine.scheduler.pool
    blocks = pool.allocate(2)
    pool.hold(blocks)
    pool.release(blocks)
    assert [pool.holders(block) for block in blocks] == [1, 1]
    pool.release(blocks)
    assert [pool.holders(block) for block in blocks] == [0, 1]


def test_a_proxy_passes_on_what_it_has_when_it_has_enough() -> None:
    found = received(BufferingProxy(4), b"ab", b"cd", b"efghij", b"k", b"l")
    assert found == [(1.0, b"abcd"), (2.0, b"efghij"), (4.0, b"kl")]


@settings(max_examples=50)
@given(st.lists(st.binary(min_size=1, max_size=9), max_size=12), st.integers(1, 30))
def test_a_proxy_changes_no_byte(parts: list[bytes], size: int) -> None:
    found = [piece for _, piece in received(BufferingProxy(size), *parts)]
    assert b"".join(found) == b"".join(parts)
    assert all(len(piece) >= size for piece in found[:-1])
    assert all(found)


def test_a_slow_reader_waits_between_pieces_and_disturbs_nobody_else() -> None:
    assert [time for time, _ in received(SlowReader(3.0), b"a", b"b", b"c", every=1.0)] == [0, 4, 8]

    async def main() -> tuple[Told, Told]:
        engine, _ = simulated()
        async with EngineServer(engine, "m") as server:
            slow = SlowReader(5.0).between(server.answer)

            async def other() -> Told:
                return await told(await slow(asked(answer=4)))

            first, second = await asyncio.gather(other(), ask(server, prompt=[5] * 4, answer=4))
            clean(engine)
            return first, second

    slow, quick = run_virtually(main())
    assert [b - a for a, b in pairwise(slow.times[:4])] == [5.0] * 3
    assert [b - a for a, b in pairwise(quick.times[:4])] == [DECODE_S] * 3


@settings(max_examples=40)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 16))
def test_a_busy_client_works_on_one_request_at_a_time(gaps: list[int], work: int) -> None:
    """A queue with one place: everybody starts when they are due or when the one before is done (Lindley)."""
    due, send_s = [total / 8 for total in accumulate(gaps)], work / 8
    reached: list[float] = []

    async def answer(_: dict[str, Any]) -> Reply:
        reached.append(asyncio.get_running_loop().time())
        return Reply(pieces())

    async def main() -> None:
        busy = BusyClient(send_s).between(answer)

        async def send(at: float) -> None:
            await asyncio.sleep(at)
            await busy({})

        await asyncio.gather(*(send(at) for at in due))

    run_virtually(main())
    expected: list[float] = []
    for at in due:
        expected.append(max(at, expected[-1] if expected else 0.0) + send_s)
    assert reached == pytest.approx(expected)


@pytest.mark.parametrize("fault", [BufferingProxy(10**6), SlowReader(1.0), BusyClient(0.5)])
@pytest.mark.parametrize("read", [0, 1])
def test_a_client_behind_a_fault_can_hang_up(fault: PathFault, read: int) -> None:
    engine, _ = simulated()

    async def main() -> None:
        async with EngineServer(engine, "m") as server:
            reply = await fault.between(server.answer)(asked(answer=150))
            async with aclosing(cast(Any, reply.body)):
                reading = asyncio.create_task(cast(Any, anext(reply.body)))
                await asyncio.sleep(3.0 * read)
                reading.cancel()
            await asyncio.sleep(1.0)
            assert engine.scheduler.pool.n_used == 0
            clean(engine)

    run_virtually(main())


def test_faults_leave_a_model_s_words_alone_on_a_real_clock() -> None:
    """Everything at once, each costing nothing, before the tiny model."""
    loaded = kvlab.load("tiny")
    prompts = ["ROMEO:", "To be, or not to be"]

    def served(*faults: Any) -> Engine:
        pool = BlockPool(32, 16)
        scheduler = Scheduler(pool, token_budget=16, max_len=loaded.config.max_seq_len)
        engine = Engine(scheduler, ModelExecutor(loaded.model, pool, n_vocab=loaded.vocab_size))
        for fault in faults:
            fault.spoil(engine)
        return engine

    async def main(engine: Engine, ways: Sequence[PathFault] = ()) -> list[Told]:
        async with EngineServer(engine, "m", loaded.tokenizer) as server:
            answer: Any = server.answer
            for way in ways:
                answer = way.between(answer)
            replies = [await answer(asked(prompt=prompt, answer=8)) for prompt in prompts]
            return list(await asyncio.gather(*map(told, replies)))

    plain = asyncio.run(main(served()))
    ways = [BufferingProxy(300), SlowReader(0.0), BusyClient(0.0)]
    spoilt = asyncio.run(main(served(ColdStart(0.0), HostOverhead(0.0)), ways))
    assert [each.text for each in spoilt] == [each.text for each in plain]
    assert all(each.text for each in plain)
