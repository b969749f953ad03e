"""Stock ``generate`` with a cache of kvlab gives what kvlab gives; also run under the oldest ``transformers``."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jaxtyping
import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvlab.cache import (
    ContiguousCache,
    HeavyHitterCache,
    KVCache,
    QuantizedCache,
    SnapKVCache,
    Step,
    StreamingCache,
    make_cache,
)
from kvlab.config import ModelConfig
from kvlab.errors import CacheFull, CannotCrop, ConfigError
from kvlab.generation import generate
from kvlab.interop import transformers as drop_in
from kvlab.interop.transformers import DropInCache, attention, heavy_hitter, quantized, snapkv, streaming
from kvlab.model import GPT
from kvlab.weights.layout import from_hf

SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SHAPE),
    "llama-3.1": transformers.LlamaConfig(
        **SHAPE, rope_parameters=LLAMA3 | {"rope_theta": 5e5, "original_max_position_embeddings": 32}
    ),
    "smollm2": transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "mistral": transformers.MistralConfig(**SHAPE, sliding_window=30, rope_parameters={"rope_theta": 1e6}),
    "qwen2": transformers.Qwen2Config(**{k: v for k, v in SHAPE.items() if k != "head_dim"} | {"hidden_size": 128}),
    "qwen3": transformers.Qwen3Config(**SHAPE),
}
GPT2 = transformers.GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=2, n_positions=128)
IMPLEMENTATIONS = ["eager", "sdpa"]
SINKS, WINDOW, ROOM = 4, 12, 128
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def stock(family: str = "llama", implementation: str = "sdpa", **changes: Any) -> Any:
    """A random model of transformers, whose attention is strong enough that a wrong position or mask shows."""
    torch.manual_seed(0)
    config = copy.deepcopy(GPT2 if family == "gpt2" else FAMILIES[family])
    for name, value in changes.items():
        setattr(config, name, value)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def ours(model: Any) -> GPT:
    """A kvlab decoder with the same weights."""
    config = ModelConfig.from_hf(model.config.to_dict())
    gpt = GPT(config)
    gpt.load_state_dict(from_hf(config, model.state_dict()), strict=False)
    return gpt.eval().requires_grad_(False)


KINDS: dict[str, tuple[Callable[[Any], DropInCache], Callable[[ModelConfig], KVCache]]] = {
    "streaming": (
        lambda model: streaming(model, sinks=SINKS, window=WINDOW),
        lambda config: StreamingCache(config, 1, torch.float32, sinks=SINKS, window=WINDOW),
    ),
    "window": (
        lambda model: streaming(model, sinks=0, window=WINDOW),
        lambda config: StreamingCache(config, 1, torch.float32, sinks=0, window=WINDOW),
    ),
    "int8": (
        lambda model: quantized(model, max_len=ROOM),
        lambda config: QuantizedCache(config, 1, ROOM, torch.float32),
    ),
    "int4": (
        lambda model: quantized(model, max_len=ROOM, bits=4, residual=0),
        lambda config: QuantizedCache(config, 1, ROOM, torch.float32, bits=4, residual=0),
    ),
    "h2o": (
        lambda model: heavy_hitter(model, heavy=6, recent=6),
        lambda config: HeavyHitterCache(config, 1, ROOM, torch.float32, heavy=6, recent=6),
    ),
    "snapkv": (
        lambda model: snapkv(model, budget=12, observed=4, pool=3),
        lambda config: SnapKVCache(config, 1, ROOM, torch.float32, budget=12, observed=4, pool=3),
    ),
}
#: Kinds that are right under the model's own attention.
PLAIN = ["streaming", "window", "int8", "int4"]


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def answer(model: Any, ids: Tensor | list[int], cache: DropInCache, new: int, **options: Any) -> list[list[int]]:
    """What ``generate`` of transformers adds to each row."""
    rows = torch.tensor([ids]) if isinstance(ids, list) else ids
    out = model.generate(rows, **cache.argument, max_new_tokens=new, **GREEDY, **options)
    return out[:, rows.shape[1] :].tolist()


def alone(model: Any, kind: str, ids: list[int], new: int) -> list[int]:
    """What kvlab's own engine answers with the same kind of cache."""
    gpt = ours(model)
    return generate(gpt, ids, max_new_tokens=new, ignore_eos=True, cache=KINDS[kind][1](gpt.config)).run().tokens[0]


