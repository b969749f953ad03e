"""Decode steps in buckets, compiled, against plain ones: DEVICE BACKEND; prints compiled graphs and the difference.

A process of its own: the run-time checks of shapes that the tests turn on cannot be compiled.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from kvlab.cache import ContiguousCache, make_cache
from kvlab.generation import FixedDecode, decode, prefill
from toys import random_gpt, small_config


def main(place: str, backend: str) -> None:
    graphs = []

    def counting(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        if backend == "eager":
            return module.forward
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(module, inputs)

    device, config = torch.device(place), small_config()
    model = random_gpt(config, torch.float32).to(device)
    caches = [make_cache("contiguous", config, 1, 16, model.dtype, device) for _ in range(2)]
    tokens = torch.randint(61, (1, 16), generator=torch.Generator().manual_seed(3))
    for cache in caches:
        prefill(model, tokens[:, :11], cache)
    fixed, plain = caches
    assert isinstance(fixed, ContiguousCache)
    want = [decode(model, tokens[:, at], plain) for at in range(11, 16)]
    model.run = torch.compile(model.run, backend=counting)  # type: ignore[method-assign]
    step = FixedDecode(model, fixed, bucket=4)
    off = [(step(tokens[:, at]) - want[at - 11]).abs().max().item() for at in range(11, 16)]
    print(len(graphs), max(off))


if __name__ == "__main__":
    main(*sys.argv[1:])
