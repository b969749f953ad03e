"""Text to ids and back, conversations to prompts; against the ``tokenizers`` and ``transformers`` libraries."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf_maker import write_gguf
from tokenizers import AddedToken
from tokenizers import Tokenizer as Rules

from kvlab.errors import PromptError, WeightsError
from kvlab.weights import Tokenizer, load, read_tokenizer
from kvlab.weights.gguf_tokenizer import SPLITS

TEXTS = [
    "to be or not to be", "In 2024, 12345.67!", "def f(x):\n\treturn x**2  # ok\n", "引力是什么？",
    "👩\u200d🚀 é e\u0301", "  two  spaces \t tab\r\n\n", "", "½ Ⅷ ١٢",
]  # fmt: skip
TALK = [{"role": "user", "content": "To be?"}, {"role": "assistant", "content": "Or not."}]


@pytest.fixture
def tokenizer(bpe: Rules, settings: dict[str, Any]) -> Tokenizer:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(bpe, special=special, chat_template=settings["chat_template"], name="small")


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id == 0
    assert ids[1:] == tokenizer.encode(text, special=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special=False) == "<s>" + text
    assert b"".join(map(tokenizer.token_bytes, ids[1:])).decode() == text


def test_half_a_character_is_shown_as_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a引", special=False)
    assert tokenizer.tokens(ids) == ["a", r"\xe5", r"\xbc", r"\x95"]
    assert tokenizer.decode(ids[:3]) == "a\ufffd"
    assert tokenizer.tokens([2, 0]) == ["<|im_start|>", "<s>"]
    assert tokenizer.token_bytes(10_000) == b""  # padding of the embedding


def test_added_tokens_are_not_spelled_in_the_byte_alphabet(bpe: Rules) -> None:
    rules = Rules.from_str(bpe.to_str())
    rules.add_tokens(["<Ġé>"])
    assert Tokenizer(rules).tokens([rules.token_to_id("<Ġé>")]) == ["<Ġé>"]


def test_ids_of_beginning_and_end(bpe: Rules) -> None:
    assert Tokenizer(bpe, special={"eos_token": "</s>"}).eos_token_ids == (1,)
    assert Tokenizer(bpe, special={"eos_token": "</s>"}, eos_token_ids=[3, 1]).eos_token_ids == (3, 1)
    assert Tokenizer(bpe).eos_token_ids == ()
    assert Tokenizer(bpe).bos_token_id is None
    assert Tokenizer(bpe, special={"bos_token": "<s>"}, bos_token_id=2).bos_token_id == 2
    assert Tokenizer(bpe, special={"bos_token": "no such token"}).bos_token_id is None


def test_the_vocabulary_ends_after_the_largest_id(bpe: Rules) -> None:
    assert Tokenizer(bpe).vocab_size == bpe.get_vocab_size()
    rules = Rules.from_str(bpe.to_str())
    rules.add_special_tokens([AddedToken("<extra>", special=True)])
    assert Tokenizer(rules).vocab_size == rules.token_to_id("<extra>") + 1 == bpe.get_vocab_size() + 1


def test_a_templated_prompt_has_one_bos(tokenizer: Tokenizer) -> None:
    """llama.cpp 7107: the template writes the BOS, and the tokenizer must not add another."""
    ids = tokenizer.chat(TALK)
    assert ids.count(0) == 1
    assert ids[0] == 0
    assert tokenizer.decode(ids, skip_special=False) == tokenizer.render(TALK)
    assert tokenizer.render(TALK).endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.render(TALK, add_generation_prompt=False).endswith("Or not.<|im_end|>\n")


def test_a_model_without_a_chat_template(bpe: Rules) -> None:
    with pytest.raises(PromptError, match=r"base has no chat template.*plain text \(without --chat\).*smollm2"):
        Tokenizer(bpe, name="base").chat(TALK)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}\n    {% if m.role == 'user' %}\nU: {{ m.content }}\n    {% endif %}\n{% endfor %}\n",
        "{{- bos_token }}{%- for m in messages %}{{- m['role'] + '|' + m['content'] | trim }}{%- endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}",
        "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
        "{{ strftime_now('%Y') }}",
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "{% generation %}x{% endgeneration %}{{ eos_token }}{% if tools is defined and tools %}T{% endif %}",
        "{{ messages[0].content.upper() }}{{ missing_thing }}{{ '<b>' }}",
    ],
)
def test_templates_render_as_transformers_renders_them(template: str, bpe: Rules) -> None:
    from transformers import PreTrainedTokenizerFast

    talk = [{"role": "user", "content": " <é> to "}, *TALK[1:]]
    theirs = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", chat_template=template)
    expected = theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    ours = Tokenizer(bpe, special={"bos_token": "<s>", "eos_token": "</s>"}, chat_template=template)
    assert ours.render(talk) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "does not accept these messages: roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "does not accept these messages: .*unsafe"),
        ("{{ messages.append(1) }}", "does not accept these messages: .*unsafe"),
        ("{% for %}", "does not accept these messages"),
        ("{{ messages[9].content.strip() }}", "does not accept these messages"),
    ],
)
def test_a_template_that_refuses_or_is_refused(template: str, message: str, bpe: Rules) -> None:
    """Templates come with models, so they run in a sandbox."""
    with pytest.raises(PromptError, match=message):
        Tokenizer(bpe, chat_template=template).chat(TALK)


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], [{"content": "x"}]])
def test_messages_that_are_none(messages: list[Any], tokenizer: Tokenizer) -> None:
    with pytest.raises(PromptError, match="'content'"):
        tokenizer.chat(messages)


def write_settings(folder: Path, bpe: Rules, name: str = "tokenizer_config.json", **settings: Any) -> None:
    bpe.save(str(folder / "tokenizer.json"))
    (folder / name).write_text(json.dumps(settings))


def test_special_tokens_are_objects_in_older_folders(tmp_path: Path, bpe: Rules) -> None:
    write_settings(tmp_path, bpe, bos_token={"content": "<s>", "lstrip": False}, eos_token=None, add_bos_token=True)
    read = read_tokenizer(tmp_path)
    assert read.special == {"bos_token": "<s>"}
    assert read.bos_token_id == 0
    write_settings(tmp_path, bpe, "special_tokens_map.json", bos_token="</s>", eos_token={"content": "<|im_end|>"})
    assert read_tokenizer(tmp_path).special == {"bos_token": "<s>", "eos_token": "<|im_end|>"}


def test_where_a_chat_template_may_stand(tmp_path: Path, bpe: Rules) -> None:
    write_settings(tmp_path, bpe)
    assert read_tokenizer(tmp_path).chat_template is None
    write_settings(tmp_path, bpe, chat_template="a field")
    assert read_tokenizer(tmp_path).chat_template == "a field"
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "of several"}]
    write_settings(tmp_path, bpe, chat_template=several)
    assert read_tokenizer(tmp_path).chat_template == "of several"
    (tmp_path / "chat_template.jinja").write_text("a file")
    assert read_tokenizer(tmp_path).chat_template == "a file"


@pytest.mark.parametrize("text", ["[]", "{", "7"])
def test_damaged_settings(text: str, tmp_path: Path, bpe: Rules) -> None:
    bpe.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(WeightsError, match=r"tokenizer_config\.json .*download it again"):
        read_tokenizer(tmp_path)


def pieces(pre: str, text: str) -> list[str]:
    return [text[start:end] for _, (start, end) in SPLITS[pre]().pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["I", "'ll", " see", " 12345½", " things", "  ", " so", "\n", "\n", "x"]),
        ("smollm", ["I", "'ll", " see", " ", "1", "2", "3", "4", "5", "½", " things", "  ", " so", "\n", "\n", "x"]),
        ("llama-bpe", ["I", "'ll", " see", " ", "123", "45½", " things", "  ", " so", "\n\n", "x"]),
        ("qwen2", ["I", "'ll", " see", " ", "1", "2", "3", "4", "5", "½", " things", "  ", " so", "\n\n", "x"]),
    ],
)
def test_how_text_is_cut(pre: str, expected: list[str]) -> None:
    assert pieces(pre, "I'll see 12345½ things   so\n\nx") == expected


def test_the_cut_of_qwen_and_llama_is_that_of_transformers() -> None:
    from tokenizers import Regex, pre_tokenizers
    from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs

    for pre in ("llama-bpe", "qwen2", "deepseek-r1-qwen"):
        split = pre_tokenizers.Split(Regex(theirs.GGUF_PRE_TOKENIZER_SPLITS[pre]), behavior="isolated")
        for text in TEXTS:
            assert pieces(pre, text) == [piece for piece, _ in split.pre_tokenize_str(text)]


Make = Callable[..., Tokenizer]


@pytest.fixture
def from_gguf(tmp_path: Path, reference: Callable[[str], Any], bpe: Rules) -> Make:
    def make(leave_out: tuple[str, ...] = (), **metadata: Any) -> Tokenizer:
        path = tmp_path / "model.gguf"
        keys = {f"tokenizer.{name}".replace("__", "."): value for name, value in metadata.items()}
        write_gguf(path, reference("llama-tied"), bpe, metadata=keys, leave_out=leave_out)
        return load(path).tokenizer

    return make


@pytest.mark.parametrize("text", [*TEXTS, "<|im_start|>user\nto be<|im_end|>"])
def test_a_gguf_file_has_the_same_tokenizer(text: str, from_gguf: Make, bpe: Rules) -> None:
    made = from_gguf()
    assert made.encode(text) == bpe.encode(text).ids
    assert made.decode(made.encode(text)) == bpe.decode(bpe.encode(text).ids)


def test_bos_of_a_gguf_file(from_gguf: Make) -> None:
    assert from_gguf(ggml__add_bos_token=False).encode("to") == from_gguf().encode("to", special=False)
    assert from_gguf(leave_out=("add_bos",)).encode("to")[0] != 0
    assert from_gguf(leave_out=("add_bos",), ggml__pre="llama-bpe").encode("to")[0] == 0


def test_template_and_special_tokens_of_a_gguf_file(from_gguf: Make, settings: dict[str, Any]) -> None:
    made = from_gguf(chat_template=settings["chat_template"], ggml__unknown_token_id=2, ggml__padding_token_id=9999)
    assert made.special == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<|im_start|>"}
    ids = made.chat(TALK)
    assert ids.count(0) == 1
    assert made.decode(ids) == "user\nTo be?\nassistant\nOr not.\nassistant\n"


def test_tokens_that_users_defined_are_found_whole_but_are_text(from_gguf: Make, bpe: Rules) -> None:
    kinds = [3] * 3 + [4] + [1] * (bpe.get_vocab_size() - 4)
    made = from_gguf(ggml__token_type=kinds)
    ids = made.encode("to<|im_end|>be", special=False)
    assert 3 in ids
    assert made.decode(ids) == "to<|im_end|>be"


def test_qwen_normalises(from_gguf: Make) -> None:
    assert from_gguf(ggml__pre="qwen2").encode("e\u0301") == from_gguf().encode("\u00e9")
    assert from_gguf().encode("e\u0301") != from_gguf().encode("\u00e9")
