"""A load test of an OpenAI-compatible server: send what a workload asks for, and keep what happened to every request.

    result = loadtest(Target("http://127.0.0.1:8000", "smollm2"), Load(rate=4, requests=200, workload="azure-conv"))
    print(result.markdown())

A latency counts from the moment a request was due. A request has succeeded when it was answered to its end: status 200,
no error inside the stream, a finish reason. Tokens are the server's own count.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kvlab.errors import MeasureError
from kvlab.operate.exchange import Client, Dialect, Target
from kvlab.operate.prompts import Writer
from kvlab.operate.record import Record
from kvlab.operate.report import LoadTestResult
from kvlab.operate.schedule import Load

if TYPE_CHECKING:
    import httpx

    from kvlab.serving.workload import Arrival

#: Seconds between two looks at how late the event loop wakes up, and between two words about progress.
_LOOK_S, _TELL_S = 0.05, 0.5


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Args:
        seconds: since it began.
        sent: requests so far.
        completed: of these, answered to the end.
        failed: of these, for any reason.
        total: requests that will be sent.
        tokens: chunks with tokens that have come.
    """

    seconds: float
    sent: int
    completed: int
    failed: int
    total: int
    tokens: int


Tell = Callable[[Progress], None]


@dataclass(frozen=True)
class _Question:
    """A request that is ready to be sent.

    Args:
        due: seconds after the start; in a closed loop it means nothing.
    """

    due: float
    request: httpx.Request
    prompt_tokens: int
    output_tokens: int


async def run(
    target: Target, load: Load, *, transport: httpx.AsyncBaseTransport | None = None, tell: Tell | None = None
) -> LoadTestResult:
    """Test a server. Cancelled (by Ctrl-C under ``asyncio.run``), it returns what there is, marked as interrupted.

    Args:
        target: the server.
        load: what is sent to it.
        transport: that takes the place of the network, such as :class:`kvlab.operate.in_process.InProcess`.
        tell: is told how far it has come, twice a second and at the end.

    Raises:
        ConfigError: the address cannot be used.
        MeasureError: the server cannot be reached at all.
        KvlabError: ``httpx`` is not installed.
    """
    from kvlab.operate.probing import learn

    arrivals = load.arrivals()
    async with Client(target, transport) as client:
        dialect, writer = await learn(client, load.tokenizer)
        await _warm_up(client, [_question(client, dialect, writer, each) for each in _fresh(arrivals, load.warmup)])
        questions = [_question(client, dialect, writer, arrival) for arrival in arrivals]
        run = _Run(client, questions, tell)
        interrupted = await run.drive(load.places)
    return LoadTestResult(
        settings=_settings(target, load, dialect, writer, arrivals),
        records=run.records,
        interrupted=interrupted,
        loop_lags=run.lags,
    )


def loadtest(target: Target, load: Load, *, tell: Tell | None = None) -> LoadTestResult:
    """Test a server, and wait for the end. Ctrl-C ends it early; a second one ends everything.

    Args:
        target: the server.
        load: what is sent to it.
        tell: is told how far it has come.

    Raises:
        ConfigError: the address cannot be used.
        MeasureError: the server cannot be reached at all, or an event loop runs already.
        KvlabError: ``httpx`` is not installed.
    """
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        raise MeasureError("an event loop runs already, as in a notebook; write: await run(target, load)")
    return asyncio.run(run(target, load, tell=tell))


