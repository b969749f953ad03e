"""From a promise to a plan: what fits, how fast it is at best, how many replicas a rate needs, and with which flags.

Nothing here is a cost rule or a scheduler of its own: bytes and seconds are those of :mod:`kvlab.cost`, load is that of
:mod:`kvlab.serving` on a virtual clock. With the peaks of a data sheet all times are limits, and so are the replicas:
a real server needs at least as many. An efficiency makes them an estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

from kvlab.config import preset_names, preset_source
from kvlab.cost import GB, format_of
from kvlab.errors import ConfigError
from kvlab.operate.deploy import EMITTERS, Server
from kvlab.operate.goal import Deployment, Goal
from kvlab.operate.sizing import Instance, fitting, instance, layouts, shortfall
from kvlab.operate.traffic import Search, Split, Trial, best_split, even_replicas, judged, reachable_rate
from kvlab.operate.vllm import Flag, default_max_num_seqs, kv_cache_dtype, quantization, serves

#: Token budgets that are tried below the default where a TPOT was promised: what a step reads of prompts delays tokens.
_BUDGETS = (2048, 512)


@dataclass(frozen=True)
class Remedy:
    """A change that was tried, and does what is needed.

    Args:
        change: what to do, as an option of ``kvlab plan``.
        result: what comes of it.
    """

    change: str
    result: str


@dataclass(frozen=True, kw_only=True)
class CapacityPlan:
    """What came out. See :meth:`report` for all of it.

    Args:
        deployment: what was asked for.
        goal: what was asked for.
        replica: one copy of the model; None where nothing fits.
        load: what users see at the planned rate; None where the promises cannot be kept by any number of replicas.
        one_less: what they would see of one replica less.
        split: the best split into prefill and decode replicas, of one replica less.
        problems: why it does not fit, or which promise cannot be kept, a line each.
        remedies: changes that would help, the mildest first.
        reachable_rate: requests per second that the cards there are can serve; None where they suffice.
    """

    deployment: Deployment
    goal: Goal
    replica: Instance | None = None
    load: Trial | None = None
    one_less: Trial | None = None
    split: Split | None = None
    problems: tuple[str, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    reachable_rate: float | None = None

    @property
    def fits(self) -> bool:
        """Whether the model and one request fit the cards."""
        return self.replica is not None

    @property
    def reaches(self) -> bool:
        """Whether the promises are kept at the rate."""
        return self.load is not None and self.load.kept >= self.goal.attainment

    @property
    def cards(self) -> int:
        """Of all replicas; 0 where there is no plan."""
        return self.load.replicas * self.replica.cards if self.load and self.replica else 0

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request that the server takes: the power of two above the goal's, where it fits.

        Raises:
            ConfigError: nothing fits.
        """
        if self.deployment.max_model_len is not None:
            return self.deployment.max_model_len
        rounded = min(1 << (self.goal.tokens - 1).bit_length(), self.deployment.config.max_seq_len)
        return rounded if self._fitting.holds(rounded) else self.goal.tokens

    @property
    def pays_to_split(self) -> bool:
        """Whether replicas that only read prompts and others that only decode save a replica."""
        return self.split is not None and self.split.pays(self.goal.attainment)

    @property
    def cost_per_million_output_tokens(self) -> float | None:
        """Price of all cards, over the tokens that the goal's rate makes; None without a price or a plan."""
        if self.deployment.price_per_hour is None or not self.reaches:
            return None
        per_second = self.cards * self.deployment.price_per_hour / 3600
        return per_second / (self.goal.rate * self.goal.output_tokens) * 1e6

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        if self.replica is None:
            return f"It does not fit: {self.problems[0]}."
        if self.load is None:
            return f"It fits, but no number of replicas keeps the promises: {'; '.join(self.problems)}."
        cards = _count(self.cards, "card")
        shape = f"{_count(self.load.replicas, 'replica')} of {_count(self.replica.cards, 'card')}"
        if self.reaches:
            verb = "serves" if self.cards == 1 else "serve"
            return f"{cards} ({shape}) {verb} {self.goal.rate:g} requests/s; {self.load.kept:.1%} keep the promises."
        return (
            f"It fits, but the rate needs more than {cards} ({shape}): within the promises they serve "
            f"{self.reachable_rate or 0:.3g} of {self.goal.rate:g} requests/s."
        )

    def report(self) -> dict[str, Any]:
        """All of it as plain data: bytes, seconds, tokens and requests."""
        asked, goal = self.deployment, self.goal
        return {
            "kind": "kvlab-plan",
            "version": 1,
            "settings": {
                "model": asked.config.name, "hardware": asked.card.name, "gpus": asked.gpus,
                "gpus_per_node": asked.gpus_per_node, "dtype": asked.dtype, "weights": asked.weight_format,
                "kv": asked.kv_format, "utilization": asked.utilization, "efficiency": asked.efficiency,
                **asdict(goal),
            },
            "verdict": self.verdict,
            "fits": self.fits,
            "reaches": self.reaches,
            "problems": list(self.problems),
            "remedies": [asdict(remedy) for remedy in self.remedies],
            "replica": self._replica_report() if self.replica else None,
            "planned": self._load_report(self.load) if self.load else None,
            "one_less": self._load_report(self.one_less) if self.one_less else None,
            "disaggregated": asdict(self.split) | {"pays": self.pays_to_split} if self.split else None,
            "reachable_rate": self.reachable_rate,
            "cost_per_million_output_tokens": self.cost_per_million_output_tokens,
            "flags": [asdict(flag) for flag in self.flags()] if self.replica else [],
            "notes": list(self.notes()),
        }  # fmt: skip

    def flags(self) -> list[Flag]:
        """The flags of ``vllm serve`` for one server, each with its reason.

        Raises:
            ConfigError: nothing fits.
        """
        return self._server().flags

    def emit(self, form: str) -> str:
        """Something to start it with.

        Args:
            form: ``vllm`` for commands, ``ray`` for a Ray Serve LLM application, ``k8s`` for Kubernetes.

        Raises:
            ConfigError: there is no such form, nothing fits, the promises cannot be kept, or the form cannot have it.
        """
        if form not in EMITTERS:
            raise ConfigError(f"no form is called {form!r}; choose {', '.join(EMITTERS)}")
        if self.load is None:
            raise ConfigError(f"there is nothing to start: {'; '.join(self.problems)}")
        if not serves(self.deployment.card):
            raise ConfigError(f"vllm serve has no build for {self.deployment.card.title} with these flags; name a GPU")
        return EMITTERS[form](self._server())

    def notes(self) -> Iterator[str]:
        """What has to be known to read the figures, a line each."""
        asked = self.deployment
        if asked.efficiency == 1:
            yield (
                f"Times are limits: the peaks of {asked.card.label}. A real server is slower, and needs as many "
                "replicas or more; --efficiency takes the part of the peaks that yours reaches."
            )
        else:
            yield f"Times are estimates: {asked.efficiency:g} of the peaks of {asked.card.label}, as you said."
        if self.goal.ttft is None and self.replica is not None:
            promised = judged(self.replica, self.goal).ttft
            yield f"No TTFT was promised; {promised:.3g} s stands in, so that no queue grows without end."
        if self.replica is not None and self.replica.tensor_parallel > 1:
            yield "All-reduces take the bytes over the link and 8 us each, which is an assumption."
        if asked.dtype != "bfloat16":
            yield f"The card has no bfloat16: {asked.dtype} is counted, and is what vLLM should be told (--dtype)."
        if asked.config.window_kinds != [None]:
            yield "Layers with a window count as if they kept every token; vLLM groups them and holds more."
        if asked.weight_format == "int4":
            yield "int4 is a checkpoint's format (AWQ, GPTQ): vLLM reads it from the checkpoint and makes none itself."

    @property
    def _fitting(self) -> Instance:
        if self.replica is None:
            raise ConfigError(f"there is nothing to start: {'; '.join(self.problems)}")
        return self.replica

    def _replica_report(self) -> dict[str, Any]:
        replica, goal = self._fitting, self.goal
        pool = replica.pool
        assert pool is not None
        return {
            "tensor_parallel": replica.tensor_parallel,
            "pipeline_parallel": replica.pipeline_parallel,
            "memory_bytes": asdict(replica.ledger),
            "kv_pool": asdict(pool) | {"tokens": pool.tokens},
            "max_model_len": self.max_model_len,
            "concurrency_at_max_model_len": pool.concurrency(self.max_model_len),
            "largest_batch": {
                "in_memory": replica.batch_in_memory(goal),
                "within_tpot": replica.batch_in_time(goal, default_max_num_seqs(self.deployment.card)),
            },
            "largest_context": replica.longest,
            "alone": {
                "ttft_s": replica.ttft(goal), "tpot_s": replica.tpot(goal), "weights_read_s": replica.weights_read_s,
            },
        }  # fmt: skip

    def _load_report(self, load: Trial) -> dict[str, Any]:
        kept = ("ttft_s", "tpot_s", "itl_s", "e2e_s", "output_tokens_per_s", "running_mean", "preemptions", "kv_usage")
        pipeline = self._fitting.pipeline_parallel
        figures = {name: load.figures[name] for name in kept}
        return {
            "replicas": load.replicas,
            "cards": load.replicas * self._fitting.cards,
            "rate_per_replica": load.rate,
            "kept": load.kept,
            **figures,
            "output_tokens_per_s": figures["output_tokens_per_s"] * pipeline,
            "running_mean": figures["running_mean"] * pipeline,
        }

    def _server(self) -> Server:
        return Server(
            replica=self._fitting, replicas=self.load.replicas if self.load else 1, model_id=model_id(self.deployment),
            max_model_len=self.max_model_len, batch_in_memory=self._fitting.batch_in_memory(self.goal), goal=self.goal,
            running=self.load.figures["running_mean"] if self.load else 1.0,
            split=self.split if self.pays_to_split else None,
        )  # fmt: skip


