"""The five calculators: what each is asked, and its answer in a sentence."""

from __future__ import annotations

from dataclasses import replace

from kvlab.book.calculators.base import Calculator
from kvlab.book.calculators.catalogue import runs_ahead
from kvlab.book.calculators.words import binary, count, duration, some, three
from kvlab.config import Shape
from kvlab.cost import (
    Device,
    Hardware,
    Timed,
    decode_pass,
    hardware_of,
    kv_bytes,
    largest_batch,
    operators,
    pass_time,
    predict,
    prefill_pass,
    weight_bytes,
)
from kvlab.errors import ConfigError


class KVCacheCalculator(Calculator):
    """Bytes of the KV cache, and what grouped heads, a latent or windows save.

    Args:
        model: a preset name, a Hub config, or a shape.
        tokens: that each request holds.
        batch: requests.
        kv: format of the cache.

    Raises:
        ConfigError: a name is unknown, or a number is impossible.
    """

    kind = "kv-cache"
    title = "Calculator: size of the KV cache"

    def __init__(
        self, model: Shape = "llama-3.1-8b", *, tokens: int = 8192, batch: int = 1, kv: str = "bfloat16"
    ) -> None:
        super().__init__(model, None, tokens=_whole("tokens", tokens), batch=_whole("batch", batch), kv=kv)

    def _answer(self) -> str:
        tokens, batch, kv = (self.setting[name] for name in ("tokens", "batch", "kv"))
        held = batch * kv_bytes(self.model, tokens, kv)
        return (
            f"The KV cache of {self.model.name} takes {binary(held)} ({count(held)} bytes) for "
            f"{some(batch, 'request')} of {some(tokens, 'token')} in {kv}."
        )


class MemoryCalculator(Calculator):
    """Weights and KV cache against the memory of a device: does it fit, how many requests, how long.

    Args:
        model: a preset name, a Hub config, or a shape.
        device: a slug or a device.
        tokens: that each request holds.
        batch: requests.
        weights: format of the weights.
        kv: format of the cache.
        fraction: of the memory that may be used, in steps of 0.01.

    Raises:
        ConfigError: a name is unknown, or a number is impossible.
    """

    kind = "memory"
    title = "Calculator: weights and KV cache against a device's memory"

    def __init__(
        self,
        model: Shape = "llama-3.1-8b",
        *,
        device: Device = "a100-80gb",
        tokens: int = 8192,
        batch: int = 8,
        weights: str = "bfloat16",
        kv: str = "bfloat16",
        fraction: float = 0.9,
    ) -> None:
        super().__init__(
            model,
            device,
            tokens=_whole("tokens", tokens),
            batch=_whole("batch", batch),
            weights=weights,
            kv=kv,
            percent=_whole("fraction in per cent", round(100 * fraction)),
        )

    def _answer(self) -> str:
        tokens, batch, weights, kv, percent = self.setting.values()
        device = _the(self.device)
        need = weight_bytes(self.model, weights) + batch * kv_bytes(self.model, tokens, kv)
        usable = device.memory_bytes * percent / 100
        most = largest_batch(
            self.model, device, tokens=tokens, dtype=weights, weights=weights, kv=kv, fraction=percent / 100
        )
        return (
            f"{self.model.name} with {some(batch, 'request')} of {some(tokens, 'token')} needs {binary(need)}. "
            f"That {'fits' if need <= usable else 'does not fit'} into {percent} % of {device.label} "
            f"({binary(usable)}), which has room for {some(most, 'such request')}."
        )


class LatencyCalculator(Calculator):
    """Time to the first token and for each further one, at the limits of a device.

    Args:
        model: a preset name, a Hub config, or a shape.
        device: a slug or a device; its peaks are used, also where it was calibrated.
        prompt_tokens: of each request.
        new_tokens: of each answer.
        batch: requests that start together.
        dtype: of the arithmetic; None takes the device's 16 bits where it has them.
        weights: format of the weights; None takes the dtype.
        kv: format of the cache; None takes the dtype.

    Raises:
        ConfigError: a name is unknown, or a number is impossible.
    """

    kind = "latency"
    title = "Calculator: TTFT and TPOT on a device"

    def __init__(
        self,
        model: Shape = "llama-3.1-8b",
        *,
        device: Device = "h100-sxm",
        prompt_tokens: int = 2048,
        new_tokens: int = 256,
        batch: int = 1,
        dtype: str | None = None,
        weights: str | None = None,
        kv: str | None = None,
    ) -> None:
        super().__init__(
            model,
            device,
            prompt_tokens=_whole("prompt_tokens", prompt_tokens),
            new_tokens=_whole("new_tokens", new_tokens),
            batch=_whole("batch", batch),
            **_formats(device, dtype, weights, kv),
        )

    def _answer(self) -> str:
        device = _the(self.device)
        found = predict(self.model, replace(device, calibration=None), **self.setting)
        return (
            f"{self.model.name} on {device.label}: the first token of "
            f"{some(self.setting['prompt_tokens'], 'prompt token')} comes after {duration(found.ttft)} "
            f"at the earliest, each further one after {duration(found.tpot)} or more."
        )


