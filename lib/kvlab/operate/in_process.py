"""A server inside the client's own process: a function that answers requests, where httpx expects a network."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(frozen=True)
class Reply:
    """What a server answers.

    Args:
        body: bytes in pieces, each of which arrives when the iterator yields it.
        status: of HTTP.
        headers: of HTTP.
    """

    body: AsyncIterator[bytes]
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "text/event-stream"})


class InProcess(httpx.AsyncBaseTransport):
    """A transport for ``loadtest.run`` that asks a function; together with virtual time it makes a server of a script.

    Args:
        answer: is awaited with the JSON object of each request; waits in it come before the status.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], Awaitable[Reply]]) -> None:
        self._answer = answer

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request, as httpx wants it."""
        reply = await self._answer(json.loads(await request.aread()))
        return httpx.Response(reply.status, headers=dict(reply.headers), stream=_Body(reply.body))


class _Body(httpx.AsyncByteStream):
    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._pieces

    async def aclose(self) -> None:
        """The client hung up, or is done."""
        close = getattr(self._pieces, "aclose", None)
        if close is not None:
            await close()


def event(value: Mapping[str, Any] | str) -> bytes:
    """A server-sent event.

    Args:
        value: a JSON object, or the text itself, such as ``[DONE]``.
    """
    return f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()


async def body(pieces: Iterable[bytes] = ()) -> AsyncIterator[bytes]:
    """A body that is there at once.

    Args:
        pieces: of it.
    """
    for piece in pieces:
        yield piece
