"""What can be played through in the page: a block map, and a scheduler's timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvlab.book.calculators.base import Explorable
from kvlab.book.calculators.words import count, some
from kvlab.errors import ConfigError, at_least

if TYPE_CHECKING:
    from kvlab.serving import Scheduler

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
        step: int = 24,
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
        from kvlab.errors import RequestRefused
        from kvlab.serving import Scheduler, TokenRequest

        pool = BlockPool(self.setting["blocks"], self.setting["block_size"])
        scheduler = Scheduler(pool, policy=self.setting["policy"], token_budget=self.setting["budget"])
        asked = [Asked(**each) for each in self.setting["requests"]]
        coming = sorted((each.step, chr(65 + index), each) for index, each in enumerate(asked))
        step = out = 0
        while step < self.setting["step"]:
            while coming and coming[0][0] <= step:
                _, id, each = coming.pop(0)
                try:
                    scheduler.add(TokenRequest.of(id, _prompt(id, each), each.answer))
                except RequestRefused:
                    continue
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


def _verb(ids: Sequence[str], one: str, many: str) -> str:
    return f"{_listed(ids)} {one if len(ids) == 1 else many}"


def _listed(ids: Sequence[str]) -> str:
    return f"{', '.join(ids[:-1])} and {ids[-1]}" if len(ids) > 1 else "".join(ids)
