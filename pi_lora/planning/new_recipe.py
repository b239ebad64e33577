"""The commented recipe that `pi-lora new` writes for a model, a target window and a device.

It is the first candidate, by quality, whose plan fits. docs/choosing.md explains the order.
"""

import itertools
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from jinja2 import Template

from pi_lora.data.chats import NO_CHATS_WARNING
from pi_lora.data.checks import data_problems, too_short_for
from pi_lora.data.documents import looks_local, unread_documents
from pi_lora.data.sources import BYTES_PER_TOKEN, find_table, held_out_text, share_to_hold_out
from pi_lora.errors import DataError, PiLoraError, RecipeError, RunExistsError
from pi_lora.models.files import BUILTIN
from pi_lora.models.resolve import extension_of
from pi_lora.models.source import ModelSource
from pi_lora.models.tokenizer import has_chat_template
from pi_lora.planning.advice import Changes, memory_saving_changes, plan_lines, replanned
from pi_lora.planning.gpus import CPU, Gpu, device_here, find_gpu
from pi_lora.planning.training_plan import TrainingPlan, plan_training
from pi_lora.recipe.budget import budget_of
from pi_lora.recipe.data import RECALL, Data, Source
from pi_lora.recipe.evaluation import PasskeyOptions, PerplexityOptions, default_windows
from pi_lora.recipe.schema import Recipe
from pi_lora.types import Json

# The training text and the perplexity text of most shipped recipes.
CORPUS = "monology/pile-uncopyrighted"
PERPLEXITY_TEXT: Json = {"data": "pg19"}
# The training text of the demo, for the built-in model, which knows Python alone.
BUILTIN_CORPUS = ({"name": "builtin:stdlib", "weight": 0.4}, {"name": "builtin:recall", "weight": 0.6})
# The weight of a text beside 1 of synthetic documents that ask for distant facts. These are a quarter, as in the
# tunings of SmolLM2-135M (docs/results.md).
TEXT_WEIGHT = 3
# Why the scaling is the first of those that suit a plain base.
DEFAULT_REASON = "the best of our measurements before and after tuning; pi-lora probe compares others"
# The shortest PoSE sequences that have been tried (adapters/smollm2_135m_16k), and a limit on their cost. The PoSE
# paper (arXiv 2309.10400) tunes on 2,048 tokens.
MIN_SEQUENCE_TOKENS = 1024
MAX_POSE_TOKENS = 8192
# After these steps the models of the paper reach their whole window (table 4).
STEPS = 200
MIN_STEPS = 20
# Sequences a step: LoRA tolerates large batches less than full tuning (Thinking Machines, LoRA Without Regret).
BATCH_SIZE = 8
MIN_BATCH_SIZE = 2
# The size by which candidates are compared. Less time or text leads to a smaller one.
COMPARED_SIZE: Changes = {"training.steps": STEPS, "training.global_batch_size": BATCH_SIZE}
# Hours that a run may take while another size or kind of sequence takes fewer.
MAX_HOURS = 48.0
MAX_HOURS_ON_CPU = 12.0
# Learning rates of LoRA for models with fewer parameters than the first number: chosen on validation text for the
# built-in model and for SmolLM2-135M (docs/experiments.md); above them ten times the paper's 2e-5 for all weights, the
# rule of Thinking Machines' LoRA Without Regret.
LEARNING_RATES = ((20e6, 2.5e-3), (500e6, 1e-3), (math.inf, 2e-4))


def new_recipe(
    source: ModelSource,
    target: int,
    *,
    gpu: str | None,
    texts: Sequence[str],
    probed: tuple[Json, str] | None = None,
    output: Path | None,
    column: str = "text",
) -> tuple[Path, TrainingPlan, list[str]]:
    """Write a recipe that extends a model to a target window, and return the file, the plan and notes for the user.

    Args:
        source: The model; a shipped config is enough.
        target: The target window, in tokens.
        gpu: The name of the device; by default the device of this machine.
        texts: Files or data sets to tune on.
        probed: The sections of a recipe that a probe recommends, and the reason.
        output: The file to write.
        column: The column of rows with the text or the chats.

    Raises:
        RunExistsError: The file exists.
        PiLoraError: No candidate fits.
    """
    file = output or file_for(source.name, target)
    if file.exists():
        raise RunExistsError(f"{file}: exists, and is not overwritten; remove it, or name another file with --output")
    device = find_gpu(gpu) if gpu else device_here()
    sections = sections_of_texts(texts, target, column) if texts else {}
    if probed:
        recommended, summary = probed
        sections |= recommended
        reason = f"in a probe, {summary}"
    elif {"pi", "yarn"} <= set(source.rope.scalings):
        reason = DEFAULT_REASON
    else:
        reason = "goes on from the frequencies of this base"
    first = first_plan(source, target, gpu=device, sections=sections)
    plan = choose(first)
    text = recipe_text(plan, file, reason)
    notes = list(_notes(source.name, texts, plan))
    with file.open("x", encoding="utf-8") as recipe_file:
        recipe_file.write(text)
    return file, plan, notes


