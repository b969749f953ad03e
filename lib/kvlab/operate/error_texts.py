"""What the messages of servers mean: start-up errors, out of memory, and answers that refuse.

One row a wording, most specific first. Numbers in a message are read out and used in the remedy. The wordings are
those of vLLM (old and new), llama.cpp's server, ``transformers serve``, SGLang, PyTorch, bash, and this library; the
rows name a public report or ``captured`` where the text was captured from a server.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

Groups = Mapping[str, str]
Words = str | Callable[[Groups], str]


@dataclass(frozen=True)
class Said:
    """A message that was understood.

    Args:
        cause: id of the cause; see :data:`kvlab.operate.causes.CAUSES`.
        evidence: the message itself.
        remedy: what to do, with its numbers; empty for the remedy of the cause.
    """

    cause: str
    evidence: str
    remedy: str = ""


@dataclass(frozen=True)
class Wording:
    """One way to say it.

    Args:
        cause: id of the cause.
        pattern: a regular expression; case and line breaks do not matter.
        remedy: with ``{name}`` for a group of the pattern, or a function of the groups; empty for the cause's own.
        source: where the wording was seen.
    """

    cause: str
    pattern: str
    remedy: Words = ""
    source: str = "captured"

    def heard(self, text: str) -> Said | None:
        """What the text says, if it says this.

        Args:
            text: a message or a log, without line breaks.
        """
        match = re.search(self.pattern, text, re.IGNORECASE)
        if match is None:
            return None
        groups = {name: value or "" for name, value in match.groupdict().items()}
        remedy = self.remedy(groups) if callable(self.remedy) else self.remedy.format(**groups)
        return Said(self.cause, f'it says: "{_shortened(match.group())}"', remedy)


def said(text: str) -> list[Said]:
    """Everything that a text says, one remedy a cause, the most specific first.

    Args:
        text: a message or a whole log.
    """
    flat = " ".join(text.replace("`", "").split())
    found: dict[str, Said] = {}
    for each in (*_of_a_command(text), *_of_messages(flat)):
        found.setdefault(each.cause, each)
    # What a request is answered with after a crash points to the log, and says nothing beside what the log says.
    if len(found) > 1:
        found.pop("server-errors", None)
    return list(found.values())


def _of_messages(flat: str) -> Iterator[Said]:
    for wording in WORDINGS:
        if heard := wording.heard(flat):
            yield heard
    yield from _out_of_memory(flat)


def _of_a_command(text: str) -> Iterator[Said]:
    """A backslash that is not the last character of its line: the shell ends the command there."""
    for line in text.splitlines():
        if re.search(r"\\\s+#|\\[ \t]+$", line):
            yield Said(
                "command-line",
                f'after its backslash this line goes on: "{_shortened(line.strip())}"',
                "Put the comment on a line above the command, and let the backslash be the last character of the line: "
                "as it is, the shell ends the command there and drops every flag below.",
            )


# --- out of memory: the same message at two times, with opposite remedies ------------------------------------------

_OOM = re.compile(
    r"(?:torch\.(?:cuda\.)?OutOfMemoryError|CUDA out of memory|HIP out of memory|CUDA error: out of memory|"
    r"cudaMalloc failed: out of memory|DefaultCPUAllocator: can't allocate memory)[^|]{0,120}",
    re.IGNORECASE,
)
# Where the traceback was, by the names in it; the last one before the message counts.
_LOADING = (
    r"load_model|load_weights|create_weights|from_pretrained|model_loader|loading (?:safetensors|checkpoint|weights)"
)
_PROFILING = r"profile_run|_dummy_run|_dummy_sampler_run|determine_available_memory|capture_model|warming up"
_RUNNING = r"execute_model|compute_logits|sample_tokens|in generate|lm_head|\.forward|in forward|prefill out of memory"


def _out_of_memory(flat: str) -> Iterator[Said]:
    match = _OOM.search(flat)
    if match is None:
        return
    evidence = f'it says: "{_shortened(match.group())}"'
    places = {
        place: max((found.start() for found in re.finditer(pattern, flat[: match.end()], re.IGNORECASE)), default=-1)
        for place, pattern in (("loading", _LOADING), ("profiling", _PROFILING), ("running", _RUNNING))
    }
    where = max(places, key=lambda place: places[place])
    if places[where] < 0:
        yield Said("weights-out-of-memory", f"{evidence}; the text does not say when: at the start, it is this")
        yield Said("activations-out-of-memory", f"{evidence}; the text does not say when: while serving, it is this")
    elif where == "loading":
        yield Said("weights-out-of-memory", f"{evidence}, while the weights were loaded")
    else:
        when = "while the engine tried its largest step" if where == "profiling" else "while it computed an answer"
        yield Said("activations-out-of-memory", f"{evidence}, {when}")


# --- remedies that compute ------------------------------------------------------------------------------------------


def _length_that_fits(groups: Groups) -> str:
    fits = groups["fits"]
    return (
        f"Set --max-model-len to {fits} or less (answers to shorter requests stay the same), or make the pool larger: "
        "raise --gpu-memory-utilization, use --kv-cache-dtype fp8, or more devices with --tensor-parallel-size."
    )


def _length_by_memory(groups: Groups) -> str:
    """A request's cache grows with its length, so the memory says which length fits."""
    asked, needed, has = int(groups["asked"]), float(groups["needed"]), float(groups["has"])
    if has <= 0:
        return (
            "Nothing is left for the pool beside the weights: use fewer bytes a weight, more devices "
            "(--tensor-parallel-size), or a larger --gpu-memory-utilization."
        )
    return _length_that_fits({"fits": f"about {int(asked * has / needed):,}".replace(",", "")})


