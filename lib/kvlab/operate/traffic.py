"""How many replicas a rate needs: the scheduler of the engine on a virtual clock, searched for the fewest that keep up.

Conversations are dealt out among replicas in turn, as :func:`kvlab.serving.simulate` does. Of a Poisson process every
n-th arrival makes gaps with a coefficient of variation of ``1 / sqrt(n)``, so that one replica stands for all of them,
however many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
_FEWEST, _MOST = 400, 1200

#: How much longer the run is that confirms a number of replicas.
_LONGER = 3

#: Replicas of two pools that are simulated, at most, and requests for each of them; a larger cluster is judged by a
#: smaller one of the same shape.
_POOLS, _PER_POOL_REPLICA = 6, 120


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
class Trial:
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


def load(replica: Instance, goal: Goal, replicas: int, length: int = 1) -> Trial:
    """Serve the goal's rate by so many replicas, and judge those who came once it was busy.

    Args:
        replica: each of them.
        goal: with lengths, rate and promises.
        replicas: how many share the rate.
        length: of the run, in multiples of what shows an overload that is not slight.
    """
    lanes = replicas * replica.pipeline_parallel
    rate, lengths = goal.rate / lanes, (Lengths.fixed(goal.prompt_tokens), Lengths.fixed(goal.output_tokens))
    requests = length * min(max(round(9 * rate * replica.e2e(goal)), _FEWEST), _MOST)
    workload = Workload("planned", *lengths, gap_cv=lanes**-0.5)
    summary, serving = Settled(requests / rate / 3), lane(replica)
    coming = arrivals(workload, rate=rate, requests=requests)
    serving.serve(((each.time, SimulatedRequest.of(n, each)) for n, each in enumerate(coming)), summary)
    figures = summary.report(ttft=goal.ttft, tpot=goal.tpot)
    return Trial(replicas, goal.rate / replicas, _kept(summary, goal), figures)


def _kept(summary: Summary, goal: Goal) -> float:
    """Part of the requests that kept the promises; who was refused kept none."""
    everybody = summary.finished.total() + summary.refused.total()
    return goodput(summary.served(), 1.0, ttft=goal.ttft, tpot=goal.tpot) / max(everybody, 1)


@dataclass
class Search:
    """Looks for the fewest replicas that keep the promises, and remembers what it has simulated.

    Args:
        replica: each of them.
        goal: with the promises that are judged by.
        most: replicas there can be.
        tell: called with how far it has come.
        known: what was simulated already, by the number of replicas.
    """

    replica: Instance
    goal: Goal
    most: int
    tell: Callable[[str], None] = lambda _: None
    known: dict[int, Trial] = field(default_factory=dict)

    def keeps(self, replicas: int) -> bool:
        """Whether so many replicas keep the promises.

        Args:
            replicas: that share the rate.
        """
        if replicas not in self.known:
            self.tell(f"simulating {replicas} replicas in steps of {self.replica.token_budget} tokens")
            self.known[replicas] = load(self.replica, self.goal, replicas)
        return self.known[replicas].kept >= self.goal.attainment

    def fewest(self, guess: int) -> int | None:
        """The fewest replicas that keep the promises; None where the most there can be do not.

        From a guess it goes up or down until it has numbers on both sides, and bisects between them.

        Args:
            guess: where to begin.
        """
        high, low, step = min(max(guess, 1), self.most), 0, 1
        while not self.keeps(high):
            if high == self.most:
                return None
            low, high = high, min(max(high + 1, high * 5 // 4), self.most)
        while low == 0 and high > 1:
            lower = max(high - step, 1)
            low, high, step = (0, lower, 2 * step) if self.keeps(lower) else (lower, high, step)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.keeps(middle) else (middle, high)
        return high

    def confirm(self, replicas: int) -> Trial:
        """The load of so many replicas in a longer run, or of the first number above that keeps the promises in one.

        Where work comes a little faster than it is done, a queue grows slowly, and a short run does not show it.

        Args:
            replicas: that keep the promises in a short run.
        """
        while True:
            self.tell(f"a longer run of {replicas} replicas")
            self.known[replicas] = load(self.replica, self.goal, replicas, _LONGER)
            if self.keeps(replicas) or replicas == self.most:
                return self.known[replicas]
            replicas += 1


def even_replicas(replica: Instance, goal: Goal) -> int:
    """Replicas that would be busy for nine tenths of the time if arrivals were even: where a search begins.

    Args:
        replica: each of them.
        goal: with the rate.
    """
    rate = replica.fluid_rate(goal)
    return max(round(goal.rate / (0.9 * rate)), 1) if rate else 10**6


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
        kept = load(replica, replace(goal, rate=rate), replicas, _LONGER).kept >= goal.attainment
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
        together: that part where every replica does both, in the same run.
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
    small = min(replicas, _POOLS)
    pools = Pools(replica, replace(goal, rate=goal.rate * small / replicas), small)
    kept: dict[int, float] = {}
    for prefill in _prefill_replicas(replica, goal, small):
        tell(f"simulating {prefill} replicas that read prompts and {small - prefill} that decode")
        kept[prefill] = pools.apart(prefill, 1)
    best = max(kept, key=kept.__getitem__)
    length = _LONGER if kept[best] >= goal.attainment else 1
    apart = pools.apart(best, length) if length > 1 else kept[best]
    share = min(max(round(best * replicas / small), 1), replicas - 1)
    return Split(share, replicas - share, apart, pools.together(length), small)


@dataclass(frozen=True)
class Pools:
    """The same replicas, either in two pools or each doing both.

    Args:
        replica: each of them.
        goal: with the rate of all of them, and the promises that are judged by.
        replicas: how many.
    """

    replica: Instance
    goal: Goal
    replicas: int

    def together(self, length: int) -> float:
        """Part of the requests that keep the promises where every replica does both.

        Args:
            length: of the run.
        """
        done = simulate(lane(self.replica), self._workload, replicas=self.replicas, **self._coming(length))
        return _kept(done, self.goal)

    def apart(self, prefill: int, length: int) -> float:
        """That part where some read prompts and the others decode.

        Args:
            prefill: replicas that read prompts.
            length: of the run.
        """
        serving, link = lane(self.replica), self.replica.deployment.network.bytes_per_second
        done = simulate_disaggregated(
            serving, serving, self._workload, prefill_replicas=prefill, decode_replicas=self.replicas - prefill,
            bytes_per_second=link, **self._coming(length),
        )  # fmt: skip
        return _kept(done, self.goal)

    @property
    def _workload(self) -> Workload:
        return Workload("planned", Lengths.fixed(self.goal.prompt_tokens), Lengths.fixed(self.goal.output_tokens))

    def _coming(self, length: int) -> dict[str, Any]:
        return {"rate": self.goal.rate, "requests": _PER_POOL_REPLICA * self.replicas * length}


def _prefill_replicas(replica: Instance, goal: Goal, replicas: int) -> list[int]:
    """Numbers of replicas that might read prompts: what gives both phases equal work, and one fewer and more."""
    busy = max(min(replica.batch_in_time(goal, replica.max_num_seqs), replica.batch_in_memory(goal)), 1)
    reading, decoding = replica.ttft(goal), goal.output_tokens * replica.tpot(goal, busy) / busy
    even = round(replicas * reading / (reading + decoding))
    return sorted({min(max(even + each, 1), replicas - 1) for each in (-1, 0, 1)})