def plan(deployment: Deployment, goal: Goal, tell: Callable[[str], None] = lambda _: None) -> CapacityPlan:
    """Plan a deployment for a goal.

    Of the ways to cut the model that fit and keep the promises for a request that is alone, the one is taken that needs
    the fewest cards for the rate, and of equals the smallest. Its replicas are then counted by simulation.

    Args:
        deployment: the model and the cards.
        goal: the requests and the promises.
        tell: called with how far it has come.

    Raises:
        ConfigError: a request is longer than the model's context or than ``max_model_len``, or vLLM has no such format.
    """
    limit = deployment.max_model_len or deployment.config.max_seq_len
    if goal.tokens > limit:
        what = "max_model_len is" if deployment.max_model_len else f"{deployment.config.name} has a context of"
        raise ConfigError(
            f"{goal.prompt_tokens} prompt tokens and {goal.output_tokens} of the answer are {goal.tokens}, and {what} "
            f"{limit}; shorten one of them"
        )
    quantization(deployment.weight_format), kv_cache_dtype(deployment.kv_format)
    found = fitting(deployment, goal)
    if not found:
        problem, remedies = shortfall(deployment, goal), tuple(_to_fit(deployment, goal))
        return CapacityPlan(deployment=deployment, goal=goal, problems=(problem,), remedies=remedies)
    able = [replica for replica in found if not _misses(replica, goal)]
    if not able:
        return _unreachable(deployment, goal, found)
    return _planned(min(able, key=lambda replica: _estimated_cards(replica, goal)), goal, tell)


