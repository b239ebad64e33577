"""A recipe for a model, a target window and a device: candidates in the order of their quality, of which the first is
taken whose plan fits; and the commented file that `pi-lora new` writes. docs/new.md explains the order.
"""

import itertools
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from pi_lora.data.chats import AT_STAKE
from pi_lora.data.documents import looks_local
from pi_lora.data.examples import data_problems
from pi_lora.data.sources import find_corpus, held_out_text, share_to_hold_out
from pi_lora.errors import DataError, PiLoraError, RecipeError, RunExistsError
from pi_lora.models.files import BUILTIN
from pi_lora.models.tokenizer import has_chat_template
from pi_lora.planning.gpus import CPU, GPUS, Gpu, device_here, find_gpu
from pi_lora.planning.planning import TrainingPlan, find_shape, plan_recipe, plan_training
from pi_lora.planning.text import Changes, plan_lines, render, replanned, slower
from pi_lora.recipe.schema import Data, Recipe, Source
from pi_lora.scaling.config import methods_for
from pi_lora.types import NO_PERMISSIONS, Json, Permissions

# Embeddings and head of more tokens take gigabytes in float32 with AdamW: norms alone train beside the adapter.
LARGE_VOCABULARY = 100_000
# What most of the shipped recipes read; and the built-in model, which knows Python alone, what its demo does.
CORPUS = ({"name": "monology/pile-uncopyrighted", "streaming": True},)
MEASURED: Json = {"data": "pg19", "documents": 2}
BUILTIN_CORPUS = ({"name": "builtin:stdlib", "weight": 0.4}, {"name": "builtin:recall", "weight": 0.6})
# The most documents of what a text holds out, since a data set of the hub has any number; and the stride of perplexity
# from so many tokens on.
HELD_OUT_DOCUMENTS, STRIDE_OF_LONG, LONG = 20, 1024, 8192
# The shortest PoSE sequences that have been tried (adapters/smollm2_135m_16k).
SHORTEST_SEQUENCE = 1024
# Sequences a step, from PoSE's batches down, and the fewest steps of each; the most are the paper's. Contiguous
# sequences begin at 16 a step, as in recipes/_qlora.yaml.
STEPS, FEWEST_STEPS, CONTIGUOUS_SEQUENCES = 1000, 20, 16
BATCHES = ((64, STEPS), (32, STEPS), (16, 200), (8, 100), (4, 50), (2, FEWEST_STEPS))
# Candidates are compared by the fewest steps worth their time: the paper's models reach their whole window in 200
# (table 4). Only too little text makes fewer.
WORTHWHILE: Changes = {"training.steps": 200, "training.global_batch_size": 8}
# Hours that a run may take while another size or kind of sequence takes fewer.
MOST_HOURS, MOST_HOURS_ON_CPU = 48.0, 12.0
# Tokens that keep a GPU or a CPU busy in a forward pass.
BUSY_TOKENS, BUSY_TOKENS_ON_CPU = 8192, 2048
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
) -> tuple[Path, TrainingPlan, list[str]]:
    """Write a recipe that extends a model to a target window on a device, by default this machine's, and return the
    file, the plan, and what a user should know. `probed` is the scaling that a probe found, and what it says of it.
    Raise RunExistsError if the file exists; PiLoraError as `choose` does.
    """
    file = output or file_for(model, target)
    if file.exists():
        raise RunExistsError(f"{file}: exists, and is not overwritten; remove it, or name another file with --output")
    device = find_gpu(gpu) if gpu else device_here()
    given = sections_of_texts(texts, target) if texts else {}
    if probed:
        given["scaling"] = probed[0]
    plan = choose(model, target, device, given, permissions)
    with file.open("x", encoding="utf-8") as recipe:
        recipe.write(recipe_text(plan, file, probed and probed[1]))
    hub = [name for name in texts if not looks_local(name) and not name.startswith(BUILTIN)]
    notes = [f"--data: {name}: no such file or folder; it is taken for a data set on the hub" for name in hub]
    sources = plan.recipe.data.source
    held_out = tokens_of(sources[0]) * (sources[0].hold_out or 1)
    if not texts:
        notes.append(f"--data: not given; the recipe reads {' and '.join(source.name for source in sources)}")
    elif held_out < target:
        short = f"about {held_out:,.0f} tokens of it are held out, and a window has {target:,}"
        notes.append(f"--data: {sources[0].name}: {short}; for perplexity at the target, give more text")
    if has_chat_template(model):
        notes.append(f"data: {AT_STAKE}")
    return file, plan, notes


def choose(
    model: str,
    target: int,
    gpu: Gpu,
    given: Json,
    permissions: Permissions = NO_PERMISSIONS,
) -> TrainingPlan:
    """Return the plan of the best candidate that fits on `gpu`, with the sections of a recipe that are `given`, as
    `sections_of_texts` returns them. Raise PiLoraError if nothing fits, with the device that would do, and DataError if
    there is too little text.
    """
    first = first_plan(model, target, gpu, given, permissions)
    if plan := best(first):
        return _sized(plan)
    larger = (each for each in GPUS.values() if each.memory > gpu.memory and each.bfloat16)
    enough = next((each.name for each in larger if best(plan_recipe(first.recipe, first.target, each))), None)
    advice = f"the smallest device that does: {enough}" if enough else "several GPUs may: recipes/paper has examples"
    raise PiLoraError(f"--gpu: {gpu.name}: holds no tuning of {model}, even QLoRA with PoSE; {advice}")


