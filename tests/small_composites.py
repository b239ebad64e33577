"""Small random vision-language checkpoints, runs of them, and the tensors beside the language model."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText

import pi_lora
from architectures import small_composite
from pi_lora.models.files import BUILTIN_FOLDER, PROCESSOR_FILES
from random_runs import TOKENIZER, stored

WINDOW = 64
STEPS = 3
# Heads that predict several tokens, which transformers does not load, by the type of the model that has them.
EXTRA = {"qwen3_5": "mtp.fc.weight", "deepseek_v3": "model.layers.61.eh_proj.weight"}


def save_composite(model_type: str, folder: Path) -> Path:
    """A small random composite whose language model reads the vocabulary of the built-in tokenizer."""
    config: Any = small_composite(model_type)
    config.text_config.vocab_size = 1024
    if model_type == "mistral3":
        config.text_config.sliding_window = None
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copyfile(BUILTIN_FOLDER / "tiny" / name, folder / name)
    for name in PROCESSOR_FILES:
        (folder / name).write_text(f'{{"made for": "{name}"}}')
    add_extra(model_type, folder)
    return folder


def add_extra(model_type: str, folder: Path) -> None:
    """Add a tensor of a head that predicts several tokens, where published models have one."""
    if name := EXTRA.get(model_type):
        tensors = {**stored(folder), name: torch.randn(4, 4)}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def tuned(base: Path, output: Path, method: str = "lora", **options: Any) -> Path:
    """The run of a few steps on a model."""
    recipe = {
        "model": {"name": str(base)},
        "context": {"target": 2 * WINDOW},
        "tuning": {"method": method} | ({"rank": 2} if method == "lora" else {}),
        "data": {"source": {"name": "builtin:stdlib"}},
        "training": {"steps": STEPS, "global_batch_size": 1, "warmup_steps": 1, "learning_rate": 0.01},
    }
    file = output.with_suffix(".yaml")
    file.write_text(json.dumps(recipe))
    return Path(pi_lora.train(file, output=output, **options))


def other_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for name, tensor in stored(folder).items()
        if "visual" in name or "vision" in name or "multi_modal" in name or name in EXTRA.values()
    }
