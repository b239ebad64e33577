"""The shape that is measured, its recipes, and a model of it with random weights: nothing is downloaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pi_lora.models.resolve import resolve_model
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
# The length of sequences, unless the model has a longer window.
TOKENS = 16384


@dataclass(frozen=True)
class Setting:
    """The setting of all contenders: the shape of a model, tokens of a sequence, and the rank of adapters."""

    name: str
    config: Mapping[str, Any]
    tokens: int
    rank: int

    def recipe(self, base: Path, method: str, changes: Changes) -> Recipe:
        """The recipe of one step after another, each of one sequence; `changes` by section, over the defaults. The
        trainer is stopped before it has done them all.
        """
        sections: dict[str, dict[str, Any]] = {
            "model": {"name": str(base)},
            "context": {"original": self.config["max_position_embeddings"], "target": self.tokens},
            "tuning": {"method": method, "rank": self.rank},
            "data": {"source": "builtin:stdlib"},
            "training": {
                "steps": 8,
                "warmup_steps": 1,
                "log_every": 1,
                "save_every": 10**9,
                "global_batch_size": 1,
                "per_device_batch_size": 1,
            },
        }
        for section, values in changes.items():
            sections[section] = {**sections.get(section, {}), **values}
        return Recipe.model_validate(sections)


def setting_of(name: str) -> Setting:
    """`tiny` for a CPU, or a model whose shape the plan knows, by its hub id, at twice its window or more."""
    if name == TINY:
        return Setting(TINY, TINY_CONFIG, tokens=128, rank=4)
    config = resolve_model(name, shipped=True).config
    tokens = max(TOKENS, 2 * config["max_position_embeddings"])
    return Setting(name, config, tokens, rank=16)


def write_model(setting: Setting, folder: Path) -> None:
    """Write a model of the shape with random bfloat16 weights, drawn on the device, and a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from pi_lora.models.device import device

    config = AutoConfig.for_model(**setting.config)
    with torch.device(device()):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    add_tokenizer(folder)