def first_plan(
    model: str, target: int, gpu: Gpu, given: Json, permissions: Permissions = NO_PERMISSIONS
) -> TrainingPlan:
    """Return the plan of what the candidates change: LoRA on contiguous sequences, with nothing that saves memory. The
    scaling continues the frequencies of the base, of a plain base it is the paper's.
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
    stride = {"stride": STRIDE_OF_LONG} if target >= LONG else {}
    tree["evaluation"] = {"perplexity": tree["evaluation"]["perplexity"] | stride, "passkey": {}}
    return plan_training(Recipe.model_validate(tree), gpu, permissions)


def sections_of_texts(names: Sequence[str], target: int) -> Json:
    """Return the sections of a recipe that tunes on named texts and holds a share of each out; perplexity is measured
    on what the first holds out. Raise RecipeError if one cannot be read, also of those on the hub.
    """
    sources = [Source(name=name) for name in names]
    if problems := data_problems(Data(source=sources), ask_hub=True):
        raise RecipeError([problem.replace("data.source", "--data", 1) for problem in problems])
    sources = [
        source if source.name.startswith(BUILTIN) else source.changed(hold_out=share_to_hold_out(source, target))
        for source in sources
    ]
    measured = {**held_out_text(sources[0]), "documents": HELD_OUT_DOCUMENTS} if sources[0].hold_out else {}
    return {"data": {"source": sources}, "evaluation": {"perplexity": measured}}


def tokens_of(source: Source) -> float:
    """Return about how many tokens a text has, rather too few; infinitely many where its size is not known."""
    size = find_corpus(source).size
    return math.inf if size is None else size / BYTES_PER_TOKEN


def best(first: TrainingPlan) -> TrainingPlan | None:
    """Return the plan of the best candidate with memory to spare that ends in time, else of the best with memory to
    spare; None if there is none.
    """
    roomy = [plan for _, plan in replanned(first, candidates(first)) if plan.has_room()]
    return next((plan for plan in roomy if _share_of_time(plan) <= 1), roomy[0] if roomy else None)


def candidates(first: TrainingPlan) -> Iterator[Changes]:
    """Yield every candidate, the best first: embeddings and norms train, without which LoRA stays far behind full
    tuning (LongLoRA), of a large vocabulary norms alone; whole sequences before PoSE, and long before short ones; LoRA
    before QLoRA; then what costs time.
    """
    sequences: list[Changes] = [{"data.positions": "contiguous", "data.sequence_tokens": None}]
    length = first.target.original
    while len(sequences) == 1 or length >= SHORTEST_SEQUENCE:
        sequences.append({"data.positions": "skip", "data.sequence_tokens": length})
        length //= 2
    extra_modules = ["embeddings_and_norms", "norms"][first.target.shape.vocabulary > LARGE_VOCABULARY :]
    for extra, sequence, method, lever in itertools.product(extra_modules, sequences, ("lora", "qlora"), slower(first)):
        yield WORTHWHILE | sequence | {"tuning.also_train": extra, "tuning.method": method} | lever


def _share_of_time(plan: TrainingPlan) -> float:
    """Return hours over the most that are taken; 0 where hours are not known."""
    return (plan.hours or 0) / (MOST_HOURS_ON_CPU if plan.gpu.name == CPU else MOST_HOURS)


def _sized(plan: TrainingPlan) -> TrainingPlan:
    """Return the plan of a worthwhile size with as many steps and sequences as time and text allow, a rate for the
    model's size, and several sequences at once where they keep the device busy and there is room; raise DataError if
    the text is too short.
    """
    length = plan.tokens_per_step // plan.recipe.training.global_batch_size
    # A mixture ends when one of its sources is used up.
    texts = plan.recipe.data.source
    whole = sum(text.weight for text in texts)
    tokens = min(tokens_of(text) * (1 - (text.hold_out or 0)) * whole / text.weight for text in texts)
    # A longer run than the worthwhile one has to end in time.
    share = _share_of_time(plan)
    in_time = plan.tokens / min(share, 1.0) if share else math.inf
    sequences = min(tokens, in_time) / length
    most = CONTIGUOUS_SEQUENCES if plan.recipe.data.positions == "contiguous" else BATCHES[0][0]
    enough = [batch for batch, fewest in BATCHES if batch <= most and batch * fewest <= sequences]
    if not enough:
        names = ", ".join(text.name for text in texts)
        takes = f"{FEWEST_STEPS} steps take {FEWEST_STEPS * BATCHES[-1][0] * length:,}"
        raise DataError(f"--data: {names}: holds about {tokens:,.0f} tokens, and {takes}; give more text")
    steps = int(min(STEPS, sequences / enough[0])) // 10 * 10
    changes: Changes = {"training.steps": steps, "training.global_batch_size": enough[0]}
    if rates := [rate for parameters, rate in RATES if plan.target.shape.parameters < parameters]:
        changes |= {"training.learning_rate": rates[0], "training.schedule": "linear"}
    busy = BUSY_TOKENS_ON_CPU if plan.gpu.name == CPU else BUSY_TOKENS
    at_once = [number for number in (8, 4, 2, 1) if number == 1 or number * length <= busy]
    plans = replanned(plan, (changes | {"training.per_device_batch_size": number} for number in at_once))
    return next(sized for _, sized in plans if sized.has_room() or sized.recipe.training.per_device_batch_size == 1)


def recipe_text(plan: TrainingPlan, file: Path, probed: str | None = None) -> str:
    """Return the recipe of a plan as a file with comments, and the plan as its header; `probed` is what a probe says of
    the scaling.
    """
    named = {"file": shlex.quote(str(file)), "probed": probed, "short": short, "lines": plan_lines(plan)}
    tree = plan.recipe.model_dump(exclude_defaults=True)
    return render("recipe.yaml", recipe=plan.recipe, target=plan.target, tree=tree, **named)


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
