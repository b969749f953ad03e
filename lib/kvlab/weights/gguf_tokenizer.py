"""The tokenizer of a GGUF file, rebuilt for the ``tokenizers`` library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from kvlab.errors import WeightsError
from kvlab.weights.gguf_file import GGUFFile

# Values of tokenizer.ggml.token_type.
_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _gpt2_split() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm_split() -> pre_tokenizers.PreTokenizer:
    """Every digit alone, then as GPT-2: what SmolLM2's published tokenizer.json says."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_split()])


def _split_by(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def split() -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return split


#: How text is cut before merging, by ``tokenizer.ggml.pre``.
SPLITS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2_split,
    "smollm": _smollm_split,
    "llama-bpe": _split_by(_LLAMA3),
    "qwen2": _split_by(_QWEN2),
    "deepseek-r1-qwen": _split_by(_QWEN2),
}


def read_gguf_tokenizer(file: GGUFFile) -> tuple[str, dict[str, Any]]:
    """A file's tokenizer, as the texts of ``tokenizer.json`` and ``tokenizer_config.json``.

    Args:
        file: an open GGUF file.

    Raises:
        WeightsError: the file has no tokenizer, or one of a kind that kvlab cannot rebuild.
    """
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return _byte_level(file).to_str(), _settings(file)
    if kind == "llama":
        return _sentencepiece(file), _settings(file)
    raise WeightsError(f"{file.path} has a tokenizer of the kind {kind!r}; kvlab reads 'gpt2' and 'llama'")


def _byte_level(file: GGUFFile) -> Tokenizer:
    meta = file.metadata
    pre = meta.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in SPLITS:
        raise WeightsError(f"{file.path} cuts text in the manner {pre!r}; kvlab knows {', '.join(SPLITS)}")
    vocabulary = {token: i for i, token in enumerate(meta["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    rules = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    if pre in ("qwen2", "deepseek-r1-qwen"):
        rules.normalizer = normalizers.NFC()
    rules.pre_tokenizer = SPLITS[pre]()
    rules.decoder = decoders.ByteLevel()
    _add_tokens(rules, meta["tokenizer.ggml.tokens"], meta.get("tokenizer.ggml.token_type", []))
    if meta.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        _add_bos(rules, meta["tokenizer.ggml.bos_token_id"])
    return rules


def _add_tokens(rules: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Control tokens are special; those that users defined are found whole in a text, but are part of it."""
    rules.add_special_tokens([_added(t, True) for t, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL])
    rules.add_tokens([_added(t, False) for t, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED])


def _added(token: str, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)


def _add_bos(rules: Tokenizer, bos: int) -> None:
    token = rules.id_to_token(bos)
    rules.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token}:1 $B:1", special_tokens=[(token, bos)]
    )


def _sentencepiece(file: GGUFFile) -> str:
    """``transformers`` derives the merges that such a file does not hold."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise WeightsError(
            f"{file.path} has a SentencePiece tokenizer; converting it once needs: pip install transformers"
        ) from None
    made = AutoTokenizer.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    rules = Tokenizer.from_str(made.backend_tokenizer.to_str())
    if file.metadata.get("tokenizer.ggml.add_bos_token", True):
        _add_bos(rules, file.metadata["tokenizer.ggml.bos_token_id"])
    return rules.to_str()


def _settings(file: GGUFFile) -> dict[str, Any]:
    meta, tokens = file.metadata, file.metadata["tokenizer.ggml.tokens"]
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    settings = {}
    for name, kind in named.items():
        at = meta.get(f"tokenizer.ggml.{kind}_token_id")
        if at is not None and at < len(tokens):
            settings[name] = tokens[at]
    template = meta.get("tokenizer.chat_template")
    return settings | ({} if template is None else {"chat_template": template})
