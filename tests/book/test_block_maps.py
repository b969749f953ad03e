"""Block maps over time: who holds what at the end of every step, and what is drawn of it."""

from __future__ import annotations

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_rgba

from kvlab.book.block_maps import REQUEST_COLOURS, BlockHistory, Held, block_map
from kvlab.cache import BlockPool
from kvlab.serving import CostModelExecutor, Engine, Plan, Request, Scheduler, TokenRequest
from kvlab.timing import VirtualClock


class OneSecond:
    """Every step takes a second."""

    def seconds(self, *_: object) -> float:
        return 1.0


class Stepwise(CostModelExecutor):
    """Takes no steps at once."""

    def repeats(self, plan: Plan, seconds: float | None) -> int:
        return 1


def history_of(
    requests: list[tuple[float, Request]], n_blocks: int = 6, executor: type[CostModelExecutor] = Stepwise
) -> BlockHistory:
    """What a pool of blocks of 4 tokens went through."""
    scheduler = Scheduler(BlockPool(n_blocks, 4))
    history, clock = BlockHistory(scheduler), VirtualClock()
    for _ in Engine(scheduler, executor(OneSecond(), clock), clock, [history]).run(requests):
        pass
    return history


def spans_of(history: BlockHistory, block: int) -> list[Held]:
    return [span for span in history.spans() if span.block == block]


def test_a_block_is_held_then_free_and_then_another_s() -> None:
    a, b = Request("A", 4, 3), Request("B", 4, 2)
    history = history_of([(0.0, a), (3.0, b)], n_blocks=2)
    # A feeds 4, 1, 1 tokens and has ended when its third step is over; B takes the block that was freed first.
    assert history.n_steps == 5
    assert spans_of(history, 1) == [Held(1, 0, 1, (), None), Held(1, 1, 1, (a,), None), Held(1, 2, 1, (), a),
                                    Held(1, 3, 1, (b,), None), Held(1, 4, 1, (), b)]  # fmt: skip
    assert spans_of(history, 0) == [Held(0, 0, 2, (a,), None), Held(0, 2, 3, (), a)]
    assert history.requests == [a, b]


def test_steps_that_were_taken_at_once_count_each() -> None:
    history = history_of([(0.0, Request("A", 1, 20))], n_blocks=5, executor=CostModelExecutor)
    assert history.n_steps == 20
    assert sum(span.steps for span in history.spans()) == 5 * 20


def test_holders_stand_in_the_order_in_which_they_joined() -> None:
    prompt = list(range(9))
    a, b = TokenRequest.of("A", prompt, 6), TokenRequest.of("B", prompt, 6)
    shared = [span for span in history_of([(0.0, a), (1.0, b)]).spans() if len(span.holders) > 1]
    assert {span.block for span in shared} == {0, 1}
    assert all(span.holders == (a, b) for span in shared)


def test_who_was_preempted_and_when() -> None:
    a, b = Request("A", 4, 9), Request("B", 4, 9)
    history = history_of([(0.0, a), (0.0, b)], n_blocks=4)
    assert history.preempted
    assert {request for _, request in history.preempted} == {b}
    for step, request in history.preempted:
        assert all(
            request not in span.holders for span in history.spans() if span.start <= step < span.start + span.steps
        )


@pytest.mark.parametrize("title", ["", "Two share"])
def test_the_drawing_has_a_bar_for_every_stretch(title: str) -> None:
    prompt = list(range(9))
    history = history_of([(0.0, TokenRequest.of("A", prompt, 6)), (1.0, TokenRequest.of("B", prompt, 6))])
    drawing, axes = plt.subplots(layout="constrained")
    block_map(axes, history, title=title)
    drawn = [span for span in history.spans() if span.holders or span.left_by]
    assert len(axes.patches) == len(drawn)
    for bar, span in zip(axes.patches, drawn, strict=True):
        owner = span.holders[0] if span.holders else span.left_by
        colour = to_rgba(REQUEST_COLOURS[history.requests.index(owner)])  # type: ignore[arg-type]
        assert bar.get_facecolor()[:3] == colour[:3]
        assert (bar.get_facecolor()[3] < 1) == (not span.holders)
        assert bool(bar.get_hatch()) == (len(span.holders) > 1)
        assert (bar.get_x(), bar.get_width()) == (span.start, span.steps)
        assert bar.get_y() + bar.get_height() / 2 == pytest.approx(span.block)
    assert title in (axes.get_title(), axes.get_title("left"))  # where the style puts it
    [legend] = drawing.legends
    assert [text.get_text() for text in legend.get_texts()] == ["A", "B", "shared", "free, contents still there"]
    plt.close(drawing)


def test_nothing_happened_yet() -> None:
    drawing, axes = plt.subplots()
    block_map(axes, BlockHistory(Scheduler(BlockPool(2, 4))))
    assert not axes.patches
    plt.close(drawing)
