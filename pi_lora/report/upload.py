"""Upload of a run or model to the hub: what is checked first, what goes up, and what stays."""

import json
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.constants import SAFETENSORS_INDEX_FILE, SAFETENSORS_SINGLE_FILE
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from safetensors import SafetensorError, safe_open

from pi_lora.errors import ModelError, PiLoraError
from pi_lora.models.base import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, CONFIG_FILE, read_config
from pi_lora.report.card import CARD, refresh_scores
from pi_lora.report.run import Run
from pi_lora.run_folder import CHECKPOINTS, staging_path

# Checkpoints and optimizer states; anything that can be pickle; hidden files, which may hold anything.
LEFT_OUT = f"{CHECKPOINTS}/* checkpoint-* optimizer* runs/* *.bin *.pt *.pth *.ckpt *.pkl *.pickle .* */.*".split()


class PushError(PiLoraError):
    """An upload that cannot begin, or that the hub refused, and what to do about it."""


def push(
    folder: Path, repo: str, private: bool = False, revision: str | None = None, message: str | None = None
) -> str:
    """Upload the run or model in `folder` with its card to `repo` on the hub, and return the repository's address.

    The repository and the branch `revision` are created if they do not exist. `LEFT_OUT` is not uploaded. Raises
    ModelError if the folder is not whole or an unfinished run, PushError if nobody is logged in or the hub refuses.
    """
    _check_whole(folder)
    if get_token() is None:
        raise PushError("not logged in to the hub; run `hf auth login`, or set HF_TOKEN")
    refresh_scores(Run(folder))
    hub = HfApi()
    try:
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
            ignore_patterns=LEFT_OUT,
        )
    except PiLoraError:
        raise
    except OfflineModeIsEnabled:
        raise PushError("HF_HUB_OFFLINE switches the hub off; unset it to push") from None
    except HFValidationError:
        raise PushError(f"{repo}: is no name of a repository; write it as you/name") from None
    except Exception as error:  # of the HTTP library that the client builds on, of Xet, and plain ones
        if isinstance(error, HfHubHTTPError) and error.response.status_code == 401:
            raise PushError("the hub does not know your token; log in again with `hf auth login`") from error
        problem = f"the hub refused it ({_reason(error)})"
        raise PushError(f"{repo}: {problem}; check the name, your rights there, the network") from error
    return str(url)


def _check_whole(folder: Path) -> None:
    if not folder.is_dir():
        unfinished = f"; an unfinished run is kept in {part}" if (part := staging_path(folder)).is_dir() else ""
        raise ModelError(f"{folder}: no such folder{unfinished}; name a run or model folder")
    if (folder / CHECKPOINTS).is_dir() or folder.resolve().name.endswith(".partial"):
        raise ModelError(f"{folder}: is an unfinished run; finish it with pi-lora train --resume")
    if not (folder / CONFIG_FILE).is_file():
        raise ModelError(f"{folder}: has no {CONFIG_FILE}, so it is no run or model; name one")
    read_config(folder)
    if not (folder / CARD).is_file():
        raise ModelError(f"{folder}: has no {CARD}; write the model card first")
    weights = {ADAPTER_WEIGHTS_FILE if (folder / ADAPTER_CONFIG_FILE).is_file() else SAFETENSORS_SINGLE_FILE}
    if ADAPTER_WEIGHTS_FILE not in weights and (index := folder / SAFETENSORS_INDEX_FILE).is_file():
        weights = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    for file in sorted(folder / name for name in weights):
        try:
            with safe_open(file, framework="pt"):
                pass
        except FileNotFoundError:
            raise ModelError(f"{file}: is missing; the folder is not whole") from None
        except SafetensorError as error:
            raise ModelError(f"{file}: is damaged ({error}); write it again") from None


def _reason(error: BaseException) -> str:
    """What went wrong, and the causes that the client names: it wraps some errors in one that names only the file."""
    reason = " ".join((str(error).strip() or type(error).__name__).split())
    cause = None if isinstance(error, HfHubHTTPError) else error.__cause__
    return f"{reason} {_reason(cause)}" if cause else reason