def _notes(model: str, texts: Sequence[str], plan: TrainingPlan) -> Iterator[str]:
    """Yield notes for the user on the data of a new recipe."""
    for name in texts:
        if not looks_local(name):
            yield f"--data: {name}: no such file or folder; it is taken for a data set on the hub"
        elif unread := unread_documents(name):
            yield f"--data: {unread}"
    if not texts:
        names = " and ".join(source.name for source in plan.recipe.data.source)
        yield f"--data: not given; the recipe reads {names}"
    training = plan.recipe.training
    needed = training.steps * training.global_batch_size
    available = _sequences_of_text(plan)
    if available < needed:
        yield f"--data: about {available:,.0f} sequences; {needed:,} are needed, or pi-lora train refuses: add text"
    measured = plan.recipe.data.source[0]
    if texts and measured.hold_out:
        try:
            problem = too_short_for(measured, plan.recipe.context.target, enough=2)
        except DataError as error:
            problem = str(error)
        if problem:
            uses = "pi-lora train needs one to measure perplexity, and pi-lora compare two for an interval"
            yield f"--data: {problem}; {uses}: add long documents"
    if has_chat_template(model) and not plan.recipe.data.has_chats:
        yield f"data: {NO_CHATS_WARNING}"


def sections_of_texts(names: Sequence[str], target: int, column: str) -> Json:
    """Return the sections `data` and `evaluation` of a recipe that tunes on named texts.

    A share of every text is held out, and perplexity is measured on the share of the first one. Chats are not held out.
    Raise RecipeError if a text cannot be read, also on the hub.
    """
    sources = [Source(name=name, column=column) for name in names]
    problems = data_problems(Data(source=sources), ask_hub=True)
    if problems:
        raise RecipeError([problem.replace("data.source", "--data", 1) for problem in problems])
    if not sources[0].has_chats:
        sources = [source.changed(hold_out=share_to_hold_out(source, target)) for source in sources]
    sections: Json = {"data": {"source": _with_recall(sources)}}
    if sources[0].hold_out:
        sections["evaluation"] = {"perplexity": held_out_text(sources[0])}
    return sections


def _with_recall(sources: Sequence[Source]) -> list[Source]:
    """Return sources of raw text with a quarter of synthetic documents beside them; chats stay alone."""
    if any(source.has_chats or source.name == RECALL for source in sources):
        return list(sources)
    texts = [source.changed(weight=TEXT_WEIGHT) for source in sources]
    return [*texts, Source(name=RECALL, weight=len(texts))]


def first_plan(source: ModelSource, target: int, gpu: Gpu, sections: Json) -> TrainingPlan:
    """Return the plan that the candidates change: LoRA, without any change that saves memory.

    `sections` replace those of the recipe. The scaling continues the frequencies of the base; for a plain base it is
    `yarn`, which is better than `pi` before and after tuning (docs/results.md).
    """
    is_builtin = source.name.startswith(BUILTIN)
    methods = source.rope.scalings
    scaling = "yarn" if "yarn" in methods else next(iter(methods), "pi")
    corpus = _with_recall([Source(name=CORPUS, streaming=True)])
    tree: Json = {
        "scaling": scaling,
        "model": {"name": source.name},
        "context": {"target": target},
        "tuning": {"modules_to_save": "nothing"},
        "data": {"source": list(BUILTIN_CORPUS) if is_builtin else corpus},
        "training": {"activation_checkpointing": False, "schedule": "linear"},
        "hardware": {} if gpu.name == CPU else {"gpus": 1, "gpu": gpu.name},
        "evaluation": {"perplexity": {} if is_builtin else PERPLEXITY_TEXT},
    }
    tree |= sections
    budget = budget_of(on_cpu=gpu.name == CPU)
    perplexity = tree["evaluation"]["perplexity"] | PerplexityOptions().sizes(target, [source.original], budget)
    del perplexity["windows"]  # L', L and those between follow from the target
    tree["evaluation"] = {"perplexity": perplexity, "passkey": PasskeyOptions(target=target).amount(budget)}
    recipe = Recipe.model_validate(tree)
    extension = extension_of(recipe)
    assert extension, "a new recipe extends its model"
    return plan_training(recipe, source.extended(extension), gpu)


def choose(first: TrainingPlan) -> TrainingPlan:
    """Return the plan of the best candidate with memory to spare that ends in time.

    If none ends in time, it is the fastest with memory to spare. Raise PiLoraError if none has memory to spare.
    """
    plans = [plan for _, plan in replanned(first, candidates(first)) if plan.has_room()]
    if not plans:
        hardest = "by QLoRA with PoSE" if "qlora" in first.model.methods else "with PoSE (the base takes no QLoRA)"
        raise PiLoraError(
            f"--gpu: {first.gpu.name}: is too small to tune {first.recipe.model.name}, even {hardest}; "
            "name a larger one, or see recipes/paper for several GPUs"
        )
    best = next((plan for plan in plans if _share_of_max_hours(plan) <= 1), min(plans, key=_share_of_max_hours))
    return _with_size(best)


