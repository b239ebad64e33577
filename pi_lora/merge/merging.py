"""What is kept of a merge beside the weights: `merge.json`, and the model card."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from pi_lora.errors import ModelError
from pi_lora.merge.check import Check
from pi_lora.merge.deltas import check_bitsandbytes, read_adapter, read_settings
from pi_lora.merge.layout import Plan, plan_merge, skeleton, transposed_weights
from pi_lora.merge.shards import base_shards, filled_shards, find_file, write_shards
from pi_lora.models.base import BaseModel, dtype_named, load_tokenizer, save_config, save_tokenizer
from pi_lora.models.load import adapter_base, is_adapter, tuned_quantized
from pi_lora.models.machine import versions
from pi_lora.report.card import CARD, merged_card
from pi_lora.run_folder import check_room, staged
from pi_lora.scaling.config import Config, scale_of, window_of
from pi_lora.types import Progress

MERGE_FILE = "merge.json"


@dataclass(frozen=True)
class Merge:
    """What was merged: `onto` the stored or the quantized base; `untied` where a tied head became its own tensor."""

    base: str
    run: str
    onto: str
    dtype: str
    scale: float
    window: int
    untied: bool


def write_merge(folder: Path, merge: Merge, check: Check | None) -> None:
    """Write `merge.json` and `README.md`; no `check` means that none was made.

    Raises:
        ModelError: a result that is kept in the run cannot be read.
    """
    made_with = versions()
    facts = {**asdict(merge), "check": asdict(check) if check else None, "versions": made_with}
    (folder / MERGE_FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    lines = check.lines() if check else []
    (folder / CARD).write_text(merged_card(Path(merge.run), folder, lines, _facts(merge)), encoding="utf-8")


def merge_lines(folder: Path) -> list[str]:
    """What a merged folder says of itself, for the terminal."""
    facts = json.loads((folder / MERGE_FILE).read_text(encoding="utf-8"))
    check = Check.from_json(facts["check"]) if facts["check"] else None
    untied = ["the head was tied to the embeddings, and they diverged: it is a tensor of its own now"]
    return [*(untied if facts["untied"] else []), *(check.lines() if check else ["not checked"])]


def _facts(merge: Merge) -> dict[str, str]:
    """What the card says of this merge beyond any other."""
    onto = {"added onto": "the base after the rounding to NF4 that it was tuned on"}
    untied = {"head": "was tied to the embeddings; they diverged, and are two tensors now"}
    return {**(onto if merge.onto == "quantized" else {}), **(untied if merge.untied else {})}


Onto = Literal["base", "quantized"]
GENERATION_CONFIG = "generation_config.json"


def merge(
    run: Path,
    output: Path,
    base: str | None = None,
    dtype: str | None = None,
    onto: Onto = "base",
    shard_size: int | None = None,
    verify: bool = True,
    progress: Progress | None = None,
) -> Path:
    """Write base + adapter of `run` as full weights to `output`, whole or not at all.

    Sums are made in float32, a few rows at a time, and cast once, to `dtype` or what the base stores. `onto` says
    whether an adapter of QLoRA is put on the base as it is stored, or as training saw it, after NF4. Files are divided
    as the base's are, or by `shard_size`, in bytes. `progress` is told how much of how much is done, and of what.

    Raises:
        ModelError: `run` is no adapter folder, its base is missing, damaged or another one, they do not fit together,
            or the check failed.
        RunExistsError: `output` exists, or there is no room for it.
    """
    if not is_adapter(run):
        raise ModelError(f"{run}: holds no adapter; name a run of lora tuning (full tuning needs no merge)")
    if onto == "quantized":
        _check_quantized(run)
    settings = read_settings(run)
    found, config = adapter_base(run, base)
    with staged(output) as staging:
        model = skeleton(run)
        adapter = read_adapter(run, settings, transposed_weights(model))
        cast = dtype_named(dtype) if dtype else None
        plan = plan_merge(model, base_shards(found), adapter, cast, onto == "quantized")
        check_room(output, plan.size)
        _write_weights(plan, staging, shard_size, progress)
        stored = str(found.config.get("dtype") or plan.dtype).removeprefix("torch.")
        written = {"dtype": dtype or stored}
        untied = {"tie_word_embeddings": False} if plan.untied else {}
        _write_rest(found, {**config, **written, **untied, "architectures": [type(model).__name__]}, run, staging)
        check = None
        if verify:
            # Imported here: PEFT takes seconds, and merging does without.
            from pi_lora.merge.check import verify_merge

            check = verify_merge(found, config, run, staging, onto == "quantized", plan, progress)
        merged = Merge(found.name, str(run), onto, written["dtype"], scale_of(config), window_of(config), plan.untied)
        write_merge(staging, merged, check)
    return output


def _write_weights(plan: Plan, folder: Path, shard_size: int | None, progress: Progress | None) -> None:
    shards = plan.shards
    if shard_size:
        shards = filled_shards((tensor for shard in shards for tensor in shard), shard_size)
    done, size = 0, plan.size

    def wrote(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress(done, size, "writing")

    try:
        with _one_thread():
            write_shards(shards, folder, wrote)
    except OSError as error:
        raise ModelError(f"{folder.parent}: cannot be written ({error.strerror}); nothing is left there") from None


@contextmanager
def _one_thread() -> Iterator[None]:
    """Blocks are too small to share: on a busy machine, threads that wait for each other took ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _write_rest(base: BaseModel, config: Config, run: Path, folder: Path) -> None:
    """Config, tokenizer and how the base generates."""
    save_config(config, folder)
    save_tokenizer(load_tokenizer(run, window_of(config)), folder)
    if generation := find_file(base, GENERATION_CONFIG):
        shutil.copyfile(generation, folder / GENERATION_CONFIG)


def _check_quantized(run: Path) -> None:
    if not tuned_quantized(run):
        raise ModelError(f"{run}: was not tuned by qlora; --onto quantized is for adapters that were")
    check_bitsandbytes()
