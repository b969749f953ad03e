"""What can be played through in the page: a block map, and a scheduler's timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvlab.book.calculators.base import Explorable
from kvlab.book.calculators.words import count, duration, some
from kvlab.errors import ConfigError, at_least

if TYPE_CHECKING:
    from kvlab.cost import Row
    from kvlab.serving import EventLog, Request, Scheduler

#: Tokens of a system prompt in the block map; ``block_map.mjs`` has the same.
_SYSTEM_TOKENS = 16
_MOST_REQUESTS = 12


class Asked(NamedTuple):
    """A request of the block map.

    Args:
        step: at which it comes.
        begins: ``S`` or ``T`` for one of two system prompts of 16 tokens, empty for neither.
        own: tokens of its prompt that nobody else has.
        answer: tokens of its answer.
    """

    step: int
    begins: str
    own: int
    answer: int


_FIVE = (
    Asked(0, "S", 6, 30),
    Asked(2, "S", 4, 20),
    Asked(4, "", 24, 20),
    Asked(8, "S", 6, 16),
    Asked(30, "T", 4, 12),
)


class BlockMapExplorer(Explorable):
    """Requests with shared beginnings in a small pool: who holds which block when, what is found, who is thrown out.

    Args:
        requests: that come, at most 12.
        step: that is shown at the start.
        blocks: of the pool.
        block_size: tokens of a block.
        budget: tokens of a step.
        policy: how a step is filled.

    Raises:
        ConfigError: a number is impossible, or a name is unknown.
    """

    kind = "block-map"
    title = "Explore: blocks, their holders, and a small scheduler"

    def __init__(
        self,
        requests: Sequence[Asked] = _FIVE,
        *,
        step: int = 12,
        blocks: int = 20,
        block_size: int = 4,
        budget: int = 16,
        policy: str = "chunked",
    ) -> None:
        if len(requests) > _MOST_REQUESTS or any(asked.begins not in ("S", "T", "") for asked in requests):
            raise ConfigError(
                f"{len(requests)} requests: give at most {_MOST_REQUESTS}, each begins with 'S', 'T' or ''"
            )
        super().__init__(
            requests=[asked._asdict() for asked in requests],
            step=at_least(0, "step", step),
            blocks=at_least(2, "blocks", blocks),
            block_size=at_least(1, "block_size", block_size),
            budget=at_least(1, "budget", budget),
            policy=policy,
        )

    def _answer(self) -> str:
        """The same from the library's scheduler."""
        from kvlab.cache import BlockPool  # late: torch is a second's work
        from kvlab.serving import Scheduler, TokenRequest

        pool = BlockPool(self.setting["blocks"], self.setting["block_size"])
        scheduler = Scheduler(pool, policy=self.setting["policy"], token_budget=self.setting["budget"])
        asked = [Asked(**each) for each in self.setting["requests"]]
        requests = [(each.step, TokenRequest.of(id, _prompt(id, each), each.answer)) for id, each in _named(asked)]
        coming = [pair for pair in sorted(requests, key=lambda pair: pair[0]) if scheduler.refusal(pair[1]) is None]
        step = out = 0
        while step < self.setting["step"]:
            while coming and coming[0][0] <= step:
                scheduler.add(coming.pop(0)[1])
            if not scheduler.unfinished and not coming:
                break
            plan = scheduler.schedule()
            out += len(plan.preempted)
            for request, fed in plan.tokens.items():
                token = _own(request.id, request.num_tokens)
                scheduler.computed(request, fed, request.append([token] if fed == request.remaining else []))
            step += 1
        self.setting["step"] = step
        return _block_words(scheduler, step, out)


class Timed(NamedTuple):
    """A request of the playground.

    Args:
        id: its name.
        at_ms: when it comes.
        prompt: its tokens.
        answer: tokens of its answer.
    """

    id: str
    at_ms: int
    prompt: int
    answer: int


_A_LONG_ONE = (Timed("A", 0, 60, 90), Timed("B", 0, 100, 60), Timed("C", 500, 2000, 20), Timed("D", 550, 80, 20))