def _fraction_that_is_free(groups: Groups) -> str:
    fraction = int(float(groups["free"]) / float(groups["total"]) * 100) / 100
    return (
        f"End what holds the other memory (nvidia-smi lists it; after a kill -9 the engine's workers live on), or set "
        f"--gpu-memory-utilization to {fraction:.2f} or less: {groups['free']} of {groups['total']} GiB are free."
    )


def _sizes_that_divide(groups: Groups) -> str:
    heads = int(groups["heads"])
    sizes = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
    return (
        f"Set --tensor-parallel-size to a divisor of {heads}: {sizes}. Use the other devices with "
        "--pipeline-parallel-size or --data-parallel-size."
    )


def _tokens_that_fit(groups: Groups) -> str:
    limit, prompt = int(groups["limit"]), int(groups["prompt"])
    if prompt >= limit:
        return _SHORTER.format(limit=limit)
    return (
        f"Ask for max_tokens of {limit - prompt} or less: the prompt has {prompt} tokens and both must fit in "
        f"{limit}; or "
        "shorten the prompt, or raise --max-model-len if the model and the pool allow it."
    )


def _removed_or_misspelt(groups: Groups) -> str:
    flags = re.findall(r"--[\w-]+", groups["what"])
    if not flags:
        return (
            "Something that is no flag stands in the command: a comment or a blank after a backslash ends the command "
            "there. Put comments on lines of their own."
        )
    gone = [flag for flag in flags if flag in REMOVED]
    if gone:
        return f"Leave {', '.join(gone)} out: vLLM 0.32 does not have it any more ({REMOVED[gone[0]]})."
    return f"Look {flags[0]} up in vllm serve --help=all: names and spellings change between versions."


#: Flags of older guides that vLLM 0.32 has removed, and what took their place.
REMOVED = {
    "--swap-space": "preempted requests are computed again",
    "--preemption-mode": "preempted requests are computed again",
    "--num-scheduler-steps": "--async-scheduling is what there is now",
    "--scheduler-delay-factor": "nothing took its place",
    "--use-v2-block-manager": "there is one block manager",
    "--num-lookahead-slots": "--speculative-config sizes them",
    "--device": "the build decides",
    "--disable-log-requests": "requests are not logged unless --enable-log-requests is given",
    "--max-seq-len-to-capture": "--max-cudagraph-capture-size",
    "--guided-decoding-backend": "--structured-outputs-config",
    "--max-num-partial-prefills": "--long-prefill-token-threshold bounds a long prompt's part of a step",
    "--max-long-partial-prefills": "--long-prefill-token-threshold bounds a long prompt's part of a step",
}

