"""The load tester against a server on a socket that sends a token every 50 ms: does it report 50?

    python benchmarks/loadtest.py

prints what was reported as a ratio to what the server did, at concurrency 1, 100 and 200, and writes
``data/results/loadtest/mock-server.json``. The same with one connection pool of httpx for all requests shows why the
load tester has none. Client and server need a core each: on a busy machine both are late.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import httpx
import torch

from kvlab.measure.bench import provenance
from kvlab.measure.suite import write_result
from kvlab.operate.exchange import Dialect, Target
from kvlab.operate.in_process import event
from kvlab.operate.loadtest import run
from kvlab.operate.schedule import Load

OUT = Path(__file__).resolve().parents[1] / "data" / "results" / "loadtest" / "mock-server.json"
DELAY_S, CONCURRENCY = 0.05, (1, 100, 200)
#: Answers of different lengths: places do not come free all at once.
WORKLOAD = "uniform:8-8/10-50"


def main() -> None:
    """Start the server in a process of its own, load it, print ratios, write them down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help="be the server, and say its port")
    parser.add_argument("--out", type=Path, default=OUT, help="where the result goes")
    asked = parser.parse_args()
    if asked.serve:
        asyncio.run(serve())
        return
    before = os.getloadavg()[0]
    with Popen([sys.executable, __file__, "--serve"], stdout=PIPE, text=True) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        try:
            cases = [measured(url, concurrency, pool) for pool in (False, True) for concurrency in CONCURRENCY]
        finally:
            server.terminate()
    asked.out.parent.mkdir(exist_ok=True)
    command = {"command": "python benchmarks/loadtest.py", "delay_s": DELAY_S, "workload": WORKLOAD}
    label = {**provenance(torch.device("cpu")), **command, "load_average_before": before}
    write_result({**label, "cases": cases}, asked.out)


def measured(url: str, concurrency: int, pool: bool) -> dict[str, Any]:
    """What the load tester reports.

    Args:
        url: of the server.
        concurrency: places of the closed loop.
        pool: one pool of httpx for all, instead of a connection for each place.
    """
    unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    load = Load(requests=max(10, 4 * concurrency), concurrency=concurrency, workload=WORKLOAD, warmup=concurrency)
    target = Target(url, "mock", dialect=Dialect(token_ids=True))
    result = asyncio.run(run(target, load, transport=httpx.AsyncHTTPTransport(limits=unlimited) if pool else None))
    found = result.report()
    assert found["failed"] == 0, found["errors"]
    shown = {name: found[name] for name in ("ttft_s", "tpot_s", "itl_s", "send_lag_s", "loop_lag_s")}
    print(
        f"{'one pool ' if pool else 'our lanes'} {concurrency:4} at once: "
        + ", ".join(f"{name[:-2]} p50 x{shown[name]['p50'] / DELAY_S:.2f}" for name in ("ttft_s", "tpot_s", "itl_s"))
        + f"; ttft p50 {1e3 * (shown['ttft_s']['p50'] - DELAY_S):+.1f} ms; "
        + f"loop late p99 {1e3 * shown['loop_lag_s']['p99']:.1f} ms; {found['output_tokens_per_s']:,.0f} chunks/s"
    )
    return {"concurrency": concurrency, "one_pool": pool, "requests": load.requests, **shown}


async def serve() -> None:
    """Answer on a free port of loopback until somebody ends the process."""
    server = await asyncio.start_server(connection, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of a connection: a token every 50 ms, counted from the request, so that delays do not add up.

    Args:
        reader: of the connection.
        writer: of the connection.
    """
    loop = asyncio.get_running_loop()
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            begun = loop.time()
            asked = await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
            tokens = int(asked.split(b'"max_tokens": ')[1].split(b",")[0])
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for index in range(tokens):
                await asyncio.sleep(begun + DELAY_S * (index + 1) - loop.time())
                writer.write(
                    framed({"choices": [{"text": "x", "finish_reason": None if index < tokens - 1 else "length"}]})
                )
            writer.write(
                framed({"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": tokens}}) + b"0\r\n\r\n"
            )
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def framed(value: dict[str, Any]) -> bytes:
    """An event as one HTTP chunk.

    Args:
        value: of the event.
    """
    data = event(value)
    return b"%x\r\n%s\r\n" % (len(data), data)


if __name__ == "__main__":
    main()
