"""The recipe that `pi-lora new` writes: it fits, it is the best that does, and it loads, plans and trains."""

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import pi_lora
from conftest import plan_of, refused, run_captured, train
from pi_lora.data.chats import NO_CHATS_WARNING
from pi_lora.data.sources import evaluation_documents, find_table
from pi_lora.errors import PiLoraError
from pi_lora.models.resolve import resolve_model
from pi_lora.planning import new_recipe as choosing
from pi_lora.planning.advice import plan_lines
from pi_lora.planning.gpus import CPU, GPUS, Gpu, device_for, device_here, find_gpu
from pi_lora.planning.memory import MARGIN
from pi_lora.planning.new_recipe import choose, first_plan
from pi_lora.planning.training_plan import TrainingPlan
from pi_lora.preflight import check, plan_or_refuse
from pi_lora.recipe.files import load_recipe
from pi_lora.scaling.rope import Rope

MODELS = """HuggingFaceTB/SmolLM2-1.7B Qwen/Qwen3-0.6B-Base Qwen/Qwen3-8B-Base huggyllama/llama-7b huggyllama/llama-13b
huggyllama/llama-65b meta-llama/Meta-Llama-3-8B mistralai/Mistral-7B-v0.3""".split()
LLAMA = "huggyllama/llama-7b"
Command = Callable[..., tuple[int, str, str]]


def chosen(
    model: str = LLAMA, target: int = 8192, gpu: str = "H100", sources: Sequence[dict[str, object]] = ()
) -> TrainingPlan:
    given = {"data": {"source": sources}} if sources else {}
    return choose(first_plan(resolve_model(model, shipped=True), target, find_gpu(gpu), given))


def levers(plan: TrainingPlan) -> tuple[str, int, str]:
    recipe = plan.recipe
    sequence = recipe.data.tokens_per_sequence(plan.model.original, recipe.context.target)
    return recipe.data.positions, sequence, recipe.tuning.method


def lever(plan: TrainingPlan) -> tuple[object, ...]:
    return plan.recipe.training.activation_checkpointing, *levers(plan)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`pi-lora new` in an empty folder: exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    return partial(run_captured, capsys, monkeypatch, "new")


@pytest.mark.parametrize("memory", ["12GB", "24GB", "48GB", "80GB"])
@pytest.mark.parametrize("model", MODELS)
def test_a_plan_fits_the_card_or_is_refused(model: str, memory: str, tmp_path: Path) -> None:
    target = 4 * Rope(resolve_model(model, shipped=True).config).window
    try:
        plan = chosen(model, target, memory)
    except PiLoraError:
        assert (model, memory) in {("huggyllama/llama-65b", "12GB"), ("huggyllama/llama-65b", "24GB")}
        return
    file = tmp_path / "recipe.yaml"
    file.write_text(choosing.recipe_text(plan, file))
    written = load_recipe(file).recipe
    again = plan_of(written, device_for(written))
    assert again.gpu == plan.gpu
    assert again.recipe.context.target == target
    assert again.memory.peak == plan.memory.peak <= plan.gpu.memory
    assert again.tokens == plan.tokens


def test_the_best_quality_that_fits_is_chosen() -> None:
    """PoSE sequences of the original window, of 1,024 to 8,192 tokens, the longest that fit; LoRA before QLoRA."""
    assert levers(chosen(gpu="H100")) == ("pose", 2048, "lora")
    assert levers(chosen("huggyllama/llama-13b", gpu="24GB")) == ("pose", 2048, "qlora")
    assert levers(chosen("Qwen/Qwen3-8B-Base", 131072, "4090")) == ("pose", 8192, "lora")
    assert levers(chosen("mistralai/Mistral-7B-v0.3", 131072, "12GB")) == ("pose", 8192, "qlora")
    assert levers(chosen("builtin:tiny", 2048, CPU)) == ("pose", 1024, "lora")


def test_whole_sequences_are_chosen_where_pose_saves_nothing_or_fails() -> None:
    """For a target that is as short as PoSE sequences, and under `pi`."""
    assert levers(chosen("builtin:tiny", 1024, CPU)) == ("contiguous", 1024, "lora")
    assert levers(chosen("google/gemma-3-12b-it", 262144, "H200"))[0] == "contiguous"


