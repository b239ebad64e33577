"""Plans: what follows from what, what to change when it does not fit, and the plan command."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from families import OTHERS, SMALL, on_meta, plan_of, small_config, small_shape
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, MixtralConfig

from conftest import plan_of as plan_on
from conftest import refused
from pi_lora.errors import ModelError, PiLoraError
from pi_lora.model_ref import ModelRef
from pi_lora.models.files import BUILTIN_FOLDER
from pi_lora.models.resolve import SHIPPED_CONFIGS, resolve_model, shipped_folder
from pi_lora.models.shape import Shape, shape_of
from pi_lora.planning.advice import plan_lines
from pi_lora.planning.flops import flops_of_training, linear_adapter_parameters
from pi_lora.planning.gpus import CPU, GIB, GPUS, MIB, device_for, find_gpu, gpu_of_device
from pi_lora.planning.layer import layer_bytes
from pi_lora.planning.training_plan import PlannedModel, TrainingPlan
from pi_lora.recipe.schema import Recipe, Training, Tuning
from pi_lora.scaling.config import full_attention_rope
from pi_lora.scaling.extension import Extension
from pi_lora.scaling.rope import Rope

LLAMA = "huggyllama/llama-7b"
OPTIMIZERS = ("adamw", "paged_adamw_8bit")
# One sequence, and nothing is computed twice.
ONCE = Training(steps=1, global_batch_size=1, activation_checkpointing=False)


def recipe(name: str = LLAMA, target: int = 8192, **sections: Any) -> Recipe:
    tree = {"model": {"name": name}, "context": {"target": target}, "data": {"source": "text"}} | sections
    return Recipe.model_validate(tree)


def test_flops_are_six_a_parameter_and_token_and_four_where_the_base_is_frozen() -> None:
    shape = resolve_model(LLAMA, shipped=True).shape
    products = shape.linear_weights + shape.embedding
    full = flops_of_training(shape, Tuning(method="full"), ONCE, 1, loss_in_place=True)
    assert full.forward + full.backward == pytest.approx(6 * products, rel=1e-3)
    lora = flops_of_training(shape, Tuning(rank=1), ONCE, 1, loss_in_place=True)
    assert lora.forward + lora.backward == pytest.approx(4 * products, rel=1e-3)


def test_recomputation_is_the_forward_pass_of_checkpointed_layers_and_of_trls_loss() -> None:
    shape = resolve_model(LLAMA, shipped=True).shape
    plain = flops_of_training(shape, Tuning(), ONCE, 4096, loss_in_place=True)
    head = 2.0 * shape.embedding * 4096
    layers = plain.forward - head
    attention = 4 * shape.layers * shape.queries * 4096 * 4096 / 2
    assert plain.recomputation == 0
    assert flops_of_training(shape, Tuning(), ONCE, 4096, loss_in_place=False).recomputation == head
    for checkpointing, expected in ((True, layers), (4, layers / 4), ("selective", layers - attention)):
        training = Training(steps=5, global_batch_size=3, activation_checkpointing=checkpointing)
        flops = flops_of_training(shape, Tuning(), training, 4096, loss_in_place=True)
        assert flops.recomputation == pytest.approx(15 * expected)
        assert flops.forward == pytest.approx(15 * plain.forward)


def test_experts_are_as_wide_as_those_that_a_token_meets() -> None:
    """Three matrices each, of which a token is multiplied with those of two experts."""
    config = MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2)
    assert shape_of(on_meta(config)).intermediate == 2 * config.intermediate_size


def test_attention_costs_its_causal_half_and_a_window_less() -> None:
    shapes = [shape_of(on_meta(small_config("mistral", sliding_window=window))) for window in (None, 4096)]

    def saved(attention: str) -> float:
        full, sliding = (
            flops_of_training(shape, Tuning(), ONCE, 8192, loss_in_place=True, attention=attention).forward
            for shape in shapes
        )
        return full - sliding

    assert saved("flash_attention_2") == pytest.approx(3 * 4 * shapes[0].queries * 4096 * 4096 / 2)
    # Blocks of 256 queries meet 17 blocks of keys, the first ones fewer.
    pairs = 256 * 256 * sum(min(block + 1, 17) for block in range(32))
    assert saved("auto") == pytest.approx(3 * 4 * shapes[0].queries * (8192 * 8192 / 2 - pairs))


def test_kernels_with_masks_compute_all_pairs_of_tokens() -> None:
    windows = shape_of(on_meta(small_config("mistral", sliding_window=4096)))
    plain = shape_of(on_meta(small_config("mistral", sliding_window=None)))

    def forward(shape: Shape, attention: str, tokens: int = 8192) -> float:
        return flops_of_training(shape, Tuning(), ONCE, tokens, loss_in_place=True, attention=attention).forward

    causal_half = 3 * 4 * plain.queries * 8192 * 8192 / 2
    for with_mask in (forward(windows, "sdpa"), forward(windows, "eager"), forward(plain, "eager")):
        assert with_mask - forward(plain, "sdpa") == pytest.approx(causal_half)
    assert forward(windows, "sdpa", 4096) == forward(plain, "auto", 4096)


@pytest.mark.parametrize("kind", OTHERS)
def test_flops_equal_those_that_torch_counts(kind: str) -> None:
    """On families that no figure was made for, with experts among them; `eager` attention is not causal."""
    tokens = 64
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(small_config(kind), dtype=torch.float32, **eager)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    shape = small_shape(kind)
    forward = flops_of_training(shape, Tuning(method="full"), ONCE, tokens, loss_in_place=True).forward
    other_half = 4 * shape.layers * shape.queries * tokens * tokens / 2
    assert forward + other_half == pytest.approx(counter.get_total_flops(), rel=0.05)


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
@pytest.mark.parametrize("kind", OTHERS)
def test_any_architecture_has_a_plan(kind: str, method: str) -> None:
    plan = TrainingPlan(recipe(target=512, tuning={"method": method}), PlannedModel(small_shape(kind), 128), GPUS[CPU])
    assert 0 < plan.trained <= plan.model.shape.parameters
    assert all(size > 0 for size in plan.memory.components.values())
    assert plan.hours > 0


lengths = st.sampled_from([4096, 8192, 16384, 65536, 131072])
methods = st.sampled_from(["full", "lora", "qlora"])
counts = st.sampled_from([1, 2, 4, 8])


def planned(target: int, method: str, gpus: int = 1, training: Any = None, **hardware: Any) -> TrainingPlan:
    sections = {"tuning": {"method": method}, "training": training or {}, "hardware": {"gpus": gpus, **hardware}}
    return plan_of(recipe(target=target, **sections), "H200")


@given(lengths, methods, counts)
def test_a_longer_target_never_costs_less(target: int, method: str, gpus: int) -> None:
    short, long = (planned(each, method, gpus) for each in (target, 2 * target))
    assert long.memory.peak > short.memory.peak
    assert long.hours > 2 * short.hours


@given(lengths, methods, st.sampled_from([2, 4, 8]))
def test_twice_the_gpus_never_need_more_memory_each(target: int, method: str, gpus: int) -> None:
    """From two on: a second copy of a quantized model brings the buckets that its gradients are exchanged in."""
    few, many = (planned(target, method, each) for each in (gpus, 2 * gpus))
    assert many.memory.peak <= few.memory.peak
    assert many.hours == pytest.approx(few.hours / 2)


@given(lengths, methods)
def test_offloading_and_context_parallelism_save_activations(target: int, method: str) -> None:
    plain = planned(target, method, 8)
    assert planned(target, method, 8, offload_activations=True).memory.peak < plain.memory.peak
    assert planned(target, method, 8, context_parallel=8).memory.peak < plain.memory.peak


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_kept_activations_take_memory_and_save_recomputation(method: str) -> None:
    levers = (True, "selective", 2, 4, False)
    plans = [planned(16384, method, training={"activation_checkpointing": each}) for each in levers]
    peaks = [plan.memory.components["activations"] for plan in plans]
    assert peaks == sorted(peaks)
    everything, selective, half, quarter, head = (plan.flops.recomputation for plan in plans)
    assert (half - head, quarter - head) == pytest.approx(((everything - head) / 2, (everything - head) / 4))
    assert head < selective < everything


def test_an_eight_bit_optimizer_saves_three_quarters_but_of_embeddings() -> None:
    """transformers keeps their moments in 32 bits."""

    def moments(optimizer: str, extra: str) -> int:
        sections = {"training": {"optimizer": optimizer}, "tuning": {"modules_to_save": extra}}
        return plan_of(recipe(hardware={"gpus": 1}, **sections), "H100").memory.components["optimizer"]

    assert moments("paged_adamw_8bit", "nothing") / moments("adamw", "nothing") == pytest.approx(0.25, abs=0.01)
    of_embeddings = (
        moments(optimizer, "embeddings_and_norms") - moments(optimizer, "norms") for optimizer in OPTIMIZERS
    )
    assert next(of_embeddings) == next(of_embeddings)


def test_pinned_memory_is_rounded_up_and_has_to_fit_the_host() -> None:
    """32 inputs of 2 x 347k x 4096 bytes, 2.6 GiB each, take 4 GiB each."""
    plan = plan_of(
        recipe(target=347_136, tuning={"method": "qlora"}, hardware={"gpus": 1, "offload_activations": True}), "H200"
    )
    assert plan.memory.host == 32 * 4 * GIB
    assert plan.fits
    assert "128 GiB" in plan_lines(plan)[1]
    small_host = replace(plan, gpu=replace(plan.gpu, host=127 * GIB))
    assert not small_host.fits
    assert not small_host.has_room()
    assert changes_in(plan_lines(small_host)[-1]) == ["data.positions=pose"]


def test_a_window_that_contradicts_the_config_is_reported() -> None:
    asked = recipe(context={"original": 1024, "target": 8192}, hardware={"gpus": 1})
    said = plan_lines(plan_of(asked, "H100"))[-1]
    assert said.startswith("context.original: 1024")
    assert "2048" in said


@pytest.mark.parametrize(
    ("name", "mebibytes", "known"),
    [
        ("Tesla T4", 15095, "T4"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15939, "16GB"),
        ("NVIDIA RTX 6000 Ada Generation", 48519, "6000-Ada"),
        ("NVIDIA A100-PCIE-40GB", 40337, "A100-40"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4864, "5GB"),
        ("NVIDIA H100 PCIe", 81105, "H100-PCIe"),
        ("NVIDIA H100 NVL", 95320, "99GB"),
        ("AMD Instinct MI300X", 196592, "206GB"),
    ],
)
def test_a_device_has_its_memory_and_a_name_for_recipes(name: str, mebibytes: int, known: str) -> None:
    device = gpu_of_device(name, mebibytes * MIB)
    assert (device.name, device.peak) == (known, find_gpu(known).peak)
    assert device.memory == pytest.approx(mebibytes * MIB, rel=0.03)


def changes_in(line: str) -> list[str]:
    """The overrides that a line advises."""
    return re.findall(r"[a-z]+\.\w+=\S+", line)


POSE = {"source": "text", "positions": "pose"}


@pytest.mark.parametrize(
    ("sections", "gpu", "change"),
    [
        ({"target": 163840}, "H100", "training.mlp_chunk_tokens=4096 hardware.offload_activations=true"),
        ({"target": 65536}, "A10G", "tuning.method=qlora"),
        ({"target": 1_048_576}, "A100-40", "tuning.method=qlora data.positions=pose"),
        # PoSE trains on 2048 tokens of the 262144 that are measured.
        (
            {
                "target": 262144,
                "tuning": {"method": "qlora"},
                "data": POSE,
                "evaluation": {"every": 100, "perplexity": {"data": "pg19", "truncate": 262144}},
            },
            "A10G",
            "evaluation.every=null",
        ),
    ],
)
def test_the_cheapest_change_that_fits_is_suggested(sections: dict[str, Any], gpu: str, change: str) -> None:
    plan = plan_of(recipe(**{"hardware": {"gpus": 1}, **sections}), gpu)
    assert not plan.fits
    assert gpu in plan_lines(plan)[-1]
    tree = plan.recipe.model_dump(mode="json")
    overrides = changes_in(plan_lines(plan)[-1])
    assert set(change.split()) <= set(overrides)
    for override in overrides:
        key, _, value = override.partition("=")
        section, _, name = key.partition(".")
        tree[section][name] = yaml.safe_load(value)
    assert plan_of(Recipe.model_validate(tree), gpu).fits


def test_a_named_device_is_planned_for() -> None:
    """A device without a peak has no hours."""
    # YAML reads 4090 as a number.
    asked = recipe(hardware={"gpus": 1, "gpu": 4090}, tuning={"method": "qlora"})
    assert device_for(asked) is GPUS["4090"]
    assert device_for(asked, "h100") is GPUS["H100"]
    plan = plan_of(asked, "48GB")
    assert plan.memory == plan_of(plan.recipe, "A6000").memory
    assert plan.hours is plan.as_json()["hours"] is None
    assert "no hours" in str(plan)


@pytest.mark.parametrize(
    ("hardware", "asked", "where", "names"),
    [
        ({"gpus": 1, "gpu": "B52"}, "", "hardware.gpu: B52: ", ("T4", "A10G")),
        ({"gpus": 1}, "4.8GB", "--gpu: 4.8GB: ", ("T4", "A10G", "48GB")),
        ({"gpus": 1}, "cpu", "--gpu: cpu: ", ("hardware.gpus=null",)),
    ],
)
def test_an_unknown_device_is_refused(hardware: dict[str, Any], asked: str, where: str, names: tuple[str, ...]) -> None:
    asking = recipe(hardware=hardware)
    with refused(PiLoraError, where, *names):
        plan_on(asking, device_for(asking, asked))


def test_a_device_without_bfloat16_computes_in_float16_or_float32() -> None:
    """The table's T4. In float32, what is not quantized takes twice as much, and so do activations, but for copies."""

    def components(gpu: str, precision: str) -> Mapping[str, int]:
        asked = recipe("Qwen/Qwen3-0.6B-Base", 40960, hardware={"gpus": 1}, training={"precision": precision})
        return plan_of(asked, gpu).memory.components

    new, old = components("A10G", "auto"), components("T4", "float32")
    assert components("T4", "auto") == new
    assert old["weights"] > 1.3 * new["weights"]
    assert old["activations"] > 1.7 * new["activations"] > components("T4", "bfloat16")["activations"]


