"""The merge: base + adapter as full weights, written a few rows at a time, checked, whole or not at all."""

import importlib.util
import shutil
from pathlib import Path
from typing import Literal

from pi_lora.errors import ModelError
from pi_lora.merge.deltas import read_settings
from pi_lora.merge.facts import MERGE_FILE, Merge
from pi_lora.merge.layout import plan_merge
from pi_lora.merge.shards import base_shards, filled_shards, find_file, write_shards
from pi_lora.models.base import dtype_named, quiet_loading, save_config, save_tokenizer
from pi_lora.models.load import FoundModel, adapter_base, is_adapter, tuned_quantized
from pi_lora.models.machine import versions
from pi_lora.report.card import CARD, merged_card
from pi_lora.run_folder import check_room, staged
from pi_lora.scaling.verify import build_on_meta
from pi_lora.types import Progress, silent

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
    progress: Progress = silent,
) -> Path:
    """Write base + adapter of `run` as full weights to `output`, whole or not at all.

    Sums are made in float32, a few rows at a time, and cast once, to `dtype` or what the base stores. `onto` says
    whether the adapter of QLoRA is added to the base as it is stored, or as training saw it, after NF4. Files are
    divided as the base's are, or by `shard_size` in bytes.

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
    found = FoundModel(str(run), *adapter_base(run, base), adapter=run)
    with staged(output) as staging:
        with quiet_loading():
            model = build_on_meta(found.base.kind, found.config)
        cast = dtype_named(dtype) if dtype else None
        plan = plan_merge(model, base_shards(found.base), run, settings, cast, onto == "quantized")
        check_room(output, sum(tensor.size for tensor in plan.tensors))
        stored = dtype or str(found.base.config.get("dtype") or plan.numbers.most_common(1)[0][0])
        untied = {"tie_word_embeddings": False} if plan.untied else {}
        save_config({**found.config, "dtype": stored, **untied, "architectures": [type(model).__name__]}, staging)
        save_tokenizer(found.tokenizer, staging)
        if generation := find_file(found.base, GENERATION_CONFIG):
            shutil.copyfile(generation, staging / GENERATION_CONFIG)
        try:
            write_shards(filled_shards(plan.tensors, shard_size) if shard_size else plan.shards, staging, progress)
        except OSError as error:
            raise ModelError(f"{output}: cannot be written ({error.strerror}); nothing is left there") from None
        check = None
        if verify:
            # Imported here: PEFT takes seconds, and merging does without.
            from pi_lora.merge.check import verify_merge

            check = verify_merge(found, staging, plan, progress)
        facts = Merge(
            base=found.base.name,
            run=str(run),
            onto=onto,
            dtype=stored,
            scale=found.scale,
            window=found.window,
            untied=plan.untied,
            check=check,
            versions=versions(),
        )
        (staging / MERGE_FILE).write_text(facts.model_dump_json(indent=2) + "\n", encoding="utf-8")
        card = merged_card(run, staging, check.lines() if check else [], facts.card_rows())
        (staging / CARD).write_text(card, encoding="utf-8")
    return output


def _check_quantized(run: Path) -> None:
    if not tuned_quantized(run):
        raise ModelError(f"{run}: was not tuned by qlora; --onto quantized is for adapters that were")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError("--onto quantized: needs bitsandbytes; pip install pi-lora[qlora]")
