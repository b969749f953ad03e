"""A cluster on a virtual clock: the scheduler of the engine, the cost model instead of a model, any number of replicas.

Replicas share nothing: conversations are dealt out among them in turn, and each is simulated by itself. So time grows
with the number of steps, and within a step with the number of requests that run; the number of replicas adds nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from kvlab.cache import BlockPool
from kvlab.config import Shape, shape_of
from kvlab.cost import (
    Device,
    Format,
    Pool,
    StepTimes,
    activation_bytes,
    hardware_of,
    pool_bytes,
    prefill_pass,
    transfer_seconds,
    weight_bytes,
)
from kvlab.errors import ConfigError, at_least
from kvlab.serving.engine import Engine, Event, Listener, StepRecord
from kvlab.serving.executor import CostModelExecutor
from kvlab.serving.log import Summary
from kvlab.serving.request import Request
from kvlab.serving.scheduler import Order, Policy, Scheduler
from kvlab.serving.workload import Arrival, Workload, arrivals
from kvlab.timing import VirtualClock

#: Requests from which other processes are worth their start.
_MANY = 20_000


@dataclass(eq=False, slots=True, kw_only=True)
class SimulatedRequest(Request):
    """A request without text, whose answer ends where its workload says.

    Args:
        arrival: what is asked for.
        output_tokens: of the answer; the model "decides" to stop there.
    """

    arrival: Arrival
    output_tokens: int

    @classmethod
    def of(cls, id: Hashable, arrival: Arrival, max_new_tokens: int | None = None) -> SimulatedRequest:
        """A request from a workload.

        Args:
            id: of the request.
            arrival: what is asked for.
            max_new_tokens: a cap on the answer; by default the user knows how long it will be.
        """
        cap = arrival.output_tokens if max_new_tokens is None else max_new_tokens
        return cls(id, arrival.prompt_tokens, cap, arrival=arrival, output_tokens=min(arrival.output_tokens, cap))

    @property
    def tokens_left(self) -> int:
        """Tokens of the answer that are still to come."""
        return self.output_tokens + self.prompt_tokens - self.num_tokens

    def block_key(self, index: int, block_size: int) -> Hashable:
        """What the workload says about it."""
        return self.arrival.block_key(index, block_size)

    def append(self, tokens: Sequence[int]) -> int:
        """Take tokens of the answer, up to its end: its own, or the cap."""
        taken = Request.append(self, tokens)
        if self.finish and self.new_tokens < self.max_new_tokens:
            self.finish = "stop"
        return taken


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One instance of a model, and how it is run.

    Args:
        model: a preset name, a Hub config, or a shape.
        hardware: a slug or a device.
        policy: how a step is filled.
        token_budget: tokens of a step, at most.
        max_running: requests that run at once, at most.
        blocks: of the KV pool; None for what fits beside the weights into nine tenths of the memory.
        block_size: tokens of a block.
        order: who of those who wait comes first.
        ageing: see :class:`Scheduler`.
        max_waiting: requests that may wait; more are refused.
        reuse_prefixes: whether blocks that begin alike are computed once.
        dtype: of the arithmetic.
        weights: format of the weights; by default ``dtype``.
        kv: format of the cache; by default ``dtype``.
        max_new_tokens: a cap that every request carries; None where users know how long an answer will be.

    Raises:
        ConfigError: a name is unknown, a number is impossible, or the weights leave no room for a cache.
    """

    model: Shape
    hardware: Device
    policy: Policy | str = Policy.CHUNKED
    token_budget: int = 2048
    max_running: int = 256
    blocks: int | None = None
    block_size: int = 16
    order: Order | str = Order.FCFS
    ageing: float = 8.0
    max_waiting: int | None = None
    reuse_prefixes: bool = True
    dtype: str = "bfloat16"
    weights: str | Format | None = None
    kv: str | Format | None = None
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        self.engine()  # which checks everything

    @property
    def n_blocks(self) -> int:
        """Blocks of the pool."""
        if self.blocks is not None:
            return at_least(1, "blocks", self.blocks)
        config, memory = shape_of(self.model), hardware_of(self.hardware).memory_bytes
        step = activation_bytes(config, prefill_pass(min(self.token_budget, config.max_seq_len)), self.dtype)
        room = pool_bytes(memory, 0.9, weight_bytes(config, self.weights or self.dtype), step)
        return Pool.of(config, room, self.kv or self.dtype, block_size=self.block_size).blocks

    def engine(self, *listeners: Listener) -> Engine:
        """An engine on a virtual clock that has served nobody yet.

        Args:
            listeners: are told what happens.
        """
        clock = VirtualClock()
        scheduler = Scheduler(
            BlockPool(self.n_blocks, self.block_size),
            policy=self.policy,
            token_budget=self.token_budget,
            max_running=self.max_running,
            max_len=shape_of(self.model).max_seq_len,
            order=self.order,
            ageing=self.ageing,
            max_waiting=self.max_waiting,
            reuse_prefixes=self.reuse_prefixes,
        )
        times = StepTimes(self.model, self.hardware, self.dtype, weights=self.weights, kv=self.kv)
        return Engine(scheduler, CostModelExecutor(times, clock), clock, listeners)

    def serve(self, coming: Iterable[tuple[float, Request]], *listeners: Listener) -> None:
        """Serve requests to the end.

        Args:
            coming: times and requests, in order.
            listeners: are told what happens.
        """
        for _ in self.engine(*listeners).run(coming):
            pass


