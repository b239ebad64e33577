"""Models with Python code of their own: which code runs, and that what is written brings it."""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM

from conftest import refused, run_command, small_recipe, train
from pi_lora.api import export_gguf, extend, load, merge
from pi_lora.errors import ModelError
from pi_lora.model_ref import ModelRef
from pi_lora.models.files import read_config, save_config
from pi_lora.models.resolve import resolve_model
from pi_lora.scaling.extension import Extension
from pi_lora.scaling.rope import Rope
from pi_lora.serving.gguf import CONVERTER
from pi_lora.types import Permissions

TRUST = Permissions(trust_remote_code=True)
FILES = {
    "configuration_lamp.py": """
from transformers import LlamaConfig

class LampConfig(LlamaConfig):
    model_type = "lamp"
""",
    "modeling_lamp.py": """
from transformers import LlamaForCausalLM, LlamaModel
from .configuration_lamp import LampConfig
from .wick import NUMBER

class LampModel(LlamaModel):
    config_class = LampConfig

class LampForCausalLM(LlamaForCausalLM):
    config_class = LampConfig
    number = NUMBER
""",
}
CLASSES = {
    "AutoConfig": "configuration_lamp.LampConfig",
    "AutoModel": "modeling_lamp.LampModel",
    "AutoModelForCausalLM": "modeling_lamp.LampForCausalLM",
}


def number_of(model: object) -> object:
    """The number in the module that the code of a model imports; None of a model without code of its own."""
    return getattr(type(model), "number", None)


def configured(folder: Path, **entries: object) -> None:
    """Change entries of the config of a folder."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def with_code(small_model: Path, folder: Path, number: int = 1) -> Path:
    """A copy of the small model with code of its own, in three modules."""
    shutil.copytree(small_model, folder)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "wick.py").write_text(f"NUMBER = {number}\n")
    configured(folder, model_type="lamp", auto_map=CLASSES)
    return folder


@pytest.fixture
def base(small_model: Path, tmp_path: Path) -> Path:
    return with_code(small_model, tmp_path / "base")


@pytest.fixture(scope="module")
def lora_run_with_code(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA run of a base with code; copied, never changed."""
    folder = tmp_path_factory.mktemp("lamp")
    return train(small_recipe(with_code(small_model, folder / "base")), folder / "run", permissions=TRUST)


@pytest.fixture
def run(lora_run_with_code: Path, base: Path, tmp_path: Path) -> Path:
    """A copy of that run which was tuned on `base`."""
    copy = Path(shutil.copytree(lora_run_with_code, tmp_path / "run"))
    before = lora_run_with_code.with_name("base")
    for name in ("run.json", "adapter_config.json"):
        text = (copy / name).read_text()
        assert str(before) in text
        (copy / name).write_text(text.replace(str(before), str(base)))
    return copy


