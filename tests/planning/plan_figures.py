"""Plans and new recipes in numbers, as plan_figures.jsonl keeps them: a change of any of them is seen, and is meant.

`python tests/planning/plan_figures.py` writes the file again.
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

from families import plan_of, small_shape  # noqa: E402

from pi_lora.models.resolve import resolve_model  # noqa: E402
from pi_lora.planning.advice import advice  # noqa: E402
from pi_lora.planning.gpus import CPU, find_gpu  # noqa: E402
from pi_lora.planning.new_recipe import choose, first_plan  # noqa: E402
from pi_lora.planning.training_plan import PlannedModel, TrainingPlan  # noqa: E402
from pi_lora.recipe.files import load_recipe, recipe_paths, shipped_recipes  # noqa: E402
from pi_lora.recipe.schema import Recipe  # noqa: E402

FILE = HERE / "plan_figures.jsonl"
KINDS = ("gemma2", "mixtral", "qwen3", "phi")
LLAMA = "huggyllama/llama-7b"
Figures = dict[str, Any]
Sections = dict[str, dict[str, Any]]

# Changes of one recipe, each of which takes another way through the plan.
CHANGES: dict[str, Sections] = {
    "qlora": {"tuning": {"method": "qlora"}},
    "full": {"tuning": {"method": "full"}},
    "dropout": {"tuning": {"dropout": 0.1}},
    "rank 64 on attention": {"tuning": {"rank": 64, "target_modules": "attention", "modules_to_save": "nothing"}},
    "float32 weights": {"model": {"dtype": "float32"}},
    "float32 weights, half of the layers kept": {
        "model": {"dtype": "float32"},
        "training": {"activation_checkpointing": 2},
    },
    "float32": {"model": {"dtype": "float32"}, "training": {"precision": "float32"}},
    "every activation kept": {"training": {"activation_checkpointing": False}},
    "selective checkpointing": {"training": {"activation_checkpointing": "selective"}},
    "chunked MLP": {"training": {"mlp_chunk_tokens": 1024}},
    "several sequences": {"training": {"per_device_batch_size": 4, "global_batch_size": 4}},
    "paged optimizer": {"training": {"optimizer": "paged_adamw_8bit"}},
    "offloaded": {"hardware": {"offload_activations": True}},
    "full, 8 GPUs": {"tuning": {"method": "full"}, "hardware": {"gpus": 8}},
    "8 GPUs on 2 machines": {"hardware": {"gpus": 8, "machines": 2}},
    "QLoRA, 2 GPUs": {"tuning": {"method": "qlora"}, "hardware": {"gpus": 2}},
    "context parallel": {"hardware": {"gpus": 8, "context_parallel": 4}},
    "PoSE": {"data": {"positions": "pose", "sequence_tokens": 1024}},
    "eager": {"model": {"attention": "eager"}},
    "sdpa": {"model": {"attention": "sdpa"}},
    "measured while training": {"evaluation": {"every": 10, "perplexity": {"data": "pg19"}}},
}


def recipe_with(sections: Sections, gpus: int | None = 1) -> Recipe:
    tree: dict[str, Any] = {
        "model": {"name": LLAMA},
        "context": {"target": 8192},
        "data": {"source": "text"},
        "training": {"steps": 30, "global_batch_size": 16},
        "hardware": {"gpus": gpus} if gpus else {},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return Recipe.model_validate(tree)


def of_plan(plan: TrainingPlan) -> Figures:
    figures = plan.as_json()
    return {**figures, "trained": plan.trained, "advice": None if plan.fits else advice(plan)}


def of_small(kind: str, recipe: Recipe, gpu: str) -> Figures:
    return of_plan(TrainingPlan(recipe, PlannedModel(small_shape(kind), 2048), find_gpu(gpu)))


def of_new(model: str, target: int, gpu: str) -> Figures:
    plan = choose(first_plan(resolve_model(model, shipped=True), target, find_gpu(gpu), {}))
    return plan.recipe.model_dump(mode="json", exclude_defaults=True)


def cases() -> Iterator[tuple[str, Callable[[], Figures]]]:
    """The name of each case, and what computes its figures."""
    for path in recipe_paths(shipped_recipes()):
        name = path.relative_to(shipped_recipes()).as_posix()
        yield name, partial(lambda path: of_plan(plan_of(load_recipe(path).recipe)), path)
    for (name, sections), gpu in product(CHANGES.items(), ("A100-80", "T4")):
        yield f"{name} on {gpu}", partial(lambda recipe, gpu: of_plan(plan_of(recipe, gpu)), recipe_with(sections), gpu)
    for kind, attention, gpu in product(KINDS, ("auto", "eager", "sdpa"), ("H100", CPU)):
        recipe = recipe_with({"model": {"attention": attention}}, gpus=None if gpu == CPU else 1)
        yield f"a small {kind} with {attention} on {gpu}", partial(of_small, kind, recipe, gpu)
    for kept, attention, gpu in product((False, 2), ("auto", "eager", "sdpa"), ("H100", CPU)):
        sections = {"model": {"attention": attention}, "training": {"activation_checkpointing": kept}}
        recipe = recipe_with(sections, gpus=None if gpu == CPU else 1)
        yield f"a small gemma2 with {attention} on {gpu}, {kept} checkpointed", partial(of_small, "gemma2", recipe, gpu)
    for model, target, gpu in (
        (LLAMA, 16384, "A100-40"),
        (LLAMA, 100_000, "H200"),
        ("meta-llama/Meta-Llama-3-8B", 65536, "4090"),
        ("mistralai/Mistral-7B-v0.3", 131072, "12GB"),
        ("Qwen/Qwen3-0.6B-Base", 131072, "H100"),
        ("HuggingFaceTB/SmolLM2-1.7B", 16384, CPU),
        ("builtin:tiny", 1024, CPU),
    ):
        yield f"new recipe of {model} for {target} on {gpu}", partial(of_new, model, target, gpu)


if __name__ == "__main__":
    lines = [json.dumps([name, compute()]) + "\n" for name, compute in cases()]
    FILE.write_text("".join(lines))
