"""Upload of a run or model to the hub: what is checked first, and which files go up."""

import fnmatch
import json
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi

from pi_lora.errors import ModelError
from pi_lora.models.files import CONFIG_FILE
from pi_lora.recipe.files import RECIPE_FILE, dump_recipe, load_recipe
from pi_lora.report.card import CARD, refresh_scores
from pi_lora.report.scores import MeasuredRun, public_name
from pi_lora.run import check_finished

# Files that name bases, runs and data, which may be files and folders of this machine.
NAMING = ["run.json", "merge.json", "config.json", "generation_config.json", "adapter_config.json", "scores/*.json"]
# The files of runs, merges and tokenizers. Anything else stays: checkpoints, pickles, and what a user keeps there.
UPLOADED = [
    *NAMING,
    *(f"{name}{suffix}" for name in ("README", "LICENSE", "NOTICE", "USE_POLICY") for suffix in ("", ".md", ".txt")),
    *("recipe.yaml", "training.jsonl", "pictures/*.png", "model.safetensors.index.json"),
    *("adapter_model.safetensors", "model.safetensors", "model-?????-of-?????.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
]


def push(folder: Path, repo: str, private: bool = False) -> str:
    """Upload the files in `UPLOADED` of a run or model, without paths of this machine, to `repo` on the hub, which is
    created if it does not exist; return the address. Raise ModelError if the folder is unfinished, lacks a file or has
    links to files elsewhere, or if the hub refuses.
    """
    check_finished(folder)
    names = _uploaded(folder.resolve())
    refresh_scores(MeasuredRun(folder))
    operations = [CommitOperationAdd(name, _content(folder, name)) for name in names]
    hub = HfApi()
    try:
        url = hub.create_repo(repo, private=private or None, exist_ok=True)
        if private and not hub.model_info(url.repo_id).private:
            raise ModelError(f"{url}: is public already; make it private in its settings, or leave out --private")
        hub.create_commit(url.repo_id, operations, commit_message=f"Upload {folder.resolve().name} with pi-lora")
    except (OSError, ValueError) as error:  # the hub's; ValueError: the name of the repository, or the card's metadata
        reason = " ".join(str(error).split())
        raise ModelError(
            f"{repo}: the hub refused it ({reason}); "
            "check the name, your rights there, and your login (`hf auth login`, or HF_TOKEN)"
        ) from error
    return str(url)


def _uploaded(folder: Path) -> list[str]:
    """Return the names of the files to upload; raise ModelError at a link, which may lead to any file here, and if the
    config, the card or all weights are missing.
    """
    files = [file for pattern in UPLOADED for file in folder.glob(pattern) if file.is_file()]
    if link := next((file for file in files if file.resolve() != file), None):
        raise ModelError(f"{link}: is a link, which is not followed; put a copy of the file there")
    names = sorted(str(file.relative_to(folder)) for file in files)
    for needed in (CONFIG_FILE, CARD, "*.safetensors"):
        if not fnmatch.filter(names, needed):
            raise ModelError(f"{folder / needed}: is missing; upload a whole run or model")
    return names


def _content(folder: Path, name: str) -> bytes | Path:
    """Return a file to upload, or if it may name paths of this machine its text without them."""
    file = folder / name
    if name == RECIPE_FILE:
        recipe = load_recipe(file).recipe
        return dump_recipe(recipe.changed(**_without_paths(recipe.model_dump(mode="json")))).encode()
    if any(file.match(pattern) for pattern in NAMING):
        return json.dumps(_without_paths(json.loads(file.read_text(encoding="utf-8"))), indent=2).encode() + b"\n"
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
