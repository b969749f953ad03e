"""Every way in which a server can fail is named, nothing hangs, and what came before is kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvlab.errors import ConfigError, MeasureError
from kvlab.operate.exchange import Dialect, Target, simpler
from kvlab.operate.in_process import InProcess, Reply, body, event
from kvlab.operate.loadtest import run
from kvlab.operate.record import Record
from kvlab.operate.report import LoadTestResult
from kvlab.operate.schedule import Load
from kvlab.operate.virtual_time import run_virtually
from scripted_llm import PLAIN, Scripted, broken, chunk, load_tested, never, one, steady, usage

TIMED = Path(__file__).parent / "fixtures" / "timed"
DONE = event("[DONE]")
WHOLE = (chunk("a"), chunk("b"), chunk("c", "length"), usage(5, 3), DONE)


def outcome(result: LoadTestResult) -> tuple[str | None, int]:
    """The kind of error of a single request, and how many chunks it got."""
    (record,) = result.records
    assert record.end_s is not None
    return record.error.kind if record.error else None, len(record.chunks_s)


def said(result: LoadTestResult) -> str:
    (record,) = result.records
    assert record.error is not None
    assert "\n" not in record.error.message
    return record.error.message


def test_a_whole_answer() -> None:
    result = one(*WHOLE)
    assert outcome(result) == (None, 3)
    (record,) = result.records
    assert (record.status, record.finish_reason, record.output_tokens, record.prompt_tokens) == (200, "length", 3, 5)


def test_the_parts_of_an_answer_that_servers_leave_out() -> None:
    assert outcome(one(chunk("a"), chunk("b", "stop"))) == (None, 2)  # neither usage nor [DONE]
    assert outcome(one(chunk("a"), chunk("b", "stop")[:-2])) == (None, 2)  # nor the last blank line


@pytest.mark.parametrize("pieces", [(), (chunk("a"),), (chunk("a"), DONE), (usage(5, 0),), (b": keep-alive\n\n",)])
def test_a_stream_that_ends_before_the_answer_does(pieces: tuple[bytes, ...]) -> None:
    result = one(*pieces)
    assert outcome(result) == ("closed", sum(piece == chunk("a") for piece in pieces))
    assert "without a finish_reason" in said(result)


def test_a_connection_that_breaks_keeps_what_came() -> None:
    result = one(chunk("a"), chunk("b"), then=broken)
    assert outcome(result) == ("closed", 2)
    assert "peer closed connection" in said(result)
    assert result.records[0].output_tokens == 2


def test_a_connection_that_breaks_after_the_answer_harms_nobody() -> None:
    assert outcome(one(*WHOLE[:3], then=broken)) == (None, 3)
    assert outcome(one(*WHOLE, then=broken)) == (None, 3)


def test_an_error_inside_the_stream_counts_although_the_status_was_200() -> None:
    result = one(chunk("a"), event({"error": {"message": "engine died", "code": 500}}), DONE)
    assert outcome(result) == ("in-band", 1)
    assert said(result) == "engine died"


@pytest.mark.parametrize(
    "junk", [b"data: {\n\n", b"data: nonsense\n\n", b"<html>Bad gateway</html>", b'{"choices": []}']
)
def test_malformed_answers(junk: bytes) -> None:
    assert outcome(one(junk)) == ("malformed", 0)


def test_a_malformed_event_ends_a_stream_that_goes_on_for_ever() -> None:
    result = one(chunk("a"), b"data: {\n\n", then=never)
    assert outcome(result) == ("malformed", 1)
    assert result.seconds == 0


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503, 302])
def test_refusals_have_the_servers_words(status: int) -> None:
    result = one(json.dumps({"error": {"message": "why\nnot"}}).encode(), status=status)
    assert outcome(result) == (f"http-{status}", 0)
    assert said(result) == "why not"
    assert result.records[0].status == status


def test_a_refusal_that_never_ends() -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 4096

    result = one(status=500, then=endless)
    assert outcome(result) == ("http-500", 0)
    assert len(said(result)) < 400


async def tokens_for_ever() -> AsyncIterator[bytes]:
    while True:
        await asyncio.sleep(1.0)
        yield chunk("x")


async def comments_for_ever() -> AsyncIterator[bytes]:
    while True:
        await asyncio.sleep(1.0)
        yield b": keep-alive\n\n"


def test_a_stream_that_never_ends_is_given_up() -> None:
    result = one(then=tokens_for_ever, silence_s=5.0, limit_s=20.5)
    assert outcome(result) == ("timeout", 20)
    assert "not over after 20.5 s" in said(result)
    assert result.seconds == pytest.approx(20.5)


def test_comments_keep_a_request_alive_but_not_for_ever() -> None:
    result = one(then=comments_for_ever, silence_s=5.0, limit_s=20.5)
    assert outcome(result) == ("timeout", 0)
    assert result.seconds == pytest.approx(20.5)


def test_silence_is_given_up_earlier() -> None:
    result = one(chunk("a"), then=never, silence_s=5.0, limit_s=100.0)
    assert outcome(result) == ("timeout", 1)
    assert "nothing came for 5 s" in said(result)
    assert 5.0 <= result.seconds <= 5.25


def test_a_server_that_never_answers_at_all() -> None:
    async def hangs(asked: dict[str, Any]) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError

    target = Target("http://s", "m", dialect=PLAIN, silence_s=5.0)
    result = run_virtually(run(target, Load(requests=1, workload="fixed:5/3", warmup=0), transport=InProcess(hangs)))
    assert outcome(result) == ("timeout", 0)
    assert result.records[0].headers_s is None
    with pytest.raises(MeasureError, match="cannot be reached"):
        run_virtually(run(Target("http://s", "m", silence_s=5.0), Load(requests=1), transport=InProcess(hangs)))


@pytest.mark.parametrize("over", [WHOLE, WHOLE[:3]])
def test_a_stream_left_open_after_the_answer_is_closed_by_us(over: tuple[bytes, ...]) -> None:
    result = one(*over, then=never)
    assert outcome(result) == (None, 3)
    assert 5.0 <= result.seconds <= 5.25
    assert result.records[0].e2e == 0


def test_one_slow_request_does_not_hold_up_the_others() -> None:
    server = Scripted(lambda number, asked: [90.0 if number == 0 else 1.0] * asked["max_tokens"])
    result = load_tested(server, Load(requests=9, concurrency=2, workload="fixed:4/2", warmup=0), limit_s=10.0)
    assert [record.error.kind if record.error else None for record in result.records] == ["timeout"] + [None] * 8
    assert result.seconds == pytest.approx(14.0)  # five of 2 s beside it, then two and one


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[tuple[str, asyncio.Server]]:
    """A raw server on loopback: its address, and itself. At the end every connection is over."""
    busy: set[asyncio.Task[None]] = set()

    async def tracked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        busy.add(task)
        try:
            await handler(reader, writer)
        finally:
            writer.close()
            busy.discard(task)

    server = await asyncio.start_server(tracked, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", server
    finally:
        server.close()
        async with asyncio.timeout(30):  # each ends when the client has closed its connection
            await asyncio.gather(*busy)


def on_a_socket(handler: Handler, load: Load) -> LoadTestResult:
    """The result of a load test against a raw server on loopback."""

    async def go() -> LoadTestResult:
        async with serving(handler) as (url, _):
            return await run(Target(url, "m", dialect=PLAIN), load)

    return asyncio.run(go())


async def read_request(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The JSON of the next request on a connection; None when it is closed."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    found: dict[str, Any] = json.loads(await reader.readexactly(int(length.split(b":")[1])))
    return found


def http(*pieces: bytes) -> bytes:
    framed = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (*pieces,) if piece)
    return (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        + framed
        + b"0\r\n\r\n"
    )


@pytest.mark.parametrize(
    ("capture", "kind", "chunks", "tokens"),
    [
        ("timed_vllm_chat", None, 8, 8),
        ("timed_tf_chat", None, 8, 8),
        ("timed_llama_chat", None, 8, 8),
        ("kill_vllm_sigterm_stream", "in-band", 53, 53),
        ("kill_vllm_sigkill_stream", "closed", 51, 51),
        ("kill_tf_sigkill_stream", "closed", 29, 29),
    ],
)
def test_captured_responses_over_a_socket(capture: str, kind: str | None, chunks: int, tokens: int) -> None:
    async def replay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write((TIMED / f"{capture}.http.raw").read_bytes())

    result = on_a_socket(replay, Load(requests=1, workload="fixed:5/8", warmup=0))
    assert outcome(result) == (kind, chunks)
    assert result.records[0].output_tokens == tokens


@pytest.mark.parametrize(
    ("capture", "kind", "chunks", "tokens"),
    [
        ("kill_llama_sigterm_stream", "closed", 21, 21),  # 30 s of silence, a comment, the end without the last chunk
        ("kill_vllm_sigterm_stream", "in-band", 53, 53),
        ("kill_vllm_sigkill_stream", "closed", 51, 51),
        ("kill_tf_sigkill_stream", "closed", 29, 29),
        ("kill_tf_sigterm_stream", None, 20, 300),  # let its streams finish; 280 chunks are cut from the file
        ("kill_vllm_sigterm_drain_stream", None, 19, 200),  # the same, 181 chunks
        ("timed_vllm_chat", None, 8, 8),
        ("timed_vllm_chat_long", None, 4, 4),
        ("timed_vllm_comp_long", None, 8, 8),
        ("timed_tf_chat", None, 8, 8),
        ("timed_llama_chat", None, 8, 8),
    ],
)
def test_captured_timings_in_virtual_time(capture: str, kind: str | None, chunks: int, tokens: int) -> None:
    """The first chunk that is no role comes when the capture says it came."""
    lines = [json.loads(line) for line in (TIMED / f"{capture}.jsonl").read_text("utf8").splitlines()]
    data = [(line["t"], line["data"]) for line in lines if "data" in line]

    async def answer(asked: dict[str, Any]) -> Reply:
        async def stream() -> AsyncIterator[bytes]:
            for time, text in data:
                await asyncio.sleep(time - asyncio.get_running_loop().time())
                yield text.encode()

        return Reply(stream())

    target = Target("http://s", "m", endpoint="chat", dialect=PLAIN)
    result = run_virtually(run(target, Load(requests=1, workload="fixed:5/8", warmup=0), transport=InProcess(answer)))
    assert outcome(result) == (kind, chunks)
    first = next(time for time, text in data if '"role"' not in text.split("\n\n")[-2] and '"choices"' in text)
    assert result.records[0].ttft == pytest.approx(first)
    assert result.records[0].output_tokens == tokens


class Keeping:
    """A server that keeps connections; what it does with a request depends on how many came on that connection."""

    def __init__(self, *then: str) -> None:
        self.then, self.connections, self.requests = then, 0, 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = 0
        while await read_request(reader) is not None:
            self.requests += 1
            does = self.then[min(number, len(self.then) - 1)]
            number += 1
            if does == "answer":
                writer.write(http(*WHOLE))
            elif does == "half":
                writer.write(http(*WHOLE)[:300])
            if does != "answer":
                break


def test_connections_are_used_again() -> None:
    server = Keeping("answer")
    result = on_a_socket(server, Load(requests=10, concurrency=2, workload="fixed:5/3", warmup=0))
    assert len(result.completed) == 10
    assert (server.connections, server.requests) == (2, 10)


def test_a_stale_connection_is_replaced_once_and_nothing_is_counted_twice() -> None:
    """llama.cpp's server promises to keep a connection and closes it after a streamed answer."""
    server = Keeping("answer", "close")
    result = on_a_socket(server, Load(requests=6, workload="fixed:5/3", warmup=0))
    assert len(result.completed) == len(result.records) == 6
    assert [record.resent for record in result.records] == [False, True, True, True, True, True]
    assert result.report()["errors"] == {}


