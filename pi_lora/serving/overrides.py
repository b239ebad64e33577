"""The lines with which an engine serves a base as it is under a longer window, without a folder of its own."""

import json
import shlex
from pathlib import Path

from pi_lora.errors import ModelError
from pi_lora.models.composite import auto_class_of
from pi_lora.models.files import read_adapter_settings
from pi_lora.models.source import ModelSource
from pi_lora.scaling.config import COMPOSITE, TEXT_CONFIG
from pi_lora.scaling.rope import ORIGINAL_WINDOW
from pi_lora.serving.commands import first_problem, unsupported
from pi_lora.types import Engine

# The lines of each engine. llama.cpp takes the entries that its converter writes, so that layers with sliding windows
# follow as in a converted file: `--rope-scale` leaves them out, and `llama-server` stops at `context_length`.
LINES: dict[Engine, str] = {
    "vllm": "vllm serve {base} --hf-overrides {override} --max-model-len {window} --dtype {dtype}",
    "sglang": (
        "python -m sglang.launch_server --model-path {base} --json-model-override-args {override} "
        "--context-length {window}"
    ),
    "llama.cpp": (
        "llama-server --model MODEL.gguf --ctx-size {window} --override-kv {gguf}.context_length=int:{window},"
        "{gguf}.rope.freq_base=float:{theta},{gguf}.rope.scaling.type=str:{kind},"
        "{gguf}.rope.scaling.factor=float:{factor},{gguf}.rope.scaling.original_context_length=int:{original}"
    ),
    "mlx": "from mlx_lm import load\nmodel, tokenizer = load({base}, model_config={entries})",
    "transformers": (
        "from transformers import AutoConfig, {auto_class}\n"
        "config = AutoConfig.from_pretrained({base})\n"
        "config.get_text_config().update({entries_of_5})\n"
        "# transformers 4: config.get_text_config().update({entries})\n"
        "model = {auto_class}.from_pretrained({base}, config=config)"
    ),
}
# What serves an adapter too.
ADAPTER_LINES: dict[Engine, str] = {
    "vllm": " --enable-lora --max-lora-rank {rank} --lora-modules {name}={run}",
    "sglang": " --enable-lora --lora-paths {name}={run}",
    "transformers": "\nfrom peft import PeftModel\nmodel = PeftModel.from_pretrained(model, {run})",
}
# Entries of an override in any case: the stored ones may differ from those that transformers reads.
ALWAYS = ("max_position_embeddings", "rope_parameters", "rope_scaling")
# Entries that transformers 5 does not need; `rope_scaling` would replace all of its `rope_parameters`.
ENTRIES_OF_4 = (
    "partial_rotary_factor",
    "rope_local_base_freq",
    "rope_scaling",
    "rope_theta",
    "rotary_emb_base",
    "rotary_pct",
)
# The names of architectures in GGUF files, by model type; of a composite by that of the whole.
GGUF_NAMES = {
    "cohere": "command-r",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "granite": "granite",
    "llama": "llama",
    "mistral": "llama",
    "mistral3": "mistral3",
    "mixtral": "llama",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2_5_vl": "qwen2vl",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "qwen3_vl": "qwen3vl",
    "smollm3": "smollm3",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}


def override_lines(model: ModelSource, engine: Engine) -> list[str]:
    """Return the command, or for mlx and transformers the lines of Python, with which an engine serves the base of a
    model under the config of the model, and with its adapter. Raise ModelError if the engine cannot, with another way.
    """
    config = model.config
    rope = model.rope
    lines = LINES[engine]
    way = "pi-lora extend --output"
    rank = 0
    saved = None
    if model.adapter:
        settings = read_adapter_settings(model.adapter)
        saved = (settings.model_extra or {}).get("modules_to_save")
        # vLLM takes powers of two.
        rank = max(8, 1 << (settings.r - 1).bit_length())
        lines += ADAPTER_LINES.get(engine, "")
        way = "pi-lora merge"
    gguf_name = GGUF_NAMES.get(config.get(COMPOSITE, config)["model_type"])
    if problem := unsupported(engine, rope):
        raise ModelError(f"{model.name}: {problem}")
    problem = first_problem(
        engine,
        ("mlx", COMPOSITE in config, "replaces the whole text_config"),
        ("mlx llama.cpp", model.adapter, "reads adapters in a format of its own"),
        ("vllm sglang", saved, "takes no modules_to_save"),
        ("llama.cpp", not gguf_name, "has a name for this type of models that is not known here"),
    )
    if problem:
        raise ModelError(f"{model.name}: {problem}; write a folder with {way}")
    before = model.base.config
    entries = {}
    for key in sorted({*config, *before} - {COMPOSITE, ORIGINAL_WINDOW}):
        if key in ALWAYS or config.get(key) != before.get(key):
            entries[key] = config.get(key)
    of_5 = {key: entry for key, entry in entries.items() if key not in ENTRIES_OF_4}
    quote = repr if engine in ("mlx", "transformers") else shlex.quote
    filled = lines.format(
        auto_class=auto_class_of(config),
        base=quote(model.base.name if model.base.commit else str(model.base.path)),
        dtype=config.get("dtype", "float32"),
        entries=entries,
        entries_of_5=of_5,
        factor=rope.factor,
        gguf=gguf_name,
        kind="yarn" if rope.rope_type == "yarn" else "linear",
        name=quote(Path(model.name).name),
        original=rope.parameters.get("original_max_position_embeddings", model.original),
        override=quote(json.dumps({TEXT_CONFIG: of_5} if COMPOSITE in config else of_5)),
        rank=rank,
        run=quote(model.name),
        theta=rope.parameters["rope_theta"],
        window=model.window,
    )
    return filled.split("\n")
