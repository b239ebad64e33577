"""The jobs of benchmarks/gpu.py: a product of matrices, layers by attention kernel, and steps of a trainer."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    PreTrainedConfig,
)

import pi_lora
from contenders import ON_GPU, now, timed, train_with_pi_lora, train_with_trl
from pi_lora.models import attention
from pi_lora.models.attention import BLOCKWISE
from pi_lora.models.device import device
from pi_lora.models.resolve import resolve_model
from pi_lora.recipe.files import load_recipe
from pi_lora.recipe.schema import Recipe
from record import add_tokenizer

Row = dict[str, Any]

DEVICE = device()
MODEL = "huggyllama/llama-7b"
TINY = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
# The target as a multiple of the window.
SCALE = 8
# More steps than are timed: the trainer is stopped.
RECIPE = """# Random weights.
model: {{name: {base}}}
context: {{original: {original}, target: {target}}}
tuning: {{method: lora, rank: 16}}
data: {{source: "builtin:stdlib"}}
training: {{steps: 8, warmup_steps: 1, log_every: 1, save_every: 1000000, global_batch_size: 1}}
"""
# Layers of published models; of gpt-oss and Gemma 2 fewer of them, and few experts.
SHAPES: Mapping[str, Callable[..., PreTrainedConfig]] = {
    "gemma3_270m": partial(
        Gemma3TextConfig,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
    ),
    "gpt_oss_20b": partial(
        GptOssConfig,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=4,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        sliding_window=128,
        num_local_experts=4,
        num_experts_per_tok=1,
    ),
    "gemma2_2b": partial(
        Gemma2Config,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        sliding_window=4096,
    ),
}
# Queries of a block.
SIZES = (256, 1024, 4096)
METHODS = ("lora", "qlora", "full")
PI_LORA = "pi-lora"
PLAIN = "TRL + PEFT"
# Keys of the recipe, each measured beside no change.
LEVERS = (
    "training.mlp_chunk_tokens=4096",
    "training.activation_checkpointing=false",
    "training.activation_checkpointing=selective",
)
# The rows of each part, and the changes of the recipe.
JOBS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "ceilings": {"product": ()},
    "attention": dict.fromkeys(SHAPES, ()),
    "training": {method: (f"tuning.method={method}",) for method in METHODS},
    "neighbours": dict.fromkeys((PI_LORA, PLAIN), ("tuning.modules_to_save=nothing",)),
    "levers": {"none": (), **{lever: (lever,) for lever in LEVERS}},
}
# Timed steps, of which the first warms up.
STEPS = 3


def write_recipe(folder: Path, tiny: bool) -> Path:
    """Write a base model with random bfloat16 weights, and the recipe that the jobs change."""
    sizes = TINY if tiny else resolve_model(MODEL, shipped=True).config
    config = AutoConfig.for_model(**sizes)
    original = config.max_position_embeddings
    base = folder / "base"
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(base)
    add_tokenizer(base)
    file = folder / "recipe.yaml"
    file.write_text(RECIPE.format(base=base, original=original, target=SCALE * original), encoding="utf-8")
    return file


def row_of(part: str, name: str, file: Path) -> Row:
    """Do a job."""
    if part == "ceilings":
        return product()
    recipe = load_recipe(file, JOBS[part][name]).recipe
    if part == "attention":
        return kernels(name, recipe.context.target)
    return training(recipe, PLAIN if name == PLAIN else PI_LORA)


def product() -> Row:
    """Operations a second of a product of two bfloat16 matrices."""
    side = 8192 if ON_GPU else 256
    left, right = torch.randn(2, side, side, device=DEVICE, dtype=torch.bfloat16)
    return {"product_side": side, "product": 2 * side**3 / best_seconds(lambda: left @ right, rounds=20)}


def best_seconds(work: Callable[[], object], rounds: int = 3) -> float:
    """Of one call, the best of `rounds`, after one that warms up."""
    seconds = []
    for _ in range(rounds + 1):
        started = now()
        work()
        seconds.append(now() - started)
    return min(seconds[1:])


def kernels(shape: str, tokens: int) -> Row:
    """Seconds and peak memory of layers, in blocks of several sizes, and of `sdpa` where it can."""
    changes = {} if ON_GPU else {"num_hidden_layers": 2, "hidden_size": 64}
    config = SHAPES[shape](**changes, vocab_size=1024)
    config.max_position_embeddings = tokens
    model = AutoModel.from_config(config, dtype=torch.bfloat16).to(DEVICE)
    ids = torch.randint(1024, (1, tokens), device=DEVICE)
    costs = {}
    model.set_attn_implementation(BLOCKWISE)
    for size in SIZES:
        attention.BLOCK_ON_GPU = size
        costs[f"{BLOCKWISE} {size}"] = cost(model, ids)
    if shape == "gemma3_270m":
        model.set_attn_implementation("sdpa")
        costs["sdpa"] = cost(model, ids)
    return {"tokens": tokens, "kernels": costs}


def cost(model: Any, ids: torch.Tensor) -> Row:
    """Seconds of a forward pass and of both ways, and the peak."""

    def forward() -> None:
        with torch.no_grad():
            model(ids, use_cache=False)

    def both_ways() -> None:
        model(ids, use_cache=False).last_hidden_state.sum().backward()
        model.zero_grad(set_to_none=True)

    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    return {"forward": best_seconds(forward), "both_ways": best_seconds(both_ways), **peak()}


def peak() -> Row:
    """The most that the allocator gave out; nothing on a CPU."""
    return {"peak_bytes": torch.cuda.max_memory_allocated()} if ON_GPU else {}


def training(recipe: Recipe, contender: str) -> Row:
    """Some steps of one contender, beside the plan."""
    card = "cpu"
    if ON_GPU:
        card = f"{int(torch.cuda.get_device_properties(0).total_memory / 1e9)}GB"
    plan = pi_lora.plan(recipe, gpu=card)
    row: Row = {
        "tokens": recipe.context.target,
        "flops": {kind: operations / recipe.training.steps for kind, operations in plan.flops._asdict().items()},
    }
    if contender == PI_LORA:  # the plan is of its trainer, as it comes
        row["planned_bytes"] = plan.memory.highest
    train = {PI_LORA: train_with_pi_lora, PLAIN: train_with_trl}[contender]
    try:
        row["step_seconds"] = timed(train, recipe, STEPS).seconds
        row |= peak()
    except torch.OutOfMemoryError:
        row["out_of_memory"] = True
    return row
