"""Server-sent events come out the same however the network cuts them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.errors import MeasureError
from kvlab.operate import sse
from kvlab.operate.sse import EventStream

STREAMS = sorted((Path(__file__).parent / "fixtures" / "sse").rglob("*.sse"))


def events(*pieces: bytes) -> list[str]:
    stream = EventStream()
    found = [data for piece in pieces for data in stream.feed(piece)]
    return found + stream.close()


TANGLED = (
    "\ufeffdata: one\r\n\r\n: comment\r\rdata:two\ndata:  lines\n\nevent: x\nid: 7\nretry: 1\ndata: ключ 😌\r\n\r"
    "data\n\ndata: {\"a\": \"b: c\"}\n\nunknown: field\n\n\n\ndata: x\r\ndata: y\r\n\r\ndata: last"
).encode()  # fmt: skip
TANGLED_EVENTS = ["one", "two\n lines", "ключ 😌", "", '{"a": "b: c"}', "x\ny", "last"]


def test_what_a_stream_may_contain() -> None:
    assert events(TANGLED) == TANGLED_EVENTS


@given(st.lists(st.integers(0, len(TANGLED)), max_size=12))
def test_every_split_gives_the_same_events(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(TANGLED)]
    assert events(*(TANGLED[start:end] for start, end in pairwise(edges))) == TANGLED_EVENTS


@pytest.mark.parametrize("path", STREAMS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_captured_streams_byte_by_byte(path: Path) -> None:
    whole = path.read_bytes()
    assert events(*(whole[at : at + 1] for at in range(len(whole)))) == events(whole) != []


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_every_line_end(end: bytes) -> None:
    stream = end.join([b"data: a", b"data: b", b"", b": comment", b"data: c", b"", b""])
    assert events(stream) == ["a\nb", "c"]


@pytest.mark.parametrize("missing", [b"data: a\n\ndata: b\n\n", b"data: a\n\ndata: b\n", b"data: a\n\ndata: b"])
def test_the_last_blank_line_may_be_missing(missing: bytes) -> None:
    assert events(missing) == ["a", "b"]


def test_an_event_is_there_as_soon_as_its_blank_line_is() -> None:
    stream = EventStream()
    assert stream.feed(b"data: a\r\n") == []
    assert stream.feed(b"\r") == ["a"]
    assert stream.feed(b"\ndata: b\n\n") == ["b"]
    assert stream.close() == []


def test_bytes_that_are_no_text_do_not_end_the_stream() -> None:
    assert events(b"data: \xff\n\ndata: b\n\n") == ["\ufffd", "b"]


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "_LONGEST_LINE", 100)
    stream = EventStream()
    stream.feed(b"x" * 99)
    with pytest.raises(MeasureError, match="longer than 100 bytes"):
        stream.feed(b"xx")
