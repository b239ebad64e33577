"""A recipe for a model, a target window and a device: the first candidate, by quality, whose plan fits; and the
commented file that `pi-lora new` writes. docs/new.md explains the order.
"""

import itertools
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from jinja2 import Template

from pi_lora.data.chats import NO_CHATS_WARNING
from pi_lora.data.documents import looks_local
from pi_lora.data.examples import data_problems
from pi_lora.data.sources import find_table, held_out_text, share_to_hold_out
from pi_lora.errors import PiLoraError, RecipeError, RunExistsError
from pi_lora.models.files import BUILTIN
from pi_lora.models.tokenizer import has_chat_template
from pi_lora.planning.gpus import CPU, Gpu, device_here, find_gpu
from pi_lora.planning.plan import TrainingPlan
from pi_lora.planning.planning import Changes, find_shape, plan_lines, plan_training, replanned, slower
from pi_lora.recipe.schema import Data, Recipe, Source
from pi_lora.scaling.config import methods_for
from pi_lora.types import NO_PERMISSIONS, Json, Permissions

# Embeddings and head of more tokens take gigabytes in float32 with AdamW: norms alone train with the adapter.
LARGE_VOCABULARY = 100_000
# What most of the shipped recipes read; and the built-in model, which knows Python alone, what its demo does.
CORPUS = ({"name": "monology/pile-uncopyrighted", "streaming": True},)
MEASURED: Json = {"data": "pg19", "documents": 2}
BUILTIN_CORPUS = ({"name": "builtin:stdlib", "weight": 0.4}, {"name": "builtin:recall", "weight": 0.6})
# The most documents of what a text holds out, since a data set of the hub has any number; and the longest stride. What
# a CPU measures in minutes.
HELD_OUT_DOCUMENTS, STRIDE = 20, 1024
FEW_DOCUMENTS, FEW_PASSKEYS = 5, {"depths": 8, "trials": 4}
# The shortest PoSE sequences that have been tried (adapters/smollm2_135m_16k).
SHORTEST_SEQUENCE = 1024
# The paper's steps; those after which its models reach their whole window (table 4), below which the batch is halved,
# down to two sequences; and the fewest.
STEPS, ENOUGH_STEPS, FEWEST_STEPS = 1000, 200, 20
# Sequences a step: PoSE's, and of whole sequences those of recipes/_qlora.yaml.
POSE_BATCH, BATCH = 64, 16
# The size by which candidates are compared, and below which only too little text goes.
WORTHWHILE: Changes = {"training.steps": ENOUGH_STEPS, "training.global_batch_size": 8}
# Hours that a run may take while another size or kind of sequence takes fewer.
MOST_HOURS, MOST_HOURS_ON_CPU = 48.0, 12.0
# More than any tokenizer's of English or code, so that text is rather counted short.
BYTES_PER_TOKEN = 5
# Maximum rates by parameters: the demo's and that of recipes/smollm2_135m_32k.yaml, which fall; larger models have
# LongLoRA's, the default.
RATES = ((20e6, 2.5e-3), (500e6, 5e-4))


def new_recipe(
    model: str,
    target: int,
    gpu: str | None = None,
    texts: Sequence[str] = (),
    probed: tuple[str, str] | None = None,
    output: Path | None = None,
    permissions: Permissions = NO_PERMISSIONS,
    column: str = "text",
) -> tuple[Path, TrainingPlan, list[str]]:
    """Write a recipe that extends a model to a target window on a device, by default this machine's, and return the
    file, the plan, and what a user should know. In rows, `column` holds the text or the chats. `probed` is the scaling
    that a probe found, and what it says of it. Raise RunExistsError if the file exists; PiLoraError as `choose` does.
    """
    file = output or file_for(model, target)
    if file.exists():
        raise RunExistsError(f"{file}: exists, and is not overwritten; remove it, or name another file with --output")
    device = find_gpu(gpu) if gpu else device_here()
    given = sections_of_texts(texts, target, column) if texts else {}
    if probed:
        given["scaling"] = probed[0]
    plan = choose(first_plan(model, target, device, given, permissions))
    with file.open("x", encoding="utf-8") as recipe:
        recipe.write(recipe_text(plan, file, probed and probed[1]))
    as_hub = "no such file or folder; it is taken for a data set on the hub"
    notes = [f"--data: {name}: {as_hub}" for name in texts if not looks_local(name)]
    if not texts:
        names = " and ".join(source.name for source in plan.recipe.data.source)
        notes.append(f"--data: not given; the recipe reads {names}")
    if has_chat_template(model) and not plan.recipe.data.has_chats:
        notes.append(f"data: {NO_CHATS_WARNING}")
    return file, plan, notes


def sections_of_texts(names: Sequence[str], target: int, column: str) -> Json:
    """Return the sections of a recipe that tunes on named texts and holds a share of each out; perplexity is measured
    on what the first holds out. Of chats all train. Raise RecipeError if one cannot be read, also of those on the hub.
    """
    sources = [Source(name=name, column=column) for name in names]
    if problems := data_problems(Data(source=sources), ask_hub=True):
        raise RecipeError([problem.replace("data.source", "--data", 1) for problem in problems])
    if not sources[0].has_chats:
        sources = [
            source if source.name.startswith(BUILTIN) else source.changed(hold_out=share_to_hold_out(source, target))
            for source in sources
        ]
    sections: Json = {"data": {"source": sources}}
    if sources[0].hold_out:
        sections["evaluation"] = {"perplexity": {**held_out_text(sources[0]), "documents": HELD_OUT_DOCUMENTS}}
    return sections


