"""Models with a longer window as folders that every engine loads, whole or not at all: base + adapter as full weights,
written a few rows at a time and checked; or a base with its own weights beside the config of a longer window.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from pi_lora.errors import ModelError
from pi_lora.evaluation.suite import write_scores
from pi_lora.merging.check import check_logits, check_model, check_tensors
from pi_lora.merging.deltas import plan_merge, write_shards
from pi_lora.merging.tensors import read_shards
from pi_lora.models.files import CONFIG_FILE, save_config
from pi_lora.models.machine import dtype_named, versions
from pi_lora.models.model import Extension, Model, adapter_folder, find_adapter, find_base_of
from pi_lora.models.tokenizer import TOKENIZER_FILES, save_tokenizer
from pi_lora.models.weights import quiet_loading
from pi_lora.report.card import CARD, card_of
from pi_lora.report.probe import Probe
from pi_lora.report.scores import MeasuredRun
from pi_lora.run import BASE, STEP_0, Run, check_room, staged
from pi_lora.scaling.config import ORIGINAL_WINDOW, Config, in_both_dialects
from pi_lora.scaling.verify import build_on_meta, config_of
from pi_lora.serving.commands import serving_lines
from pi_lora.types import NO_PERMISSIONS, Permissions, Progress, silent
from pi_lora.writing import write_json, write_whole

MERGE_FILE = "merge.json"
# The entries of a config that a scaling changes.
POSITIONS = ("rope_parameters", "max_position_embeddings", "original_max_position_embeddings", ORIGINAL_WINDOW)


class Merge(NamedTuple):
    """What was merged into `folder`: `notes` by name what a user would not expect, `checks` a line for each result, and
    the commands that serve the folder and check the server.
    """

    folder: Path
    notes: dict[str, str]
    checks: list[str]
    serving: list[str]

    def lines(self) -> list[str]:
        """Return the lines for the terminal."""
        return [*(f"{name}: {note}" for name, note in self.notes.items()), *(self.checks or ["not checked"])]


def merge(
    run: Path,
    output: Path,
    base: str | None = None,
    dtype: str | None = None,
    check: Literal["tensors", "logits", "none"] = "tensors",
    progress: Progress = silent,
    extension: Extension | None = None,
    permissions: Permissions = NO_PERMISSIONS,
    sibling: bool = False,
) -> Merge:
    """Write base + adapter of `run`, a folder or hub id, as full weights to `output`, checked, whole or not at all.

    Sums are made in float32, a few rows at a time, and cast once, to `dtype` or what the base stores. Files are divided
    as the base's are. `extension` is the scaling of an adapter made elsewhere. If `sibling`, `base` is another model of
    the family of the base that `run` was tuned on, such as its instruct model, and gets the scaling too. `check`
    compares the written tensors with base and adapter, or their logits too, or nothing.

    Raise ModelError if `run` is no adapter, its base is missing, damaged or another one, they do not fit
    together, or a check failed, after which nothing is kept; RunExistsError if `output` exists, or there is no room.
    """
    if (folder := adapter_folder(str(run))) is None:
        raise ModelError(f"{run}: holds no adapter; name a run of lora tuning (full tuning needs no merge)")
    found, before, notes = _find(folder, base, extension, permissions, sibling)
    if found.base_config.get("quantization_config"):
        raise ModelError(f"{found.base}: has quantized weights; name the model that it was made from with --base")
    with staged(output) as staging:
        with quiet_loading():
            model = build_on_meta(found.kind, found.config, permissions.remote_code)
        own, others = read_shards(found.base, found.file), read_shards(before.base, before.file) if before else []
        shards = plan_merge(model, own, folder, dtype_named(dtype) if dtype else None, others)
        tensors = [tensor for shard in shards for tensor in shard]
        check_room(output, sum(tensor.size for tensor in tensors))
        stored = str(max(tensors, key=lambda tensor: tensor.size).dtype).removeprefix("torch.")
        config = {**found.config, "architectures": [type(model).__name__], "dtype": stored}
        if any(tensor.name in model.all_tied_weights_keys for tensor in tensors):
            config["tie_word_embeddings"] = False
            notes["head"] = "was tied to the embeddings, but they diverged in tuning: it is a tensor of its own now"
        # A sibling has its own tokenizer.
        _save_without_weights(replace(found, adapter=None) if before else found, config, staging)
        # What is wrong with the model or the card shows before the weights are written.
        check_model(found, model, tensors, staging)
        measured, typed = MeasuredRun(folder, staging, found.base), config_of(found.kind, config)
        card_of(measured)
        with _one_thread():
            write_shards(shards, staging, progress)
            checks = [] if check == "none" else [check_tensors(found, tensors, staging, progress)]
        if check == "logits":
            progress(0, 0, "comparing logits")
            checks.append(check_logits(found, tensors, staging))
        write_whole(staging / CARD, card_of(measured, None, checks, notes, serving_lines(typed)))
        facts = {"base": found.base, "run": str(run), "dtype": stored, "notes": notes, "checks": checks}
        write_json(staging / MERGE_FILE, {**facts, "versions": versions()})
    return Merge(output, notes, checks, serving_lines(typed, output))


def extend(model: Model, output: Path, probe: Probe | None = None, progress: Progress = silent) -> list[str]:
    """Write a base that was found under an extension to `output`, whole or not at all, and return the commands that
    serve it. Weights are hard links where the disk allows it, else copies. The scores of a `probe` of this base, target
    and scaling go to the card and to `scores/`.

    Raise ModelError if a weight file is missing or damaged or the probe is of another model, RunExistsError if `output`
    exists or there is no room.
    """
    assert model.extension, "the base is extended"
    scaling, typed = model.extension.scaling, config_of(model.kind, model.config)
    files = {tensor.path for shard in read_shards(model.base, model.file) for tensor in shard}
    if index := model.file(SAFE_WEIGHTS_INDEX_NAME):
        files.add(index)
    probed = probe.at(model.extension.target).scalings if probe else {}
    if probe and (probe.model != model.name or scaling not in probed):
        of = f"{probe.model} under {', '.join(probed)}"
        raise ModelError(f"--probe: is of {of}, not of {model.name} under {scaling}; probe it, or leave the option out")
    with staged(output) as staging:
        folder = MeasuredRun(staging, staging, model.base)
        _save_without_weights(model, model.config, staging)
        for stage, results in ((BASE, probed.get("direct")), (STEP_0, probed.get(scaling))):
            for scores in filter(None, (results.perplexity, results.passkey)) if results else ():
                write_scores(scores, folder.scores_file(scores.measurement, stage))
        write_whole(staging / CARD, card_of(folder, serving=serving_lines(typed)))
        for number, file in enumerate(files):
            progress(number, len(files), file.name)
            try:
                os.link(file.resolve(), staging / file.name)
            except OSError:  # another disk, or one without hard links
                check_room(output, file.stat().st_size)
                shutil.copyfile(file, staging / file.name)
    return serving_lines(typed, output)


def _save_without_weights(model: Model, config: Config, folder: Path) -> None:
    """Write all files of a model but the weights and the card; it may have no tokenizer."""
    save_config(config, folder)
    if any(map(model.file, TOKENIZER_FILES)):
        save_tokenizer(model.tokenizer, folder)
    if generation := model.file(GENERATION_CONFIG_NAME):
        shutil.copyfile(generation, folder / GENERATION_CONFIG_NAME)


def _find(
    run: Path, base: str | None, extension: Extension | None, permissions: Permissions, sibling: bool
) -> tuple[Model, Model | None, dict[str, str]]:
    """Find the base of an adapter with the config that it was tuned under, of a sibling also the base that it was tuned
    on; and return them with notes on what a user may not expect. Raise ModelError if they cannot be merged.
    """
    if sibling and not base:
        raise ModelError(f"{run}: --sibling: name the sibling of its base with --base")
    if extension is None and (run / CONFIG_FILE).is_file():
        found = find_adapter(run, base, permissions)
        if sibling:
            before = find_base_of(run, permissions=permissions)
            positions = {key: found.config[key] for key in POSITIONS if key in found.config}
            found = replace(found, config=in_both_dialects({**found.base_config, **positions}))
            return found, before, {"sibling": f"tuned on {before.base}, and added to {found.base}"}
        found.check_origin()
        return found, None, {}
    if Run(run).has_recipe:
        raise ModelError(f"{run}: brings its own scaling; leave out --original, --target and --scaling")
    plain = find_base_of(run, base, permissions)
    found = (plain.extended(extension) if extension else plain).with_adapter(run)
    scaling = f"under {extension.scaling}" if extension else f"under the scaling of {found.base}"
    known = "as stated" if extension else "as it has no config.json; if not, state it with --target and --original"
    return found, None, {"assumed": f"{run} was tuned {scaling} to {found.window} tokens, {known}"}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Blocks are too small to share: on a busy machine, threads that wait for each other took ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
