"""What the steps of an engine take here: the curves that a simulator of this device and model needs.

The roofline of :mod:`kvlab.cost` predicts from operators, and knows those of the plain path. This measures whole steps
of :class:`~kvlab.serving.ModelExecutor`, with whatever kernels it uses: less insight, and less error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from kvlab.cache import BlockPool
from kvlab.cost import Curve, Row, StepCurves
from kvlab.cost.flops import visible_pairs
from kvlab.errors import MeasureError
from kvlab.serving import ModelExecutor, Plan, Request, TokenRequest
from kvlab.timing import clock_for, interleave

#: Requests that decode together, and tokens of a prompt, at which steps are timed.
DECODES = (1, 2, 4, 8, 16, 32)
PROMPTS = (64, 128, 256, 512, 1024)
#: Cached tokens of each request where attention's share is looked for.
_LONG = 512
#: Requests that decode beside a prompt, where the price of both in one step is looked for.
_BESIDE = 8
_BLOCK = 16


def calibrate_steps(
    executor: Callable[[BlockPool], ModelExecutor],
    *,
    repeats: int = 5,
    tell: Callable[[str], None] = lambda _: None,
) -> StepCurves:
    """Time steps of all sizes, with short and with long caches, in turns.

    Args:
        executor: makes one over a pool, as the engine would use it.
        repeats: rounds; the median of each size counts.
        tell: called with what is being done.

    Raises:
        MeasureError: the model's context is too short to measure on.
    """
    pool = BlockPool(max(DECODES) * (_LONG // _BLOCK + 1), _BLOCK)
    made = executor(pool)
    longest = made.model.config.max_seq_len
    prompts = [tokens for tokens in PROMPTS if tokens <= longest]
    if len(prompts) < 2:
        raise MeasureError(
            f"{made.model.config.name} has a context of {longest} tokens; steps need {PROMPTS[1]} or more"
        )
    chunk = prompts[(len(prompts) - 1) // 2]
    past = min(_LONG, longest - chunk)
    plans = {("decode", count, held): _plan((1, held, count)) for count in DECODES for held in (_BLOCK, past - 1)}
    plans |= {("prompt", tokens, 0): _plan((tokens, 0, 1)) for tokens in prompts}
    plans["prompt", chunk, past] = _plan((chunk, past, 1))
    plans["prompts", chunk, 0] = _plan((chunk // 2, 0, 2))
    plans["both", chunk, 0] = _plan((1, _BLOCK, _BESIDE), (chunk - _BESIDE, 0, 1))
    tell(f"{len(plans)} kinds of steps, {repeats + 1} times each")
    works = {str(key): partial(made.execute, plan) for key, plan in plans.items()}
    samples = interleave(works, clock_for(made.model.device), repeats=repeats)
    return _curves({key: samples[str(key)].median for key in plans}, prompts, chunk, past)


def _curves(seconds: Mapping[tuple[str, int, int], float], prompts: list[int], chunk: int, past: int) -> StepCurves:
    """Each time from two steps that differ in one thing alone; what is left belongs to the tokens."""
    pair_s = max(seconds["prompt", chunk, past] - seconds["prompt", chunk, 0], 0.0) / (chunk * past)
    grown = [seconds["decode", count, past - 1] - seconds["decode", count, _BLOCK] for count in DECODES]
    held_s = max(sum(grown), 0.0) / (sum(DECODES) * (past - 1 - _BLOCK))
    points = {count: seconds["decode", count, _BLOCK] - count * _BLOCK * held_s for count in DECODES}
    points |= {tokens: seconds["prompt", tokens, 0] - visible_pairs(tokens) * pair_s for tokens in prompts}
    curves = StepCurves(Curve(tuple(map(float, points)), tuple(points.values())), held_s, pair_s, 0.0, 0.0)
    two = curves.seconds(0, 0, [Row(chunk // 2)] * 2)
    both = curves.seconds(_BESIDE, _BESIDE * _BLOCK, [Row(chunk - _BESIDE)])
    return replace(
        curves,
        prompt_s=max(seconds["prompts", chunk, 0] - two, 0.0),
        both_s=max(seconds["both", chunk, 0] - both, 0.0),
    )


def _plan(*rows: tuple[int, int, int]) -> Plan:
    """A step of requests, given as (new tokens, cached tokens, how many); their blocks may hold anything."""
    tokens, taken = dict[Request, int](), 0
    for new, held, count in rows:
        for _ in range(count):
            request = TokenRequest.of(len(tokens), [1] * (held + new), 1)
            request.num_computed_tokens = held
            request.table = [*range(taken, taken := taken - (-(held + new) // _BLOCK))]
            tokens[request] = new
    return Plan(tokens)
