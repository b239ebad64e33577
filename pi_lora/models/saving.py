"""The files of a model for every engine: config, tokenizer, generation config, and linked weights."""

import os
import platform
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from pi_lora.errors import ModelError
from pi_lora.models.composite import names_in
from pi_lora.models.files import save_config
from pi_lora.models.source import Base, ModelSource
from pi_lora.models.tokenizer import end_of_turn, save_tokenizer
from pi_lora.models.weights import COMPUTED, StoredTensor, read_header, write_index
from pi_lora.recipe.files import RECIPE_FILE
from pi_lora.run import RUN_FILE
from pi_lora.scaling.config import Config
from pi_lora.storage import read_json, write_json
from pi_lora.types import Json, Progress, ui

OTHER_WEIGHTS_FILE = "model-other-parts.safetensors"
FIRST_OF_SEVERAL = "model-00001-of-00001.safetensors"


def save_without_weights(source: ModelSource, config: Config, folder: Path) -> None:
    """Write `config` with the Python code that it names, the generation config, and the tokenizer and processors that
    the model has. They are written although the base has them: another machine may not have the base.
    """
    save_config(config, folder)
    write_generation_config(source, folder)
    for kind in source.base.code.values():
        custom_object_save(kind, folder)
    if source.tokenizer_files:
        save_tokenizer(source.tokenizer, folder, source.tokenizer_files)
    for name, file in source.processor_files.items():
        shutil.copyfile(file, folder / name)


def save_history(source: ModelSource, folder: Path) -> None:
    """Write what is known of how a merged or extended model was made: L and the texts of earlier trainings, and of a
    merged run the recipe and the facts of the training.
    """
    history: Json = {"python": platform.python_version()}
    if source.adapter:
        history |= source.run.metadata.model_dump(mode="json", exclude_unset=True)
        if source.run.has_recipe:
            shutil.copyfile(source.adapter / RECIPE_FILE, folder / RECIPE_FILE)
    texts = [text.model_dump(mode="json") for text in source.texts]
    write_json(folder / RUN_FILE, {**history, "original": source.original, "texts_before": texts})


def write_generation_config(source: ModelSource, folder: Path) -> None:
    """Write the generation config of the base, which transformers would not save if it is invalid, as it is. If texts
    may be as long as the window of the base, as for Llama 2, they may be as long as the new one. The token that ends a
    turn of the chat template ends a text too: engines would not stop after an answer.
    """
    file = folder / GENERATION_CONFIG_NAME
    settings: Json = {}
    changes: Json = {}
    if stored := source.base.file(GENERATION_CONFIG_NAME):
        shutil.copyfile(stored, file)
        try:
            settings = read_json(file, Json, "download it again")
        except ModelError:  # the file is damaged
            return
    if settings.get("max_length") == source.base.rope.window:
        changes["max_length"] = source.window
    if source.tokenizer_files:
        end = end_of_turn(source.tokenizer)
        named = [config.get("eos_token_id") for config in (settings, source.config)]
        ends: Any = next(ends for ends in (*named, source.tokenizer.eos_token_id) if ends is not None)
        ends = ends if isinstance(ends, list) else [ends]
        if end is not None and end not in ends:
            changes["eos_token_id"] = [*ends, end]
            token = source.tokenizer.convert_ids_to_tokens(end)
            ui.say(
                f"{GENERATION_CONFIG_NAME}: {token}, which ends a turn of the chat template, is added to eos_token_id"
            )
    if changes:
        write_json(file, settings | changes)


def save_other_weights(base: Base, folder: Path) -> None:
    """Add the weights of the base that its module does not have to those in `folder`: the other parts of a composite,
    and heads that predict several tokens.
    """
    stored = base.read_weights()
    names = names_in(base.meta_model, stored, fused=True)
    known = base.meta_model.state_dict()
    others = {}
    for stored_name, name in names.items():
        if name not in known and not name.endswith(COMPUTED):
            others[stored_name] = stored[stored_name].whole()
    if not others:
        return
    save_file(others, folder / OTHER_WEIGHTS_FILE, metadata={"format": "pt"})
    # transformers would read a file of this name alone, and give the other parts random weights.
    single_file = folder / SAFE_WEIGHTS_NAME
    if single_file.exists():
        single_file.rename(folder / FIRST_OF_SEVERAL)
    tensors: dict[str, StoredTensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= read_header(file)
    write_index(folder, tensors)


def weight_files(source: ModelSource) -> list[Path]:
    """Return the files of weights of the base, and their index; raise ModelError if one is missing or damaged."""
    tensors = source.base.read_weights()
    files = list({tensor.path for tensor in tensors.values()})
    index = source.base.file(SAFE_WEIGHTS_INDEX_NAME)
    if index and files[0].name != SAFE_WEIGHTS_NAME:
        files.append(index)
    return files


def link_weights(files: list[Path], folder: Path, progress: Progress) -> None:
    """Put files into a folder: as hard links where the disk allows them, else as copies."""
    for number, file in enumerate(files, 1):
        progress(number, len(files), file.name)
        try:
            os.link(file.resolve(), folder / file.name)
        except OSError:  # another disk, or one without hard links
            shutil.copyfile(file, folder / file.name)
