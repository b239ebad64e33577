"""The checks of a recipe before anything is downloaded, tokenized or loaded; all mistakes are reported together."""

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from transformers import get_scheduler

from pi_lora.data.batches import packing_problems
from pi_lora.data.checks import amount_problems, data_problems
from pi_lora.errors import ModelError, PiLoraError, RecipeError, first_line
from pi_lora.evaluation.measurement import Preview
from pi_lora.evaluation.suite import problems_of, requested_measurements
from pi_lora.hub import tensors_on_hub
from pi_lora.models.adapter import check_shape, check_targets
from pi_lora.models.files import BUILTIN, methods_on, quantization_of
from pi_lora.models.loaded import check_shapes
from pi_lora.models.quantized import Header, check_loadable, check_quantization
from pi_lora.models.resolve import resolve_for_training
from pi_lora.models.shape import dense_mlps
from pi_lora.models.source import Base, ModelSource
from pi_lora.planning.advice import plan_lines
from pi_lora.planning.training_plan import TrainingPlan
from pi_lora.recipe.evaluation import number_of
from pi_lora.recipe.schema import Recipe, Training
from pi_lora.run import Run
from pi_lora.staging import check_output, staging_path
from pi_lora.types import NO_PERMISSIONS, Permissions


def check(
    recipe: Recipe,
    output: Path,
    *,
    resume: bool = False,
    permissions: Permissions = NO_PERMISSIONS,
    ask_hub: bool = False,
) -> ModelSource:
    """Return the model of `recipe`, or raise all mistakes that can be seen before weights and texts are read.

    Recipe, tokenizer, headers of weights, first rows of texts and output are checked. With `ask_hub`, so are weights
    and texts on the hub, which a training downloads next.
    """
    mistakes: list[PiLoraError] = []
    model: ModelSource | None = None

    @contextmanager
    def collected() -> Iterator[None]:
        try:
            yield
        except PiLoraError as mistake:
            mistakes.append(mistake)

    with collected():
        model = _check_model(recipe, permissions, output if resume else None)
    tokenizer = None
    length = recipe.context.target
    if model:
        length = recipe.data.tokens_per_sequence(model.original, length)
        with collected():
            tokenizer = model.tokenizer
        with collected():
            _check_weights(model, ask_hub)
    problems = data_problems(recipe.data, ask_hub, tokenizer=tokenizer, window=length)
    if model:
        problems = problems or amount_problems(recipe, model.original)
    if model and tokenizer and ask_hub and not problems:
        # A training packs next.
        problems = packing_problems(recipe.data, recipe.training, tokenizer, model.original, recipe.context.target)
    problems += _machine_problems(recipe)
    with collected():
        problems += _evaluation_problems(recipe, model, tokenizer, ask_hub)
    if problems:
        mistakes.append(RecipeError([*dict.fromkeys(problems)]))
    with collected():
        check_output(output, resume=resume)
    if resume:
        with collected():
            Run(staging_path(output)).check_same_recipe(recipe)
    if len(mistakes) == 1:
        raise mistakes[0]
    if mistakes or model is None:
        raise RecipeError([problem for mistake in mistakes for problem in mistake.problems])
    return model


def check_data(recipe: Recipe, permissions: Permissions = NO_PERMISSIONS) -> ModelSource:
    """Return the model of `recipe` on a machine that only prepares the data; raise the mistakes of model and data."""
    model = _check_model(recipe, permissions)
    problems = data_problems(recipe.data) or amount_problems(recipe, model.original)
    if problems:
        raise RecipeError(problems)
    return model


def plan_or_refuse(name: str, plan: TrainingPlan | None, *, force: bool = False) -> list[str]:
    """Return the lines of a plan of the model `name`; raise PiLoraError if it does not fit, except with `force`."""
    if plan is None:
        return [f"{name}: no plan for a model of this kind; watch its memory"]
    lines = plan_lines(plan)
    if not plan.fits and not force:
        raise PiLoraError(f"{lines[-1]}; or train all the same with --force")
    return lines


def _check_model(recipe: Recipe, permissions: Permissions, resumed: Path | None = None) -> ModelSource:
    source = resolve_for_training(recipe, permissions=permissions, resumed=resumed)
    _check_quantization(source.base, recipe.tuning.method)
    if recipe.tuning.method != "full":
        check_targets(recipe.tuning, source.base.meta_model)
    if source.adapter:
        check_shape(source.adapter, recipe.tuning, source.base.meta_model)
    _check_kernel(source.base, recipe.model.attention)
    if recipe.training.mlp_chunk_tokens:
        dense_mlps(source.base.meta_model)
    if recipe.data.packing == "isolated" and not source.base.isolates_sequences:
        kind = source.base.config.get("model_type")
        raise RecipeError([f"data.packing: models of type {kind} cannot isolate texts in a sequence; leave it out"])
    if recipe.hardware.context_parallel > 1 and source.shape.sliding_layers:
        # accelerate 1.15 takes the masks away that tell sliding windows.
        windows = f"sliding windows of {source.shape.sliding_window} tokens"
        raise RecipeError([f"hardware.context_parallel: the model has {windows}; leave it out"])
    return source


