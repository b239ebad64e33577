"""Write the tables of docs/families.md: what plans choose for the models that people have, on two GPUs.

python scripts/family_plans.py
"""

from dataclasses import replace
from itertools import product
from pathlib import Path

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
from pi_lora.scaling.config import window_of

PAGE = Path(__file__).parent.parent / "docs" / "families.md"
MODELS = (
    "meta-llama/Llama-3.1-8B-Instruct",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3.5-9B",
    "google/gemma-3-12b-it",
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
    "openai/gpt-oss-20b",
)
GPUS = ("4090", "H100")
TARGETS = (32768, 65536, 131072)
# A task whose examples are as long as the window. A plan reads no data.
EXAMPLES = Data.model_validate({"source": "tau/scrolls", "document": "input", "summary": "output"})
HEAD = ("tokens", "GPU", "scaling", "method", "sequences", "checkpointing", "MLP", "GiB", "host", "trained", "hours")


def text_of(model: str) -> str:
    """The size of a model and a table: a row for each target and GPU, the last target beyond the model's own window."""
    source = resolve_model(model, shipped=True)
    window = window_of(source.config)
    beyond = max(2 * window, TARGETS[-1])
    rows = []
    for target, gpu in product(sorted({*TARGETS, beyond}), GPUS):
        try:
            cells = cells_of(chosen_plan(source, target, gpu))
        except PiLoraError:
            cells = ["does not fit"]
        rows.append([short(target), gpu, *cells])
    size = f"{source.shape.parameters / 1e9:.1f} billion parameters without towers, a window of {window:,} tokens.\n"
    return "\n".join([size, *table(HEAD, rows), ""])


def chosen_plan(source: ModelSource, target: int, gpu: str) -> TrainingPlan:
    """The plan that `pi-lora new` chooses; a target within the model's own window is that of a task.

    Raise PiLoraError if no candidate fits.
    """
    window = window_of(source.config)
    first = first_plan(source, max(2 * window, target), find_gpu(gpu), sections={})
    recipe = first.recipe.changed(context=Context(target=target))
    if target <= window:
        recipe = recipe.changed(scaling="keep", data=EXAMPLES)
    return choose(replace(first, recipe=recipe))


def cells_of(plan: TrainingPlan) -> list[object]:
    """What a plan chooses and needs."""
    recipe = plan.recipe
    training = recipe.training
    return [
        recipe.scaling,
        recipe.tuning.method,
        f"{recipe.data.positions}, {short(plan.sequence_tokens)}",
        training.activation_checkpointing,
        training.mlp_chunk_tokens or "",
        round(plan.memory.peak / GIB, 1),
        round(plan.memory.host / GIB) or "",
        f"{plan.tokens / 1e6:.0f} M",
        round(plan.hours or 0),
    ]


if __name__ == "__main__":
    parser_of(__doc__).parse_args()
    for each in MODELS:
        write_block(PAGE, each, text_of(each))
