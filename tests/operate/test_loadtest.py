"""A load test against a script in virtual time reports exactly what the script did."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from kvlab.errors import ConfigError, MeasureError
from kvlab.operate.exchange import Dialect, Target
from kvlab.operate.in_process import InProcess, Reply, body, event
from kvlab.operate.loadtest import Progress, loadtest, run
from kvlab.operate.record import Record
from kvlab.operate.report import LoadTestResult
from kvlab.operate.schedule import Load
from kvlab.operate.virtual_time import run_virtually
from kvlab.timing import percentile
from scripted_llm import PLAIN, Scripted, chunk, load_tested, never, steady, tokens_of, usage

FIXTURES = Path(__file__).parent / "fixtures"


def tells(exact: float) -> Any:
    return pytest.approx(exact, abs=1e-9)


def uneven(prompt: int, output: int) -> list[float]:
    """Delays that differ from request to request and from token to token."""
    return [0.05 + prompt / 1000] + [0.01 * (1 + (prompt + index) % 7) for index in range(output - 1)]


@pytest.mark.parametrize("concurrency", [1, 100, 200])
def test_every_figure_of_every_request_is_exact(concurrency: int) -> None:
    server = Scripted(lambda number, asked: uneven(tokens_of(asked), asked["max_tokens"]))
    load = Load(requests=2 * concurrency + 5, concurrency=concurrency, workload="uniform:5-300/2-30", warmup=0)
    result = load_tested(server, load)
    assert len(result.completed) == len(server.asked) == load.requests
    assert server.most_at_once == concurrency
    for record in result.records:
        delays = uneven(record.asked_prompt_tokens, record.asked_output_tokens)
        assert record.ttft == tells(delays[0])
        assert record.e2e == tells(sum(delays))
        assert record.tpot == tells(sum(delays[1:]) / (len(delays) - 1))
        assert record.itl == [tells(gap) for gap in delays[1:]]
        assert record.send_lag == 0
        assert (record.prompt_tokens, record.output_tokens) == (record.asked_prompt_tokens, len(delays))


@pytest.mark.parametrize("concurrency", [1, 100, 200])
def test_the_summary_is_that_of_the_script(concurrency: int) -> None:
    server = Scripted(lambda number, asked: uneven(tokens_of(asked), asked["max_tokens"]))
    load = Load(requests=3 * concurrency, concurrency=concurrency, workload="uniform:5-300/2-30", slo_ttft=0.2)
    result = load_tested(server, load)
    found = result.report()
    scripts = [uneven(each.prompt_tokens, each.output_tokens) for each in load.arrivals()]
    for name, values in (
        ("ttft_s", [delays[0] for delays in scripts]),
        ("tpot_s", [fmean(delays[1:]) for delays in scripts]),
        ("itl_s", [gap for delays in scripts for gap in delays[1:]]),
        ("e2e_s", [sum(delays) for delays in scripts]),
    ):
        assert found[name]["mean"] == tells(fmean(values))
        assert found[name]["p50"] == tells(median(values))
        assert found[name]["p99"] == tells(percentile(values, 99))
        assert found[name]["max"] == tells(max(values))
    assert (found["requests"], found["completed"], found["failed"]) == (load.requests, load.requests, 0)
    seconds = result.seconds
    assert found["requests_per_s"] == tells(load.requests / seconds)
    assert found["output_tokens_per_s"] == tells(sum(len(delays) for delays in scripts) / seconds)
    assert found["prompt_tokens_per_s"] == tells(sum(each.prompt_tokens for each in load.arrivals()) / seconds)
    assert found["goodput_per_s"] == tells(sum(delays[0] <= 0.2 for delays in scripts) / seconds)


def test_an_open_loop_sends_when_requests_are_due() -> None:
    load = Load(requests=300, rate=50, workload="fixed:9/4", warmup=0)
    result = load_tested(Scripted(steady(2.0, 0.5)), load)
    assert [record.intended_s for record in result.records] == [tells(each.time) for each in load.arrivals()]
    assert [record.sent_s for record in result.records] == [tells(each.time) for each in load.arrivals()]
    assert {round(record.ttft or 0, 9) for record in result.records} == {2.0}
    assert result.seconds == tells(load.arrivals()[-1].time + 3.5)


def test_bursts_are_bursts() -> None:
    def spread(burstiness: float) -> float:
        load = Load(requests=400, rate=10, workload="fixed:9/2", burstiness=burstiness, warmup=0)
        times = [record.sent_s or 0.0 for record in load_tested(Scripted(steady(0.1, 0.1)), load).records]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        return (fmean(gap**2 for gap in gaps) - fmean(gaps) ** 2) ** 0.5 / fmean(gaps)

    assert 0.85 < spread(1) < 1.15
    assert spread(4) > 2.5


def test_coordinated_omission_latencies_count_from_when_a_request_was_due(tmp_path: Path) -> None:
    """vllm 54101: 8 arrivals at 10/s, 0.5 s of service, one at a time: a closed client reports 0.50, not 1.90."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(f'{{"time": {n / 10}, "prompt_tokens": 4, "output_tokens": 1}}\n' for n in range(8)), "utf8"
    )
    open_loop = load_tested(Scripted(steady(0.5, 0.0), places=1), Load(trace=trace, warmup=0)).report()["e2e_s"]
    closed = load_tested(
        Scripted(steady(0.5, 0.0), places=1), Load(requests=8, workload="fixed:4/1", warmup=0)
    ).report()
    assert open_loop["mean"] == tells(1.90)
    assert open_loop["max"] == tells(3.3)
    assert closed["e2e_s"]["mean"] == tells(0.50)


