"""The files of a model for every engine: config, tokenizer, generation config, and linked weights."""

import os
import shutil
from pathlib import Path

from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from pi_lora.models.files import save_config
from pi_lora.models.source import Base, ModelSource
from pi_lora.models.tokenizer import save_tokenizer
from pi_lora.models.weights import read_weights
from pi_lora.scaling.config import Config
from pi_lora.types import Progress


def save_without_weights(source: ModelSource, config: Config, folder: Path) -> None:
    """Write `config` with the Python code that it names, and the tokenizer if the model has one. Code and tokenizer are
    written although the base has them: another machine may not have the base.
    """
    save_config(config, folder)
    for kind in source.base.code.values():
        custom_object_save(kind, folder)
    if source.tokenizer_files:
        save_tokenizer(source.tokenizer, folder, source.tokenizer_files)


def copy_generation_config(base: Base, folder: Path) -> None:
    """Write the generation config of the base, which transformers would not save if it is invalid, as it is."""
    generation_config = base.file(GENERATION_CONFIG_NAME)
    if generation_config:
        shutil.copyfile(generation_config, folder / GENERATION_CONFIG_NAME)


def weight_files(source: ModelSource) -> list[Path]:
    """Return the files of weights of the base, and their index; raise ModelError if one is missing or damaged."""
    tensors = read_weights(source.base.name, source.base.file)
    files = list({tensor.path for tensor in tensors.values()})
    index = source.base.file(SAFE_WEIGHTS_INDEX_NAME)
    if index:
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
