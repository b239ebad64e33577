"""A base with a longer window and no tuning: its own weights beside a config that every engine reads."""

import os
import shutil
from pathlib import Path

from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from pi_lora.errors import ModelError
from pi_lora.evaluation.suite import write_scores
from pi_lora.merging.tensors import read_shards
from pi_lora.models.files import save_config
from pi_lora.models.model import Model
from pi_lora.models.tokenizer import TOKENIZER_FILES, save_tokenizer
from pi_lora.report.card import CARD, card_of
from pi_lora.report.probe import Probe
from pi_lora.report.scores import MeasuredRun
from pi_lora.run import BASE, STEP_0, check_room, staged
from pi_lora.scaling.config import Config, Method
from pi_lora.scaling.verify import config_of
from pi_lora.serving.commands import serving_lines
from pi_lora.types import Progress, silent
from pi_lora.writing import write_whole


def extend(model: Model, output: Path, probe: Probe | None = None, progress: Progress = silent) -> list[str]:
    """Write a base that was found under an extension to `output`, whole or not at all, and return the commands that
    serve it. Weights are hard links where the disk allows it, else copies. The scores of a `probe` of this base, target
    and scaling go to the card and to `scores/`.

    Raise ModelError if a weight file is missing or damaged or the probe is of another model, RunExistsError if `output`
    exists or there is no room.
    """
    assert model.extension, "the base is extended"
    target, scaling = model.extension.target, model.extension.scaling
    weights = sorted({tensor.path for shard in read_shards(model.base, model.file) for tensor in shard})
    index = model.file(SAFE_WEIGHTS_INDEX_NAME)
    scores = probe.at(target).scalings if probe else {}
    if probe and (probe.model != model.name or scaling not in scores):
        of = f"{probe.model} under {', '.join(scores)}"
        raise ModelError(f"--probe: is of {of}, not of {model.name} under {scaling}; probe it, or leave the option out")
    stages: dict[str, Method] = {BASE: "direct", STEP_0: scaling} if probe else {}
    config = config_of(model.kind, model.config)
    with staged(output) as staging:
        folder = MeasuredRun(staging, staging, model.base)
        save_without_weights(model, model.config, staging)
        for stage, name in stages.items():
            for measured in filter(None, (scores[name].perplexity, scores[name].passkey)):
                write_scores(measured, folder.scores_file(measured.measurement, stage))
        write_whole(staging / CARD, card_of(folder, serving=serving_lines(config, ".", Path("model.gguf"))))
        for number, file in enumerate(filter(None, (index, *weights))):
            progress(number, len(weights) + 1, file.name)
            _link_or_copy(file.resolve(), staging / file.name, output)
    return serving_lines(config, str(output), output.with_suffix(".gguf"))


def save_without_weights(model: Model, config: Config, folder: Path) -> None:
    """Write all files of a model but the weights and the card; it may have no tokenizer."""
    save_config(config, folder)
    if any(map(model.file, TOKENIZER_FILES)):
        save_tokenizer(model.tokenizer, folder)
    if generation := model.file(GENERATION_CONFIG_NAME):
        shutil.copyfile(generation, folder / GENERATION_CONFIG_NAME)


def _link_or_copy(file: Path, link: Path, output: Path) -> None:
    try:
        os.link(file, link)
    except OSError:  # another disk, or one without hard links
        check_room(output, file.stat().st_size)
        shutil.copyfile(file, link)
