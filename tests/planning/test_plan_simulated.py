"""Plans of small models beside a training step on fake tensors: benchmarks/simulate.py."""

import sys
from pathlib import Path
from typing import Any

import pytest
from families import on_meta
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from pi_lora.models.shape import shape_of
from pi_lora.planning.flops import flops_of_training
from pi_lora.planning.gpus import CPU, GPUS
from pi_lora.planning.memory import memory
from pi_lora.recipe.schema import Recipe
from simulate import simulate

# A step takes time for each operation, whatever its size: few layers, which are wide enough to need more than the loss.
WIDTHS: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
}
# The loss in place takes the fewer tokens at a time the more the vocabulary has.
WIDTHS_ON_CPU: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
# One layer has the gated delta rule.
DELTA = {
    "head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
SLIDING, FULL = "sliding_attention", "full_attention"
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 64},
    "gemma3_text": {
        "head_dim": 64,
        "sliding_window": 1024,
        "num_hidden_layers": 4,
        "layer_types": [SLIDING] * 3 + [FULL],
    },
    "mistral": {"sliding_window": 1024},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 1024},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {
        **DELTA,
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "intermediate_size": 2048,
        "head_dim": 64,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    },
}
ORIGINAL = 512
# Enough for a layer's peak beyond that of the loss, also in chunks.
TOKENS = 8192
TOKENS_ON_CPU = 2048


def recipe_of(method: str, tokens: int, training: dict[str, Any], hardware: dict[str, Any]) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"name": "any"},
            "context": {"target": tokens},
            "tuning": {"method": method},
            "data": {"source": "text"},
            "training": {"steps": 1, "warmup_steps": 0, "global_batch_size": 1, **training},
            "hardware": hardware,
        }
    )


def ratios(kind: str, device: str, method: str, tokens: int, **training: Any) -> tuple[float, float]:
    """Planned bytes and operations as shares of the simulated ones."""
    in_place = device == CPU
    widths = {**WIDTHS, **WIDTHS_ON_CPU} if in_place else WIDTHS
    config = AutoConfig.for_model(kind, **{**widths, **KINDS[kind]})
    shape = shape_of(on_meta(config))
    recipe = recipe_of(method, tokens, training, hardware={})
    gpu = GPUS[device]
    simulated = simulate(recipe, config, ORIGINAL, gpu)
    # Otherwise the loss would hide what a layer takes.
    assert bool(simulated.parts.get("temporary")) == bool(recipe.training.activation_checkpointing)
    flops = flops_of_training(shape, recipe.tuning, recipe.training, tokens, loss_in_place=in_place)
    sequences = recipe.training.global_batch_size / recipe.training.per_device_batch_size
    planned = memory(shape, recipe, ORIGINAL, gpu).highest
    return planned / simulated.peak, sum(flops) / sequences / simulated.flops


@pytest.mark.parametrize(
    ("kind", "method", "training"),
    [
        ("llama", "qlora", {}),
        ("llama", "full", {"global_batch_size": 4}),
        ("llama", "lora", {"activation_checkpointing": "selective"}),
        ("llama", "full", {"mlp_chunk_tokens": 1024}),
        ("llama", "qlora", {"mlp_chunk_tokens": 2048}),
        ("qwen3", "lora", {"mlp_chunk_tokens": 4096}),
        ("llama", "full", {"mlp_chunk_tokens": 4096}),
        ("qwen3", "lora", {"optimizer": "paged_adamw_8bit"}),
        ("gemma3_text", "lora", {"global_batch_size": 4}),
        ("mistral", "full", {}),
        ("qwen3_5_text", "lora", {}),
        ("qwen3_5_text", "lora", {"activation_checkpointing": "selective"}),
        ("qwen3_5_text", "qlora", {"mlp_chunk_tokens": 2048}),
        ("qwen3_5_text", "full", {}),
        ("mixtral", "lora", {}),
        ("gpt_oss", "lora", {}),
        ("qwen3_5_moe_text", "lora", {}),
    ],
    ids=str,
)
def test_planned_steps_are_those_that_are_simulated(kind: str, method: str, training: dict[str, Any]) -> None:
    assert ratios(kind, "H100", method, TOKENS, **training) == pytest.approx((1, 1), rel=0.05)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3", "qwen3_5_text"])
def test_planned_steps_without_checkpointing_are_those_that_are_simulated(kind: str) -> None:
    found = ratios(kind, "H100", "lora", TOKENS // 2, activation_checkpointing=False)
    assert found == pytest.approx((1, 1), rel=0.05)


def test_planned_gradients_of_a_tied_head_are_those_that_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two gradients are summed into a third."""
    monkeypatch.setitem(KINDS, "llama", {"tie_word_embeddings": True})
    assert ratios("llama", "H100", "lora", TOKENS // 4) == pytest.approx((1, 1), rel=0.05)


def test_planned_logits_of_a_small_vocabulary_are_those_that_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL allocates a whole tile for any vocabulary."""
    monkeypatch.setitem(KINDS, "llama", {"vocab_size": 1024})
    found = ratios("llama", "H100", "lora", TOKENS // 2, activation_checkpointing=False)
    assert found == pytest.approx((1, 1), rel=0.05)


def test_planned_steps_that_checkpoint_some_layers_are_those_that_are_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(KINDS, "llama", {"num_hidden_layers": 3})
    assert ratios("llama", "H100", "lora", TOKENS, activation_checkpointing=2) == pytest.approx((1, 1), rel=0.05)


def test_offloaded_inputs_take_the_simulated_memory_of_the_host() -> None:
    config = AutoConfig.for_model("llama", **WIDTHS)
    hardware = {"gpus": 1, "offload_activations": True}
    recipe = recipe_of("lora", TOKENS, training={"mlp_chunk_tokens": 4096}, hardware=hardware)
    simulated = simulate(recipe, config, ORIGINAL, GPUS["H100"])
    planned = memory(shape_of(on_meta(config)), recipe, ORIGINAL, GPUS["H100"])
    assert planned.host == simulated.host
    assert planned.highest == pytest.approx(simulated.peak, rel=0.05)


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_planned_steps_on_a_cpu_are_those_that_are_simulated(kind: str, precision: str, checkpointing: bool) -> None:
    training = {"precision": precision, "activation_checkpointing": checkpointing}
    assert ratios(kind, CPU, "lora", TOKENS_ON_CPU, **training) == pytest.approx((1, 1), rel=0.05)


def test_planned_steps_of_linear_attention_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, transformers' own code keeps many copies in float32."""
    one_layer = {**DELTA, "num_hidden_layers": 1, "layer_types": ["linear_attention"]}
    monkeypatch.setitem(KINDS, "qwen3_5_text", one_layer)  # more take half a minute
    training = {"precision": "float32", "activation_checkpointing": False}
    assert ratios("qwen3_5_text", CPU, "lora", TOKENS_ON_CPU, **training) == pytest.approx((1, 1), rel=0.1)
