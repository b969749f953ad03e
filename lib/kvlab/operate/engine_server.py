"""An OpenAI-compatible server without a socket: an engine of this library, asked as a real server is asked.

On the loop of :mod:`kvlab.operate.virtual_time`::

    engine = Replica(model="llama-3-8b", hardware="h100-sxm").engine()
    async with EngineServer(engine, "llama-3-8b") as server:
        result = await run(Target("http://lab", "llama-3-8b"), Load(rate=4), transport=InProcess(server.answer))
        print(server.page())

With a cost model the engine has a virtual clock, and its steps take that long on the event loop: on the loop of
:mod:`kvlab.operate.virtual_time` a load test takes no time of ours, on any other it takes as long as on the hardware.
With a model, steps run in a thread, and the loop stays free.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Any, Self

from kvlab.errors import KvlabError, PromptError, RequestRefused, SamplingError, one_line
from kvlab.generation import Sampling
from kvlab.generation.text import TextStream
from kvlab.operate.in_process import Reply, body, event
from kvlab.serving import Engine, Event, Metrics, Request, Scheduler, StepRecord, TokenRequest
from kvlab.timing import VirtualClock
from kvlab.weights.tokenizer import Tokenizer

#: What OpenAI's protocol has for ``max_tokens`` where nobody says it.
_MAX_TOKENS = 16

_JSON = {"content-type": "application/json"}


@dataclass(eq=False)
class _Stream:
    """One answer on its way to its client: the body of a reply.

    Args:
        server: that it comes from.
        request: that it answers.
        came: when, on the engine's clock.
        usage: whether the client wants the token counts.
        text: of the tokens; None where there is no tokenizer.
    """

    server: EngineServer
    request: TokenRequest
    came: float
    usage: bool
    text: TextStream | None
    #: What the client gets when it is settled whether the request is served.
    reply: asyncio.Future[Reply] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _pieces: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        piece = await self._pieces.get()
        if piece is None:
            self._pieces.put_nowait(None)  # whoever asks again gets the same answer
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """The client is done, or has hung up."""
        self.server.hang_up(self)

    def send(self, tokens: Sequence[int]) -> None:
        """An event for each token; the last one of the answer says why it ended."""
        finish = self.request.finish
        for left, token in enumerate(tokens, start=1 - len(tokens)):
            last = finish if left == 0 else None
            self._send_event(choices=[{"index": 0, "text": self._said(token, last), "finish_reason": last}])

    def end(self) -> None:
        """What comes after the last token."""
        if self.request.finish == "error":
            self.fail(self.request.error)
            return
        if self.usage:
            sent, made = self.request.prompt_tokens, self.request.new_tokens
            usage = {"prompt_tokens": sent, "completion_tokens": made, "total_tokens": sent + made}
            self._send_event(choices=[], usage=usage)
        self._close()

    def fail(self, reason: str) -> None:
        """An error inside the stream: its status was sent long ago."""
        self._pieces.put_nowait(event(_complaint(500, reason)))
        self._close()

    def _said(self, token: int, finish: str | None) -> str:
        """What a token says: nothing where it ends in the middle of a character."""
        if self.text is None:
            return f" {token}"
        return self.text.push(token) + (self.text.finish() if finish else "")

    def _send_event(self, **parts: Any) -> None:
        head = {"id": self.request.id, "object": "text_completion", "created": int(self.came)}
        self._pieces.put_nowait(event({**head, "model": self.server.model, **parts}))

    def _close(self) -> None:
        self._pieces.put_nowait(event("[DONE]"))
        self._pieces.put_nowait(None)


@dataclass
class _Endings:
    """Collects the requests that ended."""

    requests: list[Request] = field(default_factory=list)

    def event(self, event: Event) -> None:
        """Keep those that ended."""
        if event.kind == "finished":
            self.requests.append(event.request)

    def step(self, record: StepRecord) -> None:
        """Nothing to keep."""


class EngineServer:
    """Serves ``/v1/completions``, streamed, in the dialect of vLLM; an async context manager that ends what it began.

    One event a token, with the finish reason on the last one; usage on an event without choices, if it is asked for.
    As vLLM does, it cuts an answer that would pass the end of the context (``length``), and refuses with 400 a prompt
    that fills it. A full queue is 503, another model 404. A client that hangs up aborts its request; requests join and
    leave between two steps. The server's text of a token without a tokenizer is its number.

    Args:
        engine: that serves; it gets the metrics page as a listener.
        model: the name that requests must give.
        tokenizer: for prompts that are texts; without one a prompt is a list of token ids.

    Raises:
        KvlabError: ``prometheus_client`` is not installed.
    """

    def __init__(self, engine: Engine, model: str, tokenizer: Tokenizer | None = None) -> None:
        self.engine, self.model, self.tokenizer = engine, model, tokenizer
        self._metrics, self._endings = Metrics(engine.scheduler, model), _Endings()
        engine.listeners = (*engine.listeners, self._metrics, self._endings)
        self._virtual = isinstance(engine.clock, VirtualClock)
        self._inbox = deque[_Stream]()
        self._left = list[_Stream]()
        self._streams = dict[Request, _Stream]()
        self._numbers = count()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._open = self._stuck = False

    async def __aenter__(self) -> Self:
        """Begin to serve."""
        self._open = True
        self._task = asyncio.create_task(self._serve())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        """Finish the step, break off every answer, and stop. What broke the engine, if anything did, is raised here."""
        self._open = False
        self._wake.set()
        if self._task is not None:
            await self._task

    def page(self) -> str:
        """The metrics page, as ``/metrics`` would show it."""
        return self._metrics.page()

    async def answer(self, asked: Mapping[str, Any]) -> Reply:
        """Answer a request; for :class:`~kvlab.operate.in_process.InProcess`.

        Args:
            asked: the JSON object of ``/v1/completions``.
        """
        if asked.get("model") != self.model:
            return _refusal(404, f"The model `{asked.get('model')}` does not exist. Valid aliases: {self.model}.")
        try:
            stream = self._stream(asked)
        except KvlabError as wrong:
            return _refusal(400, one_line(wrong))
        if not self._open:
            return _refusal(503, "the server is not running")
        self._inbox.append(stream)
        self._wake.set()
        try:
            return await stream.reply
        except asyncio.CancelledError:
            self.hang_up(stream)
            raise

    def hang_up(self, stream: _Stream) -> None:
        """A client will read no more.

        Args:
            stream: that it read.
        """
        if stream.request in self._streams:
            self._left.append(stream)
            self._wake.set()

    def _stream(self, asked: Mapping[str, Any]) -> _Stream:
        """The request that somebody means.

        Raises:
            KvlabError: a field is missing or wrong.
        """
        if not asked.get("stream"):
            raise PromptError("this server only streams; send stream: true")
        prompt, new = self._prompt(asked.get("prompt")), _number(asked, "max_tokens", _MAX_TOKENS, whole=True)
        limit = self.engine.scheduler.max_len
        if limit is not None and len(prompt) < limit:
            new = min(new, limit - len(prompt))
        stops = self.tokenizer.eos_token_ids if self.tokenizer and not asked.get("ignore_eos") else ()
        id = f"cmpl-{next(self._numbers)}"
        return _Stream(
            self,
            TokenRequest.of(id, prompt, new, sampling=_sampling(asked), stop_ids=frozenset(stops)),
            self._now(),
            bool((asked.get("stream_options") or {}).get("include_usage")),
            TextStream(self.tokenizer.decode) if self.tokenizer else None,
        )

    def _prompt(self, prompt: object) -> list[int]:
        if isinstance(prompt, str) and self.tokenizer is not None:
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return prompt
        forms = "a list of token ids" if self.tokenizer is None else "a text or a list of token ids"
        raise PromptError(f"the prompt is of type {type(prompt).__name__}; this server takes {forms}")

    async def _serve(self) -> None:
        """Until the end: let requests in and out, and take a step. Whatever happens, nobody is left waiting."""
        status, reason = 503, "the server was stopped"
        try:
            while self._open:
                await self._turn()
            for request in self._streams:
                self.engine.abort(request.id)
        except Exception as failure:
            status, reason = 500, f"the engine failed: {type(failure).__name__}: {one_line(failure)}"
            raise
        finally:
            self._open = False
            for stream in self._inbox:
                if not stream.reply.done():
                    stream.reply.set_result(_refusal(status, reason))
            for stream in self._streams.values():
                stream.fail(reason)

    async def _turn(self) -> None:
        scheduler = self.engine.scheduler
        if not (self._inbox or self._left or (scheduler.unfinished and not self._stuck)):
            self._wake.clear()
            await self._wake.wait()
            self.engine.clock.wait_until(self._inbox[0].came if self._inbox else self._now())
            return
        self._let_out()
        self._let_in()
        if scheduler.unfinished:
            await self._step()

    def _let_out(self) -> None:
        """Abort what nobody reads any more."""
        left, self._left = self._left, []
        for stream in left:
            if stream.request.finish is None:
                self.engine.abort(stream.request.id)
        self._settle()

    def _let_in(self) -> None:
        """Queue those who have come by now. (A client that was busy may send while the engine is behind its clock.)"""
        clock = self.engine.clock
        if not self.engine.scheduler.unfinished and self._inbox:
            clock.wait_until(self._inbox[0].came)
        while self._inbox and self._inbox[0].came <= clock.now():
            stream = self._inbox.popleft()
            if stream.reply.done():  # its client has gone
                continue
            try:
                self.engine.add_request(stream.request, stream.came)
            except RequestRefused as refusal:
                busy = _refuses_all(self.engine.scheduler, refusal.reason)
                stream.reply.set_result(_refusal(503 if busy else 400, refusal.reason))
            else:
                self._streams[stream.request] = stream
                stream.reply.set_result(Reply(stream))

    async def _step(self) -> None:
        """Take a step, and hand out its tokens when it is over."""
        scheduler, ran = self.engine.scheduler, len(self.engine.scheduler.running)
        if self._virtual:
            record = self.engine.step(until=self.engine.clock.now())
        else:
            record = await asyncio.to_thread(self.engine.step)
        assert record is not None
        # Nobody can take a step before somebody leaves: turning on would turn for ever.
        self._stuck = not record.fed and len(scheduler.running) == ran
        if self._virtual:
            await asyncio.sleep(max(record.end - self._now(), 0.0))
        for request, tokens in record.emitted.items():
            if request in self._streams:
                self._streams[request].send(tokens)
        self._settle()

    def _settle(self) -> None:
        """End the streams of the requests that ended."""
        ended = self._endings.requests
        while ended:
            stream = self._streams.pop(ended.pop(), None)
            if stream is not None:
                stream.end()

    def _now(self) -> float:
        """On the engine's clock, without waiting for its device."""
        return asyncio.get_running_loop().time() if self._virtual else self.engine.clock.read()


def _sampling(asked: Mapping[str, Any]) -> Sampling:
    temperature, top_p = (float(_number(asked, name, 1.0)) for name in ("temperature", "top_p"))
    return Sampling(temperature=temperature, top_p=top_p, seed=_number(asked, "seed", None, whole=True))


def _number(asked: Mapping[str, Any], name: str, default: float | None, whole: bool = False) -> Any:
    """A field, or its default where it is absent or null.

    Raises:
        SamplingError: it is no number, or not a whole one.
    """
    value = asked.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise SamplingError(f"{name} is {value!r}; it must be a {'whole ' if whole else ''}number")
    return value


def _refuses_all(scheduler: Scheduler, reason: str) -> bool:
    """Whether a request was refused because of the others: then the smallest that there is would be refused alike."""
    return scheduler.refusal(Request("smallest", 1, 1)) == reason


def _complaint(status: int, message: str) -> dict[str, Any]:
    """An error as vLLM writes it."""
    types = {400: "BadRequestError", 404: "NotFoundError", 503: "Service Unavailable"}
    kind = types.get(status, "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _refusal(status: int, message: str) -> Reply:
    return Reply(body([json.dumps(_complaint(status, message)).encode()]), status, _JSON)
