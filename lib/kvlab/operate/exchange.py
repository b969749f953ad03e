"""Requests to an OpenAI-compatible server, and a log of what came back when."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast
from urllib.parse import urlsplit

from kvlab.errors import ConfigError, KvlabError, MeasureError, one_line
from kvlab.operate.answer import Answer, complaint_of, one_excerpt
from kvlab.operate.record import Fault, Record
from kvlab.operate.sse import EventStream

if TYPE_CHECKING:
    import httpx

_PATHS = {"chat": "/chat/completions", "completions": "/completions"}

#: An answer that has its finish reason may leave its stream open for so many seconds; then we hang up.
_GRACE_S = 5.0

#: A silence is noticed this part of itself too late, at most.
_SELDOM = 20

#: Of a refusal so many bytes are read.
_REFUSAL_BYTES = 64 * 2**10


@dataclass(frozen=True)
class Dialect:
    """What a server accepts beyond the least that all do.

    Args:
        token_ids: prompts of token ids (``completions`` of vLLM and llama.cpp).
        usage: ``stream_options``, which asks for the server's token counts.
        exact: ``ignore_eos`` and ``min_tokens``, which make an answer as long as it is asked to be.
    """

    token_ids: bool = False
    usage: bool = True
    exact: bool = True


@dataclass(frozen=True)
class Target:
    """A server and a model on it.

    Args:
        url: of the server, with or without ``/v1``.
        model: by the server's name for it.
        endpoint: ``completions`` sends prompts as they are, ``chat`` has the server wrap them in its template.
        api_key: sent as a bearer token; never shown.
        silence_s: seconds without a single byte after which a request is given up.
        limit_s: seconds after which a request is given up whatever it does.
        dialect: what the server accepts; None to find out by asking.

    Raises:
        ConfigError: the address is none of HTTP, the endpoint is unknown, or a limit is not above 0.
    """

    url: str
    model: str
    endpoint: str = "completions"
    api_key: str | None = field(default=None, repr=False)
    silence_s: float = 120.0
    limit_s: float = 600.0
    dialect: Dialect | None = None

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not parts.username
        except ValueError:
            good = False
        if not good:
            raise ConfigError(
                f"url is {self.url!r}; write an address such as http://127.0.0.1:8000, without a name in it"
            )
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("the API key has characters that no header may have (a line end?); it is not shown here")
        if self.endpoint not in _PATHS:
            raise ConfigError(f"endpoint is {self.endpoint!r}; it must be one of {', '.join(_PATHS)}")
        if not (self.silence_s > 0 and self.limit_s > 0):
            raise ConfigError(f"silence_s is {self.silence_s} and limit_s is {self.limit_s}; both must be above 0")

    @property
    def address(self) -> str:
        """Where requests go."""
        base = self.url.rstrip("/")
        for path in _PATHS.values():
            base = base.removesuffix(path)
        return f"{base if urlsplit(base).path else f'{base}/v1'}{_PATHS[self.endpoint]}"

    def body(self, prompt: str | list[int], max_tokens: int, dialect: Dialect) -> bytes:
        """The JSON of a request.

        Args:
            prompt: a text, or token ids.
            max_tokens: of the answer.
            dialect: what the server accepts.
        """
        asks: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        asks |= {"messages": [{"role": "user", "content": prompt}]} if self.endpoint == "chat" else {"prompt": prompt}
        if dialect.usage:
            asks["stream_options"] = {"include_usage": True}
        if dialect.exact:
            asks |= {"ignore_eos": True, "min_tokens": max_tokens}
        return json.dumps(asks).encode()


@dataclass(eq=False)
class _Lane:
    """One connection, in a transport of its own; ``used`` when the last request over it came to its end."""

    transport: httpx.AsyncBaseTransport
    used: bool = False


class Client:
    """Sends requests, any number at once, and writes their logs.

    Times are those of the event loop, so that a virtual loop makes them exact. Each connection is a transport of its
    own: httpx's pool goes through all of its connections for every request, which with a hundred of them takes longer
    than many a first token. Proxies of the environment are not used.

    Args:
        target: the server.
        transport: that takes the place of the network.

    Raises:
        KvlabError: ``httpx`` is not installed.
    """

    def __init__(self, target: Target, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.target = target
        self._httpx = require_httpx()
        self._given = transport
        self._lanes: list[_Lane] = []
        self._tls = self._httpx.create_ssl_context() if target.url.startswith("https") else False
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if target.api_key:
            self._headers["authorization"] = f"Bearer {target.api_key}"
        self._zero = 0.0

    async def __aenter__(self) -> Self:
        """Start at time 0."""
        self.restart()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        """Close every connection."""
        for lane in self._lanes:
            await lane.transport.aclose()

    def restart(self) -> None:
        """It is time 0 now."""
        self._zero = asyncio.get_running_loop().time()

    def now(self) -> float:
        """Seconds since the start."""
        return asyncio.get_running_loop().time() - self._zero

    def request(self, prompt: str | list[int], max_tokens: int, dialect: Dialect) -> httpx.Request:
        """A request, ready to be sent: nothing is left to do when its time comes.

        Args:
            prompt: a text, or token ids.
            max_tokens: of the answer.
            dialect: what the server accepts.

        Raises:
            ConfigError: the address or the key cannot be sent.
        """
        body = self.target.body(prompt, max_tokens, dialect)
        try:
            return self._httpx.Request("POST", self.target.address, headers=self._headers, content=body)
        except (self._httpx.InvalidURL, UnicodeError) as failure:
            raise ConfigError(
                f"a request to {self.target.address} cannot be written: {type(failure).__name__}"
            ) from None

    async def ask(self, request: httpx.Request, record: Record) -> Answer:
        """Send a request and write its log, whatever becomes of it.

        Args:
            request: of :meth:`request`.
            record: of the request; everything that happens is written into it as it happens.

        Raises:
            asyncio.CancelledError: somebody cancelled it; the record has what came until then.
        """
        answer = Answer()
        record.sent_s = self.now()
        try:
            await self._guarded(request, record, answer)
        except asyncio.CancelledError:
            record.error = Fault("cancelled", "the run was interrupted")
            raise
        finally:
            record.end_s = self.now()
            record.finish_reason = answer.finish_reason
            record.prompt_tokens, record.cached_tokens = answer.prompt_tokens, answer.cached_tokens
            record.counted = answer.output_tokens is not None
            record.output_tokens = len(record.chunks_s) if answer.output_tokens is None else answer.output_tokens
        return answer

    async def _guarded(self, request: httpx.Request, record: Record, answer: Answer) -> None:
        """Send it within the limits, and turn every way to fail into a fault."""
        begun = asyncio.get_running_loop().time()
        watch = asyncio.timeout_at(begun + min(self.target.silence_s, self.target.limit_s))
        try:
            async with watch:
                await self._converse(request, record, answer, _Watch(watch, begun, self.target))
        except (TimeoutError, self._httpx.TimeoutException):
            if not answer.ending:
                record.error = self._too_late(record)
        except self._httpx.ConnectError as failure:
            record.error = Fault("refused", one_line(failure))
        except (self._httpx.TransportError, OSError) as failure:
            if not answer.ending:
                record.error = Fault("closed", f"{one_line(failure)}, after {len(record.chunks_s)} chunks with tokens")
        except (MeasureError, self._httpx.DecodingError) as failure:
            record.error = Fault("malformed", one_line(failure))
        record.error = record.error or answer.verdict()

    def _too_late(self, record: Record) -> Fault:
        target, came = self.target, f"{len(record.chunks_s)} chunks with tokens"
        if self.now() - (record.sent_s or 0.0) > target.limit_s - 1e-6:
            return Fault("timeout", f"not over after {target.limit_s:g} s; {came} had come")
        return Fault("timeout", f"nothing came for {target.silence_s:g} s; {came} had come before")

    async def _converse(self, request: httpx.Request, record: Record, answer: Answer, watch: _Watch) -> None:
        async with self._sent(request, record) as (lane, response):
            record.headers_s, record.status = self.now(), response.status_code
            if response.status_code != 200:
                record.error = Fault(f"http-{response.status_code}", complaint_of(await _beginning(response)))
                return
            head = await self._read(response, record, answer, watch)
            lane.used = self._given is None
        if not answer.heard and head and not head.startswith(b":"):
            text = one_excerpt(head.decode("utf8", errors="replace"))
            record.error = Fault("malformed", f"the answer is no event stream: {text}")

    async def _read(self, response: httpx.Response, record: Record, answer: Answer, watch: _Watch) -> bytes:
        """Take the stream to its end; its first piece."""
        stream, head = EventStream(), b""
        # The short way where nothing is to be unpacked: every layer costs each chunk some microseconds.
        packed = "content-encoding" in response.headers
        pieces = response.aiter_bytes() if packed else cast("AsyncIterator[bytes]", response.stream)
        async for piece in pieces:
            now = self.now()
            head = head or piece
            for data in stream.feed(piece):
                if answer.take(data):
                    record.chunks_s.append(now)
            if answer.fault and answer.fault.kind == "malformed":
                raise MeasureError(answer.fault.message)
            watch.seen(answer.ending)
        for data in stream.close():
            if answer.take(data):
                record.chunks_s.append(self.now())
        return head

    @asynccontextmanager
    async def _sent(self, request: httpx.Request, record: Record) -> AsyncIterator[tuple[_Lane, httpx.Response]]:
        """The response to a request. Its connection is free for another one afterwards, unless something failed."""
        lane = self._lanes.pop() if self._lanes else self._new_lane()
        try:
            response = await lane.transport.handle_async_request(request)
        except (self._httpx.RemoteProtocolError, self._httpx.ReadError, self._httpx.WriteError):
            if not lane.used:
                raise
            # The server closed an idle connection while we took it up again: nothing was lost, so ask once more.
            record.resent, lane = True, self._new_lane()
            response = await lane.transport.handle_async_request(request)
        lane.used = False
        try:
            yield lane, response
        finally:
            await response.aclose()
        self._lanes.append(lane)

    def _new_lane(self) -> _Lane:
        if self._given is not None:
            return _Lane(self._given)
        limits = self._httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=None)
        return _Lane(self._httpx.AsyncHTTPTransport(verify=self._tls, limits=limits, trust_env=False))


@dataclass
class _Watch:
    """Moves the end of a request's patience when something comes; seldom, because moving it costs more than a chunk."""

    timeout: asyncio.Timeout
    begun: float
    target: Target
    moved: float = -math.inf

    def seen(self, ending: bool) -> None:
        patience = _GRACE_S if ending else self.target.silence_s
        slack, now = patience / _SELDOM, asyncio.get_running_loop().time()
        if ending or now - self.moved >= slack:
            self.moved = now
            self.timeout.reschedule(min(now + patience + slack, self.begun + self.target.limit_s))


