"""Models from the Hugging Face Hub: what is taken, how it is checked, and what is said when it cannot be had."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.errors import KvlabError, UnknownModel, WeightsError, one_line
from kvlab.store import ORIGIN, cache_folder, publish, require_room, sha256_of, staging
from kvlab.weights.folder import INDEX, PICKLES, WEIGHTS, read_config, shards, weight_files, write_json
from kvlab.weights.progress import Progress, watching

#: Small files that are taken where they exist.
SETTINGS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", INDEX,
)  # fmt: skip

#: Seconds that a silent Hub is waited for.
PATIENCE = 8.0

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(name: str) -> bool:
    """Whether a name has the form ``owner/name``.

    Args:
        name: what was asked for.
    """
    return _ID.fullmatch(name) is not None and not name.endswith((*PICKLES, ".gguf", ".safetensors"))


def hub_folder(repo: str) -> Path:
    """Where a downloaded model is, or will be.

    Args:
        repo: ``owner/name``.
    """
    return cache_folder() / "hub" / repo.replace("/", "--")


def cached_hub(repo: str) -> Path | None:
    """A model that needs no network: in our cache, or whole in the cache of ``huggingface_hub``.

    Args:
        repo: ``owner/name``.
    """
    ours = hub_folder(repo)
    return ours if ours.exists() else _shared_snapshot(repo)


def fetch_hub(repo: str, progress: Progress | None = None) -> Path:
    """Download a model and check every file against what the Hub says of it.

    Only safetensors, configuration and tokenizer are taken. ``HF_ENDPOINT``, ``HF_TOKEN`` and ``HF_HUB_OFFLINE`` are
    honoured.

    Args:
        repo: ``owner/name``.
        progress: see :func:`kvlab.load`.

    Returns:
        The folder in the cache.

    Raises:
        UnknownModel: there is no such model.
        WeightsError: it is gated, has no safetensors, cannot be reached, or arrived damaged; nothing is kept.
        ConfigError: it is of a kind that kvlab does not run.
    """
    target = hub_folder(repo)
    with _quiet():
        try:
            remote = _Remote.ask(repo)
            with staging(target) as work:
                made = work / "made"
                remote.take([name for name in SETTINGS if name in remote.files], made)
                remote.require(["tokenizer.json"])
                read_config(made)  # an unknown family is refused before gigabytes are downloaded
                weights = remote.choose_weights(made)
                total = sum(remote.files[name].size or 0 for name in weights)
                require_room(target, total, repo)
                with watching(made, progress, f"downloading {repo}", total):
                    remote.take(weights, made)
                shutil.rmtree(made / ".cache", ignore_errors=True)
                write_json(made / ORIGIN, {"origin": f"downloaded from the Hub: {repo}, commit {remote.commit}"})
                return publish(made, target)
        except KvlabError:
            raise
        except _failures() as failure:
            raise _explained(repo, failure) from None


@dataclass(frozen=True)
class _Remote:
    """A model on the Hub, at one commit."""

    api: Any
    repo: str
    commit: str
    files: dict[str, Any]

    @classmethod
    def ask(cls, repo: str) -> _Remote:
        from huggingface_hub import HfApi
        from huggingface_hub.constants import HF_HUB_OFFLINE

        if HF_HUB_OFFLINE or _is_set("HF_HUB_OFFLINE"):
            raise WeightsError(f"{repo} is not in the local cache and HF_HUB_OFFLINE is set; unset it to download")
        api = HfApi(endpoint=_endpoint())
        info = api.model_info(repo, files_metadata=True, timeout=PATIENCE)
        return cls(api, repo, str(info.sha), {file.rfilename: file for file in info.siblings or []})

    def choose_weights(self, made: Path) -> list[str]:
        """The files that hold the weights; what a repository keeps beside them in other formats stays there."""
        if WEIGHTS in self.files:
            return [WEIGHTS]
        if INDEX in self.files:
            return self.require([path.name for path in shards(made, must_exist=False)])
        found = [name for name in self.files if name.endswith(".safetensors") and "/" not in name]
        if len(found) == 1:
            return found
        if pickles := sorted(name for name in self.files if name.endswith(PICKLES)):
            raise WeightsError(
                f"{self.repo} has only a pickle ({pickles[0]}), refused because reading one can run code; "
                "look for a repository with safetensors"
            )
        raise WeightsError(f"{self.repo} has no {WEIGHTS} and no index of parts; kvlab cannot tell which file to take")

    def require(self, names: list[str]) -> list[str]:
        """The names, if the repository has them all: better to know before gigabytes are downloaded."""
        if missing := [name for name in names if name not in self.files]:
            raise WeightsError(
                f"{self.repo} lacks {', '.join(missing)}, which kvlab needs; look for another copy of it"
            )
        return names

    def take(self, names: list[str], folder: Path) -> None:
        """Download files and check each."""
        for name in names:
            path = self.api.hf_hub_download(
                self.repo, name, revision=self.commit, local_dir=folder, etag_timeout=PATIENCE
            )
            _require_intact(Path(path), self.files[name], self.repo)


def _require_intact(path: Path, file: Any, repo: str) -> None:
    """Large files have their sha256 in the Hub's metadata; small ones the id that git gives to their content."""
    if file.lfs is not None:
        whole = sha256_of(path) == file.lfs.sha256
    else:
        whole = file.blob_id is None or _git_blob_id(path) == file.blob_id
    if not whole:
        raise WeightsError(
            f"{path.name} of {repo} does not have the checksum that the Hub gives for it: the download is damaged; "
            "it was deleted, try again"
        )


