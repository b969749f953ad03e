"""What fits: weights, activations and the KV pool on each card, card by card."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from kvlab.cost import (
    GB,
    ParallelTimes,
    Pool,
    Row,
    activation_bytes,
    chunks,
    logits_bytes,
    pool_bytes,
    shard,
    weight_bytes,
    weight_read_seconds,
)
from kvlab.errors import ConfigError
from kvlab.operate.goal import Deployment, Goal
from kvlab.operate.vllm import BLOCK_SIZE, default_max_num_seqs, default_token_budget, non_torch_bytes

#: Stages of a pipeline that are tried, at most.
_MOST_STAGES = 16


@dataclass(frozen=True)
class Ledger:
    """The memory of one card, in bytes. The entries add up to what the card has.

    Args:
        device: that the card has.
        unclaimed: that the server must leave alone; CUDA graphs and what else the driver needs live there.
        weights: of this card's share of the model.
        activations: of the largest step, as an engine profiles it at its start.
        non_torch: of the driver, the kernels and the communication buffers.
        kv_pool: what is left for the cache; negative where the rest does not even fit.
    """

    device: int
    unclaimed: int
    weights: int
    activations: int
    non_torch: int
    kv_pool: int


@dataclass(frozen=True)
class Instance:
    """One copy of the model on one or more cards: a replica.

    Args:
        deployment: what it is a part of.
        tensor_parallel: cards that share every matrix.
        pipeline_parallel: stages that share the layers.
        token_budget: tokens of a step, at most.
        max_num_seqs: requests that run at once, at most.
    """

    deployment: Deployment
    tensor_parallel: int
    pipeline_parallel: int
    token_budget: int
    max_num_seqs: int

    @property
    def cards(self) -> int:
        """Of one replica."""
        return self.tensor_parallel * self.pipeline_parallel

    @cached_property
    def ledger(self) -> Ledger:
        """The memory of the card that holds the most."""
        asked, card = self.deployment, self.deployment.card
        part = shard(asked.config, self.tensor_parallel, self.pipeline_parallel)
        step = Row(min(self.token_budget, asked.config.max_seq_len))
        # The sampler is profiled with as many rows of float32 logits as requests may run.
        logits = logits_bytes(asked.config, self.max_num_seqs)
        activations = max(activation_bytes(part, [step], asked.dtype), logits)
        weights, other = weight_bytes(part, asked.weight_format), non_torch_bytes(card, self.tensor_parallel)
        pool = pool_bytes(card.memory_bytes, asked.utilization, weights, activations + other)
        unclaimed = card.memory_bytes - (weights + activations + other + pool)
        return Ledger(card.memory_bytes, unclaimed, weights, activations, other, pool)

    @cached_property
    def pool(self) -> Pool | None:
        """The blocks that fit; None where not one does. Layers with a window count as if they had none."""
        config = self.deployment.config
        # The fullest stage has this share of the layers, and every block has a part on it.
        layers = -(-config.n_layer // self.pipeline_parallel)
        room = max(self.ledger.kv_pool, 0) * config.n_layer // layers
        try:
            return Pool.of(
                config, room, self.deployment.kv_format, block_size=BLOCK_SIZE, tensor_parallel=self.tensor_parallel
            )
        except ConfigError:
            return None

    @cached_property
    def times(self) -> ParallelTimes:
        """How long its steps take."""
        asked = self.deployment
        return ParallelTimes(
            asked.config, asked.slowed, asked.dtype, weights=asked.weight_format, kv=asked.kv_format,
            tensor_parallel=self.tensor_parallel, pipeline_parallel=self.pipeline_parallel, network=asked.network,
        )  # fmt: skip

    def holds(self, tokens: int) -> bool:
        """Whether one request of so many tokens fits.

        Args:
            tokens: prompt and answer.
        """
        return self.pool is not None and self.pool.holds(tokens)

    @property
    def longest(self) -> int:
        """The longest request that it can serve: as much as the pool holds and the model takes."""
        return 0 if self.pool is None else min(self.pool.tokens, self.deployment.config.max_seq_len)

    def pieces(self, goal: Goal) -> list[Row]:
        """The prompt as it is read: one row a step.

        Args:
            goal: has its length.
        """
        return chunks(goal.prompt_tokens, self.token_budget)

    def ttft(self, goal: Goal) -> float:
        """Seconds to the first token of a request that is alone: its pieces one after another.

        Args:
            goal: has its lengths.
        """
        return sum(self.times.seconds(0, 0, [row]) for row in self.pieces(goal))

    def tpot(self, goal: Goal, batch: int = 1) -> float:
        """Seconds of a decode step in the middle of the answers.

        Args:
            goal: has the lengths.
            batch: requests that decode, of one step of the pipeline.
        """
        return self.times.seconds(batch, batch * (goal.prompt_tokens + goal.output_tokens // 2))

    def e2e(self, goal: Goal) -> float:
        """Seconds of a request that is alone.

        Args:
            goal: has its lengths.
        """
        return self.ttft(goal) + (goal.output_tokens - 1) * self.tpot(goal)

    @property
    def weights_read_s(self) -> float:
        """Seconds in which every card reads its weights once: no decode step is shorter."""
        asked = self.deployment
        part = shard(asked.config, self.tensor_parallel)
        return weight_read_seconds(part, asked.slowed, asked.weight_format)

    def batch_in_memory(self, goal: Goal) -> int:
        """Requests of full length that fit at once.

        Args:
            goal: has the lengths.
        """
        return 0 if self.pool is None else self.pool.blocks // self.pool.blocks_of(goal.tokens)

    def batch_in_time(self, goal: Goal, most: int) -> int:
        """The largest batch whose decode step keeps the promised TPOT; ``most`` where none was promised.

        Args:
            goal: has the lengths and the promise.
            most: to look no further.
        """
        if goal.tpot is None:
            return most
        promised, lanes = goal.tpot, self.pipeline_parallel
        return lanes * largest(lambda batch: self.tpot(goal, batch) <= promised, -(-most // lanes))

    def fluid_rate(self, goal: Goal) -> float:
        """Requests per second that it could serve if arrivals were even: a guess from which to search.

        While ``B`` requests decode, ``B / output_tokens`` prompts are read in each step, and take what they add to it.
        The largest such batch that keeps the TPOT gives the rate.

        Args:
            goal: has the lengths and the promise.
        """
        pieces = self.pieces(goal)

        def step(batch: int) -> float:
            held, alone = batch * (goal.prompt_tokens + goal.output_tokens // 2), self.tpot(goal, batch)
            # Prompts that are read in one step share the weights, as far as they fit the budget together.
            at_once = max(min(batch // goal.output_tokens, self.token_budget // pieces[0].new), 1)
            added = sum(self.times.seconds(batch, held, [row] * at_once) - alone for row in pieces)
            return alone + batch / goal.output_tokens * added / at_once

        lanes = self.pipeline_parallel
        most = max(min(self.max_num_seqs, self.batch_in_memory(goal)) // lanes, 1)
        batch = most if goal.tpot is None else largest(lambda size: step(size) <= (goal.tpot or 0), most)
        return lanes * batch / (goal.output_tokens * step(batch)) if batch else 0.0


def largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest whole number up to ``most`` for which something holds that holds for all smaller ones; 0 for none.

    Args:
        holds: what is asked of 1 and more.
        most: to look no further.
    """
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def instance(
    deployment: Deployment, tensor_parallel: int, pipeline_parallel: int, token_budget: int | None = None
) -> Instance:
    """A replica with the defaults of vLLM for its card.

    Args:
        deployment: what it is a part of.
        tensor_parallel: cards that share every matrix.
        pipeline_parallel: stages that share the layers.
        token_budget: tokens of a step; None for the default.
    """
    card = deployment.card
    budget = default_token_budget(card) if token_budget is None else token_budget
    return Instance(deployment, tensor_parallel, pipeline_parallel, budget, default_max_num_seqs(card))


