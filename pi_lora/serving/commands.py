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
from pi_lora.types import Engine

# The types of rope in which vLLM and SGLang read the sections for time, height and width.
MROPE_TYPES = ("default", "yarn")
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
# Models whose classes in mlx-lm 0.32.2 read a scaling; the other classes read theta alone.
SCALED_IN_MLX = (
    "apertus",
    "deepseek_v3",
    "gemma3_text",
    "gemma4_text",
    "granite",
    "granitemoe",
    "llama",
    "minicpm",
    "ministral3",
    "mistral",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_next",
    "seed_oss",
    "smollm3",
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
    problem = unsupported("vllm", rope)
    lines = [f"# {problem}"]
    if not problem:
        lines = [
            f"vllm serve {name} --max-model-len {window} --dtype {dtype}",
            f"pi-lora check-server http://localhost:8000 {name}",
        ]
    # The converter dequantizes FP8, keeps MXFP4 and refuses bitsandbytes.
    if quantization_of(config.to_dict()) != BITSANDBYTES and _is_kept_in_gguf(rope):
        if language is not config:
            lines.append("# the GGUF file has no towers; llama.cpp's own converter writes them with --mmproj")
        lines += [
            f"pi-lora export gguf {name} --output {shlex.quote(str(gguf_file))} --converter path/to/llama.cpp",
            *llama_cpp_lines(gguf_file, window, str(folder)),
        ]
    return [*lines, f"# a sequence of {window:,} tokens takes {cache_megabytes:,.0f} MB of KV cache in {dtype}"]


def unsupported(engine: Engine, rope: Rope) -> str | None:
    """Return what an engine does not compute of a rope, and what to do instead; None if it computes all. llama.cpp is
    asked for an override of the metadata; a file of `pi-lora export gguf` holds more.

    Read in vLLM 0.32, SGLang 0.5.23, llama.cpp of llama-cpp-python 0.3.36 and mlx-lm 0.32.2.
    """
    kind = rope.rope_type
    model_type = rope.config.get("model_type")
    has_mrope = "mrope_section" in rope.parameters
    is_latent = rope.config.get("kv_lora_rank") and model_type != "minicpm3"
    stated = rope.parameters.get("attention_factor")
    has_factor = stated is not None and (kind == "yarn" or stated != 1)
    is_ignored_by_mlx = kind != "default" and model_type not in SCALED_IN_MLX
    needs_tensor = kind not in ("default", "linear", "yarn") and not rope.constant_divisor
    way = "pi-lora extend --output FOLDER, then pi-lora export gguf" if _is_kept_in_gguf(rope) else "use vllm"
    return first_problem(
        engine,
        ("vllm sglang mlx llama.cpp", kind == "dynamic", "does not scale each input by its length; use yarn"),
        (
            "vllm sglang llama.cpp",
            kind == "proportional" and rope.factor != 1,
            "drops the factor of this rope; use theta",
        ),
        (
            "vllm sglang",
            has_mrope and kind not in MROPE_TYPES,
            "stops at this scaling with MRoPE; use yarn or theta",
        ),
        ("vllm sglang", is_latent and kind == "longrope", "drops divisors of latent attention; use yarn"),
        ("sglang mlx", has_factor, "drops the attention factor; use vllm"),
        ("mlx", is_ignored_by_mlx, "ignores the scalings of this type of models; use theta"),
        ("llama.cpp", needs_tensor or has_factor, f"has no option for this scaling; {way}"),
    )


def first_problem(engine: Engine, *problems: tuple[str, object, str]) -> str | None:
    """Return the first problem of an engine; a problem has engines, whether it is there, and what to do about it."""
    for engines, is_there, what in problems:
        if is_there and engine in engines.split():
            return f"{engine} {what}"
    return None


def _is_kept_in_gguf(rope: Rope) -> bool:
    """Whether a file of `pi-lora export gguf` has the scaling, and llama.cpp computes it."""
    if rope.rope_type == "dynamic" or (rope.rope_type == "proportional" and rope.factor != 1):
        return False
    needs_divisors = rope.kind.in_gguf == "divisors"
    return not needs_divisors or rope.config.get("model_type") in DIVISORS_IN_LLAMA_CPP


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
