"""Step curves: what a made-up device takes is what the curves say, for steps that were never measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.cache import BlockPool
from kvlab.cost import Curve, Row, StepCurves
from kvlab.cost.flops import visible_pairs
from kvlab.errors import ConfigError, MeasureError
from kvlab.measure import calibrate_steps, steps
from kvlab.model import GPT
from kvlab.serving import CostModelExecutor, Engine, ModelExecutor, Plan, Request, Scheduler
from kvlab.timing import Clock, VirtualClock
from toys import random_gpt, small_config

ROWS = st.builds(Row, st.integers(2, 300), st.integers(0, 400))


def seconds(decodes: int, held: int, prompts: Sequence[Row]) -> float:
    """A device whose steps cost a straight line of their tokens, and attention in proportion."""
    tokens = decodes + sum(row.new for row in prompts)
    pairs = sum(visible_pairs(row.new, row.past) for row in prompts)
    found = 3e-3 + 2e-4 * tokens + 5e-6 * held + 3e-7 * pairs
    return found + max(len(prompts) - 1, 0) * 7e-4 + (1.1e-3 if decodes and prompts else 0.0)


@pytest.fixture(scope="module")
def long() -> GPT:
    return random_gpt(small_config(max_seq_len=1200))


@pytest.fixture
def curves(long: GPT, monkeypatch: pytest.MonkeyPatch) -> StepCurves:
    """Calibrated on the made-up device: its executor does nothing but let a clock run."""
    clock = VirtualClock()

    class Device(ModelExecutor):
        def execute(self, plan: Plan) -> dict[Request, Sequence[int]]:
            ones = [request.num_computed_tokens for request, fed in plan.tokens.items() if fed == 1]
            others = [Row(fed, request.num_computed_tokens) for request, fed in plan.tokens.items() if fed > 1]
            clock.advance(seconds(len(ones), sum(ones), others))
            return {}

    monkeypatch.setattr(steps, "clock_for", lambda device: clock)
    return calibrate_steps(lambda pool: Device(long, pool), repeats=2)


@pytest.mark.parametrize(
    ("decodes", "held", "prompts"),
    [
        (1, 700, []), (8, 800, []), (32, 9000, []), (0, 0, [Row(64)]), (0, 0, [Row(512, 300)]),
        (0, 0, [Row(128), Row(128, 64)]), (6, 900, [Row(250, 500)]), (12, 40, [Row(500), Row(12)]),
    ],
)  # fmt: skip
def test_attention_and_the_price_of_both_kinds_come_out_as_they_were_put_in(
    curves: StepCurves, decodes: int, held: int, prompts: list[Row]
) -> None:
    assert curves.held_s == pytest.approx(5e-6)
    assert curves.pair_s == pytest.approx(3e-7)
    assert curves.prompt_s == pytest.approx(7e-4, rel=0.3)
    assert curves.both_s == pytest.approx(1.1e-3, rel=0.3)
    # Between the points a curve is straight on logarithmic axes, which this device is not.
    assert curves.seconds(decodes, held, prompts) == pytest.approx(seconds(decodes, held, prompts), rel=0.04)


def test_a_simulated_engine_takes_the_time_of_the_device(curves: StepCurves) -> None:
    """The same requests, by the curves and by the device itself."""
    ends = []
    for times in (curves, StraightLines()):
        clock = VirtualClock()
        engine = Engine(Scheduler(BlockPool(200, 16), token_budget=96), CostModelExecutor(times, clock), clock)
        for _ in engine.run((0.05 * index, Request(index, 40 + 37 * index, 12)) for index in range(8)):
            pass
        ends.append(clock.now())
    assert ends[0] == pytest.approx(ends[1], rel=0.05)


class StraightLines:
    """The made-up device, asked directly."""

    def seconds(self, decodes: int, held: int, prompts: Sequence[Row] = ()) -> float:
        return seconds(decodes, held, prompts)


def test_a_real_model_is_measured_with_what_its_context_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10**9))
    monkeypatch.setattr(steps, "clock_for", lambda device: Clock(read=lambda: float(next(ticks))))
    model = random_gpt(small_config(max_seq_len=130))
    told: list[str] = []
    found = calibrate_steps(lambda pool: ModelExecutor(model, pool), repeats=1, tell=told.append)
    assert found.tokens_s.x == (1, 2, 4, 8, 16, 32, 64, 128)
    assert found.seconds(3, 90) == 1.0  # every step takes one tick
    assert told == ["17 kinds of steps, 2 times each"]


def test_a_short_context_is_refused() -> None:
    model = random_gpt(small_config(max_seq_len=100))
    with pytest.raises(MeasureError, match="a context of 100 tokens; steps need 128 or more"):
        calibrate_steps(lambda pool: ModelExecutor(model, pool))


@given(st.integers(0, 40), st.integers(0, 9000), st.lists(ROWS, max_size=3))
def test_a_step_takes_longer_with_everything_that_is_added(decodes: int, held: int, prompts: list[Row]) -> None:
    curves = StepCurves(Curve((1, 64, 1024), (0.01, 0.05, 0.4)), 1e-6, 1e-7, 1e-3, 2e-3)

    def variants() -> Iterator[float]:
        yield curves.seconds(decodes + 1, held, prompts)
        yield curves.seconds(decodes + 1, held + 1, prompts)
        yield curves.seconds(decodes + 1, held + 1, [*prompts, Row(5)])
        yield curves.seconds(decodes + 1, held + 1, [*prompts, Row(5, 9)])

    found = list(variants())
    assert found == sorted(found)


def test_beyond_the_last_point_time_grows_in_proportion() -> None:
    curves = StepCurves(Curve((1, 64), (0.01, 0.05)), 0.0, 0.0, 0.0, 0.0)
    assert curves.seconds(0, 0, [Row(640)]) == pytest.approx(0.5)


@pytest.mark.parametrize("times", [(-1e-9, 0, 0, 0), (0, -1, 0, 0), (0, 0, -1, 0), (0, 0, 0, -1)])
def test_negative_times_are_refused(times: tuple[float, float, float, float]) -> None:
    with pytest.raises(ConfigError, match="each is 0 or more"):
        StepCurves(Curve((1,), (1,)), *times)


def test_a_step_of_nobody_is_refused() -> None:
    with pytest.raises(ConfigError):
        StepCurves(Curve((1,), (1,)), 0, 0, 0, 0).seconds(0, 0)