def layouts(deployment: Deployment) -> Iterator[tuple[int, int]]:
    """Every (tensor, pipeline) parallel size that the model allows, the fewest cards first.

    Tensor parallelism stays inside a machine; a pipeline comes in where the largest such group does not suffice.

    Args:
        deployment: with the cards there are.
    """
    most = deployment.gpus or deployment.gpus_per_node * _MOST_STAGES
    inside = [ranks for ranks in range(1, min(deployment.gpus_per_node, most) + 1) if _divides(deployment, ranks)]
    yield from ((ranks, 1) for ranks in inside)
    widest = inside[-1]
    for stages in range(2, min(_MOST_STAGES, deployment.config.n_layer, most // widest) + 1):
        yield widest, stages


def _divides(deployment: Deployment, ranks: int) -> bool:
    """Whether so many cards can share the model, and a machine has room for a whole number of such groups."""
    if deployment.gpus_per_node % ranks:
        return False
    try:
        weight_bytes(shard(deployment.config, ranks), deployment.weight_format)
    except ConfigError:
        return False
    return True


def fitting(deployment: Deployment, goal: Goal) -> list[Instance]:
    """The replicas that hold a request of the goal, the fewest cards first; a pipeline only where nothing else does.

    Args:
        deployment: with the cards there are.
        goal: with the lengths.
    """
    tokens = deployment.max_model_len or goal.tokens
    found: list[Instance] = []
    for ranks, stages in layouts(deployment):
        if stages > 1 and found:
            break
        replica = instance(deployment, ranks, stages)
        if replica.holds(tokens):
            found.append(replica)
    return found


def shortfall(deployment: Deployment, goal: Goal) -> str:
    """Why not even the largest replica that the cards allow holds a request, in one line.

    Args:
        deployment: with the cards there are.
        goal: with the lengths.
    """
    *_, (ranks, stages) = layouts(deployment)
    replica = instance(deployment, ranks, stages)
    ledger, tokens = replica.ledger, deployment.max_model_len or goal.tokens
    cards = "1 card" if replica.cards == 1 else f"{replica.cards} cards"
    if replica.pool is None:
        claimed = ledger.device - ledger.unclaimed
        return (
            f"{deployment.config.name} is too large for {cards} of {deployment.card.title}: of each, weights take "
            f"{ledger.weights / GB:.1f} GB, activations and the rest "
            f"{(ledger.activations + ledger.non_torch) / GB:.1f} GB, and {claimed / GB:.1f} GB may be used"
        )
    return (
        f"the weights fit {cards} of {deployment.card.title}, but the KV pool holds {replica.pool.tokens:,} tokens, "
        f"and one request needs {tokens:,}"
    )