def test_a_fresh_connection_that_closes_is_a_failure_and_not_tried_again() -> None:
    server = Keeping("close")
    result = on_a_socket(server, Load(requests=3, workload="fixed:5/3", warmup=0))
    assert [record.error.kind if record.error else None for record in result.records] == ["closed"] * 3
    assert server.requests == 3
    assert not any(record.resent for record in result.records)


def test_what_has_begun_is_never_sent_again() -> None:
    server = Keeping("answer", "half")
    result = on_a_socket(server, Load(requests=2, workload="fixed:5/3", warmup=0))
    assert [record.error.kind if record.error else None for record in result.records] == [None, "closed"]
    assert server.requests == 2


def test_many_at_once_over_sockets_lose_and_double_nothing() -> None:
    server = Keeping("answer")
    result = on_a_socket(server, Load(requests=300, concurrency=60, workload="fixed:5/3", warmup=0))
    assert len(result.completed) == server.requests == 300
    assert sorted(record.id for record in result.records) == list(range(300))


def test_nobody_listens() -> None:
    async def go() -> LoadTestResult:
        async with serving(Keeping("answer")) as (url, _):
            pass
        return await run(Target(url, "m", dialect=known), Load(requests=2, workload="fixed:5/3", warmup=0))

    known: Dialect | None = PLAIN
    result = asyncio.run(go())
    assert result.report()["errors"] == {"refused": 2}
    known = None
    with pytest.raises(MeasureError, match=r"http://127.0.0.1:\d+/v1/completions cannot be reached \(refused"):
        asyncio.run(go())


