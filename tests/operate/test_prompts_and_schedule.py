"""Prompts have the length that was asked for; requests come when the process, or the trace, says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from kvlab.errors import ConfigError
from kvlab.operate.prompts import IDS, WORDS, Writer, words_of
from kvlab.operate.schedule import Load, read_trace
from kvlab.resources import resource
from kvlab.serving.workload import Arrival, arrivals, workload

TOKENIZER = resource("tiny", "tokenizer.json")


def arrival(prompt: int, session: int = 1, system: int = 0, system_tokens: int = 0) -> Arrival:
    return Arrival(0.0, prompt, 8, session, system, system_tokens)


@pytest.mark.parametrize("tokens", [1, 2, 17, 2000])
def test_ids_and_words_have_the_length_asked_for(tokens: int) -> None:
    ids = Writer("s").prompt(arrival(tokens))
    words = Writer("s", WORDS).prompt(arrival(tokens))
    assert isinstance(words, str)
    assert len(ids) == len(words.split()) == tokens
    assert all(each in IDS for each in ids)


@pytest.mark.parametrize("tokens", [40, 41, 555])
def test_what_the_server_adds_is_taken_off(tokens: int) -> None:
    writer = Writer("s", WORDS, overhead=30)
    assert len(writer.prompt(arrival(tokens)).split()) == tokens - 30  # type: ignore[union-attr]


def test_words_of_more_than_a_token() -> None:
    writer = Writer("s", WORDS, per_word=1.5, overhead=4)
    assert len(writer.prompt(arrival(154)).split()) == 100  # type: ignore[union-attr]


def test_a_prompt_is_never_empty() -> None:
    assert len(Writer("s", WORDS, overhead=30).prompt(arrival(5)).split()) == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("words", [None, WORDS])
def test_prompts_share_what_their_arrivals_share(words: tuple[str, ...] | None) -> None:
    writer = Writer("s", words)

    def pieces(of: Arrival) -> list[int | str]:
        prompt = writer.prompt(of)
        return list(prompt.split() if isinstance(prompt, str) else prompt)

    first, second = pieces(arrival(50, 1, 3, 20)), pieces(arrival(60, 2, 3, 20))
    assert (len(first), len(second)) == (50, 60)
    assert first[:20] == second[:20]
    assert first[20:28] != second[20:28]
    assert pieces(arrival(50, 1, 4, 20))[:8] != first[:8]
    assert pieces(arrival(80, 1, 3, 20))[:50] == first
    assert pieces(arrival(50, 1, 3, 20)) == first


def test_another_run_writes_other_prompts() -> None:
    assert Writer("a").prompt(arrival(16)) != Writer("b").prompt(arrival(16))


def test_with_the_tokenizer_a_text_has_exactly_as_many_tokens() -> None:
    rules = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    writer = Writer("s", words_of(TOKENIZER))
    for tokens in (1, 2, 3, 50, 400):
        text = writer.prompt(arrival(tokens, session=tokens))
        assert len(rules.encode(text, add_special_tokens=False).ids) == tokens
    assert words_of(TOKENIZER.parent) == words_of(TOKENIZER)


def test_tokenizers_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a tokenizer\.json"):
        words_of(tmp_path / "missing.json")
    (tmp_path / "tokenizer.json").write_text("{}", "utf8")
    with pytest.raises(ConfigError, match=r"is not a tokenizer\.json"):
        words_of(tmp_path)
    letters = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={letter: i for i, letter in enumerate("abc")}, merges=[])
    )
    letters.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="has 0 of our words as single tokens"):
        words_of(tmp_path)


def test_words_are_different_and_plain() -> None:
    assert len(set(WORDS)) == len(WORDS) > 240
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)


def test_lengths_and_arrivals_are_those_of_the_workload() -> None:
    for name in ("azure-conv", "uniform:5-9/1-3", "shared-prefix", "multi-turn"):
        load = Load(requests=40, rate=3, workload=name, seed=5)
        assert load.arrivals() == list(arrivals(workload(name), rate=3, requests=40, seed=5))
        assert load.places is None


def test_open_and_closed_loops(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"time": 0, "prompt_tokens": 3, "output_tokens": 4}\n', "utf8")
    assert Load().places == 1
    assert Load(concurrency=7).places == 7
    assert Load(rate=1).places is Load(trace=trace).places is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"requests": 0}, "requests is 0"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"rate": 0.0}, "rate is 0.0"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"warmup": -1}, "warmup is -1"),
        ({"rate": 1.0, "concurrency": 1}, "rate and concurrency are given"),
        ({"rate": 1.0, "trace": Path("x")}, "rate and trace are given"),
        ({"burstiness": 2.0}, "give a rate with it"),
        ({"rate": 1.0, "burstiness": 0.0}, "gap_cv is 0.0"),
        ({"workload": "azure"}, "no workload is called 'azure'"),
        ({"workload": "fixed:0/1"}, "shortest length"),
        ({"slo_ttft": 0.0}, "slo_ttft is 0.0"),
        ({"slo_tpot": float("inf")}, "slo_tpot is inf"),
    ],
)
def test_loads_that_are_none(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Load(**settings)


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:03.9299600,110,27
"""


def test_a_trace_of_azure_begins_at_zero_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE, "utf8")
    found = list(read_trace(path, 10))
    assert [each.time for each in found] == pytest.approx([0.0, 0.05, 0.102])
    assert [(each.prompt_tokens, each.output_tokens) for each in found] == [(110, 27), (4808, 10), (3180, 8)]
    assert len({each.session for each in found}) == 3


def test_a_trace_in_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "ours.jsonl"
    lines = [{"time": 7.5 + n, "prompt_tokens": 10 + n, "output_tokens": 3} for n in range(5)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf8")
    assert [each.time for each in read_trace(path, 3)] == [0.0, 1.0, 2.0]
    assert [each.prompt_tokens for each in Load(trace=path).arrivals()] == [10, 11, 12, 13, 14]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no requests"),
        ("time,prompt_tokens\n1,2\n", "request 1 of the trace has no output_tokens"),
        ("time,prompt_tokens,output_tokens\n1,2,3\nsoon,2,3\n", "request 2 of the trace"),
        ("time,prompt_tokens,output_tokens\n1,2,\n", "request 1 of the trace"),
        ("time,prompt_tokens,output_tokens\n1,0,3\n", "prompt_tokens is 0"),
        ("time,prompt_tokens,output_tokens\n1,2,0\n", "output_tokens is 0"),
        ("time,prompt_tokens,output_tokens\nnan,2,3\n", "time is nan"),
    ],
)
def test_traces_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text, "utf8")
    with pytest.raises(ConfigError, match=message):
        list(read_trace(path, 10))


def test_files_that_are_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_trace(tmp_path / "missing.csv", 1))
    for content in (b"{", b"\xff\xfe", b"[1]\n", b"7\n"):
        (tmp_path / "t.jsonl").write_bytes(content)
        with pytest.raises(ConfigError):
            list(read_trace(tmp_path / "t.jsonl", 1))