@dataclass
class _Run:
    """The timed part: sends questions and collects records."""

    client: Client
    questions: list[_Question]
    tell: Tell | None
    records: list[Record] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)

    async def drive(self, places: int | None) -> bool:
        """Send everything.

        Args:
            places: of a closed loop; None for an open one.

        Returns:
            Whether it was interrupted.
        """
        # What exists now is not looked through again for garbage: with a large library loaded that takes tens of
        # milliseconds, in which nothing is read.
        gc.freeze()
        watcher = asyncio.create_task(self._watch())
        self.client.restart()
        interrupted = False
        try:
            await (self._open() if places is None else self._closed(places))
        except asyncio.CancelledError:
            interrupted = True
        finally:
            watcher.cancel()
            gc.unfreeze()
        self._say()
        return interrupted

    async def _open(self) -> None:
        """Every request at its time, whatever became of the others."""
        async with asyncio.TaskGroup() as group:
            for question in self.questions:
                await asyncio.sleep(max(question.due - self.client.now(), 0.0))
                group.create_task(self._send(question, question.due))

    async def _closed(self, places: int) -> None:
        """As many at once as there are places."""
        left = iter(self.questions)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(places, len(self.questions))):
                group.create_task(self._place(left))

    async def _place(self, left: Iterator[_Question]) -> None:
        for question in left:
            await self._send(question, self.client.now())

    async def _send(self, question: _Question, due: float) -> None:
        record = Record(len(self.records), due, question.prompt_tokens, question.output_tokens)
        self.records.append(record)
        await self.client.ask(question.request, record)

    async def _watch(self) -> None:
        """Note how late this loop wakes up: everything that it reads is as late. Say how far the run has come."""
        said = 0.0
        while True:
            asleep = self.client.now()
            await asyncio.sleep(_LOOK_S)
            now = self.client.now()
            self.lags.append(max(now - asleep - _LOOK_S, 0.0))
            if now - said >= _TELL_S:
                said = now
                self._say()

    def _say(self) -> None:
        if self.tell is None:
            return
        completed = sum(record.completed for record in self.records)
        failed = sum(record.error is not None for record in self.records)
        tokens = sum(len(record.chunks_s) for record in self.records)
        sent = len(self.records)
        self.tell(Progress(self.client.now(), sent, completed, failed, len(self.questions), tokens))


def _question(client: Client, dialect: Dialect, writer: Writer, arrival: Arrival) -> _Question:
    request = client.request(writer.prompt(arrival), arrival.output_tokens, dialect)
    return _Question(arrival.time, request, arrival.prompt_tokens, arrival.output_tokens)


def _fresh(arrivals: list[Arrival], count: int) -> Iterator[Arrival]:
    """Requests like the first ones that share nothing with any that count."""
    for number in range(count):
        like = arrivals[number % len(arrivals)]
        yield replace(like, session=-1000 - number, system_tokens=0)


async def _warm_up(client: Client, questions: list[_Question]) -> None:
    """Send requests that count for nothing: the server compiles, allocates and connects."""
    waits: list[Awaitable[Any]] = [
        client.ask(each.request, Record(-1, client.now(), each.prompt_tokens, each.output_tokens)) for each in questions
    ]
    await asyncio.gather(*waits)


def _settings(target: Target, load: Load, dialect: Dialect, writer: Writer, arrivals: list[Arrival]) -> dict[str, Any]:
    """What a reader of the result must know to run it again."""
    return {
        "url": target.url,
        "model": target.model,
        "endpoint": target.endpoint,
        "loop": "closed" if load.places else "open",
        "rate": load.rate,
        "concurrency": load.places,
        "requests": load.requests,
        "prompt_tokens": fmean(each.prompt_tokens for each in arrivals),
        "output_tokens": fmean(each.output_tokens for each in arrivals),
        "workload": None if load.trace else load.workload,
        "trace": str(load.trace) if load.trace else None,
        "burstiness": load.burstiness,
        "seed": load.seed,
        "warmup": load.warmup,
        "slo_ttft_s": load.slo_ttft,
        "slo_tpot_s": load.slo_tpot,
        "silence_s": target.silence_s,
        "limit_s": target.limit_s,
        "exact_lengths": dialect.exact,
        "token_ids": dialect.token_ids,
        "template_tokens": writer.overhead,
        "shared_prompts": _shared(arrivals),
    }


def _shared(arrivals: list[Arrival]) -> bool:
    """Whether prompts are meant to begin alike: by a system prompt, or as turns of a conversation."""
    return any(each.system_tokens for each in arrivals) or len({each.session for each in arrivals}) < len(arrivals)