def test_the_recipe_has_the_settings_that_docs_recommend() -> None:
    """Rates by size; a quarter of recall documents beside text; nothing but the adapter trains."""
    for model, gpu, rate in (("builtin:tiny", CPU, 2.5e-3), (LLAMA, "H100", 2e-4)):
        recipe = chosen(model, gpu=gpu).recipe
        assert (recipe.training.learning_rate, recipe.training.schedule) == (rate, "linear")
        assert (recipe.tuning.rank, recipe.tuning.target_modules) == (16, "all-linear")
        assert recipe.tuning.modules_to_save == "nothing"
    [text, recall] = chosen().recipe.data.source
    assert recall.name == "builtin:recall"
    assert recall.weight / (text.weight + recall.weight) == 0.25


def test_experts_are_not_computed_in_chunks() -> None:
    """`train` refuses chunks of a model whose MLPs all consist of experts."""
    plan = chosen("openai/gpt-oss-20b", 262144, "60GB")
    assert plan.recipe.training.mlp_chunk_tokens is None
    assert plan.recipe.hardware.offload_activations


@pytest.mark.parametrize(
    ("model", "target", "gpu", "checkpointing"),
    [
        ("meta-llama/Meta-Llama-3-8B", 65536, "4090", True),
        (LLAMA, 16384, "H200", False),
        (LLAMA, 16384, "4090", 2),
        ("meta-llama/Meta-Llama-3-8B", 65536, "A100-40", "selective"),
    ],
)
def test_no_better_candidate_fits_memory_and_time(model: str, target: int, gpu: str, checkpointing: Any) -> None:
    """Every candidate before the one that was taken lacks memory or time, counted anew."""
    plan = chosen(model, target, gpu)
    assert plan.recipe.training.activation_checkpointing == checkpointing
    first = first_plan(resolve_model(model, shipped=True), target, plan.gpu, {})
    for overrides, each in choosing.replanned(first, choosing.candidates(first)):
        if lever(each) == lever(plan):
            return
        too_much = each.memory.peak * MARGIN > plan.gpu.memory
        assert too_much or (each.hours or 0) > choosing.MAX_HOURS, overrides
    pytest.fail("what was taken is no candidate")


def test_the_fastest_candidate_is_taken_if_none_ends_in_time() -> None:
    slow = replace(GPUS["H100"], peak=1e9)
    first = first_plan(resolve_model(LLAMA, shipped=True), 32768, slow, {})
    fastest = min(
        (plan for _, plan in choosing.replanned(first, choosing.candidates(first)) if plan.has_room()),
        key=lambda plan: plan.hours or 0,
    )
    assert (fastest.hours or 0) > 48
    assert levers(choose(first)) == levers(fastest)


BITS = {"fp8": {}, "gptq": {"bits": 4}, "bitsandbytes": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}}


def stored_as(kind: str, folder: Path, **settings: Any) -> Path:
    """A config of LLaMA-7B whose weights are stored quantized."""
    folder.mkdir()
    config = dict(resolve_model(LLAMA, shipped=True).config)
    config["quantization_config"] = {"quant_method": kind, **(settings or BITS[kind])}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_method_that_train_refuses_is_neither_chosen_nor_advised(tmp_path: Path) -> None:
    """LoRA alone on FP8: on a card that is too small for it, no change helps."""
    base = resolve_model(str(stored_as("fp8", tmp_path / "fp8")))
    first = first_plan(base, 8192, find_gpu("12GB"), {})
    assert first.model.methods == ("lora",)
    assert {plan.recipe.tuning.method for _, plan in choosing.replanned(first, choosing.candidates(first))} == {"lora"}
    with refused(PiLoraError, "--gpu: 12GB: ", first.recipe.model.name):
        choose(first)
    assert "=" not in plan_lines(first)[-1]


