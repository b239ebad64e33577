"""A run knows by content what it was made from: names and paths come to mean something else."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import refused, small_recipe, train
from pi_lora.api import load, merge
from pi_lora.errors import Interrupted, ModelError, RecipeError
from pi_lora.model_ref import ModelRef
from pi_lora.models.resolve import resolve_model
from pi_lora.recipe.schema import Recipe
from pi_lora.run import RUN_FILE, Run
from pi_lora.staging import staging_path
from pi_lora.types import Permissions
from random_runs import put_on_hub, save_run

WEIGHTS = "model.safetensors"
TEXT = {"source": "builtin:recall"}


def other_weights(base: Path) -> None:
    """Give a model other weights of the same shape, in a file of the same size and time."""
    file = base / WEIGHTS
    state = file.stat()
    tensors = {name: tensor + 0.01 * torch.randn(tensor.shape) for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert file.stat().st_size == state.st_size


@pytest.fixture(scope="module")
def made(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `base`, and with `run`, which was tuned there from `base` by its relative path."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copytree(small_model, folder / "base")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        steps = {"steps": 1, "global_batch_size": 1}
        train(small_recipe("base", training=steps, data={"source": "builtin:recall"}), Path("run"))
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    """A copy of it, whose run was tuned here."""
    folder = Path(shutil.copytree(made, tmp_path / "place"))
    file = folder / "run" / RUN_FILE
    content = json.loads(file.read_text())
    assert content["origin"]["path"] == str(made / "base")
    content["origin"]["path"] = str(folder / "base")
    file.write_text(json.dumps(content))
    return folder


def test_a_base_with_other_weights_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    load("run")
    other_weights(place / "base")
    with refused(ModelError, f"run: base ({place / 'base'}) has other weights", "allow_mismatch=True"):
        load("run")
    with refused(ModelError, "run: base"):
        merge(Path("run"), Path("merged"))
    assert not Path("merged").exists()
    further = small_recipe("run", context={"target": 100}, scaling="keep", data={"source": "builtin:recall"})
    with refused(ModelError, "run: base"):
        train(further, Path("further"))
    load(ModelRef("run", allow_mismatch=True))
    merge(ModelRef(Path("run"), allow_mismatch=True), Path("merged"), check="none")


def test_a_relative_base_is_found_from_another_folder(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere there is another `base`, of the same shape."""
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(place / "base", elsewhere / "base")
    other_weights(elsewhere / "base")
    monkeypatch.chdir(elsewhere)
    base = resolve_model(str(place / "run"))
    assert (base.base.name, base.base.path) == ("base", place / "base")
    load(str(place / "run"))
    # Once it has moved, what is here is looked at, and is not it.
    (place / "base").rename(place / "moved")
    with refused(ModelError, f"{place / 'run'}: base (base) has other weights"):
        load(str(place / "run"))
    merged = merge(ModelRef(place / "run", base=str(place / "moved")), tmp_path / "merged", check="none").folder
    assert merged.is_dir()


def interrupted(recipe: Recipe, output: Path) -> None:
    """Train until after a checkpoint."""

    def interrupt(done: int, total: int, note: str = "") -> None:
        if done == 2:
            raise Interrupted("now")

    with pytest.raises(Interrupted):
        train(recipe, output, progress=interrupt)
    assert Run(staging_path(output)).metadata.origin


def test_a_run_is_not_resumed_with_another_base_tokenizer_or_text(small_model: Path, tmp_path: Path) -> None:
    base, book, output = tmp_path / "base", tmp_path / "book.txt", tmp_path / "run"
    shutil.copytree(small_model, base)
    book.write_text("one two three " * 4000)
    steps = {"steps": 2, "global_batch_size": 1, "save_every": 1, "learning_rate": 1e-3}
    recipe = small_recipe(base, training=steps, data={"source": str(book)}, tuning={"rank": 2})
    interrupted(recipe, output)
    other_weights(base)
    with refused(ModelError, f"{output}: weights changed", "--allow-mismatch"):
        train(recipe, output, resume=True)
    # Another one that gives this text the same ids.
    file = base / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 1023, "content": "<none>"})
    file.write_text(json.dumps(content))
    with refused(ModelError, f"{output}: weights and tokenizer changed"):
        train(recipe, output, resume=True)
    book.write_text("one two four " * 4000)
    with refused(ModelError, f"{output}: weights and tokenizer and data changed"):
        train(recipe, output, resume=True)
    train(recipe, output, resume=True, permissions=Permissions(allow_mismatch=True))
    assert output.is_dir()


@pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning")
@pytest.mark.parametrize("of_adapter", [False, True], ids=["base", "adapter"])
def test_a_run_is_resumed_at_its_commit_after_a_push_to_the_hub(
    of_adapter: bool, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the recipe names the commit or not; of an adapter it is that of the base, which no recipe names."""
    put_on_hub(small_model, "someone/model", tmp_path, monkeypatch)
    name = "someone/model"
    scaling = "pi"
    if of_adapter:
        name = str(save_run(small_model, tmp_path / "adapter", r=4, target_modules=["q_proj"]))
        settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        settings["base_model_name_or_path"] = "someone/model"
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
        scaling = "keep"
    steps = {"steps": 3, "global_batch_size": 1, "save_every": 1, "learning_rate": 1e-3}
    tuning = {"rank": 4, "alpha": 8, "target_modules": ["q_proj"], "modules_to_save": "nothing"}

    def recipe(revision: str) -> Recipe:
        model = {"name": name, "revision": revision}
        return small_recipe(name, training=steps, tuning=tuning, scaling=scaling, model=model, data=TEXT)

    undisturbed = load_file(train(recipe("main"), tmp_path / "undisturbed") / "adapter_model.safetensors")
    output, copy = tmp_path / "run", tmp_path / "copy"
    interrupted(recipe("main"), output)
    kept = tmp_path / "models--someone--model"
    pushed = Path(shutil.copytree(kept / "snapshots" / ("a" * 40), kept / "snapshots" / ("b" * 40)))
    other_weights(pushed)
    (kept / "refs" / "main").write_text("b" * 40)
    with refused(RecipeError, "model.revision: ", "b" * 40, "main"):
        train(recipe("b" * 40), output, resume=True)
    shutil.copytree(staging_path(output), staging_path(copy))
    resumed = [train(recipe("main"), output, resume=True)]
    if not of_adapter:
        resumed.append(train(recipe("a" * 40), copy, resume=True))
    for run in resumed:
        assert Run(run).commit == "a" * 40
        tensors = load_file(run / "adapter_model.safetensors")
        assert all(torch.equal(tensor, undisturbed[name]) for name, tensor in tensors.items())


def test_digests_depend_on_content_alone(small_model: Path, tmp_path: Path) -> None:
    """Not of the names, places or number of files."""
    first = resolve_model(str(small_model)).base.weights_digest
    folder = Path(shutil.copytree(small_model, tmp_path / "parts"))
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, mine in parts.items():
        save_file({name: tensors[name] for name in mine}, folder / file, metadata={"format": "pt", "by": file})
    index = {name: file for file, mine in parts.items() for name in mine}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    assert resolve_model(str(folder)).base.weights_digest == first
    tensors["model.norm.weight"][3] += 1e-6
    save_file({name: tensors[name] for name in parts["one.safetensors"]}, folder / "one.safetensors")
    save_file({name: tensors[name] for name in parts["two.safetensors"]}, folder / "two.safetensors")
    assert resolve_model(str(folder)).base.weights_digest != first
