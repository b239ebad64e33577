"""Small models of many families, built without weights, and their plans."""

from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from pi_lora.models.quiet import quiet_loading
from pi_lora.models.resolve import resolve_for_training
from pi_lora.models.shape import Shape, shape_of
from pi_lora.planning.gpus import CPU, find_gpu
from pi_lora.planning.training_plan import TrainingPlan, plan_training
from pi_lora.recipe.schema import Recipe

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
GROUPED = {"num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**GROUPED, "attention_bias": True, "mlp_bias": True},
    "mistral": {**GROUPED, "head_dim": 24},
    "qwen3": {**GROUPED, "head_dim": 24},
    "gemma2": {**GROUPED, "head_dim": 24},
    "phi3": GROUPED,
    "gpt_neox": {},
}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
# Families that the plan was not made for.
OTHERS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **EXPERTS,
        **LATENT,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
    },
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 112},
    "glm4": {**GROUPED, "head_dim": 16},
    "mixtral": {**GROUPED, "num_local_experts": 4},
    "nemotron": GROUPED,
    "olmo": GROUPED,
    "phi": {},
    "qwen3_moe": {**EXPERTS, "head_dim": 16, "num_experts": 4},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 40},
    "starcoder2": GROUPED,
}


def small_config(kind: str, **changes: Any) -> PreTrainedConfig:
    with quiet_loading():
        return AutoConfig.for_model(kind, **{**SMALL, **{**FAMILIES, **OTHERS}[kind], **changes})


def on_meta(config: PreTrainedConfig) -> Any:
    with torch.device("meta"), quiet_loading():
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@cache
def small_shape(kind: str) -> Shape:
    return shape_of(on_meta(small_config(kind)))


def plan_of(recipe: Recipe, gpu: str | None = None) -> TrainingPlan:
    device = find_gpu(gpu or recipe.hardware.gpu or CPU)
    return plan_training(recipe, resolve_for_training(recipe, shipped=True), device)
