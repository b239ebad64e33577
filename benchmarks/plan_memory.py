"""The memory that `pi-lora plan` computes, beside that of a training step on fake tensors (simulate.py).

    python benchmarks/plan_memory.py [--simulate]

There are rows of trainings on this CPU, of the shipped recipes on the first of their devices, and of the recipes that
`pi-lora new` chooses for models and GPUs of several sizes. Each training on the CPU is a process of its own that tunes
two steps; its peak is that of the whole process (resident), libraries included, as training.jsonl has it. The plan is
that for this machine, as `pi-lora train` makes it. Rows of 8 layers are of a random model with SmolLM2's widths, so
that none takes two minutes. Rows of Gemma 3 need the 270M model as models/gemma3_270m, and are left out without it. A
row is kept in benchmarks/results/plan_memory.json when it is done. --simulate measures nothing.
"""

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import record  # first: it finds scripts/
from family_plans import MODELS, chosen_plan
from machine import machine
from pi_lora.errors import PiLoraError
from pi_lora.models.resolve import resolve_for_training, resolve_model
from pi_lora.planning.gpus import CPU, Gpu, device_here, find_gpu
from pi_lora.planning.training_plan import plan_training
from pi_lora.recipe.files import dump_recipe, load_recipe, recipe_paths, shipped_recipes
from pi_lora.recipe.schema import Recipe
from record import parser_of

TINY = ("model.name=builtin:tiny", "context.original=256", "context.target=4096")
GEMMA_FOLDER = "models/gemma3_270m"
GEMMA = (f"model.name={GEMMA_FOLDER}", "context.target=65536", "training.steps=1", "training.warmup_steps=0")
# The vocabulary of a random model that has sinks, experts and sliding windows.
GPT_OSS = 32768
CHECKPOINTING = "training.activation_checkpointing=true"
# Tokens of a sequence, vocabulary of a random model (else the model is the one that is named), and other changes.
ROWS: dict[str, tuple[int, int | None, tuple[str, ...]]] = {
    "SmolLM2, LoRA": (512, None, ()),
    "SmolLM2, LoRA, checkpointing": (1024, None, (CHECKPOINTING,)),
    "SmolLM2, QLoRA, checkpointing": (512, None, ("tuning.method=qlora", CHECKPOINTING)),
    "SmolLM2, all weights, checkpointing": (512, None, ("tuning.method=full", CHECKPOINTING)),
    "LoRA, checkpointing": (2048, 49152, (CHECKPOINTING,)),
    "LoRA, chunked MLP": (2048, 49152, (CHECKPOINTING, "training.mlp_chunk_tokens=256")),
    "LoRA, large vocabulary": (1024, 128256, ()),
    "LoRA, embeddings and norms": (1024, 49152, ("tuning.modules_to_save=embeddings_and_norms",)),
    "LoRA, both bfloat16": (1024, 49152, ("model.dtype=bfloat16", "training.precision=bfloat16")),
    "QLoRA": (1024, 49152, ("tuning.method=qlora",)),
    "all weights": (1024, 49152, ("tuning.method=full",)),
    "built-in model, LoRA": (4096, None, (*TINY, "data.positions=contiguous")),
    "Gemma 3, LoRA": (2048, None, GEMMA),
    "Gemma 3, LoRA, checkpointing": (8192, None, (*GEMMA, CHECKPOINTING)),
    "Gemma 3, LoRA, checkpointing, sdpa": (8192, None, (*GEMMA, CHECKPOINTING, "model.attention=sdpa")),
    "gpt-oss, LoRA": (4096, GPT_OSS, ()),
}
# The GPUs and models whose chosen recipes are simulated: some small models, and those of docs/choosing.md.
SMALL_MODELS = ("HuggingFaceTB/SmolLM2-1.7B", "Qwen/Qwen3-1.7B-Base", "mistralai/Mistral-7B-v0.3")
GPUS = ("12GB", "4090", "A6000", "H100")
# What is not simulated.
LEFT_OUT = ("hardware.context_parallel=1", "hardware.offload_activations=false", "evaluation.every=null")
ONE_DEVICE = ("hardware.gpus=null", "hardware.machines=1")
MODEL = "models/smollm2_135m_instruct"
DATA = "builtin:stdlib"
RECIPE = """# Two steps on a CPU.
model: {{name: {model}}}
context: {{target: 16384}}
tuning: {{method: lora, rank: 16, modules_to_save: nothing}}
data: {{source: "{data}", positions: pose}}
training: {{steps: 2, warmup_steps: 1, global_batch_size: 1, activation_checkpointing: false, log_every: 1}}
"""


