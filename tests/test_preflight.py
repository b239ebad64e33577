"""A recipe is checked before anything is downloaded, tokenized or loaded: every mistake, all of them at once."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

import architectures
from conftest import plan_of, refused, run_command, small_recipe
from hub import Hub
from pi_lora import api
from pi_lora.data.tokens import token_spans
from pi_lora.errors import DataError, ModelError, PiLoraError, RecipeError, RunExistsError
from pi_lora.model_ref import ModelRef
from pi_lora.models.resolve import resolve_model
from pi_lora.planning.gpus import find_gpu
from pi_lora.planning.training_plan import TrainingPlan
from pi_lora.preflight import check, check_data, plan_or_refuse
from pi_lora.recipe.files import dump_recipe
from pi_lora.recipe.schema import Recipe
from pi_lora.scaling.extension import Extension
from pi_lora.serving.reference import reference_of
from pi_lora.staging import staging_path
from random_runs import save_base
from small_configs import llama

LLAMA = "huggyllama/llama-7b"
TINY = {"name": "builtin:tiny"}
LONGER = {"context": {"target": 512}}


@pytest.fixture
def recipe(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A recipe that names files of its own in the current folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(small_model, "model")
    Path("notes.jsonl").write_text(json.dumps({"text": "some text " * 1000}))
    Path("held_out.txt").write_text("other text " * 100)
    evaluation = {"perplexity": {"data": "held_out.txt"}}
    return small_recipe("model", data={"source": "notes.jsonl"}, evaluation=evaluation)


def changed(model: Path, folder: Path, **changes: object) -> Path:
    """A copy of a model with another config."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def small_base(kind: str, folder: Path, **changes: object) -> Path:
    """A random model of an architecture with the built-in tokenizer."""
    config: Any = architectures.small_config(kind)
    config.update({"vocab_size": 1024, "bos_token_id": 0, **changes})
    return save_base(config, folder)


def test_a_check_that_passes_finds_the_model_and_writes_nothing(recipe: Recipe, tmp_path: Path) -> None:
    files = sorted(tmp_path.rglob("*"))
    checked = check(recipe, tmp_path / "runs" / "run", ask_hub=True)
    assert (checked.original, checked.window, checked.scale) == (64, 128, 2)
    assert sorted(tmp_path.rglob("*")) == files


@pytest.mark.parametrize(
    ("file", "damage", "where", "name"),
    [
        ("model/model.safetensors", lambda whole: whole[:-100], "model/model.safetensors: ", "damaged"),
        ("model/model.safetensors", None, "model: ", "model.safetensors"),
        ("model/tokenizer.json", lambda whole: whole[:100], "model: ", "tokenizer"),
        ("notes.jsonl", lambda whole: b'{"body": "a"}', "data.source: notes.jsonl:1: ", "column text"),
        ("notes.jsonl", lambda whole: b'{"text": " "}', "data.source: notes.jsonl: ", "text"),
        ("held_out.txt", None, "evaluation.perplexity.data: held_out.txt: ", "no such file"),
        ("runs", lambda whole: b"a file", "runs/run: ", "--output"),
    ],
)
def test_a_dry_run_reports_every_failure_of_the_run(
    recipe: Recipe, file: str, damage: Callable[[bytes], bytes] | None, where: str, name: str
) -> None:
    place = Path(file)
    whole = place.read_bytes() if place.exists() else b""
    place.unlink(missing_ok=True)
    if damage:
        place.write_bytes(damage(whole))
    with refused(PiLoraError, where, name):
        check(recipe, Path("runs/run"), ask_hub=True)


