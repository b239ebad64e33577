"""The shape that is measured, its recipes, and a model of it with random weights: nothing is downloaded."""

from collections.abc import Mapping
from dataclasses import dataclass
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
LENGTHS = (16384, 32768, 65536)


@dataclass(frozen=True)
class Setting:
    """A model and the tokens of a sequence, alike for all that is compared."""

    name: str
    config: Mapping[str, Any]
    tokens: int
    rank: int

    @property
    def original(self) -> int:
        """L in tokens."""
        return int(self.config["max_position_embeddings"])

    def recipe(self, base: Path, method: str, changes: Changes) -> Recipe:
        """The recipe of one step after another, each of one sequence; `changes` by section, over the defaults. The
        trainer is stopped before it has done them all.
        """
        sections: dict[str, dict[str, Any]] = {
            "model": {"name": str(base)},
            "context": {"original": self.original, "target": self.tokens},
            "tuning": {"method": method, "rank": self.rank},
            "data": {"source": "builtin:stdlib"},
            "training": {
                "steps": 8,
                "warmup_steps": 1,
                "log_every": 1,
                "save_every": 10**9,
                "global_batch_size": 1,
            },
        }
        for section, values in changes.items():
            sections[section] = {**sections[section], **values}
        return Recipe.model_validate(sections)


def setting_of(name: str) -> Setting:
    """`tiny` for a CPU, or a model whose shape the plan knows, by its hub id."""
    if name == TINY:
        return Setting(TINY, TINY_CONFIG, tokens=128, rank=4)
    config = resolve_model(name, shipped=True).config
    window = config["max_position_embeddings"]
    longer = [tokens for tokens in LENGTHS if tokens > window]
    if not longer:
        raise SystemExit(
            f"--shape {name}: has a window of {window:,} tokens already; name a model of that shape with less than "
            f"{LENGTHS[-1]:,}, such as meta-llama/Meta-Llama-3-8B for Llama 3.1"
        )
    return Setting(name, config, tokens=longer[0], rank=16)


def write_recipe(recipe: Recipe, folder: Path) -> Path:
    """Write a recipe as a file."""
    file = folder / f"{recipe.tuning.method}.yaml"
    file.write_text(f"# Random weights.\n{dump_recipe(recipe)}", encoding="utf-8")
    return file


def plan_of(recipe: Path, gpu: str) -> dict[str, Any]:
    """The plan of a recipe for a card, as `pi-lora plan --json` writes it, and what its allocator gives out at most."""
    plan = pi_lora.plan(recipe, gpu=gpu)
    return {**plan.as_json(), "allocated": plan.memory.highest}


def base_of(setting: Setting, folder: Path) -> Path:
    """The base model: random bfloat16 weights, drawn on the device, and the built-in model's tokenizer."""
    base = folder / "base"
    if base.is_dir():
        return base
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from pi_lora.models.device import device

    config = AutoConfig.for_model(**setting.config)
    with torch.device(device()):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(base)
    add_tokenizer(base)
    return base
