"""The Hugging Face hub: the commit of a name, files at a commit, and errors by their kind, a line each."""

import difflib
import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download

# HTTPError is the base of the errors of httpx2, and with huggingface_hub 1 of httpx. The module imports it without
# exporting it, which the type checker minds.
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
    SafetensorsParsingError,
)

from pi_lora.errors import DataError, ModelError, PiLoraError, first_line

# What is read from the hub, or an upload.
Kind: TypeAlias = Literal["model", "dataset", "push"]
LOGGER = logging.getLogger(__name__)
LOG_IN = "log in with `hf auth login`"
# Seconds that the hub has for its first answer.
ANSWER_SECONDS = 5.0


class _Hub(HfApi):
    """A client that knows whether the hub answered, and whether this command reads the cache since it did not."""

    answers = True
    fell_back = False

    def repo_info(self, *args: Any, **options: Any) -> Any:
        """Ask for the commit of a name, as `resolve_revision` does."""
        try:
            return super().repo_info(*args, timeout=ANSWER_SECONDS, **options)
        except HTTPError:
            self.answers = False
            raise


def commit_of(name: str, revision: str = "main", kind: Kind = "model") -> str:
    """Return the commit of a branch, tag or commit: of a hub that does not answer, the one in the cache."""
    hub = _Hub()
    with hub_errors(name, kind, revision):
        commit = hub.resolve_revision(name, repo_type=kind, revision=revision).resolved
    if not hub.answers:
        # Every later request of this command would wait for half a minute.
        constants.HF_HUB_OFFLINE = True
        _Hub.fell_back = True
        LOGGER.warning("%s does not answer; the cache is read instead", constants.ENDPOINT)
    return commit


def ask_again() -> None:
    """Let the next command ask the hub again if the last one fell back to the cache, as in a notebook."""
    if _Hub.fell_back:
        constants.HF_HUB_OFFLINE = False
        _Hub.fell_back = False


def download_folder(name: str, commit: str, patterns: Sequence[str]) -> Path:
    """Download the files of a model that match one of the `patterns`, and return their folder in the cache."""
    with hub_errors(name):
        return Path(snapshot_download(name, revision=commit, allow_patterns=list(patterns)))


def download_file(name: str, file: str, commit: str, kind: Kind = "model") -> Path | None:
    """Download a file and return its path in the cache, or None if the hub has no such file."""
    with hub_errors(name, kind):
        try:
            return Path(hf_hub_download(name, file, repo_type=kind, revision=commit))
        except RemoteEntryNotFoundError:
            return None


@functools.cache
def tensors_on_hub(name: str, commit: str) -> dict[str, Any]:
    """Return the headers of the tensors of a model by name, without downloading weights; raise ModelError if its files
    are no safetensors.
    """
    with hub_errors(name):
        try:
            metadata = HfApi().get_safetensors_metadata(name, revision=commit)
        except (NotASafetensorsRepoError, SafetensorsParsingError) as error:
            problem = f"weights cannot be read ({first_line(error)}); name another base"
            raise ModelError(f"{name}: {problem}") from None
    tensors: dict[str, Any] = {}
    for file in metadata.files_metadata.values():
        tensors |= file.tensors
    return tensors


@contextmanager
def hub_errors(name: str, kind: Kind = "model", revision: str = "main") -> Iterator[None]:
    """Turn any exception of the hub's clients into a line with what to do: DataError of a data set, else ModelError."""
    try:
        yield
    except Exception as error:  # besides those of huggingface_hub: of httpx2, of `datasets`, RuntimeError, ValueError
        of_disk = isinstance(error, OSError) and error.errno
        if of_disk or isinstance(error, PiLoraError):
            raise
        error_type = DataError if kind == "dataset" else ModelError
        raise error_type(_problem(name, kind, revision, error)) from error


def _problem(name: str, kind: Kind, revision: str, error: BaseException) -> str:
    """Return what is wrong and what to do, by the first cause of an error that tells."""
    cause = _telling_cause(error)
    if isinstance(cause, GatedRepoError):
        return gated(name, kind)
    if isinstance(cause, RevisionNotFoundError):
        return f"{name}: has no branch, tag or commit {revision}; check the revision"
    if isinstance(cause, RepositoryNotFoundError):
        check = f"{_hint(name)}check the name, or {LOG_IN} if it is private"
        return f"{name}: no such folder, and no such {kind} on the hub; {check}"
    if isinstance(cause, HfHubHTTPError):
        reason = " ".join(str(cause).split())
        status = cause.response.status_code
        # Too many requests, or an error of the hub itself.
        if status == 429 or status >= 500:
            return f"{name}: the hub fails (status {status}); try again later"
        if status == 401:
            return f"{name}: the hub asks for a valid token; {LOG_IN}, or correct HF_TOKEN"
        return f"{name}: the hub refuses it ({reason}); check the name and the rights of the token"
    if not isinstance(cause, HTTPError | ConnectionError | LocalEntryNotFoundError | RevisionResolutionError):
        check = "check the name, subset and split" if kind == "dataset" else "check the name"
        return f"{name}: the hub cannot serve it ({_messages(error)}); {check}"
    reason = f"{constants.ENDPOINT} does not answer ({first_line(cause)}); check the network"
    if constants.HF_HUB_OFFLINE:
        reason = "the hub did not answer" if _Hub.fell_back else "HF_HUB_OFFLINE=1 is set"
    if kind == "push":
        return f"{name}: {reason}"
    cached = ", ".join(_cached_files(name, kind)) or "nothing of it"
    if not constants.HF_HUB_OFFLINE:
        return f"{name}: {reason}; in the cache: {cached}"
    hint = _hint(name) or "correct the name, or "
    return f"{name}: no such folder, and {reason}; in the cache: {cached}; {hint}let this machine ask the hub"


def gated(name: str, kind: Kind) -> str:
    """Return what to do about a gated repository."""
    page = f"datasets/{name}" if kind == "dataset" else name
    return f"{name}: is gated; accept the terms at {constants.ENDPOINT}/{page}, then {LOG_IN}"


def _messages(error: BaseException) -> str:
    """Return all lines of an error and its cause in one: those of `datasets` (5.2) say later what is wrong."""
    told = filter(None, [error, error.__cause__])
    messages = [" ".join(str(each).split()) or type(each).__name__ for each in told]
    return ": ".join(message.rstrip(".") for message in messages)


def _telling_cause(error: BaseException) -> BaseException:
    """Return the first of an error and its causes that is an answer of the hub, or says why there is none."""
    cause: BaseException | None = error
    while cause:
        if isinstance(cause, HTTPError | OfflineModeIsEnabled):
            return cause
        cause = cause.__cause__ or cause.__context__
    return error


def _hint(name: str) -> str:
    """Return a question about the folder here whose path is most similar to a name; nothing if none is similar."""
    folders = map(str, [*Path().glob("*/"), *Path().glob("*/*/")])
    near = difflib.get_close_matches(name, folders, n=1, cutoff=0.8)
    return f"did you mean {near[0]}? Otherwise " if near else ""


def _cached_files(name: str, kind: Kind) -> list[str]:
    """Return the names of the files of a repository that are in the cache of the hub."""
    folder = Path(constants.HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}", "snapshots")
    return sorted({path.name for path in folder.glob("*/*")})
