"""All that can be known before anything is downloaded, tokenized or loaded, reported together."""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from pi_lora.data.corpus import RECALL, source_problems
from pi_lora.data.examples import example_problems
from pi_lora.errors import ModelError, PiLoraError, RecipeError
from pi_lora.models.adapter import check_shape
from pi_lora.models.base import BaseModel, extended_config, find_base
from pi_lora.models.load import adapter_base, is_adapter
from pi_lora.planning.gpus import CPU, GPUS, gpu_of_device
from pi_lora.planning.planning import Plan, plan_recipe, target_of
from pi_lora.recipe.schema import Data, Hardware, Recipe
from pi_lora.run_folder import check_output, check_resumed_recipe
from pi_lora.scaling.config import Config, scale_of, window_of
from pi_lora.scaling.extend import refuse_what_does_not_reach
from pi_lora.training.schedule import rate_share

T = TypeVar("T")
# Where runs go by default; nothing on the hub is called so.
OUTPUTS = ("adapters/", "models/")


@dataclass(frozen=True)
class Checked:
    """A recipe's base model, the config that it is tuned under, and its windows in tokens, L and L'.

    `adapter` is the folder of one that is tuned further.
    """

    base: BaseModel
    config: Config
    original: int
    target: int
    adapter: Path | None = None


def check(recipe: Recipe, output: Path, resume: bool = False) -> Checked:
    """Find the base of `recipe`, and every mistake that shows before weights or texts are read.

    Raises:
        PiLoraError: the mistake, or a RecipeError with all of them, a line each.
    """
    mistakes: list[PiLoraError] = []

    def attempt(look: Callable[[], T]) -> T | None:
        try:
            return look()
        except PiLoraError as mistake:
            mistakes.append(mistake)
            return None

    checked = attempt(lambda: _extended_model(recipe) if recipe.scaling == "keep" else _stretched_base(recipe))
    in_data = example_problems if recipe.data.has_examples else source_problems
    attempt(lambda: _raise_all([*in_data(recipe.data), *_evaluation_problems(recipe)]))
    attempt(lambda: _raise_all([*_hardware_problems(recipe), *_missing_packages(recipe)]))
    attempt(lambda: rate_share(recipe.training))
    attempt(lambda: check_output(output, resume))
    if resume:
        attempt(lambda: check_resumed_recipe(output, recipe))
    if len(mistakes) == 1:
        raise mistakes[0]
    if mistakes or checked is None:
        raise RecipeError([str(mistake) for mistake in mistakes])
    return checked


def plan_here(recipe: Recipe) -> Plan | None:
    """The plan of `recipe` on this machine's accelerator, or on its CPU and memory; None for a model that has none."""
    if torch.cuda.is_available():
        device = gpu_of_device(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory)
    elif recipe.hardware.gpus is None:
        device = replace(GPUS[CPU], memory=psutil.virtual_memory().total)
    else:
        device = None
    try:
        return plan_recipe(recipe, target_of(recipe), device)
    except ModelError:
        return None


def _stretched_base(recipe: Recipe) -> Checked:
    model, context = recipe.model, recipe.context
    if is_adapter(model.name):
        raise ModelError(
            f"model.name: {model.name} is an adapter of an extended model; tune it further with scaling: keep, or "
            f"merge it first (pi-lora merge {model.name}) and stretch what comes of that"
        )
    assert recipe.scaling != "keep"
    base = find_base(model.name, model.revision, model.trust_remote_code)
    interpolation = base.interpolation(recipe.scaling, context.target, context.original)
    return Checked(base, extended_config(base, interpolation), interpolation.original, interpolation.target)


def _extended_model(recipe: Recipe) -> Checked:
    """A model that is tuned under its own scaling: full weights, merged ones, or an adapter with what it stands on."""
    name = recipe.model.name
    if is_adapter(name):
        base, config = adapter_base(Path(name))
        check_shape(Path(name), recipe.tuning)
    elif name.startswith(OUTPUTS) and not Path(name).exists():
        raise ModelError(f"model.name: {name}: no such run yet; train its recipe first, or name an extended model")
    else:
        base = find_base(name, recipe.model.revision, recipe.model.trust_remote_code)
        config = extended_config(base, None)
    refuse_what_does_not_reach(name, config, recipe.context.target)
    original = round(window_of(config) / scale_of(config))
    return Checked(base, config, original, window_of(config), Path(name) if is_adapter(name) else None)


def _evaluation_problems(recipe: Recipe) -> Iterator[str]:
    if measured := recipe.evaluation.perplexity:
        for problem in source_problems(Data.model_validate({"source": measured.data})):
            yield problem.replace("data.source", "evaluation.perplexity.data", 1)
        if measured.data == RECALL:
            yield f"evaluation.perplexity.data: {RECALL}: is for training; measure recall with evaluation.passkey"
    for entry in recipe.evaluation.benchmarks.data if recipe.evaluation.benchmarks else ():
        if not Path(entry.partition("=")[2] or entry).expanduser().exists():
            yield f"evaluation.benchmarks.data: {entry}: there is no such file or folder; correct it, or leave it out"


def _hardware_problems(recipe: Recipe) -> Iterator[str]:
    hardware: Hardware = recipe.hardware
    here = torch.cuda.device_count()
    if hardware.gpus and hardware.gpus > here:
        yield (
            f"hardware.gpus: {hardware.gpus} needed on each machine, {here} here; "
            "run it where they are, or change hardware.gpus (pi-lora plan says what fits)"
        )
    if hardware.context_parallel > 1 and not hardware.gpus:
        yield "hardware.context_parallel: needs GPUs; set hardware.gpus"
    if hardware.context_parallel > 1 and recipe.model.attention not in ("auto", "sdpa"):
        yield f"model.attention: {recipe.model.attention} cannot share a sequence between GPUs; use sdpa"
    if recipe.training.optimizer == "paged_adamw_8bit" and not here:
        yield "training.optimizer: paged_adamw_8bit needs a GPU; use adamw"
    if hardware.offload_activations and not here:
        yield "hardware.offload_activations: they are in the host's memory already; leave it out"
    if recipe.model.attention == "flash_attention_2" and not here:
        yield "model.attention: flash_attention_2 needs a GPU; use sdpa"


def _missing_packages(recipe: Recipe) -> Iterator[str]:
    wanted = {
        "bitsandbytes": (
            recipe.tuning.method == "qlora" or recipe.training.optimizer == "paged_adamw_8bit",
            "tuning.method: qlora" if recipe.tuning.method == "qlora" else "training.optimizer: paged_adamw_8bit",
            "'pi-lora[qlora]'",
        ),
        "flash_attn": (
            recipe.model.attention == "flash_attention_2",
            "model.attention: flash_attention_2",
            "'pi-lora[flash-attn]'",
        ),
        "lm_eval": (recipe.evaluation.benchmarks is not None, "evaluation.benchmarks", "'pi-lora[eval]'"),
        **{
            tracker: (tracker in recipe.training.tracking, f"training.tracking: {tracker}", tracker)
            for tracker in ("tensorboard", "wandb", "trackio")
        },
    }
    for package, (needed, where, install) in wanted.items():
        if needed and importlib.util.find_spec(package) is None:
            yield f"{where}: needs the package {package}; pip install {install}"


def _raise_all(problems: list[str]) -> None:
    if problems:
        raise RecipeError(problems)
