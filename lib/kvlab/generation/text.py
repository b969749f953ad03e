"""From tokens to text, while they arrive: whole characters only, and never a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvlab.errors import PromptError

_HALF = "\ufffd"


class TextStream:
    """Turns one row's tokens into text as they come.

    A token may end in the middle of a character (most Chinese characters and all emoji are several bytes), and a stop
    string may be spread over tokens. Both are held back until it is clear what they are.

    Args:
        decode: token ids to text.
        stop: texts that end the answer and are not part of it.

    Raises:
        PromptError: a stop string is empty.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        if any(not text for text in stop):
            raise PromptError("a stop string is empty; leave it out")
        self._decode, self._stop = decode, tuple(stop)
        self._ids: list[int] = []
        # Tokens are decoded together with a few before them: a tokenizer may render a token differently at the start.
        # Older ones are dropped: an answer without an end must not fill the memory.
        self._read = 0
        self._pending = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that became certain with this token, possibly none. Sets ``stopped`` at a stop string."""
        self._ids.append(token)
        return self._release(self._new_text())

    def finish(self) -> str:
        """What was held back, when no more tokens come; half a character becomes U+FFFD."""
        if self.stopped:
            return ""
        rest = self._release(self._new_text(final=True))
        held, self._pending = self._pending, ""
        return rest if self.stopped else rest + held

    def _new_text(self, final: bool = False) -> str:
        before, text = self._decode(self._ids[: self._read]), self._decode(self._ids)
        if text.endswith(_HALF) and not final:
            return ""
        del self._ids[: self._read]
        self._read = len(self._ids)
        return text[len(before) :]

    def _release(self, text: str) -> str:
        self._pending += text
        found = [at for at in (self._pending.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            out, self._pending = self._pending[: min(found)], ""
            return out
        certain = len(self._pending) - self._held()
        out, self._pending = self._pending[:certain], self._pending[certain:]
        return out

    def _held(self) -> int:
        """Length of the longest end of the pending text that a stop string could begin with."""
        longest = min(len(self._pending), max(map(len, self._stop), default=0))
        ends = (self._pending[-n:] for n in range(longest, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stop)), 0)
