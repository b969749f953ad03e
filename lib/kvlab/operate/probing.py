"""What to know of a server before it is tested: which fields it accepts, and how many tokens a prompt becomes."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path

from kvlab.errors import MeasureError
from kvlab.operate.exchange import Client, Dialect, simpler
from kvlab.operate.prompts import WORDS, Writer, words_of
from kvlab.operate.record import Record
from kvlab.serving.workload import Arrival

#: Prompts of so many words show what a word costs, and what the server adds to every prompt.
_SHORT, _LONG = 16, 80

#: Of a probe's answer. More than one, so that "at least so many" means something.
_ANSWER = 2


async def learn(client: Client, tokenizer: Path | None = None) -> tuple[Dialect, Writer]:
    """Find out what a server accepts, with two to five tiny requests, and how to write prompts for it.

    A server that refuses them all is taken to accept everything: the load test shows what it says.

    Args:
        client: of the server.
        tokenizer: of the model, see :class:`~kvlab.operate.schedule.Load`.

    Raises:
        ConfigError: the tokenizer cannot be used.
        MeasureError: the server cannot be reached.
    """
    salt = secrets.token_hex(8)
    words = WORDS if tokenizer is None else words_of(tokenizer)
    text, ids = Writer(salt, words), Writer(salt)
    known = client.target.dialect
    if known is not None:
        return known, ids if known.token_ids else text
    first = dialect = Dialect(token_ids=client.target.endpoint == "completions" and tokenizer is None)
    while True:
        record = await _probe(client, dialect, ids if dialect.token_ids else text, _SHORT)
        if record.error is None or record.error.kind not in ("http-400", "http-422"):
            break
        following = simpler(dialect, record.error.message)
        if following is None:
            return replace(first, token_ids=False), text
        dialect = following
    if dialect.token_ids:
        return dialect, ids
    return dialect, await _calibrated(client, dialect, text, record)


async def _calibrated(client: Client, dialect: Dialect, writer: Writer, short: Record) -> Writer:
    """The writer, with what a second probe says about the length of texts; as it is where the server does not count."""
    if short.error is not None or short.prompt_tokens is None:
        return writer
    long = await _probe(client, dialect, writer, _LONG)
    if long.error is not None or long.prompt_tokens is None:
        return writer
    per_word = (long.prompt_tokens - short.prompt_tokens) / (_LONG - _SHORT)
    if per_word <= 0:
        return writer
    return replace(writer, per_word=per_word, overhead=round(short.prompt_tokens - _SHORT * per_word))


async def _probe(client: Client, dialect: Dialect, writer: Writer, words: int) -> Record:
    record = Record(-1, client.now(), words, _ANSWER)
    prompt = writer.prompt(Arrival(0.0, words, _ANSWER, session=-words))
    await client.ask(client.request(prompt, _ANSWER, dialect), record)
    if record.status is None and record.error is not None:
        raise MeasureError(
            f"{client.target.address} cannot be reached ({record.error.kind}: {record.error.message}); start the "
            "server, wait until it is ready, and check the address"
        )
    return record