def test_the_server_dies_in_the_middle_and_the_report_is_complete() -> None:
    """Two places; the server answers three requests and then is gone."""
    server = Keeping("answer")
    listening: list[asyncio.Server] = []

    async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await read_request(reader) is not None:
            server.requests += 1
            if server.requests > 3:
                listening[0].close()
                break
            writer.write(http(*WHOLE))

    async def go() -> LoadTestResult:
        load = Load(requests=20, concurrency=2, workload="fixed:5/3", warmup=0)
        async with serving(dies) as (url, listener):
            listening.append(listener)
            return await run(Target(url, "m", dialect=PLAIN), load)

    found = asyncio.run(go()).report()
    assert found["requests"] == 20
    assert found["completed"] == 3
    assert sum(found["errors"].values()) == 17
    assert found["errors"]["refused"] >= 14


def test_it_is_no_http_at_all() -> None:
    async def ssh(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")

    assert outcome(on_a_socket(ssh, Load(requests=1, workload="fixed:5/3", warmup=0)))[0] == "closed"


def test_a_compressed_stream_is_read() -> None:
    import gzip

    async def zipped(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(http(gzip.compress(b"".join(WHOLE))).replace(b"chunked", b"chunked\r\ncontent-encoding: gzip"))

    async def junk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(http(b"no gzip").replace(b"chunked", b"chunked\r\ncontent-encoding: gzip"))

    load = Load(requests=1, workload="fixed:5/3", warmup=0)
    assert outcome(on_a_socket(zipped, load)) == (None, 3)
    assert outcome(on_a_socket(junk, load)) == ("malformed", 0)


@pytest.mark.parametrize(
    ("url", "endpoint", "address"),
    [
        ("http://h:8000", "completions", "http://h:8000/v1/completions"),
        ("http://h:8000/", "chat", "http://h:8000/v1/chat/completions"),
        ("http://h:8000/v1", "chat", "http://h:8000/v1/chat/completions"),
        ("http://h:8000/v1/chat/completions", "chat", "http://h:8000/v1/chat/completions"),
        ("http://h:8000/v1/chat/completions", "completions", "http://h:8000/v1/completions"),
        ("https://h/openai/v1/", "completions", "https://h/openai/v1/completions"),
    ],
)
def test_where_requests_go(url: str, endpoint: str, address: str) -> None:
    assert Target(url, "m", endpoint).address == address


@pytest.mark.parametrize("url", ["", "h:8000", "ftp://h", "http://", "http://h:99999", "http://h:0", "http://a:b@h"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="write an address such as"):
        Target(url, "m")


def test_other_targets_that_are_none() -> None:
    with pytest.raises(ConfigError, match="endpoint is 'chats'; it must be one of chat, completions"):
        Target("http://h", "m", "chats")
    with pytest.raises(ConfigError, match="both must be above 0"):
        Target("http://h", "m", silence_s=0)
    with pytest.raises(ConfigError, match="API key") as refused:
        Target("http://h", "m", api_key="se\ncret")
    assert "cret" not in str(refused.value)


def test_the_key_is_sent_and_never_shown() -> None:
    keys: list[str | None] = []

    class Seen(InProcess):
        async def handle_async_request(self, request: Any) -> Any:
            keys.append(request.headers.get("authorization"))
            return await super().handle_async_request(request)

    async def answer(asked: dict[str, Any]) -> Reply:
        return Reply(body(WHOLE))

    for key in ("k-123", None):
        target = Target("http://s", "m", dialect=PLAIN, api_key=key)
        result = run_virtually(run(target, Load(requests=1, workload="fixed:5/3", warmup=0), transport=Seen(answer)))
        assert "k-123" not in json.dumps(result.to_json()) + result.markdown() + repr(target)
    assert keys == ["Bearer k-123", None]


def test_what_is_left_out_after_a_refusal() -> None:
    everything = Dialect(token_ids=True)
    assert simpler(everything, "Unexpected field: min_tokens") == Dialect(True, True, False)
    assert simpler(everything, "stream_options is unknown") == Dialect(True, False, True)
    assert simpler(everything, "prompt must be a string.") == Dialect(False, True, True)
    assert simpler(everything, "?") == Dialect(True, True, False)
    assert simpler(Dialect(True, True, False), "?") == Dialect(True, False, False)
    assert simpler(Dialect(True, False, False), "?") == Dialect(False, False, False)
    assert simpler(Dialect(False, False, False), "prompt") is None


def test_a_record_of_a_request_that_was_never_sent() -> None:
    record = Record(0, 1.0, 4, 2)
    assert (record.ttft, record.tpot, record.e2e, record.itl, record.send_lag) == (None, None, None, [], None)
    assert not record.completed


def test_tpot_needs_two_tokens_and_two_chunks() -> None:
    assert Record(0, 0.0, 4, 2, chunks_s=[1.0], output_tokens=1).tpot is None
    assert Record(0, 0.0, 4, 2, chunks_s=[1.0], output_tokens=64).tpot is None
    assert Record(0, 0.0, 4, 2, chunks_s=[1.0, 2.0], output_tokens=5).tpot == 0.25
    assert steady(1.0, 0.5)(0, {"max_tokens": 3}) == [1.0, 0.5, 0.5]
