"""Vision-language checkpoints to be served: real language models, or random ones, beside small random towers.

`python tests/serving/composites.py FOLDER` writes those of the table in docs/engines.md. Real weights are those that
`python scripts/fetch_model.py` puts into `models/`; their windows are declared as 1,024 tokens.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE.parent / "models")]

from architectures import small_composite  # noqa: E402
from test_composite import save_composite  # noqa: E402

# The composite around the language model of a folder.
REAL = {"gemma3": "gemma3_270m", "mistral3": "smollm2_135m_instruct"}
WINDOW = 1024
# Sizes that vLLM 0.32 computes on a processor.
SERVED_SIZES = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
SERVED_SIZES |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
RANDOM = ("qwen3_vl", "qwen3_5")


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


def main(folder: Path) -> None:
    """Write all checkpoints."""
    for composite, language in REAL.items():
        save_around(composite, Path("models", language), folder / composite)
    for model_type in RANDOM:
        save_composite(model_type, folder / model_type, served_config(model_type))
    for checkpoint in sorted(folder.iterdir()):
        print(checkpoint, json.loads((checkpoint / "config.json").read_text())["architectures"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