def left_padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


def test_the_version_is_the_one_that_was_meant() -> None:
    assert transformers.__version__ == os.environ.get("KVLAB_TRANSFORMERS", transformers.__version__)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("family", "kind"),
    [*((family, "streaming") for family in FAMILIES), ("llama", "window"), ("mistral", "int8"), ("qwen3", "int4")],
)
def test_generate_equals_kvlab(family: str, kind: str, implementation: str) -> None:
    """Plain use: the prompt fits, and the answer runs far past what is held."""
    model = stock(family, implementation)
    assert answer(model, prompt(9), KINDS[kind][0](model), 50) == [alone(model, kind, prompt(9), 50)]


@pytest.mark.parametrize(
    ("family", "kind", "length"),
    [
        *((family, "streaming", 50) for family in FAMILIES), ("llama", "window", 50), ("mistral", "int8", 50),
        *((family, kind, 50) for family in FAMILIES if family != "mistral" for kind in ("h2o", "snapkv")),
        ("qwen2", "streaming", 9), ("llama", "h2o", 5), ("llama", "h2o", 1), ("llama", "snapkv", 5),
    ],
)  # fmt: skip
def test_generate_inside_the_block_equals_kvlab(family: str, kind: str, length: int) -> None:
    """Prompts longer than what is held, and shorter ones."""
    model = stock(family, "eager")
    with attention(model, KINDS[kind][0](model)) as cache:
        got = answer(model, prompt(length), cache, 40)
    assert got == [alone(model, kind, prompt(length), 40)]


