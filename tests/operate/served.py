"""An engine with exact step times behind the server without a socket, and clients that write down what they get."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from kvlab.cache import BlockPool
from kvlab.cost import Row
from kvlab.operate.engine_server import EngineServer
from kvlab.operate.in_process import Reply
from kvlab.operate.sse import EventStream
from kvlab.operate.virtual_time import run_virtually
from kvlab.serving import CostModelExecutor, Engine, EventLog, Scheduler
from kvlab.timing import VirtualClock

DECODE_S, TOKEN_S = 0.25, 0.0625


class Linear:
    """So many seconds for a step that decodes, and for each token of a prompt: exact in binary."""

    def seconds(self, decodes: int, held: int, prompts: Sequence[Row] = ()) -> float:
        return (DECODE_S if decodes else 0.0) + TOKEN_S * sum(row.new for row in prompts)


def simulated(blocks: int = 64, **options: Any) -> tuple[Engine, EventLog]:
    """An engine of four-token blocks on a virtual clock, and what it did."""
    clock, log = VirtualClock(), EventLog()
    scheduler = Scheduler(BlockPool(blocks, 4), **{"token_budget": 64, "max_len": 200, **options})
    return Engine(scheduler, CostModelExecutor(Linear(), clock), clock, (log,)), log


def asked(prompt: int | list[int] | str = 4, answer: int = 3, **fields: Any) -> dict[str, Any]:
    tokens = list(range(prompt)) if isinstance(prompt, int) else prompt
    return {
        "model": "m", "prompt": tokens, "max_tokens": answer, "temperature": 0, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True}, **fields,
    }  # fmt: skip


@dataclass
class Told:
    """What a client was told, and when."""

    status: int
    events: list[Any]
    times: list[float]

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [event["choices"][0] for event in self.events if event != "[DONE]" and event.get("choices")]

    @property
    def text(self) -> str:
        return "".join(choice["text"] for choice in self.choices)

    @property
    def error(self) -> dict[str, Any]:
        return next(event["error"] for event in self.events if "error" in event)


async def told(reply: Reply) -> Told:
    """Read a reply to its end, and hang up."""
    loop, stream, found, body = asyncio.get_running_loop(), EventStream(), Told(reply.status, [], []), reply.body
    async with aclosing(cast(Any, body)):
        async for piece in body:
            for data in stream.feed(piece) if reply.status == 200 else [piece]:
                found.events.append(data if data == "[DONE]" else json.loads(data))
                found.times.append(loop.time())
    return found


async def ask(server: EngineServer, after: float = 0.0, **fields: Any) -> Told:
    await asyncio.sleep(after)
    return await told(await server.answer(asked(**fields)))


def serve(engine: Engine, *asks: dict[str, Any]) -> list[Told]:
    """Ask a server all of these, in virtual time."""

    async def main() -> list[Told]:
        async with EngineServer(engine, "m") as server:
            return list(await asyncio.gather(*(ask(server, **each) for each in asks)))

    return run_virtually(main())


def clean(engine: Engine) -> None:
    """Nobody is left, and no block is held."""
    assert engine.scheduler.unfinished == engine.scheduler.pool.n_used == 0
    engine.scheduler.check()
