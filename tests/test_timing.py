"""The clock waits for the device, and the latency figures mean what they say."""

from __future__ import annotations

import pytest
import torch

from kvlab.timing import Clock, RequestTimes, clock_for, pooled_itl


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


@pytest.mark.parametrize(("kind", "name"), [("cuda", "torch.cuda.synchronize"), ("mps", "torch.mps.synchronize")])
def test_the_clock_of_a_gpu_synchronises_it(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[tuple[object, ...]] = []
    monkeypatch.setattr(name, lambda *device: waited.append(device))
    clock_for(torch.device(kind)).now()
    assert len(waited) == 1


def test_the_clock_of_a_cpu_runs() -> None:
    clock = clock_for(torch.device("cpu"))
    assert clock.now() <= clock.now()


def test_ttft_is_not_an_inter_token_latency() -> None:
    """vllm 7242: TTFT 2 s and 50 tokens at 20 ms have a mean ITL of 20 ms, not 59.6."""
    request = RequestTimes(0.0, [2.0 + 0.02 * i for i in range(50)])
    assert request.ttft == 2.0
    assert sum(request.itl) / len(request.itl) == pytest.approx(0.020)
    assert request.tpot == pytest.approx(0.020)
    assert request.e2e == pytest.approx(2.98)


def test_pooled_itl_and_mean_tpot_are_different_figures() -> None:
    """vllm 6531: 10 tokens at 100 ms and 1,000 at 20 ms: mean TPOT 60 ms, pooled ITL 20.7 ms."""
    requests = [RequestTimes(0.0, [0.1 * i for i in range(11)]), RequestTimes(0.0, [0.02 * i for i in range(1001)])]
    tpots = [request.tpot for request in requests]
    assert sum(t for t in tpots if t is not None) / 2 == pytest.approx(0.060)
    gaps = pooled_itl(requests)
    assert sum(gaps) / len(gaps) == pytest.approx(0.0208, abs=1e-4)


def test_the_wait_starts_when_the_request_was_sent() -> None:
    assert RequestTimes(5.0, [7.0]).ttft == 2.0


def test_figures_that_do_not_exist_yet_are_none() -> None:
    assert (RequestTimes(0.0).ttft, RequestTimes(0.0).e2e, RequestTimes(0.0).tpot) == (None, None, None)
    assert RequestTimes(0.0, [1.0]).tpot is None
    assert RequestTimes(0.0, [1.0]).itl == []
