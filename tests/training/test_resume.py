"""A run that ends early goes on to the weights that it would have had."""

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import pi_lora
from conftest import refused, run_command, small_recipe, train
from operations import before_each
from pi_lora.errors import Diverged, Interrupted, RecipeError, RunExistsError
from pi_lora.recipe.files import dump_recipe
from pi_lora.recipe.schema import Recipe
from pi_lora.run import Run, step_of
from pi_lora.staging import staging_path
from random_runs import save_base
from small_configs import MIXTRAL

STEPS = 6


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(next(run.glob("*.safetensors")))


def assert_same_weights(run: Path, expected: dict[str, torch.Tensor]) -> None:
    found = weights(run)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "training.jsonl").read_text().splitlines()]


def recipe_for(model: Path, **changes: object) -> Recipe:
    """Six steps with dropout, so that the random state matters too."""
    training = {**small_recipe(model).training.model_dump(), "steps": STEPS, "save_every": 2, **changes}
    return small_recipe(model, training=training, tuning={"rank": 4, "dropout": 0.1})


def interrupt_at(step: int, recipe: Recipe, output: Path, number: signal.Signals = signal.SIGINT) -> None:
    """Train until a signal comes while a step is reported, which is noticed after the next one."""

    def interrupt(done: int, total: int, note: str) -> None:
        if done == step and total == recipe.training.steps:
            os.kill(os.getpid(), number)

    with refused(Interrupted, f"{output}: ", f"step {step + 1}", f"pi-lora train {output} --resume"):
        train(recipe, output, progress=interrupt)
    assert not output.exists()
    assert step_of(Run(staging_path(output)).checkpoints[0]) == step + 1


