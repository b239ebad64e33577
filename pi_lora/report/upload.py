"""Upload of a run or model to the hub: what is checked first, what goes up, and what stays."""

import glob
import re
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.constants import SAFETENSORS_INDEX_FILE, SAFETENSORS_SINGLE_FILE
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from safetensors import SafetensorError, safe_open

from pi_lora.errors import ModelError, PiLoraError
from pi_lora.models.stored import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, read_config, read_index
from pi_lora.report.card import CARD, refresh_scores
from pi_lora.report.run import Run
from pi_lora.run_folder import CHECKPOINTS, staging_path

# What runs, merges and tokenizers consist of. Anything else, such as pickles and what a user keeps beside, stays.
UPLOADED = re.compile(
    r"(README|LICENSE|NOTICE|USE_POLICY)(\.md|\.txt)?|recipe\.yaml|training\.jsonl|report\.html"
    r"|(run|merge|config|generation_config|adapter_config|model\.safetensors\.index)\.json"
    r"|(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template)\.json"
    r"|(adapter_model|model(-\d{5}-of-\d{5})?)\.safetensors"
    r"|merges\.txt|vocab\.txt|(tokenizer|spiece|sentencepiece\.bpe)\.model|chat_template\.jinja"
    r"|scores/[\w-][\w.-]*\.json|pictures/[\w-]+\.png"
)


class PushError(PiLoraError):
    """An upload that cannot begin, or that the hub refused, and what to do about it."""


def push(
    folder: Path, repo: str, private: bool = False, revision: str | None = None, message: str | None = None
) -> str:
    """Upload the run or model in `folder` with its card to `repo` on the hub, and return the repository's address.

    The repository and the branch `revision` are created if they do not exist. Only what `UPLOADED` names goes up.
    Raises ModelError if the folder is not whole, an unfinished run, or has links to files elsewhere; PushError if
    nobody is logged in or the hub refuses.
    """
    _check_whole(folder)
    names = sorted(_uploaded(folder))
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
            allow_patterns=[glob.escape(name) for name in names],
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


def _uploaded(folder: Path) -> Iterator[str]:
    """Yield the names of what goes up; raise ModelError at a link, behind which may be anything on this machine."""
    for file in (*folder.iterdir(), *folder.glob("scores/*"), *folder.glob("pictures/*")):
        if UPLOADED.fullmatch(name := file.relative_to(folder).as_posix()):
            if file.is_symlink() or (file.parent.is_symlink() and file.parent != folder):
                raise ModelError(f"{file}: is a link, which is not followed; put a copy of the file there")
            if file.is_file():
                yield name


def _check_whole(folder: Path) -> None:
    if not folder.is_dir():
        unfinished = f"; an unfinished run is kept in {part}" if (part := staging_path(folder)).is_dir() else ""
        raise ModelError(f"{folder}: no such folder{unfinished}; name a run or model folder")
    if (folder / CHECKPOINTS).is_dir() or folder.resolve().name.endswith(".partial"):
        raise ModelError(f"{folder}: is an unfinished run; finish it with pi-lora train --resume")
    read_config(folder)
    if not (folder / CARD).is_file():
        raise ModelError(f"{folder}: has no {CARD}; write the model card first")
    weights = {ADAPTER_WEIGHTS_FILE if (folder / ADAPTER_CONFIG_FILE).is_file() else SAFETENSORS_SINGLE_FILE}
    if ADAPTER_WEIGHTS_FILE not in weights and (index := folder / SAFETENSORS_INDEX_FILE).is_file():
        weights = set(read_index(index).values())
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
