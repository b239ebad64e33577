"""Upload of a run or model to the hub: what is checked first, what goes up, and what stays."""

import html
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.constants import SAFETENSORS_INDEX_FILE, SAFETENSORS_SINGLE_FILE
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from safetensors import SafetensorError, safe_open

from pi_lora.data.documents import looks_local
from pi_lora.errors import ModelError, PiLoraError
from pi_lora.models.stored import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, EXTENDED, read_config, read_index
from pi_lora.recipe.files import RECIPE_FILE, dump_recipe, load_recipe
from pi_lora.recipe.schema import Recipe
from pi_lora.report.card import CARD, read_card, refresh_scores
from pi_lora.report.run import Run
from pi_lora.report.summary import literal
from pi_lora.run_folder import CHECKPOINTS, staging_path
from pi_lora.writing import read_json

# What runs, merges and tokenizers consist of. Anything else, such as pickles and what a user keeps beside, stays.
UPLOADED = re.compile(
    r"(README|LICENSE|NOTICE|USE_POLICY)(\.md|\.txt)?|recipe\.yaml|training\.jsonl|report\.html"
    r"|(run|merge|config|generation_config|adapter_config|model\.safetensors\.index)\.json"
    r"|(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template)\.json"
    r"|(adapter_model|model(-\d{5}-of-\d{5})?)\.safetensors"
    r"|merges\.txt|vocab\.txt|(tokenizer|spiece|sentencepiece\.bpe)\.model|chat_template\.jinja"
    r"|scores/[\w-][\w.-]*\.json|pictures/[\w-]+\.png"
)
# Those of them that may name files and folders of this machine, and the keys under which they do.
NAMING = re.compile(
    r"(README|LICENSE|NOTICE|USE_POLICY)(\.md|\.txt)?|recipe\.yaml|training\.jsonl|report\.html"
    r"|(run|merge|config|generation_config|adapter_config)\.json|scores/.*\.json"
)
NAMES = {"name", "base", "run", "place", "model", "data", "predictions", "base_model_name_or_path", "_name_or_path"}


class PushError(PiLoraError):
    """An upload that cannot begin, or that the hub refused, and what to do about it."""


def push(
    folder: Path, repo: str, private: bool = False, revision: str | None = None, message: str | None = None
) -> str:
    """Upload what `UPLOADED` names of the run or model in `folder`, without paths of this machine, to `repo` on the hub
    and its branch `revision`, which are created if they do not exist; return the address. Raise ModelError if the
    folder is not whole, unfinished, or has links to files elsewhere; PushError if nobody is logged in or the hub
    refuses.
    """
    _check_whole(folder)
    names = sorted(_uploaded(folder))
    if get_token() is None:
        raise PushError("not logged in to the hub; run `hf auth login`, or set HF_TOKEN")
    refresh_scores(Run(folder))
    operations = list(_operations(folder, names))
    hub = HfApi()
    try:
        url = hub.create_repo(repo, private=private or None, exist_ok=True)
        if private and not hub.model_info(url.repo_id).private:
            raise PushError(f"{url}: is public already; make it private in its settings, or leave out --private")
        if revision:
            hub.create_branch(url.repo_id, branch=revision, exist_ok=True)
        words = message or f"Upload {folder.resolve().name} with pi-lora"
        hub.create_commit(url.repo_id, operations, commit_message=words, revision=revision)
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


def _operations(folder: Path, names: Sequence[str]) -> Iterator[CommitOperationAdd]:
    """Yield what goes up, texts without the paths of this machine; raise ModelError if one cannot be read."""
    texts = {name: read_card(folder / name, "correct it or remove it") for name in names if NAMING.fullmatch(name)}
    trees = {name: read_json(folder / name, object, "correct it") for name in texts if name.endswith(".json")}
    if RECIPE_FILE in texts:
        trees[RECIPE_FILE] = load_recipe(folder / RECIPE_FILE).recipe.model_dump(mode="json")
    # The page names the commands that made the run.
    found = {str(folder.resolve()), str(folder.absolute())}.union(*map(_local_paths, trees.values()))
    paths = sorted(found, key=len, reverse=True)
    for name in names:
        if name == RECIPE_FILE:  # paths in YAML are not always quoted
            recipe = json.loads(_without(json.dumps(trees[name], ensure_ascii=False), paths))
            texts[name] = dump_recipe(Recipe.model_validate(recipe))
        elif name in texts:
            texts[name] = _without(texts[name], paths)
        yield CommitOperationAdd(name, texts[name].encode() if name in texts else folder / name)


def _local_paths(tree: Any) -> Iterator[str]:
    """Yield the paths that the content of a file names: of bases, runs and data of this machine."""
    for text in _named(tree):
        # As entries of `evaluation.benchmarks.data` are written: TASK=PATH.
        for path in (text.removesuffix(EXTENDED), text.partition("=")[2]):
            nested = path.count("/") > 1 and not re.search(r"\s|://", path)  # no address, no list of names on the hub
            if "/" in path.strip("/.") and "\0" not in path and (nested or looks_local(path)):
                yield path


def _named(tree: Any, within: bool = False) -> Iterator[str]:
    """Yield the texts of a tree that stand under one of `NAMES`."""
    if isinstance(tree, str) and within:
        yield tree
    elif isinstance(tree, dict | list):
        for key, each in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _named(each, within or key in NAMES)


def _without(text: str, paths: Sequence[str]) -> str:
    """Return a text with the last name of each path in its place, and of whatever else is in the user's home."""
    for path in paths:
        for written in (str, lambda path: json.dumps(path)[1:-1], html.escape, literal):
            whole, last = (re.escape(written(path)), written(Path(path).name))
            text = re.sub(rf"(?<![\w./~-]){whole}(?![\w-])", last.replace("\\", r"\\"), text)
    home = re.escape(os.path.expanduser("~").rstrip("/") or "/home")
    return re.sub(rf"(?<![\w.-]){home}/(?:[\w.~+@-]+/)*([\w.~+@-]*)", r"\1", text)


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
