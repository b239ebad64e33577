"""Rows of a hub data set, of exactly the commit that its revision stands for, with and without the hub."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from huggingface_hub import HfApi
from huggingface_hub.constants import HF_HUB_CACHE

from pi_lora.errors import DataError
from pi_lora.recipe.places import cache_folder
from pi_lora.recipe.schema import Source

COMMIT = re.compile(r"[0-9a-f]{40}")


def commit_of_file(name: str, revision: str) -> str:
    """Return the commit of a file that is downloaded as it is: now, or offline that of its last download; else the
    revision as written.
    """
    if commit := _asked(name, revision):
        return commit
    known = Path(HF_HUB_CACHE, f"datasets--{name.replace('/', '--')}", "refs", revision)
    return known.read_text(encoding="utf-8").strip() if known.is_file() else revision


def commit_of_rows(source: Source) -> str:
    """Return the commit that the revision of a data set stands for: now, or if the hub cannot be asked, when it last
    was, or of what is on the disk. The revision as it is written if there is nothing.
    """
    noted = cache_folder() / "commits" / quote(f"{source.name}@{source.revision}", safe="")
    if commit := _asked(source.name, source.revision):
        with suppress(OSError):
            noted.parent.mkdir(parents=True, exist_ok=True)
            noted.write_text(commit, encoding="utf-8")
        return commit
    with suppress(OSError, ValueError):
        if COMMIT.fullmatch(commit := noted.read_text(encoding="utf-8")):
            return commit
    with suppress(Exception):  # of `datasets`, a dozen kinds; loading says why
        return _commit_on_disk(_load(source, source.revision)) or source.revision
    return source.revision


def _asked(name: str, revision: str) -> str | None:
    try:
        return HfApi().dataset_info(name, revision=revision).sha or revision
    except Exception:
        # Offline, gone or gated: loading finds out which, and has the data set on disk or says why not.
        return None


def load_rows(source: Source, commit: str) -> Any:
    """Load a data set at a commit. Raises DataError if the hub cannot be asked and another commit is on the disk, which
    `datasets` 5.2 takes then, whatever is asked for; its own errors are of a dozen kinds.
    """
    dataset = _load(source, commit)
    found = None if source.streaming else _commit_on_disk(dataset)
    if found and found != commit and COMMIT.fullmatch(commit):
        why = f"the hub cannot be asked, and on the disk is commit {found} instead of {commit}"
        raise DataError(f"{source.name}: {why}; connect to the hub, or set revision: {found}")
    return dataset


def _load(source: Source, revision: str) -> Any:
    # `datasets` takes a second to import, and local text does without.
    from datasets import load_dataset

    return load_dataset(source.name, source.subset, split=source.split, revision=revision, streaming=source.streaming)


def _commit_on_disk(dataset: Any) -> str | None:
    """Return the commit that a data set's files belong to, which are in a folder of its name."""
    folders = (Path(file["filename"]).parent.name for file in dataset.cache_files)
    return next(filter(COMMIT.fullmatch, folders), None)
