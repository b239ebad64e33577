"""A recipe for a model, a target window and a device: candidates in the order of their quality, of which the first is
taken whose plan fits; and the commented file that `pi-lora new` writes. docs/new.md explains the order.
"""

import itertools
import math
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from pi_lora.errors import DataError, PiLoraError
from pi_lora.planning.gpus import CPU, GPUS, Gpu
from pi_lora.planning.planning import TrainingPlan, plan_recipe, target_of
from pi_lora.planning.text import MLP_IN_CHUNKS, OFFLOAD, Changes, plan_lines, replanned
from pi_lora.recipe.schema import Recipe, Source
from pi_lora.types import NO_PERMISSIONS, Json, Permissions

# Embeddings and head of more tokens take gigabytes in float32 with AdamW: norms alone train beside the adapter.
LARGE_VOCABULARY = 100_000
# What most of the shipped recipes read; and the built-in model, which knows Python alone, what its demo does.
CORPUS = ({"name": "monology/pile-uncopyrighted", "streaming": True},)
BUILTIN_CORPUS = ({"name": "builtin:stdlib", "weight": 0.4}, {"name": "builtin:recall", "weight": 0.6})
# The shortest PoSE sequences that have been tried (adapters/smollm2_135m_16k).
SHORTEST_SEQUENCE = 1024
# Steps and sequences a step, from the paper's steps and PoSE's batches down: the paper's models reach their whole
# window in 200 steps (table 4). Contiguous sequences begin at 16 a step, as in recipes/_qlora.yaml. Only too little
# text makes fewer.
SIZES = ((1000, 64), (1000, 32), (1000, 16), (500, 16), (200, 16), (200, 8))
SIZES_OF_LITTLE_TEXT = ((100, 8), (100, 4), (50, 4), (50, 2), (20, 2))
CONTIGUOUS_SEQUENCES = 16
# Hours that a run may take while another size or kind of sequence takes fewer.
MOST_HOURS, MOST_HOURS_ON_CPU = 48.0, 12.0
# Tokens that keep a GPU or a CPU busy in a forward pass.
BUSY_TOKENS, BUSY_TOKENS_ON_CPU = 8192, 2048
# More than any tokenizer's of English or code, so that text is rather counted short.
BYTES_PER_TOKEN = 5
# Maximum rates by parameters: the demo's and that of recipes/smollm2_135m_32k.yaml, which fall, and LongLoRA's.
RATES = ((20e6, 2.5e-3), (500e6, 5e-4))
LONGLORA_RATE = 2e-5
TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), keep_trailing_newline=True, trim_blocks=True)


@dataclass(frozen=True)
class RecipeRequest:
    """What a user wants: a model with a window of `target` tokens, tuned on `sources` (those of a recipe), or on the
    default corpus, on `gpu`.
    """

    model: str
    target: int
    gpu: Gpu
    sources: Sequence[Json] = ()

    def recipe(self) -> Recipe:
        """Return what the candidates change: LoRA on contiguous sequences, with nothing that saves memory."""
        tree = {
            "model": {"name": self.model},
            "context": {"target": self.target},
            "data": {"source": list(self.sources or (BUILTIN_CORPUS if self.model.startswith("builtin:") else CORPUS))},
            "training": {"activation_checkpointing": False},
            "hardware": {} if self.gpu.name == CPU else {"gpus": 1, "gpu": self.gpu.name},
        }
        return Recipe.model_validate(tree)


def choose(
    request: RecipeRequest, bytes_of: Callable[[Source], int | None], permissions: Permissions = NO_PERMISSIONS
) -> TrainingPlan:
    """Return the plan of the best candidate that fits; `bytes_of` says how much text a source has, None if that is not
    known. Raises PiLoraError if nothing fits, with the device that would do, and DataError if there is too little text.
    """
    first = request.recipe()
    target = target_of(first, permissions)
    if found := best(plan_recipe(first, target, request.gpu)):
        return _with_rate_and_batch(_with_size(found, _tokens_at_hand(first.data.source, bytes_of)))
    larger = (gpu for gpu in GPUS.values() if gpu.memory > request.gpu.memory and gpu.bfloat16 and gpu.name != CPU)
    enough = next((gpu.name for gpu in larger if best(plan_recipe(first, target, gpu))), None)
    advice = f"the smallest device that does: {enough}" if enough else "several GPUs may: recipes/paper has examples"
    raise PiLoraError(f"--gpu: {request.gpu.name}: holds no tuning of {request.model}, even QLoRA with PoSE; {advice}")


