"""A training makes a complete run that loads again, and leaves the process as it was."""

import importlib.metadata
import json
import logging
import os
import shutil
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file

from conftest import small_recipe, train
from pi_lora.api import load
from pi_lora.distributed import STOP_SIGNALS
from pi_lora.errors import Diverged, Interrupted
from pi_lora.evaluation.suite import measuring_command
from pi_lora.model_ref import ModelRef
from pi_lora.models.resolve import resolve_model
from pi_lora.models.saving import write_generation_config
from pi_lora.recipe.files import load_recipe
from pi_lora.recipe.schema import Recipe
from pi_lora.run import Run
from pi_lora.scaling.extension import Extension
from pi_lora.scaling.rope import Rope
from pi_lora.training.callbacks import LIBRARY_LOG, redirect_library_logs
from pi_lora.training.trainer import trainer_arguments


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(next(run.glob("*.safetensors")))


def log_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "training.jsonl").read_text().splitlines()]


def test_a_lora_run_folder_is_complete(lora_run: Path, small_model: Path) -> None:
    names = {path.name for path in lora_run.iterdir()}
    assert names == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "config.json",
        "generation_config.json",
        "recipe.yaml",
        "run.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.jsonl",
    }
    config = json.loads((lora_run / "config.json").read_text())
    assert (Rope(config).scale, Rope(config).window) == (2, 128)
    assert json.loads((lora_run / "tokenizer_config.json").read_text())["model_max_length"] == 128
    assert load_recipe(lora_run / "recipe.yaml").recipe == small_recipe(small_model)
    made_with = json.loads((lora_run / "run.json").read_text())
    assert made_with["versions"]["torch"] == importlib.metadata.version("torch")
    assert made_with["trainable_parameters"] > 0
    assert not list(lora_run.parent.glob(".*"))


def test_the_log_has_one_line_for_each_step(lora_run: Path) -> None:
    log = log_of(lora_run)
    assert [line["step"] for line in log] == [1, 2, 3, 4]
    assert [line["tokens"] for line in log] == [256, 512, 768, 1024]
    assert [line["learning_rate"] for line in log] == pytest.approx([1e-3, 5.5e-3, 1e-2, 1e-2])
    assert all(line["loss"] > 0 and line["tokens_per_second"] > 0 and line["peak_memory"] > 1e8 for line in log)


@pytest.mark.parametrize(
    ("source", "asked_for"),
    [
        ({"name": "rows.jsonl"}, " --data HELD_OUT_ROWS"),
        ({"name": "rows.jsonl", "hold_out": 0.1}, ""),
        ({"name": "you/rows"}, ""),
    ],
)
def test_summaries_are_asked_for_of_rows_that_did_not_train(
    lora_run: Path, small_model: Path, source: dict[str, object], asked_for: str
) -> None:
    data = {"source": source, "document": "text", "summary": "gist", "completion_tokens": 20}
    recipe = small_recipe(small_model, data=data)
    command = measuring_command(str(lora_run), recipe)
    assert command == f"pi-lora eval summarization {lora_run}{asked_for}"


def test_a_run_of_full_tuning_loads_as_a_model(full_run: Path, small_model: Path) -> None:
    loaded = load(str(full_run))
    assert (loaded.scale, loaded.window) == (2, 128)
    base = load(str(small_model)).module.state_dict()
    moved = [name for name, weight in loaded.module.state_dict().items() if not torch.equal(weight, base[name])]
    assert set(moved) == set(base)


