"""Who computes how many tokens in the next step.

Iteration-level scheduling (Orca, OSDI 2022): requests join and leave between any two steps. A step is plain data, from
request to number of tokens, at most ``token_budget`` in all. Static batching, continuous batching and chunked prefill
(Sarathi-Serve, arXiv:2403.02310) are three ways to fill the same structure. No tensor is touched here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush

from kvlab.cache import ROOT, BlockPool
from kvlab.errors import ConfigError, RequestRefused, at_least
from kvlab.serving.plan import Order, Plan, Policy, order_of, policy_of
from kvlab.serving.request import Request


class Scheduler:
    """Keeps the queue and those who run, and plans steps.

    Args:
        pool: the blocks.
        policy: how a step is filled.
        token_budget: tokens of a step, at most (``max_num_batched_tokens`` of vLLM).
        max_running: requests that run at once (``max_num_seqs`` of vLLM).
        max_len: tokens of prompt and answer that a request may come to; None for what the pool holds.
        order: who of those who wait comes first.
        ageing: tokens that a step of waiting counts for, in the order ``shortest``.
        max_waiting: requests that may wait; more are refused. None for any number. Everybody waits for a step's begin.
        reuse_prefixes: whether full blocks that begin alike are computed once.

    Raises:
        ConfigError: a number is below 1, or ``ageing`` is negative.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        policy: Policy | str = Policy.CHUNKED,
        token_budget: int = 512,
        max_running: int = 64,
        max_len: int | None = None,
        order: Order | str = Order.FCFS,
        ageing: float = 8.0,
        max_waiting: int | None = None,
        reuse_prefixes: bool = True,
    ) -> None:
        self.pool, self.policy, self.order = pool, policy_of(policy), order_of(order)
        self.token_budget = at_least(1, "token_budget", token_budget)
        self.max_running = at_least(1, "max_running", max_running)
        self.max_len = None if max_len is None else at_least(1, "max_len", max_len)
        self.max_waiting = None if max_waiting is None else at_least(1, "max_waiting", max_waiting)
        if not ageing >= 0:
            raise ConfigError(f"ageing is {ageing}; it must be 0 (short requests always first) or more")
        self.ageing, self.reuse_prefixes = ageing, reuse_prefixes
        self.running: list[Request] = []
        self._waiting: list[tuple[float, int, Request]] = []
        self._ids: dict[Hashable, Request] = {}
        self._steps = self._added = 0
        #: Prompt tokens that were looked up in the cache at admission, and those that were found.
        self.prefix_queries = self.prefix_hits = 0

    @property
    def waiting(self) -> list[Request]:
        """Those who wait, in the order in which they will be looked at."""
        return [request for _, _, request in sorted(self._waiting)]

    @property
    def n_waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._ids)

    def find(self, id: Hashable) -> Request:
        """An unfinished request.

        Args:
            id: of the request.

        Raises:
            ConfigError: there is none: it never came, or has ended.
        """
        if id not in self._ids:
            raise ConfigError(f"no request {id!r} waits or runs; it never came, or has ended")
        return self._ids[id]

    def refusal(self, request: Request) -> str | None:
        """Why a request can never be served as asked, or not now; None where it can.

        Args:
            request: that came.
        """
        needed, pool = self.pool.blocks_for(request.longest), self.pool
        if request.prompt_tokens < 1 or request.max_new_tokens < 1:
            return (
                f"{request.prompt_tokens} prompt tokens and max_new_tokens {request.max_new_tokens}; "
                "a request has 1 or more of each"
            )
        if self.max_len is not None and request.longest + 1 > self.max_len:
            return (
                f"{request.prompt_tokens} prompt tokens and up to {request.max_new_tokens} new ones are more than "
                f"max_len {self.max_len}; shorten the prompt or ask for fewer"
            )
        if needed > pool.n_blocks:
            return (
                f"its cache may come to {request.longest} tokens, {needed} blocks of {pool.block_size}, and the pool "
                f"has {pool.n_blocks}; ask for fewer tokens or make the pool larger"
            )
        # A prompt is read whole, and after a preemption the answer so far with it; a static batch is never preempted.
        whole = {Policy.STATIC: request.prompt_tokens, Policy.CONTINUOUS: request.longest, Policy.CHUNKED: 1}[
            self.policy
        ]
        if whole > self.token_budget:
            return (
                f"it may have to read {whole} tokens in one step, and the budget is {self.token_budget}; "
                "raise token_budget, or choose the policy 'chunked'"
            )
        if self.max_waiting is not None and len(self._waiting) >= self.max_waiting:
            return f"{len(self._waiting)} requests wait already, max_waiting is {self.max_waiting}; try again later"
        return None

    def add(self, request: Request) -> None:
        """Queue a request.

        Args:
            request: a new one.

        Raises:
            RequestRefused: it can never be served, or the queue is full.
            ConfigError: a request of this id waits or runs, or this one has run before.
        """
        if request.id in self._ids:
            raise ConfigError(f"a request {request.id!r} waits or runs already; give each an id of its own")
        if request.finish or request.num_tokens != request.prompt_tokens:
            raise ConfigError(f"request {request.id!r} has run before; make a new one")
        if reason := self.refusal(request):
            raise RequestRefused(request.id, reason)
        self._enlist(request)
        self._queue(request)

    def fork(self, request: Request, twin: Request) -> None:
        """A second answer from where a request stands, sharing its blocks until one of the two writes.

        Args:
            request: one that runs.
            twin: has the same tokens and an id of its own.

        Raises:
            ConfigError: the request does not run, the id is taken, ``max_running`` is reached, or batches are static.
        """
        if self.policy is Policy.STATIC:
            raise ConfigError("a static batch takes nobody in once it runs, not even a fork; choose another policy")
        if request not in self.running or twin.id in self._ids or len(self.running) >= self.max_running:
            raise ConfigError(
                f"request {request.id!r} cannot be forked as {twin.id!r}: it must run, the new id must be free, and "
                f"of max_running {self.max_running} one place; {len(self.running)} run"
            )
        self.pool.hold(request.table)
        twin.table, twin.contents = list(request.table), list(request.contents)
        twin.num_tokens, twin.num_computed_tokens = request.num_tokens, request.num_computed_tokens
        self._enlist(twin)
        self.running.append(twin)

    def schedule(self) -> Plan:
        """Plan the next step. Blocks are taken for it; whoever lost theirs is back in the queue."""
        self._steps += 1
        plan = Plan()
        fill = {Policy.STATIC: self._static, Policy.CONTINUOUS: self._continuous, Policy.CHUNKED: self._chunked}
        fill[self.policy](plan)
        return plan

    def _static(self, plan: Plan) -> None:
        if self.running:
            self._decodes(plan)
            return
        while (request := self._next_in_line()) and request.remaining <= self._left(plan):
            if not self._admit(plan, request, reserve=True):
                return
            self._give(plan, request, request.remaining)

    def _continuous(self, plan: Plan) -> None:
        while (request := self._next_in_line()) and request.remaining <= self._left(plan):
            if not self._admit(plan, request):
                break
            self._give(plan, request, request.remaining)
        if not plan.tokens:
            self._decodes(plan)

    def _chunked(self, plan: Plan) -> None:
        self._decodes(plan)
        begun = sorted((request for request in self.running if request.remaining > 1), key=self._rank, reverse=True)
        while (left := self._left(plan)) and (request := self._next_prompt(plan, begun)):
            self._give(plan, request, min(request.remaining, left))

    def _next_prompt(self, plan: Plan, begun: list[Request]) -> Request | None:
        """The prompt that comes first, of those that are half read (the first one last) and those that wait."""
        while begun and begun[-1] in plan.preempted:
            begun.pop()
        first = self._next_in_line()
        overtakes = first is not None and (not begun or self._rank(first) < self._rank(begun[-1]))
        if first is not None and overtakes and not plan.preempted and self._admit(plan, first):
            return first
        return begun.pop() if begun else None

    def _decodes(self, plan: Plan) -> None:
        """A token, and its draft, for everybody who has only one left, in the order in which they joined."""
        for request in list(self.running):
            left = self._left(plan)
            if left == 0:
                return
            if request.remaining == 1 and request not in plan.preempted:
                request.draft = request.draft[: min(left, request.tokens_left) - 1]
                if request.draft and self._blocks_needed(request, 1 + len(request.draft)) > self.pool.n_free:
                    request.draft = ()  # a guess is not worth somebody's blocks
                self._give(plan, request, 1 + len(request.draft))

    def _give(self, plan: Plan, request: Request, tokens: int) -> None:
        """Let a request feed tokens; whoever joined last loses its blocks if there are not enough."""
        while (needed := self._blocks_needed(request, tokens)) > self.pool.n_free:
            if self._preempt_last(plan) is request:
                return
        if needed:
            plan.copies += self.pool.extend(request.table, request.num_computed_tokens, tokens)
        plan.give(request, tokens)

    def _blocks_needed(self, request: Request, tokens: int) -> int:
        return self.pool.blocks_needed(request.table, request.num_computed_tokens, tokens)

    def _preempt_last(self, plan: Plan) -> Request:
        """Take the blocks of whoever joined last; it computes its tokens again when there is room."""
        request = self.running.pop()
        plan.drop(request)
        plan.preempted.append(request)
        self._release(request)
        request.preemptions += 1
        self._queue(request)
        return request

    def _admit(self, plan: Plan, request: Request, reserve: bool = False) -> bool:
        """Let the first of those who wait join, if its tokens fit and leave everybody who runs a block to grow.

        Without that block somebody would be thrown out a few steps later, and read its prompt again for nothing.
        """
        if len(self.running) >= self.max_running:
            return False
        pool = self.pool
        blocks, contents = pool.match(self._keys(request)) if self.reuse_prefixes else ([], [])
        goal = request.longest if reserve else request.num_tokens
        needed = pool.blocks_for(goal) - len(blocks) + pool.free_among(blocks)
        if not reserve:
            needed += sum(1 + max(pool.blocks_for(r.num_tokens) - len(r.table), 0) for r in self.running)
        if needed > pool.n_free:
            return False
        heappop(self._waiting)
        pool.hold(blocks)
        request.table, request.contents = blocks, contents
        request.num_computed_tokens = found = len(blocks) * pool.block_size
        if reserve:
            pool.extend(request.table, found, request.longest - found)
        if request.brought > found and not request.preemptions:  # after a preemption it is computed here
            pool.extend(request.table, found, request.brought - found)
            request.num_computed_tokens = request.brought
        self.running.append(request)
        plan.admitted[request] = found
        if self.reuse_prefixes and not request.preemptions:
            self.prefix_queries, self.prefix_hits = self.prefix_queries + request.num_tokens, self.prefix_hits + found
        return True

    def _keys(self, request: Request) -> Iterator[Hashable]:
        """Contents of the full blocks that may be found. The last token is always computed: its logits are needed."""
        size = self.pool.block_size
        for index in range((request.num_tokens - 1) // size):
            key = request.block_key(index, size)
            if key is None:
                return
            yield key

    def repeat(self, plan: Plan, most: int) -> None:
        """Take a step several times, as long as nobody ends and the blocks suffice.

        What a simulator gains from it: between two events nothing has to be planned.

        Args:
            plan: of this step, repeatable; changed in place.
            most: times.
        """
        times = min(most, *(request.tokens_left for request in plan.tokens))
        while times > 1 and sum(self._blocks_needed(request, times) for request in plan.tokens) > self.pool.n_free:
            times //= 2
        if times > 1:
            for request in plan.tokens:
                plan.copies += self.pool.extend(request.table, request.num_computed_tokens, times)
            plan.repeats = times
            self._steps += times - 1

    def computed(self, request: Request, fed: int, emitted: int) -> None:
        """Book what a request did in a step; its full blocks become findable, and if it has ended, free.

        Args:
            request: that took part; tokens that it emitted are appended already.
            fed: tokens that it fed.
            emitted: tokens that it emitted. The newest one is never fed yet, and rejected drafts do not count.
        """
        request.num_computed_tokens = request.num_tokens - 1 if emitted else request.num_computed_tokens + fed
        request.draft = ()
        if self.reuse_prefixes:
            self._publish(request)
        if request.finish:
            self._leave(request)

    def _publish(self, request: Request) -> None:
        size, contents = self.pool.block_size, request.contents
        for index in range(len(contents), request.num_computed_tokens // size):
            key = request.block_key(index, size)
            if key is None:
                return
            contents.append(self.pool.publish(contents[-1] if contents else ROOT, request.table[index], key))

    def end(self, request: Request) -> None:
        """Take an unfinished request out, wherever it is; its blocks are free. Its ``finish`` is set by the caller.

        Args:
            request: that waits or runs.
        """
        if request in self.running:
            self._leave(request)
        else:
            self._waiting = [entry for entry in self._waiting if entry[2] is not request]
            heapify(self._waiting)
            del self._ids[request.id]

    def check(self) -> None:
        """Whether no block leaked: those of the running requests and the free ones are all there are.

        Raises:
            KvlabError: the books are wrong.
        """
        self.pool.check([request.table for request in self.running])

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        del self._ids[request.id]

    def _release(self, request: Request) -> None:
        self.pool.release(request.table)
        request.table, request.contents, request.num_computed_tokens, request.draft = [], [], 0, ()

    def _enlist(self, request: Request) -> None:
        self._ids[request.id] = request
        self._added += 1
        request.number, request.added_at = self._added, self._steps

    def _queue(self, request: Request) -> None:
        heappush(self._waiting, (*self._rank(request), request))

    def _next_in_line(self) -> Request | None:
        return self._waiting[0][2] if self._waiting else None

    def _rank(self, request: Request) -> tuple[float, int]:
        """Smaller comes first. Both would age alike, so the age at arrival is all that has to be compared."""
        if self.order is Order.FCFS:
            return (0.0, request.number)
        return (request.remaining + self.ageing * request.added_at, request.number)

    def _left(self, plan: Plan) -> int:
        return self.token_budget - plan.total