def simulate(
    replica: Replica,
    workload: Workload,
    *,
    rate: float,
    requests: int,
    replicas: int = 1,
    seed: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> Summary:
    """Serve a workload by equal replicas and summarise what users saw.

    Args:
        replica: each of them.
        workload: what is asked for.
        rate: requests per second, of all replicas together.
        requests: how many are sent.
        replicas: how many serve them.
        seed: of everything that is drawn.
        tell: called with how far it has come.

    Raises:
        ConfigError: a number is impossible.
    """
    at_least(1, "requests", requests)
    work = partial(_serve_shares, replica, workload, rate, requests, seed, at_least(1, "replicas", replicas))
    processes = min(os.cpu_count() or 1, replicas) if requests >= _MANY else 1
    total = Summary()
    if processes == 1:
        for done, summary in enumerate(work(range(replicas)), start=1):
            total.merge(summary)
            tell(f"{done} of {replicas} replicas")
        return total
    # Each process takes every n-th replica: it makes all arrivals itself and keeps its own.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        shares = [pool.submit(_all_of, work, range(first, replicas, processes)) for first in range(processes)]
        for done, share in enumerate(as_completed(shares), start=1):
            total.merge(share.result())
            tell(f"{done} of {processes} processes, {replicas} replicas among them")
    return total


def _all_of(work: Callable[[Sequence[int]], Iterator[Summary]], share: Sequence[int]) -> Summary:
    total = Summary()
    for summary in work(share):
        total.merge(summary)
    return total


def _serve_shares(
    replica: Replica,
    workload: Workload,
    rate: float,
    requests: int,
    seed: int,
    replicas: int,
    share: Sequence[int],
) -> Iterator[Summary]:
    """What each of some replicas did."""
    dealt: dict[int, list[tuple[int, Arrival]]] = {index: [] for index in share}
    for number, arrival in enumerate(arrivals(workload, rate=rate, requests=requests, seed=seed)):
        if (mine := dealt.get(arrival.session % replicas)) is not None:
            mine.append((number, arrival))
    for index in share:
        summary = Summary()
        coming = dealt.pop(index)
        cap = replica.max_new_tokens
        replica.serve(((each.time, SimulatedRequest.of(number, each, cap)) for number, each in coming), summary)
        yield summary


class Handover:
    """Notes when each request of a prefill replica is ready to be moved to a decode replica.

    The caches leave one after another, over one link of the replica.

    Args:
        seconds_to_move: how long the cache of a prompt of so many tokens takes.
    """

    def __init__(self, seconds_to_move: Callable[[int], float]) -> None:
        self._seconds_to_move, self._free_at = seconds_to_move, 0.0
        #: For each request the time of its first token, and the time at which its cache has arrived.
        self.ready: dict[Request, tuple[float, float]] = {}

    def event(self, event: Event) -> None:
        """A request that has its first token is sent on."""
        if event.kind == "finished":
            self._free_at = max(self._free_at, event.time) + self._seconds_to_move(event.request.prompt_tokens)
            self.ready[event.request] = (event.time, self._free_at)

    def step(self, record: StepRecord) -> None:
        """Nothing to note."""


def simulate_disaggregated(
    prefill: Replica,
    decode: Replica,
    workload: Workload,
    *,
    rate: float,
    requests: int,
    prefill_replicas: int = 1,
    decode_replicas: int = 1,
    bytes_per_second: float,
    seed: int = 0,
) -> Summary:
    """Serve a workload by two pools: one reads prompts, the other decodes, and caches move between them.

    DistServe (arXiv:2401.09670) and Splitwise (arXiv:2311.18677): neither phase disturbs the other, at the price of
    moving every cache, and of machines that can do only one of the two. A request gets its first token from the prefill
    pool; its second one waits for the move and for room in the decode pool.

    Args:
        prefill: each replica of the first pool.
        decode: each replica of the second.
        workload: what is asked for.
        rate: requests per second.
        requests: how many are sent.
        prefill_replicas: of the first pool.
        decode_replicas: of the second.
        bytes_per_second: of the link of each prefill replica.
        seed: of everything that is drawn.

    Raises:
        ConfigError: a number is impossible.
    """
    at_least(1, "requests", requests)
    if not bytes_per_second > 0:
        raise ConfigError(f"bytes_per_second is {bytes_per_second}; a link moves more than 0")
    read, total = list[tuple[SimulatedRequest, float, float]](), Summary()
    coming = list(arrivals(workload, rate=rate, requests=requests, seed=seed))
    for index in range(at_least(1, "prefill_replicas", prefill_replicas)):
        handover = Handover(
            lambda tokens: transfer_seconds(prefill.model, tokens, bytes_per_second, prefill.kv or prefill.dtype)
        )
        mine = [(n, each) for n, each in enumerate(coming) if each.session % prefill_replicas == index]
        prefill.serve(((each.time, SimulatedRequest.of(n, each, 1)) for n, each in mine), handover)
        read += ((request, *times) for request, times in handover.ready.items())  # type: ignore[misc]
    read.sort(key=lambda each: each[2])
    for index in range(at_least(1, "decode_replicas", decode_replicas)):
        total.merge(_decode_share(decode, read[index::decode_replicas]))
    return total


def _decode_share(decode: Replica, read: Sequence[tuple[SimulatedRequest, float, float]]) -> Summary:
    summary, coming = Summary(), list[tuple[float, Request]]()
    for request, first, arrived in read:
        arrival = request.arrival
        if arrival.output_tokens == 1:
            summary.served_elsewhere(request, arrival.time, first)
            continue
        # The first token is part of what is known; the cache holds everything before it.
        cap = (decode.max_new_tokens or arrival.output_tokens) - 1
        moved = SimulatedRequest(
            request.id,
            arrival.prompt_tokens + 1,
            cap,
            arrival=arrival,
            output_tokens=min(arrival.output_tokens - 1, cap),
        )
        moved.brought = arrival.prompt_tokens
        summary.expect(moved, arrival.time, first)
        coming.append((arrived, moved))
    decode.serve(coming, summary)
    return summary
