"""A run that ends early goes on to the weights that it would have had."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import pi_lora
from conftest import run_command, small_recipe, train
from pi_lora.errors import Diverged, Interrupted, RecipeError, RunExistsError
from pi_lora.recipe.files import dump_recipe
from pi_lora.recipe.schema import Recipe
from pi_lora.run import Run
from pi_lora.staging import staging_path
from pi_lora.training.trainer import Trainer
from random_runs import save_base
from small_configs import MIXTRAL

STEPS = 12


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(next(run.glob("*.safetensors")))


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "training.jsonl").read_text().splitlines()]


def recipe_for(model: Path, **changes: object) -> Recipe:
    """Twelve steps with dropout, so that the random state matters too."""
    training = {**small_recipe(model).training.model_dump(), "steps": STEPS, "save_every": 3, **changes}
    return small_recipe(model, training=training, tuning={"rank": 4, "dropout": 0.1})


@pytest.fixture(scope="module")
def whole(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a run that nothing disturbed."""
    return weights(train(recipe_for(small_model), tmp_path_factory.mktemp("whole") / "run"))


def interrupt_at(step: int, recipe: Recipe, output: Path, number: signal.Signals = signal.SIGINT) -> None:
    def interrupt(done: int, total: int, note: str) -> None:
        if done == step and total == recipe.training.steps:
            os.kill(os.getpid(), number)

    with pytest.raises(
        Interrupted, match=r"after step \d+, a checkpoint is kept; resume it with pi-lora train \S+ --resume$"
    ):
        train(recipe, output, progress=interrupt)
    assert not output.exists()


def test_a_resumed_run_keeps_its_auto_precision(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumption goes on in the precision that the run began in, on a machine that would choose another one, too."""
    output, fast = tmp_path / "run", "pi_lora.models.device.has_fast_bfloat16"
    monkeypatch.setattr(fast, lambda: True)
    interrupt_at(4, recipe_for(small_model, precision="auto"), output)
    assert Run(staging_path(output)).metadata.precision == "bfloat16"
    monkeypatch.setattr(fast, lambda: False)
    train(recipe_for(small_model, precision="auto"), output, resume=True)
    assert Run(output).metadata.precision == "bfloat16"
    undisturbed = weights(train(recipe_for(small_model, precision="bfloat16"), tmp_path / "whole"))
    assert all(torch.equal(tensor, undisturbed[name]) for name, tensor in weights(output).items())


@pytest.fixture
def heard() -> Iterator[None]:
    """A connection that drops is heard, also where the tests run under nohup, which trainings go on under."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_training_after_a_checkpoint_and_resume_gives_the_same_weights(
    small_model: Path,
    tmp_path: Path,
    whole: dict[str, torch.Tensor],
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    recipe, output = recipe_for(small_model), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("pi_lora.training.callbacks.peak_memory", lambda: 2**40)
        interrupt_at(5, recipe, output, number)
    assert ("stopping after this step" in capfd.readouterr().err) is (number == signal.SIGINT)
    with pytest.raises(RunExistsError, match=f"resume it with pi-lora train {output} --resume"):
        train(recipe, output)
    train(recipe, output, resume=True)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in weights(output).items())
    assert steps_of(output) == list(range(1, STEPS + 1))
    assert Run(output).metadata.peak_memory == 2**40, "the process before the resume is forgotten"
    assert not (output / "checkpoints").exists()


