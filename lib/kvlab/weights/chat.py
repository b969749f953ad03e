"""Rendering a chat template. Templates come with models, so they run in Jinja's sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvlab.errors import PromptError


def render(
    template: str, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, special: Mapping[str, str]
) -> str:
    """The prompt that a template makes of a conversation.

    Args:
        template: Jinja source.
        messages: ``role`` and ``content`` of each turn.
        add_generation_prompt: end with the opening of the assistant's turn.
        special: ``bos_token`` and its kin, which templates may name.

    Raises:
        PromptError: there are no messages, one lacks a field, or the template refuses them.
    """
    _check(messages)
    try:
        return _compiled(template).render(
            messages=[dict(m) for m in messages], add_generation_prompt=add_generation_prompt, **special
        )
    except jinja2.TemplateError as failure:
        raise PromptError(f"the chat template does not accept these messages: {failure}") from None


def _check(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise PromptError("there are no messages; give at least one, such as {'role': 'user', 'content': 'Hello'}")
    for at, message in enumerate(messages):
        if not {"role", "content"} <= set(message):
            raise PromptError(f"message {at} is {message!r}; it needs 'role' (system, user, assistant) and 'content'")


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    """The environment that chat templates are written for: that of ``transformers``."""
    room = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    room.filters["tojson"] = _tojson
    room.globals["raise_exception"] = _refuse
    room.globals["strftime_now"] = _strftime_now
    return room.from_string(template)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what the assistant says, for training; here it only passes its text on."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """A block that is its own content."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _tojson(value: Any, indent: int | None = None) -> str:
    """Jinja's own filter escapes HTML, which a prompt must not."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
