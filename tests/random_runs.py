"""Runs with random adapters for any model, made by PEFT without training."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from pi_lora.models.adapter import without_known_warnings
from pi_lora.models.files import BUILTIN_FOLDER, save_config
from pi_lora.models.resolve import resolve_model
from pi_lora.scaling.extension import Extension

TWICE = Extension(128, 64)
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def save_base(
    config: PreTrainedConfig, folder: Path, dtype: torch.dtype = torch.float32, *, seed: int = 0, **options: Any
) -> Path:
    """A random model with the built-in one's tokenizer; `options` go to `save_pretrained`."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    model.save_pretrained(folder, **options)
    for name in TOKENIZER:
        shutil.copyfile(BUILTIN_FOLDER / "tiny" / name, folder / name)
    return folder


def put_on_hub(model: Path, name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a folder be `name` on the hub: its client finds it in the cache, where a download would have left it."""
    kept = cache / f"models--{name.replace('/', '--')}"
    shutil.copytree(model, kept / "snapshots" / ("a" * 40))
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))


def save_run(
    base: Path, folder: Path, extension: Extension = TWICE, *, with_base_layers: bool = False, **settings: Any
) -> Path:
    """A run that extends `base`, with an adapter of random numbers, as `LoraConfig(**settings)` says. With the base
    layers of embeddings and head, as PEFT saves them by itself.
    """
    found = resolve_model(str(base))
    adapted = _adapted(base, LoraConfig(task_type="CAUSAL_LM", **settings))
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.05)
    adapted.save_pretrained(folder, save_embedding_layers=with_base_layers)
    save_config(found.extended(extension).config, folder)
    for name in TOKENIZER:
        shutil.copyfile(BUILTIN_FOLDER / "tiny" / name, folder / name)
    settings_file = folder / "adapter_config.json"
    saved = json.loads(settings_file.read_text())
    settings_file.write_text(json.dumps({**saved, "base_model_name_or_path": str(base)}))
    return folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors in the weight files of a folder."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def stretched(base: Path, run: Path) -> PreTrainedModel:
    """The base under the run's config, in float32."""
    from transformers import AutoConfig

    return AutoModelForCausalLM.from_pretrained(base, config=AutoConfig.from_pretrained(run), dtype=torch.float32)


def tuned(base: Path, run: Path) -> PeftModel:
    with without_known_warnings():
        return PeftModel.from_pretrained(stretched(base, run), run).eval()


def _adapted(base: Path, config: LoraConfig) -> PeftModel:
    with without_known_warnings():
        return get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