@pytest.mark.parametrize("chunk", [1, 7, 33])
def test_a_prompt_in_chunks_inside_the_block(chunk: int) -> None:
    """transformers 43082: positions of chunks."""
    model = stock("qwen3")
    with attention(model, KINDS["streaming"][0](model)) as cache:
        got = answer(model, prompt(50), cache, 20, prefill_chunk_size=chunk)
    assert got == [alone(model, "streaming", prompt(50), 20)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_long_prompt_token_by_token_outside_the_block(implementation: str) -> None:
    model = stock("smollm2", implementation)
    cache = KINDS["streaming"][0](model)
    want = alone(model, "streaming", prompt(50), 40)
    assert answer(model, prompt(50), cache, 40, prefill_chunk_size=1) == [want]


@pytest.mark.parametrize("kind", PLAIN)
def test_rows_of_a_batch_give_what_they_give_alone(kind: str) -> None:
    model = stock("qwen3")
    rows = [prompt(9, seed) for seed in (1, 2, 3)]
    want = [alone(model, kind, row, 30) for row in rows]
    assert answer(model, torch.tensor(rows), KINDS[kind][0](model), 30) == want


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_padded_batch_give_what_they_give_alone(kind: str) -> None:
    """unsloth 3699, transformers 18478: padding moves no position and is never held. H2O 14: so does eviction."""
    model = stock("smollm2" if kind in ("h2o", "snapkv") else "mistral")
    rows = [prompt(3, 1), prompt(41, 2), prompt(16, 3), prompt(40, 4)]
    ids, mask = left_padded(rows)
    with attention(model, KINDS[kind][0](model)) as cache:
        got = answer(model, ids, cache, 20, attention_mask=mask)
    assert got == [alone(model, kind, row, 20) for row in rows]
    assert cache.kv is not None
    assert cache.kv.rows_seen == [len(row) + 19 for row in rows]
    assert cache.columns == 41 + 19


@pytest.mark.parametrize(("family", "kind"), [("llama", "streaming"), ("gpt2", "int8")])
def test_positions_come_from_the_mask_where_nobody_states_them(family: str, kind: str) -> None:
    """GPT-2 adds a vector for each position, so that a shifted row shows; rotations only know differences."""
    model = stock(family)
    rows, more = [prompt(5, 1), prompt(30, 2)], [[7, 8], [9, 10]]
    ids, mask = left_padded(rows)
    with torch.no_grad(), attention(model, KINDS[kind][0](model)) as cache:
        got = model(ids, attention_mask=mask, **cache.argument).logits
        then = model(torch.tensor(more), attention_mask=torch.ones(2, 32), **cache.argument).logits
    gpt = ours(model)
    for row, tokens in enumerate(rows):
        kv = KINDS[kind][1](gpt.config)
        torch.testing.assert_close(got[row, -len(tokens) :], gpt(torch.tensor([tokens]), kv)[0], rtol=0, atol=2e-4)
        torch.testing.assert_close(then[row], gpt(torch.tensor([more[row]]), kv)[0], rtol=0, atol=2e-4)


def test_the_next_turn_of_a_chat_continues() -> None:
    model = stock()
    first, second = prompt(6), prompt(30, 2)
    with attention(model, KINDS["streaming"][0](model)) as cache:
        said = answer(model, first, cache, 20)[0]
        ids = first + said + second
        got = answer(model, ids, cache, 20)
    assert got == [alone(model, "streaming", ids, 20)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_chunks_that_fit_are_right_outside_the_block(implementation: str) -> None:
    """gpt-fast 233: a chunk that starts at 5 sees what came before."""
    model = stock("mistral", implementation)
    for kind in ("streaming", "int8"):
        cache = KINDS[kind][0](model)
        ids = torch.tensor([prompt(16)])
        with torch.no_grad():
            got = torch.cat([model(part, **cache.argument).logits for part in ids.split([5, 1, 7, 3], dim=1)], dim=1)
        torch.testing.assert_close(got, ours(model)(ids), rtol=0, atol=1e-4)


def test_entries_stay_constant_over_4000_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """llm_from_scratch 3, streaming-llm 48: in no step more than sinks and window, and bytes that do not grow."""
    # The other tests check shapes; here they would take most of the time.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    model = stock(num_hidden_layers=1)
    cache = KINDS["streaming"][0](model)
    held, allocated = [], set()

    def look(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        assert cache.kv is not None
        held.append((cache.kv.tokens_seen, cache.kv.length))
        allocated.add(cache.kv.nbytes)
        return torch.zeros(len(ids), dtype=torch.bool)

    model.generate(torch.tensor([prompt(9)]), **cache.argument, max_new_tokens=4000, stopping_criteria=[look], **GREEDY)
    assert held == [(seen, min(seen, SINKS + WINDOW)) for seen in range(9, 4009)]
    assert len(allocated) == 1


def test_beams_equal_those_of_transformers() -> None:
    model = stock()
    ids = torch.tensor([prompt(9), prompt(9, 2)])
    options = {"num_beams": 3, "max_new_tokens": 12, **GREEDY}
    want = model.generate(ids, **options)
    # All within the window and the exact tail, so that the caches of kvlab hold what the stock cache holds.
    for cache in (streaming(model, sinks=4, window=40), quantized(model, max_len=64)):
        assert torch.equal(model.generate(ids, **cache.argument, **options), want)
    with attention(model, streaming(model, sinks=4, window=40)) as cache:
        assert torch.equal(model.generate(ids, **cache.argument, **options), want)


def test_drafts_are_taken_back_where_the_cache_can() -> None:
    model = stock()
    ids = torch.tensor([prompt(4) * 4])
    # Drafting wants an end-of-sequence id; this one no row comes to.
    options = GREEDY | {"eos_token_id": 200, "max_new_tokens": 30, "prompt_lookup_num_tokens": 3}
    got = model.generate(ids, **quantized(model, max_len=64).argument, **options)
    assert got[:, 16:].tolist() == [alone(model, "int8", ids[0].tolist(), 30)]
    # Newer versions ask whether the cache can, older ones find out.
    with pytest.raises((CannotCrop, RuntimeError, ValueError)):
        model.generate(ids, **KINDS["streaming"][0](model).argument, **options)


def test_crop_speaks_both_dialects() -> None:
    model, ids = stock(), torch.tensor([prompt(10)])
    for argument in (-4, 6):
        cache = quantized(model, max_len=64)
        with torch.no_grad():
            whole = model(ids, **cache.argument).logits
            cache.crop(argument)
            assert cache.get_seq_length() == 6
            again = model(ids[:, 6:], **cache.argument).logits
        torch.testing.assert_close(again, whole[:, 6:], rtol=0, atol=1e-5)


def test_a_prefix_is_used_twice() -> None:
    """MemOS 2301, transformers 37078: reuse does not change what is reused."""
    model = stock()
    prefix, question = prompt(8), prompt(4, 2)
    cache = KINDS["streaming"][0](model)
    with torch.no_grad():
        model(torch.tensor([prefix]), **cache.argument)
    want = alone(model, "streaming", prefix + question, 30)
    for copied in (cache.fork(), copy.deepcopy(cache), cache):
        assert answer(model, prefix + question, copied, 30) == [want]


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_the_name_that_transformers_had_for_it_still_serves() -> None:
    model = stock()
    want = alone(model, "streaming", prompt(9), 20)
    ids = torch.tensor([prompt(9)])
    plain = model.generate(ids, past_key_values=KINDS["streaming"][0](model), max_new_tokens=20, **GREEDY)
    with attention(model, KINDS["streaming"][0](model)) as cache:
        inside = model.generate(ids, past_key_values=cache, max_new_tokens=20, **GREEDY)
    assert plain[0, 9:].tolist() == inside[0, 9:].tolist() == want


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_any_cache_of_the_protocol_drops_in(kind: str) -> None:
    model = stock("mistral")
    want = generate(ours(model), prompt(9), max_new_tokens=40, ignore_eos=True).run().tokens
    cache = DropInCache(model, lambda config, batch, dtype, device: make_cache(kind, config, batch, 64, dtype, device))
    assert answer(model, prompt(9), cache, 40) == want
    assert cache.layers[0].get_max_length() == 64


def test_memory_is_given_back_with_the_cache() -> None:
    """Without waiting for the garbage collector: no circle holds the keys."""
    model = stock()
    with attention(model, KINDS["streaming"][0](model)) as cache:
        answer(model, prompt(9), cache, 2)
    assert cache.fork().columns == 10
    kept = weakref.ref(cache)
    gc.disable()
    del cache
    gone = kept() is None
    gc.enable()
    assert gone


def test_a_cache_takes_the_dtype_of_the_model() -> None:
    """litgpt 146, nanochat 795."""
    model = stock().to(torch.bfloat16)
    cache = KINDS["streaming"][0](model)
    answer(model, prompt(5), cache, 2)
    assert cache.kv is not None
    assert cache.kv.dtype == torch.bfloat16


class Watcher(ContiguousCache):
    """Asks for queries and keeps them."""

    needs_queries = True

    def __init__(self, config: ModelConfig, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, batch, 64, dtype, device)
        self.queries: list[tuple[int, Tensor, int]] = []

    def observe(self, layer: int, queries: Tensor, step: Step) -> None:
        self.queries.append((layer, queries, self.tokens_seen))


def test_a_cache_that_wants_queries_gets_them_rotated_before_the_pass_is_committed() -> None:
    model = stock()
    with torch.no_grad(), attention(model, DropInCache(model, Watcher)) as cache:
        model(torch.tensor([prompt(5)]), **cache.argument)
        model(torch.tensor([[7]]), **cache.argument)
    theirs = cache.kv
    assert isinstance(theirs, Watcher)
    gpt = ours(model)
    mine = Watcher(gpt.config, 1, torch.float32, torch.device("cpu"))
    gpt(torch.tensor([prompt(5)]), mine)
    gpt(torch.tensor([[7]]), mine)
    assert [(layer, seen) for layer, _, seen in theirs.queries] == [(0, 0), (1, 0), (0, 5), (1, 5)]
    for (_, got, _), (_, want, _) in zip(theirs.queries, mine.queries, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def state(model: Any) -> Any:
    """All that a block could leave behind."""
    hooks = {name: len(module._forward_pre_hooks) for name, module in model.named_modules()}
    return dict(ALL_ATTENTION_FUNCTIONS), dict(ALL_ATTENTION_FUNCTIONS._local_mapping), vars(model.config).copy(), hooks


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_outlives_the_block(implementation: str) -> None:
    model = stock("llama", implementation)
    before, want = state(model), alone(model, "streaming", prompt(9), 20)
    cache = KINDS["streaming"][0](model)
    with pytest.raises(ZeroDivisionError), attention(model, cache):
        assert 1 / (state(model) == before)
    assert state(model) == before
    assert answer(model, prompt(9), cache, 20) == [want]


@pytest.mark.parametrize(("inside", "layer"), [(False, 0), (True, 0), (True, 1)])
def test_a_pass_that_fails_never_happened(inside: bool, layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the block, also one that fails while its last layer attends."""
    model = stock()
    ids = torch.tensor([prompt(16)])
    cache = KINDS["streaming"][0](model)
    block = attention(model, cache) if inside else nullcontext()
    with torch.no_grad(), block:
        model(ids[:, :8], **cache.argument)
        attend, calls = drop_in.attend, iter([True] * layer)
        with monkeypatch.context() as patch:
            if inside:
                patch.setattr(drop_in, "attend", lambda *args: attend(*args) if next(calls, False) else 1 / 0)
            else:
                patch.setattr(model.model.layers[layer].mlp, "forward", lambda x: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(ids[:, 8:], **cache.argument)
        assert cache.columns == 8
        got = model(ids[:, 8:], **cache.argument).logits
    torch.testing.assert_close(got, ours(model)(ids)[:, 8:], rtol=0, atol=1e-4)


def test_a_long_prompt_outside_the_block_is_refused_with_both_ways_out() -> None:
    model = stock()
    cache = KINDS["streaming"][0](model)
    with pytest.raises(
        ConfigError, match=r"20 tokens in one pass.*with attention\(model, cache\).*prefill_chunk_size=1"
    ):
        answer(model, prompt(20), cache, 4)
    answer(model, prompt(9), cache, 20)
    with pytest.raises(ConfigError, match="2 tokens in one pass after 28"), torch.no_grad():
        model(torch.tensor([[5, 6]]), **cache.argument)


@pytest.mark.parametrize("kind", ["h2o", "snapkv"])
def test_a_cache_that_wants_queries_is_refused_outside_the_block(kind: str) -> None:
    model = stock()
    with pytest.raises(ConfigError, match=r"Cache needs the queries.*with attention\(model, cache\): model.generate"):
        answer(model, prompt(5), KINDS[kind][0](model), 4)


@pytest.mark.parametrize("kind", ["streaming", "int8"])
def test_padding_is_refused_outside_the_block(kind: str) -> None:
    model = stock()
    ids, mask = left_padded([prompt(5), prompt(9, 2)])
    with pytest.raises(ConfigError, match=r"padded.*with attention\(model, cache\)"):
        answer(model, ids, KINDS[kind][0](model), 4, attention_mask=mask)
    with attention(model, KINDS[kind][0](model)) as cache:
        answer(model, ids, cache, 2, attention_mask=mask)
    with pytest.raises(ConfigError, match=r"came with padding, \[6, 10\]"), torch.no_grad():
        model(torch.tensor([[5], [6]]), **cache.argument)


def test_padding_cannot_be_cropped() -> None:
    model = stock()
    ids, mask = left_padded([prompt(5), prompt(9, 2)])
    with attention(model, quantized(model, max_len=64)) as cache:
        answer(model, ids, cache, 4, attention_mask=mask)
        cache.crop(-3)
        with pytest.raises(CannotCrop, match="padding came until column 9"):
            cache.crop(-1)


def test_misuse_of_the_block_is_refused() -> None:
    model, other = stock(), stock(num_hidden_layers=1)
    cache = KINDS["streaming"][0](model)
    ids = torch.tensor([prompt(5)])
    with pytest.raises(ConfigError, match="made for"), attention(other, cache):
        pass
    with torch.no_grad(), attention(model, cache):
        with pytest.raises(ConfigError, match="cache is inside"), attention(model, cache):
            pass
        with pytest.raises(ConfigError, match="model is inside"), attention(model, KINDS["int8"][0](model)):
            pass
        with pytest.raises(ConfigError, match=r"attention_mask has shape \(1, 1, 5, 5\)"):
            model(ids, attention_mask=torch.zeros(1, 1, 5, 5), **cache.argument)
        with pytest.raises(ConfigError, match="takes that cache, in every pass"):
            model(ids)
        with pytest.raises(ConfigError, match="not one of the model"):
            stock()(ids, **cache.argument)
        with pytest.raises(ConfigError, match=r"attention_mask has shape \(1, 4\)"):
            model(ids, attention_mask=torch.ones(1, 4), **cache.argument)
        with pytest.raises(ConfigError, match="position_ids"):
            model(ids, position_ids=torch.arange(1, 6)[None], **cache.argument)
        model(ids, **cache.argument)
        with pytest.raises(ConfigError, match="holds 1 rows and got 2"):
            model(ids.expand(2, -1), **cache.argument)


def test_impossible_caches_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stock()
    with pytest.raises(ConfigError, match="more than the context"):
        streaming(model, sinks=4, window=200)
    with pytest.raises(ConfigError, match="window is 0"):
        streaming(model, window=0)
    with pytest.raises(ConfigError, match="learned positions"):
        streaming(stock("gpt2"), sinks=4, window=12)
    phi = transformers.PhiConfig(**{k: v for k, v in SHAPE.items() if k != "head_dim"})
    with pytest.raises(ConfigError, match="model_type 'phi'"):
        streaming(transformers.PhiForCausalLM(phi), window=12)
    with pytest.raises(ConfigError, match="have windows"):
        heavy_hitter(stock("mistral"), heavy=6, recent=6)
    monkeypatch.setattr(transformers, "__version__", "4.57.6")
    with pytest.raises(ConfigError, match=r"4\.57\.6 is older than 5\.0\.0"):
        streaming(model, window=12)


def test_another_batch_a_full_cache_gradients_and_dropout_are_refused() -> None:
    model = stock()
    cache = quantized(model, max_len=8)
    with pytest.raises(ConfigError, match=r"torch.no_grad\(\)"):
        model(torch.tensor([prompt(5)]), **cache.argument)
    answer(model, prompt(5), cache, 2)
    with pytest.raises(ConfigError, match="holds 1 rows"), torch.no_grad():
        model(torch.tensor([[5], [6]]), **cache.argument)
    noisy = stock(attention_dropout=0.5).train()
    other = quantized(noisy, max_len=8)
    with pytest.raises(ConfigError, match=r"asks for 0.5; call eval\(\)"), torch.no_grad(), attention(noisy, other):
        noisy(torch.tensor([prompt(5)]), **other.argument)
    with pytest.raises(CacheFull, match="max_len 8"), torch.no_grad():
        model(torch.tensor([prompt(3)]), **cache.argument)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert len(answer(model, torch.tensor([prompt(5), prompt(5, 2)]), cache, 3)) == 2
