"""Every mistake of a recipe that shows before anything is downloaded, tokenized or loaded, reported together."""

import importlib.util
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import constants, get_safetensors_metadata
from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError

from pi_lora.data.examples import data_problems
from pi_lora.data.sources import RECALL
from pi_lora.errors import ModelError, PiLoraError, RecipeError, first_line
from pi_lora.merging.tensors import read_shards
from pi_lora.models.adapter import check_shape
from pi_lora.models.files import BUILTIN
from pi_lora.models.machine import LIGER, check_liger
from pi_lora.models.model import Model, adapter_folder, find_to_tune
from pi_lora.planning.planning import plan_here
from pi_lora.planning.text import plan_lines
from pi_lora.recipe.schema import Data, Recipe
from pi_lora.run import Run, check_output, staging_path
from pi_lora.training.schedule import rate_share
from pi_lora.types import NO_PERMISSIONS, Permissions

T = TypeVar("T")
# Where runs go by default; no repository on the hub has such a name.
OUTPUTS = ("adapters/", "models/")


def check(
    recipe: Recipe,
    output: Path,
    resume: bool = False,
    permissions: Permissions = NO_PERMISSIONS,
    ask_hub: bool = False,
) -> Model:
    """Return the model of `recipe`; raise all mistakes that show before weights or texts are read, a line each: in
    recipe, tokenizer, headers of weights, first rows of texts, and output. `ask_hub` for those of weights and texts
    on the hub too, which a training downloads next.
    """
    mistakes: list[PiLoraError] = []

    def attempt(step: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return step(*arguments)
        except PiLoraError as mistake:
            mistakes.append(mistake)
            return None

    model = attempt(_check_model, recipe, permissions)
    if model:
        attempt(lambda: model.tokenizer)
        attempt(_check_weights, model, ask_hub)
    attempt(lambda: _raise_all(data_problems(recipe.data, ask_hub), _evaluation_problems(recipe, ask_hub)))
    attempt(_raise_all, _hardware_problems(recipe), _missing_packages(recipe))
    if model and recipe.model.kernels == "liger" and importlib.util.find_spec(LIGER):
        attempt(check_liger, model.config["model_type"])
    attempt(rate_share, recipe.training)
    attempt(check_output, output, resume)
    if resume:
        attempt(Run(staging_path(output)).check_same_recipe, recipe)
    if len(mistakes) == 1:
        raise mistakes[0]
    if mistakes or model is None:
        raise RecipeError([str(mistake) for mistake in mistakes])
    return model


def check_data(recipe: Recipe, permissions: Permissions = NO_PERMISSIONS) -> Model:
    """Return the model of `recipe` on a machine that prepares its data alone; raise what is wrong with both."""
    model = _check_model(recipe, permissions)
    _raise_all(data_problems(recipe.data))
    return model


def check_fits(recipe: Recipe, model: Model, force: bool = False) -> list[str]:
    """Return the plan of a training here in lines; raise PiLoraError if it does not fit, unless by `force`."""
    plan = plan_here(recipe, model)
    if plan is None:
        return [f"{model.base}: no plan for a model of this kind; watch its memory"]
    lines = plan_lines(plan)
    if not plan.fits and not force:
        raise PiLoraError(f"{lines[-1]}; or train all the same with --force")
    return lines


def _check_model(recipe: Recipe, permissions: Permissions) -> Model:
    name, keep = recipe.model.name, recipe.scaling == "keep"
    if not keep and adapter_folder(name):
        merged = f"merge it first (pi-lora merge {shlex.quote(name)}) and extend the merged model"
        kept = f"{name} is an adapter of an extended model; tune it further with scaling: keep"
        raise ModelError(f"model.name: {kept}, or {merged}")
    if keep and name.startswith(OUTPUTS) and not Path(name).exists():
        raise ModelError(f"model.name: {name}: no such run yet; train its recipe first, or name an extended model")
    model = find_to_tune(recipe, permissions)
    if model.adapter:
        check_shape(model.adapter, recipe.tuning, model.skeleton)
    return model


def _check_weights(model: Model, ask_hub: bool) -> None:
    if Path(model.path).is_dir() or constants.HF_HUB_OFFLINE:
        read_shards(model.base, model.file)
    elif ask_hub:
        try:
            get_safetensors_metadata(model.path, revision=model.revision)
        except (NotASafetensorsRepoError, SafetensorsParsingError, HfHubHTTPError) as error:
            raise ModelError(f"{model.base}: weights cannot be read ({first_line(error)}); name another base") from None


def _evaluation_problems(recipe: Recipe, ask_hub: bool) -> Iterator[str]:
    if measured := recipe.evaluation.perplexity:
        target, short = recipe.context.target, recipe.evaluation.in_short().perplexity or measured
        asked = {"perplexity": measured} | ({} if short == measured else {"while_training": short})
        for where, each in asked.items() if measured.windows is None else ():
            if (each.stride or 0) > target or (each.truncate or target) < target:
                yield f"evaluation.{where}: the target window is {target}; lower stride to it, or raise truncate to it"
        if measured.data is None and not recipe.model.name.startswith(BUILTIN):
            yield "evaluation.perplexity.data: is missing; name a text that the model is not tuned on"
        named = Data.model_validate({"source": measured.data}) if measured.data else None
        for problem in data_problems(named, ask_hub) if named else ():
            yield problem.replace("data.source", "evaluation.perplexity.data", 1)
        if measured.data == RECALL:
            yield f"evaluation.perplexity.data: {RECALL} is for training; measure recall with evaluation.passkey"
    for entry in recipe.evaluation.benchmarks.data if recipe.evaluation.benchmarks else ():
        if not os.path.exists(os.path.expanduser(entry.partition("=")[2] or entry)):
            yield f"evaluation.benchmarks.data: {entry}: no such file or folder; correct it, or leave it out"


def _hardware_problems(recipe: Recipe) -> Iterator[str]:
    hardware, here = recipe.hardware, torch.cuda.device_count()
    if hardware.gpus and hardware.gpus > here:
        what = f"{hardware.gpus} needed on each machine, {here} here"
        yield f"hardware.gpus: {what}; run it on such machines, or change hardware.gpus (pi-lora plan shows what fits)"
    paged, kernel = recipe.training.optimizer == "paged_adamw_8bit", recipe.model.attention
    parallel, other_kernel = hardware.context_parallel > 1, kernel not in ("auto", "sdpa")
    # bitsandbytes 0.50 takes the local part of no sharded tensor (DTensor).
    cannot_page = paged and recipe.sharded and hardware.processes > 1
    problems = {
        "hardware.context_parallel: needs GPUs; set hardware.gpus": parallel and not hardware.gpus,
        f"model.attention: {kernel} cannot share a sequence between GPUs; use sdpa": parallel and other_kernel,
        "training.optimizer: paged_adamw_8bit needs a GPU; use adamw": paged and not here,
        "training.optimizer: paged_adamw_8bit cannot train weights that are sharded over GPUs; use adamw": cannot_page,
        "hardware.offload_activations: needs a GPU; leave it out": hardware.offload_activations and not here,
        "training.precision: float16 needs a GPU; use bfloat16 or float32": recipe.training.precision == "float16"
        and not here,
        "model.kernels: liger needs a GPU; leave it out": recipe.model.kernels == "liger" and not here,
        "model.attention: flash_attention_2 needs a GPU; use sdpa": kernel == "flash_attention_2" and not here,
    }
    yield from (problem for problem, holds in problems.items() if holds)


def _missing_packages(recipe: Recipe) -> Iterator[str]:
    qlora, benchmarks = recipe.tuning.method == "qlora", recipe.evaluation.benchmarks is not None
    paged, flash = recipe.training.optimizer == "paged_adamw_8bit", recipe.model.attention == "flash_attention_2"
    wanted = [
        (qlora, "bitsandbytes", "tuning.method: qlora", "'pi-lora[qlora]'"),
        (paged and not qlora, "bitsandbytes", "training.optimizer: paged_adamw_8bit", "'pi-lora[qlora]'"),
        (flash, "flash_attn", "model.attention: flash_attention_2", "'pi-lora[flash-attn]'"),
        (recipe.model.kernels == "liger", LIGER, "model.kernels: liger", "'pi-lora[liger]'"),
        (benchmarks, "lm_eval", "evaluation.benchmarks", "'pi-lora[eval]'"),
    ]
    wanted += [(True, tracker, f"training.tracking: {tracker}", tracker) for tracker in recipe.training.tracking]
    for asked, package, where, install in wanted:
        if asked and importlib.util.find_spec(package) is None:
            yield f"{where}: needs the package {package}; pip install {install}"


def _raise_all(*kinds: Iterable[str]) -> None:
    if problems := [problem for kind in kinds for problem in kind]:
        raise RecipeError(problems)