class SchedulerPlayground(Explorable):
    """The same requests under a policy and a token budget: whose first token comes when, whose answer stops.

    A step takes a fixed time and a time for each token; what caches hold costs nothing.

    Args:
        requests: that come; one of them has the longest prompt, which can be changed in the page.
        policy: how a step is filled.
        budget: tokens of a step; raised to what is read whole, where prompts are.
        blocks: of 16 tokens, in the pool.
        step_us: microseconds of a step.
        token_us: microseconds of each token in it.

    Raises:
        ConfigError: a number is impossible, or a name is unknown.
    """

    kind = "scheduler-timeline"
    title = "Explore: a scheduler, its policy and its token budget"

    def __init__(
        self,
        requests: Sequence[Timed] = _A_LONG_ONE,
        *,
        policy: str = "chunked",
        budget: int = 256,
        blocks: int = 512,
        step_us: int = 8000,
        token_us: int = 150,
    ) -> None:
        if len({asked.id for asked in requests}) < max(len(requests), 1):
            raise ConfigError(f"{len(requests)} requests; give one or more, each with a name of its own")
        super().__init__(
            requests=[asked._asdict() for asked in requests],
            policy=policy,
            budget=at_least(1, "budget", budget),
            blocks=at_least(1, "blocks", blocks),
            step_us=at_least(0, "step_us", step_us),
            token_us=at_least(0, "token_us", token_us),
        )

    def _answer(self) -> str:
        """The same from the library's engine, on a virtual clock."""
        from kvlab.cache import BlockPool  # late: torch is a second's work
        from kvlab.serving import CostModelExecutor, Engine, EventLog, Request, Scheduler
        from kvlab.timing import VirtualClock

        policy, budget = self.setting["policy"], self.setting["budget"]
        asked = [Timed(**each) for each in self.setting["requests"]]
        if policy != "chunked":
            budget = max(budget, *(each.prompt + each.answer - 1 for each in asked))
        clock, log = VirtualClock(), EventLog()
        pool = BlockPool(self.setting["blocks"], 16)
        scheduler = Scheduler(pool, policy=policy, token_budget=budget)
        times = _Linear(self.setting["step_us"], self.setting["token_us"])
        coming = sorted((1000.0 * each.at_ms, index) for index, each in enumerate(asked))
        requests = [Request(each.id, each.prompt, each.answer) for each in asked]
        arrivals = [(time, requests[index]) for time, index in coming]
        for _ in Engine(scheduler, CostModelExecutor(times, clock), clock, [log]).run(arrivals):
            pass
        came = {request: time for time, request in arrivals}
        return _timeline_words(requests, came, log, f"{policy}, {some(budget, 'token')} a step")


class _Linear:
    """Time of a step: so much, and so much more for each token. In microseconds, which are whole: sums are exact."""

    def __init__(self, step_us: int, token_us: int) -> None:
        self._step_us, self._token_us = step_us, token_us

    def seconds(self, decodes: int, held: int, prompts: Sequence[Row] = ()) -> float:
        return float(self._step_us + self._token_us * (decodes + sum(row.new for row in prompts)))


def _named(asked: Sequence[Asked]) -> list[tuple[str, Asked]]:
    """Requests with the letters that they are called by."""
    return [(chr(ord("A") + index), each) for index, each in enumerate(asked)]


def _prompt(id: str, asked: Asked) -> list[int]:
    """Tokens of a prompt: those of its system prompt, and its own."""
    system = {"S": 1, "T": 2, "": 0}[asked.begins]
    length = _SYSTEM_TOKENS * (system > 0) + asked.own
    shared = [1000 * system + place for place in range(_SYSTEM_TOKENS)] if system else []
    return shared + [_own(id, place) for place in range(len(shared), length)]


def _own(id: object, place: int) -> int:
    """A token that only this request has."""
    return 1000 * ord(str(id)) + place


def _block_words(scheduler: Scheduler, step: int, out: int) -> str:
    """The answer, in the words of ``blockWords`` in ``block_map.mjs``."""
    pool, running = scheduler.pool, [str(request.id) for request in scheduler.running]
    waiting = [str(request.id) for request in scheduler.waiting]
    shared = sum(pool.holders(block) > 1 for block in range(pool.n_blocks))
    who = _verb(running, "runs", "run") if running else "nobody runs"
    who += ", " + _verb(waiting, "waits", "wait") if waiting else ""
    return (
        f"After {some(step, 'step')}: {who}. {count(pool.n_used)} of {some(pool.n_blocks, 'block')} are held, "
        f"{count(shared)} of them by more than one. Found in the cache: {count(scheduler.prefix_hits)} of "
        f"{some(scheduler.prefix_queries, 'prompt token')}. Thrown out so far: {count(out)}."
    )


def _timeline_words(requests: Sequence[Request], came: Mapping[Request, float], log: EventLog, how: str) -> str:
    """The answer, in the words of ``timelineWords`` in ``scheduler_timeline.mjs``; times are microseconds."""
    times, end = log.times(), log.steps[-1].end if log.steps else 0.0
    longest = max(requests, key=lambda request: request.prompt_tokens)
    first = "can never fit"
    if longest in times:  # it waits from the moment it comes, even in the middle of a step
        first = f"has its first token after {duration((times[longest].tokens[0] - came[longest]) / 1e6)}"
    gaps = [gap for request, life in times.items() if request is not longest for gap in life.itl]
    return (
        f"{how}: {longest.id} with the longest prompt {first}; the longest gap in the answers of the others is "
        f"{duration(max(gaps, default=0.0) / 1e6)}; everything is done after {duration(end / 1e6)}."
    )


def _verb(ids: Sequence[str], one: str, many: str) -> str:
    return f"{_listed(ids)} {one if len(ids) == 1 else many}"


def _listed(ids: Sequence[str]) -> str:
    return f"{', '.join(ids[:-1])} and {ids[-1]}" if len(ids) > 1 else "".join(ids)