def test_a_client_that_is_late_adds_its_lag_to_the_latency_and_reports_it() -> None:
    record = Record(0, 1.0, 4, 2, sent_s=1.25, chunks_s=[2.0, 2.5], end_s=2.5, finish_reason="length", output_tokens=2)
    assert (record.ttft, record.e2e, record.send_lag) == (1.0, 1.5, 0.25)
    assert LoadTestResult(SETTINGS, [record]).report()["send_lag_s"]["p50"] == 0.25


@pytest.mark.parametrize("concurrency", [1, 100, 200])
def test_the_client_is_the_bottleneck_fifty_milliseconds_stay_fifty(concurrency: int) -> None:
    """gpustack PR 2324: a connection pool of 100 made a server of 50 ms look slower, the more were sent at once."""
    load = Load(requests=5 * concurrency, concurrency=concurrency, workload="fixed:4/1", warmup=0)
    found = load_tested(Scripted(steady(0.05, 0.0)), load)
    report = found.report()
    assert (report["ttft_s"]["p50"], report["ttft_s"]["max"]) == (tells(0.05), tells(0.05))
    assert report["send_lag_s"]["max"] == 0
    assert found.seconds == tells(0.25)


def test_ttft_is_not_in_the_itl_list() -> None:
    """vllm 7242: TTFT 2 s, 50 tokens at 20 ms: the mean ITL is 20 ms, not 59.6."""
    load = Load(requests=1, workload="fixed:4/51", warmup=0)
    found = load_tested(Scripted(steady(2.0, 0.02)), load).report()
    assert found["itl_s"]["mean"] == tells(0.02)


def test_itl_against_tpot_pooled_gaps_weigh_answers_by_length(tmp_path: Path) -> None:
    """vllm 6531: 10 tokens at 100 ms and 1,000 at 20 ms: mean TPOT 60 ms, pooled ITL 20.7 ms."""
    trace = tmp_path / "two.csv"
    trace.write_text("time,prompt_tokens,output_tokens\n0,4,10\n0,4,1000\n", "utf8")
    server = Scripted(
        lambda number, asked: [1.0] + [0.1 if asked["max_tokens"] == 10 else 0.02] * (asked["max_tokens"] - 1)
    )
    found = load_tested(server, Load(trace=trace, warmup=0)).report()
    assert found["tpot_s"]["mean"] == tells(0.06)
    assert found["itl_s"]["mean"] == pytest.approx(0.0207, abs=5e-5)