def first_plan(
    model: str, target: int, gpu: Gpu, given: Json, permissions: Permissions = NO_PERMISSIONS
) -> TrainingPlan:
    """Return the plan of what the candidates change: LoRA on contiguous sequences, with nothing that saves memory, and
    with the sections of a recipe that are `given`. The scaling continues the frequencies of the base, of a plain base
    it is the paper's.
    """
    config, _ = find_shape(model, "main", permissions)
    corpus, measured = (BUILTIN_CORPUS, Json()) if model.startswith(BUILTIN) else (CORPUS, MEASURED)
    tree: Json = {
        "scaling": next(iter(methods_for(config)), "pi"),
        "model": {"name": model},
        "context": {"target": target},
        "data": {"source": list(corpus)},
        "training": {"activation_checkpointing": False},
        "hardware": {} if gpu.name == CPU else {"gpus": 1, "gpu": gpu.name},
        "evaluation": {"perplexity": measured},
    } | given
    measured = tree["evaluation"]["perplexity"] | {"stride": min(STRIDE, target // 8), "truncate": target}
    tree["evaluation"] = {"perplexity": measured, "passkey": {}}
    if gpu.name == CPU:
        tree["evaluation"] = {"perplexity": measured | {"documents": FEW_DOCUMENTS}, "passkey": FEW_PASSKEYS}
    return plan_training(Recipe.model_validate(tree), gpu, permissions)


def choose(first: TrainingPlan) -> TrainingPlan:
    """Return the plan of the best candidate with memory to spare that ends in time, else of the best with memory to
    spare; raise PiLoraError if there is none.
    """
    roomy = [plan for _, plan in replanned(first, candidates(first)) if plan.has_room()]
    if not roomy:
        raise PiLoraError(
            f"--gpu: {first.gpu.name}: holds no tuning of {first.recipe.model.name}, even QLoRA with PoSE; "
            "name a larger one, or see recipes/paper for several GPUs"
        )
    return _sized(next((plan for plan in roomy if _share_of_time(plan) <= 1), roomy[0]))


def candidates(first: TrainingPlan) -> Iterator[Changes]:
    """Yield every candidate, the best first: embeddings and norms train, without which LoRA stays far behind full
    tuning (LongLoRA), of a large vocabulary norms alone; whole sequences before PoSE, and long before short ones; LoRA
    before QLoRA; then what costs time.
    """
    sequences: list[Changes] = [{"data.positions": "contiguous", "data.sequence_tokens": None}]
    length = first.target.original
    shortest = min(length, SHORTEST_SEQUENCE)
    while length >= shortest:
        sequences.append({"data.positions": "pose", "data.sequence_tokens": length})
        length //= 2
    extra_modules = ["embeddings_and_norms", "norms"][first.target.shape.vocabulary > LARGE_VOCABULARY :]
    for extra, sequence, method, lever in itertools.product(extra_modules, sequences, ("lora", "qlora"), slower(first)):
        yield WORTHWHILE | sequence | {"tuning.modules_to_save": extra, "tuning.method": method} | lever


def _share_of_time(plan: TrainingPlan) -> float:
    """Return hours over the most that are taken; 0 where hours are not known."""
    return (plan.hours or 0) / (MOST_HOURS_ON_CPU if plan.gpu.name == CPU else MOST_HOURS)


def _sized(plan: TrainingPlan) -> TrainingPlan:
    """Return the plan of a worthwhile size with as many steps and sequences as time and text allow, and a rate for the
    model's size. `pi-lora train` refuses text that is too short for the fewest steps.
    """
    data, length = plan.recipe.data, plan.tokens_per_step // plan.recipe.training.global_batch_size
    sequences = math.inf
    for text in data.source:
        # No size is known on the hub.
        if looks_local(text.name):
            # A mixture of equal shares ends when one of its sources is used up.
            tokens = find_table(text).size * (1 - (text.hold_out or 0)) / BYTES_PER_TOKEN * len(data.source)
            sequences = min(sequences, tokens / length)
    if share := _share_of_time(plan):
        # A longer run than the worthwhile one has to end in time.
        sequences = min(sequences, plan.tokens / min(share, 1.0) / length)
    batch = POSE_BATCH if data.positions == "pose" else BATCH
    while batch > 2 and batch * ENOUGH_STEPS > sequences:
        batch //= 2
    steps = max(FEWEST_STEPS, int(min(STEPS, sequences / batch)) // 10 * 10)
    changes: Changes = {"training.steps": steps, "training.global_batch_size": batch}
    if rates := [rate for parameters, rate in RATES if plan.target.shape.parameters < parameters]:
        changes |= {"training.learning_rate": rates[0], "training.schedule": "linear"}
    return next(sized for _, sized in replanned(plan, [changes]))


def recipe_text(plan: TrainingPlan, file: Path, probed: str | None = None) -> str:
    """Return the recipe of a plan as a file with comments, and the plan as its header; `probed` is what a probe says of
    the scaling.
    """
    template = Template(
        Path(__file__).with_name("recipe.yaml").read_text(encoding="utf-8"),
        keep_trailing_newline=True,
        trim_blocks=True,
    )
    text: str = template.render(
        plan=plan,
        tree=plan.recipe.model_dump(exclude_defaults=True),
        lines=plan_lines(plan),
        file=shlex.quote(str(file)),
        probed=probed,
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
    last = re.split(r"[/:]", model.rstrip("/"))[-1]
    return Path(f"{re.sub(r'[^a-z0-9.]+', '-', last.lower()).strip('-.') or 'model'}_{short(target)}.yaml")
