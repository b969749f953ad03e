"""A million tokens from the tiny model through attention sinks: is memory flat, is time flat, does anything drift?

    python benchmarks/endless.py

takes about an hour on one core and writes ``data/results/streaming/endless.json``; ``--tokens 20000`` takes a minute.

Drift is what rounding adds up to. A cache that has come far is compared with a new one that reads only what the far one
can still know: the sinks, and as many tokens before the last as the layers reach back together. The difference of their
logits would grow if errors did.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import deque
from pathlib import Path
from typing import Any

import torch

import kvlab
from kvlab.cache import StreamingCache
from kvlab.generation import Sampler, Sampling, decode, prefill
from kvlab.measure.bench import provenance
from kvlab.measure.suite import write_result
from kvlab.model import GPT
from kvlab.timing import clock_for

OUT = Path(__file__).resolve().parents[1] / "data" / "results" / "streaming" / "endless.json"
PROMPT = "O Romeo, Romeo, wherefore art thou Romeo?"


def main() -> None:
    """Generate, look at every block of tokens, write."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--tokens", type=int, default=1_000_000, help="to generate (1000000)")
    made.add_argument("--blocks", type=int, default=20, help="lines of the result (20)")
    made.add_argument("--sinks", type=int, default=4, help="(4)")
    made.add_argument("--window", type=int, default=252, help="(252)")
    made.add_argument("--threads", type=int, default=1, help="a small model gains nothing from more (1)")
    made.add_argument("--json", type=Path, default=OUT, metavar="OUT", help=f"({OUT.name} under data/results)")
    options = made.parse_args()
    if options.tokens < options.blocks or options.blocks < 1:
        made.error("--blocks is 1 or more, and --tokens as many at least")
    torch.set_num_threads(options.threads)
    lm = kvlab.load("tiny", device="cpu", dtype="float32")
    cache = StreamingCache(lm.config, 1, torch.float32, sinks=options.sinks, window=options.window)
    try:
        blocks = list(run(lm.model, lm.tokenizer.encode(PROMPT), cache, options.tokens, options.blocks))
    except KeyboardInterrupt:
        raise SystemExit("stopped; nothing was written") from None
    result = {
        **provenance(torch.device("cpu")),
        "command": " ".join(["python", "benchmarks/endless.py", *sys.argv[1:]]),
        "model": "tiny", "dtype": "float32", "threads": options.threads,
        "sinks": options.sinks, "window": options.window, "blocks": blocks,
    }  # fmt: skip
    write_result(result, options.json)
    print(f"written: {options.json}")


def run(model: GPT, prompt: list[int], cache: StreamingCache, tokens: int, blocks: int) -> Any:
    """Generate so many tokens at temperature 1, and say of each block what it took.

    Args:
        model: the decoder.
        prompt: ids.
        cache: empty.
        tokens: in all.
        blocks: equal parts of them.
    """
    clock, sampler = clock_for(model.device), Sampler([Sampling(temperature=1.0, seed=0)])
    first, newest = prompt[: cache.sinks], deque(prompt, maxlen=model.config.n_layer * cache.slots)
    logits = prefill(model, torch.tensor([prompt]), cache)
    for block in range(blocks):
        size = tokens * (block + 1) // blocks - tokens * block // blocks
        surprise, began = 0.0, clock.now()
        for _ in range(size):
            [token] = sampler(logits)
            surprise -= logits.log_softmax(-1)[0, token].item()
            newest.append(token)
            logits = decode(model, torch.tensor([token]), cache)
        seconds = clock.now() - began
        line = {
            "tokens_seen": cache.tokens_seen, "tokens_held": cache.length, "kv_bytes": cache.nbytes,
            "rss_bytes": resident(), "ms_per_token": 1000 * seconds / size, "perplexity": math.exp(surprise / size),
            "drift": drift(model, first, list(newest), cache, logits),
        }  # fmt: skip
        print(", ".join(f"{name} {value:,.6g}" for name, value in line.items()), flush=True)
        yield line


def drift(model: GPT, first: list[int], newest: list[int], cache: StreamingCache, far: torch.Tensor) -> float:
    """Largest difference of a logit from that of a new cache which reads the sinks and the newest tokens.

    Args:
        model: the decoder.
        first: the sinks.
        newest: as many as the layers reach back, the last one included.
        cache: that has come far.
        far: its logits after the last token.
    """
    text = first + newest if cache.tokens_seen > len(newest) + len(first) else newest
    near = StreamingCache(model.config, 1, cache.dtype, sinks=cache.sinks, window=cache.window)
    return (prefill(model, torch.tensor([text]), near) - far).abs().max().item()


def resident() -> int:
    """Bytes of memory that this process has now."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system does not say how much memory a process has in /proc; run it on Linux")


if __name__ == "__main__":
    main()