def _check_kernel(base: Base, kernel: str) -> None:
    if kernel == "sdpa":
        try:
            base.meta_model.set_attn_implementation(kernel)
        except ValueError:
            kind = base.config.get("model_type")
            raise RecipeError([f"model.attention: sdpa computes no models of type {kind}; leave it out"]) from None


def _check_quantization(base: Base, method: str) -> None:
    check_quantization(base)
    kind = quantization_of(base.config)
    if method not in methods_on(base.config):
        raise ModelError(
            f"{base.name}: has weights quantized by {kind}, which tuning.method: {method} does not take; "
            "take lora, or name the model that it was made from"
        )


def _check_weights(model: ModelSource, ask_hub: bool) -> None:
    base = model.base
    stored: Mapping[str, Header]
    if base.commit is None or constants.HF_HUB_OFFLINE:
        stored = base.read_weights()
    elif ask_hub:
        stored = tensors_on_hub(base.name, base.commit)
    else:
        return
    check_shapes(base, stored)
    check_loadable(base, stored)


def _evaluation_problems(recipe: Recipe, model: ModelSource | None, tokenizer: Any, ask_hub: bool) -> Iterator[str]:
    evaluation = recipe.evaluation
    target = recipe.context.target
    for options in (evaluation.perplexity, evaluation.in_short().perplexity):
        stride = (options and options.stride) or target
        truncate = (options and number_of(options.truncate)) or target
        if options and options.windows is None and not stride <= target <= truncate:
            yield f"evaluation: the target window is {target}; lower stride to it, or raise truncate to it"
    if evaluation.perplexity and evaluation.perplexity.data is None and not recipe.model.name.startswith(BUILTIN):
        yield "evaluation.perplexity.data: is missing; name a text that the model is not tuned on"
    original = model.original if model else 0
    preview = Preview(target, tokenizer, original, recipe, ask_hub, section="evaluation")
    yield from problems_of(requested_measurements(evaluation), preview)


def _machine_problems(recipe: Recipe) -> Iterator[str]:
    """Yield what this machine lacks, where no library would say so in a line before the training starts."""
    hardware = recipe.hardware
    kernel = recipe.model.attention
    num_gpus = torch.cuda.device_count()
    if hardware.gpus and hardware.gpus > num_gpus:
        lacking = f"{hardware.gpus} needed on each machine, {num_gpus} here"
        yield f"hardware.gpus: {lacking}; lower it or leave it out (pi-lora plan shows what fits)"
    paged = recipe.training.optimizer == "paged_adamw_8bit"
    gpu_only = {
        "training.optimizer: paged_adamw_8bit": paged,
        "training.precision: float16": recipe.training.precision == "float16",
        "hardware.offload_activations": hardware.offload_activations,
        "model.kernels: liger": recipe.model.kernels == "liger",
        f"model.attention: {kernel}": kernel.startswith("flash_attention"),
    }
    if not num_gpus:
        for key, is_set in gpu_only.items():
            if is_set:
                yield f"{key}: needs a GPU; leave it out"
    if hardware.context_parallel > 1 and (not hardware.gpus or kernel not in ("auto", "sdpa")):
        yield "hardware.context_parallel: needs hardware.gpus, and model.attention: sdpa"
    if paged and recipe.shards > 1:
        # bitsandbytes 0.50 does not take the local part of a sharded tensor (DTensor).
        yield "training.optimizer: paged_adamw_8bit cannot train weights that are sharded over GPUs; use adamw"
    for tracker in recipe.training.tracking:
        if importlib.util.find_spec(tracker) is None:
            yield f"training.tracking: {tracker}: needs the package {tracker}; pip install {tracker}"
    yield from _schedule_problems(recipe.training)
    if recipe.tuning.method == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
        yield "tuning.method: qlora: needs the package bitsandbytes; pip install 'pi-lora[qlora]'"


def _schedule_problems(training: Training) -> Iterator[str]:
    """Yield what transformers says of options that its schedule lacks, does not know or does not allow."""
    optimizer = torch.optim.SGD([torch.zeros(1)], training.learning_rate)
    options = training.schedule_options
    try:
        get_scheduler(training.schedule, optimizer, training.warmup_steps, training.steps, options)
    except (TypeError, ValueError) as error:
        yield f"training.schedule_options: {first_line(error)}; correct the options of {training.schedule}"
