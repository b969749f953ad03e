"""What happened to one request of a load test, and the figures that follow from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from kvlab.timing import RequestTimes


@dataclass(frozen=True)
class Fault:
    """Why a request failed.

    Args:
        kind: ``refused`` (no connection), ``timeout``, ``closed`` (the stream ended before the answer did),
            ``http-400`` and other statuses, ``in-band`` (an error inside a stream of status 200), ``malformed`` (no
            event stream, or an event that cannot be read), ``cancelled`` (by us, when the run was interrupted).
        message: in one line, the server's own words where it gave any.
    """

    kind: str
    message: str


@dataclass(slots=True)
class Record:
    """The log of one request. Times are seconds since the run began; None is "never".

    Latencies count from ``intended_s``, when the request was due, not from when the client came to send it: a client
    or a server that holds later requests back cannot hide their wait (coordinated omission).

    Args:
        id: counted from 0 in the order in which requests were due.
        intended_s: when it was due: by the arrival process in an open loop, in a closed one when its place became free.
        asked_prompt_tokens: how long its prompt was meant to be.
        asked_output_tokens: how long its answer should be.
        sent_s: when the client began to send it.
        headers_s: when the status came.
        chunks_s: when each chunk came that carries generated tokens.
        end_s: when nothing more was to come.
        status: of HTTP.
        error: why it failed; None where it did not.
        finish_reason: as the server says it.
        prompt_tokens: as the server counts them; None where it does not say.
        output_tokens: as the server counts them; where it does not say, the chunks that carried any.
        cached_tokens: of the prompt, that the server found in its cache; None where it does not say.
        counted: ``output_tokens`` come from the server.
        resent: sent a second time, because the connection of an earlier request turned out to be closed.
    """

    id: int
    intended_s: float
    asked_prompt_tokens: int
    asked_output_tokens: int
    sent_s: float | None = None
    headers_s: float | None = None
    chunks_s: list[float] = field(default_factory=list)
    end_s: float | None = None
    status: int | None = None
    error: Fault | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int = 0
    cached_tokens: int | None = None
    counted: bool = False
    resent: bool = False

    @property
    def completed(self) -> bool:
        """Whether it was answered to the end: a status of 200 alone proves nothing."""
        return self.error is None and self.finish_reason is not None

    @property
    def times(self) -> RequestTimes:
        """Its events: chunks stand for tokens, because between chunks nothing can be seen."""
        return RequestTimes(self.intended_s, self.chunks_s)

    @property
    def ttft(self) -> float | None:
        """Time to first token: until the first chunk with anything generated. The role that opens a chat is not."""
        return self.times.ttft

    @property
    def e2e(self) -> float | None:
        """End to end: until the last chunk with anything generated; usage and ``[DONE]`` come later."""
        return self.times.e2e

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, ``(E2E - TTFT) / (n - 1)`` with the server's own count ``n``.

        Bundled chunks do not change it much. None for fewer than two tokens, and where all came in one chunk.
        """
        if self.output_tokens < 2 or len(self.chunks_s) < 2:
            return None
        return (self.chunks_s[-1] - self.chunks_s[0]) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Gaps between chunks that carry tokens.

        Where a server bundles k tokens in a chunk, a gap is k times the time of a token, and there are k times fewer of
        them: ITL is then a property of the chunks. TPOT is not. Where a proxy holds chunks back and lets them go
        together, most gaps are nothing and a few are long.
        """
        return self.times.itl

    @property
    def send_lag(self) -> float | None:
        """How late the client sent it: a property of the client, not of the server."""
        return None if self.sent_s is None else self.sent_s - self.intended_s

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """From the JSON object of :meth:`to_json`.

        Args:
            data: the object; what this version does not know is left out.
        """
        known = {each.name: data[each.name] for each in fields(cls) if each.name in data}
        return cls(**known | {"error": Fault(**data["error"]) if data.get("error") else None})
