"""Streaming text: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.errors import PromptError
from kvlab.generation import TextStream


def from_bytes(ids: Sequence[int]) -> str:
    """A tokenizer with one token a byte: the hardest case for streaming."""
    return bytes(ids).decode("utf8", errors="replace")


def stream(text: bytes, stop: Sequence[str] = ()) -> tuple[list[str], TextStream]:
    out = TextStream(from_bytes, stop)
    pieces = []
    for byte in text:
        pieces.append(out.push(byte))
        if out.stopped:
            return pieces, out
    return [*pieces, out.finish()], out


def test_half_characters_are_held_back() -> None:
    pieces, _ = stream("a词😀".encode())
    assert pieces == ["a", "", "", "词", "", "", "", "😀", ""]


def test_half_a_character_at_the_end_becomes_one_replacement_character() -> None:
    pieces, _ = stream("a😀".encode()[:-1])
    assert "".join(pieces) == "a\ufffd"


def test_broken_bytes_in_the_middle_do_not_block_what_follows() -> None:
    pieces, _ = stream(b"a\xffbc")
    assert "".join(pieces) == "a\ufffdbc"
    assert pieces[-1] == ""


@given(st.text(max_size=40))
def test_the_pieces_are_the_text(text: str) -> None:
    pieces, _ = stream(text.encode())
    assert "".join(pieces) == text


@given(
    st.text(alphabet="ab\u8bcd", max_size=30),
    st.lists(st.text(alphabet="ab\u8bcd", min_size=1, max_size=4), max_size=3),
)
def test_the_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    pieces, out = stream(text.encode(), stops)
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert "".join(pieces) == text
        assert not out.stopped
        return
    # The stop string that is complete first ends the answer; of several complete at once, the one that begins first.
    complete = min(ends)
    start = min(text.index(stop) for stop in stops if stop in text[:complete])
    assert "".join(pieces) == text[:start]
    assert out.stopped
    assert out.finish() == ""


def test_what_a_stop_string_could_begin_with_is_held_back() -> None:
    out = TextStream(from_bytes, ["END"])
    assert [out.push(b) for b in b"xENx"] == ["x", "", "", "ENx"]


def test_what_was_held_back_comes_out_at_the_end() -> None:
    pieces, out = stream(b"xEN", ["END"])
    assert pieces[-1] == "EN"
    assert not out.stopped


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(PromptError, match="empty"):
        TextStream(from_bytes, [""])
