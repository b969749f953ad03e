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
    weight_bytes,
)
from kvlab.errors import ConfigError, at_least
from kvlab.serving.engine import Engine, Listener
from kvlab.serving.executor import CostModelExecutor
from kvlab.serving.log import Summary
from kvlab.serving.plan import Order, Policy
from kvlab.serving.request import Request
from kvlab.serving.scheduler import Scheduler
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
        for _ in self.engine(*listeners).run(coming):
            pass

    def answer_tokens(self, arrival: Arrival) -> int:
        """Tokens of an answer, under the cap.

        Args:
            arrival: what is asked for.
        """
        return min(arrival.output_tokens, self.max_new_tokens or arrival.output_tokens)


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
