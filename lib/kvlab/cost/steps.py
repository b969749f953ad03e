"""Step times for a simulator, which asks for millions of them.

:func:`~kvlab.cost.roofline.pass_time` builds every operator of a pass anew. Here everything but attention is worked
out once for each number of tokens and of logits, and attention comes from sums over the requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

from kvlab.config import ModelConfig, Shape, shape_of
from kvlab.cost.flops import Row, attention_flops, require_rows, visible_pairs
from kvlab.cost.formats import Format, format_of
from kvlab.cost.hardware import Curve, Device, hardware_of
from kvlab.cost.memory import cache_format, kv_bytes
from kvlab.cost.operators import attention_bytes, keys_read
from kvlab.cost.roofline import Curves, PassTime, Peaks, pass_time, rates_of, together
from kvlab.errors import ConfigError, at_least


class StepTimes:
    """How long the steps of an engine take, decode steps and prompts mixed; see :meth:`seconds`.

    Args:
        model: a preset name, a Hub config, or a shape.
        device: a slug or a device.
        dtype: of the arithmetic and of the activations.
        weights: format of the weights in memory; by default ``dtype``.
        kv: format of the cache; by default ``dtype``.

    Raises:
        ConfigError: a name is unknown, or the device knows no rate for the dtype.
    """

    def __init__(
        self,
        model: Shape,
        device: Device,
        dtype: str = "bfloat16",
        *,
        weights: str | Format | None = None,
        kv: str | Format | None = None,
    ) -> None:
        config, hardware = shape_of(model), hardware_of(device)
        self._pass_time = partial(pass_time, config, device=hardware, dtype=dtype, weights=weights, kv=kv)
        one = self._pass_time([Row(1)])
        self._asynchronous = one.asynchronous
        self._attention_launch_s = sum(timed.launch_s for timed in one.operators if timed.operator.part == "attention")
        narrow, width = cache_format(config, kv or dtype).bytes_per_element, format_of(dtype).bytes_per_element
        rates = rates_of(hardware, dtype)
        self._layers = [_Layers(config, window, rates, narrow, width) for window in config.window_kinds]
        self._beside: dict[tuple[int, int], tuple[float, float]] = {}

    def seconds(self, decodes: int, held: int, prompts: Sequence[Row] = ()) -> float:
        """The time of one step.

        It is that of :func:`~kvlab.cost.roofline.pass_time` for the prompts and for decode rows that share what is held
        as evenly as whole tokens allow. Where every layer sees everything, only the sum of the lengths counts, and the
        time is exact for decode rows of any lengths. A windowed layer reads no more than its window of a row: rows of
        equal length read the most, so uneven ones take this long or less. So it is with latent attention (MLA) where
        a row is so short that bringing keys and values out of the latents costs less. Prompts are taken as they are.

        Args:
            decodes: rows of one token.
            held: tokens that their caches hold together, before the step.
            prompts: what the other requests contribute: whole prompts, chunks, drafts to verify.

        Raises:
            ConfigError: there is no row, or a number is impossible.
        """
        if decodes < 1 or held < 0:
            _require_possible(decodes, held, prompts)
        tokens = logits = decodes
        for row in prompts:
            tokens += row.new
            logits += row.logits
        beside = self._beside.get((tokens, logits))
        if beside is None:
            beside = self._beside[tokens, logits] = _beside_attention(self._pass_time([Row(tokens, 0, logits)]))
        kernels_s, host_s = beside
        steps = _even(decodes, held) if decodes else []
        if prompts:
            steps += [(1, row.past) for row in prompts if row.new == 1]
            longer = [row for row in prompts if row.new > 1]
            if longer:
                host_s += self._attention_launch_s
                kernels_s += sum([layers.prompts_s(longer) for layers in self._layers])
        if steps:
            host_s += self._attention_launch_s
            for layers in self._layers:
                kernels_s += layers.steps_s(steps)
        return together(kernels_s, host_s, self._asynchronous)


@dataclass(frozen=True)
class StepCurves:
    """How long the steps of one engine take, from steps that were measured rather than from its operators.

    A step costs what its number of tokens costs, whatever requests they belong to, and what attention costs beyond
    that: for each cached token that a decode row reads, for each (query, key) pair of the other rows, and for the
    kernels of each further prompt and of both kinds of rows in one step. Vidur (arXiv:2405.05465) profiles and
    interpolates in the same way.
    :func:`kvlab.measure.calibrate_steps` measures it.

    Args:
        tokens_s: seconds of a step by its tokens, attention aside.
        held_s: seconds for each cached token that a row of one token reads.
        pair_s: seconds for each visible pair of a row of several tokens.
        prompt_s: seconds for each such row but the first.
        both_s: seconds for a step that has rows of one token and rows of several.

    Raises:
        ConfigError: a time is negative.
    """

    tokens_s: Curve
    held_s: float
    pair_s: float
    prompt_s: float
    both_s: float

    def __post_init__(self) -> None:
        if min(times := (self.held_s, self.pair_s, self.prompt_s, self.both_s)) < 0:
            raise ConfigError(f"held_s, pair_s, prompt_s and both_s are {times}; each is 0 or more")

    def seconds(self, decodes: int, held: int, prompts: Sequence[Row] = ()) -> float:
        """The time of one step.

        Beyond the most tokens that were measured, time grows in proportion.

        Args:
            decodes: rows of one token.
            held: tokens that their caches hold together, before the step.
            prompts: the other rows.
        """
        if decodes < 1 or held < 0:
            _require_possible(decodes, held, prompts)
        tokens = decodes + sum(row.new for row in prompts)
        pairs = sum(visible_pairs(row.new, row.past) for row in prompts)
        beyond = max(tokens / self.tokens_s.x[-1], 1.0)
        seconds = self.tokens_s.at(tokens) * beyond + held * self.held_s + pairs * self.pair_s
        if prompts:
            seconds += (len(prompts) - 1) * self.prompt_s + (self.both_s if decodes else 0.0)
        return seconds


class _Layers:
    """Attention in the layers of one window.

    Args:
        config: the model's shape.
        window: of the layers.
        rates: of the device.
        narrow: bytes of an element of the cache.
        width: bytes of an element of the activations.
    """

    def __init__(
        self, config: ModelConfig, window: int | None, rates: Peaks | Curves, narrow: float, width: float
    ) -> None:
        self._config, self._window, self._rates = config, window, rates
        self._calls = config.windows.count(window)
        # Bytes grow evenly with queries and with keys: one of each says it all.
        self._query_bytes = self._calls * attention_bytes(config, 1, 0, narrow, width)
        self._key_bytes = self._calls * attention_bytes(config, 0, 1, narrow, width)
        self._step = cache(partial(_step, config, window))

    def steps_s(self, steps: Sequence[tuple[int, int]]) -> float:
        """Seconds of the device for decode rows, given as (how many, tokens that each of them holds)."""
        queries = keys = flops = 0
        for rows, past in steps:
            read, operations = self._step(past)
            queries += rows
            keys += rows * read
            flops += rows * operations
        # How many keys one row sees matters to prompts only: the rate of a step is that of the bytes of all its rows.
        return self._seconds(1, 0, queries, keys, flops)

    def prompts_s(self, rows: Sequence[Row]) -> float:
        """Seconds of the device for rows of several tokens."""
        keys = [keys_read(row, self._window) for row in rows]
        new = [row.new for row in rows]
        flops = attention_flops(self._config, rows, self._window)
        return self._seconds(max(new), max(keys), sum(new), sum(keys), flops)

    def _seconds(self, longest: int, most_keys: int, queries: int, keys: int, flops: int) -> float:
        moved = queries * self._query_bytes + keys * self._key_bytes
        return max(self._rates.attention(longest, most_keys, self._calls * flops, moved, self._calls))


def transfer_seconds(model: Shape, tokens: int, bytes_per_second: float, kv: str | Format = "bfloat16") -> float:
    """Seconds to move the KV cache of a request over a link, from the device that read the prompt to one that decodes.

    Whole bandwidth, no latency, nothing overlapped with the prefill; Splitwise (arXiv:2311.18677, section 4.2) sends
    the layers that are done while the next ones run, and hides most of it. A windowed layer sends its window only.

    Args:
        model: a preset name, a Hub config, or a shape.
        tokens: that the cache holds.
        bytes_per_second: of the link. Network cards are sold in bits: 400 Gbit/s are 50e9.
        kv: format of the cache.

    Raises:
        ConfigError: a name is unknown, ``tokens`` is negative, or the link moves nothing.
    """
    if not bytes_per_second > 0:
        raise ConfigError(f"bytes_per_second is {bytes_per_second}; a link moves more than 0")
    return kv_bytes(model, tokens, kv) / bytes_per_second


def _step(config: ModelConfig, window: int | None, past: int) -> tuple[int, int]:
    """Keys that one decode row reads in a layer, and operations of its attention there."""
    row = Row(1, past)
    return keys_read(row, window), attention_flops(config, [row], window)


def _even(rows: int, held: int) -> list[tuple[int, int]]:
    """Rows that share the held tokens as evenly as they can, as (how many, tokens each)."""
    past, longer = divmod(held, rows)
    return [(rows - longer, past), (longer, past + 1)] if longer else [(rows, past)]


def _beside_attention(timed: PassTime) -> tuple[float, float]:
    """Seconds of the device and of the host for a pass without its attention."""
    others = [found for found in timed.operators if found.operator.part != "attention"]
    return sum(found.kernel_s for found in others), timed.pass_s + sum(found.launch_s for found in others)


def _require_possible(decodes: int, held: int, prompts: Sequence[Row]) -> None:
    at_least(0, "decodes", decodes)
    at_least(0, "held", held)
    if held and not decodes:
        raise ConfigError(f"held is {held} with no decode row; what a prompt's cache holds is the past of its row")
    if not decodes:
        require_rows(prompts)