def test_prefill_throughput_is_tokens_over_time_not_batch_over_latency() -> None:
    """TGI 849: 2 prompts of 10 tokens in 1 s are 20 tokens a second."""
    load = Load(requests=2, concurrency=2, workload="fixed:10/1", warmup=0)
    assert load_tested(Scripted(steady(1.0, 0.0)), load).report()["prompt_tokens_per_s"] == tells(20.0)


def test_bundled_chunks_stretch_itl_and_leave_tpot() -> None:
    async def answer(asked: dict[str, Any]) -> Reply:
        async def stream() -> AsyncIterator[bytes]:
            await asyncio.sleep(1.0)
            yield chunk("a")
            for index in range(10):
                await asyncio.sleep(0.2)
                yield chunk("four", "length" if index == 9 else None)
            yield usage(tokens_of(asked), 41)

        return Reply(stream())

    load = Load(requests=1, workload="fixed:4/41", warmup=0)
    result = run_virtually(run(Target("http://s", "m", dialect=PLAIN), load, transport=InProcess(answer)))
    found = result.report()
    assert (found["itl_s"]["mean"], found["tpot_s"]["mean"]) == (tells(0.2), tells(0.05))
    assert [each.kind for each in result.warnings()] == ["bundled"]


def test_events_of_one_http_chunk_arrive_together() -> None:
    async def answer(asked: dict[str, Any]) -> Reply:
        return Reply(body([chunk("a") + chunk("b"), chunk("c", "length") + usage(4, 3) + event("[DONE]")]))

    load = Load(requests=1, workload="fixed:4/3", warmup=0)
    (record,) = run_virtually(run(Target("http://s", "m", dialect=PLAIN), load, transport=InProcess(answer))).records
    assert (record.output_tokens, record.itl) == (3, [0.0, 0.0])


def test_warm_up_requests_are_sent_before_and_count_for_nothing() -> None:
    server = Scripted(lambda number, asked: [9.0 if number < 3 else 0.5] + [0.1] * (asked["max_tokens"] - 1))
    result = load_tested(server, Load(requests=4, concurrency=2, workload="fixed:6/3", warmup=3))
    assert len(server.asked) == 7
    assert [record.id for record in result.records] == [0, 1, 2, 3]
    assert result.records[0].intended_s == 0
    assert [record.ttft for record in result.records] == [tells(0.5)] * 4
    assert result.report()["requests"] == 4


def test_no_prompt_is_sent_twice_nor_in_the_next_run() -> None:
    load = Load(requests=50, concurrency=10, workload="fixed:20/1", warmup=2)
    servers = [Scripted(steady(0.1, 0.0)) for _ in range(2)]
    for server in servers:
        load_tested(server, load)
    prompts = {tuple(asked["prompt"][:16]) for server in servers for asked in server.asked}
    assert len(prompts) == 104


def test_shared_prompts_share_what_they_are_meant_to() -> None:
    server = Scripted(steady(0.1, 0.0))
    load = Load(requests=60, concurrency=10, workload="shared-prefix", warmup=2)
    result = load_tested(server, load)
    assert result.settings["shared_prompts"]
    systems = {tuple(asked["prompt"][:1024]) for asked in server.asked[2:]}
    assert 2 <= len(systems) <= 8
    assert len({tuple(asked["prompt"][1024:]) for asked in server.asked[2:]}) == 60
    assert not systems & {tuple(asked["prompt"][:1024]) for asked in server.asked[:2]}


def test_turns_of_a_conversation_begin_with_the_turns_before() -> None:
    server = Scripted(steady(0.1, 0.0))
    load = Load(requests=40, rate=1, workload="multi-turn", warmup=0)
    load_tested(server, load)
    by_session: dict[int, list[list[int]]] = {}
    for arrival, asked in zip(load.arrivals(), server.asked, strict=True):
        by_session.setdefault(arrival.session, []).append(asked["prompt"])
    followed = 0
    for prompts in by_session.values():
        for before, after in itertools.pairwise(prompts):
            assert after[: len(before)] == before
            followed += 1
    assert followed > 5


