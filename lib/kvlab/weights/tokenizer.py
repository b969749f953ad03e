"""Text to token ids and back, and conversations to prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from kvlab.config import ModelConfig
from kvlab.errors import PromptError, WeightsError
from kvlab.weights.folder import read_json

#: One message of a conversation: ``{"role": "user", "content": "..."}``.
Message = Mapping[str, Any]


class Tokenizer:
    """A model's tokenizer: the vocabulary, the special tokens and the chat template.

    Args:
        rules: the tokenizer of the ``tokenizers`` library.
        special: what stands for ``bos_token``, ``eos_token``, ``unk_token`` and so on.
        chat_template: Jinja source that renders messages, or None.
        eos_token_ids: generation stops after any of these.
        bos_token_id: put before a raw prompt by some families.
        name: for messages.
    """

    def __init__(
        self,
        rules: tokenizers.Tokenizer,
        *,
        special: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        eos_token_ids: Sequence[int] = (),
        bos_token_id: int | None = None,
        name: str = "this model",
    ) -> None:
        self.rules, self.special = rules, dict(special or {})
        self.chat_template, self.name = chat_template, name
        self.eos_token_ids = tuple(eos_token_ids) or self._ids_of("eos_token")
        self.bos_token_id = bos_token_id if bos_token_id is not None else next(iter(self._ids_of("bos_token")), None)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; ids from here on are padding of the model's embedding."""
        added = self.rules.get_added_tokens_decoder()
        return max(self.rules.get_vocab_size(with_added_tokens=False), max(added, default=-1) + 1)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The token ids of a text.

        Args:
            text: any text; the spelling of a special token becomes that token.
            special: add what the family adds to a raw prompt (a BOS, for some).
        """
        return list(self.rules.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of token ids. Half a character comes out as U+FFFD.

        Args:
            ids: token ids.
            skip_special: leave special tokens out.
        """
        return self.rules.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def tokens(self, ids: Sequence[int]) -> list[str]:
        r"""Each token for human eyes: its own text; bytes that are only part of a character as ``\xe4``.

        Args:
            ids: token ids.
        """
        return [self.token_bytes(i).decode("utf8", errors="backslashreplace") for i in ids]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text.

        Args:
            token_id: below ``vocab_size``; an id without a token (padding) adds nothing.
        """
        piece = self.rules.id_to_token(int(token_id))
        if piece is None:
            return b""
        if token_id in self._added:
            return piece.encode()
        if self._byte_level:
            return b"".join(_BYTE_OF[c] if c in _BYTE_OF else c.encode() for c in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace("\u2581", " ").encode()

    def settings(self) -> dict[str, Any]:
        """What ``tokenizer_config.json`` says of this tokenizer."""
        return self.special | ({} if self.chat_template is None else {"chat_template": self.chat_template})

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """The token ids of a conversation, ready for the model to answer.

        The template writes every special token itself, so none is added to it: one BOS, not two.

        Args:
            messages: ``role`` and ``content`` of each turn.
            add_generation_prompt: end with the opening of the assistant's turn.

        Raises:
            PromptError: the model has no chat template, or the template refuses these messages.
        """
        return self.encode(self.render(messages, add_generation_prompt), special=False)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, as :meth:`chat` encodes it.

        Args:
            messages: ``role`` and ``content`` of each turn.
            add_generation_prompt: end with the opening of the assistant's turn.

        Raises:
            PromptError: the model has no chat template, or the template refuses these messages.
        """
        from kvlab.weights.chat import render

        if self.chat_template is None:
            raise PromptError(
                f"{self.name} has no chat template: it was not trained to converse; "
                "prompt it with plain text (without --chat), or use a chat model such as smollm2"
            )
        return render(self.chat_template, messages, add_generation_prompt, self.special)

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self.rules.get_added_tokens_decoder())

    @cached_property
    def _byte_level(self) -> bool:
        """Whether pieces are spelled in the byte alphabet of GPT-2."""
        return '"ByteLevel"' in json.dumps(json.loads(self.rules.to_str()).get("decoder"))

    def _ids_of(self, kind: str) -> tuple[int, ...]:
        found = self.rules.token_to_id(self.special[kind]) if kind in self.special else None
        return () if found is None else (found,)


def read_tokenizer(folder: Path, config: ModelConfig | None = None) -> Tokenizer:
    """The tokenizer of a folder in the Hub's layout.

    Args:
        folder: has ``tokenizer.json``, and ``tokenizer_config.json`` for the special tokens and the chat template.
        config: of the model; its ids of beginning and end win over those that the tokenizer states.

    Raises:
        WeightsError: there is no ``tokenizer.json``, or it is damaged.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise WeightsError(
            f"{folder} has no tokenizer.json; save one there with "
            "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        )
    try:
        rules = tokenizers.Tokenizer.from_file(str(path))
    except Exception as failure:  # the library raises bare Exception
        raise WeightsError(f"{path} is not a tokenizer ({failure}); download it again") from None
    settings = _read_settings(folder)
    return Tokenizer(
        rules,
        special=_special_tokens(settings),
        chat_template=_chat_template(folder, settings),
        eos_token_ids=config.eos_token_ids if config else (),
        bos_token_id=config.bos_token_id if config else None,
        name=config.name if config else folder.resolve().name,
    )


def _read_settings(folder: Path) -> dict[str, Any]:
    """Both files that may name special tokens; the second wins, where it says something."""
    settings: dict[str, Any] = {}
    for path in (folder / "special_tokens_map.json", folder / "tokenizer_config.json"):
        if path.exists():
            settings |= {name: value for name, value in read_json(path).items() if value is not None}
    return settings


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and its kin; each is written as a string, or as an object with its content."""
    found = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and not name.startswith("add_") and isinstance(text, str):
            found[name] = text
    return found


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """A file of its own since transformers 4.52, a field of the settings before; of several, the default one."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text("utf8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others as characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    return alphabet | {chr(0x100 + i): bytes([byte]) for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