class RooflineCalculator(Calculator):
    """Prefill and decode as two dots on a device's roofline; dragging them changes prompt and batch.

    Args:
        model: a preset name, a Hub config, or a shape.
        device: a slug or a device; its peaks are used, also where it was calibrated.
        prompt_tokens: of each request; a decode step reads as many from each cache.
        batch: requests.
        dtype: of the arithmetic; None takes the device's 16 bits where it has them.
        weights: format of the weights; None takes the dtype.
        kv: format of the cache; None takes the dtype.

    Raises:
        ConfigError: a name is unknown, or a number is impossible.
    """

    kind = "roofline"
    title = "Calculator: both phases on a device's roofline"

    def __init__(
        self,
        model: Shape = "llama-3.1-8b",
        *,
        device: Device = "h100-sxm",
        prompt_tokens: int = 1024,
        batch: int = 1,
        dtype: str | None = None,
        weights: str | None = None,
        kv: str | None = None,
    ) -> None:
        super().__init__(
            model,
            device,
            prompt_tokens=_whole("prompt_tokens", prompt_tokens),
            batch=_whole("batch", batch),
            **_formats(device, dtype, weights, kv),
        )

    def _answer(self) -> str:
        tokens, batch, dtype, weights, kv = self.setting.values()
        device = _the(self.device)
        intensity = []
        for rows in (prefill_pass(tokens, batch), decode_pass(tokens, batch)):
            found = [o for o in operators(self.model, rows, dtype, weights=weights, kv=kv) if o.part != "elementwise"]
            intensity.append(three(sum(o.flops for o in found) / sum(o.bytes for o in found)))
        return (
            f"{self.model.name} on {device.label}, {some(batch, 'request')} of {some(tokens, 'token')}: prefill does "
            f"{intensity[0]} FLOP a byte, decode {intensity[1]}; the ridge is at {three(device.ridge(dtype))}."
        )


class DecodeStepCalculator(Calculator):
    """Where the time of one decode step goes: weights, KV cache, and launches that nothing hides.

    Args:
        model: a preset name, a Hub config, or a shape.
        device: a slug or a device; its peaks are used, also where it was calibrated.
        past: tokens that each cache holds before the step.
        batch: requests in the step.
        weights: format of the weights; None takes the device's 16 bits where it has them.
        kv: format of the cache; None takes the same.
        launch_us: microseconds that the host needs to start one kernel: an assumption, 0 where all start at once.

    Raises:
        ConfigError: a name is unknown, or a number is impossible.
    """

    kind = "decode-step"
    title = "Calculator: where the time of a decode step goes"

    def __init__(
        self,
        model: Shape = "llama-3.1-8b",
        *,
        device: Device = "a100-80gb",
        past: int = 4096,
        batch: int = 1,
        weights: str | None = None,
        kv: str | None = None,
        launch_us: int = 10,
    ) -> None:
        dtype = _dtype_of(device)
        super().__init__(
            model,
            device,
            past=_whole("past", past, least=0),
            batch=_whole("batch", batch),
            weights=weights or dtype,
            kv=kv or dtype,
            launch_us=_whole("launch_us", launch_us, least=0),
        )

    def _answer(self) -> str:
        past, batch, weights, kv, launch_us = self.setting.values()
        device = _the(self.device)
        rows, peaks = decode_pass(past, batch), replace(device, calibration=None)
        step = pass_time(self.model, rows, peaks, _dtype_of(device), weights=weights, kv=kv)
        started = tuple(_started(timed, launch_us * 1e-6) for timed in step.operators)
        step = replace(step, operators=started, asynchronous=runs_ahead(device))
        shares = {"weights": step.share("linear") + step.share("head"), "KV cache": step.share("attention")}
        shares["overhead"] = step.share("overhead")
        parts = ", ".join(f"{name} {three(100 * share)} %" for name, share in shares.items())
        return (
            f"A decode step of {self.model.name} on {device.label} with {some(batch, 'request')} and "
            f"{some(past, 'token')} in each cache takes {duration(step.seconds)}: {parts}."
        )


def _dtype_of(device: Device) -> str:
    """What a device computes in when nobody chooses.

    Raises:
        ConfigError: no peak of the device is known.
    """
    hardware = hardware_of(device)
    for dtype in ("bfloat16", "float16", "float32", "fp8"):
        if dtype in hardware.flops:
            return dtype
    raise ConfigError(f"no peak of {hardware.name} is known, and a time needs one; choose another device")


def _formats(device: Device, dtype: str | None, weights: str | None, kv: str | None) -> dict[str, str]:
    """The dtype, the device's own where none is chosen, and the formats, the dtype where none is chosen."""
    chosen = dtype or _dtype_of(device)
    return {"dtype": chosen, "weights": weights or chosen, "kv": kv or chosen}


def _started(timed: Timed, launch_s: float) -> Timed:
    """An operator whose kernels take the host so long to start, each."""
    return replace(timed, launch_s=timed.operator.calls * timed.operator.launches * launch_s)


def _the(device: Hardware | None) -> Hardware:
    assert device is not None
    return device


def _whole(name: str, value: int, least: int = 1) -> int:
    if value != int(value) or value < least:
        raise ConfigError(f"{name} is {value}; it must be a whole number of {least} or more")
    return int(value)
