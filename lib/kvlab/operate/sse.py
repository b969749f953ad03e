"""Server-sent events out of bytes that arrive in any pieces (WHATWG HTML, section 9.2)."""

from __future__ import annotations

from kvlab.errors import MeasureError

#: A line that grows beyond this is no event of a language model, and would fill the memory.
_LONGEST_LINE = 16 * 2**20


class EventStream:
    """Collects the ``data`` of each event. Lines end in LF, CRLF or CR, and may be cut anywhere, even in a character.

    Comments (``: keep-alive``) and other fields (``event``, ``id``, ``retry``) are passed over. Differs from the
    standard in one point: an event that the stream ends without a blank line after it counts (:meth:`close`), because
    servers forget it.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[str] = []
        self._after_cr = self._begun = False

    def feed(self, chunk: bytes) -> list[str]:
        """The data of every event that these bytes complete; several ``data`` lines of an event are joined by LF.

        Args:
            chunk: the next bytes, however the network cut them.

        Raises:
            MeasureError: a line is longer than 16 MiB.
        """
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        if chunk:
            self._after_cr = chunk.endswith(b"\r")
        self._rest += chunk
        lines = bytes(self._rest).splitlines(keepends=True)
        self._rest.clear()
        if lines and not lines[-1].endswith((b"\n", b"\r")):
            self._rest += lines.pop()
            if len(self._rest) > _LONGEST_LINE:
                raise MeasureError(f"a line of the event stream is longer than {_LONGEST_LINE:,} bytes")
        return [data for line in lines if (data := self._line(line.rstrip(b"\r\n"))) is not None]

    def close(self) -> list[str]:
        """The data of an event that nothing ended; call it when the stream is over."""
        line, self._rest = bytes(self._rest), bytearray()
        found = [self._line(line), self._line(b"")] if line else [self._line(b"")]
        return [data for data in found if data is not None]

    def _line(self, line: bytes) -> str | None:
        """Take a line; the data of an event where the line ends one that has any."""
        if not self._begun:
            line, self._begun = line.removeprefix(b"\xef\xbb\xbf"), True
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" ").decode("utf8", errors="replace"))
            return None
        lines, self._data = self._data, []
        return "\n".join(lines) if lines else None