def random_model(folder: Path, vocabulary: int) -> None:
    """Write a model of eight layers with SmolLM2's widths; the tokenizer is the built-in model's."""
    from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, PreTrainedConfig

    rope = {"rope_type": "default", "rope_theta": 100000.0}
    config: PreTrainedConfig = LlamaConfig(
        vocab_size=vocabulary,
        num_hidden_layers=8,
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_parameters=rope,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    if vocabulary == GPT_OSS:
        config = GptOssConfig(
            vocab_size=vocabulary,
            num_hidden_layers=4,
            hidden_size=512,
            intermediate_size=512,
            num_attention_heads=16,
            num_key_value_heads=2,
            head_dim=64,
            num_local_experts=8,
            num_experts_per_tok=2,
            sliding_window=128,
            max_position_embeddings=8192,
            rope_parameters=rope,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=0,
        )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    record.add_tokenizer(folder)


def trainings(folder: Path) -> Iterator[tuple[str, Recipe]]:
    """Yield the names and recipes of the trainings that this machine has models for."""
    file = folder / "two_steps.yaml"
    for name, (tokens, vocabulary, changes) in ROWS.items():
        if GEMMA[0] in changes and not Path(GEMMA_FOLDER).exists():
            continue
        model = Path(MODEL)
        if vocabulary:
            model = folder / str(vocabulary)
            if not model.exists():
                random_model(model, vocabulary)
        file.write_text(RECIPE.format(model=model, data=DATA), encoding="utf-8")
        if "data.positions=contiguous" not in changes:
            changes = (f"data.sequence_tokens={tokens}", *changes)
        yield name, load_recipe(file, changes).recipe


def shipped() -> Iterator[tuple[str, Recipe, Gpu]]:
    """Yield the shipped recipes on their first device, without measurements between steps."""
    for file in recipe_paths(shipped_recipes()):
        recipe = load_recipe(file, LEFT_OUT).recipe
        if not recipe.sharded:
            recipe = load_recipe(file, (*LEFT_OUT, *ONE_DEVICE)).recipe
        name = file.relative_to(shipped_recipes()).with_suffix("")
        yield str(name), recipe, find_gpu(recipe.hardware.gpu or CPU)


def chosen() -> Iterator[tuple[str, Recipe, Gpu]]:
    """Yield the recipes that `pi-lora new` chooses, where one fits."""
    for model, gpu_name in product((*SMALL_MODELS, *MODELS), GPUS):
        source = resolve_model(model, shipped=True)
        with suppress(PiLoraError):  # no candidate fits
            plan = chosen_plan(source, 2 * source.window, gpu_name)
            yield f"{model}, {gpu_name}", plan.recipe, plan.gpu


def measured(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """The peak of the process that trains, and the machine."""
    file = folder / "measured.yaml"
    file.write_text(f"# Two steps.\n{dump_recipe(recipe)}", encoding="utf-8")
    return {"measured": record.training_log(str(file), "--force")[-1]["peak_memory"], "machine": machine()}


def simulated(recipe: Recipe, gpu: Gpu) -> dict[str, Any]:
    """The tensors and operations of a step, planned and simulated."""
    from transformers import AutoConfig

    from simulate import simulate

    source = resolve_for_training(recipe, shipped=True)
    plan = plan_training(recipe, source, gpu)
    config = AutoConfig.for_model(**source.config)
    step = simulate(recipe, config, source.original, gpu)
    training = recipe.training
    sequences = training.steps * training.global_batch_size / training.per_device_batch_size
    return {
        "method": recipe.tuning.method,
        "device": f"{recipe.shards} x {gpu.name}" if recipe.shards > 1 else gpu.name,
        "tokens": plan.sequence_tokens,
        "planned": plan.memory.peak,
        "planned_tensors": plan.memory.highest,
        "simulated_tensors": step.peak,
        "planned_flops": sum(plan.flops) / sequences,
        "simulated_flops": step.flops,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--simulate", action="store_true", help="measure nothing")
    only_simulate = parser.parse_args().simulate
    result = {"rows": {}, **record.read("plan_memory"), "recipes": {}, "chosen": {}}
    here = device_here()
    if only_simulate:  # the rows were measured on a CPU with instructions for bfloat16
        here = replace(here, bfloat16=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, recipe in trainings(folder):
            row = result["rows"].setdefault(name, {})
            row |= simulated(recipe, here)
            if not only_simulate:
                row |= measured(recipe, folder)
            keep(result, name)
    for section, cases in {"recipes": shipped(), "chosen": chosen()}.items():
        for name, recipe, gpu in cases:
            result[section][name] = simulated(recipe, gpu)
            keep(result, name)


def keep(result: dict[str, Any], name: str) -> None:
    """Write the rows that are done."""
    record.write("plan_memory", result)
    print(name, flush=True)


if __name__ == "__main__":
    main()
