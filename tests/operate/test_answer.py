"""Every dialect says the same: which text, how many tokens, how it ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlab.operate.answer import Answer, complaint, complaint_of
from kvlab.operate.sse import EventStream

FIXTURES = Path(__file__).parent / "fixtures"
STREAMS = {f"{path.parent.name}/{path.stem}": path for path in sorted((FIXTURES / "sse").rglob("*.sse"))}
#: Answers to the same question that were not streamed, with the events whose texts they have in common.
TWINS = {
    "vllm/chat_stream_plain": "vllm/chat_nostream",
    "vllm/chat_stream_usage": "vllm/chat_nostream",
    "vllm/chat_stream_stop": "vllm/chat_nostream",
    "vllm/comp_stream_plain": "vllm/comp_nostream",
    "vllm/comp_stream_usage": "vllm/comp_nostream",
    "transformers/chat_stream_plain": "transformers/chat_nostream",
    "transformers/chat_stream_usage": "transformers/chat_nostream",
    "transformers/comp_stream_plain": "transformers/comp_nostream",
    "transformers/comp_stream_usage": "transformers/comp_nostream",
    "llama/chat_stream_plain": "llama/chat_nostream",
    "llama/chat_stream_usage": "llama/chat_nostream",
    "llama/comp_stream_plain": "llama/comp_nostream",
    "llama/comp_stream_usage": "llama/comp_nostream",
}
#: Streams in which nobody counted.
UNCOUNTED = {"vllm/chat_stream_plain", "vllm/comp_stream_plain", "vllm/chat_stream_logprobs"}
REFUSED = "vllm/http200_inband_503_queue_full"


def events(name: str) -> list[str]:
    stream = EventStream()
    return [*stream.feed(STREAMS[name].read_bytes()), *stream.close()]


def taken(*data: str | dict[str, Any]) -> Answer:
    answer = Answer()
    for each in data:
        answer.take(each if isinstance(each, str) else json.dumps(each))
    return answer


def counts(name: str) -> Iterator[dict[str, Any]]:
    """Every usage that the stream states, read without our code."""
    for line in STREAMS[name].read_text("utf8").splitlines():
        if line.startswith("data: {"):
            usage = json.loads(line[6:]).get("usage")
            if usage:
                yield usage


def test_every_capture_is_read() -> None:
    assert len(STREAMS) == 26
    assert set(TWINS) <= set(STREAMS)


@pytest.mark.parametrize(("name", "twin"), TWINS.items())
def test_a_stream_says_what_its_twin_says(name: str, twin: str) -> None:
    whole = json.loads((FIXTURES / "sse" / f"{twin}.json").read_text("utf8"))
    choice, usage = whole["choices"][0], whole["usage"]
    answer = taken(*events(name))
    assert "".join(answer.text) == (choice["text"] if "text" in choice else choice["message"]["content"])
    assert answer.finish_reason == choice["finish_reason"]
    assert answer.verdict() is None
    if name not in UNCOUNTED:
        assert (answer.prompt_tokens, answer.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])


@pytest.mark.parametrize("name", sorted(set(STREAMS) - UNCOUNTED - {REFUSED}))
def test_tokens_are_those_of_the_last_usage(name: str) -> None:
    answer, stated = taken(*events(name)), list(counts(name))
    if name == "llama/chat_stream_plain":  # no usage, but timings
        assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (36, 12, 35)
        return
    usage = stated[-1]
    assert (answer.prompt_tokens, answer.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert answer.cached_tokens == (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


@pytest.mark.parametrize("name", sorted(UNCOUNTED))
def test_without_usage_nothing_is_invented(name: str) -> None:
    answer = taken(*events(name))
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (None, None, None)


@pytest.mark.parametrize(
    ("name", "events_with_tokens"),
    [
        ("vllm/chat_stream_usage", 8),  # 7 words and the end-of-text token; not the role
        ("vllm/chat_stream_contusage", 6),  # usage on every event
        ("vllm/comp_stream_utf8", 16),  # half a character is a token without text
        ("vllm/chat_stream_ignoreeos", 64),
        ("vllm/comp_stream_keepalive", 3),  # 6 tokens, bundled
        ("vllm/comp_stream_spec_ngram", 7),  # 24 tokens, bundled
        ("transformers/comp_stream_utf8", 8),  # 16 tokens: halves make no event
        ("transformers/chat_stream_length", 4),  # not the role, not the finish event
        ("llama/chat_stream_length", 4),
        ("llama/chat_stream_usage", 12),  # 11 words and the end-of-text token
        ("llama/comp_stream_usage", 12),
    ],
)
def test_events_that_carry_tokens(name: str, events_with_tokens: int) -> None:
    answer = Answer()
    assert sum(answer.take(data) for data in events(name)) == answer.events == events_with_tokens


def test_a_stream_of_vllm_has_one_event_a_token() -> None:
    """With the rules for role, half a character and end of text, events and usage agree wherever nothing is bundled."""
    for name in (name for name in STREAMS if name.startswith("vllm/") and name not in UNCOUNTED | {REFUSED}):
        answer = taken(*events(name))
        if name not in ("vllm/comp_stream_keepalive", "vllm/comp_stream_spec_ngram"):
            assert answer.events == answer.output_tokens, name


def test_role_only_or_reasoning_chunks_the_first_generated_token_ends_ttft() -> None:
    """vllm PR 3768: a role is not generated; reasoning and tool calls are."""
    answer = Answer()
    deltas: list[tuple[dict[str, Any], bool]] = [
        ({"role": "assistant"}, False), ({"role": "assistant", "content": ""}, False), ({"reasoning": "hm"}, True),
        ({"reasoning_content": "so"}, True), ({"content": ""}, True), ({"content": "Yes"}, True),
        ({"tool_calls": [{"index": 0}]}, True), ({}, False),
    ]  # fmt: skip
    for delta, carries in deltas:
        assert answer.take(json.dumps({"choices": [{"delta": delta, "finish_reason": None}]})) is carries, delta
    assert ("".join(answer.text), "".join(answer.reasoning)) == ("Yes", "hmso")


@pytest.mark.parametrize(
    ("choice", "carries"),
    [
        ({"text": "", "finish_reason": "stop"}, True),
        ({"text": "", "finish_reason": "length"}, False),
        ({"text": "", "finish_reason": None}, True),
        ({"delta": {"content": ""}, "finish_reason": "stop"}, True),
        ({"delta": {}, "finish_reason": "stop"}, True),
        ({"delta": {}, "finish_reason": "length"}, False),
        ({"delta": {"content": None}, "finish_reason": None}, False),
        ({"delta": None, "finish_reason": None}, False),
        ({"delta": {"content": "a"}, "finish_reason": "length"}, True),
    ],
)
def test_events_without_text(choice: dict[str, Any], carries: bool) -> None:
    assert Answer().take(json.dumps({"choices": [choice]})) is carries


def test_an_error_inside_a_stream_is_one_although_done_follows() -> None:
    answer = taken(*events(REFUSED))
    fault = answer.verdict()
    assert fault is not None
    assert fault.kind == "in-band"
    assert fault.message.startswith("The engine is currently busy")


def test_tokens_before_an_error_do_not_make_it_a_success() -> None:
    lines = (FIXTURES / "timed" / "kill_vllm_sigterm_stream.jsonl").read_text("utf8").splitlines()
    stream, answer = EventStream(), Answer()
    for line in map(json.loads, lines):
        for data in stream.feed(line.get("data", "").encode()):
            answer.take(data)
    fault = answer.verdict()
    assert fault is not None
    assert (fault.kind, answer.events) == ("in-band", 53)
    assert "EngineCore encountered an issue" in fault.message


@pytest.mark.parametrize(
    "event", ["{", "[]", "7", '"text"', '{"choices": 5}', '{"choices": ["a"]}', "data", "[" * 100_000]
)
def test_malformed_events(event: str) -> None:
    fault = taken(event, "[DONE]").verdict()
    assert fault is not None
    assert fault.kind == "malformed"
    assert event[:300] in fault.message


@pytest.mark.parametrize("event", ["[DONE]", '{"choices": [{"text": "a", "finish_reason": null}]}', '{"choices": []}'])
def test_an_answer_without_finish_reason_is_none(event: str) -> None:
    fault = taken(event).verdict()
    assert fault is not None
    assert fault.kind == "closed"


def test_done_may_be_absent() -> None:
    answer = taken({"choices": [{"text": "a", "finish_reason": "length"}]})
    assert answer.verdict() is None
    assert answer.ending
    assert not answer.over


def test_what_follows_a_finish_reason_does_not_take_it_back() -> None:
    later = {"choices": [{"text": "", "finish_reason": None}], "usage": {"prompt_tokens": 4, "completion_tokens": 1}}
    answer = taken({"choices": [{"text": "a", "finish_reason": "stop"}]}, later)
    assert (answer.finish_reason, answer.output_tokens, answer.verdict()) == ("stop", 1, None)


def test_odd_counts_are_not_taken() -> None:
    odd = {"prompt_tokens": "9", "completion_tokens": None, "prompt_tokens_details": 3}
    answer = taken({"choices": [], "usage": odd}, {"choices": [], "timings": {"predicted_n": "many"}})
    assert (answer.prompt_tokens or None, answer.output_tokens, answer.cached_tokens or None) == (None, None, None)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"error": {"message": "too\nlong", "code": 400}}, "too long"),
        ({"error": "Unauthorized"}, "Unauthorized"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"detail": [{"type": "missing"}]}, '[{"type": "missing"}]'),
        ({"message": "no"}, "no"),
        ("Internal Server Error", "Internal Server Error"),
        (["a"], "['a']"),
    ],
)
def test_what_an_error_says(body: Any, said: str) -> None:
    assert complaint(body) == said


def test_every_captured_refusal_is_one_line() -> None:
    cases = [json.loads(line) for line in (FIXTURES / "errors" / "errors.jsonl").read_text("utf8").splitlines()]
    refused = [case for case in cases if case["status"] >= 400]
    assert len(refused) > 30
    for case in refused:
        said = complaint_of(case["body"].encode())
        assert said
        assert "\n" not in said
        assert len(said) <= 303
        assert not said.startswith("{"), case


def test_a_refusal_without_words() -> None:
    assert complaint_of(b"") == "no message"
    assert complaint_of(b"\xff<html>") == "\ufffd<html>"
    assert complaint_of(b"x" * 1000) == "x" * 300 + "..."