@pytest.fixture(scope="module")
def whole(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a run that nothing disturbed."""
    return weights(train(recipe_for(small_model), tmp_path_factory.mktemp("whole") / "run"))


@pytest.fixture(scope="module")
def begun(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that Ctrl-C ended after step 3 of 6, of a process that took a terabyte."""
    output = tmp_path_factory.mktemp("begun") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pi_lora.training.callbacks.peak_memory", lambda: 2**40)
        interrupt_at(2, recipe_for(small_model), output)
    return output


@pytest.fixture
def output(begun: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(staging_path(begun), staging_path(tmp_path / "run"))
    return tmp_path / "run"


def test_a_resumed_run_keeps_its_auto_precision(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumption goes on in the precision that the run began in, on a machine that would choose another one, too."""
    output, fast = tmp_path / "run", "pi_lora.models.device.has_fast_bfloat16"
    monkeypatch.setattr(fast, lambda: True)
    interrupt_at(1, recipe_for(small_model, precision="auto", steps=3), output)
    assert Run(staging_path(output)).metadata.precision == "bfloat16"
    monkeypatch.setattr(fast, lambda: False)
    train(recipe_for(small_model, precision="auto", steps=3), output, resume=True)
    assert Run(output).metadata.precision == "bfloat16"
    assert_same_weights(output, weights(train(recipe_for(small_model, precision="bfloat16", steps=3), tmp_path / "b")))


@pytest.fixture
def heard() -> Iterator[None]:
    """A connection that drops is heard, also where the tests run under nohup, which trainings go on under."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_training_after_a_checkpoint(
    small_model: Path, tmp_path: Path, number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    interrupt_at(1, recipe_for(small_model), tmp_path / "run", number)
    assert ("stopping after this step" in capfd.readouterr().err) is (number == signal.SIGINT)


def test_an_interrupted_run_is_resumed_to_the_same_weights(
    output: Path, small_model: Path, whole: dict[str, torch.Tensor]
) -> None:
    """Under the same recipe; how often it is saved and logged may change."""
    with refused(RunExistsError, f"{output}: ", staging_path(output), f"pi-lora train {output} --resume"):
        train(recipe_for(small_model), output)
    with refused(RecipeError, "training.learning_rate: ", 0.5, 0.01):
        train(recipe_for(small_model, learning_rate=0.5), output, resume=True)
    before = Run(staging_path(output)).log[-1]
    train(recipe_for(small_model, save_every=4, log_every=2), output, resume=True)
    assert_same_weights(output, whole)
    assert steps_of(output) == [1, 2, 3, 4, 6]
    assert Run(output).log[-1]["seconds"] > before["seconds"] > 0
    assert Run(output).metadata.peak_memory == 2**40, "the process before the resume is forgotten"
    assert not (output / "checkpoints").exists()


@pytest.mark.parametrize(("file", "kept"), [(r"checkpoint-4/\W*complete", 2), (r"\.partial$", 6)])
def test_an_error_during_a_save_keeps_the_checkpoint_before(
    file: str, kept: int, small_model: Path, whole: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """At the mark of a checkpoint, or when the run is renamed."""
    output = tmp_path / "run"

    class Killed(BaseException):
        pass

    def strike(_number: int, _event: str, path: str) -> None:
        if re.search(file, path) and Run(staging_path(output)).last_checkpoint:
            raise Killed

    with pytest.raises(Killed), before_each(tmp_path, strike):
        train(recipe_for(small_model), output)
    assert not output.exists()
    last = Run(staging_path(output)).last_checkpoint
    assert last
    assert step_of(last) == kept
    assert_same_weights(train(recipe_for(small_model), output, resume=True), whole)


def test_commands_name_an_interrupted_run_and_train_resumes_it(
    output: Path, whole: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    """And resumed by it under the recipe that it began with, whatever became of the file."""
    for command in (("eval", "perplexity"), ("eval", "all"), ("report",), ("push",)):
        assert run_command(*command, str(output), *["me/model"] * (command == ("push",))) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"{output}: interrupted at step 3 of 6; " in said
        assert said.endswith(f"pi-lora train {output} --resume")
    assert run_command("train", str(output), "--resume", "training.log_every=4") == 0
    assert_same_weights(output, whole)
    last = Run(output).log[-1]
    said = " ".join(capsys.readouterr().out.split())
    assert f"{output}: step 6, loss {last['loss']:.3f}, a minute, " in said
    assert f"measure it with pi-lora eval perplexity {output} --data HELD_OUT_TEXT" in said


def examples(folder: Path) -> dict[str, object]:
    """Of very different lengths, which are batched by length."""
    rows = [{"question": "cat " * (1 + 7 * number % 11), "answer": f"{number}"} for number in range(30)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = str(folder / "rows.jsonl")
    return {"source": source, "template": "{question}", "completion": "answer", "completion_tokens": 9, "epochs": 9}


@pytest.fixture(scope="module", params=["packed", "examples"])
def interrupted(
    request: pytest.FixtureRequest, small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Recipe, Path]:
    """A recipe, and a folder with the run of it that nothing disturbed and one that was interrupted."""
    folder = tmp_path_factory.mktemp("interrupted")
    data = {"source": "builtin:stdlib"} if request.param == "packed" else examples(folder)
    training = {**small_recipe(small_model).training.model_dump(), "steps": 10, "global_batch_size": 4}
    recipe = small_recipe(small_model, data=data, training={**training, "precision": "float32"})
    train(recipe, folder / "undisturbed")
    interrupt_at(5, recipe, folder / "run")
    return recipe, folder


ONE_ROW = {"per_device_batch_size": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"training": {**ONE_ROW, "activation_checkpointing": "selective"}, "model": {"attention": "sdpa"}},
        {"training": {**ONE_ROW, "activation_checkpointing": True, "mlp_chunk_tokens": 16}},
    ],
    ids=["selective", "chunks"],
)
def test_a_run_resumed_with_less_memory_has_the_same_weights(
    interrupted: tuple[Recipe, Path], changes: dict[str, dict[str, object]], tmp_path: Path
) -> None:
    """Up to rounding, over the end of an epoch of 30 examples."""
    recipe, folder = interrupted
    output = tmp_path / "run"
    shutil.copytree(staging_path(folder / "run"), staging_path(output))
    sections = {name: getattr(recipe, name).changed(**keys) for name, keys in changes.items()}
    train(recipe.model_copy(update=sections), output, resume=True)
    assert steps_of(output) == list(range(1, 11))
    undisturbed = weights(folder / "undisturbed")
    for name, tensor in weights(output).items():
        torch.testing.assert_close(tensor, undisturbed[name], rtol=1e-3, atol=1e-5)


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
            with refused(RecipeError, "hardware: weights are sharded"):
                check(recipe("lora", **before), recipe("lora", **now))
    check(recipe("lora", gpus=2), recipe("lora", gpus=4, machines=2))
    check(recipe("qlora"), recipe("qlora", gpus=2))


def test_resume_needs_an_interrupted_run(small_model: Path, tmp_path: Path) -> None:
    with refused(RunExistsError, f"{tmp_path / 'run'}: no interrupted run", "--resume"):
        train(recipe_for(small_model), tmp_path / "run", resume=True)


def test_a_finished_run_is_not_resumed(lora_run: Path) -> None:
    for recipe, output in ((lora_run, None), ("demo", lora_run)):
        with refused(RunExistsError, f"{lora_run}: is finished"):
            pi_lora.train(recipe, output=output, resume=True)


def test_divergence_stops_training_and_keeps_the_last_good_checkpoint(small_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    recipe = recipe_for(small_model, learning_rate=1e12, save_every=1, warmup_steps=0, precision="float32")
    with refused(Diverged, "training.learning_rate: ", "1e+12") as raised:
        train(recipe, output)
    kept = Run(staging_path(output)).last_checkpoint
    assert kept
    assert str(kept) in str(raised.value)
    assert all(torch.isfinite(tensor).all() for tensor in weights(kept).values())
    assert not output.exists()


def test_full_tuning_of_experts_is_resumed_with_their_weights(tmp_path: Path) -> None:
    """transformers saves fused experts under the names of earlier versions, which its Trainer does not load."""
    base = save_base(MIXTRAL, tmp_path / "base")
    training = {**small_recipe(base).training.model_dump(), "steps": 4, "learning_rate": 0.01}
    recipe = small_recipe(base, training=training, tuning={"method": "full"})
    undisturbed = weights(train(recipe, tmp_path / "whole"))
    interrupt_at(1, recipe, tmp_path / "run")
    assert_same_weights(train(recipe, tmp_path / "run", resume=True), undisturbed)
