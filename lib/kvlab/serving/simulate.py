"""A cluster on a virtual clock: the scheduler of the engine, the cost model instead of a model, any number of replicas.

Replicas share nothing: conversations are dealt out among them in turn, and each is simulated by itself. So time grows
with the number of steps, and within a step with the number of requests that run; the number of replicas adds nothing.
Steps that are alike are taken in one, so that a replica with little to do costs little.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing import active_children, get_context

from kvlab.cache import BlockPool
from kvlab.config import Shape, shape_of
from kvlab.cost import (
    GB,
    Device,
    Format,
    Pool,
    StepTimes,
    activation_bytes,
    format_of,
    hardware_of,
    kv_bytes,
    pool_bytes,
    prefill_pass,
    transfer_seconds,
    weight_bytes,
)
from kvlab.errors import ConfigError, at_least
from kvlab.serving.engine import Engine, Event, Listener, StepRecord
from kvlab.serving.executor import CostModelExecutor
from kvlab.serving.log import Lifetime, Summary
from kvlab.serving.request import Request
from kvlab.serving.scheduler import Order, Policy, Scheduler
from kvlab.serving.workload import Arrival, Workload, arrivals
from kvlab.timing import VirtualClock

#: Requests from which other processes are worth their start.
_MANY = 20_000

#: Requests between two lines about progress.
_OFTEN = 1_000

#: Part of the memory that weights, activations and cache may take: ``gpu_memory_utilization`` of vLLM.
_CLAIMED = 0.9


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
        left = self.tokens_left
        taken = min(len(tokens), left)
        self.num_tokens += taken
        if taken == left:
            self.finish = "length" if self.output_tokens == self.max_new_tokens else "stop"
        return taken


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One instance of a model, and how it is run.

    Args:
        model: a preset name, a Hub config, or a shape.
        hardware: a slug or a device.
        policy: how a step is filled.
        token_budget: tokens of a step, at most; None for 2,048, or where prompts are read whole the model's context.
        max_running: requests that run at once, at most.
        blocks: of the KV pool; None for what fits beside weights and activations into nine tenths of the memory.
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
    token_budget: int | None = None
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
        at_least(1, "block_size", self.block_size)
        if self.max_new_tokens is not None:
            at_least(1, "max_new_tokens", self.max_new_tokens)
        self.engine()  # which checks everything else

    @property
    def budget(self) -> int:
        """Tokens of a step, at most."""
        if self.token_budget is not None:
            return at_least(1, "token_budget", self.token_budget)
        return 2048 if self.policy == Policy.CHUNKED else shape_of(self.model).max_seq_len

    @property
    def n_blocks(self) -> int:
        """Blocks of the pool."""
        if self.blocks is not None:
            return at_least(1, "blocks", self.blocks)
        config, device, kv = shape_of(self.model), hardware_of(self.hardware), self.kv or self.dtype
        step = activation_bytes(config, prefill_pass(min(self.budget, config.max_seq_len)), self.dtype)
        form = format_of(self.weights or self.dtype)
        weights = weight_bytes(config, form)
        room = pool_bytes(device.memory_bytes, _CLAIMED, weights, step)
        if room < kv_bytes(config, self.block_size, kv, honour_windows=False):
            raise ConfigError(
                f"{config.name} does not fit {device.title}: weights of {form.bytes_per_element:.3g} bytes an element "
                f"take {weights / GB:.1f} GB, the activations of a step of {self.budget} tokens {step / GB:.1f} GB, "
                f"and {_CLAIMED * device.memory_bytes / GB:.1f} GB may be used; choose narrower weights, a smaller "
                "model or budget, or more memory"
            )
        return Pool.of(config, room, kv, block_size=self.block_size).blocks

    def engine(self, *listeners: Listener) -> Engine:
        """An engine on a virtual clock that has served nobody yet.

        Args:
            listeners: are told what happens.
        """
        clock = VirtualClock()
        scheduler = Scheduler(
            BlockPool(self.n_blocks, self.block_size),
            policy=self.policy,
            token_budget=self.budget,
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
        engine = self.engine()
        door = _FrontDoor(engine.scheduler, listeners)
        engine.listeners = (door,)
        for _ in engine.run(door.let_in(coming)):
            pass

    def answer_tokens(self, arrival: Arrival) -> int:
        """Tokens of an answer, under the cap.

        Args:
            arrival: what is asked for.
        """
        return min(arrival.output_tokens, self.max_new_tokens or arrival.output_tokens)


class _FrontDoor:
    """Tells listeners when a request came, and why it was refused.

    The engine hears of a request between two steps. It may have come in the middle of one, and its user waits from
    then on.

    Args:
        scheduler: of the engine.
        listeners: are told.
    """

    def __init__(self, scheduler: Scheduler, listeners: Sequence[Listener]) -> None:
        self._scheduler, self._listeners = scheduler, listeners
        self._came: dict[Request, float] = {}

    def let_in(self, coming: Iterable[tuple[float, Request]]) -> Iterator[tuple[float, Request]]:
        for time, request in coming:
            self._came[request] = time
            yield time, request

    def event(self, event: Event) -> None:
        if event.kind == "refused":
            event.request.error = self._scheduler.refusal(event.request) or ""
        if event.request in self._came and event.kind in ("queued", "refused"):
            event = Event(event.kind, self._came.pop(event.request), event.request)
        for listener in self._listeners:
            listener.event(event)

    def step(self, record: StepRecord) -> None:
        for listener in self._listeners:
            listener.step(record)


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

    Many requests for several replicas are spread over as many processes as there are CPU cores. A script that does so
    keeps its own work under ``if __name__ == "__main__"``, because each process imports it.

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
    dealt: list[list[Arrival]] = [[] for _ in range(at_least(1, "replicas", replicas))]
    for arrival in arrivals(workload, rate=rate, requests=at_least(1, "requests", requests), seed=seed):
        dealt[arrival.session % replicas].append(arrival)
    processes = min(os.cpu_count() or 1, replicas) if requests >= _MANY else 1
    total, serve = Summary(), partial(_serve_share, replica)
    shares = (dealt.pop(0) for _ in range(replicas))
    with _spread(processes) as spread:
        mine = (_heard(share, tell) for share in shares) if processes == 1 else shares
        for done, summary in enumerate(spread(serve, mine), start=1):
            total.merge(summary)
            tell(f"{done} of {replicas} replicas")
    return total


def _serve_share(replica: Replica, share: Iterable[Arrival]) -> Summary:
    """What one replica did."""
    summary, cap = Summary(), replica.max_new_tokens
    replica.serve(((each.time, SimulatedRequest.of(n, each, cap)) for n, each in enumerate(share)), summary)
    return summary


def _heard(share: Sequence[Arrival], tell: Callable[[str], None]) -> Iterator[Arrival]:
    for number, arrival in enumerate(share):
        if number and number % _OFTEN == 0:
            tell(f"{number:,} of {len(share):,} requests of a replica")
        yield arrival


Spread = Callable[[Callable[..., Summary], Iterable], Iterable[Summary]]


@contextmanager
def _spread(processes: int) -> Iterator[Spread]:
    """``map``, or that of so many processes. Ctrl-C and errors end them at once, and only this process speaks of it."""
    if processes == 1:
        yield map
        return
    others = set(active_children())
    pool = ProcessPoolExecutor(
        processes,
        mp_context=get_context("spawn"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),
    )
    try:
        yield pool.map
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown()


class Handover(Summary):
    """What a prefill replica did, and when the cache of each request that goes on has arrived at the decode pool.

    Caches leave one after another, over one link of the replica, once the first token is there. A request whose answer
    is that one token ends here.

    Args:
        seconds_to_move: how long the cache of a prompt of so many tokens takes.
        goes_on: whether an answer has more tokens.
    """

    def __init__(self, seconds_to_move: Callable[[int], float], goes_on: Callable[[Arrival], bool]) -> None:
        super().__init__()
        self._seconds_to_move, self._goes_on, self._free_at = seconds_to_move, goes_on, 0.0
        #: When each cache has arrived, whose it is, and the request's times so far.
        self.arrived: list[tuple[float, SimulatedRequest, Lifetime]] = []

    def ended(self, request: Request, life: Lifetime) -> None:
        """Send it on, or keep its figures."""
        assert isinstance(request, SimulatedRequest)
        if not self._goes_on(request.arrival):
            super().ended(request, life)
            return
        self._free_at = max(self._free_at, life.last) + self._seconds_to_move(request.prompt_tokens)
        self.arrived.append((self._free_at, request, life))


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
    tell: Callable[[str], None] = lambda _: None,
) -> Summary:
    """Serve a workload by two pools: one reads prompts, the other decodes, and caches move between them.

    DistServe (arXiv:2401.09670) and Splitwise (arXiv:2311.18677): neither phase disturbs the other, at the price of
    moving every cache, and of machines that can do only one of the two. A request gets its first token from the prefill
    pool; its second one waits for the move and for room in the decode pool, and that wait is its first ITL. What the
    decode pool could never hold is refused before it is read.

    Args:
        prefill: each replica of the first pool.
        decode: each replica of the second. Its ``max_new_tokens`` is the cap of the answers.
        workload: what is asked for.
        rate: requests per second.
        requests: how many are sent.
        prefill_replicas: of the first pool.
        decode_replicas: of the second.
        bytes_per_second: of the link of each prefill replica.
        seed: of everything that is drawn.
        tell: called with how far it has come.

    Returns:
        What users saw. Steps are those of both pools together, and so are the means of what was held and who ran.

    Raises:
        ConfigError: a number is impossible.
    """
    move = partial(_move_seconds, prefill, bytes_per_second)
    move(1)  # which checks the link
    at_least(1, "decode_replicas", decode_replicas)
    total, door = Summary(), decode.engine().scheduler
    dealt: list[list[tuple[float, Request]]] = [[] for _ in range(at_least(1, "prefill_replicas", prefill_replicas))]
    numbers = count()
    for arrival in arrivals(workload, rate=rate, requests=at_least(1, "requests", requests), seed=seed):
        if decode.answer_tokens(arrival) > 1 and (reason := door.refusal(_moved(decode, 0, arrival))):
            total.refuse(reason)
        else:
            request = SimulatedRequest.of(next(numbers), arrival, 1)
            dealt[arrival.session % prefill_replicas].append((arrival.time, request))
    arrived = list[tuple[float, SimulatedRequest, Lifetime]]()
    for done, coming in enumerate(dealt, start=1):
        handover = Handover(move, lambda arrival: decode.answer_tokens(arrival) > 1)
        prefill.serve(coming, handover)
        arrived += handover.arrived
        total.merge(handover)
        tell(f"{done} of {prefill_replicas} prefill replicas")
    arrived.sort(key=lambda each: each[0])
    for index in range(decode_replicas):
        total.merge(_decode_share(decode, arrived[index::decode_replicas]))
        tell(f"{index + 1} of {decode_replicas} decode replicas")
    return total


def _move_seconds(prefill: Replica, bytes_per_second: float, tokens: int) -> float:
    return transfer_seconds(prefill.model, tokens, bytes_per_second, prefill.kv or prefill.dtype)


def _moved(decode: Replica, id: Hashable, arrival: Arrival) -> SimulatedRequest:
    """A request as the decode pool sees it: its first token is known, and the cache of all before it comes along."""
    left = decode.answer_tokens(arrival) - 1
    cap = (decode.max_new_tokens or arrival.output_tokens) - 1
    request = SimulatedRequest(id, arrival.prompt_tokens + 1, cap, arrival=arrival, output_tokens=left)
    request.brought = arrival.prompt_tokens
    return request


def _decode_share(decode: Replica, arrived: Sequence[tuple[float, SimulatedRequest, Lifetime]]) -> Summary:
    """What one decode replica did, with the caches that arrived there in order."""
    summary, coming = Summary(), list[tuple[float, Request]]()
    for time, request, life in arrived:
        moved = _moved(decode, request.id, request.arrival)
        summary.expect(moved, life)
        coming.append((time, moved))
    decode.serve(coming, summary)
    return summary
