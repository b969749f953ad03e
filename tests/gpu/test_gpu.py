"""A GPU gives what the CPU gives: every mode, every dtype, graphs, compiled code, memory, the clock.

Each check that can run on the CPU also runs there, against float64, so that its own logic is proved without a GPU.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu_line import gpu_line
from kvlab.cache import ContiguousCache, make_cache, positions_from_mask
from kvlab.cost import activation_bytes, kv_bytes, prefill_pass, weight_bytes
from kvlab.devices import dtype_name, pick_dtype
from kvlab.generation import FixedDecode, decode, generate, prefill
from kvlab.model import GPT
from kvlab.timing import clock_for, interleave
from toys import random_gpt, small_config

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"position": "learned", "norm": "layernorm", "activation": "gelu_tanh", "gated_mlp": False,
             "n_kv_head": 6, "qkv_bias": True, "mlp_bias": True, "tie_embeddings": True},
    "llama": {},
    "mistral": {"windows": (5, 5)},
    "mixed windows": {"windows": (5, None)},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 16},
}  # fmt: skip
PROMPT, NEW = 11, 5


def there(device: torch.device, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[GPT, GPT]:
    """A model on a device, and its float64 original on the CPU."""
    exact = random_gpt(small_config(**changes), torch.float64)
    twin = GPT(exact.config)
    twin.load_state_dict(exact.state_dict(), strict=False)
    return twin.to(device, dtype).eval().requires_grad_(False), exact


def cache_for(model: GPT, batch: int, max_len: int = PROMPT + NEW) -> ContiguousCache:
    cache = make_cache("contiguous", model.config, batch, max_len, model.dtype, model.device)
    assert isinstance(cache, ContiguousCache)
    return cache


def some_tokens(batch: int, time: int = PROMPT + NEW) -> Tensor:
    return torch.randint(61, (batch, time), generator=torch.Generator().manual_seed(3))


def in_modes(model: GPT) -> dict[str, Tensor]:
    """Logits of the same tokens, whole, in chunks, one by one, and of rows of different lengths, on the host."""
    tokens, alone = some_tokens(2).to(model.device), cache_for(model, 2)
    with torch.inference_mode():
        found = {"whole": model(tokens)}
        found["chunks"] = torch.cat([model(part, alone) for part in tokens.split([4, 1, 6, 5], dim=1)], dim=1)
    by_steps = cache_for(model, 2)
    steps = [prefill(model, tokens[:, :PROMPT], by_steps)]
    steps += [decode(model, tokens[:, at], by_steps) for at in range(PROMPT, PROMPT + NEW)]
    found["prefill, then decode"] = torch.stack(steps, dim=1)
    ragged, mask = cache_for(model, 2), torch.arange(PROMPT) >= torch.tensor([[0], [4]])
    rows = [prefill(model, tokens[:, :PROMPT], ragged, positions_from_mask(mask, [0, 0]))]
    rows += [decode(model, tokens[:, at], ragged) for at in range(PROMPT, PROMPT + NEW)]
    found["ragged rows"] = torch.stack(rows, dim=1)
    return {name: logits.double().cpu() for name, logits in found.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_mode_gives_what_float64_on_the_cpu_gives(device: torch.device, family: str) -> None:
    model, exact = there(device, **FAMILIES[family])
    want = in_modes(exact)
    for mode, got in in_modes(model).items():
        torch.testing.assert_close(got, want[mode], rtol=0, atol=1e-3, msg=lambda text, at=mode: f"{at}: {text}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_name)
def test_sixteen_bits_lose_what_their_fraction_says(device: torch.device, dtype: torch.dtype) -> None:
    """Mean errors, against the spread of the logits: some units of the last place, and float16 has three bits more."""
    model, exact = there(device, dtype)
    want, spread = in_modes(exact), in_modes(exact)["whole"].std()
    for mode, got in in_modes(model).items():
        assert 0 < (got - want[mode]).abs().mean() / spread < 8 * torch.finfo(dtype).eps, mode


def test_the_dtype_that_is_picked_runs(device: torch.device) -> None:
    dtype = pick_dtype(device)
    if device.type == "cuda":
        assert dtype != torch.bfloat16 or torch.cuda.get_device_capability(device) >= (8, 0)
    model, _ = there(device, dtype)
    answer = generate(model, some_tokens(1)[0, :PROMPT].tolist(), max_new_tokens=NEW, ignore_eos=True).run()
    assert len(answer.tokens[0]) == NEW


def test_greedy_tokens_are_those_of_the_cpu(device: torch.device) -> None:
    model, exact = there(device)
    prompts = [some_tokens(1)[0, :length].tolist() for length in (3, 9, PROMPT)]
    got, want = (generate(one, prompts, max_new_tokens=24, ignore_eos=True).run().tokens for one in (model, exact))
    assert got == want


def test_a_poisoned_slot_that_nobody_can_reach_changes_nothing(device: torch.device) -> None:
    model, _ = there(device)
    clean, poisoned = cache_for(model, 1), cache_for(model, 1)
    poisoned.storage.fill_(float("nan"))
    tokens = some_tokens(1)[:, :PROMPT]
    torch.testing.assert_close(prefill(model, tokens, poisoned), prefill(model, tokens, clean), rtol=0, atol=0)
    token = torch.tensor([1])
    torch.testing.assert_close(decode(model, token, poisoned), decode(model, token, clean), rtol=0, atol=0)


def answers(model: GPT, batch: int, record: bool) -> tuple[list[list[int]], ContiguousCache]:
    """Greedy tokens by steps of one shape, the plain way when nothing is recorded."""
    cache = cache_for(model, batch, max_len=40)
    tokens = prefill(model, some_tokens(batch)[:, :PROMPT], cache).argmax(dim=1)
    step = FixedDecode(model, cache)
    if record:
        step.record()
    found = [tokens.tolist()]
    for _ in range(40 - PROMPT):
        tokens = step(tokens).argmax(dim=1)
        found.append(tokens.tolist())
    return found, cache


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_one_shape_gives_the_tokens_of_the_plain_one(device: torch.device, family: str, batch: int) -> None:
    """On a GPU it is a recorded graph that answers."""
    model, exact = there(device, **FAMILIES[family])
    found, cache = answers(model, batch, record=device.type == "cuda")
    plain = cache_for(exact, batch, max_len=40)
    tokens = prefill(exact, some_tokens(batch)[:, :PROMPT], plain).argmax(dim=1)
    want = [tokens.tolist()]
    for _ in range(40 - PROMPT):
        tokens = decode(exact, tokens, plain).argmax(dim=1)
        want.append(tokens.tolist())
    assert found == want
    assert cache.rows_seen == [40] * batch


@pytest.mark.parametrize(("dtype", "off"), [(torch.float16, 2e-2), (torch.float32, 1e-4)])
def test_a_graph_gives_the_logits_of_the_same_step_run_eagerly(
    gpu: torch.device, dtype: torch.dtype, off: float
) -> None:
    model, _ = there(gpu, dtype)
    eager, graphed = cache_for(model, 2), cache_for(model, 2)
    for cache in (eager, graphed):
        prefill(model, some_tokens(2)[:, :PROMPT], cache)
    by_hand, recorded = FixedDecode(model, eager), FixedDecode(model, graphed)
    recorded.record()
    for at in range(NEW):
        tokens = some_tokens(2)[:, at].to(gpu)
        torch.testing.assert_close(recorded(tokens), by_hand(tokens), rtol=0, atol=off)
    torch.testing.assert_close(graphed.storage, eager.storage, rtol=0, atol=off)


def test_recording_does_not_disturb_the_cache(gpu: torch.device) -> None:
    model, _ = there(gpu)
    cache = cache_for(model, 1)
    prefill(model, some_tokens(1)[:, :PROMPT], cache)
    held = cache.storage[..., :PROMPT, :].clone()
    FixedDecode(model, cache).record()
    assert torch.equal(cache.storage[..., :PROMPT, :], held)
    assert cache.tokens_seen == PROMPT


def compiled_steps(device: torch.device, backend: str) -> tuple[int, float]:
    """Graphs that were compiled for five steps, and the greatest difference from plain ones."""
    script = Path(__file__).with_name("compiled_steps.py")
    environment = {**os.environ, "PYTHONPATH": str(script.parents[1])}
    command = [sys.executable, str(script), device.type, backend]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    graphs, off = done.stdout.split()
    return int(graphs), float(off)


def test_steps_are_compiled_once_a_bucket(device: torch.device) -> None:
    """Five steps over two buckets of keys: two graphs, not five."""
    graphs, off = compiled_steps(device, "eager")
    assert graphs == 2
    assert off < 1e-3


def test_inductor_gives_what_eager_gives(gpu: torch.device) -> None:
    graphs, off = compiled_steps(gpu, "inductor")
    assert graphs == 2
    assert off < 1e-3


def test_allocated_kv_bytes_equal_the_formula(device: torch.device) -> None:
    model, _ = there(device, torch.float16)
    cache = cache_for(model, 3, max_len=32)
    formula = kv_bytes(model.config, [32] * 3, "float16", honour_windows=False)
    assert cache.nbytes == cache.storage.nbytes == formula
    prefill(model, some_tokens(3)[:, :PROMPT], cache)
    assert cache.used_bytes == kv_bytes(model.config, [PROMPT] * 3, "float16", honour_windows=False)


def test_the_device_gives_as_many_bytes_as_the_formula_says(gpu: torch.device) -> None:
    """torch hands out blocks of 512 bytes: the cache is one tensor, and may be rounded up once."""
    config = small_config(max_seq_len=4096)
    before = torch.cuda.memory_allocated(gpu)
    cache = make_cache("contiguous", config, 4, 4096, torch.float16, gpu)
    took = torch.cuda.memory_allocated(gpu) - before
    assert cache.nbytes == kv_bytes(config, [4096] * 4, "float16") <= took < cache.nbytes + 512


def test_the_peak_of_a_prompt_stays_within_the_formula(gpu: torch.device) -> None:
    """Weights, cache and activations as they are counted, with room for what a library keeps to itself."""
    config = small_config(
        n_head=8, n_kv_head=2, head_dim=64, hidden_size=512, intermediate_size=1536, vocab_size=8192, max_seq_len=2048
    )
    gc.collect()
    before = torch.cuda.memory_allocated(gpu)
    model = random_gpt(config, torch.float32).to(gpu, torch.float16)
    cache = make_cache("contiguous", config, 1, 2048, torch.float16, gpu)
    weights = torch.cuda.memory_allocated(gpu) - before - cache.nbytes
    assert weight_bytes(config, "float16") <= weights <= 1.1 * weight_bytes(config, "float16") + 2**20
    tokens = torch.zeros(1, 2048, dtype=torch.long, device=gpu)
    prefill(model, tokens[:, :16], cache)  # libraries take their workspaces
    cache.reset()
    held = torch.cuda.memory_allocated(gpu)
    torch.cuda.reset_peak_memory_stats(gpu)
    prefill(model, tokens, cache)
    passing = torch.cuda.max_memory_allocated(gpu) - held
    # A matrix of scores, 8 heads x 2,048 x 2,048 in two bytes, would be 64 MiB beside this.
    assert passing <= 2 * activation_bytes(config, prefill_pass(2048), "float16")


def test_a_graph_holds_memory_of_its_own(gpu: torch.device) -> None:
    """The price of a graph: its intermediate results stay allocated between calls."""
    model, _ = there(gpu)
    cache = cache_for(model, 1)
    prefill(model, some_tokens(1)[:, :PROMPT], cache)
    step = FixedDecode(model, cache)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved(gpu)
    step.record()
    assert torch.cuda.memory_reserved(gpu) > before


def test_the_clock_waits_for_the_device(device: torch.device) -> None:
    """Work that is queued and not done would seem to cost nothing, however much of it there is."""
    size = 2048 if device.type == "cuda" else 256
    x = torch.ones(size, size, device=device) / size

    def products(times: int) -> Tensor:
        y = x
        for _ in range(times):
            y = x @ y
        return y

    few, many = (
        interleave({"few": lambda: products(4), "many": lambda: products(400)}, clock_for(device))[name].best
        for name in ("few", "many")
    )
    assert many > 8 * few
    clock = clock_for(device)
    products(400)
    clock.synchronise()
    start = clock.read()
    clock.synchronise()
    assert clock.read() - start < many / 2  # nothing was left in the queue


def test_what_was_not_run_is_said_in_one_line() -> None:
    assert gpu_line(2, ["tests/gpu/test_gpu.py::test[cpu]"]) == "GPU tests: 2 not run, no CUDA device"
    assert gpu_line(0, ["tests/test_cli.py::test"]) == ""