@pytest.mark.parametrize(("method", "tokens", "gibibytes"), [("qlora", 16384, 15.4), ("lora", 32768, 32.1)])
def test_memory_of_a_7b_equals_a_calculation_by_hand(method: str, tokens: int, gibibytes: float) -> None:
    """Of 32 layers, width 4096 with MLPs of 11008 and 32000 tokens; LoRA of rank 16, embeddings and norms beside it.

    The highest moment is the backward of the last layer: everything that was saved and what its recomputation made.
    """
    hidden, inside, layers, embedding, norms = 4096, 11008, 32, 32000 * 4096, 65 * 4096
    linear = layers * (4 * hidden * hidden + 3 * hidden * inside)
    # 4 bits, 8 for each 64 weights, 32 for each 256 of these; the rest, and all without NF4, has 16.
    base = linear * (4 + 8 / 64 + 32 / (64 * 256)) / 8 if method == "qlora" else 2 * linear
    trained = layers * 16 * (4 * 2 * hidden + 3 * (hidden + inside)) + embedding + norms
    # A float32 weight, its gradient, and two moments.
    weights = base + 2 * (2 * embedding + norms) + 16 * trained
    saved = layers * tokens * hidden * 2
    # Tensors of 16 bits per token: of the hidden width 8, and 2 of trained norms; 6 of the MLP's; two of q and of k, v;
    # of seven adapters, between their matrices.
    layer = tokens * 2 * ((8 + 2 + 2 + 2) * hidden + 6 * inside + 7 * 16)
    peak = weights + saved + layer + 1.5 * GIB
    plan = plan_of(recipe(target=tokens, tuning={"method": method}, hardware={"gpus": 1}), "A100-80")
    assert plan.memory.peak == pytest.approx(peak, abs=10)
    assert peak / GIB == pytest.approx(gibibytes, abs=0.05)


