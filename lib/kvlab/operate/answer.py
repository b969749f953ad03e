"""What the events of a streamed answer say, in the dialects of vLLM, llama.cpp's server and ``transformers serve``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvlab.operate.record import Fault
from kvlab.timing import carries_token

_EXCERPT = 300


@dataclass
class Answer:
    """Takes the events of one answer as they come.

    The dialects differ in what is easy to get wrong: the finish reason comes on the last token's event or on one of its
    own, usage on that event, on another one without choices or on every one, ``[DONE]`` or nothing at the end, and
    errors inside a stream whose status was 200. Tokens are never counted by events where the server says how many
    there were: an event can bundle several, and half a character is a token without text.

    Args:
        text: pieces of the answer, in order.
        reasoning: pieces of what was thought before it, in order.
        finish_reason: why it ended; None before it did.
        prompt_tokens: by the server's count; None as long as it did not say.
        output_tokens: by the server's count; None as long as it did not say.
        cached_tokens: of the prompt, found in the server's cache; None where it does not say.
        heard: events of any kind.
        events: that carried generated tokens.
        fault: what is wrong with it; None where nothing is.
        over: nothing more is to come: ``[DONE]``, or a fault.
    """

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    heard: int = 0
    events: int = 0
    fault: Fault | None = None
    over: bool = False

    def take(self, data: str) -> bool:
        """Whether this event carries generated tokens; everything that it says is noted.

        Args:
            data: of the event.
        """
        if self.over:
            return False
        self.heard += 1
        if data.strip() == "[DONE]":
            self.over = True
            return False
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            return self._fail("malformed", f"an event is not JSON: {one_excerpt(data)}")
        if not isinstance(event, dict):
            return self._fail("malformed", f"an event is not a JSON object: {one_excerpt(data)}")
        if event.get("error"):
            return self._fail("in-band", complaint(event))
        self._count(event)
        try:
            carried = sum(self._choice(choice) for choice in event.get("choices") or ()) > 0
        except (AttributeError, TypeError):
            return self._fail(
                "malformed", f"an event has no choices as OpenAI's protocol has them: {one_excerpt(data)}"
            )
        self.events += carried
        return carried

    @property
    def ending(self) -> bool:
        """Whether all that is still to come is usage, ``[DONE]`` or the end of the stream."""
        return self.over or self.finish_reason is not None

    def verdict(self) -> Fault | None:
        """What is wrong with the answer, now that the stream is over."""
        if self.fault is None and self.finish_reason is None:
            return Fault("closed", f"the stream ended after {self.events} chunks with tokens, without a finish_reason")
        return self.fault

    def _fail(self, kind: str, message: str) -> bool:
        self.fault, self.over = Fault(kind, message), True
        return False

    def _choice(self, choice: Mapping[str, Any]) -> bool:
        """Note what a choice says; whether it carries a token."""
        finish = choice.get("finish_reason")
        self.finish_reason = finish or self.finish_reason
        if "delta" in choice:
            delta = choice["delta"] or {}
            self.text.append(delta.get("content") or "")
            self.reasoning.append(delta.get("reasoning") or delta.get("reasoning_content") or "")
            return carries_token(delta) or _silent(delta.get("content"), finish, "role" in delta)
        text = choice.get("text")
        self.text.append(text or "")
        return bool(text) or _silent(text, finish, False)

    def _count(self, event: Mapping[str, Any]) -> None:
        """Take the server's counts. llama.cpp's server has them in ``timings`` even where nobody asks for usage."""
        usage, timings = event.get("usage"), event.get("timings")
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details")
            self.prompt_tokens = _number(usage, "prompt_tokens", self.prompt_tokens)
            self.output_tokens = _number(usage, "completion_tokens", self.output_tokens)
            self.cached_tokens = _number(details, "cached_tokens", self.cached_tokens)
        elif isinstance(timings, dict) and "predicted_n" in timings:
            self.output_tokens = _number(timings, "predicted_n", None)
            self.cached_tokens = _number(timings, "cache_n", 0)
            self.prompt_tokens = (_number(timings, "prompt_n", 0) or 0) + (self.cached_tokens or 0)


def _number(counts: Any, name: str, otherwise: int | None) -> int | None:
    """A count of the server's, if it is one."""
    found = counts.get(name) if isinstance(counts, dict) else None
    return found if isinstance(found, int) else otherwise


def _silent(text: object, finish: str | None, opens: bool) -> bool:
    """Whether an event without text stands for a token: half a character, or the end-of-text token.

    An answer that ends by itself (``stop``) was ended by a token. The extra event that some servers send at a length
    limit carries none, and neither does the one that opens a chat.
    """
    if opens:
        return False
    return finish == "stop" if finish else text == ""


def complaint(body: Any) -> str:
    """What a server's error says, in one line, in the forms that servers use.

    Args:
        body: decoded JSON, or text.
    """
    if isinstance(body, dict):
        error = body.get("error") or body.get("detail") or body.get("message") or body
        if isinstance(error, dict):
            error = error.get("message") or error
        return one_excerpt(error if isinstance(error, str) else json.dumps(error))
    return one_excerpt(str(body))


def complaint_of(body: bytes) -> str:
    """What the body of a refusal says, in one line.

    Args:
        body: as received, whatever it is.
    """
    text = body.decode("utf8", errors="replace")
    try:
        return complaint(json.loads(text))
    except ValueError:
        return one_excerpt(text) or "no message"


def one_excerpt(text: str) -> str:
    """The beginning of a text, in one line.

    Args:
        text: of any length.
    """
    line = " ".join(text[: 2 * _EXCERPT].split())
    return line if len(line) <= _EXCERPT else f"{line[:_EXCERPT]}..."