def model_id(deployment: Deployment) -> str:
    """What ``vllm serve`` is told to serve: the preset's id on the Hub, or a name to be filled in.

    Args:
        deployment: has the model and the format of its weights.
    """
    name = deployment.config.name
    if deployment.weight_format == "int4":
        return "YOUR-AWQ-OR-GPTQ-CHECKPOINT"
    return preset_source(name).hf_id if name in preset_names() else name


def _planned(replica: Instance, goal: Goal, tell: Callable[[str], None]) -> CapacityPlan:
    """Count the replicas, try smaller steps, and see whether two pools would do with one replica less."""
    deployment, replica = replica.deployment, _sized(replica, goal)
    most = deployment.gpus // replica.cards if deployment.gpus else 100 + ceil(200 * goal.rate * replica.e2e(goal))
    search = Search(replica, judged(replica, goal), most, tell)
    replicas = search.fewest(even_replicas(replica, goal))
    for budget in _BUDGETS if goal.tpot is not None else ():
        limit = most if replicas is None else replicas - 1
        smaller = _sized(replace(replica, token_budget=budget), goal)
        if budget < replica.token_budget and limit and not _misses(smaller, goal):
            tried = Search(smaller, search.goal, limit, tell)
            found = tried.fewest(limit if replicas else even_replicas(smaller, goal))
            if found is None:
                break
            replicas, search = found, Search(smaller, search.goal, most, tell, known=tried.known)
    return _judged(search, replicas or most, goal)


def _judged(search: Search, replicas: int, goal: Goal) -> CapacityPlan:
    """The plan of so many replicas, if a longer run confirms it, and what else is to be said of it."""
    load, replica, deployment = search.confirm(replicas), search.replica, search.replica.deployment
    enough = load.kept >= goal.attainment
    if enough and load.replicas > 1:
        search.keeps(load.replicas - 1)
    return CapacityPlan(
        deployment=deployment, goal=goal, replica=replica, load=load, one_less=search.known.get(load.replicas - 1),
        split=best_split(replica, search.goal, load.replicas - 1 if enough else load.replicas, search.tell),
        reachable_rate=None if enough else reachable_rate(replica, search.goal, load.replicas),
        problems=() if enough else (f"the rate needs more than {_count(load.replicas * replica.cards, 'card')}",),
        remedies=() if enough else tuple(_to_serve(deployment, goal)),
    )  # fmt: skip


def _sized(replica: Instance, goal: Goal) -> Instance:
    """With no more requests at once than memory holds and the TPOT allows: more would be preempted, or be slow."""
    default = default_max_num_seqs(replica.deployment.card)
    most = min(replica.batch_in_memory(goal), replica.batch_in_time(goal, default), default)
    return replace(replica, max_num_seqs=max(most, replica.pipeline_parallel))


