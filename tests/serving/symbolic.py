"""An executor whose slots hold token ids: the next token is a hash of what is read through the block table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvlab.cache import BlockPool
from kvlab.serving import Plan, Request, TokenRequest

VOCAB = 97


def next_token(tokens: Sequence[int]) -> int:
    """What this model says after some tokens."""
    value = 17
    for token in tokens:
        value = (value * 31 + token + 7) % 1_000_003
    return value % VOCAB


def alone(prompt: Sequence[int], count: int, stop_ids: frozenset[int] = frozenset()) -> list[int]:
    """What a request answers when nobody else is there."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


class SymbolicExecutor:
    """Writes token ids into slots and reads them back, as attention does with keys.

    Args:
        pool: of the scheduler.
        fails: whether it fails on a request at a call; a call over several requests fails if one of them does.
        guess: what a drafter would say.
    """

    def __init__(
        self,
        pool: BlockPool,
        fails: Callable[[Request, int], bool] = lambda request, call: False,
        guess: Callable[[TokenRequest], Sequence[int]] = lambda request: (),
    ) -> None:
        self.slots: list[int | None] = [None] * (pool.n_blocks * pool.block_size)
        self.size, self.calls, self.plans = pool.block_size, 0, list[Plan]()
        self._fails, self._guess = fails, guess
        self.forgotten: list[Request] = []

    def require(self, request: Request) -> None:
        """Anything goes."""

    def repeats(self, plan: Plan, seconds: float | None) -> int:
        return 1

    def draft(self, request: Request) -> Sequence[int]:
        assert isinstance(request, TokenRequest)
        return self._guess(request)

    def forget(self, request: Request) -> None:
        self.forgotten.append(request)

    def execute(self, plan: Plan) -> dict[Request, Sequence[int]]:
        self.calls += 1
        self.plans.append(plan)
        for source, target in plan.copies:
            ours, theirs = target * self.size, source * self.size
            self.slots[ours : ours + self.size] = self.slots[theirs : theirs + self.size]
        emitted: dict[Request, Sequence[int]] = {}
        for index, (request, fed) in enumerate(plan.tokens.items()):
            assert isinstance(request, TokenRequest)
            if self._fails(request, self.calls):
                raise RuntimeError(f"the device lost {request.id!r} after {index} others")
            emitted[request] = self._feed(request, fed)
        return emitted

    def _feed(self, request: TokenRequest, fed: int) -> list[int]:
        seen, draft = request.num_computed_tokens, list(request.draft)
        for position, token in list(enumerate([*request.tokens, *draft]))[seen : seen + fed]:
            self.slots[self._slot(request, position)] = token
        if fed != request.remaining + len(draft):
            return []
        said = list[int]()
        for end in range(len(request.tokens), len(request.tokens) + len(draft) + 1):
            said.append(next_token([self._read(request, position) for position in range(end)]))
            if len(said) > len(draft) or said[-1] != draft[len(said) - 1]:
                break
        return said

    def _slot(self, request: Request, position: int) -> int:
        return request.table[position // self.size] * self.size + position % self.size

    def _read(self, request: Request, position: int) -> int:
        token = self.slots[self._slot(request, position)]
        assert token is not None, f"{request.id!r} reads position {position}, which nobody wrote"
        return token