def test_a_run_is_not_resumed_under_another_recipe(small_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    interrupt_at(5, recipe_for(small_model), output)
    with pytest.raises(RecipeError, match=r"training.learning_rate: 0.5 given, but the .* run began with 0.01"):
        train(recipe_for(small_model, learning_rate=0.5), output, resume=True)
    # How often it is saved and logged may change.
    train(recipe_for(small_model, save_every=4, log_every=2), output, resume=True)


def examples(folder: Path) -> dict[str, object]:
    """Of very different lengths, which are batched by length."""
    rows = [{"question": "cat " * (1 + 7 * number % 11), "answer": f"{number}"} for number in range(30)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = str(folder / "rows.jsonl")
    return {"source": source, "template": "{question}", "completion": "answer", "completion_tokens": 9, "epochs": 9}


LESS_MEMORY = [
    {"training": {"per_device_batch_size": 1}},
    {"training": {"activation_checkpointing": True, "mlp_chunk_tokens": 16}},
    {"training": {"activation_checkpointing": "selective"}},
    {"model": {"attention": "sdpa"}},
]


@pytest.fixture(scope="module", params=["packed", "examples"])
def interrupted(
    request: pytest.FixtureRequest, small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Recipe, Path]:
    """A recipe, and a folder with the run of it that nothing disturbed and one that was interrupted."""
    folder = tmp_path_factory.mktemp("interrupted")
    data = {"source": "builtin:stdlib"} if request.param == "packed" else examples(folder)
    training = {**small_recipe(small_model).training.model_dump(), "steps": STEPS, "global_batch_size": 4}
    recipe = small_recipe(small_model, data=data, training={**training, "precision": "float32"})
    train(recipe, folder / "undisturbed")
    interrupt_at(5, recipe, folder / "run")
    return recipe, folder


@pytest.mark.parametrize("change", LESS_MEMORY, ids=str)
def test_a_run_resumed_with_less_memory_has_the_same_weights(
    interrupted: tuple[Recipe, Path], change: dict[str, dict[str, object]], tmp_path: Path
) -> None:
    """Up to rounding, over the end of an epoch of 30 examples."""
    recipe, folder = interrupted
    output = tmp_path / "run"
    shutil.copytree(staging_path(folder / "run"), staging_path(output))
    sections = {name: getattr(recipe, name).changed(**keys) for name, keys in change.items()}
    train(recipe.model_copy(update=sections), output, resume=True)
    assert steps_of(output) == list(range(1, STEPS + 1))
    undisturbed = weights(folder / "undisturbed")
    for name, tensor in weights(output).items():
        torch.testing.assert_close(tensor, undisturbed[name], rtol=1e-3, atol=1e-5)


def test_hardware_does_not_change_the_order_of_examples(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which a resumed run may change."""
    orders: list[list[int]] = []

    def ordered(self: Trainer, checkpoint: Path | None) -> None:
        assert self.groups
        self.groups.set_epoch(1)
        orders.append(list(self.groups))
        raise Interrupted("now")

    monkeypatch.setattr(Trainer, "train", ordered)
    training = {**small_recipe(small_model).training.model_dump(), "global_batch_size": 8}
    for hardware in ({}, {"cpu_processes": 2}, {"cpu_processes": 2, "machines": 2}):
        recipe = small_recipe(small_model, data=examples(tmp_path), training=training, hardware=hardware)
        with pytest.raises(Interrupted):
            train(recipe, tmp_path / "run")
    assert orders[0] == orders[1] == orders[2]
    assert sorted(orders[0]) == list(range(30)) != orders[0]


def test_a_run_of_one_gpu_is_not_resumed_in_shards(small_model: Path, tmp_path: Path) -> None:
    """The checkpoints are other files."""
    run, training = Run(tmp_path), {"per_device_batch_size": 1, "global_batch_size": 8}
    (tmp_path / "run.json").write_text('{"python": "3"}')

    def recipe(method: str, **hardware: int) -> Recipe:
        return small_recipe(small_model, training=training, tuning={"method": method}, hardware=hardware)

    def check(before: Recipe, now: Recipe) -> None:
        (tmp_path / "recipe.yaml").write_text(dump_recipe(before))
        run.check_same_recipe(now)

    for hardware in ({}, {"gpus": 1}, {"cpu_processes": 2}):
        check(recipe("lora"), recipe("lora", **hardware))
        for before, now in ((hardware, {"gpus": 2}), ({"gpus": 2}, hardware)):
            with pytest.raises(RecipeError, match=r"^hardware: weights are sharded before or now, but not both"):
                check(recipe("lora", **before), recipe("lora", **now))
    check(recipe("lora", gpus=2), recipe("lora", gpus=4, machines=2))
    check(recipe("qlora"), recipe("qlora", gpus=2))


def test_commands_name_an_interrupted_run_and_train_resumes_it(
    small_model: Path, tmp_path: Path, whole: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    """And resumed by it under the recipe that it began with, whatever became of the file."""
    output = tmp_path / "run"
    interrupt_at(5, recipe_for(small_model), output)
    for command in (("eval", "perplexity"), ("eval", "all"), ("report",), ("push",)):
        assert run_command(*command, str(output), *["me/model"] * (command == ("push",))) == 2
        known = f"{output}: interrupted at step 6 of 12; resume it with pi-lora train {output} --resume"
        assert " ".join(capsys.readouterr().err.split()).endswith(known)
    assert run_command("train", str(output), "--resume", "training.log_every=4") == 0
    assert all(torch.equal(tensor, whole[name]) for name, tensor in weights(output).items())
    last = Run(output).log[-1]
    said = " ".join(capsys.readouterr().out.split())
    assert f"{output}: step 12, loss {last['loss']:.3f}, a minute, " in said
    assert f"measure it with pi-lora eval perplexity {output} --data HELD_OUT_TEXT" in said


def test_resume_needs_an_interrupted_run(small_model: Path, tmp_path: Path) -> None:
    with pytest.raises(RunExistsError, match="no interrupted run to resume"):
        train(recipe_for(small_model), tmp_path / "run", resume=True)


def test_a_finished_run_is_not_resumed(lora_run: Path) -> None:
    for recipe, output in ((lora_run, None), ("demo", lora_run)):
        with pytest.raises(RunExistsError, match="is finished; nothing is left to resume"):
            pi_lora.train(recipe, output=output, resume=True)


def test_divergence_stops_training_and_keeps_the_last_good_checkpoint(small_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    recipe = recipe_for(small_model, learning_rate=1e12, save_every=1, warmup_steps=0, precision="float32")
    with pytest.raises(Diverged, match=r"of step \d+ became infinite or NaN at a rate of 1e\+12") as raised:
        train(recipe, output)
    kept = Run(staging_path(output)).last_checkpoint
    assert kept
    assert str(kept) in str(raised.value)
    assert all(torch.isfinite(tensor).all() for tensor in weights(kept).values())
    assert not output.exists()


def test_seconds_add_up_over_a_resumed_run(small_model: Path, tmp_path: Path) -> None:
    """A line is written with every checkpoint, whatever `log_every` says."""
    recipe, output = recipe_for(small_model, log_every=STEPS), tmp_path / "run"
    interrupt_at(5, recipe, output)
    before = Run(staging_path(output)).log[-1]
    train(recipe, output, resume=True)
    assert before["step"] == 6
    assert Run(output).log[-1]["seconds"] > before["seconds"] > 0


def test_full_tuning_of_experts_is_resumed_with_their_weights(tmp_path: Path) -> None:
    """transformers saves fused experts under the names of earlier versions, which its Trainer does not load."""
    base = save_base(MIXTRAL, tmp_path / "base")
    training = {**small_recipe(base).training.model_dump(), "steps": STEPS, "save_every": 3, "learning_rate": 0.01}
    recipe = small_recipe(base, training=training, tuning={"method": "full"})
    undisturbed = weights(train(recipe, tmp_path / "whole"))
    interrupt_at(5, recipe, tmp_path / "run")
    resumed = weights(train(recipe, tmp_path / "run", resume=True))
    for name, tensor in undisturbed.items():
        assert torch.equal(tensor, resumed[name]), name