def test_a_model_without_known_layers_has_no_plan() -> None:
    model = on_meta(small_config("llama"))
    model._no_split_modules = None
    with refused(ModelError, "model of type llama: ", "decoder layers"):
        shape_of(model)


def test_another_revision_is_not_read_from_shipped_shapes() -> None:
    assert shipped_folder(LLAMA).exists()
    with refused(ModelError, LLAMA):
        resolve_model(ModelRef(LLAMA, revision="other"), shipped=True)


@pytest.mark.parametrize(
    "folder", [*sorted(SHIPPED_CONFIGS.iterdir()), BUILTIN_FOLDER / "tiny"], ids=lambda folder: folder.name
)
def test_shipped_shapes_equal_counted_ones(folder: Path) -> None:
    shipped = Shape(**json.loads((folder / "shape.json").read_text()))
    assert shipped == resolve_model(str(folder)).shape, "python scripts/count_shapes.py"


@pytest.mark.parametrize("folder", sorted(SHIPPED_CONFIGS.iterdir()), ids=lambda folder: folder.name)
def test_a_shipped_config_is_extended_as_transformers_reads_it(folder: Path) -> None:
    shipped = resolve_model(folder.name.replace("--", "/"), shipped=True).config
    read = resolve_model(str(folder)).config
    assert Rope(shipped).window == Rope(read).window
    assert Rope(shipped).scalings == Rope(read).scalings
    assert full_attention_rope(shipped).items() <= full_attention_rope(read).items()
    extension = Extension(2 * Rope(read).window, scaling=Rope(read).scalings[0])
    assert (
        resolve_model(ModelRef(folder.name.replace("--", "/"), extension=extension), shipped=True).extension
        == extension
    )


