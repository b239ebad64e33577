"""The merge: base + adapter as full weights, written a few rows at a time, checked, whole or not at all."""

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, Field
from transformers.utils import GENERATION_CONFIG_NAME

from pi_lora.errors import ModelError
from pi_lora.merging.check import LogitCheck, TensorCheck, check_model, check_tensors, compare_logits
from pi_lora.merging.deltas import read_settings
from pi_lora.merging.layout import plan_merge
from pi_lora.merging.shards import divide, write_shards
from pi_lora.merging.tensors import read_shards
from pi_lora.models.device import dtype_named
from pi_lora.models.machine import versions
from pi_lora.models.model import Extension, Model, find_adapter, find_base_of, is_adapter
from pi_lora.models.stored import CONFIG_FILE, save_config
from pi_lora.models.tokenizer import save_tokenizer
from pi_lora.models.weights import quiet_loading
from pi_lora.report.card import CARD, merged_card
from pi_lora.run import Run, check_room, remove, staged
from pi_lora.scaling.verify import build_on_meta
from pi_lora.types import NO_PERMISSIONS, Permissions, Progress, silent
from pi_lora.writing import write_whole

Onto = Literal["base", "quantized"]
Checks = Literal["tensors", "logits", "none"]
MERGE_FILE = "merge.json"
# A model may have none of them.
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model")


class Merge(BaseModel, frozen=True):
    """What was merged, as `merge.json` in `folder` says: `onto` the stored or the quantized base; `untied` if a tied
    head became its own tensor. `scale` is L'/L, `window` L' in tokens; `assumed` what the adapter does not say.
    """

    folder: Path = Field(exclude=True)
    base: str
    run: str
    onto: str
    dtype: str
    scale: float
    window: int
    untied: bool
    assumed: str | None
    tensors: TensorCheck | None = None
    logits: LogitCheck | None = None
    versions: dict[str, str]

    def lines(self) -> list[str]:
        """Return the lines for the terminal."""
        assumed = [f"assumed: {self.assumed}"] if self.assumed else []
        untied = ["the head was tied to the embeddings, but they diverged in tuning: it is a tensor of its own now"]
        return [*assumed, *(untied if self.untied else []), *(self.checks() or ["not checked"])]

    def checks(self) -> list[str]:
        """Return the lines on the checks that were made."""
        return [line for check in (self.tensors, self.logits) if check for line in check.lines()]

    def save(self) -> None:
        """Write `merge.json` and the model card."""
        rows = {
            "assumed": self.assumed,
            "added onto": self.onto == "quantized" and "the base after the rounding to NF4 that it was tuned on",
            "head": self.untied and "was tied to the embeddings; they diverged, and are two tensors now",
        }
        write_whole(self.folder / MERGE_FILE, self.model_dump_json(indent=2) + "\n")
        told = {name: row for name, row in rows.items() if row}
        write_whole(self.folder / CARD, merged_card(Path(self.run), self.folder, self.checks(), told, self.base))


def merge(
    run: Path,
    output: Path,
    base: str | None = None,
    dtype: str | None = None,
    onto: Onto = "base",
    shard_size: int | None = None,
    check: Checks = "tensors",
    progress: Progress = silent,
    extension: Extension | None = None,
    permissions: Permissions = NO_PERMISSIONS,
) -> Merge:
    """Write base + adapter of `run` as full weights to `output`, checked, whole or not at all.

    Sums are made in float32, a few rows at a time, and cast once, to `dtype` or what the base stores. `onto` says
    whether the adapter of QLoRA is added to the base as it is stored, or as training saw it, after NF4. Files are
    divided as the base's are, or by `shard_size` in bytes. `extension` is the scaling of an adapter made elsewhere.
    `check` compares the written tensors with base and adapter, or their logits too, or nothing.

    Raise ModelError if `run` is no adapter folder, its base is missing, damaged or another one, they do not fit
    together, or a check failed, after which nothing is kept; RunExistsError if `output` exists, or there is no room.
    """
    if not is_adapter(run):
        raise ModelError(f"{run}: holds no adapter; name a run of lora tuning (full tuning needs no merge)")
    if onto == "quantized" and importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError("--onto quantized: needs bitsandbytes; pip install pi-lora[qlora]")
    settings = read_settings(run)
    found, assumed = _find(run, base, extension, permissions)
    if onto == "quantized" and not found.tuned_quantized:
        raise ModelError(f"{run}: was not tuned by qlora; --onto quantized is for adapters that were")
    found.check_origin()
    if found.base_config.get("quantization_config"):
        raise ModelError(f"{found.base}: has quantized weights; name the model that it was made from with --base")
    with staged(output) as staging, _one_thread():
        with quiet_loading():
            model = build_on_meta(found.kind, found.config, found.permissions.remote_code)
        cast = dtype_named(dtype) if dtype else None
        shards = read_shards(found.base, found.file)
        plan = plan_merge(model, shards, run, settings, cast, onto == "quantized")
        check_room(output, sum(tensor.size for tensor in plan.tensors))
        stored = dtype or str(found.base_config.get("dtype") or plan.dtype)
        untied = {"tie_word_embeddings": False} if plan.untied else {}
        save_config({**found.config, "dtype": stored, **untied, "architectures": [type(model).__name__]}, staging)
        if any((run / name).is_file() or found.file(name) for name in TOKENIZER_FILES):
            save_tokenizer(found.tokenizer, staging)
        if generation := found.file(GENERATION_CONFIG_NAME):
            shutil.copyfile(generation, staging / GENERATION_CONFIG_NAME)
        merged = Merge(
            folder=staging,
            base=found.base,
            run=str(run),
            onto=onto,
            dtype=stored,
            scale=found.scale,
            window=found.window,
            untied=plan.untied,
            assumed=assumed,
            versions=versions(),
        )
        # What is wrong with the model or the card shows before the weights are written.
        check_model(found, plan, staging)
        try:
            merged.save()
            write_shards(divide(plan.tensors, shard_size) if shard_size else plan.shards, staging, progress)
        except OSError as error:
            raise ModelError(f"{output}: cannot be written ({error.strerror}); nothing is left there") from None
        if check != "none":
            merged = merged.model_copy(update={"tensors": check_tensors(found, plan, staging, progress)})
            merged.save()
    merged = merged.model_copy(update={"folder": output})
    if check == "logits":
        progress(0, 0, "comparing logits")
        logits = compare_logits(found, plan, output)
        if not logits.agree:
            remove(output)
            raise ModelError(f"{run}: the merged weights failed the check and are not kept: {logits.lines()[0]}")
        merged = merged.model_copy(update={"logits": logits})
        merged.save()
    return merged


@contextmanager
def _one_thread() -> Iterator[None]:
    """Blocks are too small to share: on a busy machine, threads that wait for each other took ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _find(
    run: Path, base: str | None, extension: Extension | None, permissions: Permissions
) -> tuple[Model, str | None]:
    """Find the base of an adapter and the config it was tuned under, and say what is assumed of one made elsewhere."""
    if extension is None and (run / CONFIG_FILE).is_file():
        return find_adapter(run, base, permissions), None
    if Run(run).has_recipe:
        raise ModelError(f"{run}: brings its own scaling; leave out --original, --target and --scaling")
    plain = find_base_of(run, base, permissions)
    found = (plain.extended(extension) if extension else plain).with_adapter(run)
    if extension:
        return found, f"{run} was tuned under {extension.scaling} to {found.window} tokens, as stated"
    known = "has no config.json; if it was tuned under another scaling, state it with --target and --original"
    return found, f"{run} was tuned under the scaling of {found.base}, to {found.window} tokens: it {known}"
