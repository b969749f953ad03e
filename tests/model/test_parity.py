"""The same weights give the same logits as ``transformers``, in every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from kvlab.cache import make_cache
from kvlab.config import ModelConfig
from kvlab.errors import ConfigError, PromptError
from kvlab.generation import generate
from kvlab.model import GPT
from kvlab.weights.layout import from_hf, to_hf
from toys import random_gpt, small_config

SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, Any] = {
    "gpt2": transformers.GPT2Config(
        vocab_size=97, n_embd=48, n_layer=3, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
    ),
    "llama": transformers.LlamaConfig(**SHAPE),
    "llama-3.1": transformers.LlamaConfig(
        **SHAPE, rope_parameters=LLAMA3 | {"rope_theta": 5e5, "original_max_position_embeddings": 32}
    ),
    "llama-tied-biased": transformers.LlamaConfig(
        **SHAPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "mistral": transformers.MistralConfig(**SHAPE, sliding_window=7, rope_parameters={"rope_theta": 1e6}),
    "qwen2": transformers.Qwen2Config(**SHAPE),
    "qwen2-window": transformers.Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": transformers.Qwen3Config(**SHAPE, head_dim=16),
}


def pair(family: str) -> tuple[Any, GPT]:
    """A random model of transformers, and ours with its weights."""
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(FAMILIES[family], attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.2)
    config = ModelConfig.from_hf(FAMILIES[family].to_dict())
    ours = GPT(config)
    ours.load_state_dict(from_hf(config, theirs.state_dict()), strict=False)
    return theirs, ours.eval().requires_grad_(False)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str) -> None:
    theirs, ours = pair(family)
    tokens = torch.randint(97, (2, 40))
    with torch.no_grad():
        want = theirs(tokens).logits
    torch.testing.assert_close(ours(tokens), want, rtol=0, atol=1e-5)
    cache = make_cache("contiguous", ours.config, 2, 40, torch.float32)
    got = torch.cat([ours(part, cache) for part in tokens.split([9, 1, 1, 20, 1, 8], dim=1)], dim=1)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(family: str) -> None:
    theirs, ours = pair(family)
    tokens = torch.randint(3, 97, (1, 12))
    with torch.no_grad():
        want = theirs.generate(tokens, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
    got = generate(ours, tokens[0].tolist(), max_new_tokens=64, ignore_eos=True).run()
    assert got.tokens[0] == want[0, 12:].tolist()


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gpt2"])
def test_a_checkpoint_survives_the_way_there_and_back(family: str) -> None:
    theirs, ours = pair(family)
    back = to_hf(ours.config, ours.state_dict())
    for name, tensor in theirs.state_dict().items():
        if name != "lm_head.weight" or not ours.config.tie_embeddings:
            assert torch.equal(back[name], tensor), name


def test_low_precision_is_no_worse_than_twice_the_baselines_own_error() -> None:
    theirs, ours = pair("llama")
    tokens = torch.randint(97, (2, 40))
    with torch.no_grad():
        exact = ours(tokens)
        baseline = (theirs.to(torch.bfloat16)(tokens).logits.float() - exact).abs().mean()
        got = (ours.to(torch.bfloat16)(tokens).float() - exact).abs().mean()
    assert 0 < got <= 2 * baseline


@pytest.mark.parametrize("preset", ["gpt-2-small", "llama-3-8b", "qwen2.5-7b", "qwen3-32b", "smollm2-135m"])
def test_the_model_has_the_parameters_that_the_source_states(preset: str) -> None:
    from kvlab.config import preset_source

    with torch.device("meta"):
        model = GPT(ModelConfig.preset(preset))
    assert sum(p.numel() for p in model.parameters()) == preset_source(preset).params_total


@pytest.mark.parametrize("preset", ["mixtral-8x7b-v0.1", "deepseek-v3", "gemma-3-27b", "falcon-7b"])
def test_what_only_the_cost_model_knows_is_refused_by_name(preset: str) -> None:
    with pytest.raises(ConfigError, match=preset):
        GPT(ModelConfig.preset(preset))


def test_context_overflow_is_refused_with_numbers_and_changes_nothing() -> None:
    model = random_gpt(small_config(max_seq_len=10))
    cache = make_cache("contiguous", model.config, 1, 20, torch.float64)
    model(torch.zeros(1, 8, dtype=torch.long), cache)
    with pytest.raises(PromptError, match="11 tokens are more than the context of small, 10"):
        model(torch.zeros(1, 3, dtype=torch.long), cache)
    assert cache.tokens_seen == 8


def test_only_the_last_position_goes_through_the_head() -> None:
    model = random_gpt(small_config())
    tokens = torch.randint(61, (2, 6))
    rows = []
    model.head.register_forward_hook(lambda _, args, out: rows.append(out.shape[1]))
    last = model(tokens, last_only=True)
    torch.testing.assert_close(last[:, 0], model(tokens)[:, -1], rtol=0, atol=1e-12)
    assert rows == [1, 6]