def best(first: TrainingPlan) -> TrainingPlan | None:
    """Return the plan of the best candidate with memory to spare that ends in time, else of the best with memory to
    spare; None if there is none.
    """
    roomy = [plan for _, plan in replanned(first, candidates(first)) if plan.roomy]
    return next(filter(_in_time, roomy), roomy[0] if roomy else None)


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
    checkpointed: Changes = {"training.activation_checkpointing": True}
    levers: list[Changes] = [{}, checkpointed, {**checkpointed, **MLP_IN_CHUNKS}]
    if first.gpu.name != CPU:
        levers += [{**checkpointed, **OFFLOAD}, {**checkpointed, **MLP_IN_CHUNKS, **OFFLOAD}]
    extra_modules = ["norms"]
    if first.target.shape.vocabulary <= LARGE_VOCABULARY:
        extra_modules.insert(0, "embeddings_and_norms")
    for extra, sequence, method, lever in itertools.product(extra_modules, sequences, ("lora", "qlora"), levers):
        yield {**_size(*SIZES[-1]), **sequence, "tuning.also_train": extra, "tuning.method": method, **lever}


def _size(steps: int, sequences: int) -> Changes:
    return {"training.steps": steps, "training.global_batch_size": sequences}


def _in_time(plan: TrainingPlan) -> bool:
    return (plan.hours or 0) <= (MOST_HOURS_ON_CPU if plan.gpu.name == CPU else MOST_HOURS)


def _with_size(plan: TrainingPlan, tokens: float) -> TrainingPlan:
    """Return a plan with as many steps and sequences as time and `tokens` of text allow; raise DataError if the text is
    too short for any.
    """
    sizes = SIZES_OF_LITTLE_TEXT if plan.tokens > tokens else SIZES
    most = CONTIGUOUS_SEQUENCES if plan.recipe.data.positions == "contiguous" else math.inf
    plans = [sized for _, sized in replanned(plan, (_size(*size) for size in sizes if size[1] <= most))]
    enough = [sized for sized in plans if sized.tokens <= tokens]
    if not enough:
        names = ", ".join(source.name for source in plan.recipe.data.source)
        takes = f"{plans[-1].recipe.training.steps} steps take {plans[-1].tokens:,}"
        raise DataError(f"--data: {names}: holds about {tokens:,.0f} tokens, and {takes}; give more text")
    return next(filter(_in_time, enough), enough[-1])


def _with_rate_and_batch(plan: TrainingPlan) -> TrainingPlan:
    """Return a plan with a rate for the model's size, and several sequences at once where they keep the device busy and
    there is room.
    """
    rate = next((rate for most, rate in RATES if plan.target.shape.parameters < most), None)
    tuned: Changes = {"training.learning_rate": rate, "training.schedule": "linear"} if rate else {}
    busy = BUSY_TOKENS_ON_CPU if plan.gpu.name == CPU else BUSY_TOKENS
    sequence = plan.tokens_per_step // plan.recipe.training.global_batch_size
    at_once = [number for number in (8, 4, 2) if number * sequence <= busy] + [1]
    changes = ({"training.per_device_batch_size": number, **tuned} for number in at_once)
    filled = [changed for _, changed in replanned(plan, changes)]
    return next((changed for changed in filled if changed.roomy), filled[-1])


def _tokens_at_hand(sources: Sequence[Source], bytes_of: Callable[[Source], int | None]) -> float:
    """Estimate how many tokens a mixture has before one of its sources is used up."""
    whole = sum(source.weight for source in sources)
    sizes = ((bytes_of(source), source.weight / whole) for source in sources)
    return min(math.inf if size is None else size / BYTES_PER_TOKEN / share for size, share in sizes)


def recipe_text(plan: TrainingPlan, file: Path) -> str:
    """Return the recipe of a plan as a file with comments, and the plan as its header."""
    text: str = TEMPLATES.get_template("recipe.yaml").render(
        recipe=plan.recipe,
        target=plan.target,
        on_cpu=plan.gpu.name == CPU,
        name=_in_a_line(plan.recipe.model.name),
        gpu=_in_a_line(plan.gpu.name),
        file=_in_a_line(shlex.quote(str(file))),
        lines=map(_in_a_line, plan_lines(plan)),
        longlora_rate=LONGLORA_RATE,
        short=short,
        sources=[source.model_dump(exclude_defaults=True) for source in plan.recipe.data.source],
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


def _in_a_line(text: str) -> str:
    return " ".join(text.split())