@pytest.fixture
def base(small_model: Path, tmp_path: Path) -> Path:
    """A copy of the small model, published in float16."""
    base = Path(shutil.copytree(small_model, tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    return base


def test_a_full_run_has_the_dtype_of_its_weights_and_the_generation_config_of_its_base(
    base: Path, tmp_path: Path
) -> None:
    """In the dtype of the base engines and `load` on a GPU would round the weights. transformers saves no such config
    of Vicuna's, neither with a checkpoint nor with the run. Engines would not stop after a turn, which ends with <s>.
    """
    (base / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n<s>{% endfor %}")
    settings = {"temperature": 0.9, "top_p": 0.6, "top_k": 5, "do_sample": False, "pad_token_id": -1}
    generation = base / "generation_config.json"
    generation.write_text(json.dumps({"bos_token_id": 0, "eos_token_id": [1, 7], **settings}))
    training = {**small_recipe(base).training.model_dump(), "steps": 2, "save_every": 1}
    run = train(small_recipe(base, training=training, tuning={"method": "full"}), tmp_path / "run")
    assert json.loads((run / "config.json").read_text())["dtype"] == "float32"
    written = json.loads((run / generation.name).read_text())
    assert written == {"bos_token_id": 0, "eos_token_id": [1, 7, 0], **settings}
    assert load(str(run)).module.generation_config.eos_token_id == [1, 7, 0]


@pytest.mark.parametrize(("given", "expected"), [(64, 128), (32, 32)])
def test_generated_texts_may_fill_the_new_window(base: Path, tmp_path: Path, given: int, expected: int) -> None:
    """Llama 2 limits them to its own window, beyond which transformers refuses prompts; other limits stay."""
    (base / "generation_config.json").write_text(json.dumps({"max_length": given}))
    write_generation_config(resolve_model(ModelRef(str(base), extension=Extension(128))), tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"max_length": expected}


def test_pose_trains_short_sequences_for_the_long_window(small_model: Path, tmp_path: Path) -> None:
    data = {"source": "builtin:recall", "positions": "pose"}
    run = train(small_recipe(small_model, data=data), tmp_path / "skip")
    assert (load(str(run)).scale, load(str(run)).window) == (2, 128)
    # Two sequences a step, of L tokens each.
    assert [line["tokens"] for line in log_of(run)] == [128, 256, 384, 512]


@pytest.mark.parametrize(
    ("scaling", "rope_type", "tuning", "factor"),
    [
        ("dynamic", "dynamic", {"rank_stabilized": True}, 8 / 4**0.5),
        ("yarn", "yarn", {"dropout": 0.5}, 8 / 4),
        ("direct", "default", {}, 8 / 4),
    ],
)
def test_scalings_and_kinds_of_lora_train_and_load_again(
    base: Path, tmp_path: Path, scaling: str, rope_type: str, tuning: dict[str, object], factor: float
) -> None:
    training = {**small_recipe(base).training.model_dump(), "steps": 1}
    recipe = small_recipe(base, scaling=scaling, tuning={"rank": 4, **tuning}, training=training)
    loaded = load(str(train(recipe, tmp_path / "run")))
    assert (loaded.source.original, loaded.window) == (64, 128)
    assert loaded.module.config.rope_parameters["rope_type"] == rope_type
    assert json.loads((tmp_path / "run" / "config.json").read_text())["dtype"] == "float16"
    layers = [module for module in loaded.module.modules() if isinstance(module, LoraLayer)]
    assert {layer.scaling["default"] for layer in layers} == {factor}
    assert {type(layer.lora_dropout["default"]) for layer in layers} == {torch.nn.Identity}


def test_tensorboard_logs_are_saved_with_the_run(small_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install pi-lora[tensorboard]")
    training = {**small_recipe(small_model).training.model_dump(), "steps": 1, "tracking": ["tensorboard"]}
    run = train(small_recipe(small_model, training=training), tmp_path / "run")
    assert [path.name.split(".")[0] for path in (run / "tensorboard").iterdir()] == ["events"]


def test_learning_rates_warm_up_from_a_tenth(small_model: Path, tmp_path: Path) -> None:
    """And fall as the schedule's options say."""
    training = {**small_recipe(small_model).training.model_dump(), "steps": 8, "warmup_steps": 4}
    schedule = {"schedule": "cosine_with_min_lr", "schedule_options": {"min_lr_rate": 0.1}}
    run = train(small_recipe(small_model, training={**training, **schedule}), tmp_path / "run")
    rates = [line["learning_rate"] / 1e-2 for line in log_of(run)]
    assert rates == pytest.approx([0.1, 0.325, 0.55, 0.775, 1, 0.8682, 0.55, 0.2318], abs=1e-4)


@pytest.fixture(scope="module")
def in_float32(small_model: Path) -> Recipe:
    training = {**small_recipe(small_model).training.model_dump(), "precision": "float32"}
    return small_recipe(small_model, training=training)


@pytest.fixture(scope="module")
def undisturbed(in_float32: Recipe, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The log of a training in float32."""
    return log_of(train(in_float32, tmp_path_factory.mktemp("undisturbed") / "run"))


def test_settings_of_accelerate_for_other_trainings_do_not_matter(
    in_float32: Recipe, undisturbed: list[dict[str, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the environment, they would change the precision, compile the model, or ask for packages."""
    for name, value in {"MIXED_PRECISION": "bf16", "DYNAMO_BACKEND": "EAGER", "USE_DEEPSPEED": "true"}.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    log = log_of(train(in_float32, tmp_path / "run"))
    for key in ("loss", "gradient_norm"):
        assert [line[key] for line in log] == [line[key] for line in undisturbed]


def test_messages_of_libraries_are_logged_with_each_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = logging.getLogger().handlers[:]
    # As lm-eval sets it.
    monkeypatch.setattr(logging.getLogger(), "level", logging.INFO)
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        with warnings.catch_warnings(), redirect_library_logs(folder):
            warnings.simplefilter("always")
            logging.getLogger("transformers.trainer").warning("of transformers")
            logging.getLogger("trl.trainer").warning("of TRL")
            logging.getLogger("trl.trainer").info("of no interest")
            warnings.warn(" ".join(["of", "torch"]), stacklevel=1)
        said = (folder / LIBRARY_LOG).read_text()
        assert [said.count(f"of {name}") for name in ("TRL", "torch", "no interest")] == [1, 1, 0]
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger().handlers == before


def test_liger_has_the_table_of_supported_models() -> None:
    patches = pytest.importorskip("liger_kernel.transformers.monkey_patch", reason="pip install pi-lora[liger]")
    assert {"llama", "mistral", "qwen3"} < set(patches.MODEL_TYPE_TO_APPLY_LIGER_FN)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing` is deprecated:FutureWarning")
def test_no_recipe_changes_how_checkpoints_logs_and_gradients_are_made(small_model: Path, tmp_path: Path) -> None:
    """A checkpoint before the newest is kept, a loss that is not a number is logged as it is, and nothing is drawn."""
    arguments = trainer_arguments(small_recipe(small_model), Run(tmp_path), "my run")
    expected = {
        "save_total_limit": 2,
        "logging_nan_inf_filter": False,
        "remove_unused_columns": False,
        "ddp_find_unused_parameters": False,
        "disable_tqdm": True,
        "log_level": "error",
        "log_level_replica": "error",
        "report_to": [],
        "run_name": "my run",
        "loss_type": "nll",
        "max_length": None,
        "packing": False,
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "include_num_input_tokens_seen": "all",
        "output_dir": str(tmp_path / "checkpoints"),
        "use_cpu": True,
        "n_gpu": 0,
    }
    assert {name: getattr(arguments, name) for name in expected} == expected
    assert arguments.accelerator_config.gradient_accumulation_kwargs == {"sync_each_batch": False}
    sharded = trainer_arguments(small_recipe(small_model, hardware={"gpus": 2}, training={}), Run(tmp_path), "my run")
    assert sharded.accelerator_config.gradient_accumulation_kwargs == {"sync_each_batch": True}
    summaries = {"source": "rows.jsonl", "document": "text", "summary": "gist", "completion_tokens": 20}
    padded = small_recipe(small_model, data=summaries)
    assert trainer_arguments(padded, Run(tmp_path), "my run").include_num_input_tokens_seen == "non_padding"


def process_state() -> dict[str, Any]:
    return {
        "signals": [signal.getsignal(number) for number in STOP_SIGNALS],
        "handlers": logging.getLogger().handlers[:],
        "shown warnings": warnings.showwarning,
        "verbosity": transformers.logging.get_verbosity(),
        "gradients": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "folder": os.getcwd(),
    }


@pytest.mark.parametrize("ends", ["finished", "interrupted", "diverged"])
def test_a_notebook_goes_on_as_before_after_a_training(ends: str, small_model: Path, tmp_path: Path) -> None:
    """Ctrl-C stops what runs next, and warnings are shown again, however the training ended."""
    training = {**small_recipe(small_model).training.model_dump(), "steps": 3, "warmup_steps": 0}
    if ends == "diverged":
        training["learning_rate"] = 1e20
    recipe = small_recipe(small_model, training=training)

    def stop(done: int, total: int, note: str = "") -> None:
        if ends == "interrupted" and done == 1:
            signal.raise_signal(signal.SIGINT)

    before = process_state()
    if ends == "finished":
        train(recipe, tmp_path / "run")
    else:
        with pytest.raises(Diverged if ends == "diverged" else Interrupted):
            train(recipe, tmp_path / "run", progress=stop)
    assert process_state() == before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_thread_of_a_program_without_gradients_trains(
    in_float32: Recipe, undisturbed: list[dict[str, float]], tmp_path: Path
) -> None:
    """Web interfaces call functions in threads, in which Python sets no signals; notebooks may turn gradients off."""

    def run() -> None:
        with torch.no_grad():
            train(in_float32, tmp_path / "run")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert [line["loss"] for line in log_of(tmp_path / "run")] == [line["loss"] for line in undisturbed]
