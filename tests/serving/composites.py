"""Checkpoints to be served: language models beside small random towers, and mixtures of experts, tuned and merged.

`python tests/serving/composites.py FOLDER` writes those of the tables in benchmarks/results/engines.md. Real weights
are those that `scripts/fetch_model.py` puts into `models/`; their windows are declared as 1,024 tokens.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
)

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

import pi_lora  # noqa: E402
from architectures import small_composite, small_config  # noqa: E402
from pi_lora.models.files import save_config  # noqa: E402
from pi_lora.models.resolve import resolve_model  # noqa: E402
from pi_lora.scaling.config import full_attention_rope, with_full_rope  # noqa: E402
from pi_lora.scaling.scalings import Method  # noqa: E402
from random_runs import save_base, stored  # noqa: E402
from small_composites import save_composite  # noqa: E402

# The composite around the language model of a folder.
REAL = {"gemma3": "gemma3_270m", "mistral3": "smollm2_135m_instruct"}
WINDOW = 1024
# Sizes that vLLM 0.32 computes on a processor.
SERVED_SIZES = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
SERVED_SIZES |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
RANDOM = ("qwen3_vl", "qwen3_5")
# Random mixtures of experts, and how they are extended.
MIXTURES: dict[str, Method] = {"qwen3_moe": "yarn", "olmoe": "pi", "gpt_oss": "yarn"}
MIXTURE_SIZES = SERVED_SIZES | {"intermediate_size": 128, "moe_intermediate_size": 128, "vocab_size": 1024}
# No scaling. vLLM's gpt-oss takes no rope but `yarn`, with these keys.
YARN_BY_1 = {"rope_type": "yarn", "factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}
NUM_EXPERTS = 4


def save_around(composite: str, language: Path, folder: Path) -> None:
    """Write a composite whose language model has the weights and the tokenizer of a folder, in bfloat16."""
    model = AutoModelForCausalLM.from_pretrained(language, dtype=torch.bfloat16)
    config: Any = small_composite(composite)
    own = AutoConfig.from_pretrained(language)
    sizes = own.to_dict()
    for name in config.text_config.to_dict().keys() & sizes.keys() - {"model_type", "architectures", "sliding_window"}:
        setattr(config.text_config, name, sizes[name])
    config.text_config.sliding_window = sizes.get("sliding_window")
    config.text_config.head_dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
    config.text_config.max_position_embeddings = WINDOW
    config.tie_word_embeddings = own.tie_word_embeddings
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config).to(torch.bfloat16)
    whole.model.language_model.load_state_dict(model.model.state_dict())
    whole.tie_weights()
    whole.save_pretrained(folder)
    copy_tokenizer(language, folder)


def copy_tokenizer(language: Path, folder: Path) -> None:
    for file in language.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copyfile(file, folder / file.name)


def served_config(model_type: str) -> PreTrainedConfig:
    """The config of a small composite in sizes that vLLM serves."""
    config: Any = small_composite(model_type)
    text = config.text_config
    for name in SERVED_SIZES.keys() & text.to_dict().keys():
        setattr(text, name, SERVED_SIZES[name])
    if "mrope_section" in text.rope_parameters:
        text.rope_parameters["mrope_section"] = [12, 10, 10]
    config.vision_config.out_hidden_size = text.hidden_size
    kept: PreTrainedConfig = config
    return kept


def save_mixture_around(language: Path, folder: Path) -> None:
    """Write a Mixtral whose experts are the MLPs of a LLaMA, each with noise of its own, in bfloat16."""
    model = AutoModelForCausalLM.from_pretrained(language, dtype=torch.bfloat16)
    sizes = {name: size for name, size in model.config.to_dict().items() if name not in ("model_type", "architectures")}
    sizes["max_position_embeddings"] = WINDOW
    torch.manual_seed(0)
    config = MixtralConfig(**sizes, num_local_experts=NUM_EXPERTS)
    mixture = MixtralForCausalLM(config).to(torch.bfloat16)
    mixture.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        for layer, dense in zip(mixture.model.layers, model.model.layers, strict=True):
            experts: Any = layer.mlp.experts
            joined = torch.cat([dense.mlp.gate_proj.weight, dense.mlp.up_proj.weight])
            for stack, weight in ((experts.gate_up_proj, joined), (experts.down_proj, dense.mlp.down_proj.weight)):
                stack.copy_(weight + torch.randn_like(stack) * weight.std() * 0.1)
    mixture.tie_weights()
    mixture.save_pretrained(folder)
    copy_tokenizer(language, folder)


def save_mixture(model_type: str, folder: Path) -> None:
    """Write a small random mixture of experts in sizes that vLLM serves; its first choices are no ties."""
    config: Any = small_config(model_type)
    for name in MIXTURE_SIZES.keys() & config.to_dict().keys():
        setattr(config, name, MIXTURE_SIZES[name])
    if model_type == "gpt_oss":
        config.rope_parameters = {**config.rope_parameters, "factor": 4.0, "original_max_position_embeddings": 16}
    save_base(config, folder)
    weights = stored(folder)
    weights["lm_head.weight"] *= 10
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def tune_and_merge(base: Path, target: int, scaling: Method) -> None:
    """Write beside the base a run of two steps, the merged folder, and the same without the scaling in its config."""
    recipe = {
        "model": {"name": str(base)},
        "context": {"target": target},
        "scaling": scaling,
        "tuning": {"rank": 4, "modules_to_save": "nothing"},
        "data": {"source": [{"name": "builtin:recall"}]},
        "training": {"steps": 2, "global_batch_size": 1, "warmup_steps": 1, "learning_rate": 0.001},
    }
    file = base.with_suffix(".yaml")
    file.write_text(json.dumps(recipe))
    run = pi_lora.train(file, output=base.with_name(f"{base.name}_run"))
    merged = Path(pi_lora.merge(run, output=base.with_name(f"{base.name}_merged"), check="logits"))
    folder = shutil.copytree(merged, base.with_name(f"{base.name}_unscaled"))
    config = resolve_model(str(merged)).config
    theta = full_attention_rope(config)["rope_theta"]
    rope = {**YARN_BY_1, "original_max_position_embeddings": target, "rope_theta": theta}
    save_config({**with_full_rope(config, rope), "max_position_embeddings": target}, folder)


def main(folder: Path) -> None:
    """Write all checkpoints."""
    for composite, language in REAL.items():
        save_around(composite, Path("models", language), folder / composite)
    for model_type in RANDOM:
        save_composite(model_type, folder / model_type, served_config(model_type))
    save_mixture_around(Path("models", REAL["mistral3"]), folder / "mixtral")
    tune_and_merge(folder / "mixtral", 2 * WINDOW, "yarn")
    for model_type, scaling in MIXTURES.items():
        save_mixture(model_type, folder / model_type)
        tune_and_merge(folder / model_type, 512, scaling)
    for checkpoint in sorted(folder.glob("*/")):
        print(checkpoint, json.loads((checkpoint / "config.json").read_text())["architectures"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
