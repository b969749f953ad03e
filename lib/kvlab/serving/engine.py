"""The engine: a scheduler, somebody who does the work, a clock, and whoever wants to know what happened."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kvlab.errors import ConfigError, RequestRefused, one_line
from kvlab.generation import Sampling
from kvlab.serving.executor import Executor
from kvlab.serving.plan import Plan
from kvlab.serving.request import Request, TokenRequest
from kvlab.serving.scheduler import Scheduler
from kvlab.timing import Clock

EventKind = Literal["queued", "refused", "scheduled", "preempted", "first_token", "finished"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a request, once.

    Args:
        kind: what; ``scheduled`` is the first time and every time after a preemption. How it finished stands in the
            request.
        time: on the engine's clock.
        request: whose.
    """

    kind: EventKind
    time: float
    request: Request


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did, or several equal ones in a row.

    Args:
        start: when it began.
        end: when it ended.
        fed: tokens that each request fed in each of the steps.
        emitted: tokens that each request emitted, in all of the steps together.
        waiting: requests that waited at the end.
        running: requests that ran at the end.
        kv_usage: part of the pool that is held at the end, 0 to 1; steps in a row take all their blocks at once.
        repeats: how many steps.
        failure: why the step failed when it was taken as a whole, and was then taken request by request; else empty.
    """

    start: float
    end: float
    fed: dict[Request, int]
    emitted: dict[Request, Sequence[int]]
    waiting: int
    running: int
    kv_usage: float
    repeats: int = 1
    failure: str = ""

    def token_times(self, count: int) -> list[float]:
        """When the tokens of one request arrived: one a step, or all at the end of a single step.

        Args:
            count: tokens that it emitted.
        """
        if self.repeats == 1:
            return [self.end] * count
        each = (self.end - self.start) / self.repeats
        return [self.start + each * (index + 1) for index in range(count)]


class Listener(Protocol):
    """Somebody who is told everything that an engine does: a log, a summary, a metrics page.

    Being told in the middle of a step, it leaves the engine alone: whoever wants to abort does so between two steps.
    """

    def event(self, event: Event) -> None:
        """Something happened to a request."""

    def step(self, record: StepRecord) -> None:
        """A step was taken. The events of the requests that it ended come after it."""


@dataclass
class Engine:
    """Serves requests, one step after another. It does not know whether a model or a cost model does the work.

    Args:
        scheduler: plans the steps.
        executor: takes them.
        clock: that all times are read from.
        listeners: are told what happens.
    """

    scheduler: Scheduler
    executor: Executor
    clock: Clock = field(default_factory=Clock)
    listeners: Sequence[Listener] = ()
    #: Blocks that were to be copied in a step that never ended, because somebody pressed Ctrl-C.
    _uncopied: list[tuple[int, int]] = field(init=False, default_factory=list)

    def add_request(self, request: Request, came: float | None = None) -> None:
        """Queue a request.

        Args:
            request: a new one; if it is refused, its ``error`` says why.
            came: when its user sent it, where that was before now: whoever came during a step has waited since then.

        Raises:
            RequestRefused: it can never be served as asked, the queue is full, or the executor answers no such request.
            ConfigError: its id is taken, or it has run before.
        """
        try:
            self.executor.require(request)
            self.scheduler.add(request)
        except RequestRefused as refusal:
            request.error = refusal.reason
            self._tell("refused", request, came)
            raise
        self._tell("queued", request, came)

    def abort(self, id: Hashable) -> None:
        """End a request now, wherever it stands; what it holds is free.

        Args:
            id: of the request.

        Raises:
            ConfigError: no such request waits or runs.
        """
        request = self.scheduler.find(id)
        request.finish = "abort"
        self.scheduler.end(request)
        self._finished(request)

    def fork(self, id: Hashable, twin_id: Hashable, sampling: Sampling | None = None) -> TokenRequest:
        """A second answer from where a request stands; the two share their blocks until one of them writes.

        Args:
            id: of a request that runs.
            twin_id: of the second answer.
            sampling: of the second answer; by default the first one's, which without a seed draws other numbers.

        Raises:
            ConfigError: the request does not run or has no tokens, the new id is taken, or there is no place.
        """
        request = self._with_tokens(id)
        twin = TokenRequest(
            twin_id, request.prompt_tokens, request.max_new_tokens, list(request.tokens), sampling or request.sampling,
            request.stop_ids,
        )  # fmt: skip
        self.scheduler.fork(request, twin)
        self._tell("queued", twin)
        self._tell("scheduled", twin)
        return twin

    def step(self, until: float | None = None) -> StepRecord | None:
        """Take the next step; None when there is nothing to do.

        Args:
            until: a time at which something else is to happen: equal steps in a row are taken no further than that.
        """
        if not self.scheduler.unfinished:
            return None
        start = self.clock.now()
        plan = self.scheduler.schedule()
        plan.copies[:0] = self._uncopied
        for request in plan.preempted:
            self._tell("preempted", request, start)
        for request in plan.admitted:
            self._tell("scheduled", request, start)
        taking_part = list(plan.tokens)
        if plan.repeatable:
            self.scheduler.repeat(plan, self.executor.repeats(plan, None if until is None else until - start))
        self._uncopied = plan.copies
        emitted, failure = self._execute(plan)
        self._uncopied = []
        end = self.clock.now()
        for request in emitted:
            self._book(request, plan, emitted)
        scheduler = self.scheduler
        record = StepRecord(
            start, end, plan.tokens, emitted, scheduler.n_waiting, len(scheduler.running), scheduler.pool.usage,
            plan.repeats, failure,
        )  # fmt: skip
        for listener in self.listeners:
            listener.step(record)
        for request in taking_part:
            if request.finish is not None:
                self._finished(request)
        return record

    def run(self, arrivals: Iterable[tuple[float, Request]] = ()) -> Iterator[StepRecord]:
        """Serve until everybody is served.

        A request that is refused is told to the listeners, and the others go on. One that arrives during a step joins
        after it. When nobody is there, the clock is waited for.

        Args:
            arrivals: requests with the times at which they come, in order, in seconds from now.
        """
        begun = self.clock.now()
        coming = ((begun + seconds, request) for seconds, request in arrivals)
        arrival = next(coming, None)
        while arrival is not None or self.scheduler.unfinished:
            while arrival is not None and arrival[0] <= self.clock.now():
                with suppress(RequestRefused):  # the listeners know
                    self.add_request(arrival[1], arrival[0])
                arrival = next(coming, None)
            record = self.step(None if arrival is None else arrival[0])
            if record is not None:
                yield record
            elif arrival is not None:
                self.clock.wait_until(arrival[0])

    def stream(self, id: Hashable) -> Iterator[int]:
        """The answer of one request, token by token as it comes; everybody else is served meanwhile.

        Several streams may be read side by side: each has its answer from the first token on.

        Args:
            id: of a request that waits or runs.

        Raises:
            ConfigError: no such request waits or runs, or it has no tokens.
        """
        return self._stream(self._with_tokens(id))

    def _stream(self, request: TokenRequest) -> Iterator[int]:
        given = request.prompt_tokens
        while True:
            while given < request.num_tokens:
                yield request.tokens[given]
                given += 1
            if request.finish is not None:
                return
            self.step()

    def _with_tokens(self, id: Hashable) -> TokenRequest:
        request = self.scheduler.find(id)
        if not isinstance(request, TokenRequest):
            raise ConfigError(f"request {id!r} has no tokens, only a number of them; make it a TokenRequest")
        return request

    def _execute(self, plan: Plan) -> tuple[dict[Request, Sequence[int]], str]:
        """Take a step. If it fails, take it request by request: who fails alone is ended, and the others go on."""
        if not plan.tokens:
            return {}, ""
        try:
            return self.executor.execute(plan), ""
        except Exception as failure:
            reason = _said(failure)
            if len(plan.tokens) == 1:
                (request,) = plan.tokens
                plan.drop(request)
                self._fail(request, failure)
                return {}, reason
        emitted: dict[Request, Sequence[int]] = {}
        for request in list(plan.tokens):
            try:
                emitted |= self.executor.execute(plan.alone(request))
            except Exception as failure:
                plan.drop(request)
                self._fail(request, failure)
        return emitted, reason

    def _book(self, request: Request, plan: Plan, emitted: dict[Request, Sequence[int]]) -> None:
        """Append what a request emitted, as far as its answer goes, and ask for a guess at what comes next."""
        tokens = emitted[request]
        first = request.new_tokens == 0 and len(tokens) > 0
        emitted[request] = tokens = tokens[: request.append(tokens)]
        self.scheduler.computed(request, plan.tokens[request] * plan.repeats, len(tokens))
        if first:
            self._tell("first_token", request)
        if request.finish is None and tokens:
            try:
                request.draft = self.executor.draft(request)
            except Exception as failure:
                self._fail(request, failure)

    def _fail(self, request: Request, failure: Exception) -> None:
        request.finish, request.error = "error", _said(failure)
        self.scheduler.end(request)

    def _finished(self, request: Request) -> None:
        self.executor.forget(request)
        self._tell("finished", request)

    def _tell(self, kind: EventKind, request: Request, time: float | None = None) -> None:
        if self.listeners:
            event = Event(kind, self.clock.now() if time is None else time, request)
            for listener in self.listeners:
                listener.event(event)


def _said(failure: Exception) -> str:
    return f"{type(failure).__name__}: {one_line(failure)}"