_SHORTER = (
    "Shorten the prompt to fewer than {limit} tokens, or raise --max-model-len if the model and the pool allow it."
)

WORDINGS: tuple[Wording, ...] = (
    # The KV pool against the longest request.
    Wording(
        "max-model-len-over-pool",
        r"max seq len \((?P<asked>\d+)\) is larger than the maximum number of tokens that can be stored in KV cache "
        r"\((?P<fits>\d+)\)",
        _length_that_fits,
        "vllm 2418, OpenRLHF 336",
    ),
    Wording(
        "max-model-len-over-pool",
        r"To serve at least one request with the models?'s max seq len \((?P<asked>\d+)\).{0,400}?estimated maximum "
        r"model length is (?P<fits>[1-9]\d*)",
        _length_that_fits,
    ),
    Wording(
        "max-model-len-over-pool",
        r"To serve at least one request with the models?'s max seq len \((?P<asked>\d+)\),? \(?(?P<needed>[\d.]+) GiB "
        r"KV cache is needed, which is larger than the available KV cache memory \((?P<has>-?[\d.]+) GiB\)",
        _length_by_memory,
        "vllm 16118",
    ),
    Wording(
        "max-model-len-over-pool",
        r"its cache may come to (?P<asked>\d+) tokens, \d+ blocks of \d+, and the pool has \d+",
        "Ask for fewer tokens, or give the pool more blocks.",
        "kvlab",
    ),
    Wording(
        "max-model-len-over-pool",
        r"failed to allocate (?:\w+ )?buffer for (?:the )?kv cache|llama_kv_cache.{0,40}failed to allocate",
        "Lower -c: it is shared out among the slots of -np, and the cache is as large as their product asks. Or use "
        "-ctk q8_0 -ctv q8_0.",
        "ollama 12927",
    ),
    # Memory at the start.
    Wording(
        "memory-taken",
        r"Free memory on device ?(?:\S+ )?\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than desired "
        r"GPU memory utilization \([\d.]+, [\d.]+ GiB\)",
        _fraction_that_is_free,
        "vllm 20305",
    ),
    Wording("weights-out-of-memory", r"No available memory for the cache blocks", "", "vllm 17431"),
    Wording(
        "weights-out-of-memory",
        r"Not enough memory\. Please try to increase --mem-fraction-static",
        "Raise --mem-fraction-static: at the start too little is left for the pool beside the weights. (While serving, "
        "the opposite helps.)",
        "Awesome-ML-SYS-Tutorial PR 259",
    ),
    Wording(
        "activations-out-of-memory",
        r"out of memory occurred when warming up sampler with (?P<n>\d+) dummy requests",
        "Lower --max-num-seqs below {n}: the logits of so many requests do not fit; or lower --gpu-memory-utilization.",
        "vllm 14452",
    ),
    # The context.
    Wording(
        "context-overflow",
        r"User-specified max_model_len \((?P<asked>\d+)\) is greater than the derived max_model_len "
        r"\(\w+=(?P<limit>\d+)(?:\.0)?",
        "Set --max-model-len to {limit} or less, or leave it out: the model was trained for no more positions. "
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 overrides it; beyond its positions the model writes nonsense or fails.",
        "vllm PR 5911, vllm 3676",
    ),
    Wording(
        "context-overflow",
        r"maximum context length is (?P<limit>\d+) tokens\. However, you requested (?P<total>\d+) tokens "
        r"\((?P<prompt>\d+) (?:in the messages|in your prompt|in the prompt)[;,] \d+ (?:in|for) the completion\)",
        _tokens_that_fit,
        "gpustack 929",
    ),
    Wording(
        "context-overflow",
        r"maximum context length is (?P<limit>\d+) tokens\. However, you requested (?P<total>\d+)(?: tokens)?",
        "Ask for fewer tokens: max_tokens may be {limit} minus the prompt at most, and {total} were asked for "
        "together.",
        "vllm 20409",
    ),
    Wording(
        "context-overflow",
        r"max_(?:completion_)?tokens'? is too large: \d+\. This model's maximum context length is (?P<limit>\d+) "
        r"tokens and your request has (?P<prompt>\d+) input tokens",
        _tokens_that_fit,
        "vllm",
    ),
    Wording(
        "context-overflow",
        r"maximum context length is (?P<limit>\d+) tokens\. However, your (?:prompt|request) (?:contains|has) "
        r"(?:at least )?(?P<prompt>\d+) input tokens",
        _tokens_that_fit,
    ),
    Wording(
        "context-overflow",
        r"max_tokens=(?P<asked>\d+) cannot be greater than max_model_len=(?P<limit>\d+)",
        "Ask for fewer than {limit} tokens: the prompt needs room in them too.",
    ),
    Wording(
        "context-overflow",
        r"request \((?P<prompt>\d+) tokens\) exceeds the available context size \((?P<limit>\d+) tokens\)",
        "Shorten the prompt to fewer than {limit} tokens, or start llama-server with a larger -c (it is shared out "
        "among the slots of -np).",
    ),
    Wording(
        "context-overflow",
        r"(?P<prompt>\d+) prompt tokens and up to (?P<new>\d+) new ones are more than max_len (?P<limit>\d+)",
        _SHORTER.replace("raise --max-model-len if the model and the pool allow it", "ask for fewer than {new}"),
        "kvlab",
    ),
    Wording(
        "context-overflow",
        r"\d+ tokens(?: are|,) more than the context of [^,]{1,60}, (?P<limit>\d+)",
        _SHORTER,
        "kvlab",
    ),
    Wording(
        "context-overflow",
        r"Token indices sequence length is longer than the specified maximum sequence length for this model "
        r"\(\d+ > (?P<limit>\d+)\)",
        _SHORTER,
        "transformers",
    ),
    Wording(
        "context-overflow",
        r"max_tokens must be at least 1, got 0",
        "If max_tokens was not given, the prompt fills the whole context: shorten it. If it was given as 0, ask for 1 "
        "or more.",
    ),
    # Quantization.
    Wording(
        "quantization-flag",
        r"Cannot find the config file for (?P<method>\w+)",
        "Leave --quantization {method} out: this checkpoint is not quantized, and the flag does not quantize it. For "
        "4-bit weights take a checkpoint that was quantized with {method}.",
        "vllm 1419, 4301, 1784",
    ),
    Wording(
        "quantization-flag",
        r"Quantization method specified in the model config \((?P<has>[^)]*)\) does not match the quantization method "
        r"specified in the quantization argument \((?P<asked>[^)]*)\)",
        "Leave --quantization {asked} out: the checkpoint says {has}, and vLLM reads that itself.",
        "vllm 19050",
    ),
    Wording(
        "quantization-flag",
        r"(?P<dtype>(?:torch\.)?\w+) is not supported for quantization method (?P<method>\w+)\. Supported dtypes: "
        r"\[(?:torch\.)?(?P<good>\w+)",
        "Use --dtype {good} with {method}.",
        "vllm",
    ),
    Wording(
        "quantization-flag",
        r"Unknown quantization method:? '?(?P<method>[\w-]+)|"
        r"argument --quantization/-q: invalid choice: '(?P<choice>\w+)'",
        "Leave --quantization out, and vLLM reads the method from the checkpoint; vllm serve --help=all lists those "
        "it has.",
        "vllm",
    ),
    # The device.
    Wording(
        "dtype-unsupported",
        r"Bfloat16 is only supported on GPUs with compute capability of at least 8\.0\. Your (?P<card>[\w \-]+?) GPU "
        r"has compute capability (?P<has>\d+\.\d+)",
        "Use --dtype float16: the {card} has compute capability {has}.",
        "vllm 946, 1157",
    ),
    Wording(
        "heads-not-divisible",
        r"Total number of attention heads \((?P<heads>\d+)\) must be divisible by tensor parallel size "
        r"\((?P<size>\d+)\)",
        _sizes_that_divide,
        "vllm 2652, 596",
    ),
    # Names and addresses.
    Wording(
        "model-not-found",
        r"The model (?P<name>\S+) does not exist\. Valid aliases: (?P<known>[^\"}}]+?)(?:\.?\"|\.?$|\. )",
        "Ask for one of the names that the server answers to: {known}. --served-model-name gives it others.",
    ),
    Wording("model-not-found", r"The model (?P<name>\S+) does not exist"),
    Wording(
        "model-not-found",
        r"Server is pinned to '(?P<known>[^']+)'; requested '(?P<name>[^']+)'",
        "Ask for {known}, which this server was started with.",
    ),
    Wording(
        "model-not-found",
        r"is not a local folder and is not a valid model identifier|Repository Not Found|does not appear to have a "
        r"file named config\.json|Can't load the configuration of|(?:cannot access|access to model .{0,80}is "
        r"restricted|you are trying to access a) gated repo|gated repo",
        "",
        "transformers, huggingface_hub",
    ),
    Wording(
        "port-in-use",
        r"address already in use|couldn'?t bind (?:to |HTTP )?server socket|\[Errno (?:98|48)\]",
        "",
        "uvicorn, llama-server",
    ),
    # The command line.
    Wording(
        "command-line",
        r"error: unrecognized arguments:(?P<what>.{0,200})",
        _removed_or_misspelt,
        "argparse",
    ),
    Wording(
        "command-line",
        r"(?P<flag>--[\w-]+): command not found",
        "The line before {flag} does not end with its backslash: a blank or a comment after it ends the command there. "
        "Put comments on lines of their own, and let the backslash be the last character.",
        "bash",
    ),
    # Answers that refuse.
    Wording("admission-limit", r"engine is currently busy and cannot accept new requests"),
    Wording("admission-limit", r"\d+ requests wait already, max_waiting is \d+", "", "kvlab"),
    Wording(
        "cold-start",
        r"\"?Loading model\"?,\"?type\"?:\"?unavailable_error",
        "Wait until the server has loaded the model: /health answers 200 then.",
    ),
    Wording(
        "server-errors",
        r"EngineCore encountered an issue|Engine core (?:initialization|proc\S*) (?:failed|died)",
        "This message only points to the log: the cause is the first traceback above it. Give that to kvlab diagnose "
        "--error. After SIGTERM of the server it means that the answer was broken off.",
    ),
    Wording(
        "server-errors",
        r"cannot schedule new futures after shutdown",
        "The server is shutting down (--shutdown-timeout lets answers end, and /health says 200 meanwhile): send to "
        "another replica.",
    ),
    Wording(
        "server-errors",
        r"\"error\": ?\"Unauthorized\"|Invalid API Key|authentication_error",
        "Send the header Authorization: Bearer KEY, with the key that the server was started with (--api-key).",
    ),
    Wording(
        "server-errors",
        r"transfer closed with outstanding read data remaining|Response payload is not completed|peer closed "
        r"connection without sending complete message body",
        "The server ended in the middle of an answer: look into its log, and whether it was killed for memory (dmesg). "
        "Its engine processes may live on and hold memory.",
    ),
    Wording(
        "server-errors",
        r"Connection refused|All connection attempts failed",
        "Nobody listens at this address: the server is not up yet (vLLM needs a minute and more before it listens), "
        "has died, or listens at another port.",
    ),
    Wording(
        "server-errors",
        r"Unexpected fields in the request: .{0,80}",
        "Leave these fields out: this server takes no others than its own (transformers serve refuses ignore_eos, "
        "min_tokens).",
    ),
    Wording(
        "server-errors",
        r"(?:\d+ validation errors?:|\"detail\": ?\[|BadRequestError|invalid_request_error|\"type\": ?\"Bad Request\")"
        r".{0,160}",
        "The request is not as the server wants it; the message names the field. Nothing is wrong with the server.",
    ),
    Wording(
        "server-errors",
        r"not_found_error|NotFoundError|\"detail\": ?\"(?:Not Found|Method Not Allowed)\"",
            "The address is not one of the server's: chat is at /v1/chat/completions, completions at /v1/completions."),
    Wording("server-errors", r"Internal ?Server ?Error", ""),
)  # fmt: skip


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:199]}…"
