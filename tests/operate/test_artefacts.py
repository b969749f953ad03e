"""What distorts figures without being the server's speed is said, and honest runs are left in peace."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from kvlab.operate.artefacts import Caution
from kvlab.operate.record import Fault, Record
from kvlab.operate.report import LoadTestResult

RUNS = Path(__file__).parent / "fixtures" / "runs"
SETTINGS = {"requests": 4, "shared_prompts": False, "template_tokens": 0}


def answered(chunks: list[float], **changes: Any) -> Record:
    """A request that was due at 0, with a token a chunk, answered as it was asked to be."""
    told = {
        "asked_prompt_tokens": 100, "asked_output_tokens": len(chunks), "sent_s": 0.0, "status": 200,
        "finish_reason": "length", "prompt_tokens": 100, "output_tokens": len(chunks), "counted": True,
    }  # fmt: skip
    return Record(id=0, intended_s=0.0, chunks_s=chunks, end_s=chunks[-1], **told | changes)


def paced(first: float, *gaps: float) -> list[float]:
    return list(accumulate((first, *gaps)))


def cautions(
    *records: Record, lags: tuple[float, ...] = (), interrupted: bool = False, **settings: Any
) -> list[Caution]:
    return LoadTestResult(SETTINGS | settings, list(records), interrupted, list(lags)).warnings()


def kinds(*records: Record, **more: Any) -> list[str]:
    return [each.kind for each in cautions(*records, **more)]


SMOOTH = paced(0.5, *[0.03] * 31)


def test_an_honest_run_is_left_in_peace() -> None:
    assert kinds(answered(SMOOTH), answered(paced(0.2, *[0.02, 0.04] * 15))) == []
    draining = paced(0.5, *(0.05 * 0.985**index for index in range(32)))  # a batch that others leave
    assert kinds(answered(draining)) == []


def test_no_requests_no_cautions() -> None:
    assert kinds() == []


@pytest.mark.parametrize("run", ["vllm_load32", "vllm_interf_b2048", "vllm_interf_none"])
def test_streams_of_a_real_server_are_not_taken_for_buffered(run: str) -> None:
    """A queue, and long prompts among decodes: gaps of 0.5 s beside gaps of 35 ms, and no proxy."""
    data = json.loads((RUNS / f"{run}.json").read_text("utf8"))
    requests = data["requests"] if isinstance(data, dict) else data
    records = [answered(each["t_events"][: each.get("n")]) for each in requests]
    assert len(records) > 3
    assert kinds(*records) == []


def test_a_proxy_that_lets_everything_go_at_the_end() -> None:
    (found,) = cautions(*[answered(paced(2.0, *[0.00001] * 31))] * 4)
    assert found.kind == "buffered"
    assert "all at once" in found.message


def test_a_proxy_that_lets_go_in_bursts() -> None:
    bursts = paced(0.5, *([0.0001] * 7 + [0.24]) * 4)
    (found,) = cautions(*[answered(bursts)] * 4)
    assert found.kind == "buffered"
    assert "in bursts" in found.message


def test_an_itl_that_falls() -> None:
    falling = paced(0.5, *(0.05 * 0.9**index for index in range(32)))
    (found,) = cautions(*[answered(falling)] * 4)
    assert found.kind == "buffered"
    assert "faster and faster" in found.message


def test_a_batch_that_empties_is_faster_by_itself() -> None:
    """Sixteen answers of growing length begin together; a step takes longer the more of them are left."""
    lengths = [20 * (1 + index) for index in range(16)]
    steps = [0.002 * sum(length > step for length in lengths) for step in range(max(lengths))]
    answers = [answered(paced(0.5, *steps[1:length])) for length in lengths]
    longest = answers[-1].itl
    assert longest[-1] < longest[0] / 2  # by its gaps alone this one would be taken for buffered
    assert kinds(*answers[8:]) == kinds(*answers) == []


def test_a_few_buffered_answers_among_many_are_no_proxy() -> None:
    at_once = answered(paced(2.0, *[0.00001] * 31))
    assert kinds(at_once, *[answered(SMOOTH)] * 3) == []
    assert kinds(*[at_once] * 3, answered(SMOOTH)) == ["buffered"]


def test_short_answers_have_no_rhythm() -> None:
    assert kinds(*[answered(paced(2.0, 0.00001, 0.00001))] * 4) == []


def test_bundled_chunks() -> None:
    (found,) = cautions(answered(SMOOTH, output_tokens=64, asked_output_tokens=64))
    assert found.kind == "bundled"
    assert "32 chunks carried 64 tokens" in found.message
    assert "2.0 tokens each" in found.message
    assert (
        kinds(answered(SMOOTH, output_tokens=34, asked_output_tokens=34)) == []
    )  # 0.94 chunks a token: halves of characters


def test_a_late_client() -> None:
    late = answered(SMOOTH, sent_s=0.1)
    (found,) = cautions(late)
    assert found.kind == "send-lag"
    assert "100 ms" in found.message
    assert kinds(answered(SMOOTH, sent_s=0.009)) == []
    assert kinds(answered(SMOOTH), lags=(0.1, 0.1)) == ["send-lag"]


def test_a_lag_that_is_nothing_beside_the_latency() -> None:
    assert kinds(answered(paced(10.0, *[0.03] * 31), sent_s=0.1)) == []


def test_capped_answers_are_said_and_are_no_failures() -> None:
    """vLLM: 2,000 + 100 tokens in a context of 2,048 give 48 tokens, status 200 and the finish reason length."""
    record = answered(paced(0.5, *[0.03] * 47), asked_output_tokens=100)
    (found,) = cautions(record)
    assert found.kind == "capped"
    assert "48 of 100 tokens" in found.message
    assert LoadTestResult(SETTINGS, [record]).report()["failed"] == 0


def test_answers_that_end_by_themselves() -> None:
    assert kinds(answered(SMOOTH, asked_output_tokens=64, finish_reason="stop")) == ["ended-early"]
    both = [answered(SMOOTH, asked_output_tokens=64), answered(SMOOTH, asked_output_tokens=64, finish_reason="stop")]
    assert kinds(*both) == ["capped", "ended-early"]


def test_no_usage() -> None:
    assert kinds(answered(SMOOTH, counted=False, prompt_tokens=None)) == ["no-usage"]


def test_prompts_of_another_length() -> None:
    (found,) = cautions(answered(SMOOTH), answered(SMOOTH, prompt_tokens=103), answered(SMOOTH, prompt_tokens=99))
    assert found.kind == "prompt-length"
    assert "2 of 3 prompts" in found.message
    assert "103 for 100 tokens" in found.message


def test_a_server_that_knows_prompts_it_cannot_know() -> None:
    known = answered(SMOOTH, cached_tokens=96)
    (found,) = cautions(known, answered(SMOOTH, cached_tokens=0))
    assert found.kind == "cache-hits"
    assert "48%" in found.message
    assert kinds(known, shared_prompts=True) == []
    assert kinds(known, template_tokens=96) == []
    assert kinds(answered(SMOOTH, cached_tokens=4)) == []


def test_failures_and_interruptions_come_first() -> None:
    refused = Record(1, 0.0, 100, 32, end_s=0.1, error=Fault("http-503", "busy"))
    found = cautions(answered(SMOOTH, asked_output_tokens=64), refused, interrupted=True)
    assert [each.kind for each in found] == ["interrupted", "failed", "capped"]
    assert "2 of 4 requests were sent, 1 completed" in found[0].message
    assert "1 of 2 requests failed" in found[1].message


def test_a_failed_request_says_nothing_about_rhythm() -> None:
    broken = answered(paced(2.0, *[0.00001] * 31), error=Fault("closed", "x"))
    assert kinds(broken, answered(SMOOTH)) == ["failed"]
