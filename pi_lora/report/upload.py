"""The upload of a run or model to the hub: the checks before it, and the files that are uploaded."""

import fnmatch
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, get_session
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from pi_lora.errors import Interrupted, ModelError
from pi_lora.hub import ANSWER_SECONDS, hub_errors
from pi_lora.models.files import (
    ADAPTER_CONFIG_FILE,
    CARD,
    CONFIG_FILE,
    OWN_VOCABULARIES,
    PROCESSOR_FILES,
    TOKENIZER_FILES,
    find_file,
    public_name,
)
from pi_lora.models.saving import OTHER_WEIGHTS_FILE
from pi_lora.models.weights import read_index
from pi_lora.recipe.files import RECIPE_FILE, dump_recipe, load_recipe
from pi_lora.report.card import refresh_scores
from pi_lora.report.scores import MeasuredRun
from pi_lora.run import MERGE_FILE, RUN_FILE
from pi_lora.staging import check_finished
from pi_lora.types import Progress, silent

# JSON files that name bases, runs and data, which may be files and folders of this machine.
FILES_WITH_PATHS = [
    RUN_FILE,
    MERGE_FILE,
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "scores/*.json",
]
DOCUMENTS = [
    f"{name}{suffix}" for name in ("README", "LICENSE", "NOTICE", "USE_POLICY") for suffix in ("", ".md", ".txt")
]
WEIGHT_FILES = [
    "adapter_model.safetensors",
    SAFE_WEIGHTS_NAME,
    "model-?????-of-?????.safetensors",
    OTHER_WEIGHTS_FILE,
    SAFE_WEIGHTS_INDEX_NAME,
]
# transformers loads an adapter where it finds this config, whatever weights are beside it.
OTHER_MODEL = [
    *WEIGHT_FILES,
    "adapter_model.bin",
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
    ADAPTER_CONFIG_FILE,
]
# Seconds that the hub has to commit what was uploaded.
COMMIT_SECONDS = 30.0
# The files of weights in the index and the modules that a model's code imports are uploaded too. All other files stay
# here: checkpoints, pickles, and files that a user keeps in the folder.
UPLOADED_PATTERNS = [
    *FILES_WITH_PATHS,
    *DOCUMENTS,
    *WEIGHT_FILES,
    *TOKENIZER_FILES,
    *OWN_VOCABULARIES,
    "additional_chat_templates/*.jinja",
    *PROCESSOR_FILES,
    "recipe.yaml",
    "training.jsonl",
    "pictures/*.png",
    # A model's own code, under the names that transformers asks for.
    "configuration_*.py",
    "modeling_*.py",
    "tokenization_*.py",
]


def push(folder: Path, repo: str, *, private: bool = False, progress: Progress = silent) -> str:
    """Upload the files of a run or model, without paths of this machine, to `repo` on the hub; return the address.

    The repository is created if it does not exist. Weights that an interrupted upload has sent are not sent again.
    Raise ModelError if the folder is unfinished, lacks a file or has links to files elsewhere, if the repository holds
    weights that stay there, or if the hub refuses.
    """
    check_finished(folder)
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder; name that of a run or model")
    names = _names_to_upload(folder.resolve())
    refresh_scores(MeasuredRun(folder))
    operations = [CommitOperationAdd(name, _content(folder, name)) for name in names]
    weights = [operation for operation in operations if operation.path_in_repo.endswith(".safetensors")]
    hub = HfApi()
    with hub_errors(repo, "push"), _interruptible(repo):
        url = hub.create_repo(repo, private=private or None, exist_ok=True)
        info = hub.model_info(url.repo_id)
        if private and not info.private:
            raise ModelError(f"{url}: is public already; make it private in its settings, or leave out --private")
        others = {file.rfilename for file in info.siblings or ()}.difference(names)
        for pattern in OTHER_MODEL:
            for name in fnmatch.filter(sorted(others), pattern):
                if "/" not in name:
                    raise ModelError(
                        f"{url}: holds another model ({name}); name another repository, or delete its files there"
                    )
        # By default the client waits without an end for a storage that does not answer. It tries six times.
        session = get_session()
        session.timeout = ANSWER_SECONDS
        for number, operation in enumerate(weights, 1):
            progress(number, len(weights), operation.path_in_repo)
            hub.preupload_lfs_files(url.repo_id, [operation])
        session.timeout = COMMIT_SECONDS
        hub.create_commit(url.repo_id, operations, commit_message=f"Upload {folder.resolve().name} with pi-lora")
    return str(url)


