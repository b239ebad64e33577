"""The commands as functions: names and plain values in, folders and typed results out. They print nothing."""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi_lora.errors import RecipeError
from pi_lora.types import NO_PERMISSIONS, Permissions, Progress, silent

if TYPE_CHECKING:
    from pi_lora.evaluation.passkey import PasskeyScores
    from pi_lora.evaluation.perplexity import PerplexityScores
    from pi_lora.models.model import Model
    from pi_lora.planning.plan import TrainingPlan
    from pi_lora.recipe.schema import Recipe

# Each function imports what it needs: a plan does without torch.


def train(
    recipe: str | Path,
    *overrides: str | Mapping[str, Any],
    output: str | Path | None = None,
    resume: bool = False,
    progress: Progress | bool = True,
) -> Path:
    """Tune a model to its target window as `pi-lora train` does, and return the folder of the run.

    Args:
        recipe: A recipe file, or the name of one that comes with pi-lora, such as `demo`.
        overrides: Keys to change, as on the command line, `"training.steps=100"`, or as `{"training.steps": 100}`.
        output: The folder of the run; by default `adapters/<recipe>`, of full tuning `models/<recipe>`.
        resume: Continue an interrupted run of the same recipe, or `recipe`, the folder of an interrupted run.
        progress: Whether to show a progress bar, or a function: it is called with the step, the number of steps, and a
            line with loss, tokens a second and memory.

    Raises:
        PiLoraError: What is wrong with recipe, model, data or output, all that shows before weights are read at once.
        RecipeError: The recipe asks for several processes and a launcher did not start them; `pi-lora train` does.
        Diverged: The loss or a weight became infinite or NaN.
        Interrupted: SIGINT, SIGTERM or SIGHUP, after a checkpoint was written.
    """
    from pi_lora.distributed import is_launched
    from pi_lora.run import resolve_run

    resolved, place = resolve_run(Path(recipe), _as_words(overrides), Path(output) if output else None, resume)
    if (processes := resolved.hardware.processes) > 1 and not is_launched():
        raise RecipeError([f"hardware: asks for {processes} processes; start them with pi-lora train {recipe}"])
    model, _ = model_to_train(resolved, place, resume)

    from pi_lora.training.training import prepare_data, train

    with _shown("packing", progress) as packed:
        data = prepare_data(resolved, model, packed)
    with _shown("training steps", progress) as step:
        return train(resolved, model, data, place, resume, step)


def model_to_train(
    recipe: "Recipe",
    output: Path,
    resume: bool = False,
    force: bool = False,
    permissions: Permissions = NO_PERMISSIONS,
    ask_hub: bool = False,
) -> "tuple[Model, list[str]]":
    """Return the model of a resolved recipe, and the plan of its training in lines. Everything is checked, by the first
    process alone: those that a launcher started only find the model. `ask_hub` for weights and texts too.
    """
    from pi_lora.distributed import check_launched, enable_expandable_segments, is_launched

    enable_expandable_segments()
    if is_launched():
        from pi_lora.models.model import find_to_tune

        check_launched(recipe)
        return find_to_tune(recipe, permissions), []
    from pi_lora.preflight import check, check_fits
    from pi_lora.report.probe import better_scaling

    model = check(recipe, output, resume, permissions, ask_hub)
    better = better_scaling(recipe.model.name, recipe.context.target, recipe.scaling)
    return model, [*check_fits(recipe, model, force or resume), *better]


def plan(
    recipe: str | Path,
    *overrides: str | Mapping[str, Any],
    gpu: str | None = None,
    permissions: Permissions = NO_PERMISSIONS,
) -> "TrainingPlan":
    """Plan the memory, tokens and hours of a recipe as `pi-lora plan` does, before anything is downloaded or loaded.

    Args:
        recipe: A recipe file, or the name of one that comes with pi-lora, such as `7b_16k`.
        overrides: Keys to change, as for `train`.
        gpu: A device such as `4090`, `A100-80` or `H100`, any by its memory, as `48GB`, or `cpu`; by default the one
            that the recipe names as `hardware.gpu`, else this machine's.
        permissions: Whether code of the model may run, and a changed run be used.

    Returns:
        The plan: `fits`, `memory.peak` in bytes on each device, `tokens`, and `hours`, which is None where the peak of
        the device is not known.

    Raises:
        RecipeError: The recipe is wrong.
        PiLoraError: The device is not known, or the model cannot be found or extended.
    """
    from pi_lora.planning.gpus import device_for
    from pi_lora.planning.planning import plan_training
    from pi_lora.recipe.files import load_recipe

    resolved = load_recipe(Path(recipe), _as_words(overrides)).recipe
    return plan_training(resolved, device_for(resolved, gpu), permissions)