def test_a_recipe_with_a_shipped_shape_is_planned_without_torch(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    probe = (
        "import sys\n"
        "from contextlib import suppress\n"
        "from pi_lora.cli import main\n"
        f"sys.argv = ['pi-lora', 'plan', 'paper/65b_8k', '--json', {str(file)!r}]\n"
        "with suppress(SystemExit): main()\n"
        "print({'torch', 'transformers', 'trl', 'peft', 'datasets', 'bitsandbytes'} & set(sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "set()"
    found = json.loads(file.read_text())
    assert set(found["bytes"]) == {"weights", "gradients", "optimizer", "activations", "logits"}
    assert (found["gpu"], found["gpus"], found["fits"], found["steps"]) == ("A100-80", 128, True, 1000)
    assert found["tokens_per_step"] == 128 * 8192
    assert 0 < found["peak_bytes_per_gpu"] < GPUS["A100-80"].memory
    assert all(words in answer.stdout for words in ("128 x A100-80", "16 machines", "table 1"))


@pytest.mark.parametrize(
    ("gpu", "sections", "arithmetic"),
    [
        ("H200", {}, "bfloat16"),
        ("H200", {"tuning": {"dropout": 0.1}}, "casts"),
        ("H200", {"training": {"precision": "float32"}}, "casts"),
        ("H200", {"model": {"name": LLAMA, "dtype": "float32"}}, "autocast"),
        ("H200", {"tuning": {"method": "full"}}, "autocast"),
        ("H200", {"tuning": {"method": "full"}, "training": {"precision": "float32"}}, "float32"),
        ("H200", {"tuning": {"method": "full"}, "hardware": {"gpus": 2}}, "bfloat16"),
        ("H200", {"tuning": {"dropout": 0.1}, "hardware": {"gpus": 2}}, "bfloat16"),
        ("H200", {"tuning": {"method": "qlora", "dropout": 0.1}, "hardware": {"gpus": 2}}, "casts"),
        ("T4", {}, "bfloat16"),
        (CPU, {"hardware": {}}, "float32"),
    ],
    ids=str,
)
def test_a_plan_counts_the_arithmetic_of_the_step(gpu: str, sections: dict[str, Any], arithmetic: Any) -> None:
    """Float32 weights compute under autocast on one GPU, where dropout instead keeps PEFT's casts of a bfloat16 base; a
    sharded model has the dtype of the step. Kept layers show the tensors of each, and keep their float32 inputs.
    """
    training = {"activation_checkpointing": False, **sections.get("training", {})}
    asked = recipe(target=4096, **{"hardware": {"gpus": 1}, **sections, "training": training})
    plan = plan_of(asked, gpu)
    shape = plan.model.shape
    kept, peak = layer_bytes(shape, asked.tuning, arithmetic)
    inputs = shape.layers * shape.hidden * 4 if arithmetic in ("autocast", "float32") else 0
    expected = 4096 * (inputs + (shape.layers - 1) * kept + peak)
    assert plan.memory.components["activations"] == pytest.approx(expected, abs=1)
    if asked.hardware.processes == 1 and asked.tuning.method != "qlora":
        number_bytes = 4 if arithmetic in ("autocast", "float32") else 2
        adapter = 0 if asked.tuning.method == "full" else 4 * plan.trained
        copies = 2 * shape.linear_weights if arithmetic == "autocast" else 0
        if asked.tuning.method == "lora" and arithmetic in ("bfloat16", "autocast"):
            copies += 2 * linear_adapter_parameters(shape, asked.tuning)
        weights = number_bytes * shape.parameters + adapter + copies
        assert plan.memory.components["weights"] == pytest.approx(weights, abs=1)
