"""Models with a longer window as folders that every engine loads, whole or not at all: base + adapter as full weights,
written a few rows at a time and checked; or a base with its own weights beside the config of a longer window.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from pi_lora.errors import ModelError
from pi_lora.evaluation.suite import write_scores
from pi_lora.merging.check import check_logits, check_model, check_tensors
from pi_lora.merging.deltas import plan_merge, write_tensors
from pi_lora.merging.tensors import read_weights
from pi_lora.models.files import save_config
from pi_lora.models.model import Model, adapter_folder, find_adapter, find_base_of
from pi_lora.models.tokenizer import TOKENIZER_FILES, save_tokenizer
from pi_lora.models.weights import quiet_loading
from pi_lora.report.card import CARD, card_of
from pi_lora.report.probe import Probe
from pi_lora.report.scores import MeasuredRun, public_name
from pi_lora.run import BASE, STEP_0, staged
from pi_lora.scaling.config import ORIGINAL_WINDOW, Config, with_legacy_rope_keys
from pi_lora.scaling.verify import build_on_meta, config_of
from pi_lora.serving.commands import serving_lines
from pi_lora.storage import write_json, write_whole
from pi_lora.types import NO_PERMISSIONS, Permissions, Progress, silent

MERGE_FILE = "merge.json"
# The entries of a config that a scaling changes.
POSITIONS = ("rope_parameters", "max_position_embeddings", "original_max_position_embeddings", ORIGINAL_WINDOW)


class Merge(NamedTuple):
    """What was merged into `folder`: `lines` say what a user may not expect and what was checked, `serving` has the
    commands that serve the folder and check the server.
    """

    folder: Path
    lines: list[str]
    serving: list[str]


def merge(
    run: Path,
    output: Path,
    base: str | None = None,
    dtype: str | None = None,
    check: Literal["tensors", "logits", "none"] = "tensors",
    progress: Progress = silent,
    permissions: Permissions = NO_PERMISSIONS,
    sibling: bool = False,
) -> Merge:
    """Write base + adapter of `run`, a folder or hub id, as full weights to `output`, checked, whole or not at all.

    Sums are made in float32, a few rows at a time, and cast once, to `dtype` or what the base stores. Files are divided
    as the base's are. If `sibling`, `base` is another model of the family of the base that `run` was tuned on, such as
    its instruct model, and gets the scaling too. `check` compares the written tensors with base and adapter, or their
    logits too, or nothing.

    Raise ModelError if `run` is no adapter, its base is missing, damaged or another one, they do not fit
    together, or a check failed, after which nothing is kept; RunExistsError if `output` exists.
    """
    if (folder := adapter_folder(str(run))) is None:
        raise ModelError(f"{run}: holds no adapter; name a run of lora tuning (full tuning needs no merge)")
    model, before, lines = find_adapter(folder, base, permissions), None, []
    if sibling:
        model, tuned_on = _onto_sibling(model, base), find_base_of(folder, permissions=permissions)
        before = read_weights(tuned_on.base, tuned_on.file)
        lines.append(f"sibling: tuned on {public_name(tuned_on.base)}, and added to {public_name(model.base)}")
    else:
        model.check_base_fingerprint()
    if model.base_config.get("quantization_config"):
        raise ModelError(f"{model.base}: has quantized weights; name the model that it was made from with --base")
    with staged(output) as staging:
        with quiet_loading():
            meta_model = build_on_meta(model.kind, model.config, permissions.trust_remote_code)
        tensors = plan_merge(meta_model, read_weights(model.base, model.file), folder, dtype, before)
        stored = str(max(tensors, key=lambda tensor: tensor.size).dtype).removeprefix("torch.")
        config = {**model.config, "architectures": [type(meta_model).__name__], "dtype": stored}
        if any(tensor.name in meta_model.all_tied_weights_keys for tensor in tensors):
            config["tie_word_embeddings"] = False
            lines.append("head: was tied to the embeddings, but they diverged: it is a tensor of its own now")
        _save_without_weights(model, config, staging)
        # What is wrong with the model or the card shows before the weights are written.
        check_model(model, meta_model, tensors, staging)
        measured, typed = MeasuredRun(folder, merged=staging, base_name=model.base), config_of(model.kind, config)
        card_of(measured)
        write_tensors(tensors, staging, progress)
        lines.append("not checked" if check == "none" else check_tensors(folder, tensors, staging, progress))
        if check == "logits":
            progress(0, 0, "comparing logits")
            lines.append(check_logits(model, folder, tensors, staging))
        write_whole(staging / CARD, card_of(measured, lines, serving_lines(typed)))
        write_json(staging / MERGE_FILE, {"base": model.base, "run": str(run), "checks": lines})
    return Merge(output, lines, serving_lines(typed, output))


def extend(model: Model, output: Path, probe: Probe | None = None, progress: Progress = silent) -> list[str]:
    """Write a base that was found under an extension to `output`, whole or not at all, and return the commands that
    serve it. Weights are hard links where the disk allows it, else copies. The scores of a `probe` of this base, target
    and scaling go to the card and to `scores/`.

    Raise ModelError if a weight file is missing or damaged or the probe is of another model, RunExistsError if `output`
    exists.
    """
    assert model.extension, "the base is extended"
    scaling, typed = model.extension.scaling, config_of(model.kind, model.config)
    weights = {tensor.path for tensor in read_weights(model.base, model.file).values()}
    files = [*weights, *filter(None, [model.file(SAFE_WEIGHTS_INDEX_NAME)])]
    probed = probe.at(model.extension.target).scalings if probe else {}
    if probe and (probe.model != model.name or scaling not in probed):
        of = f"{probe.model} under {', '.join(probed)}"
        raise ModelError(f"--probe: is of {of}, not of {model.name} under {scaling}; probe it, or leave the option out")
    with staged(output) as staging:
        folder = MeasuredRun(staging, untuned=True, base_name=model.base)
        _save_without_weights(model, model.config, staging)
        for stage, results in ((BASE, probed["direct"]), (STEP_0, probed[scaling])) if probe else ():
            for scores in filter(None, (results.perplexity, results.passkey)):
                write_scores([scores], folder.scores_file(scores.measurement, stage))
        write_whole(staging / CARD, card_of(folder, serving=serving_lines(typed)))
        for number, file in enumerate(files, 1):
            progress(number, len(files), file.name)
            try:
                os.link(file.resolve(), staging / file.name)
            except OSError:  # another disk, or one without hard links
                shutil.copyfile(file, staging / file.name)
    return serving_lines(typed, output)


def _save_without_weights(model: Model, config: Config, folder: Path) -> None:
    """Write all files of a model but the weights and the card; it may have no tokenizer."""
    save_config(config, folder)
    if any(map(model.file, TOKENIZER_FILES)):
        save_tokenizer(model.tokenizer, folder)
    if generation := model.file(GENERATION_CONFIG_NAME):
        shutil.copyfile(generation, folder / GENERATION_CONFIG_NAME)


def _onto_sibling(model: Model, base: str | None) -> Model:
    """Return the sibling `base` with its own tokenizer, and its own config with the positions of the run."""
    if base is None:
        raise ModelError(f"{model.adapter}: --sibling: name the sibling of its base with --base")
    positions = {key: model.config[key] for key in POSITIONS if key in model.config}
    return replace(model, adapter=None, config=with_legacy_rope_keys({**model.base_config, **positions}))
