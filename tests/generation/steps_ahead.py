"""Decode steps compiled ahead of time, against plain ones; prints what came out as JSON.

A process of its own: the run-time checks of shapes that the tests turn on cannot be compiled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from kvlab import kernels
from kvlab.cache import (
    BlockPool,
    BlockStorage,
    ContiguousCache,
    RaggedBatch,
    Span,
    make_cache,
    positions_from_mask,
)
from kvlab.errors import KvlabError
from kvlab.generation import (
    CompiledDecode,
    CompiledPagedStep,
    compile_paged_step,
    compile_step,
    decode,
    generate,
    package,
    prefill,
)
from kvlab.model import GPT
from kvlab.quantize import Int4, quantize, row_aware
from kvlab.serving import Engine, ModelExecutor, Scheduler, TokenRequest
from toys import random_gpt, small_config

SHAPE = {
    "n_layer": 1, "n_head": 4, "n_kv_head": 2, "head_dim": 32, "hidden_size": 64, "intermediate_size": 96,
    "max_seq_len": 300,
}  # fmt: skip


def filled(model: GPT, lengths: list[int], max_len: int) -> ContiguousCache:
    cache = make_cache("contiguous", model.config, len(lengths), max_len, model.dtype)
    assert isinstance(cache, ContiguousCache)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(61, (len(lengths), max(lengths)), generator=generator)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    prefill(model, tokens, cache, positions_from_mask(mask, cache.rows_seen))
    return cache


def walk(model: GPT, step: CompiledDecode, lengths: list[int], max_len: int, count: int) -> dict[str, Any]:
    """Some steps, compiled and plain side by side: the largest difference, and what the caches hold at the end."""
    cache = filled(model, lengths, max_len)
    plain, off, size = cache.fork(), 0.0, 0.0
    tokens = torch.arange(len(lengths))
    for _ in range(count):
        got, want = step(tokens, cache), decode(model, tokens, plain)
        off, size = max(off, (got - want).abs().max().item()), max(size, want.abs().max().item())
        tokens = want.argmax(dim=1)
    stored = (cache.storage - plain.storage).abs().max().item()
    return {"off": off, "size": size, "stored": stored, "seen": cache.rows_seen, "plain": plain.rows_seen}


def walk_blocks(model: GPT, rows: int, block_size: int) -> dict[str, Any]:
    """Steps of a changing number of requests over blocks, compiled and plain side by side."""
    pool = BlockPool(120, block_size)
    ours, plain = (BlockStorage(model.config, pool, model.dtype) for _ in range(2))
    step, off, size = CompiledPagedStep(model, rows, ours), 0.0, 0.0
    tables, seen = [list[int]() for _ in range(rows)], [0] * rows
    for turn in range(40):
        who = [row for row in range(rows) if (turn + row) % 3 or turn < 2]
        for row in who:
            pool.extend(tables[row], seen[row], 1)
        spans = [Span(tables[row], seen[row], 1) for row in who]
        tokens = [(7 * turn + row) % 61 for row in who]
        got = step(tokens, RaggedBatch(model.config, ours, spans))
        batch = RaggedBatch(model.config, plain, spans)
        with torch.inference_mode():
            want = model.run(torch.tensor([tokens]), batch, batch.step(), last_only=True)[:, 0]
        off, size = max(off, (got - want).abs().max().item()), max(size, want.abs().max().item())
        seen = [count + (row in who) for row, count in enumerate(seen)]
    held = slice(0, ours.beyond)
    stored = (ours.slots[:, :, :, held] - plain.slots[:, :, :, held]).abs().max().item()
    return {"off": off, "size": size, "stored": stored, "seen": seen, "plain": seen}


def served(model: GPT, buckets: tuple[int, ...]) -> list[list[int]]:
    """What seven requests are answered by an engine that runs five of them at once."""
    pool = BlockPool(60, 4)
    engine = Engine(Scheduler(pool, token_budget=16, max_running=5), ModelExecutor(model, pool, buckets=buckets))
    requests = [TokenRequest.of(number, [number + 1] * (2 * number + 1), 9) for number in range(7)]
    for _ in engine.run((0.0, request) for request in requests):
        pass
    return [request.answer for request in requests]


def refusal(work: Callable[[], object]) -> str:
    try:
        work()
    except KvlabError as failure:
        return f"{type(failure).__name__}: {failure}"
    return "no refusal"


def main() -> None:
    kernels.enable()
    found: dict[str, Any] = {"kernels": kernels.enabled()}
    wide = row_aware(random_gpt(small_config(**SHAPE, tie_embeddings=True), torch.float32))
    found["missing"] = refusal(lambda: CompiledDecode(wide, 1))
    made = compile_step(wide, 1)
    found["again"] = compile_step(wide, 1) == made == package(wide, 1)
    one = CompiledDecode(wide, 1)
    # From one bucket of 128 keys to the next, and into a last one that is cut off by the cache's end.
    found["one row"] = walk(wide, one, [125], 131, 6)
    found["short cache"] = walk(wide, one, [3], 9, 6)
    found["long cache"] = walk(wide, one, [250], 300, 9)
    full = filled(wide, [5], 6)
    one(torch.tensor([1]), full)
    kept = full.storage.clone()
    found["full"] = refusal(lambda: one(torch.tensor([1]), full))
    found["full changed nothing"] = torch.equal(full.storage, kept) and full.rows_seen == [6]
    found["batch"] = refusal(lambda: one(torch.tensor([1, 2]), filled(wide, [5, 5], 9)))
    beyond = filled(wide, [299], 310)
    one(torch.tensor([1]), beyond)
    found["context"] = refusal(lambda: one(torch.tensor([1]), beyond))
    other = make_cache("contiguous", wide.config, 1, 9, torch.bfloat16)
    found["dtype"] = refusal(lambda: one(torch.tensor([1]), other))  # type: ignore[arg-type]
    found["shape"] = refusal(lambda: one(torch.tensor([1]), filled(random_gpt(small_config(), torch.float32), [5], 9)))

    # The package holds no weights: another model of the shape runs by it, and keeps its own.
    twin = row_aware(random_gpt(small_config(**SHAPE, tie_embeddings=True), torch.float32, seed=1))
    found["twin"] = walk(twin, CompiledDecode(twin, 1), [125], 131, 6)
    found["after the twin"] = walk(wide, one, [20], 40, 3)
    run = generate(wide, [1, 2, 3], max_new_tokens=20, compiled=one, ignore_eos=True).run()
    found["answers"] = run.tokens == generate(wide, [1, 2, 3], max_new_tokens=20, ignore_eos=True).run().tokens
    found["kind"] = refusal(lambda: generate(wide, [1], compiled=one, cache="int8"))

    shape = SHAPE | {"qkv_bias": True, "windows": (100,)}
    coded = quantize(random_gpt(small_config(**shape), torch.float32), Int4(32))
    compile_step(coded, 3)
    three = CompiledDecode(coded, 3)
    found["ragged rows"] = walk(coded, three, [126, 3, 40], 140, 9)
    found["even rows"] = walk(coded, three, [127, 127, 127], 140, 3)

    windowed = row_aware(random_gpt(small_config(**SHAPE | {"windows": (9,)}), torch.float32))
    found["no blocks"] = refusal(lambda: ModelExecutor(windowed, BlockPool(9, 4), buckets=(3,)))
    compile_paged_step(windowed, 3, 4)
    found["blocks"] = walk_blocks(windowed, 3, 4)
    found["served"] = served(windowed, (3,)) == served(windowed, ())
    storage = BlockStorage(windowed.config, BlockPool(9, 4), torch.float32)
    long = RaggedBatch(windowed.config, storage, [Span([0], 0, 2)])
    found["long span"] = refusal(lambda: CompiledPagedStep(windowed, 3, storage)([1, 2], long))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
