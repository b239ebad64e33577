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
    **WIDTHS,
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


def ratios(
    kind: str = "llama",
    method: str = "lora",
    tokens: int = TOKENS,
    device: str = "H100",
    widths: dict[str, Any] | None = None,
    **training: Any,
) -> tuple[float, float]:
    """Planned bytes and operations as shares of the simulated ones."""
    in_place = device == CPU
    sizes = {**(WIDTHS_ON_CPU if in_place else WIDTHS), **KINDS[kind], **(widths or {})}
    config = AutoConfig.for_model(kind, **sizes)
    shape = shape_of(on_meta(config))
    recipe = recipe_of(method, tokens, training, hardware={})
    gpu = GPUS[device]
    simulated = simulate(recipe, config, ORIGINAL, gpu)
    # Otherwise the loss would hide what a layer takes.
    assert simulated.peak_in_layers or not recipe.training.activation_checkpointing
    flops = flops_of_training(shape, recipe.tuning, recipe.training, tokens, loss_in_place=in_place)
    sequences = recipe.training.global_batch_size / recipe.training.per_device_batch_size
    planned = memory(shape, recipe, ORIGINAL, gpu).highest
    return planned / simulated.peak, sum(flops) / sequences / simulated.flops


NO_CHECKPOINTS: dict[str, Any] = {"tokens": TOKENS // 2, "activation_checkpointing": False}
CASES: dict[str, dict[str, Any]] = {
    "NF4": {"method": "qlora"},
    "all weights, 4 sequences": {"method": "full", "global_batch_size": 4},
    "selective": {"activation_checkpointing": "selective"},
    "some layers": {"activation_checkpointing": 2, "widths": {"num_hidden_layers": 3}},
    "all weights in 8 chunks": {"method": "full", "mlp_chunk_tokens": 1024},
    "all weights in 2 chunks": {"method": "full", "mlp_chunk_tokens": 4096},
    "NF4 in 4 chunks": {"method": "qlora", "mlp_chunk_tokens": 2048},
    "norms of heads in 2 chunks": {"kind": "qwen3", "mlp_chunk_tokens": 4096},
    "8 bits": {"kind": "qwen3", "optimizer": "paged_adamw_8bit"},
    # Two gradients are summed into a third.
    "tied": {"tokens": TOKENS // 4, "widths": {"tie_word_embeddings": True}},
    "local layers, 4 sequences": {"kind": "gemma3_text", "global_batch_size": 4},
    "windows, all weights": {"kind": "mistral", "method": "full"},
    "delta rule": {"kind": "qwen3_5_text"},
    "delta rule, selective": {"kind": "qwen3_5_text", "activation_checkpointing": "selective"},
    "delta rule, NF4 in 4 chunks": {"kind": "qwen3_5_text", "method": "qlora", "mlp_chunk_tokens": 2048},
    "delta rule, all weights": {"kind": "qwen3_5_text", "method": "full"},
    "experts": {"kind": "mixtral"},
    "clamped experts": {"kind": "gpt_oss"},
    "delta rule and experts": {"kind": "qwen3_5_moe_text"},
    "no checkpoints": NO_CHECKPOINTS,
    # TRL allocates a whole tile for any vocabulary.
    "no checkpoints, small vocabulary": {**NO_CHECKPOINTS, "widths": {"vocab_size": 1024}},
    "no checkpoints, local layers": {**NO_CHECKPOINTS, "kind": "gemma3_text"},
    "no checkpoints, norms of heads": {**NO_CHECKPOINTS, "kind": "qwen3"},
    "no checkpoints, delta rule": {**NO_CHECKPOINTS, "kind": "qwen3_5_text"},
}


@pytest.mark.parametrize("case", CASES)
def test_planned_steps_are_those_that_are_simulated(case: str) -> None:
    assert ratios(**CASES[case]) == pytest.approx((1, 1), rel=0.05)


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_planned_steps_on_a_cpu_are_those_that_are_simulated(kind: str, precision: str, checkpointing: bool) -> None:
    found = ratios(kind, "lora", TOKENS_ON_CPU, CPU, precision=precision, activation_checkpointing=checkpointing)
    assert found == pytest.approx((1, 1), rel=0.05)


def test_planned_steps_of_linear_attention_without_kernels() -> None:
    """On a CPU, transformers' own code keeps many copies in float32. More than one layer takes half a minute."""
    widths = {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}
    training = {"precision": "float32", "activation_checkpointing": False}
    found = ratios("qwen3_5_text", "lora", TOKENS_ON_CPU, CPU, widths, **training)
    assert found == pytest.approx((1, 1), rel=0.1)


def test_offloaded_inputs_take_the_simulated_memory_of_the_host() -> None:
    config = AutoConfig.for_model("llama", **WIDTHS)
    hardware = {"gpus": 1, "offload_activations": True}
    recipe = recipe_of("lora", TOKENS, training={"mlp_chunk_tokens": 4096}, hardware=hardware)
    simulated = simulate(recipe, config, ORIGINAL, GPUS["H100"])
    planned = memory(shape_of(on_meta(config)), recipe, ORIGINAL, GPUS["H100"])
    assert planned.host == simulated.host
    assert planned.highest == pytest.approx(simulated.peak, rel=0.05)
