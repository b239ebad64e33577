"""Every mistake of a recipe that shows before anything is downloaded, tokenized or loaded, reported together."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import constants, get_safetensors_metadata
from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError

from pi_lora.data.examples import data_problems
from pi_lora.data.sources import HELD_OUT_KEYS, PINNED
from pi_lora.errors import ModelError, PiLoraError, RecipeError, first_line
from pi_lora.merging.tensors import read_weights
from pi_lora.models.adapter import check_shape
from pi_lora.models.files import BUILTIN
from pi_lora.models.model import Model, find_to_tune
from pi_lora.planning.planning import plan_here, plan_lines
from pi_lora.recipe.schema import Data, Recipe
from pi_lora.run import Run, check_output, staging_path
from pi_lora.types import NO_PERMISSIONS, Permissions


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
    model: Model | None = None

    @contextmanager
    def collected() -> Iterator[None]:
        try:
            yield
        except PiLoraError as mistake:
            mistakes.append(mistake)

    with collected():
        model = _check_model(recipe, permissions)
    if model:
        with collected():
            _ = model.tokenizer
        with collected():
            _check_weights(model, ask_hub)
    problems = [*data_problems(recipe.data, ask_hub), *_machine_problems(recipe)]
    with collected():
        problems += _evaluation_problems(recipe, ask_hub)
    if problems:
        mistakes.append(RecipeError(problems))
    with collected():
        check_output(output, resume)
    if resume:
        with collected():
            Run(staging_path(output)).check_same_recipe(recipe)
    if len(mistakes) == 1:
        raise mistakes[0]
    if mistakes or model is None:
        raise RecipeError([str(mistake) for mistake in mistakes])
    return model


def check_data(recipe: Recipe, permissions: Permissions = NO_PERMISSIONS) -> Model:
    """Return the model of `recipe` on a machine that prepares its data alone; raise what is wrong with both."""
    model = _check_model(recipe, permissions)
    if problems := data_problems(recipe.data):
        raise RecipeError(problems)
    return model


def check_fits(recipe: Recipe, model: Model, force: bool = False) -> list[str]:
    """Return the plan of a training here in lines; raise PiLoraError if it does not fit, unless by `force`."""
    plan = plan_here(recipe, model.permissions)
    if plan is None:
        return [f"{model.base}: no plan for a model of this kind; watch its memory"]
    lines = plan_lines(plan)
    if not plan.fits and not force:
        raise PiLoraError(f"{lines[-1]}; or train all the same with --force")
    return lines


def _check_model(recipe: Recipe, permissions: Permissions) -> Model:
    model = find_to_tune(recipe, permissions)
    if model.adapter:
        check_shape(model.adapter, recipe.tuning, model.meta_model)
    return model


def _check_weights(model: Model, ask_hub: bool) -> None:
    if Path(model.path).is_dir() or constants.HF_HUB_OFFLINE:
        read_weights(model.base, model.file)
    elif ask_hub:
        try:
            get_safetensors_metadata(model.path, revision=model.revision)
        except (NotASafetensorsRepoError, SafetensorsParsingError, HfHubHTTPError) as error:
            raise ModelError(f"{model.base}: weights cannot be read ({first_line(error)}); name another base") from None


def _evaluation_problems(recipe: Recipe, ask_hub: bool) -> Iterator[str]:
    measured, target = recipe.evaluation.perplexity, recipe.context.target
    if measured is None:
        return
    for asked in (measured, recipe.evaluation.in_short().perplexity or measured):
        if asked.windows is None and ((asked.stride or 0) > target or (asked.truncate or target) < target):
            yield f"evaluation: the target window is {target}; lower stride to it, or raise truncate to it"
            break
    if measured.data is None and not recipe.model.name.startswith(BUILTIN):
        yield "evaluation.perplexity.data: is missing; name a text that the model is not tuned on"
    if measured.data and measured.data not in PINNED:
        source = {"name": measured.data, **measured.model_dump(include=HELD_OUT_KEYS)}
        for problem in data_problems(Data.model_validate({"source": source}), ask_hub):
            yield problem.replace("data.source", "evaluation.perplexity.data", 1)


def _machine_problems(recipe: Recipe) -> Iterator[str]:
    """Yield what the machine lacks and no library would say in a line before the training starts."""
    hardware, kernel, here = recipe.hardware, recipe.model.attention, torch.cuda.device_count()
    if hardware.gpus and hardware.gpus > here:
        what = f"{hardware.gpus} needed on each machine, {here} here"
        yield f"hardware.gpus: {what}; run it on such machines, or change hardware.gpus (pi-lora plan shows what fits)"
    paged = recipe.training.optimizer == "paged_adamw_8bit"
    gpu_only = {
        "training.optimizer: paged_adamw_8bit": paged,
        "training.precision: float16": recipe.training.precision == "float16",
        "hardware.offload_activations": hardware.offload_activations,
        "model.kernels: liger": recipe.model.kernels == "liger",
        f"model.attention: {kernel}": kernel.startswith("flash_attention"),
    }
    yield from (f"{key}: needs a GPU; leave it out" for key, asked in gpu_only.items() if asked and not here)
    if hardware.context_parallel > 1 and (not hardware.gpus or kernel not in ("auto", "sdpa")):
        yield "hardware.context_parallel: needs hardware.gpus, and model.attention: sdpa"
    if paged and recipe.sharded and hardware.processes > 1:
        # bitsandbytes 0.50 takes the local part of no sharded tensor (DTensor).
        yield "training.optimizer: paged_adamw_8bit cannot train weights that are sharded over GPUs; use adamw"
    if recipe.tuning.method == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
        yield "tuning.method: qlora: needs the package bitsandbytes; pip install 'pi-lora[qlora]'"
