"""The merge: base + adapter as full weights, written a few rows at a time, checked, whole or not at all."""

import contextlib
import importlib.util
import shutil
from pathlib import Path
from typing import Literal

from transformers.utils import GENERATION_CONFIG_NAME

from pi_lora.errors import Interrupted, ModelError, first_line
from pi_lora.merging.deltas import read_settings
from pi_lora.merging.facts import MERGE_FILE, Check, Merge
from pi_lora.merging.layout import Plan, plan_merge
from pi_lora.merging.shards import base_shards, filled_shards, write_shards
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


def merge(
    run: Path,
    output: Path,
    base: str | None = None,
    dtype: str | None = None,
    onto: Onto = "base",
    shard_size: int | None = None,
    verify: bool = True,
    progress: Progress = silent,
    extension: Extension | None = None,
    permissions: Permissions = NO_PERMISSIONS,
) -> Path:
    """Write base + adapter of `run` as full weights to `output`, whole or not at all; then check them. Whatever happens
    to the check, they stay and are said to be unchecked, unless it finds that they are wrong.

    Sums are made in float32, a few rows at a time, and cast once, to `dtype` or what the base stores. `onto` says
    whether the adapter of QLoRA is added to the base as it is stored, or as training saw it, after NF4. Files are
    divided as the base's are, or by `shard_size` in bytes. `extension` is the scaling of an adapter made elsewhere.

    Raise ModelError if `run` is no adapter folder, its base is missing, damaged or another one, they do not fit
    together, or the check failed; RunExistsError if `output` exists, or there is no room for it; Interrupted on Ctrl-C
    during the check.
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
    with staged(output) as staging:
        with quiet_loading():
            model = build_on_meta(found.kind, found.config, found.permissions.remote_code)
        cast = dtype_named(dtype) if dtype else None
        plan = plan_merge(model, base_shards(found), run, settings, cast, onto == "quantized")
        check_room(output, sum(tensor.size for tensor in plan.tensors))
        stored = dtype or str(found.base_config.get("dtype") or plan.numbers.most_common(1)[0][0])
        untied = {"tie_word_embeddings": False} if plan.untied else {}
        save_config({**found.config, "dtype": stored, **untied, "architectures": [type(model).__name__]}, staging)
        save_tokenizer(found.tokenizer, staging)
        if generation := found.file(GENERATION_CONFIG_NAME):
            shutil.copyfile(generation, staging / GENERATION_CONFIG_NAME)
        try:
            write_shards(filled_shards(plan.tensors, shard_size) if shard_size else plan.shards, staging, progress)
        except OSError as error:
            raise ModelError(f"{output}: cannot be written ({error.strerror}); nothing is left there") from None
        facts = Merge(
            base=found.base,
            run=str(run),
            onto=onto,
            dtype=stored,
            scale=found.scale,
            window=found.window,
            untied=plan.untied,
            assumed=assumed,
            check=None,
            versions=versions(),
        )
        # Written again after the check, where an error in the card loses nothing.
        with contextlib.suppress(Exception):
            _describe(staging, run, facts)
    try:
        check = _checked(found, output, plan, progress) if verify else None
        _describe(output, run, facts.model_copy(update={"check": check}))
    except KeyboardInterrupt:
        raise Interrupted(f"{output}: merged, and kept without a check, which was interrupted") from None
    return output


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


def _checked(found: Model, merged: Path, plan: Plan, progress: Progress) -> Check:
    """Check what was merged, or say why that was not possible; remove weights that failed, and raise ModelError."""
    try:
        # Imported here: PEFT takes seconds, and merging does without.
        from pi_lora.merging.check import verify_merge

        check = verify_merge(found, merged, plan, progress)
    except Exception as error:
        reason = f"the check ended with an error ({type(error).__name__}: {first_line(error)})"
        return Check(rounding=plan.rounding, how="whole", skipped=reason)
    if problem := check.problem():
        remove(merged)
        raise ModelError(f"{found.adapter}: the merged weights failed the check and are not kept: {problem}")
    return check


def _describe(folder: Path, run: Path, facts: Merge) -> None:
    """Write what was merged, and how the check came out, beside the weights and on their card."""
    write_whole(folder / MERGE_FILE, facts.model_dump_json(indent=2) + "\n")
    checks = facts.check.lines() if facts.check else []
    write_whole(folder / CARD, merged_card(run, folder, checks, facts.card_rows(), facts.base))
