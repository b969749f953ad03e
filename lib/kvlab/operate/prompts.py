"""Prompts of stated lengths that no server has seen before, and that share only what they are meant to share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from kvlab.errors import ConfigError, one_line

if TYPE_CHECKING:
    from kvlab.serving.workload import Arrival

_COMMON = """
    time year people way day man thing woman life child world school state family student group country problem hand
    part place case week company system program question work number night point home water room mother area money story
    fact month lot right study book eye job word business issue side kind head house service friend father power hour
    game line end member law car city community name president team minute idea body information back parent face others
    level office door health person art war history party result change morning reason research girl guy moment air
    teacher force education the of and to in is you that it he was for on are as with his they at be this have from or
    one had by but not what all were when your can said there use an each which she do how their if will up other about
    out many then them these so some her would make like him into has look two more write go see no could than first
    been who its now find long down did get come made may over new sound take only little know live me give most very
    after just good sentence man think say great where help through much before too means old any same tell boy follow
    came want show also around form three small set put does another well large must big even such because turn here
    why ask went men read need land different us move try
"""

#: Words that are one token of most vocabularies when a space stands before them.
WORDS = tuple(dict.fromkeys(_COMMON.split()))

#: Token ids for servers that take them: above special tokens and single bytes, below the end of most vocabularies.
IDS = range(1000, 9000)

#: Fewer words than this and prompts would resemble each other.
_ENOUGH = 16


@dataclass(frozen=True)
class Writer:
    """Writes the prompt of each request.

    A prompt is the first tokens of a conversation's text, which begins with its system prompt, as
    :class:`kvlab.serving.workload.Arrival` says. The history of a conversation has tokens of our own where the server's
    answers would stand: its later prompts are as long as real ones, and share their earlier prompts, not the answers.

    Args:
        salt: makes the prompts of this run different from all others.
        words: that texts consist of; None for token ids.
        per_word: tokens of a word, on average.
        overhead: tokens that the server adds to each prompt: a BOS, the chat template.
    """

    salt: str
    words: tuple[str, ...] | None = None
    per_word: float = 1.0
    overhead: int = 0

    def prompt(self, arrival: Arrival) -> str | list[int]:
        """The prompt of a request: a text, or token ids.

        Args:
            arrival: what is asked for.
        """
        shared = self._pieces("system", arrival.system, self._count(arrival.system_tokens))
        own = self._pieces("session", arrival.session, self._count(arrival.prompt_tokens - self.overhead) - len(shared))
        pieces = shared + own
        if self.words is None:
            return pieces
        return " ".join(self.words[piece] for piece in pieces)

    def _count(self, tokens: int) -> int:
        """Words, or ids, of so many tokens."""
        return round(max(tokens, 0) / self.per_word)

    def _pieces(self, part: str, number: int, count: int) -> list[int]:
        """The first words, or ids, of a text that never changes within a run."""
        choices = IDS if self.words is None else range(len(self.words))
        least = 1 if part == "session" else 0
        return Random(f"{self.salt}/{part}/{number}").choices(choices, k=max(count, least))


def words_of(tokenizer: Path) -> tuple[str, ...]:
    """Words that are exactly one token each, alone as well as after another.

    Args:
        tokenizer: a ``tokenizer.json``, or the folder it is in.

    Raises:
        ConfigError: it cannot be read, or has hardly any such words.
    """
    import tokenizers

    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    try:
        rules = tokenizers.Tokenizer.from_file(str(path))
    except Exception as failure:  # the library raises nothing more specific
        raise ConfigError(f"{path} is not a tokenizer.json: {one_line(failure)}") from None
    found = tuple(word for word in WORDS if _is_one_token(rules, word))
    if len(found) < _ENOUGH:
        raise ConfigError(f"{path} has {len(found)} of our words as single tokens; leave the tokenizer out")
    return found


def _is_one_token(rules: Any, word: str) -> bool:
    def ids(text: str) -> list[int]:
        return list(rules.encode(text, add_special_tokens=False).ids)

    alone = ids(word)
    # A vocabulary that lacks some letters drops them, and what is left may well be one token.
    return len(alone) == 1 and rules.decode(alone).strip() == word and len(ids(f"the {word}")) == len(ids("the")) + 1