def candidates(first: TrainingPlan) -> Iterator[Changes]:
    """Yield every candidate, the best first: long sequences before short ones, LoRA before QLoRA, and last the changes
    that cost time.
    """
    methods = [method for method in ("lora", "qlora") if method in first.model.methods]
    saving = memory_saving_changes(first)
    for sequence, method, saved in itertools.product(_sequence_changes(first), methods, saving):
        yield COMPARED_SIZE | sequence | {"tuning.method": method} | saved


def _sequence_changes(first: TrainingPlan) -> Iterator[Changes]:
    """Yield the kinds of sequences, the best first: whole ones for examples of a task, for a target that is as short as
    PoSE sequences, and under `pi`, with which PoSE retrieves unreliably (benchmarks/results/methods.md); else PoSE
    sequences.
    """
    recipe = first.recipe
    target = recipe.context.target
    longest = min(max(first.model.original, MIN_SEQUENCE_TOKENS), MAX_POSE_TOKENS)
    if recipe.data.has_examples or target <= longest or recipe.scaling == "pi":
        yield {"data.positions": "contiguous", "data.sequence_tokens": None}
    for length in reversed(default_windows(min(longest, target), MIN_SEQUENCE_TOKENS)):
        if length < target:
            yield {"data.positions": "pose", "data.sequence_tokens": length}


def _share_of_max_hours(plan: TrainingPlan) -> float:
    """Return the hours of a plan as a share of the hours that a run may take; 0 if they are not known."""
    max_hours = MAX_HOURS_ON_CPU if plan.gpu.name == CPU else MAX_HOURS
    return (plan.hours or 0) / max_hours


def _with_size(plan: TrainingPlan) -> TrainingPlan:
    """Return a plan with as many of `COMPARED_SIZE` as time and text allow, and the learning rate of the model's size.

    `pi-lora train` refuses text that is too short for `MIN_STEPS`.
    """
    num_sequences = _available_sequences(plan)
    batch_size = BATCH_SIZE
    while batch_size > MIN_BATCH_SIZE and batch_size * STEPS > num_sequences:
        batch_size //= 2
    steps = int(min(STEPS, num_sequences / batch_size))
    parameters = plan.model.shape.parameters
    changes: Changes = {
        "training.steps": max(MIN_STEPS, steps // 10 * 10),
        "training.global_batch_size": batch_size,
        "training.learning_rate": next(rate for limit, rate in LEARNING_RATES if parameters < limit),
    }
    _, resized = next(replanned(plan, [changes]))
    return resized


def _sequences_of_text(plan: TrainingPlan) -> float:
    """Return about how many sequences the text holds, rather too few."""
    sources = plan.recipe.data.source
    whole_weight = sum(source.weight for source in sources)
    num_sequences = math.inf
    for source in sources:
        # No size is known on the hub, and recall documents have no end.
        if looks_local(source.name) and source.name != RECALL:
            training_bytes = find_table(source).size * (1 - (source.hold_out or 0))
            # A mixture ends when one of the sources is used up.
            mixture_tokens = training_bytes / BYTES_PER_TOKEN * whole_weight / source.weight
            num_sequences = min(num_sequences, mixture_tokens / plan.sequence_tokens)
    return num_sequences


def _available_sequences(plan: TrainingPlan) -> float:
    """Return the most sequences that time and text allow."""
    num_sequences = _sequences_of_text(plan)
    share = _share_of_max_hours(plan)
    if share:
        # A run that is longer than the compared one has to end in time.
        max_tokens = plan.tokens / min(share, 1.0)
        num_sequences = min(num_sequences, max_tokens / plan.sequence_tokens)
    return num_sequences


def recipe_text(plan: TrainingPlan, file: Path, reason: str = DEFAULT_REASON) -> str:
    """Return the recipe of a plan as a file with comments, the `reason` for the scaling, and the plan as header."""
    template_file = Path(__file__).with_name("recipe.yaml")
    template = Template(
        template_file.read_text(encoding="utf-8"),
        keep_trailing_newline=True,
        trim_blocks=True,
    )
    text: str = template.render(
        plan=plan,
        tree=plan.recipe.model_dump(exclude_defaults=True),
        lines=plan_lines(plan),
        file=shlex.quote(str(file)),
        reason=reason,
        short=short,
    )
    return text


def short(tokens: int) -> str:
    """Return a number of tokens as people write it.

    >>> short(65536), short(1000)
    ('64k', '1000')
    """
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def file_for(model: str, target: int) -> Path:
    """Return the name of the recipe for a model.

    >>> str(file_for("meta-llama/Meta-Llama-3-8B", 65536))
    'meta-llama-3-8b_64k.yaml'
    """
    last_part = re.split(r"[/:]", model.rstrip("/"))[-1]
    name = re.sub(r"[^a-z0-9.]+", "-", last_part.lower()).strip("-.")
    return Path(f"{name or 'model'}_{short(target)}.yaml")
