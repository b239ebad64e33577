"""Plans against figures that others measured, within 20 %, and against those measured on a CPU here."""

import json
from functools import cache
from pathlib import Path

import pytest
from families import on_meta, plan_of
from transformers import AutoConfig

from pi_lora.models.resolve import resolve_model, shipped_folder
from pi_lora.models.shape import Shape, shape_of
from pi_lora.planning.gpus import CPU, GIB, GPUS
from pi_lora.planning.memory import DeviceMemory, memory
from pi_lora.recipe.files import load_recipe
from pi_lora.recipe.schema import Recipe

QWEN_8B, QWEN_SMALL, LLAMA = "Qwen/Qwen3-8B-Base", "Qwen/Qwen3-0.6B-Base", "huggyllama/llama-7b"
QWEN_4B = "Qwen/Qwen3-4B"


def one_sequence(name: str, target: int, gpus: int, offload: bool = False) -> Recipe:
    """Every weight tuned on one sequence a step, which all GPUs share."""
    return Recipe.model_validate(
        {
            "model": {"name": name},
            "context": {"target": target},
            "tuning": {"method": "full"},
            "data": {"source": "text"},
            "training": {"global_batch_size": 1, "steps": 1},
            "hardware": {"gpus": gpus, "context_parallel": gpus, "offload_activations": offload},
        }
    )


@cache
def shape(name: str) -> Shape:
    if name != QWEN_4B:
        return resolve_model(name, shipped=True).shape
    # No recipe names it; its published size is 4.0 B parameters.
    small = json.loads((shipped_folder("Qwen/Qwen3-1.7B-Base") / "config.json").read_text())
    sizes = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
    return shape_of(on_meta(AutoConfig.for_model(**{**small, **sizes})))


def planned(name: str, recipe: Recipe, dtype: str | None) -> DeviceMemory:
    """In a dtype of weights that train which no recipe may choose."""
    model = recipe.model.model_copy(update={"dtype": dtype})
    return memory(shape(name), recipe.model_copy(update={"model": model}), original=32768, gpu=GPUS["H100"])


@pytest.mark.parametrize(
    ("name", "target", "gpus", "offload", "dtype", "expected"),
    [
        # TRL's long-context guide (docs/source/long_context_training.md, September 2026), in GiB: 22 GB of model and
        # optimizer are 2 + 4 bytes for each of 4.02 B parameters. One GPU: bfloat16 weights that train. Several: FSDP2,
        # which makes them float32.
        pytest.param(QWEN_4B, 98_304, 1, False, "bfloat16", 59.9 * GIB, id="Qwen3-4B, 96k"),
        pytest.param(QWEN_4B, 98_304, 1, True, "bfloat16", 48.8 * GIB, id="Qwen3-4B, 96k, offloaded"),
        pytest.param(QWEN_4B, 1_048_576, 4, True, None, 63.6 * GIB, id="Qwen3-4B, 1M on 4 GPUs"),
        pytest.param(QWEN_8B, 1_048_576, 8, True, None, 56.2 * GIB, id="Qwen3-8B, 1M on 8 GPUs"),
        # accelerate pull request 4175, in GB of 1e9 bytes (its 7.5 GB are 28 x 131072 x 1024 x 2 bytes).
        pytest.param(QWEN_SMALL, 1_048_576, 8, False, None, 27.9e9, id="Qwen3-0.6B, 1M on 8 GPUs"),
        pytest.param(QWEN_SMALL, 1_048_576, 8, True, None, 20.8e9, id="Qwen3-0.6B, 1M on 8, offloaded"),
    ],
)
def test_planned_memory_is_near_published_measurements(
    name: str, target: int, gpus: int, offload: bool, dtype: str | None, expected: float
) -> None:
    recipe = one_sequence("any", target, gpus, offload)
    assert planned(name, recipe, dtype).highest == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize(
    ("name", "tokens", "gpu", "seconds"),
    [
        # TRL's guide: 380 s a step of one sequence. EasyContext's README: 10,240 tokens/s.
        (QWEN_8B, 1_048_576, "H100", 380.0),
        (LLAMA, 65_536, "A100-80", 65_536 / 10_240),
    ],
)
def test_planned_hours_are_near_published_measurements(name: str, tokens: int, gpu: str, seconds: float) -> None:
    assert plan_of(one_sequence(name, tokens, 8), gpu).hours * 3600 == pytest.approx(seconds, rel=0.2)


@pytest.mark.parametrize(
    ("tokens", "changes", "measured"),
    [  # the peak of the whole process: rows of benchmarks/plan_memory.py that need no model
        (512, (), 2_553_753_600),
        (1024, ("training.activation_checkpointing=true",), 2_467_463_168),
        (512, ("training.activation_checkpointing=true", "tuning.method=qlora"), 1_465_163_776),
        (512, ("training.activation_checkpointing=true", "tuning.method=full"), 3_165_650_944),
    ],
)
def test_planned_memory_is_near_measurements_on_a_cpu(tokens: int, changes: tuple[str, ...], measured: int) -> None:
    fixed = (f"data.sequence_tokens={tokens}", "training.global_batch_size=1", "training.precision=float32")
    path = Path(__file__).parents[2] / "recipes" / "smollm2_135m_16k_cpu.yaml"
    plan = plan_of(load_recipe(path, (*fixed, *changes)).recipe, CPU)
    assert plan.memory.peak == pytest.approx(measured, rel=0.1)


def test_planned_memory_of_the_demo_is_near_its_measurement() -> None:
    run = Path(__file__).parents[2] / "adapters" / "demo"
    measured = json.loads((run / "run.json").read_text())["peak_memory"]
    assert plan_of(load_recipe(run / "recipe.yaml").recipe).memory.peak == pytest.approx(measured, rel=0.15)
