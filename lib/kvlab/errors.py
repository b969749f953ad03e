"""The exceptions of kvlab: one line each that says what was given, what is allowed and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class KvlabError(Exception):
    """Base of every error that kvlab raises on purpose; the command line prints it and exits with code 2."""


def one_line(failure: BaseException) -> str:
    """What somebody else's exception says, in one line; its kind where it says nothing."""
    return " ".join(str(failure).split()) or type(failure).__name__


def nearest(name: str, known: Iterable[str]) -> str:
    """The part of a message that offers the names closest to a wrong one.

    Args:
        name: what was given.
        known: every name there is.
    """
    names = sorted(known)
    return f"the nearest are {', '.join(get_close_matches(name.lower(), names, n=3, cutoff=0.4) or names[:3])}"


class ConfigError(KvlabError, ValueError):
    """The shape of a model is impossible, incomplete, or of a kind that the caller cannot use."""


def at_least(least: int, name: str, value: int) -> int:
    """The value, after checking that it is not too small.

    Args:
        least: the smallest value that is allowed.
        name: of the value, for the message.
        value: what was given.

    Raises:
        ConfigError: it is below.
    """
    if value < least:
        raise ConfigError(f"{name} is {value}; it must be {least} or more")
    return value


class CacheFull(KvlabError):
    """A forward pass needs more room than the cache has; raised before anything was written."""


class RequestRefused(KvlabError):
    """An engine cannot serve a request as asked, or not now; it was not queued.

    Args:
        id: of the request.
        reason: why, and what to do.
    """

    def __init__(self, id: object, reason: str) -> None:
        super().__init__(f"request {id!r} is refused: {reason}")
        self.reason = reason


class CannotCrop(KvlabError):
    """A cache was asked to forget more of its recent tokens than its kind can take back."""


class WeightsError(KvlabError):
    """Weights are unreadable, truncated, incomplete, of a refused format, or fail their checksum."""


class UnknownModel(WeightsError):
    """No model goes by this name, or nothing can deliver it here."""


class PromptError(KvlabError, ValueError):
    """A prompt is empty, too long for the context, or cannot be formatted as asked."""


class SamplingError(KvlabError, ValueError):
    """A sampling setting is outside its range."""


class MeasureError(KvlabError, ValueError):
    """A measurement was asked for that cannot be made, or a file does not hold one."""


class DeviceError(KvlabError):
    """A device or dtype was asked for that this machine does not have."""
