"""Layers with sliding windows, attention sinks and soft caps, forward and backward, by the size of blocks.

python attention.py SHAPE TOKENS
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from transformers import AutoModel, Gemma2Config, Gemma3TextConfig, GptOssConfig, PreTrainedConfig

from on_gpu.ceilings import DEVICE, ON_GPU, best_seconds
from pi_lora.models import attention
from pi_lora.models.attention import BLOCKWISE

# Layers of published models; of gpt-oss and Gemma 2 fewer of them, and few experts.
GEMMA_3 = partial(
    Gemma3TextConfig,
    hidden_size=640,
    intermediate_size=2048,
    num_hidden_layers=18,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=256,
    sliding_window=512,
)
GPT_OSS = partial(
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
)
GEMMA_2 = partial(
    Gemma2Config,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    sliding_window=4096,
)
SHAPES: dict[str, Callable[..., PreTrainedConfig]] = {
    "gemma3_270m": GEMMA_3,
    "gpt_oss_20b": GPT_OSS,
    "gemma2_2b": GEMMA_2,
}
SIZES = (256, 1024, 4096)
ROUNDS = 3


def kernels(shape: str, tokens: int) -> dict[str, Any]:
    """Seconds and peak memory in blocks of several sizes, and of `sdpa` where it can."""
    changes = {} if ON_GPU else {"num_hidden_layers": 2, "hidden_size": 64}
    config = SHAPES[shape](**changes, vocab_size=1024)
    config.max_position_embeddings = tokens
    model = AutoModel.from_config(config, dtype=torch.bfloat16).to(DEVICE)
    ids = torch.randint(1024, (1, tokens), device=DEVICE)
    rows = {}
    model.set_attn_implementation(BLOCKWISE)
    for size in SIZES:
        attention.BLOCK_ON_GPU = size
        rows[f"{BLOCKWISE} {size}"] = cost(model, ids)
    if shape == "gemma3_270m":
        model.set_attn_implementation("sdpa")
        rows["sdpa"] = cost(model, ids)
    return rows


def cost(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Seconds of a forward pass, of both ways, the peak, and the norm of the output."""
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()

    def forward() -> torch.Tensor:
        with torch.no_grad():
            states: torch.Tensor = model(ids, use_cache=False).last_hidden_state
        return states

    def both_ways() -> None:
        model(ids, use_cache=False).last_hidden_state.sum().backward()
        model.zero_grad(set_to_none=True)

    row: dict[str, Any] = {
        "forward": best_seconds(forward, ROUNDS),
        "both_ways": best_seconds(both_ways, ROUNDS),
        "norm": forward().float().norm().item(),
    }
    if ON_GPU:
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    return row


if __name__ == "__main__":
    shape, tokens = sys.argv[1:]
    print(json.dumps({"kernels": kernels(shape, int(tokens))}))
