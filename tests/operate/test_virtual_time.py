"""Virtual time passes where real time would be waited for, and nowhere else."""

from __future__ import annotations

import asyncio

import pytest

from kvlab.errors import MeasureError
from kvlab.operate.virtual_time import VirtualLoop, run_virtually


def test_sleepers_wake_in_order_at_their_times() -> None:
    async def main() -> list[tuple[str, float]]:
        loop, woken = asyncio.get_running_loop(), list[tuple[str, float]]()

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            woken.append((name, loop.time()))

        await asyncio.gather(sleeper("c", 3600.0), sleeper("a", 0.25), sleeper("b", 60.0))
        return woken

    assert run_virtually(main()) == [("a", 0.25), ("b", 60.0), ("c", 3600.0)]


def test_work_takes_no_time() -> None:
    async def main() -> float:
        for _ in range(100):
            await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == 0


def test_many_small_waits_add_up() -> None:
    async def main() -> float:
        for _ in range(1000):
            await asyncio.sleep(0.001)
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == pytest.approx(1.0, abs=1e-9)


def test_waits_longer_than_a_day() -> None:
    async def main() -> float:
        await asyncio.sleep(1e6)
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == pytest.approx(1e6)


def test_timeouts_expire_in_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == 30


def test_everything_waiting_for_something_else_is_an_error_not_a_hang() -> None:
    async def main() -> None:
        await asyncio.sleep(2)
        await asyncio.Event().wait()

    with pytest.raises(MeasureError, match="at 2 s of virtual time everything waits"):
        run_virtually(main())


def test_what_the_loop_raises_comes_out() -> None:
    async def main() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run_virtually(main())


def test_every_loop_begins_at_zero() -> None:
    for _ in range(2):
        loop = VirtualLoop()
        assert loop.time() == 0
        loop.skip(2.5)
        assert loop.time() == 2.5
        loop.close()


def test_it_runs_where_a_loop_runs_already() -> None:
    async def inner() -> float:
        await asyncio.sleep(7)
        return asyncio.get_running_loop().time()

    async def notebook() -> float:
        return run_virtually(inner())

    assert asyncio.run(notebook()) == 7
