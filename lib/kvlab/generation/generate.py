"""The two phases: prefill reads the prompt at once, decode adds one token a pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlab.cache import ContiguousCache, KVCache, make_cache, positions_from_mask
from kvlab.errors import ConfigError, SamplingError
from kvlab.generation.compiled import CompiledDecode
from kvlab.generation.prompts import Prompt, limits, padded, token_rows
from kvlab.generation.sampling import Sampler, Sampling
from kvlab.generation.text import TextStream
from kvlab.model import GPT
from kvlab.timing import Clock, RequestTimes, clock_for
from kvlab.weights import LoadedModel

Phase = Literal["prefill", "decode"]
FinishReason = Literal["stop", "length"]


def prefill(
    model: GPT,
    tokens: Int[Tensor, "batch time"],
    cache: KVCache,
    positions: Int[Tensor, "batch time"] | None = None,
) -> Float[Tensor, "batch vocab_size"]:
    """Read a prompt, or a chunk of one, in a single pass; the cache holds it afterwards.

    Args:
        model: the decoder.
        tokens: the prompts, padded to one length.
        cache: advances by the tokens.
        positions: -1 at padding; None when there is none.

    Returns:
        Logits after the last token of each row: the first token of the answer is sampled from these.
    """
    with torch.inference_mode():
        return model(tokens.to(model.device), cache, positions=positions, last_only=True)[:, 0]


def decode(
    model: GPT, tokens: Int[Tensor, "batch"], cache: KVCache, positions: Int[Tensor, "batch 1"] | None = None
) -> Float[Tensor, "batch vocab_size"]:
    """Feed each row its newest token and get the logits of the next one.

    Args:
        model: the decoder.
        tokens: one id a row. An id, never a hidden state.
        cache: holds everything before; advances by one.
        positions: -1 for rows that are done; None when every row goes on.

    Returns:
        Logits after the token of each row.
    """
    return prefill(model, tokens[:, None], cache, positions)


@dataclass(frozen=True)
class TokenStep:
    """One token of an answer.

    Args:
        row: of the batch.
        token: its id.
        text: what became readable with it; may be empty, and may hold more than one token's text.
        phase: ``prefill`` for the first token of a row, ``decode`` for all others.
        seconds: when it arrived, counted from the start of the generation.
    """

    row: int
    token: int
    text: str
    phase: Phase
    seconds: float


@dataclass
class Timing:
    """What a generation cost.

    Args:
        requests: when each row's tokens arrived.
        prompt_tokens: of each row.
        kv_bytes: what the cached tokens need, at the end.
    """

    requests: list[RequestTimes]
    prompt_tokens: list[int]
    kv_bytes: int = 0

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; all rows of a batch get it from the same pass."""
        return self.requests[0].ttft

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first, of the row with the most tokens; None for a single token."""
        return max(self.requests, key=lambda times: len(times.tokens)).tpot


@dataclass
class _Row:
    """The state of one row's answer."""

    stream: TextStream | None
    limit: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None


@dataclass(frozen=True)
class Work:
    """What a generation begins with; :func:`prepare` checks and makes it.

    Args:
        model: the decoder.
        prompts: token ids of each row.
        rows: the answers, still empty.
        sampler: picks the tokens.
        eos: ids that end an answer.
        cache: of as many rows; has room for prompts and answers.
        clock: what time is.
    """

    model: GPT
    prompts: list[list[int]]
    rows: list[_Row]
    sampler: Sampler
    eos: frozenset[int]
    cache: KVCache
    clock: Clock