def test_the_request_asks_for_exact_lengths_and_counts() -> None:
    server = Scripted(steady(0.1, 0.1))
    load_tested(server, Load(requests=1, workload="fixed:7/5", warmup=0))
    (asked,) = server.asked
    assert {name: asked[name] for name in asked if name != "prompt"} == {
        "model": "m", "max_tokens": 5, "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        "ignore_eos": True, "min_tokens": 5,
    }  # fmt: skip
    assert len(asked["prompt"]) == 7


def test_chat_prompts_have_the_length_that_was_asked_for_with_the_template() -> None:
    """A template of 30 tokens and words of one token: learned from two probes, and taken off."""
    server = Scripted(steady(0.1, 0.1), extra=30)
    result = load_tested(server, Load(requests=5, workload="fixed:100/3"), dialect=None, endpoint="chat")
    assert {record.prompt_tokens for record in result.records} == {100}
    assert result.settings["template_tokens"] == 30
    assert result.warnings() == []


def test_a_prompt_shorter_than_the_template_is_said_to_be_longer() -> None:
    server = Scripted(steady(0.1, 0.1), extra=30)
    result = load_tested(server, Load(requests=5, workload="fixed:10/3"), dialect=None, endpoint="chat")
    assert [each.kind for each in result.warnings()] == ["prompt-length"]
    assert "31 for 10 tokens" in result.warnings()[0].message


class Strict(Scripted):
    """Refuses what transformers serve refuses, with its words."""

    async def answer(self, asked: dict[str, Any]) -> Reply:
        odd = {"ignore_eos", "min_tokens"} & asked.keys()
        if odd:
            return refusal(422, {"detail": f"Unexpected fields in the request: {odd}"})
        if not isinstance(asked["prompt"], str):
            return refusal(400, {"detail": "prompt must be a string."})
        return await super().answer(asked)


def refusal(status: int, said: Any) -> Reply:
    return Reply(body([json.dumps(said).encode()]), status, {"content-type": "application/json"})


def test_a_server_that_refuses_fields_is_asked_without_them() -> None:
    server = Strict(steady(0.1, 0.1))
    result = load_tested(server, Load(requests=5, workload="fixed:40/3"), dialect=None)
    assert len(result.completed) == 5
    assert {record.prompt_tokens for record in result.records} == {40}
    assert (result.settings["exact_lengths"], result.settings["token_ids"]) == (False, False)
    assert all("stream_options" in asked and "ignore_eos" not in asked for asked in server.asked)


@pytest.mark.parametrize("refused", ["stream_options", "ignore_eos", "ids"])
def test_whatever_is_refused_without_saying_what_is_found_out(refused: str) -> None:
    class Mute(Scripted):
        async def answer(self, asked: dict[str, Any]) -> Reply:
            if refused in asked or (refused == "ids" and not isinstance(asked["prompt"], str)):
                return refusal(400, {"error": "bad"})
            return await super().answer(asked)

    result = load_tested(Mute(steady(0.1, 0.1)), Load(requests=3, workload="fixed:40/3"), dialect=None)
    assert len(result.completed) == 3


def test_a_server_that_refuses_everything_is_reported_not_hidden() -> None:
    async def answer(asked: dict[str, Any]) -> Reply:
        return refusal(404, {"error": {"message": "The model `m` does not exist."}})

    load = Load(requests=6, concurrency=2, workload="fixed:4/3")
    result = run_virtually(run(Target("http://s", "m"), load, transport=InProcess(answer)))
    found = result.report()
    assert (found["completed"], found["failed"], found["errors"]) == (0, 6, {"http-404": 6})
    assert found["ttft_s"] is found["itl_s"] is None
    assert (found["requests_per_s"], found["goodput_per_s"]) == (0, 0)
    assert "The model `m` does not exist." in result.markdown()
    assert "FAILED: 6 of 6" in result.markdown()