def test_data_that_the_tokenizer_cannot_encode_is_refused(small_model: Path, tmp_path: Path) -> None:
    """Without a chat template, with special tokens that would be text, and by a tokenizer without offsets."""
    (tmp_path / "x.jsonl").write_text('{"messages": [], "q": "a", "a": "b"}')
    chats = {"source": {"name": str(tmp_path / "x.jsonl"), "column": "messages"}}
    examples = {"source": str(tmp_path / "x.jsonl"), "template": "Q: {q}", "completion": "a", "completion_tokens": 9}
    for data, where, name in (
        (chats, "data.source: ", "chat template"),
        ({**examples, "template": "<s>Q: {q}"}, "data.template: <s> ", "data.special_tokens: true"),
    ):
        with refused(RecipeError, where, name):
            check(small_recipe(small_model, data=data), tmp_path / "run")
    slow = save_base(llama(), tmp_path / "slow")
    (slow / "tokenizer.json").unlink()
    (slow / "vocab.json").write_text('{"<unk>": 0, "a@@": 1, "a": 2}')
    (slow / "merges.txt").write_text("#version: 0.2\n")
    settings = {"tokenizer_class": "CTRLTokenizer", "eos_token": "a", "unk_token": "<unk>", "chat_template": "{}"}
    (slow / "tokenizer_config.json").write_text(json.dumps(settings))
    for data in (chats, examples):
        with refused(RecipeError, "CTRLTokenizer: ", "tokenizer.json"):
            check(small_recipe(slow, data=data), tmp_path / "run")
    source = resolve_model(str(slow))
    for use in (reference_of, lambda model: token_spans(model.tokenizer, "a")):
        with refused(DataError, "CTRLTokenizer: ", "tokenizer.json"):
            use(source)


@pytest.mark.parametrize(
    ("kind", "tuning", "where", "names"),
    [
        ("qwen3_moe", {"dropout": 0.1}, "tuning.dropout: ", ("experts", "0", "target_modules")),
        ("qwen3_moe", {"target_modules": ["up_proj"]}, "tuning: ", ("up_proj", "gate_proj")),
        ("laguna", {}, "tuning: ", ("down_proj.lora_A.weight", "target_modules")),
        ("axk2", {}, "tuning: ", ("lora_A", "target_modules")),
        ("hrm_text", {}, "model.L_module.layers.0.self_attn.q_proj.weight: ", ("no adapter can be merged",)),
    ],
)
def test_an_adapter_that_cannot_be_made_or_merged_is_refused(
    kind: str, tuning: dict[str, Any], where: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    base = small_base(kind, tmp_path / "base")
    with refused(PiLoraError, where, *names):
        check(small_recipe(base, tuning=tuning), tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"num_hidden_layers": 3}, ("model.layers.2.", "is missing")),
        ({"num_hidden_layers": 1}, ("model.layers.1.", "is not in its config")),
        ({"intermediate_size": 40}, ("down_proj.weight", "[32, 48]", "[32, 40]")),
    ],
)
def test_weights_of_another_config_are_refused_before_anything_is_packed(
    changes: dict[str, int], names: tuple[str, ...], small_model: Path, tmp_path: Path
) -> None:
    model = changed(small_model, tmp_path / "model", **changes)
    with refused(PiLoraError, f"{model}: ", "config.json", *names):
        check(small_recipe(model), tmp_path / "run")
    with refused(PiLoraError, f"{model}: ", "config.json", *names):
        api.extend(ModelRef(model, extension=Extension(128, scaling="pi")), tmp_path / "extended")


def test_chunks_of_a_model_without_dense_mlps_are_refused(tmp_path: Path) -> None:
    base = small_base("qwen3_moe", tmp_path / "base")
    with refused(PiLoraError, "training.mlp_chunk_tokens: "):
        check(small_recipe(base, training={"mlp_chunk_tokens": 16}), tmp_path / "run")


