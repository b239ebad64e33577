"""Write the plans of docs/choosing.md and of the README: what fits two GPUs, for the models that people have.

python scripts/family_plans.py
"""

from dataclasses import replace
from itertools import product
from pathlib import Path

from transformers import AutoConfig

from arguments import parser_of
from pages import table, write_block
from pi_lora.errors import PiLoraError
from pi_lora.models.resolve import resolve_model
from pi_lora.models.source import ModelSource
from pi_lora.planning.gpus import GIB, find_gpu
from pi_lora.planning.new_recipe import choose, first_plan, short
from pi_lora.planning.training_plan import TrainingPlan
from pi_lora.recipe.data import Data
from pi_lora.recipe.schema import Context
from pi_lora.serving.commands import cache_bytes

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "choosing.md"
README = ROOT / "README.md"
MODELS = (
    "meta-llama/Llama-3.1-8B-Instruct",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3.5-9B",
    "google/gemma-3-12b-it",
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
    "openai/gpt-oss-20b",
)
# Models and targets of the README.
FIRST = {
    "HuggingFaceTB/SmolLM2-1.7B": 32768,
    "Qwen/Qwen3-8B": 131072,
    "meta-llama/Llama-3.1-8B-Instruct": 262144,
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": 262144,
}
GPUS = ("4090", "H100")
TARGETS = (32768, 131072)
# Windows that are served, in tokens, and the bytes of a number.
SERVED = (32768, 65536, 131072)
BFLOAT16 = 2
# A task whose examples are as long as the window. A plan reads no data.
EXAMPLES = Data.model_validate({"source": "tau/scrolls", "document": "input", "summary": "output"})
# Columns of the README.
FIRST_COLUMNS = ("method", "GiB", "hours")


def families() -> str:
    """A row for each model, target and GPU, the last target beyond the model's own window; then what does not fit."""
    rows = []
    too_large: dict[str, list[str]] = {gpu: [] for gpu in GPUS}
    for model in MODELS:
        source = resolve_model(model, shipped=True)
        name = model.partition("/")[2]
        beyond = max(2 * source.window, TARGETS[-1])
        for target, gpu in product(sorted({*TARGETS, beyond}), GPUS):
            try:
                cells = cells_of(chosen_plan(source, target, gpu))
            except PiLoraError:
                too_large[gpu].append(f"{name} {short(target)}")
            else:
                rows.append([name, short(target), gpu, *cells.values()])
    left = [f"Does not fit the {gpu} with any setting: {', '.join(names)}." for gpu, names in too_large.items()]
    return "\n".join([*table(("model", "tokens", "GPU", *cells), rows), "", *left, ""])


def serving() -> str:
    """A row for each model that is served in bfloat16: GiB of the weights, and with the KV cache of one sequence."""
    rows = []
    for model in MODELS[:-1]:  # gpt-oss is served in MXFP4
        source = resolve_model(model, shipped=True)
        config = AutoConfig.for_model(**source.base.config)
        weights = BFLOAT16 * source.shape.parameters
        cells = [weights, *(weights + cache_bytes(config, tokens, BFLOAT16) for tokens in SERVED)]
        rows.append([model.partition("/")[2], *(f"{size / GIB:.1f}" for size in cells)])
    heads = [f"and KV cache of {short(tokens)}" for tokens in SERVED]
    return "\n".join([*table(("model", "weights, GiB", *heads), rows), ""])


def first_plans() -> str:
    """The README's table: what `pi-lora new` chooses for a model a row, on the smaller and the larger GPU."""
    rows = []
    for model, target in FIRST.items():
        source = resolve_model(model, shipped=True)
        plans = [chosen_plan(source, target, gpu) for gpu in GPUS]
        cells = [cells_of(plan)[column] for plan in plans for column in FIRST_COLUMNS]
        windows = f"{short(plans[0].model.original)} to {short(target)}"
        rows.append([model, windows, *cells])
    on_gpus = [f"{gpu}: {head}" for gpu in GPUS for head in FIRST_COLUMNS]
    return "\n".join([*table(("model", "window", *on_gpus), rows), ""])


def chosen_plan(source: ModelSource, target: int, gpu: str) -> TrainingPlan:
    """The plan that `pi-lora new` chooses; a target within the model's own window is that of a task.

    Raise PiLoraError if no candidate fits.
    """
    window = source.rope.window
    first = first_plan(source, max(2 * window, target), find_gpu(gpu), sections={})
    recipe = first.recipe.changed(context=Context(target=target))
    if target <= window:
        recipe = recipe.changed(scaling="keep", data=EXAMPLES)
    return choose(replace(first, recipe=recipe))


def cells_of(plan: TrainingPlan) -> dict[str, object]:
    """What a plan chooses and needs."""
    recipe = plan.recipe
    training = recipe.training
    return {
        "scaling": recipe.scaling,
        "method": recipe.tuning.method,
        "sequences": f"{recipe.data.positions}, {short(plan.sequence_tokens)}",
        "checkpointing": training.activation_checkpointing,
        "MLP": training.mlp_chunk_tokens or "",
        "GiB": round(plan.memory.peak / GIB, 1),
        "host": round(plan.memory.host / GIB) or "",
        "trained": f"{plan.tokens / 1e6:.0f} M",
        "hours": f"{plan.hours or 0:.1f}",
    }


# Page, name of the block in it, and what writes its table.
BLOCKS = ((PAGE, "families", families), (PAGE, "serving", serving), (README, "plans", first_plans))

if __name__ == "__main__":
    parser_of(__doc__).parse_args()
    for page, block, write in BLOCKS:
        write_block(page, block, write())