def test_without_usage_chunks_are_counted_and_marked() -> None:
    result = load_tested(Scripted(steady(0.5, 0.1), usage=False), Load(requests=2, workload="fixed:4/9", warmup=0))
    assert {(record.output_tokens, record.counted, record.prompt_tokens) for record in result.records} == {
        (9, False, None)
    }
    assert result.report()["tpot_s"]["mean"] == tells(0.1)
    assert [each.kind for each in result.warnings()] == ["no-usage"]


def test_figures_are_of_what_was_completed_and_tokens_of_all() -> None:
    """The second of three answers breaks after two tokens, the third is refused."""

    async def answer(asked: dict[str, Any]) -> Reply:
        number = asked["max_tokens"]
        if number == 5:
            return refusal(503, {"error": {"message": "busy"}})

        async def stream() -> AsyncIterator[bytes]:
            await asyncio.sleep(1.0)
            yield chunk("a")
            await asyncio.sleep(1.0 if number == 2 else 2.0)
            yield chunk("b", "length" if number == 2 else None)
            if number == 2:
                yield usage(4, 2)

        return Reply(stream())

    load = Load(requests=3, concurrency=1, workload="fixed:4/1", warmup=0)
    wanted = iter([2, 4, 5])
    target = Target("http://s", "m", dialect=PLAIN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "body", lambda *_: json.dumps({"prompt": [1] * 4, "max_tokens": next(wanted)}).encode())
        result = run_virtually(run(target, load, transport=InProcess(answer)))
    found = result.report()
    assert found["errors"] == {"closed": 1, "http-503": 1}
    assert (found["completed"], found["failed"]) == (1, 2)
    assert result.seconds == tells(5.0)
    assert found["output_tokens_per_s"] == tells(4 / 5.0)
    assert found["prompt_tokens_per_s"] == tells(8 / 5.0)
    assert found["requests_per_s"] == found["goodput_per_s"] == tells(1 / 5.0)
    assert found["itl_s"]["max"] == tells(1.0)
    assert found["ttft_s"]["max"] == tells(1.0)


def test_an_interrupted_run_keeps_what_there_is_and_marks_it() -> None:
    server = Scripted(steady(1.0, 1.0))

    async def cut_short() -> LoadTestResult:
        load = Load(requests=10, concurrency=2, workload="fixed:4/3", warmup=0)
        running = asyncio.create_task(
            run(Target("http://s", "m", dialect=PLAIN), load, transport=InProcess(server.answer))
        )
        await asyncio.sleep(4.5)
        running.cancel()
        return await running

    result = run_virtually(cut_short())
    assert result.interrupted
    assert [record.error.kind if record.error else None for record in result.records] == [
        None,
        None,
        "cancelled",
        "cancelled",
    ]
    assert [len(record.chunks_s) for record in result.records] == [3, 3, 1, 1]
    assert [record.end_s for record in result.records[2:]] == [tells(4.5)] * 2
    found = result.to_json()
    assert found["interrupted"]
    assert found["figures"]["errors"] == {"cancelled": 2}
    assert [each["kind"] for each in found["warnings"]] == ["interrupted", "failed"]
    assert "Interrupted" in result.markdown()
    assert server.at_once == 0


def test_interrupted_before_the_first_request_there_is_no_result() -> None:
    async def cut_short() -> None:
        load = Load(requests=10, workload="fixed:4/3", warmup=1)
        running = asyncio.create_task(run(Target("http://s", "m", dialect=PLAIN), load, transport=InProcess(hangs)))
        await asyncio.sleep(1.0)
        running.cancel()
        await running

    async def hangs(asked: dict[str, Any]) -> Reply:
        return Reply(never())

    with pytest.raises(asyncio.CancelledError):
        run_virtually(cut_short())


