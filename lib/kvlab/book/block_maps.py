"""A block map over time: one row a block, time to the right, coloured by the request that holds it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from kvlab.book.colours import IDLE, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kvlab.serving import Event, Request, Scheduler, StepRecord

#: Paul Tol's "muted" colours, safe for colour-blind readers; none of them means a phase.
REQUEST_COLOURS = (
    "#332288", "#88CCEE", "#DDCC77", "#117733", "#CC6677", "#44AA99", "#882255", "#999933", "#AA4499",
)  # fmt: skip


class Held(NamedTuple):
    """A block over steps in which nothing changes for it.

    Args:
        block: its number.
        start: the first of the steps; the first one of all is 0.
        steps: how many.
        holders: who holds it, in the order in which they joined; empty while it is free.
        left_by: who held it last, while it is free and its contents are still there; None before anybody did.
    """

    block: int
    start: int
    steps: int
    holders: tuple[Request, ...]
    left_by: Request | None


class BlockHistory:
    """A listener that notes, at the end of every step, which requests hold which block.

    A request that ends in a step has given its blocks back by then: what it took in that very step is not seen. Steps
    that a simulator took at once all show what was held after the last of them.

    Args:
        scheduler: of the engine that is listened to.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._states: list[list[tuple[Request, ...]]] = []
        #: The steps at which somebody was preempted, and who.
        self.preempted: list[tuple[int, Request]] = []
        #: Requests in the order in which they first held a block.
        self.requests: list[Request] = []

    @property
    def n_blocks(self) -> int:
        """Blocks of the pool."""
        return self._scheduler.pool.n_blocks

    @property
    def n_steps(self) -> int:
        """Steps so far."""
        return len(self._states)

    def event(self, event: Event) -> None:
        """Note who was preempted."""
        if event.kind == "preempted":
            self.preempted.append((self.n_steps, event.request))

    def step(self, record: StepRecord) -> None:
        """Note who holds what."""
        holders: list[list[Request]] = [[] for _ in range(self.n_blocks)]
        for request in self._scheduler.running:
            for block in request.table:
                holders[block].append(request)
            if request.table and request not in self.requests:
                self.requests.append(request)
        self._states += [[tuple(each) for each in holders]] * record.repeats

    def spans(self) -> Iterator[Held]:
        """Every block over time, from one change to the next."""
        for block in range(self.n_blocks):
            start, left_by = 0, None
            for holders, steps in groupby(state[block] for state in self._states):
                length = len(list(steps))
                yield Held(block, start, length, holders, None if holders else left_by)
                start += length
                left_by = holders[-1] if holders else left_by


def block_map(axes: Axes, history: BlockHistory, *, title: str = "") -> None:
    """Draw who held which block when; hatched where several hold it, pale where it is free and could be found again.

    Args:
        axes: where to draw.
        history: of an engine that has taken its steps.
        title: what to see in the picture, as a sentence.
    """
    from matplotlib.ticker import MaxNLocator

    colours = {request: REQUEST_COLOURS[index % len(REQUEST_COLOURS)] for index, request in enumerate(history.requests)}
    for span in history.spans():
        owner = span.holders[0] if span.holders else span.left_by
        if owner is not None:
            [bar] = axes.barh(span.block, span.steps, 0.86, span.start, color=colours[owner], linewidth=0)
            bar.set_alpha(None if span.holders else 0.22)
            if len(span.holders) > 1:
                bar.set(hatch="////", edgecolor="white")
    for step, request in history.preempted:
        axes.annotate(
            f"{request.id} out", (step, -0.5), (step, -1.5), color=INK, fontsize=8, ha="center", va="bottom",
            arrowprops={"arrowstyle": "->", "color": INK}, annotation_clip=False,
        )  # fmt: skip
    axes.set_title(title, pad=24 if history.preempted else None)
    axes.set(xlabel="step", ylabel="block", xlim=(0, max(history.n_steps, 1)))
    axes.set(ylim=(history.n_blocks - 0.4, -0.6))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=False)
    _legend(axes, {str(request.id): colour for request, colour in colours.items()})


def _legend(axes: Axes, colours: dict[str, str]) -> None:
    """Who has which colour, as far as they are told apart, and what hatches and pale bars mean."""
    from matplotlib.patches import Patch

    named = colours if len(colours) <= len(REQUEST_COLOURS) else {}
    handles: list[Any] = [Patch(color=colour, label=name) for name, colour in named.items()]
    handles.append(Patch(facecolor=IDLE, hatch="////", edgecolor="white", linewidth=0, label="shared"))
    handles.append(Patch(facecolor=INK, alpha=0.22, label="free, contents still there"))
    for old in list(axes.figure.legends):
        old.remove()
    columns = -(-len(handles) // -(-len(handles) // 7))
    axes.figure.legend(handles=handles, ncols=columns, loc="outside lower center")
