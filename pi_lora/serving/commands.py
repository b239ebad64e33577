"""What to type to serve an extended model, and the KV cache that it takes, from its config alone."""

import shlex
from pathlib import Path

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from pi_lora.models.machine import dtype_named
from pi_lora.scaling.config import window_of


def serving_lines(config: PreTrainedConfig, folder: Path = Path()) -> list[str]:
    """Return the commands that serve a model with its whole window in vLLM, and as a GGUF file in llama.cpp, the KV
    cache of one sequence, and the commands that check the servers. The model is in `folder`, by default the current
    one.
    """
    window, dtype = window_of(config.to_dict()), str(config.dtype or "float32").removeprefix("torch.")
    name, file = shlex.quote(str(folder)), Path(f"{folder.name or 'model'}.gguf")
    size = cache_bytes(config, window, dtype_named(dtype).itemsize)
    return [
        f"vllm serve {name} --max-model-len {window} --dtype {dtype}",
        f"pi-lora check-server http://localhost:8000 {name}",
        f"pi-lora export gguf {name} --output {shlex.quote(str(file))}",
        *llama_cpp_lines(file, window, str(folder)),
        f"# a sequence of {window:,} tokens takes {size / 1e6:,.0f} MB of KV cache in {dtype}",
    ]


def llama_cpp_lines(file: Path, window: int, model: str) -> list[str]:
    """Return the commands that serve a GGUF file with llama.cpp, and that compare the server with `model`."""
    return [
        f"llama-server --model {shlex.quote(str(file))} --ctx-size {window}",
        f"pi-lora check-server http://localhost:8080 {shlex.quote(model)}",
    ]


def cache_bytes(config: PreTrainedConfig, tokens: int, itemsize: int) -> int:
    """Return the bytes of keys and values that a server keeps of a sequence of `tokens`, `itemsize` bytes a number.

    Sliding layers keep their window; layers without attention, and those that read the cache of another layer, keep
    nothing that grows. Multi-head latent attention (DeepSeek-AI 2024, section 2.1) keeps a latent vector and a rotary
    key of each token.
    """
    numbers = 0
    for layer, own in zip(DynamicCache(config=config).layers, config.per_layer_config, strict=True):
        if isinstance(layer, DynamicLayer):
            numbers += _numbers_of_token(own) * min(tokens, getattr(layer, "sliding_window", tokens))
    return numbers * itemsize


def _numbers_of_token(layer: PreTrainedConfig) -> int:
    if rank := getattr(layer, "kv_lora_rank", None):
        return int(rank + layer.qk_rope_head_dim)
    heads = layer.num_attention_heads
    width = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return 2 * int((getattr(layer, "num_key_value_heads", None) or heads) * width)