def test_progress_is_told() -> None:
    told: list[Progress] = []
    load = Load(requests=4, concurrency=2, workload="fixed:4/3", warmup=0)
    target, server = Target("http://s", "m", dialect=PLAIN), Scripted(steady(1.0, 0.25))
    run_virtually(run(target, load, transport=InProcess(server.answer), tell=told.append))
    assert told[-1] == Progress(tells(3.0), 4, 4, 0, 4, 12)
    assert 4 <= len(told) <= 7
    assert [each.sent for each in told] == sorted(each.sent for each in told)


SETTINGS = {
    "url": "http://s", "model": "m", "endpoint": "chat", "workload": "fixed:4/2", "trace": None, "concurrency": 1,
    "rate": None, "requests": 1, "shared_prompts": False, "template_tokens": 0,
}  # fmt: skip


def test_the_json_has_what_was_agreed_on() -> None:
    load = Load(requests=3, rate=2, workload="fixed:4/3", slo_ttft=0.6, slo_tpot=0.2)
    result = load_tested(Scripted(steady(0.5, 0.1), cached=1), load, api_key="secret")
    found = json.loads(json.dumps(result.to_json()))
    assert (found["kind"], found["version"], found["interrupted"]) == ("kvlab-loadtest", 1, False)
    assert found["seconds"] == result.seconds
    assert {
        "url",
        "model",
        "endpoint",
        "rate",
        "requests",
        "prompt_tokens",
        "output_tokens",
        "workload",
        "seed",
        "warmup",
    } <= (found["settings"].keys())
    assert found["figures"]["slo"] == {"ttft_s": 0.6, "tpot_s": 0.2}
    assert set(found["figures"]["ttft_s"]) == {"mean", "p50", "p90", "p95", "p99", "max"}
    first = found["requests"][0]
    assert {
        "id",
        "intended_s",
        "sent_s",
        "headers_s",
        "chunks_s",
        "end_s",
        "status",
        "error",
        "finish_reason",
    } <= first.keys()
    assert (first["prompt_tokens"], first["output_tokens"], first["cached_tokens"]) == (4, 3, 1)
    assert "secret" not in json.dumps(found) + repr(Target("http://s", "m", api_key="secret"))


def test_a_result_comes_back_from_its_json() -> None:
    async def answer(asked: dict[str, Any]) -> Reply:
        return (
            refusal(500, {"error": "no"})
            if asked["max_tokens"] % 2
            else Reply(body([chunk("a", "length"), usage(4, 1)]))
        )

    load = Load(requests=30, rate=20, workload="uniform:4-9/1-6", warmup=0)
    result = run_virtually(run(Target("http://s", "m", dialect=PLAIN), load, transport=InProcess(answer)))
    again = LoadTestResult.from_json(json.loads(json.dumps(result.to_json())))
    assert again.records == result.records
    figures = result.report() | {"loop_lag_s": None}
    assert again.report() == figures
    assert again.warnings() == result.warnings()


@pytest.mark.parametrize(
    "data",
    [
        {},
        [],
        None,
        {"kind": "kvlab-loadtest", "version": 2},
        {"kind": "kvlab-loadtest", "version": 1, "requests": [{}]},
    ],
)
def test_what_is_no_result_is_refused(data: Any) -> None:
    with pytest.raises(MeasureError, match="kvlab-loadtest"):
        LoadTestResult.from_json(data)


def test_the_report_for_people() -> None:
    load = Load(requests=20, rate=2, workload="fixed:4/3", slo_ttft=0.6, slo_tpot=0.2)
    shown = load_tested(Scripted(steady(0.5, 0.125)), load).markdown()
    for line in (
        "# Load test: m at http://server, completions, fixed:4/3, 2/s",
        "| TTFT | 500.0 | 500.0 | 500.0 | 500.0 | 500.0 | 500.0 |",
        "| TPOT | 125.0 |",
        "| E2E | 750.0 |",
        "- requests: 20 in ",
        "finish reasons: 20 length",
        "within TTFT 0.6 s and TPOT 0.2 s",
    ):
        assert line in shown, line
    assert "FAILED" not in shown


