"""The command line as a person meets it: in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

KVLAB = [sys.executable, "-m", "kvlab"]


def kvlab(*words: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KVLAB, *words], input=stdin, capture_output=True, text=True, timeout=120, env=os.environ | env, check=False
    )


def test_json_is_one_object_with_these_fields() -> None:
    done = kvlab("generate", "--model", "tiny", "--prompt", "O Romeo", "--max-new-tokens", "8", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert list(report) == [
        "text", "prompt_tokens", "new_tokens", "ttft_s", "tpot_s", "kv_bytes", "model", "device", "dtype",
        "finish_reason",
    ]  # fmt: skip
    assert report["model"] == "tiny"
    assert report["finish_reason"] in ("stop", "length")
    assert report["new_tokens"] <= 8
    cached = report["prompt_tokens"] + report["new_tokens"] - 1
    width = {"float32": 4, "bfloat16": 2, "float16": 2}[report["dtype"]]
    assert report["kv_bytes"] == cached * 2 * 6 * 2 * 32 * width
    assert report["ttft_s"] > 0


def test_a_single_token_has_no_tpot() -> None:
    report = json.loads(kvlab("generate", "--prompt", "O", "--max-new-tokens", "1", "--json").stdout)
    assert report["new_tokens"] == 1
    assert report["tpot_s"] is None


def test_the_text_streams_and_ends_with_a_table_of_both_phases() -> None:
    done = kvlab("generate", "--prompt", "O Romeo", "--max-new-tokens", "8", "--ignore-eos")
    same = json.loads(
        kvlab("generate", "--prompt", "O Romeo", "--max-new-tokens", "8", "--ignore-eos", "--json").stdout
    )
    assert done.stdout.startswith(same["text"])
    for word in ("prefill", "decode", "tokens/s", "KV bytes", "finish reason: length"):
        assert word in done.stdout
    assert done.stderr == ""


def test_a_seed_repeats_an_answer_and_standard_input_is_a_prompt() -> None:
    words = ["generate", "--prompt", "-", "--temperature", "1", "--top-p", "0.95", "--json", "--max-new-tokens", "12"]
    first, again, other = (
        json.loads(kvlab(*words, "--seed", seed, stdin="My lord,").stdout)["text"] for seed in ("1", "1", "2")
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", ""], "empty"),
        (["--prompt", "word " * 2000], "more than the context of tiny, 512"),
        (["--prompt", "x", "--model", "tinny"], "tiny"),
        (["--prompt", "x", "--temperature", "-1"], "temperature is -1.0"),
        (["--prompt", "x", "--temperature", "nan"], "temperature is nan"),
        (["--prompt", "x", "--top-p", "0"], "top_p is 0.0"),
        (["--prompt", "x", "--top-k", "0"], "top_k is 0"),
        (["--prompt", "x", "--device", "tpu9"], "tpu9"),
        (["--prompt", "x", "--dtype", "int4"], "int4"),
        (["--prompt", "x", "--chat"], "chat template"),
        (["--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--prompt", "x", "--weights", "int3"], "weights is 'int3'; it may be stored, int8, int4"),
        (["--prompt", "x", "--weights", "stored"], "tiny has no codes of its own"),
        (["--prompt", "x", "--kv", "int2"], "no cache is called 'int2'; kvlab has contiguous, paged, int8, int4"),
        (["--prompt", "x", "--cache", "streaming:4"], "give sinks + window, as in streaming:4+252"),
        (["--prompt", "x", "--cache", "streaming:4+510"], "514 tokens, more than the context of tiny, 512"),
        (["--prompt", "x", "--cache", "h2o:8+8", "--kv", "int8"], "'h2o:8+8:int8' would be h2o and int8 in one"),
        (["--prompt", "x", "--endless"], "ContiguousCache ends after 512 tokens"),
        (["--prompt", "x", "--endless", "--cache", "h2o:8+8"], "HeavyHitterCache ends after 512 tokens"),
    ],
)
def test_bad_input_ends_in_one_clear_line_and_exit_code_2(words: list[str], message: str) -> None:
    done = kvlab("generate", *words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.startswith("kvlab: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("weights.pkl", b"\x80\x04.", "pickle"),
        ("pytorch_model.bin", b"\x80\x04.", "pickle"),
        ("model.gguf", b"GGUF\x03\x00", "model.gguf"),
        ("model.gguf", b"nothing of the kind", "model.gguf"),
    ],
)
def test_unreadable_weights_end_in_one_clear_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    cache = tmp_path / "cache"
    done = kvlab("generate", "--model", str(tmp_path / name), "--prompt", "x", KVLAB_CACHE=str(cache))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    kept = [path for path in cache.rglob("*") if path.is_file() and path.parent.name != "fingerprints"]
    assert not kept


def test_ctrl_c_keeps_what_there_is_and_says_so() -> None:
    # More tokens than can be done before the interrupt arrives, whatever the machine.
    words = [*KVLAB, "generate", "--prompt", "O", "--ignore-eos", "--max-new-tokens", "511"]
    code = "import sys, kvlab.cli as c, kvlab.generation, time\ng = sys.modules['kvlab.generation.generate']\n"
    code += "d = g.decode\ndef slow(*a):\n    time.sleep(0.05)\n    return d(*a)\ng.decode = slow\n"
    code += f"sys.argv = {['kvlab', *words[3:]]!r}\nc.main()\n"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        start = run.stdout.read(1)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "finish reason: interrupted" in start + out
    assert "Traceback" not in err


def test_help_teaches() -> None:
    done = kvlab("generate", "--help", TERM="dumb", COLUMNS="200")
    assert done.returncode == 0
    for word in ("--model", "--prompt", "--temperature", "smollm2", "Examples", "prefill"):
        assert word in done.stdout
    assert kvlab("--version").stdout.startswith("kvlab ")


def test_weights_and_cache_in_fewer_bits(tmp_path: Path) -> None:
    """Rounded weights and a rounded cache answer too; the cache of a long answer takes fewer bytes."""
    words = [
        "generate",
        "--prompt",
        "O Romeo",
        "--max-new-tokens",
        "100",
        "--ignore-eos",
        "--json",
        "--dtype",
        "float32",
    ]
    narrow = kvlab(*words, "--weights", "int4", "--kv", "int8", KVLAB_CACHE=str(tmp_path))
    assert narrow.returncode == 0, narrow.stderr
    assert narrow.stderr == ""
    report, wide = json.loads(narrow.stdout), json.loads(kvlab(*words, KVLAB_CACHE=str(tmp_path)).stdout)
    assert list(report) == list(wide)
    assert report["new_tokens"] == wide["new_tokens"] == 100
    assert report["text"] != wide["text"]
    assert report["kv_bytes"] < 0.8 * wide["kv_bytes"]


def test_help_of_compile_says_what_it_makes_and_what_it_needs() -> None:
    done = kvlab("compile", "--help", TERM="dumb", COLUMNS="200")
    assert done.returncode == 0
    for word in (
        "--model",
        "--weights",
        "--batch",
        "stored",
        "apt install g++",
        "KVLAB_CACHE",
        "Examples",
        "crossovers",
    ):
        assert word in done.stdout


def test_compile_without_a_compiler_ends_in_one_clear_line(tmp_path: Path) -> None:
    done = kvlab("compile", "--model", "tiny", KVLAB_CACHE=str(tmp_path), PATH=str(tmp_path), CXX="")
    assert done.returncode == 2
    assert "no C++ compiler was found" in done.stderr
    assert "apt install g++" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_endless_answer_ends_at_ctrl_c_and_says_what_it_held() -> None:
    words = [*KVLAB, "generate", "--prompt", "O", "--endless", "--cache", "streaming:4+28"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        start = run.stdout.read(400)  # some hundred tokens: past the window
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "the cache holds 32 in" in (start + out).splitlines()[-1]
    assert "Traceback" not in err


def test_a_cache_of_few_tokens_by_name() -> None:
    kinds = ("full", "window:24", "streaming:4+20", "h2o:12+12", "snapkv:24")
    answers = {
        kind: json.loads(
            kvlab("generate", "--prompt", "O Romeo, " * 8, "--cache", kind, "--max-new-tokens", "24", "--json").stdout
        )
        for kind in kinds
    }
    bytes_ = {kind: answer["kv_bytes"] for kind, answer in answers.items()}
    assert bytes_["window:24"] == bytes_["streaming:4+20"] == bytes_["h2o:12+12"] < bytes_["snapkv:24"] < bytes_["full"]
    assert len({answer["text"] for answer in answers.values()}) > 1