def merge(
    run: str | Path, output: str | Path | None = None, *, dtype: str | None = None, progress: Progress = silent
) -> Path:
    """Add an adapter to the weights of its base as `pi-lora merge` does, check the sum against base + adapter, and
    return the folder of full weights, which every engine loads with its scaling.

    Args:
        run: A run of lora or qlora tuning, a folder or a hub id.
        output: The new folder; by default `models/<run>`.
        dtype: `float32`, `bfloat16` or `float16`; by default what the base stores.
        progress: Called with what is done, how much there is, and what it is.

    Raises:
        ModelError: `run` is no adapter folder, its base is missing or another one, or the check failed.
        RunExistsError: `output` exists.
    """
    from pi_lora.merging.merging import merge

    place = Path("models") / Path(run).resolve().name if output is None else Path(output)
    return merge(Path(run), place, dtype=dtype, progress=progress).folder


def evaluate_perplexity(
    model: "str | Model",
    data: str | None = None,
    windows: Sequence[int] | None = None,
    *,
    stride: int | None = None,
    documents: int | None = None,
    progress: Progress = silent,
) -> "PerplexityScores":
    """Measure sliding-window perplexity as `pi-lora eval perplexity` does (paper, section 3.2).

    Args:
        model: What `load` returns, or takes.
        data: A file, folder, glob or hub data set; `builtin:stdlib`, `pg19` or `proof-pile`; by default what the recipe
            of a run names, and of the built-in model `builtin:stdlib`.
        windows: Lengths in tokens; by default the model's window and its halves down to 256.
        stride: Tokens that a window moves; by default 256, or half the shortest window where that is less.
        documents: Only the first so many that are at least as long as the longest window.
        progress: Called with what is done, and how much there is.

    Returns:
        Scores whose `windows` hold the `perplexity` of each length, and the number of `tokens` that it is the mean of.

    Raises:
        DataError: `data` is missing or cannot be read, or no document is as long as the longest window.
        ModelError: The model cannot be found or loaded.
    """
    from pi_lora.evaluation.measurement import Session
    from pi_lora.evaluation.perplexity import Perplexity
    from pi_lora.recipe.evaluation import PerplexityOptions

    options = PerplexityOptions(data=data, windows=windows, stride=stride, documents=documents)
    return Perplexity().run(_loaded(model), options, Session(progress))


def evaluate_passkey(
    model: "str | Model",
    target: int | None = None,
    *,
    depths: int = 32,
    trials: int = 10,
    seed: int = 0,
    progress: Progress = silent,
) -> "PasskeyScores":
    """Measure passkey retrieval as `pi-lora eval passkey` does (paper, section 3.3).

    Args:
        model: What `load` returns, or takes.
        target: Tokens of context, prompt and answer together; by default the model's window.
        depths: Distances between passkey and question, evenly spaced to `target`.
        trials: Random passkeys at each.
        seed: Of the passkeys.
        progress: Called with what is done, and how much there is.

    Returns:
        Scores with the `success_rate` at each of `depths`, and `k_max`, the distance in tokens up to which each is
        retrieved in at least a fifth of the trials.

    Raises:
        ModelError: The model cannot be found or loaded.
    """
    from pi_lora.evaluation.measurement import Session
    from pi_lora.evaluation.passkey import Passkey
    from pi_lora.recipe.evaluation import PasskeyOptions

    options = PasskeyOptions(target=target, depths=depths, trials=trials, seed=seed)
    return Passkey().run(_loaded(model), options, Session(progress))


def generate(
    model: "str | Model",
    prompt: str,
    *,
    chat_template: bool = True,
    tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    stream: bool = False,
) -> str:
    """Return the text that a model writes after a prompt, as `pi-lora generate` does.

    Args:
        model: What `load` returns, or takes.
        prompt: The text to answer or to continue.
        chat_template: Put the prompt as the turn of a user, where the tokenizer has a chat template.
        tokens: The longest answer; a shorter one ends with the model's end of text, or with the window.
        temperature: Of sampling; 0 takes the likeliest token.
        seed: Of sampling.
        stream: Also print every word as soon as it is known.

    Raises:
        DataError: The prompt is empty, or leaves no room in the window.
        ModelError: The model cannot be found or loaded.
    """
    from pi_lora.evaluation.generation import answer
    from pi_lora.recipe.evaluation import Sampling

    sampling = Sampling(temperature=temperature, max_new_tokens=tokens, seed=seed)
    return answer(_loaded(model), prompt, sampling, chat_template, stream)


def _loaded(model: "str | Model") -> "Model":
    from pi_lora.models.model import load

    return load(model) if isinstance(model, str) else model


def _as_words(overrides: Sequence[str | Mapping[str, Any]]) -> list[str]:
    """Return overrides as on the command line; JSON is YAML.

    >>> _as_words(["scaling=pi", {"training.steps": 100}])
    ['scaling=pi', 'training.steps=100']
    """
    words: list[str] = []
    for override in overrides:
        if isinstance(override, str):
            words.append(override)
        else:
            words += [f"{key}={json.dumps(value)}" for key, value in override.items()]
    return words


def _shown(title: str, progress: Progress | bool) -> AbstractContextManager[Progress]:
    """Return the function that is told of progress: the caller's, one that moves a bar, or one that shows nothing."""
    if progress is True:
        from pi_lora.terminal import progress_bar

        return progress_bar(title)
    return nullcontext(progress or silent)