def test_all_problems_are_reported_at_once(small_model: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").touch()
    recipe = small_recipe(
        small_model,
        model={"name": "./gone", "attention": "flash_attention_2"},
        data={"source": "nowhere.txt"},
        training={"optimizer": "paged_adamw_8bit"},
        hardware={"gpus": 64, "offload_activations": True},
        evaluation={"perplexity": {"data": "./no-such"}},
    )
    with pytest.raises(RecipeError) as raised:
        check(recipe, taken)
    said = {line.split(": ")[0] for line in str(raised.value).splitlines()}
    wrong = "data.source evaluation.perplexity.data hardware.gpus hardware.offload_activations model.attention"
    wrong += " training.optimizer"
    assert {"./gone", str(taken), *wrong.split()} <= said


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"evaluation": {"perplexity": {"stride": 129}}}, "evaluation: "),
        ({"evaluation": {"perplexity": {}, "while_training": {"truncate": 127}}}, "evaluation: "),
        ({"training": {"optimizer": "paged_adamw_8bit"}, "hardware": {"gpus": 2}}, "training.optimizer: paged"),
    ],
)
def test_recipes_that_would_fail_during_training_are_refused(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], where: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with refused(RecipeError, where, "128" if "evaluation" in changes else "adamw"):
        check(small_recipe(small_model, **changes), tmp_path / "run")


def test_measurements_that_do_not_fit_do_not_hide_other_mistakes(small_model: Path, tmp_path: Path) -> None:
    evaluation = {"perplexity": {"data": "x", "windows": [64], "stride": 32}, "while_training": {"stride": 128}}
    with pytest.raises(RecipeError) as raised:
        check(small_recipe("./gone", evaluation=evaluation), tmp_path / "run")
    assert {"./gone", "stride"} <= {line.split(": ")[0] for line in str(raised.value).splitlines()}


def test_sdpa_is_refused_for_models_with_soft_caps(tmp_path: Path) -> None:
    model = small_base("gemma2", tmp_path / "capped")
    check(small_recipe(model), tmp_path / "run")
    with refused(RecipeError, "model.attention: sdpa ", "gemma2"):
        check(small_recipe(model, model={"name": str(model), "attention": "sdpa"}), tmp_path / "run")