def test_a_saved_result_is_whole(tmp_path: Path) -> None:
    load = Load(requests=12, concurrency=3, workload="fixed:4/3", slo_ttft=1.0)
    result = load_tested(Scripted(lambda number, asked: [0.5] * (3 if number % 4 else 0)), load)
    written = result.save(tmp_path / "new" / "folder")
    assert sorted(path.name for path in written) == ["latencies.png", "loadtest.json", "loadtest.md", "timeline.png"]
    assert sorted(path.name for path in written[0].parent.iterdir()) == sorted(path.name for path in written)
    assert json.loads(written[0].read_text("utf8")) == json.loads(json.dumps(result.to_json()))
    assert written[1].read_text("utf8") == result.markdown()
    for path in written[2:]:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", "utf8")
    with pytest.raises(MeasureError, match="cannot be written to"):
        LoadTestResult(SETTINGS, []).save(tmp_path / "file")


def test_a_half_written_file_never_takes_the_place_of_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = LoadTestResult(SETTINGS, [])
    result.save(tmp_path)
    before = (tmp_path / "loadtest.json").read_bytes()

    def half(self: Path, data: bytes) -> None:
        with self.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(KeyboardInterrupt):
        result.save(tmp_path)
    assert (tmp_path / "loadtest.json").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 4


def test_a_file_is_written_beside_its_place_and_moved_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Path.write_bytes

    def beside(self: Path, data: bytes) -> int:
        assert self.name.startswith(".")
        return whole(self, data)

    monkeypatch.setattr(Path, "write_bytes", beside)
    assert len(LoadTestResult(SETTINGS, []).save(tmp_path)) == 4


def test_inside_a_running_loop_one_awaits() -> None:
    async def wrong() -> None:
        loadtest(Target("http://s", "m"), Load())

    with pytest.raises(MeasureError, match="await run"):
        run_virtually(wrong())


@pytest.mark.parametrize("name", ["rate1", "closed8"])
def test_figures_agree_with_those_of_vllm_bench(name: str) -> None:
    """The same times give the figures that ``vllm bench serve`` printed for them. Its file rounds gaps to 10 us."""
    data = json.loads((FIXTURES / "bench" / f"{name}.json").read_text("utf8"))
    records = []
    for index, (ttft, gaps, tokens) in enumerate(zip(data["ttfts"], data["itls"], data["output_lens"], strict=True)):
        chunks = [ttft]
        for gap in gaps:
            chunks.append(chunks[-1] + gap)
        records.append(Record(
            index, 0.0, 64, tokens, sent_s=0.0, chunks_s=chunks, end_s=chunks[-1], status=200, finish_reason="length",
            prompt_tokens=64, output_tokens=tokens, counted=True,
        ))  # fmt: skip
    found = LoadTestResult(SETTINGS, records).report()
    table = (FIXTURES / "bench" / f"{name}.table.txt").read_text("utf8")
    printed = {
        line.split(":")[0].strip(): float(line.split(":")[1]) for line in table.splitlines() if line.count(":") == 1
    }
    for ours, theirs in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("itl_s", "ITL"), ("e2e_s", "E2EL")):
        for mine, yours in (("mean", "Mean"), ("p50", "Median"), ("p90", "P90"), ("p95", "P95"), ("p99", "P99")):
            assert found[ours][mine] * 1e3 == pytest.approx(printed[f"{yours} {theirs} (ms)"], abs=0.1), (ours, mine)


def test_a_dialect_that_is_known_is_not_asked_for() -> None:
    server = Scripted(steady(0.1, 0.1))
    load_tested(server, Load(requests=2, workload="fixed:4/2", warmup=0), dialect=Dialect(token_ids=False, exact=False))
    assert len(server.asked) == 2
    assert all(isinstance(asked["prompt"], str) and "ignore_eos" not in asked for asked in server.asked)


def test_two_ways_to_send_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="rate and concurrency are given"):
        Load(rate=1, concurrency=1)
