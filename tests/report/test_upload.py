"""`push` sends what a run or model needs, no more, and nothing private; what is wrong is one line before it sends."""

import json
import shutil
import signal
from pathlib import Path

import pytest
import yaml
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file

from conftest import refused, run_captured, small_recipe
from hub import TOKEN, Hub
from pi_lora.__main__ import leave_at_once
from pi_lora.errors import ModelError
from pi_lora.report.card import write_report
from pi_lora.report.upload import push
from reported import make_run, passkey, perplexity

# huggingface_hub 2.4 hands a file to httpx2 in a way that httpx2 is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The hub, with a login."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


@pytest.fixture
def run(lora_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(lora_run, tmp_path / "run"))


@pytest.fixture
def model(full_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(full_run, tmp_path / "model"))


def contents(folder: Path, model: Path | None = None) -> dict[str, bytes]:
    """Every file; the folder of its base is known by its last name."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    if model is None:
        return files
    facts = json.loads(files["run.json"])
    del facts["directory"]
    files["run.json"] = json.dumps(facts, indent=2).encode() + b"\n"
    return {name: content.replace(str(model).encode(), b"model") for name, content in files.items()}


@pytest.mark.parametrize("run", ["lora_run", "full_run"])
def test_push_uploads_exactly_the_files_of_the_run(
    run: str, hub: Hub, small_model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = shutil.copytree(request.getfixturevalue(run), tmp_path / "run")
    (folder / "modeling_own.py").write_text("the code of the model")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    wanted = contents(folder, small_model)
    (folder / "checkpoint-10").mkdir()
    for name in (
        "training_args.bin",
        "optimizer.pt",
        "optimizer.safetensors",
        "checkpoint-10/model.safetensors",
        ".env",
        "script.py",
    ):
        (folder / name).write_bytes(b"secret")
    assert push(folder, "me/model") == f"{hub.url}/me/model"
    assert hub.files("models/me/model") == wanted
    assert not hub.repositories["models/me/model"].private


def test_an_interrupted_upload_says_what_is_on_the_hub(
    run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C during an upload is not answered as during the import of libraries."""
    answers = []

    def interrupt(*_: object, **__: object) -> None:
        answers.append(signal.getsignal(signal.SIGINT))
        raise KeyboardInterrupt

    monkeypatch.setattr(HfApi, "create_commit", interrupt)
    before = signal.signal(signal.SIGINT, leave_at_once)
    try:
        status, _, err = run_captured(capsys, monkeypatch, "push", str(run), "me/model")
    finally:
        signal.signal(signal.SIGINT, before)
    assert answers == [signal.default_int_handler]
    assert status == 130
    line = err.splitlines()[-1]
    assert line.startswith("me/model: interrupted")
    assert "weights" in line
    assert hub.stored


def with_code(folder: Path) -> None:
    """Add modules to a model, of which each imports the next."""
    modules = {
        "modeling_own.py": "from .layers import Layer",
        "layers.py": "from .operations import add",
        "operations.py": "import math",
    }
    for name, code in modules.items():
        (folder / name).write_text(code)


def test_the_modules_and_vocabulary_of_a_models_own_code_are_uploaded(run: Path, hub: Hub) -> None:
    push(run, "me/model")
    without_code = hub.files("models/me/model").keys()
    with_code(run)
    (run / "own.tiktoken").write_text("IQ== 0")
    (run / "vocab.bpe").write_text("a b")
    (run / "own.spm").write_bytes(b"vocabulary")
    (run / "script.py").write_text("from .other import secret")
    (run / "other.py").write_text("secret = 1")
    push(run, "me/model")
    added = hub.files("models/me/model").keys() - without_code
    assert added == {"modeling_own.py", "layers.py", "operations.py", "own.tiktoken", "vocab.bpe", "own.spm"}


