"""The functions of `pi_lora` give what the commands write."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import pi_lora
from conftest import refused, reporting, run_captured, small_recipe
from pi_lora import Extension, ModelRef, api, terminal
from pi_lora.errors import Interrupted, PiLoraError, RecipeError
from pi_lora.evaluation.measurement import as_json
from pi_lora.recipe.files import dump_recipe


def test_paths_are_taken_where_strings_are(small_model: Path, lora_run: Path, tmp_path: Path) -> None:
    plan = pi_lora.plan("demo", {"model.name": small_model, "context.target": 128, "data.source": tmp_path}, gpu="cpu")
    assert plan.recipe.model.name == str(small_model)
    assert pi_lora.resolve(ModelRef(lora_run, base=small_model)).base.name == str(small_model)
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("Some words of a text. " * 9000)
    for number, data in enumerate((texts, str(texts), [texts])):
        recipe = pi_lora.new("builtin:tiny", 512, gpu="cpu", data=data, output=tmp_path / f"{number}.yaml")
        assert str(texts) in recipe.read_text()


def test_wrong_arguments_are_refused_before_work_begins(lora_run: Path, tmp_path: Path) -> None:
    with refused(PiLoraError, "check: logit: ", "tensors, logits, none"):
        pi_lora.merge(lora_run, tmp_path / "merged", check="logit")  # type: ignore[arg-type]
    with refused(PiLoraError, "compare: ", "float32", "bfloat16"):
        pi_lora.compare(ModelRef(lora_run, dtype="float32"), ModelRef(lora_run, dtype="bf16"))
    with refused(PiLoraError, "ModelRef: ", "ModelSource"):
        ModelRef(pi_lora.resolve(lora_run))  # type: ignore[arg-type]
    with pytest.raises(IsADirectoryError):
        pi_lora.plan("demo", gpu="cpu", json=tmp_path)
    assert not list(tmp_path.parent.glob(".*.part"))
    assert list(tmp_path.iterdir()) == []


def test_functions_return_what_commands_write(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(dump_recipe(small_recipe(small_model)))
    monkeypatch.setattr(terminal, "LINE_INTERVAL", 0.0)
    pi_lora.train("mine", {"training.steps": 1}, output="adapters/one", progress=False)
    assert not any(capsys.readouterr())
    steps: list[int] = []
    with reporting(lambda done, total, note: steps.append(total)):
        made = pi_lora.train("mine", "training.steps=2")
    assert (made.path, steps[-1]) == (Path("adapters/mine"), 2)
    assert pi_lora.merge(made).folder == Path("models/mine")
    assert str(pi_lora.load("models/mine")) == "models/mine: 128 tokens, scale 2, torch.float32 on cpu"

    perplexity = pi_lora.evaluate(made, "perplexity", data="builtin:stdlib", windows=[64, 128], documents=1)
    loaded = pi_lora.load(made)
    capsys.readouterr()
    passkey = pi_lora.evaluate(loaded, "passkey", depths=2, trials=1, progress=True)
    out, err = capsys.readouterr()
    assert (out, err.partition(":")[0]) == ("", f"passkey {made}")
    plan = pi_lora.plan("mine", gpu="cpu")
    options = {
        "perplexity": f"eval perplexity {made} --data builtin:stdlib --windows 64,128 --documents 1".split(),
        "passkey": ["eval", "passkey", str(made), "--depths", "2", "--trials", "1"],
        "plan": ["plan", "mine", "--gpu", "cpu"],
    }
    told = {"perplexity": as_json(perplexity), "passkey": as_json(passkey), "plan": plan.as_json()}
    for name, words in options.items():
        assert run_captured(capsys, monkeypatch, *words, "--json", f"{name}.json")[0] == 0
        written = json.loads(Path(f"{name}.json").read_text())
        assert {key: told[name][key] for key in written} == written


def test_train_refuses_a_recipe_for_several_processes(tmp_path: Path) -> None:
    two = ("hardware.gpus=2", "training.per_device_batch_size=1")
    with refused(RecipeError, "hardware: ", 2, "pi-lora train"):
        pi_lora.train("demo", *two, output=tmp_path / "run")


def test_a_rank_beyond_the_machines_is_refused_before_data_is_packed(tmp_path: Path) -> None:
    """Counted from 1, the last machine would wait for another one."""
    two = ("hardware.machines=2", "training.per_device_batch_size=1")
    job = api.resolve_training("demo", *two, output=tmp_path / "run")
    with refused(RecipeError, "--machine-rank: 2: ", "hardware.machines", "begin at 0"):
        api.launch_arguments(job, ["train", "demo"], rank=2, address="10.0.0.1")


@pytest.mark.parametrize("target", [-5, 0, "far"])
def test_a_target_that_is_no_number_of_tokens_is_one_line(target: int, tmp_path: Path) -> None:
    with refused(PiLoraError, "target: "):
        pi_lora.new("builtin:tiny", target, output=tmp_path / "new.yaml")


def test_an_extension_is_asked_for_and_longer_than_the_window(lora_run: Path, tmp_path: Path) -> None:
    cases: list[tuple[Any, str]] = [
        (ModelRef("builtin:tiny", extension=Extension(-5)), "context.target: -5 "),
        (ModelRef("builtin:tiny"), "builtin:tiny: "),
        (ModelRef(lora_run, extension=Extension(4096)), f"{lora_run}: "),
        (pi_lora.resolve(lora_run), f"{lora_run}: "),
    ]
    for model, where in cases:
        with refused(PiLoraError, where):
            pi_lora.extend(model, tmp_path / "extended")


def test_models_and_files_may_be_paths_runs_or_in_the_home_folder(
    small_model: Path, lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(small_model, tmp_path / "model")
    assert pi_lora.resolve("~/model").window == pi_lora.resolve(small_model).window == 64
    run = pi_lora.Run(lora_run)
    merged = pi_lora.merge(run, "~/merged")
    assert merged.folder == tmp_path / "merged"
    for model in (run, merged, pi_lora.resolve(run), pi_lora.load(run)):
        scores = pi_lora.evaluate(model, "passkey", depths=1, trials=1, json="~/scores.json")
        assert scores.window == 128
    assert json.loads((tmp_path / "scores.json").read_text())["target"] == 128


def test_models_of_a_list_are_measured_side_by_side(small_model: Path, lora_run: Path, tmp_path: Path) -> None:
    models = [ModelRef(small_model, dtype="bf16"), pi_lora.resolve(lora_run)]
    options = {"target": 128, "depths": 1, "trials": 1}
    for given in (models, tuple(models)):
        both = pi_lora.evaluate(given, "passkey", json=tmp_path / "both.json", **options)
        assert [(scores.model, scores.dtype) for scores in both] == [
            (str(small_model), "bfloat16"),
            (str(lora_run), "float32"),
        ]
    assert [row["model"] for row in json.loads((tmp_path / "both.json").read_text())] == [
        str(small_model),
        str(lora_run),
    ]
    [alone] = pi_lora.evaluate(models[1:], "passkey", **options)
    assert alone == both[1]


def test_a_dtype_may_be_short(small_model: Path, lora_run: Path) -> None:
    loaded = pi_lora.load(ModelRef(small_model, dtype="bf16"))
    assert loaded.dtype == "bfloat16"
    assert pi_lora.load(ModelRef(lora_run, dtype="bf16")).dtype == "bfloat16"
    assert pi_lora.evaluate(loaded, "passkey", target=256, depths=1, trials=1).dtype == "bfloat16"
    with refused(PiLoraError, "dtype: int8: ", "bfloat16, float16, float32"):
        pi_lora.load(ModelRef(small_model, dtype="int8"))


@pytest.mark.parametrize(
    ("measurement", "options", "where", "name"),
    [
        ("perplexitty", {}, "perplexitty: ", "perplexity, context"),
        ("passkey", {"depths": 0}, "depths: ", "greater than 0"),
        ("passkey", {"deaths": 1}, "deaths: ", "depths"),
        ("perplexity", {"windows": [64], "stride": 65}, "stride: 65 ", "64"),
    ],
)
def test_a_wrong_option_is_one_line(
    small_model: Path, measurement: str, options: dict[str, object], where: str, name: str
) -> None:
    with refused(PiLoraError, where, name):
        pi_lora.evaluate(small_model, measurement, **options)


def test_permissions_are_given_in_python_as_on_the_command_line(
    lora_run: Path, small_model: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(small_model, base)
    weights = load_file(base / "model.safetensors")
    save_file({name: tensor * 2 for name, tensor in weights.items()}, base / "model.safetensors", {"format": "pt"})
    with refused(PiLoraError, f"{lora_run}: ", base, "weights", "allow"):
        pi_lora.load(ModelRef(lora_run, base=str(base)))
    assert pi_lora.load(ModelRef(lora_run, base=str(base), allow_mismatch=True))


def test_load_takes_the_options_of_a_name_as_arguments(lora_run: Path, small_model: Path) -> None:
    loaded = pi_lora.load(lora_run, base=small_model, dtype="bf16", revision="main")
    assert (loaded.dtype, loaded.source.base.name) == ("bfloat16", str(small_model))
    assert pi_lora.resolve("builtin:tiny", extension=Extension(512, scaling="yarn")).window == 512
    assert pi_lora.resolve(small_model, trust_remote_code=True).permissions.trust_remote_code
    assert pi_lora.load(loaded) is loaded
    for given in (ModelRef(lora_run), loaded):
        with refused(PiLoraError, "dtype: ", "ModelRef"):
            pi_lora.load(given, dtype="bf16")


def test_a_recipe_may_be_a_mapping_or_a_recipe(small_model: Path, tmp_path: Path) -> None:
    """As the file of it; it has no name, so the run needs one."""
    recipe = small_recipe(small_model)
    values = recipe.model_dump(mode="json")
    values["model"] = {"name": small_model}
    for given in (recipe, values):
        assert pi_lora.plan(given, {"training.steps": 3}, gpu="cpu").recipe.training.steps == 3
        assert pi_lora.resolve_recipe(given).recipe == recipe
        with refused(RecipeError, "output: "):
            pi_lora.train(given)
    run = pi_lora.train(values, "training.steps=1", output=tmp_path / "run", progress=False)
    assert run.recipe.training.steps == 1
    with refused(RecipeError, "recipe: training.stepps: ", "steps"):
        pi_lora.plan({**values, "training": {"stepps": 1}}, gpu="cpu")


def test_messages_name_arguments_in_python_and_options_in_commands(
    lora_run: Path,
    small_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "there").mkdir()
    calls: list[tuple[Callable[[], object], str, tuple[str, ...]]] = [
        (lambda: pi_lora.plan("demo", gpu="4.8GB"), "gpu: 4.8GB: ", ("plan", "demo", "--gpu", "4.8GB")),
        (lambda: pi_lora.resolve("gone/run", base="x"), "gone/run: ", ("merge", "gone/run", "--base", "x")),
        (
            lambda: pi_lora.evaluate(small_model, "perplexity", data="gone.txt"),
            "data: gone.txt: ",
            ("eval", "perplexity", str(small_model), "--data", "gone.txt"),
        ),
    ]
    for call, where, words in calls:
        with refused(PiLoraError, where) as error:
            call()
        assert "--" not in str(error.value).partition("pi-lora ")[0]
        option = "--" if words[0] != "merge" else ""
        assert run_captured(capsys, monkeypatch, *words)[2].splitlines()[-1].startswith(option + where)


def test_a_module_is_measured_beside_what_resolve_returns(small_model: Path) -> None:
    module = pi_lora.load(small_model).module
    for function in (pi_lora.load, pi_lora.resolve):
        with refused(PiLoraError, "LlamaForCausalLM: ", "LoadedModel(resolve(name), module"):
            function(module)
    loaded = pi_lora.LoadedModel(pi_lora.resolve(small_model), module)
    assert (
        pi_lora.evaluate(loaded, "perplexity", data="builtin:stdlib", windows=[32], documents=1).windows[0].window == 32
    )
    with refused(PiLoraError, "an empty name: "):
        pi_lora.resolve("")


def test_a_run_is_named_by_a_string(lora_run: Path) -> None:
    assert pi_lora.Run(str(lora_run)).recipe == pi_lora.Run(lora_run).recipe  # type: ignore[arg-type]
    assert {"__version__", "errors"} <= set(dir(pi_lora))


def test_a_loaded_model_has_no_journal_since_its_weights_may_change(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PI_LORA_CACHE", str(tmp_path))

    def stop(done: int, total: int, note: str = "") -> None:
        raise KeyboardInterrupt

    for model, is_journalled in ((pi_lora.load(small_model), False), (small_model, True)):
        with reporting(stop), pytest.raises((KeyboardInterrupt, Interrupted)):
            pi_lora.evaluate(model, "passkey", target=256, depths=2, trials=1)
        assert bool(list(tmp_path.glob("evaluations/*"))) is is_journalled
