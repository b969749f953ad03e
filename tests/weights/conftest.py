"""Small models of every family, written the way other programs write them."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB = 320
TEXT = "to be or not to be that is the question whether tis nobler in the mind to suffer the slings and arrows " * 4
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs_pypi: uses the user's own cache, and the package index if it is empty")


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, request: Any) -> Path:
    """Every test has caches of its own, and no route to anywhere."""
    folder = tmp_path_factory.mktemp("cache")
    if request.node.get_closest_marker("needs_pypi"):
        return folder
    monkeypatch.setenv("KVLAB_CACHE", str(folder / "kvlab"))
    monkeypatch.setenv("HF_HOME", str(folder / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder / "kvlab"


@pytest.fixture(scope="session")
def bpe() -> Tokenizer:
    """A byte-level tokenizer with a BOS, trained in milliseconds; smaller than the embedding of the models."""
    rules = Tokenizer(models.BPE())
    rules.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    rules.train_from_iterator([TEXT], trainer)
    rules.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 0)]
    )
    return rules


@pytest.fixture(scope="session")
def settings() -> dict[str, Any]:
    return {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}


@pytest.fixture(scope="session")
def write_tokenizer(bpe: Tokenizer, settings: dict[str, Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        bpe.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    return write


def _sizes(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 64, "bos_token_id": 0,
        "eos_token_id": 1, **more,
    }  # fmt: skip


def _make_reference(family: str) -> Any:
    import transformers as hf

    hf.utils.logging.disable_progress_bar()
    configs: dict[str, Callable[[], Any]] = {
        "gpt2": lambda: hf.GPT2Config(
            vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=1
        ),
        "llama": lambda: hf.LlamaConfig(**_sizes(rms_norm_eps=1e-5)),
        "llama-tied": lambda: hf.LlamaConfig(**_sizes(tie_word_embeddings=True)),
        "llama-biased": lambda: hf.LlamaConfig(**_sizes(attention_bias=True, mlp_bias=True)),
        "llama3": lambda: hf.LlamaConfig(
            **_sizes(
                max_position_embeddings=256,
                rope_parameters={
                    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
                },
            )
        ),
        "mistral": lambda: hf.MistralConfig(**_sizes(sliding_window=6)),
        "qwen2": lambda: hf.Qwen2Config(**_sizes(tie_word_embeddings=True)),
        "qwen3": lambda: hf.Qwen3Config(**_sizes(head_dim=24)),
    }  # fmt: skip
    torch.manual_seed(sum(map(ord, family)))
    model = hf.AutoModelForCausalLM.from_config(configs[family]()).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Biases that are zero and norms that are one would hide that they are lost.
            parameter.normal_(1.0 if "norm" in name or ".ln_" in name else 0.0, 0.15)
    return model


@pytest.fixture(scope="session")
def reference() -> Callable[[str], Any]:
    """A model of ``transformers`` with random weights; made once, to be read only."""
    made: dict[str, Any] = {}

    def get(family: str) -> Any:
        if family not in made:
            made[family] = _make_reference(family)
        return made[family]

    return get


@pytest.fixture
def saved(
    reference: Callable[[str], Any], write_tokenizer: Callable[[Path], None], tmp_path: Path
) -> Callable[..., Path]:
    """A reference model as ``save_pretrained`` writes it, with a tokenizer."""

    def save(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
        folder = tmp_path / family
        model = reference(family)
        if dtype is not torch.float32:
            model = copy.deepcopy(model).to(dtype)
        model.save_pretrained(folder, **options)
        write_tokenizer(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def tokens() -> torch.Tensor:
    return torch.randint(4, 300, (2, 24), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def quiet(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """What the test does writes nothing to stderr, which is no terminal here."""
    yield
    assert capfd.readouterr().err == ""