@contextmanager
def _interruptible(repo: str) -> Iterator[None]:
    """Say after Ctrl-C what an upload leaves on the hub."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(
            f"{repo}: interrupted; weights that were sent are on the hub and are not sent again: the same command goes "
            "on from there, and makes the repository complete"
        ) from None


def _names_to_upload(folder: Path) -> list[str]:
    """Return the names of the files to upload.

    Raise ModelError at a link, which may lead to any file here, and if the config, the card, weights or a module that
    the model's code imports are missing.
    """
    weights = _indexed_weights(folder)
    patterns = [*UPLOADED_PATTERNS, *weights]
    files = [file for pattern in patterns for file in folder.glob(pattern) if file.is_file()]
    code_files = [file for file in files if file.suffix == ".py"]
    for code in code_files:
        files += _imported_modules(code)
    for file in files:
        if file.resolve() != file:
            raise ModelError(f"{file}: is a link, which is not followed; put a copy of the file there")
    names = sorted({str(file.relative_to(folder)) for file in files})
    for needed in (CONFIG_FILE, CARD, *(weights or ["*.safetensors"])):
        if not fnmatch.filter(names, needed):
            raise ModelError(f"{folder / needed}: is missing; upload a whole run or model")
    return names


def _indexed_weights(folder: Path) -> list[str]:
    """Return the names of the files of weights by the index, if there is one; raise ModelError if it is damaged.

    As in transformers, a single file counts before an index that was left beside it.
    """
    index = find_file(folder, SAFE_WEIGHTS_INDEX_NAME)
    if index is None or find_file(folder, SAFE_WEIGHTS_NAME):
        return []
    return sorted(set(read_index(index).values()))


def _imported_modules(code: Path) -> list[Path]:
    """Return the modules that a file of Python code imports from its folder, and those that they import.

    Raise ModelError if one is missing or is elsewhere: transformers could not load the model.
    """
    try:
        modules = [Path(file) for file in get_relative_import_files(code)]
    except FileNotFoundError as error:
        raise ModelError(f"{error.filename}: is missing; {code.name} needs it; copy it from the base") from None
    for module in modules:
        if module.parent != code.parent:
            raise ModelError(f"{code}: imports {module}, which is in another folder; put it beside that file")
    return modules


def _content(folder: Path, name: str) -> bytes | Path:
    """Return a file to upload, or the text of it without paths of this machine, if there may be any."""
    file = folder / name
    if name == RECIPE_FILE:
        recipe = load_recipe(file).recipe
        sections = _without_paths(recipe.model_dump(mode="json"))
        return dump_recipe(recipe.changed(**sections)).encode()
    if any(file.match(pattern) for pattern in FILES_WITH_PATHS):
        content = json.loads(file.read_text(encoding="utf-8"))
        if name == RUN_FILE:
            content.pop("directory", None)
        text = json.dumps(_without_paths(content), indent=2) + "\n"
        return text.encode()
    return file


def _without_paths(content: Any) -> Any:
    """Return JSON with only the last part of every path of this machine, also in entries as TASK=PATH."""
    if isinstance(content, dict):
        return {key: _without_paths(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_without_paths(value) for value in content]
    if isinstance(content, str):
        task, equals, path = content.partition("=")
        return task + equals + public_name(path) if "/" not in task else public_name(content)
    return content