async def _beginning(response: httpx.Response) -> bytes:
    """The body of a refusal, as far as anybody would read it."""
    found = b""
    async for piece in response.aiter_bytes():
        found += piece
        if len(found) >= _REFUSAL_BYTES:
            break
    return found


def require_httpx() -> Any:
    """The module ``httpx``.

    Raises:
        KvlabError: it is not installed.
    """
    try:
        import httpx
    except ImportError:
        raise KvlabError("a load test needs httpx; install it with: pip install 'kvlab[serve]'") from None
    return httpx


def simpler(dialect: Dialect, message: str) -> Dialect | None:
    """What to try next with a server that refused a request; None where nothing is left to leave out.

    Args:
        dialect: that was refused.
        message: of the server; the fields that it names go first.
    """
    said = message.lower()
    if dialect.exact and ("ignore_eos" in said or "min_tokens" in said):
        return replace(dialect, exact=False)
    if dialect.usage and "stream_options" in said:
        return replace(dialect, usage=False)
    if dialect.token_ids and ("prompt" in said or "token id" in said or "vocabulary" in said):
        return replace(dialect, token_ids=False)
    for field_name in ("exact", "usage", "token_ids"):
        if getattr(dialect, field_name):
            return replace(dialect, **{field_name: False})
    return None
