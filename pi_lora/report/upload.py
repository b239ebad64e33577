"""A run or model to the hub: what is uploaded, what stays at home, and what must be right before."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from safetensors import SafetensorError, safe_open

from pi_lora.errors import ModelError, PiLoraError
from pi_lora.models.base import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, CONFIG_FILE, read_config
from pi_lora.report.card import CARD, refresh_scores
from pi_lora.run_folder import CHECKPOINTS, staging_path

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Checkpoints and optimizer states; whatever can be pickle; hidden files, which may hold anything.
LEFT_OUT = [
    f"{CHECKPOINTS}/*",
    *("checkpoint-*", "optimizer*", "runs/*"),
    *("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle"),
    *(".*", "*/.*"),
]


class PushError(PiLoraError):
    """An upload that cannot begin, or that the hub refused, with the mend."""


def push(
    folder: Path, repo: str, private: bool = False, revision: str | None = None, message: str | None = None
) -> str:
    """Upload the run or model in `folder`, card and all, to `repo` on the hub, which is made if it is not there.

    `revision` is a branch, made if it is not there. Checkpoints, optimizer states and pickle files stay at home.
    Returns the address of the repository, as the hub gives it.

    Raises:
        ModelError: the folder is no run or model, or not a whole one.
        PushError: nobody is logged in, or the hub refuses.
    """
    check_whole(folder)
    if get_token() is None:
        raise PushError("not logged in to the hub; run `hf auth login`, or set HF_TOKEN")
    refresh_scores(folder)
    hub = HfApi()
    with _said_in_one_line(repo):
        url = hub.create_repo(repo, private=private or None, exist_ok=True)
        if private and not hub.model_info(url.repo_id).private:
            raise PushError(f"{url}: is public already; make it private in its settings, or leave out --private")
        if revision:
            hub.create_branch(url.repo_id, branch=revision, exist_ok=True)
        hub.upload_folder(
            repo_id=url.repo_id,
            folder_path=folder,
            revision=revision,
            commit_message=message or f"Upload {folder.resolve().name} with pi-lora",
            ignore_patterns=[*LEFT_OUT],
        )
    return str(url)


def check_whole(folder: Path) -> None:
    """Nothing, for a run or model folder that has all its weights, and a card.

    Raises:
        ModelError: it is none, a part is missing or cut off, or an unfinished run.
    """
    if not folder.is_dir():
        unfinished = f"; an unfinished one is kept in {staging}" if (staging := staging_path(folder)).is_dir() else ""
        raise ModelError(f"{folder}: no such folder{unfinished}; name a run or model folder")
    if (folder / CHECKPOINTS).is_dir() or folder.resolve().name.endswith(".partial"):
        raise ModelError(f"{folder}: is an unfinished run; finish it with pi-lora train --resume")
    if not (folder / CONFIG_FILE).is_file():
        raise ModelError(f"{folder}: has no {CONFIG_FILE}, so it is no run or model; name one")
    read_config(folder)
    if not (folder / CARD).is_file():
        raise ModelError(f"{folder}: has no {CARD}; write the model card first")
    for file in _weights(folder):
        try:
            with safe_open(file, framework="pt"):
                pass
        except FileNotFoundError:
            raise ModelError(f"{file}: is missing; the folder is not whole") from None
        except SafetensorError as error:
            raise ModelError(f"{file}: is damaged ({error}); make it anew") from None


def _weights(folder: Path) -> list[Path]:
    """The files that a whole folder has."""
    if (folder / ADAPTER_CONFIG_FILE).is_file():
        return [folder / ADAPTER_WEIGHTS_FILE]
    if not (folder / INDEX_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
    return [folder / name for name in sorted(set(index["weight_map"].values()))]


@contextmanager
def _said_in_one_line(repo: str) -> Iterator[None]:
    """Make one line of what the hub or its client says."""
    try:
        yield
    except PiLoraError:
        raise
    except OfflineModeIsEnabled:
        raise PushError("the hub is switched off by HF_HUB_OFFLINE; unset it to push") from None
    except HFValidationError:
        raise PushError(f"{repo}: is no name of a repository; write it as you/name") from None
    except Exception as error:  # of the HTTP library that the client builds on, of Xet, and plain ones
        if isinstance(error, HfHubHTTPError) and error.response.status_code == 401:
            raise PushError("the hub does not know your token; log in anew with `hf auth login`") from error
        raise PushError(
            f"{repo}: the hub did not take it ({_reason(error)}); check its name, your rights there, the network"
        ) from error


def _reason(error: BaseException) -> str:
    """What went wrong, and why as far as the client says: it wraps some errors in one that names only the file."""
    reason = " ".join((str(error).strip() or type(error).__name__).split())
    cause = None if isinstance(error, HfHubHTTPError) else error.__cause__
    return f"{reason} {_reason(cause)}" if cause else reason
