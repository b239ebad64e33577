"""Run folders: how one comes to be, whole or not at all, and how one is loaded with its scaling."""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from pi_lora.adapter import ADAPTER_CONFIG_FILE, load_adapter
from pi_lora.errors import ModelError, RunExistsError
from pi_lora.model import (
    BaseModel,
    default_dtype,
    dtype_named,
    extended_config,
    find_base,
    load_model,
    load_tokenizer,
    read_config,
)
from pi_lora.recipe.files import dump_recipe
from pi_lora.recipe.schema import Recipe
from pi_lora.rope import Config, Interpolation, Method, full_attention_rope, in_both_dialects, scale_of, window_of

RECIPE_FILE = "recipe.yaml"
RUN_FILE = "run.json"
CHECKPOINTS = "checkpoints"
LIBRARIES = ("pi-lora", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors")


@dataclass(frozen=True)
class Stretch:
    """What an evaluation asks of a plain base model: the paper's step 0 (`pi`), or no rescaling (`direct`)."""

    target: int
    original: int | None = None
    method: Method = "pi"


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be measured, with its own scaling."""

    name: str
    model: PreTrainedModel
    tokenizer: Any
    config: Config

    @property
    def scale(self) -> float:
        """By how much its positions are rescaled."""
        return scale_of(self.config)

    @property
    def window(self) -> int:
        """Its context window in tokens."""
        return window_of(self.config)


def load(name: str, stretch: Stretch | None = None, dtype: str | None = None) -> LoadedModel:
    """Load a hub id, a folder of full weights, `builtin:tiny`, or a run or adapter folder with its own scaling.

    Raises:
        ModelError: there is no such model, it is damaged, or an adapter's base disagrees with it.
        ScalingError: `stretch` asks for what the model cannot do.
    """
    if is_adapter(name):
        if stretch is not None:
            raise ModelError(f"{name}: brings its own scaling; leave out --original, --target and --scaling")
        return _load_adapter_run(Path(name), dtype)
    base = find_base(name)
    interpolation = base.interpolation(stretch.method, stretch.target, stretch.original) if stretch else None
    config = extended_config(base, interpolation)
    model = load_model(base, config, _dtype(dtype, base.config))
    return LoadedModel(name, model.eval(), load_tokenizer(base.path, window_of(config)), config)


def is_adapter(name: str | Path) -> bool:
    """Whether a folder holds an adapter rather than full weights."""
    return (Path(name) / ADAPTER_CONFIG_FILE).is_file()


def adapter_base(folder: Path, override: str | None = None) -> tuple[BaseModel, dict[str, Any]]:
    """The base of an adapter folder, and the extended config that the run was tuned under.

    Raises:
        ModelError: the folder's config does not extend this base: another size, vocabulary, rotary base or window.
    """
    config = read_config(folder)
    named = json.loads((folder / ADAPTER_CONFIG_FILE).read_text(encoding="utf-8"))["base_model_name_or_path"]
    base = find_base(override or named)
    own = in_both_dialects(base.config)
    keys = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    differing = [
        f"{key} {own.get(key)} instead of {config.get(key)}" for key in keys if own.get(key) != config.get(key)
    ]
    theta, expected = full_attention_rope(own)["rope_theta"], full_attention_rope(config)["rope_theta"]
    if theta != expected:
        differing.append(f"rope_theta {theta} instead of {expected}")
    if scale_of(config) % scale_of(own):
        differing.append(f"its own scale {scale_of(own):g} does not lead to {scale_of(config):g}")
    if differing:
        raise ModelError(f"{folder}: was not tuned from {base.name}: {'; '.join(differing)}; name its own base")
    return base, config


def output_folder(recipe: Recipe, recipe_path: Path) -> Path:
    """Where a run goes by default: `adapters/<recipe>` for LoRA, `models/<recipe>` for all weights."""
    return Path("models" if recipe.tuning.method == "full" else "adapters") / recipe_path.stem


def check_output(output: Path, resume: bool = False) -> None:
    """Refuse an `output` where a run cannot be made.

    Raises:
        RunExistsError: it is there already, or an interrupted run is and nobody said what to do with it.
    """
    staging = staging_path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RunExistsError(f"{output}: is there already and is not overwritten; choose another --output or remove it")
    if resume and last_checkpoint(staging) is None:
        raise RunExistsError(f"{output}: no interrupted run with a checkpoint to resume; start it without --resume")
    if not resume and last_checkpoint(staging) is not None:
        raise RunExistsError(
            f"{output}: an interrupted run is kept in {staging}; go on with --resume, or remove that folder"
        )


def staging_path(output: Path) -> Path:
    """The folder beside `output` in which it is made; it is renamed to `output` when it is whole."""
    return output.with_name(f".{output.name}.partial")


@contextmanager
def staged(output: Path, resume: bool = False) -> Iterator[Path]:
    """Make `output` whole or not at all: the body fills the staging folder, which is then renamed.

    If the body fails, the staging folder goes, unless it holds a checkpoint to resume from.

    Raises:
        RunExistsError: as `check_output`, or the folder cannot be made.
    """
    check_output(output, resume)
    staging = staging_path(output)
    if not resume:
        shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunExistsError(f"{output}: cannot be written ({error.strerror}); choose another --output") from None
    try:
        yield staging
    except BaseException:
        if last_checkpoint(staging) is None:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    _finish(staging, output)


def last_checkpoint(staging: Path) -> Path | None:
    """The newest checkpoint of an unfinished run."""
    found = [path for path in (staging / CHECKPOINTS).glob("checkpoint-*") if (path / "trainer_state.json").is_file()]
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def write_provenance(folder: Path, recipe: Recipe, facts: Mapping[str, Any]) -> None:
    """Write the resolved recipe, and what the run was made with: versions, commit, hardware, and `facts`."""
    (folder / RECIPE_FILE).write_text(dump_recipe(recipe), encoding="utf-8")
    made_with = {
        **facts,
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "python": platform.python_version(),
        "commit": _commit(),
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    (folder / RUN_FILE).write_text(json.dumps(made_with, indent=2) + "\n", encoding="utf-8")


def write_card(folder: Path, recipe: Recipe, interpolation: Interpolation) -> None:
    """A short model card: what this is, and how it is loaded without losing the scaling."""
    how = (
        f"model = AutoModelForCausalLM.from_pretrained({recipe.model.name!r}, config=AutoConfig.from_pretrained(run))\n"
        "model = PeftModel.from_pretrained(model, run)"
        if recipe.tuning.method != "full"
        else "model = AutoModelForCausalLM.from_pretrained(run)"
    )
    text = f"""---
base_model: {recipe.model.name}
library_name: {"transformers" if recipe.tuning.method == "full" else "peft"}
---
# {recipe.model.name}, {interpolation.original} to {interpolation.target} tokens

Made by pi-lora: `scaling: {recipe.scaling}`, `method: {recipe.tuning.method}`, {recipe.training.steps} steps on
{", ".join(source.name for source in recipe.data.source)}.
Positions are divided by {interpolation.scale:g}; `config.json` says so. `recipe.yaml` holds every
setting, `training.jsonl` the loss, `run.json` the versions.

An adapter alone is not the model: PEFT does not carry the scaling, so it is passed in as the config of this folder.

```python
run = "this folder"
{how}
```
"""
    (folder / "README.md").write_text(text, encoding="utf-8")


def _finish(staging: Path, output: Path) -> None:
    """Give a whole run its name."""
    for file in staging.rglob("*"):
        if file.is_file():
            file.chmod(0o644)  # transformers 5 writes 0600
    if output.is_dir():
        output.rmdir()  # empty, or check_output would have refused it
    os.replace(staging, output)


def _load_adapter_run(folder: Path, dtype: str | None) -> LoadedModel:
    base, config = adapter_base(folder)
    model = load_adapter(load_model(base, config, _dtype(dtype, base.config)), folder)
    return LoadedModel(str(folder), model, load_tokenizer(folder, window_of(config)), config)


def _dtype(named: str | None, config: Config) -> Any:
    return dtype_named(named) if named else default_dtype(config.get("dtype"))


def _commit() -> str | None:
    """The commit of this source tree, where it is one."""
    here = Path(__file__).parent.parent
    if not (here / ".git").exists():
        return None
    answer = subprocess.run(
        ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.strip() or None
