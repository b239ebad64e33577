"""The shape that is measured, its recipes, and models of it with random weights: nothing is downloaded."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pi_lora.models.device import device
from pi_lora.models.weights import quantization, quiet_loading
from pi_lora.planning.counting import shape_of
from pi_lora.planning.memory import DeviceMemory, memory
from pi_lora.planning.operations import Flops, flops_of_sequences
from pi_lora.planning.planning import find_shape
from pi_lora.planning.shape import Shape
from pi_lora.recipe.schema import Recipe
from pi_lora.scaling.config import Interpolation, extend_config

Changes = Mapping[str, Mapping[str, Any]]

TINY = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "rope_theta": 10000.0,
}


@dataclass(frozen=True)
class Setting:
    """What all contenders have in common; lengths in tokens. `short` is what levers and neighbours are compared at."""

    name: str
    config: Mapping[str, Any]
    lengths: tuple[int, ...]
    compared: int
    tokens_a_step: int
    rank: int = 16

    @property
    def original(self) -> int:
        """L in tokens."""
        return int(self.config["max_position_embeddings"])

    @property
    def layers(self) -> int:
        """How deep the shape is."""
        return int(self.config["num_hidden_layers"])

    @property
    def shape(self) -> Shape:
        """As the plan counts it."""
        with torch.device("meta"):
            return shape_of(AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.config)))

    def with_layers(self, layers: int) -> "Setting":
        """The same widths, less deep."""
        return replace(self, config={**self.config, "num_hidden_layers": layers})

    def recipe(self, method: str, tokens: int, changes: Changes | None = None) -> Recipe:
        """One step of `tokens_a_step` tokens or of one sequence; `changes` by section, over the defaults."""
        sequences = max(1, self.tokens_a_step // tokens)
        sections: dict[str, dict[str, Any]] = {
            "model": {"name": self.name},
            "context": {"original": self.original, "target": tokens},
            "tuning": {"method": method, "rank": self.rank},
            "data": {"source": "synthetic"},
            "training": {"global_batch_size": sequences, "per_device_batch_size": sequences, "save_every": 10**9},
        }
        for section, values in (changes or {}).items():
            sections[section] = {**sections.get(section, {}), **values}
        return Recipe.model_validate(sections)


def setting_of(shape: str) -> Setting:
    """`tiny` for a CPU, or a shape that the plan knows by its hub id."""
    if shape == "tiny":
        return Setting("tiny", TINY, lengths=(64, 128), compared=128, tokens_a_step=128, rank=4)
    config, _ = find_shape(shape)
    lengths = tuple(
        length * 1024 for length in (2, 8, 16, 32, 64) if length * 1024 >= config["max_position_embeddings"]
    )
    return Setting(shape, config, lengths, compared=16384, tokens_a_step=16384)


def planned(setting: Setting, recipe: Recipe) -> DeviceMemory:
    """The plan's bytes for one GPU."""
    return memory(setting.shape, recipe, setting.original)


def work(setting: Setting, recipe: Recipe) -> Flops:
    """Operations of one step."""
    training = recipe.training
    checkpointing, sequences = training.activation_checkpointing, training.global_batch_size
    return flops_of_sequences(setting.shape, recipe.tuning, recipe.context.target, checkpointing, sequences)


def random_model(setting: Setting, target: int, method: str, attention: str = "sdpa") -> PreTrainedModel:
    """A model made where it computes, stretched to `target` tokens; NF4 for `qlora`, float32 for `full`."""
    scaled = extend_config(setting.config, Interpolation("pi", setting.original, max(target, setting.original + 1)))
    config = AutoConfig.for_model(**scaled)
    dtype = torch.float32 if method == "full" else torch.bfloat16
    with torch.device(device()):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    if method != "qlora":
        return model
    with quiet_loading():
        return type(model).from_pretrained(
            None,
            config=config,
            state_dict=model.state_dict(),
            dtype=dtype,
            attn_implementation=attention,
            **quantization(dtype),
        )