def _estimated_cards(replica: Instance, goal: Goal) -> tuple[int, int]:
    rate = replica.fluid_rate(goal)
    return (ceil(goal.rate / rate) * replica.cards if rate else 10**9, replica.cards)


def _misses(replica: Instance, goal: Goal) -> list[str]:
    """Promises that not even a request keeps that is alone, and why."""
    missed: list[str] = []
    ttft, tpot, read = replica.ttft(goal), replica.tpot(goal), replica.weights_read_s
    on = _count(replica.cards, "card")
    if goal.ttft is not None and ttft > goal.ttft:
        missed.append(
            f"prefill alone takes {ttft:.3g} s on {on}, and a TTFT of {goal.ttft:g} s is promised; "
            f"the nearest that can be kept is above {ttft:.3g} s"
        )
    if goal.tpot is not None and goal.output_tokens > 1 and tpot > goal.tpot:
        part = f"reading the weights alone takes {read:.3g} s" if read > goal.tpot else f"one step takes {tpot:.3g} s"
        missed.append(
            f"{part} on {on}, and a TPOT of {goal.tpot:g} s is promised; "
            f"the nearest that can be kept is above {tpot:.3g} s"
        )
    return missed


def _unreachable(deployment: Deployment, goal: Goal, found: list[Instance]) -> CapacityPlan:
    """No number of replicas helps: say which promise of the fastest replica breaks, and what would help."""
    fastest = min(found, key=lambda replica: (len(_misses(replica, goal)), replica.e2e(goal)))
    return CapacityPlan(
        deployment=deployment, goal=goal, replica=fastest, problems=tuple(_misses(fastest, goal)),
        remedies=tuple(_to_keep(deployment, goal)),
    )  # fmt: skip


def _changes(deployment: Deployment) -> Iterator[tuple[str, Deployment]]:
    """Narrower formats, the mildest first, then more cards."""
    wide_weights, wide_kv = (format_of(form).bits >= 16 for form in (deployment.weight_format, deployment.kv_format))
    if wide_weights:
        yield "--weights fp8", replace(deployment, weights="fp8")
    if deployment.weight_format != "int4":
        yield "--weights int4", replace(deployment, weights="int4")
    if wide_kv:
        yield "--kv-dtype fp8", replace(deployment, kv="fp8")
    if wide_weights and wide_kv:
        yield "--weights fp8 --kv-dtype fp8", replace(deployment, weights="fp8", kv="fp8")
    if deployment.gpus is not None:
        yield "--gpus", replace(deployment, gpus=None)


def _to_fit(deployment: Deployment, goal: Goal) -> Iterator[Remedy]:
    """Changes after which it fits; each was computed anew."""
    for change, changed in _changes(deployment):
        if found := fitting(changed, goal):
            smallest = found[0]
            assert smallest.pool is not None
            needed = f" {smallest.cards}" if change == "--gpus" else ""
            yield Remedy(
                change + needed,
                f"fits {_count(smallest.cards, 'card')}: weights {smallest.ledger.weights / GB:.1f} GB a card, "
                f"KV pool {smallest.pool.tokens:,} tokens",
            )
    *_, cut = layouts(deployment)
    widest = instance(deployment, *cut)
    if widest.longest:
        yield Remedy(f"--max-model-len {widest.longest}", "fits, and refuses every request that is longer")


def _to_keep(deployment: Deployment, goal: Goal) -> Iterator[Remedy]:
    """Changes after which a request that is alone keeps the promises; each was computed anew."""
    for change, changed in _changes(deployment):
        for replica in fitting(changed, goal):
            if not _misses(replica, goal):
                needed = f" {replica.cards}" if change == "--gpus" else ""
                yield Remedy(
                    change + needed,
                    f"on {_count(replica.cards, 'card')} prefill takes {replica.ttft(goal):.3g} s and a step "
                    f"{replica.tpot(goal):.3g} s",
                )
                break


def _to_serve(deployment: Deployment, goal: Goal) -> Iterator[Remedy]:
    """What would carry the rate: an estimate of the cards, from even arrivals."""
    for change, changed in _changes(deployment):
        able = [replica for replica in fitting(changed, goal) if not _misses(replica, goal)]
        if not able:
            continue
        needed = min(_estimated_cards(replica, goal)[0] for replica in able)
        if change == "--gpus":
            yield Remedy(f"--gpus {needed}", "carries the rate if arrivals were even; plan again to simulate it")
        elif deployment.gpus and needed <= deployment.gpus:
            yield Remedy(change, f"needs {_count(needed, 'card')} if arrivals were even; plan again to simulate it")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
