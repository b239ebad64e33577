"""The story of a merge: base and adapter to full weights, whole or not at all, and checked."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

from pi_lora.errors import ModelError
from pi_lora.merge.adapter_files import read_adapter, read_settings
from pi_lora.merge.base_files import base_shards, find_file
from pi_lora.merge.card import Merge, write_merge
from pi_lora.merge.plan import Plan, plan_merge
from pi_lora.merge.quantized import check_bitsandbytes
from pi_lora.merge.skeleton import skeleton, transposed_weights
from pi_lora.merge.writing import filled_shards, write_shards
from pi_lora.model import BaseModel, dtype_named, load_tokenizer, save_config, save_tokenizer
from pi_lora.rope import Config, scale_of, window_of
from pi_lora.run import adapter_base, is_adapter
from pi_lora.run_folder import check_room, staged, tuned_quantized

Onto = Literal["base", "quantized"]
Progress = Callable[[int, int, str], None]
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
            from pi_lora.merge.verify import verify_merge

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