def test_code_that_imports_a_missing_module_is_refused(run: Path, hub: Hub) -> None:
    with_code(run)
    (run / "operations.py").unlink()
    with refused(ModelError, f"{run / 'operations.py'}: ", "modeling_own.py"):
        push(run, "me/model")
    assert hub.log == []


def test_code_that_imports_a_file_elsewhere_is_refused(run: Path, hub: Hub, tmp_path: Path) -> None:
    secret = tmp_path / "secret.py"
    secret.write_text("secret")
    for path in (tmp_path / "secret", "../secret"):
        (run / "modeling_own.py").write_text(f"from .{path} import secret")
        with refused(ModelError, f"{run / 'modeling_own.py'}: ", "secret.py"):
            push(run, "me/model")
    assert hub.log == []


SHARDS = [
    "model.safetensors-0000{}-of-00002.safetensors",
    "model-0000{}-of-000002.safetensors",
    "model-{}-of-2.safetensors",
]


def in_shards(folder: Path, pattern: str) -> None:
    """Put the two halves of the weights of a model into files of their own, with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number in (1, 2):
        part = {name: tensors[name] for name in names[number - 1 :: 2]}
        weight_map |= dict.fromkeys(part, pattern.format(number))
        save_file(part, folder / pattern.format(number))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("pattern", SHARDS)
def test_the_weights_of_the_index_are_uploaded_under_any_name(pattern: str, model: Path, hub: Hub) -> None:
    in_shards(model, pattern)
    push(model, "me/model")
    pushed = hub.files("models/me/model")
    for number in (1, 2):
        name = pattern.format(number)
        assert pushed[name] == (model / name).read_bytes()


def test_a_model_that_lacks_a_file_of_its_index_is_refused(model: Path, hub: Hub) -> None:
    in_shards(model, SHARDS[0])
    lacking = model / SHARDS[0].format(2)
    lacking.unlink()
    with refused(ModelError, f"{lacking}: "):
        push(model, "me/model")
    assert hub.log == []


def test_a_single_file_counts_before_an_index_beside_it(model: Path, hub: Hub) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    push(model, "me/model")
    assert "model.safetensors" in hub.files("models/me/model")


PRIVATE = "/home/jürgen m/secret project"


def test_no_local_path_is_uploaded(small_model: Path, hub: Hub, tmp_path: Path) -> None:
    """Neither in what runs and results say of themselves, nor in the card; names on the hub stay."""
    sources = [{"name": f"{PRIVATE}/a&b.txt"}, {"name": "../books/*.txt"}, {"name": "owner/books"}]
    evaluation = {"benchmarks": {"data": [f"boolq={PRIVATE}/dev.jsonl"], "tasks": ["boolq"]}, "perplexity": {}}
    recipe = small_recipe(small_model, data={"source": sources}, evaluation=evaluation)
    scores = {"model": f"{PRIVATE}/run"}
    swept = perplexity(9.0, 8.0, data=f"{PRIVATE}/novels.txt")
    run = make_run(small_model, tmp_path / "run", {"passkey": {**passkey(96), **scores}, "perplexity": swept}, recipe)
    write_report(run, html=True)
    facts = {"base": str(small_model), "run": f"{PRIVATE}/run", "checks": [f"{PRIVATE}/run"]}
    (run / "merge.json").write_text(json.dumps(facts))
    before = contents(run)
    push(run, "me/model")
    pushed = hub.files("models/me/model")
    assert pushed.keys() == before.keys() - {"report.html"}
    texts = {name: content.decode() for name, content in pushed.items() if not name.endswith((".safetensors", ".png"))}
    for name, text in texts.items():
        for private in (
            str(tmp_path),
            str(small_model),
            "jürgen",
            "j\\u00fcrgen",
            "secret project",
            "../books",
        ):
            assert private not in text, name
    assert json.loads(texts["run.json"])["origin"]["path"] == "model"
    assert json.loads(texts["adapter_config.json"])["base_model_name_or_path"] == "model"
    recipe = yaml.safe_load(texts["recipe.yaml"])
    assert [each["name"] for each in recipe["data"]["source"]] == ["a&b.txt", "*.txt", "owner/books"]
    assert recipe["evaluation"]["benchmarks"]["data"] == ["boolq=dev.jsonl"]
    assert json.loads(texts["merge.json"])["checks"] == ["run"]
    assert "`a&b.txt`" in texts["README.md"]
    assert contents(run) == before


def test_push_uploads_the_newest_scores_and_prints_no_token(
    run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "scores").mkdir()
    (run / "scores" / "passkey.json").write_text(json.dumps(passkey(96)))
    status, out, err = run_captured(capsys, monkeypatch, "push", str(run), "model", "--private")
    assert (status, out) == (0, f"{hub.url}/me/model\n")
    assert TOKEN not in err
    assert hub.repositories["models/me/model"].private
    assert b"| k_max at 128 | 96 tokens |" in hub.files("models/me/model")["README.md"]


def test_private_is_refused_for_a_public_repository(lora_run: Path, hub: Hub) -> None:
    hub.add("models/me/model", {})
    with refused(ModelError, f"{hub.url}/me/model: ", "public", "--private"):
        push(lora_run, "me/model", private=True)
    assert hub.files("models/me/model") == {}


@pytest.mark.parametrize("other", ["model.safetensors", "adapter_config.json", "pytorch_model-00001-of-00002.bin"])
def test_weights_of_another_model_do_not_stay_beside_those_of_a_push(
    full_run: Path, lora_run: Path, hub: Hub, other: str
) -> None:
    """transformers would load the one or the other."""
    hub.add("models/me/model", {other: b"other"})
    run = lora_run if other == "model.safetensors" else full_run
    with refused(ModelError, f"{hub.url}/me/model: ", other):
        push(run, "me/model")
    assert hub.files("models/me/model") == {other: b"other"}


def test_a_run_is_pushed_again(lora_run: Path, hub: Hub) -> None:
    push(lora_run, "me/model")
    first = hub.files("models/me/model")
    push(lora_run, "me/model")
    assert hub.files("models/me/model") == first


def test_a_link_to_a_file_elsewhere_is_refused(run: Path, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("secret")
    (run / "tokenizer.model").symlink_to(tmp_path / "a.json")
    with refused(ModelError, f"{run}/tokenizer.model: ", "link"):
        push(run, "me/model")
    (run / "tokenizer.model").unlink()
    (run / "scores").symlink_to(tmp_path)
    with refused(ModelError, f"{run}/scores/a.json: ", "link"):
        push(run, "me/model")
    assert hub.log == []


def test_a_refusal_of_the_hub_is_one_line(
    lora_run: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused(ModelError, "others/model: ", "You don't have the rights to create"):
        push(lora_run, "others/model")
    with refused(ModelError, "a/b/c: ", "name"):
        push(lora_run, "a/b/c")
    run = shutil.copytree(lora_run, tmp_path / "run")
    card = run / "README.md"
    card.write_text(card.read_text().replace("---\n", "---\nbase_model: /home/me/base\n", 1))
    with refused(ModelError, "me/model: ", '"base_model" is not valid'):
        push(run, "me/model")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with refused(ModelError, "me/model: ", "token", "hf auth login") as raised:
        push(lora_run, "me/model")
    assert "hf_wrong" not in str(raised.value)
    monkeypatch.delenv("HF_TOKEN")
    with refused(ModelError, "me/model: ", "token", "hf auth login"):
        push(lora_run, "me/model")
    assert hub.files("models/me/model") == {}


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("lora_run", "config.json"),
        ("lora_run", "README.md"),
        ("full_run", "*.safetensors"),
    ],
)
def test_a_folder_that_lacks_a_part_is_refused(
    run: str, name: str, hub: Hub, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    part = shutil.copytree(request.getfixturevalue(run), tmp_path / "run", ignore=shutil.ignore_patterns(name))
    with refused(ModelError, f"{part / name}: "):
        push(part, "me/model")
    assert hub.log == []
