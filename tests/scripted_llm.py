"""Servers that do what a script says: in this process, in virtual time, or on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx

from kvlab.operate.exchange import Dialect, Target
from kvlab.operate.in_process import InProcess, Reply, body, event
from kvlab.operate.loadtest import run
from kvlab.operate.report import LoadTestResult
from kvlab.operate.schedule import Load
from kvlab.operate.virtual_time import run_virtually

#: A server that takes everything: no probes, token ids.
PLAIN = Dialect(token_ids=True)

Delays = Callable[[int, dict[str, Any]], Sequence[float]]


@dataclass
class Scripted:
    """A completions server. Each answer has a token after each of its delays, in seconds.

    Args:
        delays: of an answer, by its number in the order of arrival, and the request.
        places: answers at once; others wait for a place, first come, first served.
        usage: sends its token counts.
        cached: tokens of each prompt that it says it knew.
        extra: tokens that it adds to each prompt.
    """

    delays: Delays
    places: int | None = None
    usage: bool = True
    cached: int = 0
    extra: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    def __post_init__(self) -> None:
        self._numbers = count()
        self._room = asyncio.Semaphore(self.places or 1_000_000)

    async def answer(self, asked: dict[str, Any]) -> Reply:
        self.asked.append(asked)
        return Reply(self._body(next(self._numbers), asked))

    async def _body(self, number: int, asked: dict[str, Any]) -> AsyncIterator[bytes]:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            async with self._room:
                delays = list(self.delays(number, asked))
                for index, delay in enumerate(delays):
                    await asyncio.sleep(delay)
                    yield chunk("x", "length" if index == len(delays) - 1 else None)
                if self.usage:
                    yield usage(tokens_of(asked) + self.extra, len(delays), self.cached)
                yield event("[DONE]")
        finally:
            self.at_once -= 1


def chunk(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def usage(prompt: int, output: int, cached: int = 0) -> bytes:
    details = {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}
    return event({"choices": [], "usage": counts})


def tokens_of(asked: dict[str, Any]) -> int:
    """Tokens of a prompt: its ids, or its words."""
    prompt = asked["prompt"] if "prompt" in asked else asked["messages"][0]["content"]
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


def steady(ttft: float, gap: float) -> Delays:
    """As many tokens as were asked for, with the same gap between them."""
    return lambda number, asked: [ttft] + [gap] * (asked["max_tokens"] - 1)


def load_tested(server: Scripted, load: Load, dialect: Dialect | None = PLAIN, **target: Any) -> LoadTestResult:
    """The result of a load test in virtual time."""
    at = Target("http://server", "m", dialect=dialect, **target)
    return run_virtually(run(at, load, transport=InProcess(server.answer)))


def one(
    *pieces: bytes, status: int = 200, then: Callable[[], AsyncIterator[bytes]] | None = None, **target: Any
) -> LoadTestResult:
    """The result of one request that gets these pieces at once, and then what ``then`` yields or raises."""

    async def stream() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece
        if then is not None:
            async for piece in then():
                yield piece

    async def answer(asked: dict[str, Any]) -> Reply:
        return Reply(stream(), status)

    at = Target("http://server", "m", dialect=PLAIN, **target)
    load = Load(requests=1, workload="fixed:5/3", warmup=0)
    return run_virtually(run(at, load, transport=InProcess(answer)))


async def never() -> AsyncIterator[bytes]:
    """Nothing, ever."""
    await asyncio.Event().wait()
    yield b""


async def broken() -> AsyncIterator[bytes]:
    """The connection breaks."""
    raise httpx.RemoteProtocolError("peer closed connection without sending complete message body")
    yield b""


__all__ = [
    "PLAIN",
    "Scripted",
    "body",
    "broken",
    "chunk",
    "event",
    "load_tested",
    "never",
    "one",
    "steady",
    "tokens_of",
    "usage",
]