def test_context_parallel_is_refused_for_models_with_sliding_windows(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    hardware = {"gpus": 2, "context_parallel": 2}
    check(small_recipe(small_model, hardware=hardware), tmp_path / "run")
    sliding = small_base("gemma3_text", tmp_path / "sliding", sliding_window=16)
    check(small_recipe(sliding), tmp_path / "run")
    for refuses in (lambda recipe: check(recipe, tmp_path / "run"), check_data):
        with refused(RecipeError, "hardware.context_parallel: ", "windows of 16 tokens"):
            refuses(small_recipe(sliding, hardware=hardware))


@pytest.mark.parametrize(
    ("kind", "method"), [("gptq", "lora"), ("fp8", "qlora"), ("awq", "qlora"), ("bitsandbytes", "full")]
)
def test_quantized_weights_that_cannot_be_tuned_are_refused(
    kind: str, method: str, small_model: Path, tmp_path: Path
) -> None:
    quantization = {"quant_method": kind, "bits": 4, "load_in_4bit": True}
    model = changed(small_model, tmp_path / "model", quantization_config=quantization)
    with refused(ModelError, f"{model}: ", kind):
        check(small_recipe(model, tuning={"method": method}), tmp_path / "run")


def test_documents_that_fill_no_window_are_named_before_the_training(small_model: Path, tmp_path: Path) -> None:
    (tmp_path / "short").mkdir()
    for number in range(3):
        (tmp_path / "short" / f"{number}.txt").write_text("é" * (40 + number))
    perplexity = {"data": str(tmp_path / "short"), "stride": 32}
    where = f"evaluation.perplexity.data: {tmp_path / 'short'}: "
    with refused(RecipeError, where, "84 bytes", "128 tokens", "evaluation.perplexity.windows") as raised:
        check(small_recipe(small_model, evaluation={"perplexity": perplexity}), tmp_path / "run")
    assert len(raised.value.problems) == 1
    lower = {**perplexity, "windows": [64]}
    check(small_recipe(small_model, evaluation={"perplexity": lower}), tmp_path / "run")
    (tmp_path / "short" / "words.txt").write_text("import os\n" * 30)
    with refused(RecipeError, where, "91 tokens", "128 tokens"):
        check(small_recipe(small_model, evaluation={"perplexity": perplexity}), tmp_path / "run")
    (tmp_path / "short" / "long.txt").write_text("é" * 128)
    check(small_recipe(small_model, evaluation={"perplexity": perplexity}), tmp_path / "run")


def test_every_text_of_the_evaluation_is_there_before_the_training(small_model: Path, tmp_path: Path) -> None:
    evaluation = {
        "chat": {"data": "./no-chats.jsonl"},
        "context": {"data": "./no-text", "key_tokens": "keys.json"},
        "summarization": {"data": "./no-reports.jsonl"},
        "benchmarks": {"tasks": ["boolq"], "data": ["boolq=gone.jsonl"]},
    }
    with pytest.raises(RecipeError) as raised:
        check(small_recipe(small_model, evaluation=evaluation), tmp_path / "run")
    wheres = [
        "evaluation.context.data: ./no-text: ",
        "evaluation.context.key_tokens: keys.json: ",
        "evaluation.benchmarks.data: boolq: gone.jsonl: ",
        "evaluation.summarization.data: ./no-reports.jsonl: ",
        "evaluation.chat.data: the tokenizer ",
        "evaluation.chat.data: ./no-chats.jsonl: ",
    ]
    problems = raised.value.problems
    assert [problem.startswith(where) for problem, where in zip(problems, wheres, strict=True)] == [True] * 6


def test_a_problem_of_a_template_names_the_section(small_model: Path, tmp_path: Path) -> None:
    summaries = {"data": "builtin:stdlib", "template": "</s> {document}", "document": "text", "completion": "text"}
    with refused(RecipeError, "evaluation.summarization.data: data.template: ", "{text}"):
        check(small_recipe(small_model, evaluation={"summarization": summaries}), tmp_path / "run")


@pytest.fixture
def with_chat_template(small_model: Path, tmp_path: Path) -> Path:
    """A small model with a chat template."""
    model = Path(shutil.copytree(small_model, tmp_path / "with chat template"))
    turn = "<{{ message.role }}>{{ message.content }}\n"
    template = (
        "{% for message in messages %}" + turn + "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (model / "chat_template.jinja").write_text(template)
    return model


def chats(file: Path, sender: str, number: int = 3) -> dict[str, str]:
    """A file of chats whose second turn has this sender."""
    turns = [{"from": "human", "value": "q"}, {"from": sender, "value": "a"}]
    file.write_text("".join(json.dumps({"conversations": turns}) + "\n" for _ in range(number)))
    return {"name": str(file), "column": "conversations"}


def test_chats_and_examples_that_cannot_train_are_refused(with_chat_template: Path, tmp_path: Path) -> None:
    """A dry run passed, and the training refused them."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"q": "a", "a": " "}\n' * 3)
    examples = {"source": str(rows), "template": "Q: {q}", "completion": "a", "completion_tokens": 9}
    usable = {"source": chats(tmp_path / "usable.jsonl", "gpt")}
    check(small_recipe(with_chat_template, data=usable), tmp_path / "run")
    for file, data, reason in (
        ("bots.jsonl", {"source": chats(tmp_path / "bots.jsonl", "bot")}, "turns of the bot"),
        ("rows.jsonl", examples, "empty rows"),
        ("rows.jsonl", {**examples, "completion": "q", "template": "Q: {q}" + "x" * 500}, "rows too long"),
    ):
        with refused(RecipeError, f"data.source: {tmp_path / file}: ", "3 rows", reason, "left out: 3"):
            check(small_recipe(with_chat_template, data=data), tmp_path / "run")


def test_usable_rows_may_follow_the_first_ones(tmp_path: Path, small_model: Path) -> None:
    """Of rows that are sorted, the last ones train; without any, the training says so."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"q": "x" * 500, "a": "b"}) + "\n")
    examples = {"source": str(rows), "template": "Q: {q}", "completion": "a", "completion_tokens": 9}
    recipe = small_recipe(small_model, data=examples)
    with refused(RecipeError, f"data.source: {rows}: ", "1 rows"):
        check(recipe, tmp_path / "run")
    rows.write_text(rows.read_text() * 500)
    assert check(recipe, tmp_path / "run")


def test_measurements_that_cannot_work_are_refused_before_the_training(
    with_chat_template: Path, small_model: Path, tmp_path: Path
) -> None:
    """They were refused after it."""
    text, rows = tmp_path / "text.txt", tmp_path / "rows.jsonl"
    text.write_text("a" * 200)
    rows.write_text('{"d": "a", "s": "b", "none": ""}\n')
    usable = chats(tmp_path / "usable.jsonl", "gpt")
    bots = chats(tmp_path / "bots.jsonl", "bot")
    summaries = {"data": str(rows), "document": "d", "summary": "s", "max_new_tokens": 9}
    check(
        small_recipe(
            with_chat_template,
            evaluation={
                "chat": {"data": usable["name"], "column": "conversations"},
                "context": {"data": str(text)},
                "perplexity": {"data": str(text), "min_tokens": 150},
                "summarization": summaries,
            },
        ),
        tmp_path / "run",
    )
    of_training = {"source": "./gone.jsonl", "document": "d", "summary": "s", "completion_tokens": 9}
    with refused(RecipeError, "data.source: ./gone.jsonl: ") as raised:
        check(small_recipe(small_model, data=of_training, evaluation={"summarization": {}}), tmp_path / "run")
    assert len(raised.value.problems) == 1
    short = {"data": usable["name"], "column": "conversations", "window": 4}
    for model, evaluation, *names in (
        (with_chat_template, {"chat": short}, "left out: 3"),
        (small_model, {"chat": {"data": usable["name"], "column": "conversations"}}, "chat template"),
        (with_chat_template, {"chat": {"data": bots["name"], "column": "conversations"}}, "turns of the bot"),
        (small_model, {"perplexity": {"data": "builtin:recall"}}, "builtin:recall"),
        (small_model, {"context": {"data": str(text), "window": 256}}, "256 tokens", "evaluation.context.window"),
        (
            small_model,
            {"perplexity": {"data": str(text), "min_tokens": 300}},
            "300 tokens",
            "evaluation.perplexity.min_tokens",
        ),
        (small_model, {"summarization": {**summaries, "summary": "none"}}, "empty rows left out: 1"),
        (small_model, {"summarization": {**summaries, "max_new_tokens": 127}}, "rows too long"),
        (small_model, {"passkey": {"targets": [16, 512]}}, "16 tokens"),
    ):
        [measurement] = evaluation
        with refused(RecipeError, f"evaluation.{measurement}.", *names):
            check(small_recipe(model, evaluation=evaluation), tmp_path / "run")


@pytest.mark.parametrize("chunks", [64, 65])
def test_more_chunks_than_tokens_are_refused(small_model: Path, tmp_path: Path, chunks: int) -> None:
    """A dry run passed, and PoSE could not draw positions."""
    recipe = small_recipe(small_model, data={"source": "builtin:stdlib", "positions": "pose", "chunks": chunks})
    if chunks == 64:
        check(recipe, tmp_path / "run")
        return
    with refused(RecipeError, "data.chunks: 65 ", "64 tokens"):
        check(recipe, tmp_path / "run")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
def test_an_output_where_no_folder_can_be_made_is_refused_first(small_model: Path, lora_run: Path) -> None:
    """Nobody can make a folder in /proc, though root may write there by its rights."""
    for write in (
        lambda: check(small_recipe(small_model), Path("/proc/nope")),
        lambda: api.merge(lora_run, "/proc/nope"),
        lambda: api.extend(ModelRef(str(small_model), extension=Extension(128, scaling="pi")), "/proc/nope"),
    ):
        with refused(RunExistsError, "/proc/nope: ", "output"):
            write()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"training": {"precision": "float16"}}, "training.precision: float16: needs a GPU; leave it out"),
        (
            {"training": {"optimizer": "paged_adamw_8bit"}},
            "training.optimizer: paged_adamw_8bit: needs a GPU; leave it out",
        ),
        (
            {"hardware": {"offload_activations": True}, "training": {}},
            "hardware.offload_activations: needs a GPU; leave it out",
        ),
        ({"model": {**TINY, "kernels": "liger"}, **LONGER}, "model.kernels: liger: needs a GPU; leave it out"),
        (
            {"model": {**TINY, "attention": "flash_attention_3"}, **LONGER},
            "model.attention: flash_attention_3: needs a GPU; leave it out",
        ),
        (
            {"hardware": {"gpus": 1}},
            "hardware.gpus: 1 needed on each machine, 0 here; lower it or leave it out (pi-lora plan shows what fits)",
        ),
        (
            {"hardware": {"cpu_processes": 2, "context_parallel": 2}},
            "hardware.context_parallel: needs hardware.gpus, and model.attention: sdpa",
        ),
        (
            {"tuning": {"method": "qlora"}},
            "tuning.method: qlora: needs the package bitsandbytes; pip install 'pi-lora[qlora]'",
        ),
        (
            {"training": {"tracking": ["wandb"]}},
            "training.tracking: wandb: needs the package wandb; pip install wandb",
        ),
        (
            {"training": {"schedule": "cosine_with_min_lr"}},
            "training.schedule_options: One of min_lr or min_lr_rate should be set through the `lr_scheduler_kwargs`; "
            "correct the options of cosine_with_min_lr",
        ),
        (
            {"training": {"schedule": "linear", "schedule_options": {"min_lr": 1e-6}}},
            "training.schedule_options: get_linear_schedule_with_warmup() got an unexpected keyword argument 'min_lr'; "
            "correct the options of linear",
        ),
        (
            {"evaluation": {"perplexity": {}}},
            "evaluation.perplexity.data: is missing; name a text that the model is not tuned on",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_a_recipe_lacks_here_is_a_line_before_anything_is_loaded(
    changes: dict[str, Any], line: str, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without a GPU, bitsandbytes and wandb. The sentences are promised here, once."""
    found = importlib.util.find_spec
    lacking = ("bitsandbytes", "wandb")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in lacking else found(name))
    with pytest.raises(RecipeError) as raised:
        check(small_recipe(small_model, **changes), tmp_path / "run")
    assert list(raised.value.problems) == [line]


def test_a_dry_run_downloads_no_weights_of_the_hub(small_model: Path, tmp_path: Path, hub: Hub) -> None:
    hub.add("models/someone/model", small_model)
    recipe = small_recipe("someone/model")
    check(recipe, tmp_path / "run")
    check(recipe, tmp_path / "run", ask_hub=True)
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.safetensors"))
    measured = small_recipe("someone/model", evaluation={"perplexity": {"data": "someone/text"}})
    check(measured, tmp_path / "run")
    with refused(RecipeError, "evaluation.perplexity.data: someone/text: "):
        check(measured, tmp_path / "run", ask_hub=True)
    files = hub.files("models/someone/model")
    hub.add("models/someone/model", {name: files[name] for name in files if name != "model.safetensors"})
    with refused(ModelError, "someone/model: ", "safetensors"):
        check(recipe, tmp_path / "run", ask_hub=True)


def test_data_that_cannot_be_prepared_is_refused_in_a_line(small_model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"body": "a"}')
    rows = str(tmp_path / "rows.jsonl")
    for source, where, name in (("gone.txt", "gone.txt: ", "no such file"), (rows, f"{rows}:1: ", "columns: body")):
        with refused(RecipeError, f"data.source: {where}", name) as raised:
            check_data(small_recipe(small_model, data={"source": source}))
        assert len(raised.value.problems) == 1
    with refused(ModelError, "./gone: "):
        check_data(small_recipe("./gone"))


@pytest.mark.parametrize("enough", [True, False])
def test_text_that_is_too_short_is_refused_before_it_is_packed(enough: bool, small_model: Path, tmp_path: Path) -> None:
    """Packing refused it; a dry run said nothing."""
    target, steps, batch_size = 128, 3, 2
    tokens = target * steps * batch_size
    text = tmp_path / "short.txt"
    text.write_text("a" * (tokens if enough else tokens - 2))
    recipe = small_recipe(
        small_model,
        context={"target": target},
        data={"source": str(text)},
        training={"steps": steps, "global_batch_size": batch_size},
    )
    if enough:
        check_data(recipe)
        return
    for refuse in (check_data, lambda recipe: check(recipe, tmp_path / "run")):
        with refused(RecipeError, f"data.source: {text}: ", "7 sequences of 128 tokens", "6 are needed"):
            refuse(recipe)


def test_a_plan_that_does_not_fit_is_refused_except_with_force() -> None:
    def plan(target: int, gpu: str) -> TrainingPlan:
        recipe = small_recipe(LLAMA, context={"target": target}, hardware={"gpus": 1}, training={})
        return plan_of(recipe, find_gpu(gpu))

    assert plan_or_refuse(LLAMA, plan(8192, "H100"))[0].startswith(f"{LLAMA}: 2048 to 8192 tokens, ")
    tight = plan(131072, "T4")
    with refused(PiLoraError, "it does not fit on T4", "tuning.method=qlora data.positions=pose", "--force"):
        plan_or_refuse(LLAMA, tight)
    assert "tuning.method=qlora data.positions=pose" in plan_or_refuse(LLAMA, tight, force=True)[-1]
    [line] = plan_or_refuse(LLAMA, None)
    assert line.startswith(f"{LLAMA}: no plan")


@pytest.mark.parametrize(("attention", "fails"), [("auto", False), ("sdpa", False), ("eager", True)])
def test_context_parallelism_takes_all_gpus_and_one_kernel(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: str, fails: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    model = {"name": str(small_model), "attention": attention}
    recipe = small_recipe(small_model, model=model, hardware={"gpus": 2, "context_parallel": 2})
    if not fails:
        check(recipe, tmp_path / "run")
        return
    with refused(RecipeError, "hardware.context_parallel: ", "model.attention: sdpa"):
        check(recipe, tmp_path / "run")


def test_what_needs_a_gpu_is_allowed_on_one(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    training = {"precision": "float16", "optimizer": "paged_adamw_8bit"}
    hardware = {"gpus": 1, "offload_activations": True}
    check(small_recipe(small_model, training=training, hardware=hardware), tmp_path / "run")


def test_an_interrupted_run_is_checked_against_its_recipe(lora_run: Path, small_model: Path, tmp_path: Path) -> None:
    staging = Path(shutil.copytree(lora_run, staging_path(tmp_path / "run")))
    recipe = small_recipe(small_model)
    check(recipe, tmp_path / "run", resume=True)
    other = small_recipe(small_model, tuning={"rank": 8})
    with refused(PiLoraError, "tuning.rank: 8 ", "4"):
        check(other, tmp_path / "run", resume=True)
    shutil.rmtree(staging)
    with refused(PiLoraError, f"{tmp_path / 'run'}: ", "--resume"):
        check(recipe, tmp_path / "run", resume=True)


def test_every_mistake_is_a_line_of_its_own(recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mistakes of the data were one line where another kind of mistake came too."""
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    (tmp_path / "out").write_text("x")
    wrong = ["data.source.name=boks/", "evaluation.perplexity.data=gone.txt", "context.target=32"]
    assert run_command("train", "recipe.yaml", "--dry-run", "--output", "out", *wrong) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if ": " in line]
    assert [line.partition(": ")[0] for line in lines if not line.startswith("loading")] == [
        "context.target",
        "data.source",
        "evaluation.perplexity.data",
        "out",
    ]