class Generation:
    """An answer in the making: iterate over its tokens, or ``run()`` it to the end.

    Nothing is computed before the first token is asked for, and a broken-off iteration can be taken up again.
    """

    def __init__(self, work: Work, compiled: CompiledDecode | None = None) -> None:
        self.cache, self._compiled = work.cache, compiled
        self.timing = Timing([RequestTimes(0.0) for _ in work.prompts], [len(p) for p in work.prompts])
        self._model, self._prompts, self._rows = work.model, work.prompts, work.rows
        self._sampler, self._eos, self._clock = work.sampler, work.eos, work.clock
        self._steps = self._generate()

    def __iter__(self) -> Iterator[TokenStep]:
        return self._steps

    def run(self) -> Generation:
        """Generate to the end and return itself."""
        for _ in self:
            pass
        return self

    @property
    def texts(self) -> list[str]:
        """The answer of each row so far."""
        return [row.text for row in self._rows]

    @property
    def text(self) -> str:
        """The answer of the first row so far."""
        return self.texts[0]

    @property
    def tokens(self) -> list[list[int]]:
        """The token ids of each row's answer so far, the one that ended it included."""
        return [row.tokens for row in self._rows]

    @property
    def finish_reasons(self) -> list[FinishReason | None]:
        """``stop`` at an end-of-sequence id or a stop string, ``length`` at a limit, None while a row goes on."""
        return [row.finish for row in self._rows]

    def _generate(self) -> Iterator[TokenStep]:
        start = self._clock.now()
        tokens, mask = padded(self._prompts)
        logits = prefill(self._model, tokens, self.cache, positions_from_mask(mask, self.cache.rows_seen))
        phase: Phase = "prefill"
        while True:
            newest = self._sampler(logits)
            self.timing.kv_bytes = self.cache.used_bytes
            now = self._clock.now() - start
            alive = [index for index, row in enumerate(self._rows) if row.finish is None]
            for index in alive:
                yield self._add(index, newest[index], phase, now)
            going = torch.tensor([[row.finish is None] for row in self._rows])
            if not going.any():
                return
            logits = self._decode(torch.tensor(newest), going)
            phase = "decode"

    def _decode(self, tokens: Int[Tensor, "batch"], going: Bool[Tensor, "batch 1"]) -> Float[Tensor, "batch vocab"]:
        """One step; the compiled one knows no padding, and serves until the first row is done."""
        if self._compiled is not None and bool(going.all()):
            assert isinstance(self.cache, ContiguousCache)
            return self._compiled(tokens, self.cache)
        # A row that is done is padding from now on: nothing is written for it.
        return decode(self._model, tokens, self.cache, positions_from_mask(going, self.cache.rows_seen))

    def _add(self, index: int, token: int, phase: Phase, now: float) -> TokenStep:
        row = self._rows[index]
        row.tokens.append(token)
        self.timing.requests[index].tokens.append(now)
        ended = token in self._eos
        text = row.stream.push(token) if row.stream and not ended else ""
        if ended or (row.stream and row.stream.stopped):
            row.finish = "stop"
        elif len(row.tokens) >= row.limit:
            row.finish = "length"
        if row.finish and row.stream:
            text += row.stream.finish()
        row.text += text
        return TokenStep(index, token, text, phase, now)


def generate(
    model: LoadedModel | GPT,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    sampling: Sampling | Sequence[Sampling] | None = None,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    cache: KVCache | str = "contiguous",
    compiled: CompiledDecode | None = None,
    clock: Clock | None = None,
) -> Generation:
    """Answer one prompt, or a batch of prompts of different lengths.

    Args:
        model: from ``kvlab.load``, or a bare decoder (then prompts are token ids and there is no text).
        prompts: text or token ids, or a list of either. For a chat, pass ``model.tokenizer.chat(messages)``.
        max_new_tokens: a limit for each row; the model's context is another.
        sampling: for all rows, or one a row; greedy by default.
        stop: texts that end an answer and are not part of it.
        ignore_eos: go on past end-of-sequence ids, as benchmarks do.
        cache: a kind, see :func:`kvlab.cache.make_cache`: a cache of exactly the size that is needed is made. Or a
            cache to continue from, which the generation changes (``fork()`` it to keep it).
        compiled: a compiled decode step of this model and batch; it works on a contiguous cache.
        clock: what time is; by default the device's.

    Raises:
        ConfigError: a compiled step was given with another kind of cache.
        PromptError: a prompt is empty, too long for the context, or holds an unknown id.
        SamplingError: the number of sampling settings is not the number of prompts.
    """
    work = prepare(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop=stop,
        ignore_eos=ignore_eos,
        cache=cache,
        clock=clock,
    )
    if compiled is not None and not isinstance(work.cache, ContiguousCache):
        raise ConfigError(f"a compiled step works on a contiguous cache, not on a {type(work.cache).__name__}")
    return Generation(work, compiled)


def prepare(
    model: LoadedModel | GPT,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int,
    sampling: Sampling | Sequence[Sampling] | None,
    stop: Sequence[str],
    ignore_eos: bool,
    cache: KVCache | str,
    clock: Clock | None,
) -> Work:
    """Check what was asked for and make what it takes. Arguments and errors are those of :func:`generate`."""
    network, tokenizer = (model.model, model.tokenizer) if isinstance(model, LoadedModel) else (model, None)
    rows = token_rows(prompts, tokenizer, network.config.vocab_size)
    if isinstance(cache, str):
        room = min(max(map(len, rows)) + max(max_new_tokens, 1) - 1, network.config.max_seq_len)
        cache = make_cache(cache, network.config, len(rows), room, network.dtype, network.device)
    most = limits(network.config, rows, cache.rows_seen, max_new_tokens, cache.endless)
    eos = () if ignore_eos else (tokenizer.eos_token_ids if tokenizer else network.config.eos_token_ids)
    return Work(
        network,
        rows,
        [_Row(TextStream(tokenizer.decode, stop) if tokenizer else None, limit) for limit in most],
        Sampler(_settings(sampling, len(rows)), model.vocab_size if isinstance(model, LoadedModel) else None),
        frozenset(eos),
        cache,
        clock or clock_for(network.device),
    )


def _settings(sampling: Sampling | Sequence[Sampling] | None, batch: int) -> list[Sampling]:
    if sampling is None or isinstance(sampling, Sampling):
        return [sampling or Sampling()] * batch
    if len(sampling) != batch:
        raise SamplingError(
            f"there are {len(sampling)} sampling settings for {batch} prompts; give one, or one a prompt"
        )
    return list(sampling)
