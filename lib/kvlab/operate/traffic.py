"""How many replicas a rate needs: the scheduler of the engine on a virtual clock, searched for the fewest that keep up.

Conversations are dealt out among replicas in turn, as :func:`kvlab.serving.simulate` does. Of a Poisson process every
n-th arrival makes gaps with a coefficient of variation of ``1 / sqrt(n)``, so that one replica stands for all of them,
however many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvlab.errors import ConfigError
from kvlab.operate.goal import Goal
from kvlab.operate.sizing import Instance
from kvlab.operate.vllm import BLOCK_SIZE
from kvlab.serving.disaggregated import simulate_disaggregated
from kvlab.serving.engine import Engine, Listener
from kvlab.serving.executor import CostModelExecutor, StepSeconds
from kvlab.serving.log import Lifetime, Summary
from kvlab.serving.request import Request
from kvlab.serving.simulate import Replica, SimulatedRequest, simulate
from kvlab.serving.workload import Lengths, Workload, arrivals
from kvlab.timing import VirtualClock, goodput

#: Requests of a simulation: enough that an overload shows, few enough that a search takes seconds.
_FEWEST, _MOST = 450, 2100

#: Replicas of two pools that are simulated, at most, and requests for each of them; a larger cluster is judged by a
#: smaller one of the same shape.
_POOLS, _PER_POOL_REPLICA = 6, 150


@dataclass(frozen=True, kw_only=True)
class Lane(Replica):
    """A replica whose steps take the time of several cards; of a pipeline, one of the batches that are under way.

    Args:
        times: how long its steps take.
    """

    times: StepSeconds

    def engine(self, *listeners: Listener) -> Engine:
        """An engine on a virtual clock that has served nobody yet.

        Args:
            listeners: are told what happens.
        """
        clock = VirtualClock()
        return replace(super().engine(*listeners), clock=clock, executor=CostModelExecutor(self.times, clock))


class Settled(Summary):
    """A summary of the requests that came after the first part of a run: it begins with empty machines.

    Args:
        since: seconds; who came before is served and not judged.
    """

    def __init__(self, since: float) -> None:
        super().__init__()
        self.since = since

    def ended(self, request: Request, life: Lifetime) -> None:
        """Keep its figures, if it is judged."""
        if life.sent >= self.since:
            super().ended(request, life)


@dataclass(frozen=True)
class Load:
    """What users see of so many replicas.

    Args:
        replicas: that share the load.
        rate: requests per second of each of them.
        kept: part of the judged requests that kept every promise.
        figures: as :meth:`kvlab.serving.Summary.report` gives them.
    """

    replicas: int
    rate: float
    kept: float
    figures: dict[str, Any]


def judged(replica: Instance, goal: Goal) -> Goal:
    """The goal with a promise about the first token: its own, or one that stands in.

    Without one every queue would do, however long it grows. So nobody waits longer for the first token than a request
    takes that is alone, or ten times its prefill where answers are short.

    Args:
        replica: that serves.
        goal: as it was asked.
    """
    if goal.ttft is not None:
        return goal
    return replace(goal, ttft=max(replica.e2e(goal), 10 * replica.ttft(goal)))


def lane(replica: Instance) -> Lane:
    """What is simulated of a replica: all of it, or one of the batches that a pipeline has under way.

    Args:
        replica: with a pool.
    """
    lanes, asked, pool = replica.pipeline_parallel, replica.deployment, replica.pool
    if pool is None or pool.blocks < lanes:
        raise ConfigError(f"the replica has no KV pool on {asked.card.title}; plan one that fits")
    return Lane(
        model=asked.config, hardware=asked.slowed, token_budget=replica.token_budget, blocks=pool.blocks // lanes,
        max_running=max(replica.max_num_seqs // lanes, 1), block_size=BLOCK_SIZE, reuse_prefixes=False,
        dtype=asked.dtype, weights=asked.weight_format, kv=asked.kv_format, times=replica.times,
    )  # fmt: skip


def load(replica: Instance, goal: Goal, replicas: int) -> Load:
    """Serve the goal's rate by so many replicas, and judge those who came once it was busy.

    Args:
        replica: each of them.
        goal: with lengths, rate and promises.
        replicas: how many share the rate.
    """
    lanes = replicas * replica.pipeline_parallel
    rate, lengths = goal.rate / lanes, (Lengths.fixed(goal.prompt_tokens), Lengths.fixed(goal.output_tokens))
    requests = min(max(round(9 * rate * replica.e2e(goal)), _FEWEST), _MOST)
    workload = Workload("planned", *lengths, gap_cv=lanes**-0.5)
    summary, serving = Settled(requests / rate / 3), lane(replica)
    coming = arrivals(workload, rate=rate, requests=requests)
    serving.serve(((each.time, SimulatedRequest.of(n, each)) for n, each in enumerate(coming)), summary)
    figures = summary.report(ttft=goal.ttft, tpot=goal.tpot)
    return Load(replicas, goal.rate / replicas, _kept(summary, goal), figures)


def _kept(summary: Summary, goal: Goal) -> float:
    """Part of the requests that kept the promises; who was refused kept none."""
    everybody = summary.finished.total() + summary.refused.total()
    return goodput(summary.served(), 1.0, ttft=goal.ttft, tpot=goal.tpot) / max(everybody, 1)


def fewest(
    replica: Instance, goal: Goal, most: int, tell: Callable[[str], None] = lambda _: None
) -> tuple[Load, Load | None]:
    """The load of the fewest replicas that keep the promises, and that of one less; else that of the most there can be.

    From a guess it goes up or down until it has numbers on both sides, and bisects between them.

    Args:
        replica: each of them.
        goal: with the promises that are judged by.
        most: replicas there can be.
        tell: called with how far it has come.
    """
    known: dict[int, Load] = {}

    def keeps(replicas: int) -> bool:
        if replicas not in known:
            tell(f"simulating {replicas} replicas in steps of {replica.token_budget} tokens")
            known[replicas] = load(replica, goal, replicas)
        return known[replicas].kept >= goal.attainment

    high, low, step = _guess(replica, goal, most), 0, 1
    while not keeps(high) and high < most:
        low, high = high, min(max(high + 1, high * 5 // 4), most)
    while keeps(high) and low == 0 and high > 1:
        lower = max(high - step, 1)
        low, high, step = (0, lower, 2 * step) if keeps(lower) else (lower, high, step)
    while keeps(high) and high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if keeps(middle) else (middle, high)
    return known[high], known.get(high - 1)


def _guess(replica: Instance, goal: Goal, most: int) -> int:
    """Replicas that would be busy for nine tenths of the time if arrivals were even."""
    rate = replica.fluid_rate(goal)
    return min(max(round(goal.rate / (0.9 * rate)), 1), most) if rate else most


def reachable_rate(replica: Instance, goal: Goal, replicas: int) -> float:
    """The highest rate at which so many replicas keep the promises, within 3 %.

    Args:
        replica: each of them.
        goal: with the promises that are judged by; at its own rate they are not kept.
        replicas: there are.
    """
    low, high = 0.0, goal.rate
    while high - low > 0.03 * high:
        rate = (low + high) / 2
        kept = load(replica, replace(goal, rate=rate), replicas).kept >= goal.attainment
        low, high = (rate, high) if kept else (low, rate)
        if high < goal.rate / 1000:
            return 0.0
    return low


@dataclass(frozen=True)
class Split:
    """Some replicas read prompts and others decode, against as many that do both.

    Args:
        prefill: replicas that read prompts.
        decode: replicas that decode.
        kept: part of the requests that kept every promise.
        together: that part where every replica does both.
        simulated: replicas that were simulated for it; of a large cluster a smaller one of the same shape.
    """

    prefill: int
    decode: int
    kept: float
    together: float
    simulated: int

    def pays(self, attainment: float) -> bool:
        """Whether the promises are kept that as many replicas would break that do both.

        Args:
            attainment: part of the requests that must keep them.
        """
        return self.kept >= attainment > self.together


def best_split(
    replica: Instance, goal: Goal, replicas: int, tell: Callable[[str], None] = lambda _: None
) -> Split | None:
    """The best of the splits around the one that gives both phases the same share of work.

    Args:
        replica: each of the replicas.
        goal: with the promises that are judged by.
        replicas: of both pools together.
        tell: called with how far it has come.

    Returns:
        None where there are fewer than two replicas, or a pipeline.
    """
    if replicas < 2 or replica.pipeline_parallel > 1:
        return None
    small, serving = min(replicas, _POOLS), lane(replica)
    workload = Workload("planned", Lengths.fixed(goal.prompt_tokens), Lengths.fixed(goal.output_tokens))
    coming: dict[str, Any] = {"rate": goal.rate * small / replicas, "requests": _PER_POOL_REPLICA * small}
    together = _kept(simulate(serving, workload, replicas=small, **coming), goal)
    found: list[Split] = []
    for prefill in _prefill_replicas(replica, goal, small):
        tell(f"simulating {prefill} replicas that read prompts and {small - prefill} that decode")
        summary = simulate_disaggregated(
            serving, serving, workload, prefill_replicas=prefill, decode_replicas=small - prefill,
            bytes_per_second=replica.deployment.network.bytes_per_second, **coming,
        )  # fmt: skip
        share = min(max(round(prefill * replicas / small), 1), replicas - 1)
        found.append(Split(share, replicas - share, _kept(summary, goal), together, small))
    return max(found, key=lambda split: split.kept)


def _prefill_replicas(replica: Instance, goal: Goal, replicas: int) -> list[int]:
    """Numbers of replicas that might read prompts: what gives both phases equal work, and one fewer and more."""
    busy = max(min(replica.batch_in_time(goal, replica.max_num_seqs), replica.batch_in_memory(goal)), 1)
    reading, decoding = replica.ttft(goal), goal.output_tokens * replica.tpot(goal, busy) / busy
    even = round(replicas * reading / (reading + decoding))
    return sorted({min(max(even + each, 1), replicas - 1) for each in (-1, 0, 1)})