@pytest.fixture
def commits(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commits of `acme/lamp` on the hub, the newest with other code: in the cache, where a download leaves them."""
    kept = tmp_path / "hub" / "models--acme--lamp"
    commits = []
    for number in (1, 2):
        # Loaded modules are kept by commit.
        commit = hashlib.sha1(f"{FILES} {number}".encode()).hexdigest()
        folder = with_code(small_model, kept / "snapshots" / commit, number)
        # As transformers 4 writes it.
        configured(folder, auto_map={key: f"acme/lamp--{name}" for key, name in CLASSES.items()})
        commits.append(commit)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(commits[-1])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return commits


def check_self_contained(folder: Path, number: int) -> None:
    """Check that plain transformers loads a folder with the code that it was made with, from that folder alone."""
    assert read_config(folder)["auto_map"] == CLASSES
    code = {file.name for file in folder.glob("*.py")}
    assert code == {*FILES, "wick.py"}
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert number_of(model) == number
    assert Rope(read_config(folder)).window == 128
    assert type(AutoModel.from_pretrained(folder, trust_remote_code=True)).__name__ == "LampModel"


def test_code_is_that_of_the_pinned_revision(commits: list[str]) -> None:
    for revision, number in ((commits[0], 1), ("main", 2), (commits[0], 1)):
        source = resolve_model(ModelRef("acme/lamp", trust_remote_code=True, revision=revision))
        extended = source.extended(Extension(128, 64))
        assert number_of(source.base.meta_model) == number
        assert number_of(load(extended).module) == number


def test_a_run_of_a_hub_model_runs_and_writes_the_code_of_its_commit(commits: list[str], tmp_path: Path) -> None:
    recipe = small_recipe("", model={"name": "acme/lamp", "revision": commits[0]})
    run = train(recipe, tmp_path / "run", permissions=TRUST)
    assert number_of(load(ModelRef(run, trust_remote_code=True)).module.get_base_model()) == 1
    merged = merge(ModelRef(run, trust_remote_code=True), tmp_path / "merged", check="logits").folder
    check_self_contained(merged, 1)
    words = ("extend", "acme/lamp", "--target", "128", "--scaling", "yarn", "--output", str(tmp_path / "new"))
    assert run_command(*words) == 2
    assert run_command(*words, "--trust-remote-code") == 0
    check_self_contained(tmp_path / "new", 2)
    # The card loads the base under the config of the run.
    assert {file.name for file in run.glob("*.py")} == {*FILES, "wick.py"}
    assert "trust_remote_code=True" in (run / "README.md").read_text()


def test_what_a_folder_with_code_becomes_needs_neither_that_folder_nor_this_machine(
    run: Path, base: Path, tmp_path: Path
) -> None:
    full = train(small_recipe(base, tuning={"method": "full"}), tmp_path / "full", permissions=TRUST)
    made = [full]
    made.append(merge(ModelRef(run, trust_remote_code=True), tmp_path / "merged").folder)
    made.append(
        extend(ModelRef(base, extension=Extension(128, scaling="yarn"), trust_remote_code=True), tmp_path / "extended")
    )
    moved = base.rename(tmp_path / "moved")
    for folder in made:
        assert str(base) not in (folder / "config.json").read_text()
        check_self_contained(folder, 1)
        assert number_of(load(ModelRef(folder, trust_remote_code=True)).module) == 1
        assert "trust_remote_code=True" in (folder / "README.md").read_text()
    with refused(ModelError, str(run), base, "--base"):
        resolve_model(ModelRef(str(run), trust_remote_code=True))
    assert number_of(load(ModelRef(run, base=str(moved), trust_remote_code=True)).module.get_base_model()) == 1
    check_self_contained(merge(ModelRef(run, base=str(moved), trust_remote_code=True), tmp_path / "again").folder, 1)
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp" / CONVERTER).write_text("raise SystemExit('the converter ran')")
    with refused(ModelError, "", "the converter ran"):
        export_gguf(
            ModelRef(run, base=str(moved), trust_remote_code=True),
            tmp_path / "a.gguf",
            converter=tmp_path / "llama.cpp",
        )


def test_a_class_of_config_that_transformers_has_gets_the_models_code_for_this_model_alone(
    base: Path, small_model: Path
) -> None:
    code = (base / "modeling_lamp.py").read_text().replace("LampConfig", "LlamaConfig")
    code = code.replace("from .configuration_lamp", "from transformers")
    (base / "modeling_lamp.py").write_text(code)
    configured(base, model_type="llama", auto_map={"AutoModelForCausalLM": CLASSES["AutoModelForCausalLM"]})
    with_permission = load(ModelRef(base, trust_remote_code=True, extension=Extension(128, 64))).module
    assert number_of(with_permission) == 1
    assert type(load(ModelRef(small_model, trust_remote_code=True)).module) is LlamaForCausalLM
    # transformers has a class for such a model: without permission it is that.
    without = resolve_model(str(base))
    assert type(load(without).module) is LlamaForCausalLM
    assert "auto_map" not in without.config


def test_an_adapter_names_no_code(run: Path, base: Path) -> None:
    strange = {key: f"stranger/model--{name}" for key, name in CLASSES.items()}
    save_config({**read_config(run), "auto_map": strange}, run)
    assert resolve_model(ModelRef(str(run), trust_remote_code=True)).config["auto_map"] == CLASSES
    configured(base, model_type="llama", auto_map={})
    configured(run, model_type="llama")
    assert "auto_map" not in resolve_model(ModelRef(str(run), trust_remote_code=True)).config


def test_two_folders_of_one_name_run_their_own_code(small_model: Path, tmp_path: Path) -> None:
    sources = []
    for number in (1, 2):
        folder = with_code(small_model, tmp_path / str(number) / "model", number)
        sources.append(resolve_model(ModelRef(str(folder), trust_remote_code=True)))
    assert [number_of(load(source).module) for source in sources] == [1, 2]


def test_a_library_that_the_code_imports_is_named(base: Path) -> None:
    file = base / "modeling_lamp.py"
    file.write_text("import lampblack\n" + file.read_text())
    with refused(ModelError, str(base), "lampblack", "install") as raised:
        resolve_model(ModelRef(str(base), trust_remote_code=True))
    assert "has no" not in str(raised.value)
    assert "lampblack" not in sys.modules