@pytest.mark.parametrize(
    ("settings", "stored"),
    [
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, 0.516),
        ({"load_in_4bit": True}, 0.5625),
        ({"load_in_8bit": True}, 1.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_weights_of_bitsandbytes_stay_as_they_are_stored(
    settings: dict[str, bool], stored: float, method: str, tmp_path: Path
) -> None:
    """Instead of the two bytes of bfloat16."""
    weights = {}
    for name in (str(stored_as("bitsandbytes", tmp_path / "bnb", **settings)), LLAMA):
        first = first_plan(resolve_model(name, shipped=True), 8192, GPUS["H100"], {})
        tuned_by = method if name != LLAMA else "lora"
        _, plan = next(choosing.replanned(first, [{"tuning.method": tuned_by}]))
        weights[name] = plan.memory.components["weights"]
    quantized, plain = weights.values()
    assert (plain - quantized) / first.model.shape.linear_weights == pytest.approx(2 - stored, abs=1e-3)


def test_the_recipe_says_that_the_base_is_stored_quantized(tmp_path: Path) -> None:
    plan = choose(first_plan(resolve_model(str(stored_as("bitsandbytes", tmp_path / "bnb"))), 8192, GPUS["H100"], {}))
    assert re.search("^# .*stored quantized", choosing.recipe_text(plan, tmp_path / "r.yaml"), re.MULTILINE)


def test_new_refuses_what_train_refuses(command: Command, lora_run: Path, small_model: Path, tmp_path: Path) -> None:
    gptq = Path(shutil.copytree(small_model, tmp_path / "gptq"))
    config = json.loads((gptq / "config.json").read_text())
    (gptq / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    for name, words in (
        ("gptq", "quantized by gptq"),
        (str(lora_run), f"pi-lora merge {lora_run}"),
    ):
        status, out, errors = command(name, "--target", "256", "--gpu", "cpu")
        assert (status, out, errors.count("\n")) == (2, "", 1)
        assert errors.startswith(f"{name}: ")
        assert words in errors


def test_the_amount_of_text_decides_the_steps(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"

    def size(sequences: float, *synthetic: str, hold_out: float | None = None) -> tuple[int, int]:
        text.touch()
        os.truncate(text, int(sequences * 2048 * choosing.BYTES_PER_TOKEN))
        sources = [{"name": str(text), "hold_out": hold_out}, *({"name": name} for name in synthetic)]
        training = chosen(sources=sources).recipe.training
        return training.steps, training.global_batch_size

    endless = chosen().recipe.training
    assert (endless.steps, endless.global_batch_size) == (200, 8)
    assert size(200 * 8) == (200, 8)
    assert size(200 * 4) == (200, 4)
    assert size(150 * 2) == (150, 2)
    assert size(0.1) == (20, 2)
    assert size(300 * 2, hold_out=0.5) == (150, 2)
    # Half of the mixture is text, and recall documents have no end.
    assert size(75 * 2, "builtin:recall") == (150, 2)


def test_the_chosen_recipe_trains(command: Command, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("Long documents serve best. " * 10_000)
    words = "builtin:tiny --target 512 --gpu cpu --data notes.txt --output my.yaml".split()
    status, out, errors = command(*words)
    assert status == 0
    [line] = errors.splitlines()
    assert all(words in line for words in ("--data: notes.txt: 1 held-out document", "512 tokens", "interval"))
    last = out.splitlines()[-1]
    assert last.startswith("my.yaml: ")
    assert "pi-lora train my.yaml" in last
    written = load_recipe(tmp_path / "my.yaml").recipe
    header = (tmp_path / "my.yaml").read_text().split("\nmodel:")[0]
    assert f"#   {out.splitlines()[1]}" in header.splitlines()
    changes = ["training.steps=1", "training.global_batch_size=1"]
    run = train(load_recipe(tmp_path / "my.yaml", changes).recipe, tmp_path / "run")
    assert (run / "adapter_model.safetensors").is_file()
    measured, source = written.evaluation.perplexity, written.data.source[0]
    assert measured
    assert (measured.data, measured.hold_out) == (source.name, source.hold_out) == ("notes.txt", 0.03)
    held_out = next(evaluation_documents(measured)).text
    assert len(held_out) + len(next(find_table(source).documents()).text) == 270_000


def test_documents_of_a_folder_that_are_not_read_are_named(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    books = tmp_path / "books"
    (books / "more").mkdir(parents=True)
    (books / "one.txt").write_text("Long documents serve best. " * 10_000)
    for name in ("two.pdf", "more/three.PDF", "four.docx", "cover.jpg"):
        (books / name).write_bytes(b"")
    status, _, errors = command(*"builtin:tiny --target 512 --gpu cpu --data books --output my.yaml".split())
    assert status == 0, errors
    _, out, _ = run_captured(capsys, monkeypatch, "train", "my.yaml", "--dry-run")
    assert "3 (.docx, .pdf)" in out
    [line] = [said for said in errors.splitlines() if ".pdf" in said]
    assert line.startswith("--data: books: ")
    assert "3 (.docx, .pdf)" in line
    assert ".jpg" not in line


def test_new_reads_text_from_any_column_and_holds_out_ten_rows(command: Command, tmp_path: Path) -> None:
    rows = [json.dumps({"id": 1, "body": f"Long documents serve {number} best. " * 100}) for number in range(100)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    words = "builtin:tiny --target 512 --gpu cpu --data rows.jsonl --column body --output my.yaml".split()
    status, _, errors = command(*words)
    assert (status, errors) == (0, "")
    recipe = load_recipe(tmp_path / "my.yaml").recipe
    measured, source = recipe.evaluation.perplexity, recipe.data.source[0]
    assert measured
    assert (measured.column, measured.hold_out) == (source.column, source.hold_out) == ("body", 0.1)
    assert (measured.documents, measured.truncate) == (20, 3 * 512)
    check(recipe, tmp_path / "run")


def test_new_trains_on_all_chats_without_a_warning(command: Command, small_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(small_model, folder)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    turns = [{"role": role, "content": "Long documents serve best. " * 5} for role in ("user", "assistant")]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 400)
    words = [str(folder), *"--target 256 --gpu cpu --data chats.jsonl --column messages --output my.yaml".split()]
    status, _, errors = command(*words)
    assert (status, errors) == (0, "")
    recipe = load_recipe(tmp_path / "my.yaml").recipe
    assert (recipe.data.has_chats, recipe.data.source[0].hold_out) == (True, None)
    check(recipe, tmp_path / "run")


def test_new_plan_and_train_print_the_same_plan(command: Command, tmp_path: Path) -> None:
    words = "builtin:tiny --target 512 --output my.yaml".split()
    _, out, _ = command(*words)
    recipe = load_recipe(tmp_path / "my.yaml").recipe
    written = plan_lines(plan_of(recipe, device_for(recipe)))
    assert written == out.splitlines()[:-1] == plan_or_refuse(recipe.model.name, plan_of(recipe, device_here()))
    assert "1 x cpu (this machine's)" in written[1]


def test_new_says_that_no_document_fills_the_window(command: Command, tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": f"A short note, number {number}."}) + "\n" for number in range(99))
    (tmp_path / "notes.jsonl").write_text(rows)
    status, _, errors = command("builtin:tiny", "--target", "1k", "--gpu", "cpu", "--data", "notes.jsonl")
    assert status == 0
    [line] = [said for said in errors.splitlines() if said.startswith("--data: notes.jsonl: ")]
    assert all(words in line for words in ("24 bytes", "1,024 tokens", "pi-lora train"))
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "A long row. " * 999}))
    status, _, errors = command(
        "builtin:tiny", "--target", "1k", "--gpu", "cpu", "--data", "one.jsonl", "--output", "o"
    )
    assert status == 0
    assert "--data: one.jsonl: " in errors


def test_new_warns_about_a_chat_model_without_chats(command: Command, small_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(small_model, folder)
    words = [str(folder), "--target", "256", "--gpu", "cpu", "--output"]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": None}))
    assert NO_CHATS_WARNING not in command(*words, "one.yaml")[2]
    for number, name in enumerate(("chat_template.jinja", "chat_template.json")):
        (folder / name).write_text(json.dumps({"chat_template": "{{ messages }}"}))
        status, _, errors = command(*words, f"{number}.yaml")
        assert (status, errors.splitlines()[-1]) == (0, f"data: {NO_CHATS_WARNING}")
        (folder / name).unlink()


@pytest.mark.parametrize(
    ("model", "scaling", "reason"),
    [
        ("huggyllama/llama-7b", "yarn", "measurements"),
        ("google/gemma-3-12b-it", "pi", "frequencies of this base"),
        ("openai/gpt-oss-20b", "yarn", "frequencies of this base"),
    ],
)
def test_the_recipe_says_why_it_has_this_scaling(
    model: str, scaling: str, reason: str, command: Command, tmp_path: Path
) -> None:
    target = 2 * Rope(resolve_model(model, shipped=True).config).window
    status, _, _ = command(model, "--target", str(target), "--gpu", "80GB", "--output", "mine.yaml")
    assert status == 0
    assert re.search(f"^# Scaling {scaling}: .*{reason}", (tmp_path / "mine.yaml").read_text(), re.MULTILINE)


def test_new_does_not_overwrite_a_file(command: Command, tmp_path: Path) -> None:
    (tmp_path / "llama-7b_8k.yaml").write_text("mine")
    status, out, errors = command(LLAMA, "--target", "8192", "--gpu", "H100")
    assert (status, out) == (2, "")
    assert errors.startswith("llama-7b_8k.yaml: ")
    assert "--output" in errors
    assert (tmp_path / "llama-7b_8k.yaml").read_text() == "mine"


def test_the_window_that_a_model_was_trained_on_is_its_original(tmp_path: Path) -> None:
    """Qwen3-8B declares 40,960 tokens, was trained on 32,768, and its makers recommend YaRN with a factor of 4."""
    file = pi_lora.new("Qwen/Qwen3-8B", 131072, gpu="H200", output=tmp_path / "new.yaml")
    recipe = load_recipe(file).recipe
    assert (recipe.scaling, recipe.context.original, recipe.context.target) == ("yarn", 32768, 131072)
    planned = pi_lora.plan(file)
    assert planned.model.original == 32768
    [quoted] = [line for line in planned.lines() if line.startswith("context.original: 32768")]
    assert all(name in quoted for name in ("40960", "QwenLM/Qwen3"))
    without = pi_lora.plan(file, "context.original=null")
    assert (without.model.original, quoted in without.lines()) == (32768, True)


@pytest.mark.parametrize(
    ("arguments", "where", "name"),
    [
        ("huggyllama/llama-65b --target 8192 --gpu 12GB", "--gpu: 12GB: ", "huggyllama/llama-65b"),
        (f"{LLAMA} --target 1024 --gpu 12GB", "--target: 1024 ", "2048"),
        (f"{LLAMA} --target 8192 --gpu 12GB --data gone.txt", "--data: gone.txt: ", "no such file"),
        ("builtin:tiny --target 512 --data notes", "--data: notes: ", "HF_HUB_OFFLINE=1"),
    ],
)
def test_a_mistake_in_new_is_one_line_and_leaves_no_file(
    command: Command, tmp_path: Path, arguments: str, where: str, name: str
) -> None:
    status, out, errors = command(*arguments.split())
    assert (status, out, errors.count("\n")) == (2, "", 1)
    assert errors.startswith(where)
    assert name in errors
    assert not list(tmp_path.iterdir())


def test_a_name_that_yaml_would_misread_is_quoted(small_model: Path, tmp_path: Path) -> None:
    odd = tmp_path / "a: {b} # - 'c'"
    odd.symlink_to(small_model)
    plan = choose(first_plan(resolve_model(str(odd)), 256, GPUS[CPU], {"data": {"source": 'no: "text"'}}))
    file = tmp_path / "odd.yaml"
    file.write_text(choosing.recipe_text(plan, file))
    written = load_recipe(file).recipe
    assert written.model.name == str(odd)
    assert written.data.source[0].name == 'no: "text"'


def test_a_data_name_without_a_file_is_reported_as_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "data_problems", lambda data, ask_hub: [])
    monkeypatch.setattr(choosing, "share_to_hold_out", lambda source, target: None)
    texts = ["owner/books", "builtin:recall"]
    _, _, notes = choosing.new_recipe(
        resolve_model("builtin:tiny"), 512, gpu=CPU, texts=texts, output=tmp_path / "mine.yaml"
    )
    [note] = notes
    assert note.startswith("--data: owner/books: ")
    assert "hub" in note


@pytest.mark.parametrize(
    ("model", "gpu", "longest", "most"), [(LLAMA, "H100", 2048, 48), ("HuggingFaceTB/SmolLM2-1.7B", CPU, 8192, 12)]
)
def test_a_tuning_may_take_two_days_on_a_gpu_and_half_a_day_on_a_cpu(
    model: str, gpu: str, longest: int, most: float
) -> None:
    """Compared by the fastest plan with memory to spare, on a device whose speed is chosen so that it takes so long:
    beyond that the sequences are halved.
    """
    source = resolve_model(model, shipped=True)

    def first_on(device: Gpu) -> TrainingPlan:
        return first_plan(source, 4 * longest, device, {})

    plans = [plan for _, plan in choosing.replanned(first_on(GPUS[gpu]), choosing.candidates(first_on(GPUS[gpu])))]
    fastest = min(plan.hours or 0 for plan in plans if plan.has_room() and plan.sequence_tokens == longest)
    for share, tokens in ((0.98, longest), (1.02, longest // 2)):
        slow = replace(GPUS[gpu], peak=(GPUS[gpu].peak or 0) * fastest / (share * most))
        assert choose(first_on(slow)).sequence_tokens == tokens
