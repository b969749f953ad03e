"""The clock waits for the device, and the latency figures mean what they say."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median, quantiles

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvlab.timing
from kvlab.config import ModelConfig
from kvlab.cost import Hardware, predict
from kvlab.errors import MeasureError
from kvlab.serving import Served
from kvlab.timing import (
    Clock,
    RequestTimes,
    Sample,
    VirtualClock,
    carries_token,
    clock_for,
    figures,
    goodput,
    interleave,
    noise_floor,
    percentile,
    pooled_itl,
    repeat,
)


class Machine:
    """A machine whose time is a number: each work moves it on, and writes down that it ran."""

    def __init__(self) -> None:
        self.time, self.ran = 0.0, list[str]()

    def work(self, name: str, *seconds: float) -> Callable[[], None]:
        """A work that takes these seconds in turn, the last ones for ever."""
        left = list(seconds)

        def run() -> None:
            self.ran.append(name)
            self.time += left.pop(0) if len(left) > 1 else left[0]

        return run

    @property
    def clock(self) -> Clock:
        return Clock(read=lambda: self.time)


class Device:
    """A device that takes orders at once and is busy with them afterwards."""

    def __init__(self) -> None:
        self.time = self.done_at = 0.0

    def launch(self, seconds: float) -> None:
        self.done_at = max(self.done_at, self.time) + seconds

    def synchronise(self) -> None:
        self.time = max(self.time, self.done_at)

    def clock(self, waits: bool = True) -> Clock:
        return Clock(lambda: self.time, self.synchronise) if waits else Clock(lambda: self.time)


def test_no_synchronisation_the_device_is_waited_for_before_every_reading() -> None:
    """mlx-benchmark PR 21: a device that is still computing makes its kernels look free."""
    calls: list[str] = []

    def read() -> float:
        calls.append("read")
        return 0.0

    clock = Clock(read=read, synchronise=lambda: calls.append("synchronise"))
    clock.now()
    clock.now()
    assert calls == ["synchronise", "read"] * 2


def test_no_synchronisation_and_a_kernel_seems_free() -> None:
    """mlx-benchmark PR 21: the same work on an asynchronous device, with a clock that waits and one that does not."""
    device = Device()
    assert repeat(lambda: device.launch(0.5), device.clock(waits=False)).median == 0
    assert repeat(lambda: device.launch(0.5), device.clock()).seconds == (0.5,) * 5


def test_what_was_queued_before_is_not_charged_to_the_work() -> None:
    device = Device()
    device.launch(10.0)
    assert repeat(lambda: device.launch(0.5), device.clock(), warmup=0).seconds == (0.5,) * 5


@pytest.mark.parametrize(("kind", "name"), [("cuda", "torch.cuda.synchronize"), ("mps", "torch.mps.synchronize")])
def test_the_clock_of_a_gpu_synchronises_it(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[tuple[object, ...]] = []
    monkeypatch.setattr(name, lambda *device: waited.append(device))
    clock_for(torch.device(kind)).now()
    assert len(waited) == 1


def test_the_clock_of_a_cpu_runs() -> None:
    clock = clock_for(torch.device("cpu"))
    assert clock.now() <= clock.now()


def test_ttft_added_to_the_itl_list() -> None:
    """vllm 7242: TTFT 2 s and 50 tokens at 20 ms have a mean ITL of 20 ms, not 59.6."""
    request = RequestTimes(0.0, [2.0 + 0.02 * i for i in range(50)])
    assert request.ttft == 2.0
    assert sum(request.itl) / len(request.itl) == pytest.approx(0.020)
    assert request.tpot == pytest.approx(0.020)
    assert request.e2e == pytest.approx(2.98)


def test_itl_against_tpot_pooled_gaps_weigh_requests_by_length() -> None:
    """vllm 6531: 10 tokens at 100 ms and 1,000 at 20 ms: mean TPOT 60 ms, pooled ITL 20.7 ms."""
    requests = [RequestTimes(0.0, [0.1 * i for i in range(10)]), RequestTimes(0.0, [0.02 * i for i in range(1000)])]
    tpots = [request.tpot for request in requests]
    assert sum(t for t in tpots if t is not None) / 2 == pytest.approx(0.060)
    gaps = pooled_itl(requests)
    assert sum(gaps) / len(gaps) == pytest.approx(0.0207, abs=5e-5)


def test_coordinated_omission_the_wait_starts_when_the_request_was_due() -> None:
    """vllm 54101: 8 arrivals at 10/s, 0.5 s service, one at a time: 0.50 s if counted from the sending, truly 1.90."""
    due = [0.1 * i for i in range(8)]
    done, free = [], 0.0
    for at in due:
        free = max(free, at) + 0.5
        done.append(free)
    closed = [RequestTimes(end - 0.5, [end]) for end in done]
    true = [RequestTimes(at, [end]) for at, end in zip(due, done, strict=True)]
    assert sum(r.e2e or 0.0 for r in closed) / 8 == pytest.approx(0.50)
    assert sum(r.e2e or 0.0 for r in true) / 8 == pytest.approx(1.90)


@pytest.mark.parametrize(
    ("delta", "generated"),
    [
        ({"role": "assistant", "content": ""}, False),
        ({"role": "assistant", "content": None}, False),
        ({"role": "assistant"}, False),
        ({}, False),
        ({"content": "", "tool_calls": []}, False),
        ({"content": "Blue"}, True),
        ({"content": " "}, True),
        ({"reasoning": "So", "content": None}, True),
        ({"reasoning_content": "So", "content": ""}, True),
        ({"tool_calls": [{"index": 0, "function": {"name": "look"}}]}, True),
    ],
)
def test_role_only_or_reasoning_chunks_the_first_generated_token_ends_ttft(
    delta: dict[str, object], generated: bool
) -> None:
    """vllm PR 3768: the role alone is no token; a thought and a tool call are."""
    assert carries_token(delta) is generated


def test_prefill_throughput_is_not_batch_over_latency() -> None:
    """TGI 849: two prompts of 10 tokens in one second are 20 tokens a second, not 2."""
    config = ModelConfig.preset("smollm2-135m")
    device = Hardware("slow", "slow", "test", 2**40, 1e9, {"bfloat16": 1e9}, "made up")
    foreseen = predict(config, device, prompt_tokens=10, batch=2)
    assert foreseen.prefill_tokens_per_second * foreseen.ttft == pytest.approx(20)


def test_the_wait_starts_when_the_request_was_sent() -> None:
    assert RequestTimes(5.0, [7.0]).ttft == 2.0


def test_figures_that_do_not_exist_yet_are_none() -> None:
    assert (RequestTimes(0.0).ttft, RequestTimes(0.0).e2e, RequestTimes(0.0).tpot) == (None, None, None)
    assert RequestTimes(0.0, [1.0]).tpot is None
    assert RequestTimes(0.0, [1.0]).itl == []


def test_goodput_counts_the_requests_that_kept_every_promise() -> None:
    """Four in two seconds: one in time, one late to begin, one slow, one of a single token."""
    requests = [
        RequestTimes(0.0, [0.5, 0.6, 0.7]),
        RequestTimes(0.0, [1.5, 1.6, 1.7]),
        RequestTimes(0.0, [0.5, 0.9, 1.3]),
        RequestTimes(0.0, [0.5]),
    ]
    assert goodput(requests, 2.0) == 2.0
    assert goodput(requests, 2.0, ttft=1.0) == 1.5
    assert goodput(requests, 2.0, tpot=0.2) == 1.5
    assert goodput(requests, 2.0, ttft=1.0, tpot=0.2) == 1.0


def test_an_answer_that_never_began_is_no_goodput() -> None:
    assert goodput([RequestTimes(0.0)], 1.0) == goodput([RequestTimes(0.0)], 1.0, ttft=9.0) == 0.0
    assert goodput([], 1.0, ttft=1.0) == 0.0


def test_a_promise_that_is_just_kept_is_kept() -> None:
    assert goodput([RequestTimes(0.0, [1.0, 1.25])], 1.0, ttft=1.0, tpot=0.25) == 1.0


def test_goodput_takes_figures_as_well_as_times() -> None:
    served = [Served(0.5, 0.1), Served(1.5, 0.1), Served(0.5, 0.4), Served(0.5, None)]
    assert goodput(served, 2.0, ttft=1.0, tpot=0.2) == 1.0


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_goodput_needs_a_run_that_lasted(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"seconds is -?[01]\.0; goodput is a rate"):
        goodput([], seconds)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40))
def test_percentiles_are_the_inclusive_quantiles(values: list[float]) -> None:
    cuts = quantiles(values, n=100, method="inclusive")
    for percent in (1, 25, 50, 90, 99):
        assert percentile(values, percent) == pytest.approx(cuts[percent - 1], rel=1e-9, abs=1e-6)
    assert percentile(values, 50) == pytest.approx(median(values))
    assert (percentile(values, 0), percentile(values, 100)) == (min(values), max(values))


def test_a_percentile_lies_on_the_line_between_its_neighbours() -> None:
    assert percentile([30.0, 10.0, 20.0], 75) == 25
    assert percentile([7.0], 99) == 7


def test_the_figures_of_a_table() -> None:
    found = figures([4.0, 1.0, 3.0, 2.0, 5.0])
    assert found == pytest.approx({"mean": 3.0, "p50": 3.0, "p90": 4.6, "p95": 4.8, "p99": 4.96, "max": 5.0})
    assert figures([]) is None


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 100.5), ([1.0], float("nan"))])
def test_percentiles_that_do_not_exist_are_refused(values: list[float], percent: float) -> None:
    with pytest.raises(MeasureError, match="give 0 to 100, and one value or more"):
        percentile(values, percent)


def test_a_virtual_clock_moves_only_when_told() -> None:
    clock = VirtualClock()
    assert clock.now() == clock.now() == 0
    clock.advance(1.5)
    clock.advance(0)
    assert clock.now() == 1.5
    clock.wait_until(4.0)
    assert clock.now() == 4.0
    clock.wait_until(2.0)
    assert clock.now() == 4.0


@pytest.mark.parametrize("seconds", [-0.1, float("nan")])
def test_a_virtual_clock_does_not_run_backwards(seconds: float) -> None:
    clock = VirtualClock()
    with pytest.raises(MeasureError, match="advances by 0 or more"):
        clock.advance(seconds)
    assert clock.now() == 0


def test_a_real_clock_sleeps_for_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = list[float]()
    monkeypatch.setattr(kvlab.timing, "sleep", slept.append)
    clock = Clock(read=lambda: 10.0)
    clock.wait_until(12.5)
    clock.wait_until(3.0)
    assert slept == [2.5, 0.0]


def test_median_best_and_spread_by_hand() -> None:
    sample = Sample((4.0, 1.0, 3.0, 2.0, 5.0))
    assert (sample.median, sample.best) == (3.0, 1.0)
    assert sample.spread == pytest.approx((4.0 - 2.0) / 3.0)


def test_one_disturbed_repeat_moves_neither_median_nor_spread() -> None:
    quiet, disturbed = Sample((1.0, 2.0, 3.0, 4.0, 5.0)), Sample((1.0, 2.0, 3.0, 4.0, 500.0))
    assert (disturbed.median, disturbed.spread) == (quiet.median, quiet.spread)


def test_a_single_repeat_has_no_spread() -> None:
    assert (Sample((2.0,)).median, Sample((2.0,)).spread) == (2.0, 0.0)


def test_works_take_turns() -> None:
    machine = Machine()
    works = {name: machine.work(name, 1.0) for name in "abc"}
    samples = interleave(works, machine.clock, repeats=2, warmup=1)
    assert machine.ran == list("abc") * 3
    assert list(samples) == list("abc")


def test_each_work_gets_its_own_times_and_the_warm_up_none() -> None:
    machine = Machine()
    works = {"a": machine.work("a", 90.0, 1.0, 2.0), "b": machine.work("b", 80.0, 10.0)}
    samples = interleave(works, machine.clock, repeats=3, warmup=1)
    assert samples == {"a": Sample((1.0, 2.0, 2.0)), "b": Sample((10.0, 10.0, 10.0))}


def test_a_drifting_machine_slows_interleaved_works_alike() -> None:
    """A machine that loses 1 % a run: the same work twice differs by half when measured apart, by 1 % in turns."""
    machine, runs = Machine(), 0

    def work() -> None:
        nonlocal runs
        runs += 1
        machine.time += 1.01**runs

    apart = [repeat(work, machine.clock, repeats=41, warmup=0).median for _ in range(2)]
    turns = interleave({"a": work, "b": work}, machine.clock, repeats=41, warmup=0)
    assert apart[1] / apart[0] == pytest.approx(1.01**41)
    assert turns["b"].median / turns["a"].median == pytest.approx(1.01)


def test_repeat_is_one_work_alone() -> None:
    machine = Machine()
    sample = repeat(machine.work("a", 7.0, 1.0), machine.clock, repeats=4, warmup=1)
    assert (sample, machine.ran) == (Sample((1.0,) * 4), ["a"] * 5)


def test_without_a_warm_up_the_first_call_counts() -> None:
    machine = Machine()
    assert repeat(machine.work("a", 7.0, 1.0), machine.clock, repeats=2, warmup=0).seconds == (7.0, 1.0)


@pytest.mark.parametrize(("repeats", "warmup"), [(0, 1), (-1, 1), (1, -1)])
def test_nothing_to_time_is_refused(repeats: int, warmup: int) -> None:
    with pytest.raises(ValueError, match=f"{repeats} repeats, {warmup} warm-ups"):
        repeat(lambda: None, Clock(), repeats=repeats, warmup=warmup)
    with pytest.raises(ValueError, match="0 works"):
        interleave({}, Clock())


def test_the_noise_floor_is_the_median_distance_of_neighbouring_repeats() -> None:
    assert noise_floor([(1.0, 1.1, 1.1), (2.0, 1.0)]) == pytest.approx(0.1)
    assert noise_floor([(1.0,), (2.0,)]) is None
