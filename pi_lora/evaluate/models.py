"""What is known of a model before its weights are read, and what tells it from every other."""

import importlib.metadata
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from pi_lora.data.files import fingerprint
from pi_lora.errors import ModelError
from pi_lora.model import CONFIG_FILE, extended_config, find_base
from pi_lora.rope import Config, constant_longrope, full_attention_rope, window_of
from pi_lora.run import LoadedModel, Stretch, adapter_base, is_adapter


def window_named(name: str, stretch: Stretch | None) -> int:
    """The context window in tokens of a model as `run.load` would load it.

    Raises:
        ModelError, ScalingError: what `run.load` would raise, as far as it shows before the weights are read.
    """
    if is_adapter(name):
        if stretch is not None:
            raise ModelError(f"{name}: brings its own scaling; leave out --original, --target and --scaling")
        return window_of(adapter_base(Path(name))[1])
    base = find_base(name)
    interpolation = base.interpolation(stretch.method, stretch.target, stretch.original) if stretch else None
    return window_of(extended_config(base, interpolation))


def depends_on_length(config: Config) -> bool:
    """Whether a model computes the same tokens otherwise in a longer input: its frequencies follow the length."""
    rope = full_attention_rope(config)
    return rope.get("rope_type") in ("dynamic", "longrope") and constant_longrope(rope) is None


def identity_of(loaded: LoadedModel) -> dict[str, Any]:
    """What decides the numbers that a model gives, as JSON: its files, its config, dtype, kernel and versions."""
    adapter = [Path(loaded.name)] if is_adapter(loaded.name) else []
    base = adapter_base(adapter[0])[0] if adapter else find_base(loaded.name)
    # Of a model of the hub, the folder of its commit.
    own = Path(str(cached_file(base.path, CONFIG_FILE, revision=base.revision))).parent
    files = [file for folder in (*adapter, own) for file in sorted(folder.iterdir()) if file.is_file()]
    return {
        "name": loaded.name,
        "files": fingerprint(files),
        "config": dict(loaded.config),
        "dtype": str(loaded.model.dtype),
        "kernel": loaded.model.config._attn_implementation,
        "device": loaded.model.device.type,
        "versions": [importlib.metadata.version(name) for name in ("pi-lora", "torch", "transformers")],
    }
