"""The shape that is measured, its recipes, and a model of it with random weights: nothing is downloaded."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pi_lora
from pi_lora.models.resolve import resolve_model
from pi_lora.recipe.files import dump_recipe
from pi_lora.recipe.schema import Recipe
from record import add_tokenizer

Changes = Mapping[str, Mapping[str, Any]]

TINY = "tiny"
TINY_CONFIG = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
LENGTHS = (2048, 8192, 16384, 32768, 65536)


@dataclass(frozen=True)
class Setting:
    """The setting of all contenders; lengths in tokens. Levers and neighbours are compared at `compared`."""

    name: str
    config: Mapping[str, Any]
    lengths: tuple[int, ...]
    compared: int
    tokens_per_step: int
    rank: int

    @property
    def original(self) -> int:
        """L in tokens."""
        return int(self.config["max_position_embeddings"])

    @property
    def layers(self) -> int:
        """The number of layers."""
        return int(self.config["num_hidden_layers"])

    def with_layers(self, layers: int) -> "Setting":
        """The same widths with fewer layers."""
        return replace(self, config={**self.config, "num_hidden_layers": layers})

    def recipe(self, base: Path, method: str, tokens: int, changes: Changes | None = None) -> Recipe:
        """The recipe of one step after another, each of `tokens_per_step` tokens or of one sequence; `changes` by
        section, over the defaults. The trainer is stopped before it has done them all.
        """
        sequences = max(1, self.tokens_per_step // tokens)
        sections: dict[str, dict[str, Any]] = {
            "model": {"name": str(base)},
            "context": {"original": self.original, "target": tokens},
            "tuning": {"method": method, "rank": self.rank},
            "data": {"source": "builtin:stdlib"},
            "training": {
                "steps": 8,
                "warmup_steps": 1,
                "log_every": 1,
                "save_every": 10**9,
                "global_batch_size": sequences,
                "per_device_batch_size": sequences,
            },
        }
        for section, values in (changes or {}).items():
            sections[section] = {**sections.get(section, {}), **values}
        return Recipe.model_validate(sections)


def setting_of(name: str) -> Setting:
    """`tiny` for a CPU, or a model whose shape the plan knows, by its hub id."""
    if name == TINY:
        return Setting(TINY, TINY_CONFIG, lengths=(64, 128), compared=128, tokens_per_step=128, rank=4)
    config = resolve_model(name, shipped=True).config
    window = config["max_position_embeddings"]
    lengths = tuple(length for length in LENGTHS if length > window)
    if not lengths:
        raise SystemExit(
            f"--shape {name}: has a window of {window:,} tokens already; name a model of that shape with less than "
            f"{LENGTHS[-1]:,}, such as meta-llama/Meta-Llama-3-8B for Llama 3.1"
        )
    compared = next(length for length in lengths if length >= 16384)
    return Setting(name, config, lengths, compared, tokens_per_step=16384, rank=16)


def write_recipe(recipe: Recipe, folder: Path) -> Path:
    """Write a recipe as a file."""
    file = folder / f"{recipe.tuning.method}.yaml"
    file.write_text(f"# Random weights.\n{dump_recipe(recipe)}", encoding="utf-8")
    return file


def plan_of(recipe: Path, gpu: str) -> dict[str, Any]:
    """The plan of a recipe for a card, as `pi-lora plan --json` writes it, and what its allocator gives out at most."""
    plan = pi_lora.plan(recipe, gpu=gpu)
    return {**plan.as_json(), "allocated": plan.memory.highest}


@cache
def config_folder(setting_name: str, layers: int, folder: Path) -> Path:
    """A folder with the config and the tokenizer of the shape, which is all that a plan reads."""
    from transformers import AutoConfig

    setting = setting_of(setting_name).with_layers(layers)
    base = folder / f"{layers}-layers"
    base.mkdir(parents=True)
    config = AutoConfig.for_model(**setting.config)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(base)
    add_tokenizer(base)
    return base


def add_weights(base: Path) -> None:
    """Write random bfloat16 weights beside the config, drawn on the device, unless they are there."""
    if list(base.glob("*.safetensors")):
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from pi_lora.models.device import device

    with torch.device(device()):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base), dtype=torch.bfloat16)
    model.save_pretrained(base)
