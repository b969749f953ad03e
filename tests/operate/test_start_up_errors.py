"""The texts of errors: what they mean, and the numbers in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvlab.errors import MeasureError, RequestRefused
from kvlab.operate.causes import CAUSES
from kvlab.operate.diagnose import diagnose_error
from kvlab.operate.error_texts import WORDINGS
from kvlab.serving import Replica, Request

ERRORS = Path(__file__).parent / "fixtures" / "errors" / "errors.jsonl"

# As users posted them; the numbers behind them are what the remedy must say.
POSTED = [
    # vllm 2418 (4,096 of 3,664) and OpenRLHF 336: 378 blocks of 16 tokens
    (
        "ValueError: The model's max seq len (4096) is larger than the maximum number of tokens that can be stored in "
        "KV cache (3664). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the "
        "engine.",
        "max-model-len-over-pool", "--max-model-len to 3664",
    ),
    (
        "The model's max seq len (8192) is larger than the maximum number of tokens that can be stored in KV cache "
        "(6048).",
        "max-model-len-over-pool", "--max-model-len to 6048",
    ),
    (
        "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (0.71 GiB). Based on the available memory, the "
        "estimated maximum model length is 5632. Try increasing `gpu_memory_utilization` or decreasing `max_model_len`",
        "max-model-len-over-pool", "--max-model-len to 5632",
    ),
    (
        "To serve at least one request with the model's max seq len (2048), ... estimated maximum model length is 1248",
        "max-model-len-over-pool", "--max-model-len to 1248",
    ),
    # vllm 16118, before it made the estimate: 1,048,576 x 9.97 / 24
    (
        "To serve at least one request with the models's max seq len (1048576), (24.00 GiB KV cache is needed, which "
        "is larger than the available KV cache memory (9.97 GiB). Try increasing `gpu_memory_utilization`",
        "max-model-len-over-pool", "about 435595",
    ),
    (
        "To serve at least one request with the models's max seq len (4096), (2.00 GiB KV cache is needed, which is "
        "larger than the available KV cache memory (-1.25 GiB).",
        "max-model-len-over-pool", "Nothing is left for the pool",
    ),
    ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
     "weights-out-of-memory", "more devices"),
    (
        "ValueError: Free memory on device (31.44/47.38 GiB) on startup is less than desired GPU memory utilization "
        "(0.95, 45.01 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        "memory-taken", "--gpu-memory-utilization to 0.66",
    ),
    (
        "ValueError: Free memory on device cuda:0 (19.77/22.05 GiB) on startup is less than desired GPU memory "
        "utilization (0.9, 19.84 GiB).",
        "memory-taken", "--gpu-memory-utilization to 0.89",
    ),
    (
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try "
        "lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.",
        "activations-out-of-memory", "--max-num-seqs below 1024",
    ),
    (
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        "weights-out-of-memory", "Raise --mem-fraction-static",
    ),
    (
        "ValueError: User-specified max_model_len (8192) is greater than the derived max_model_len "
        "(max_position_embeddings=4096 or model_max_length=None in model's config.json). This may lead to incorrect "
        "model outputs or CUDA errors. To allow overriding this maximum, set the env var "
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1",
        "context-overflow", "--max-model-len to 4096",
    ),
    (
        "User-specified max_model_len (131072) is greater than the derived max_model_len (None=8192 in model's "
        "config.json)",
        "context-overflow", "--max-model-len to 8192",
    ),
    (
        "This model's maximum context length is 8192 tokens. However, you requested 8204 tokens (12 in the messages, "
        "8192 in the completion). Please reduce the length of the messages or completion.",
        "context-overflow", "max_tokens of 8180 or less",
    ),
    ("This model's maximum context length is 8192 tokens. However, you requested 8204", "context-overflow", "8204"),
    (
        "'max_tokens' or 'max_completion_tokens' is too large: 8192. This model's maximum context length is 8192 "
        "tokens and your request has 12 input tokens (8192 > 8192 - 12).",
        "context-overflow", "max_tokens of 8180 or less",
    ),
    ("ValueError: Cannot find the config file for awq", "quantization-flag", "Leave --quantization awq out"),
    (
        "Quantization method specified in the model config (fp8) does not match the quantization method specified in "
        "the `quantization` argument (gguf).",
        "quantization-flag", "the checkpoint says fp8",
    ),
    (
        "ValueError: torch.bfloat16 is not supported for quantization method awq. Supported dtypes: [torch.float16]",
        "quantization-flag", "--dtype float16 with awq",
    ),
    (
        "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 GPU has "
        "compute capability 7.5. You can use float16 instead by explicitly setting the`dtype` flag in CLI",
        "dtype-unsupported", "the Tesla T4 has compute capability 7.5.",
    ),
    ("Total number of attention heads (28) must be divisible by tensor parallel size (8).",
     "heads-not-divisible", "1, 2, 4, 7, 14, 28"),
    (
        "OSError: meta-llama/Llama-9-8B is not a local folder and is not a valid model identifier listed on "
        "'https://huggingface.co/models'",
        "model-not-found", "HF_TOKEN",
    ),
    ("You are trying to access a gated repo. Make sure to have access to it", "model-not-found", "accept its terms"),
    ("OSError: [Errno 98] Address already in use", "port-in-use", "another port"),
    ("vllm: error: unrecognized arguments: --swap-space 4", "command-line", "Leave --swap-space out"),
    ("vllm: error: unrecognized arguments: --max-model-length 4096", "command-line", "--max-model-length up in"),
    ("api_server.py: error: unrecognized arguments:  ", "command-line", "lines of their own"),
    ("bash: --max-model-len: command not found", "command-line", "The line before --max-model-len"),
    ("vllm serve m --gpu-memory-utilization 0.9 \\  # most of it\n  --max-model-len 8192", "command-line", "above"),
    ("vllm serve m \\ \n  --max-model-len 8192", "command-line", "last character of the line"),
    ("curl: (18) transfer closed with outstanding read data remaining", "server-errors", "in the middle of an answer"),
    ("llama_kv_cache_init: failed to allocate buffer for kv cache", "max-model-len-over-pool", "-np"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "cause", "says"), POSTED, ids=[f"{row[1]}-{n}" for n, row in enumerate(POSTED)])
def test_every_posted_error_is_understood_and_its_numbers_are_used(text: str, cause: str, says: str) -> None:
    found = diagnose_error(text)
    assert found.first == cause
    assert says in found.causes[0].remedy


@pytest.mark.parametrize(("text", "cause", "says"), POSTED[:4])
def test_an_error_is_found_in_the_middle_of_a_log_with_its_lines_broken(text: str, cause: str, says: str) -> None:
    words, log = text.split(" "), "INFO 11-30 Initializing a V1 LLM engine\nTraceback (most recent call last):\n"
    broken = "\n".join([" ".join(words[:8]), " ".join(words[8:])])
    assert says in diagnose_error(f"{log}{broken}\nRuntimeError: Engine core initialization failed.").causes[0].remedy
    assert [each.cause for each in diagnose_error(f"{log}{broken}\nEngine core initialization failed").causes] == [
        cause
    ]


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.74 GiB. GPU 0 has a total capacity of 23.57 GiB"


@pytest.mark.parametrize(
    ("log", "causes"),
    [
        ('File "gpu_worker.py", in load_model\nFile "linear.py", in create_weights\n', ["weights-out-of-memory"]),
        ('Loading safetensors checkpoint shards: 40%\n', ["weights-out-of-memory"]),
        ('in load_model\nFile "gpu_model_runner.py", line 7, in execute_model\n', ["activations-out-of-memory"]),
        ("in determine_available_memory\nin profile_run\nin _dummy_run\n", ["activations-out-of-memory"]),
        ("in compute_logits\n", ["activations-out-of-memory"]),
        ("", ["weights-out-of-memory", "activations-out-of-memory"]),
    ],
)  # fmt: skip
def test_the_same_message_at_two_times_has_opposite_remedies(log: str, causes: list[str]) -> None:
    found = diagnose_error(log + OOM)
    assert [finding.cause for finding in found.causes] == causes
    old = diagnose_error(log + OOM.replace("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError"))
    assert [finding.cause for finding in old.causes] == causes


# What real servers answered. Everything that was refused is understood.
CASES = [json.loads(line) for line in ERRORS.read_text("utf8").splitlines()]
BY_CASE = {
    "prompt_too_long": "context-overflow", "prompt_long": "context-overflow", "prompt_exact_max": "context-overflow",
    "max_tokens_too_large": "context-overflow", "unknown_model": "model-not-found", "queue_full": "admission-limit",
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [case for case in CASES if case["status"] != 200], ids=lambda case: f"{case['server']}-{case['case']}"
)
def test_every_captured_refusal_is_understood(case: dict[str, object]) -> None:
    body = case["body"] if isinstance(case["body"], str) else json.dumps(case["body"])
    expected = [cause for start, cause in BY_CASE.items() if str(case["case"]).startswith(start)]
    if case["case"] == "max_tokens_zero" and case["server"] == "vllm":
        expected = ["context-overflow"]  # the same words as for a prompt that fills the context
    assert diagnose_error(body).first == (expected[0] if expected else "server-errors")


def test_the_limit_in_a_captured_refusal_is_used() -> None:
    body = next(case["body"] for case in CASES if case["case"] == "prompt_too_long_comp")
    assert (
        "fewer than 2048 tokens" in diagnose_error(body if isinstance(body, str) else json.dumps(body)).causes[0].remedy
    )


def test_the_refusals_of_our_own_engine_are_understood() -> None:
    small = Replica(model="llama-3-8b", hardware="h100-sxm", blocks=64, block_size=16).engine().scheduler
    with pytest.raises(RequestRefused) as refused:
        small.add(Request(1, 900, 400))
    assert diagnose_error(str(refused.value)).first == "max-model-len-over-pool"
    large = Replica(model="llama-3-8b", hardware="h100-sxm", max_waiting=1).engine().scheduler
    with pytest.raises(RequestRefused) as refused:
        large.add(Request(1, 9000, 400))
    assert diagnose_error(str(refused.value)).first == "context-overflow"
    large.add(Request(1, 9, 4))
    with pytest.raises(RequestRefused) as refused:
        large.add(Request(2, 9, 4))
    assert diagnose_error(str(refused.value)).first == "admission-limit"


def test_an_unknown_text_is_not_called_healthy() -> None:
    found = diagnose_error("KeyError: 'model.layers.0.weird'")
    assert found.causes == ()
    assert "known" in found.verdict
    assert "traceback" in found.notes[0]


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(MeasureError, match="empty"):
        diagnose_error("  \n")


def test_an_ordinary_command_and_log_say_nothing() -> None:
    command = "# half of the card\nvllm serve m \\\n  --max-model-len 8192 \\\n  --port 8000\n"
    assert diagnose_error(command + "INFO Loading model weights took 14.9 GiB").causes == ()


def test_every_wording_belongs_to_a_cause_and_says_where_it_was_seen() -> None:
    ids = {cause.id for cause in CAUSES}
    for wording in WORDINGS:
        assert wording.cause in ids
        assert wording.source
