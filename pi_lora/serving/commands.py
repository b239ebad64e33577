"""The commands that serve an extended model, and the size of the KV cache, from the config alone."""

import shlex
from os import PathLike
from pathlib import Path

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from pi_lora.models.device import dtype_named
from pi_lora.models.files import BITSANDBYTES, quantization_of
from pi_lora.models.shape import attention_widths
from pi_lora.scaling.rope import Rope

# The types of rope in which vLLM 0.32 reads the sections for time, height and width.
VLLM_MROPE_TYPES = ("default", "yarn")
# Models whose lists of divisors llama.cpp reads from a file of `pi-lora export gguf`.
DIVISORS_IN_LLAMA_CPP = (
    "apertus",
    "arcee",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "llama",
    "ministral3",
    "mistral",
    "phi3",
    "phi4_multimodal",
)


def serving_lines(config: PreTrainedConfig, folder: Path = Path()) -> list[str]:
    """Return the commands that serve the model in `folder` with its whole window, and that check the servers.

    They are for vLLM, and for llama.cpp with a GGUF file. The last line is the size of the KV cache of one sequence.
    The folder is by default the current one.
    """
    language = config.get_text_config()
    rope = Rope(language.to_dict())
    window = rope.window
    dtype = str(config.dtype or "float32").removeprefix("torch.")
    name = shlex.quote(str(folder))
    gguf_file = Path(f"{folder.name or 'model'}.gguf")
    cache_megabytes = cache_bytes(language, window, dtype_named(dtype).itemsize) / 1e6
    vllm = [
        f"vllm serve {name} --max-model-len {window} --dtype {dtype}",
        f"pi-lora check-server http://localhost:8000 {name}",
    ]
    if "mrope_section" in rope.parameters and rope.rope_type not in VLLM_MROPE_TYPES:
        vllm = [f"# vLLM 0.32 stops at MRoPE with {rope.rope_type} scaling; it serves yarn and theta"]
    has_latent_attention = getattr(language, "kv_lora_rank", None) and language.model_type != "minicpm3"
    if rope.rope_type == "longrope" and has_latent_attention:
        vllm = ["# vLLM 0.32 drops the divisors of models with latent attention; it serves yarn"]
    llama_cpp = []
    if _can_be_exported(config):
        if language is not config:
            llama_cpp.append("# the GGUF file has no towers; llama.cpp's own converter writes them with --mmproj")
        llama_cpp += [
            f"pi-lora export gguf {name} --output {shlex.quote(str(gguf_file))} --converter path/to/llama.cpp",
            *llama_cpp_lines(gguf_file, window, str(folder)),
        ]
    return [
        *vllm,
        *llama_cpp,
        f"# a sequence of {window:,} tokens takes {cache_megabytes:,.0f} MB of KV cache in {dtype}",
    ]


def _can_be_exported(config: PreTrainedConfig) -> bool:
    """Whether llama.cpp's converter reads the weights of a model and keeps the scaling.

    It dequantizes FP8, keeps MXFP4 and refuses bitsandbytes.
    """
    if quantization_of(config.to_dict()) == BITSANDBYTES:
        return False
    language = config.get_text_config()
    rope = Rope(language.to_dict())
    if rope.rope_type == "proportional" and rope.factor != 1:
        return False
    needs_divisors = rope.rope_type in ("longrope", "llama3")
    return not needs_divisors or language.model_type in DIVISORS_IN_LLAMA_CPP


def llama_cpp_lines(file: Path, window: int, model: str, base: str | PathLike[str] | None = None) -> list[str]:
    """Return the commands that serve a GGUF file with llama.cpp, and that compare the server with `model`, a run if the
    place of the `base` is given.
    """
    check = f"pi-lora check-server http://localhost:8080 {shlex.quote(model)}"
    if base:
        check += f" --base {shlex.quote(str(base))}"
    return [f"llama-server --model {shlex.quote(str(file))} --ctx-size {window}", check]


def cache_bytes(config: PreTrainedConfig, tokens: int, itemsize: int) -> int:
    """Return the bytes of keys and values that a server keeps of a sequence of `tokens`, `itemsize` bytes a number.

    Sliding layers keep their window; layers without attention, and those that read the cache of another layer, keep
    nothing that grows. Multi-head latent attention (DeepSeek-AI 2024, section 2.1) keeps a latent vector and a rotary
    key of each token.
    """
    numbers = 0
    layers = DynamicCache(config=config).layers
    for layer, layer_config in zip(layers, config.per_layer_config, strict=True):
        if isinstance(layer, DynamicLayer):
            cached_tokens = min(tokens, getattr(layer, "sliding_window", tokens))
            numbers += cached_tokens * _numbers_of_token(layer_config)
    return numbers * itemsize


def _numbers_of_token(layer: PreTrainedConfig) -> int:
    """Return how many numbers a layer caches for one token."""
    latent_rank = getattr(layer, "kv_lora_rank", None)
    if latent_rank:
        return int(latent_rank + layer.qk_rope_head_dim)
    _, keys = attention_widths(layer)
    return 2 * keys
