"""Faults to be injected into an engine, or between a server and its client: what goes wrong in production, on purpose.

Two kinds. A fault of the engine is put into it before it serves (:class:`EngineFault`); a fault of the way stands
between the server's answers and whoever asked (:class:`PathFault`). Both work on a virtual clock and on a real one.
Settings that are merely wrong (a pool too small, a queue too short) are no faults of this kind: a
:class:`~kvlab.serving.Replica` has them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvlab.cache import BlockPool
from kvlab.operate.in_process import Reply
from kvlab.operate.virtual_time import VirtualLoop
from kvlab.serving import Engine, Executor, Plan, Request
from kvlab.timing import Clock

#: What answers requests: a server, or something that stands before it.
Handler = Callable[[dict[str, Any]], Awaitable[Reply]]


class EngineFault(Protocol):
    """Something that is wrong with an engine."""

    def spoil(self, engine: Engine) -> None:
        """Put the fault in.

        Args:
            engine: that has served nobody yet.
        """


class PathFault(Protocol):
    """Something that is wrong between a server and its client."""

    def between(self, answer: Handler) -> Handler:
        """The same server with the fault before it.

        Args:
            answer: of the server.
        """


# --- faults of the engine -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ColdStart:
    """The first step of each size takes longer: its kernels are compiled, tuned or loaded then.

    Sizes are powers of two, to which steps are padded.

    Args:
        seconds: that the first step of a size takes longer.
    """

    seconds: float

    def spoil(self, engine: Engine) -> None:
        """Put it in."""
        known = set[int]()

        def extra(plan: Plan) -> float:
            size = (plan.total - 1).bit_length()
            first = size not in known
            known.add(size)
            return self.seconds if first else 0.0

        engine.executor = _Slowed(engine.executor, engine.clock, extra)


@dataclass(frozen=True)
class HostOverhead:
    """Every step waits for the host: Python between the kernels, a busy CPU, no captured graph.

    Args:
        seconds: that every step takes longer.
    """

    seconds: float

    def spoil(self, engine: Engine) -> None:
        """Put it in."""
        engine.executor = _Slowed(engine.executor, engine.clock, lambda _: self.seconds)


@dataclass(frozen=True)
class LeakyPool:
    """The last blocks of every sequence are not given back when it ends.

    Nobody holds them, and they are not free: the pool shrinks with every request, first at the cost of the prefixes
    that it remembers, then of the requests that it can run.

    Args:
        blocks: that each sequence leaves behind, at most; blocks that it shares are given back.
    """

    blocks: int

    def spoil(self, engine: Engine) -> None:
        """Put it in. The executor must not have looked at the pool yet, which one of a cost model never does."""
        pool = engine.scheduler.pool
        engine.scheduler.pool = _Leaky(pool.n_blocks, pool.block_size, self.blocks)


class _Slowed:
    """An executor that takes some more seconds for a step."""

    def __init__(self, executor: Executor, clock: Clock, extra: Callable[[Plan], float]) -> None:
        self._executor, self._clock, self._extra = executor, clock, extra

    def require(self, request: Request) -> None:
        self._executor.require(request)

    def repeats(self, plan: Plan, seconds: float | None) -> int:
        return 1

    def execute(self, plan: Plan) -> dict[Request, Sequence[int]]:
        self._clock.wait_until(self._clock.now() + self._extra(plan))
        return self._executor.execute(plan)

    def draft(self, request: Request) -> Sequence[int]:
        return self._executor.draft(request)

    def forget(self, request: Request) -> None:
        self._executor.forget(request)


class _Leaky(BlockPool):
    """Keeps the last blocks of a sequence."""

    def __init__(self, n_blocks: int, block_size: int, lost: int) -> None:
        super().__init__(n_blocks, block_size)
        self._lost = lost

    def release(self, blocks: Sequence[int]) -> None:
        last = len(blocks) - self._lost
        super().release([block for n, block in enumerate(blocks) if n < last or self.holders(block) > 1])


# --- faults of the way ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BufferingProxy:
    """A proxy that passes an answer on in large pieces, as nginx does where nobody tells it not to.

    Args:
        size: bytes that it collects before it passes them on; the rest at the end.
    """

    size: int

    def between(self, answer: Handler) -> Handler:
        """The server behind it."""

        async def proxied(asked: dict[str, Any]) -> Reply:
            reply = await answer(asked)
            return replace(reply, body=_Collected(reply.body, self.size))

        return proxied


@dataclass(frozen=True)
class SlowReader:
    """A client that does something with each piece of an answer before it reads the next: draws it, or stores it.

    Args:
        chunk_s: seconds that it takes; other answers go on meanwhile.
    """

    chunk_s: float

    def between(self, answer: Handler) -> Handler:
        """The server as this client sees it."""

        async def slowly(asked: dict[str, Any]) -> Reply:
            reply = await answer(asked)
            return replace(reply, body=_Savoured(reply.body, self.chunk_s))

        return slowly


@dataclass(frozen=True)
class BusyClient:
    """A client whose one core works on every request before it is sent; everything else of it waits.

    Args:
        send_s: seconds of work for a request, such as reading its text and making tokens of it.
    """

    send_s: float

    def between(self, answer: Handler) -> Handler:
        """The server as this client sees it."""

        async def busily(asked: dict[str, Any]) -> Reply:
            _work(self.send_s)
            return await answer(asked)

        return busily


class _Passed:
    """A body that comes through something."""

    def __init__(self, body: AsyncIterator[bytes]) -> None:
        self._body = body

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        return await anext(self._body)

    async def aclose(self) -> None:
        """The client hung up: so does whoever stands between."""
        close = getattr(self._body, "aclose", None)
        if close is not None:
            await close()


class _Collected(_Passed):
    def __init__(self, body: AsyncIterator[bytes], size: int) -> None:
        super().__init__(body)
        self._size = size

    async def __anext__(self) -> bytes:
        held = b""
        async for piece in self._body:
            held += piece
            if len(held) >= self._size:
                break
        if not held:
            raise StopAsyncIteration
        return held


class _Savoured(_Passed):
    def __init__(self, body: AsyncIterator[bytes], seconds: float) -> None:
        super().__init__(body)
        self._seconds, self._begun = seconds, False

    async def __anext__(self) -> bytes:
        if self._begun:
            await asyncio.sleep(self._seconds)
        self._begun = True
        return await anext(self._body)


def _work(seconds: float) -> None:
    """Keep the event loop, and with it everybody on it, busy."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, VirtualLoop):
        loop.skip(seconds)
    else:
        clock = Clock()
        clock.wait_until(clock.read() + seconds)