def _git_blob_id(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _shared_snapshot(repo: str) -> Path | None:
    """What another tool downloaded into the cache of ``huggingface_hub``, if all of it is there."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    root = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{repo.replace('/', '--')}"
    try:
        folder = root / "snapshots" / (root / "refs" / "main").read_text("utf8").strip()
        weight_files(folder)
    except (OSError, WeightsError):
        return None
    return folder if all((folder / name).exists() for name in ("config.json", "tokenizer.json")) else None


@contextmanager
def _quiet() -> Iterator[None]:
    """The library draws bars and warns on stderr; what there is to say, kvlab says itself."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

    level, hidden = logging.get_verbosity(), are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.set_verbosity_error()
        disable_progress_bars()
        try:
            yield
        finally:
            logging.set_verbosity(level)
            if not hidden:
                enable_progress_bars()


def _failures() -> tuple[type[Exception], ...]:
    """What the Hub's library raises; the base of network errors is that of the HTTP library of the day."""
    from huggingface_hub import errors

    xet = getattr(errors, "XetDownloadError", OSError)
    return (OSError, ValueError, RuntimeError, xet, *errors.HfHubHTTPError.__bases__)


def _explained(repo: str, failure: Exception) -> WeightsError:
    """An error of the Hub's library in one line that says what to do."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    page = f"{_endpoint()}/{repo}"
    if isinstance(failure, GatedRepoError):
        return WeightsError(f"{repo} is gated: accept its terms at {page} and set HF_TOKEN to a token of yours")
    if isinstance(failure, RepositoryNotFoundError):
        return UnknownModel(f"the Hub has no model {repo}; check the spelling, or set HF_TOKEN if it is private")
    if isinstance(failure, HfHubHTTPError) and failure.response is not None:
        return WeightsError(f"the Hub answered {failure.response.status_code} for {repo}; try again later")
    if "onsistency check" in str(failure):
        return WeightsError(f"the download of {repo} broke off; nothing was kept, try again")
    reason = one_line(failure)[:200]
    return WeightsError(
        f"the Hub cannot be reached at {_endpoint()} ({reason}); check the network, or load a local folder"
    )


def _endpoint() -> str:
    from huggingface_hub.constants import ENDPOINT

    return (os.environ.get("HF_ENDPOINT") or str(ENDPOINT)).rstrip("/")


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE")
