"""Models, data and runs on the hub, asked over HTTP by the real clients: a pushed run, and every fault."""

import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from conftest import refused, run_captured, small_recipe, train
from hub import OTHER_TOKEN, TOKEN, Fault, Hub, forget_commits
from pi_lora import api
from pi_lora.data.checks import data_problems
from pi_lora.data.sources import evaluation_documents, find_table, held_out_text, share_to_hold_out
from pi_lora.errors import DataError, ModelError, RecipeError
from pi_lora.model_ref import ModelRef
from pi_lora.models.files import PROCESSOR_FILES
from pi_lora.models.resolve import resolve_model
from pi_lora.preflight import check
from pi_lora.recipe.data import Data, Source
from pi_lora.recipe.evaluation import PerplexityOptions
from pi_lora.recipe.files import dump_recipe, load_recipe
from pi_lora.report.upload import push
from small_composites import other_tensors, save_composite, tuned

# huggingface_hub 2.4 hands a file to httpx2 in a way that httpx2 is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
MODEL = "models/me/tiny"
BOOKS = "datasets/me/books"


def parquet(texts: list[str]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), buffer)
    return buffer.getvalue()


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def texts(**fields: object) -> list[str]:
    source = Source.model_validate({"name": "me/books", **fields})
    return [document.text for document in find_table(source).documents()]


@pytest.fixture
def model(hub: Hub, small_model: Path) -> str:
    """The commit of `me/tiny` on the hub."""
    return hub.add(MODEL, small_model)


def logits(name: str) -> torch.Tensor:
    loaded = api.load(name)
    ids = torch.arange(2, 30)[None]
    with torch.no_grad():
        scores: torch.Tensor = loaded.module(input_ids=ids).logits
    return scores


def test_a_model_is_read_at_one_commit_with_one_request_for_each_file(hub: Hub, model: str, small_model: Path) -> None:
    source = resolve_model("me/tiny")
    assert source.base.commit == model
    asked = hub.asked()
    assert asked[0] == "GET /api/models/me/tiny/revision/main"
    names = sorted(path.name for path in small_model.iterdir() if path.suffix != ".safetensors")
    # Of the weights only the header is read: whether they hold a head of their own.
    assert sorted(line.rpartition("/")[2] for line in hub.asked("GET /me/tiny/resolve/")) == sorted(
        [*names, "model.safetensors"]
    )
    assert [line for line in asked if "main" in line] == asked[:1]
    hub.log.clear()
    assert torch.equal(logits("me/tiny"), logits(str(small_model)))
    assert hub.asked("GET /_stored/") == [f"GET /_stored/{next(iter(hub.stored))}"]
    hub.log.clear()
    resolve_model("me/tiny").base.download_weights()
    assert hub.asked() == ["GET /api/models/me/tiny/revision/main"]


def test_a_model_that_moved_on_is_read_where_it_was_resolved(hub: Hub, model: str, small_model: Path) -> None:
    source = resolve_model("me/tiny")
    moved = hub.files(MODEL) | {"config.json": b"{}", "model.safetensors": b"other"}
    newest = hub.add(MODEL, moved)
    assert source.base.weights_digest == resolve_model(str(small_model)).base.weights_digest
    assert resolve_model(ModelRef("me/tiny", revision=model)).base.weights_digest == source.base.weights_digest
    with refused(ModelError, "me/tiny: ", "config.json"):
        resolve_model("me/tiny")
    assert newest in hub.log[-1].path


def test_sharded_weights_are_read_from_all_their_files(hub: Hub, small_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(small_model, tmp_path / "sharded")
    (folder / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(small_model).save_pretrained(folder, max_shard_size="60KB")
    hub.add("models/me/sharded", folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert torch.equal(logits("me/sharded"), logits(str(small_model)))
    files = hub.files("models/me/sharded")
    shard = max(name for name in files if name.endswith(".safetensors"))
    hub.add("models/me/sharded", {name: content for name, content in files.items() if name != shard})
    with refused(ModelError, f"me/sharded: {shard}: "):
        api.load("me/sharded")


@pytest.mark.parametrize("size", ["60KB", "1GB"])
def test_another_head_than_the_config_ties_is_known_when_a_model_is_resolved(
    hub: Hub, small_model: Path, tmp_path: Path, size: str
) -> None:
    """As in Mistral Small, whose outer config ties what the language model does not; in several files and in one."""
    folder = shutil.copytree(small_model, tmp_path / "own_head")
    (folder / "model.safetensors").unlink()
    config = AutoConfig.from_pretrained(small_model)
    config.tie_word_embeddings = False
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size=size)
    tied = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(tied))
    hub.add("models/me/own_head", folder)
    for _ in ("nothing is in the cache", "all files are"):
        assert resolve_model("me/own_head").config["tie_word_embeddings"] is False
        assert torch.equal(logits("me/own_head"), logits(str(folder)))


def test_a_dry_run_refuses_a_model_with_the_head_of_a_classifier(hub: Hub, small_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(small_model, tmp_path / "classifier")
    config = AutoConfig.from_pretrained(small_model, pad_token_id=0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    hub.add("models/me/classifier", folder)
    recipe = small_recipe("me/classifier")
    with refused(ModelError, "me/classifier: ", "score.weight", "LlamaForSequenceClassification"):
        check(recipe, tmp_path / "run", ask_hub=True)


def test_a_composite_is_read_as_its_language_model(hub: Hub, tmp_path: Path) -> None:
    folder = save_composite("gemma3", tmp_path / "composite")
    hub.add("models/me/composite", folder)
    local = resolve_model(str(folder))
    source = resolve_model("me/composite")
    assert (source.window, source.config) == (local.window, local.config)
    assert source.base.weights_digest == local.base.weights_digest
    assert source.processor_files.keys() == local.processor_files.keys()


@pytest.mark.parametrize("streaming", [False, True])
def test_data_is_read_at_the_commit_that_a_name_means(hub: Hub, streaming: bool) -> None:
    first = hub.add(BOOKS, {"data/train.parquet": parquet(["one"])})
    hub.repositories[BOOKS].refs["v1"] = first
    hub.add(BOOKS, {"train.jsonl": jsonl(["a request"])}, ref="refs/pr/1")
    newest = hub.add(BOOKS, {"train.jsonl": jsonl(["two", "three"])})
    wanted = {"main": ["two", "three"], first: ["one"], "v1": ["one"], "refs/pr/1": ["a request"]}
    for revision, rows in wanted.items():
        assert texts(revision=revision, streaming=streaming) == rows
    assert find_table(Source(name="me/books", streaming=streaming)).identity == {"commit": newest}
    assert len(hub.asked("/revision/main")) == 1


def kinds(hub: Hub, small_model: Path) -> None:
    hub.add(MODEL, small_model)
    hub.add("models/me/secret", small_model, private=True)
    hub.add("models/me/gated", small_model, gated=True)
    hub.add("models/me/pickled", {**hub.files(MODEL), "pytorch_model.bin": b""})
    del hub.files("models/me/pickled")["model.safetensors"]
    hub.add(BOOKS, {"train.jsonl": jsonl(["one"])})
    hub.add("datasets/me/secret", {"train.jsonl": jsonl(["one"])}, private=True)
    hub.add("datasets/me/gated", {"train.jsonl": jsonl(["one"])}, gated=True)


@pytest.mark.parametrize(
    ("name", "data", "token", "named"),
    [
        ("me/nope", "", "", ["no such model", "hf auth login"]),
        ("adapter/gov", "", "", ["no such model", "adapters/gov?"]),
        ("me/secret", "", "", ["no such model", "hf auth login", "private"]),
        ("me/secret", "", OTHER_TOKEN, ["no such model", "private"]),
        ("me/gated", "", "", ["gated", "http://127.0.0.1:", "/me/gated", "hf auth login"]),
        ("me/gated", "", OTHER_TOKEN, ["gated", "http://127.0.0.1:", "/me/gated"]),
        ("me/tiny", "", "hf_wrong", ["token", "hf auth login", "HF_TOKEN"]),
        ("me/pickled", "", "", ["model.safetensors", "pickle"]),
        ("me/tiny", "me/nope", "", ["no such dataset"]),
        ("me/tiny", "me/secret", "", ["no such dataset"]),
        ("me/tiny", "me/gated", "", ["gated", "http://127.0.0.1:", "/datasets/me/gated"]),
    ],
    ids=str,
)
def test_every_refusal_is_one_line_with_what_to_do(
    hub: Hub,
    small_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    data: str,
    token: str,
    named: list[str],
) -> None:
    kinds(hub, small_model)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapters" / "gov").mkdir(parents=True)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    words = ("perplexity", name, "--data", data or "builtin:stdlib", "--windows", "32")
    status, _, errors = run_captured(capsys, monkeypatch, "eval", *words)
    assert status == 2
    assert errors.count("\n") == 1
    line = errors.replace("--data: ", "")
    assert line.startswith(f"{data or name}: ")
    assert all(each in line for each in named), line
    assert "hf_" not in line


def test_a_revision_that_is_not_there_is_named(hub: Hub, small_model: Path) -> None:
    kinds(hub, small_model)
    with refused(ModelError, "me/tiny: ", "v9"):
        resolve_model(ModelRef("me/tiny", revision="v9"))
    with refused(DataError, "me/books: ", "v9"):
        texts(revision="v9")


@pytest.mark.parametrize("match", ["me/", "adapter_config", r"GET .*config\.json", "safetensors"])
@pytest.mark.parametrize("status", [503, 0])
def test_no_answer_is_not_a_missing_file(hub: Hub, lora_run: Path, small_model: Path, match: str, status: int) -> None:
    """A run was taken for a plain model, and weights got the digest of nothing."""
    hub.add(MODEL, small_model)
    hub.add("models/me/run", lora_run)
    hub.faults = [Fault(match, status)]

    def read() -> bool:
        return resolve_model("me/run").adapter is not None and resolve_model("me/tiny").base.weights_digest != ""

    with refused(ModelError, "me/", f"the hub fails (status {status})" if status else f"{hub.url} does not answer"):
        read()


def test_what_is_wrong_with_a_data_set_is_named(hub: Hub) -> None:
    """Files with other columns, and a subset to choose."""
    hub.add(BOOKS, {"a.jsonl": jsonl(["one"]), "b.jsonl": b'{"text": "two", "n": 1}\n'})
    with refused(DataError, "me/books: ", "generating the dataset", " n: int64"):
        texts()
    card = "---\nconfigs:\n- {config_name: en, data_files: a.jsonl}\n- {config_name: de, data_files: b.jsonl}\n---\n"
    hub.add("datasets/me/subsets", hub.files(BOOKS) | {"README.md": card.encode()})
    with refused(DataError, "me/subsets: ", "['en', 'de']", "subset"):
        texts(name="me/subsets")


def test_a_part_of_a_split_is_downloaded(hub: Hub) -> None:
    """`datasets` cannot stream it."""
    hub.add(BOOKS, {"train.jsonl": jsonl(["one", "two"])})
    part = {"name": "me/books", "split": "train[:50%]"}
    assert data_problems(Data.model_validate({"source": part}), ask_hub=True) == []
    assert texts(**part) == ["one"]
    assert share_to_hold_out(Source.model_validate(part), 128)
    measured = PerplexityOptions(data="me/books", split="train[:50%]", hold_out=0.99)
    assert [document.text for document in evaluation_documents(measured)] == ["one"]


def test_a_few_documents_are_measured_without_the_other_files(hub: Hub) -> None:
    """All files of all splits were downloaded."""
    files = {f"{split}-0000{n}.jsonl": jsonl([f"{split} {n}"]) for split in ("train", "test") for n in (0, 1)}
    hub.add(BOOKS, files)
    measured = evaluation_documents(PerplexityOptions(data="me/books", documents=1))
    assert next(measured).text == "test 0"
    # Of another split `datasets` reads the beginning of one file, to know its kind.
    assert not any("00001" in request.path for request in hub.log)


def test_a_hub_that_fails_is_told_from_one_that_does_not_answer(hub: Hub, small_model: Path) -> None:
    kinds(hub, small_model)
    hub.faults = [Fault("/api/", 503)]
    with refused(ModelError, "me/tiny: ", "the hub fails", 503):
        resolve_model("me/tiny")
    with refused(DataError, "me/books: "):
        texts()


def test_a_hub_that_answers_again_is_asked_again(hub: Hub, model: str) -> None:
    """Only after something was read from the cache is the hub not asked any more."""
    for status in (503, 429):
        hub.faults = [Fault("/api/", status)]
        with refused(ModelError, "me/tiny: ", "the hub fails", status):
            resolve_model("me/tiny")
    hub.faults = []
    assert resolve_model("me/tiny").base.commit == model


def test_a_command_asks_again_a_hub_that_did_not_answer_the_last_one(
    hub: Hub, model: str, lora_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook that goes on when the network is back."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    api.resolve("me/tiny")
    newest = hub.add(MODEL, hub.files(MODEL) | {"LICENSE": b""})
    commands: tuple[Callable[[], object], ...] = (
        lambda: api.load("me/tiny"),
        lambda: api.push(lora_run, "me/run"),
        lambda: api.resolve("me/tiny"),
    )
    for command in commands:
        hub.faults = [Fault(".")]
        assert api.resolve("me/tiny").base.commit in (model, newest)
        hub.faults = []
        command()
    assert api.resolve("me/tiny").base.commit == newest


def test_what_is_cached_is_named_where_the_hub_does_not_answer(hub: Hub, model: str) -> None:
    resolve_model("me/tiny")
    hub.faults = [Fault(".")]
    with refused(ModelError, "me/tiny: ", "in the cache: config.json, generation_config.json, token"):
        api.load("me/tiny")
    with refused(ModelError, "me/other: ", "in the cache: nothing"):
        resolve_model("me/other")


@pytest.mark.parametrize("offline", [False, True])
def test_everything_cached_is_read_without_the_hub(
    hub: Hub, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    """Also the text that was held out, which used to be streamed, and the checks before a training."""
    rows = [f"The text {number}. " * 30 for number in range(40)]
    hub.add(BOOKS, {"train.jsonl": jsonl(rows)})
    books = Source(name="me/books", hold_out=0.2)
    recipe = small_recipe(
        "me/tiny", data={"source": [books]}, evaluation={"perplexity": {**held_out_text(books), "documents": 1}}
    )
    check(recipe, tmp_path / "run")
    before = logits("me/tiny")
    trained = texts(hold_out=0.2)
    hub.log.clear()
    hub.faults = [Fault(".")]
    forget_commits()
    if offline:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    assert check(recipe, tmp_path / "run").base.commit == model
    assert torch.equal(logits("me/tiny"), before)
    measured = [each.text for each in evaluation_documents(PerplexityOptions.model_validate(held_out_text(books)))]
    assert sorted(trained + measured) == sorted(rows)
    # Once for the checks, and once for the logits.
    assert len(hub.log) == (0 if offline else 2)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    # The commit is known, but what was streamed is not in the cache.
    (Path(constants.HF_HUB_CACHE) / "datasets--me--streamed" / "refs").mkdir(parents=True)
    (Path(constants.HF_HUB_CACHE) / "datasets--me--streamed" / "refs" / "main").write_text("1" * 40)
    reason = "HF_HUB_OFFLINE=1 is set" if offline else "the hub did not answer"
    with refused(DataError, "me/streamed: ", reason):
        find_table(Source(name="me/streamed"))
    absent = small_recipe("me/tiny", data={"source": [{"name": "me/others"}]})
    with refused(RecipeError, "data.source", "me/others: ", reason):
        check(absent, tmp_path / "run")


@pytest.mark.parametrize("number", [2, 20, 60, 700])
def test_a_new_recipe_holds_out_rows_of_a_data_set_of_any_size(
    hub: Hub, model: str, tmp_path: Path, number: int
) -> None:
    hub.add(BOOKS, {"train.jsonl": jsonl([f"The text {row}. " * 30 for row in range(number)])})
    file = api.new("me/tiny", 128, gpu="cpu", data=["me/books"], output=tmp_path / "new.yaml")
    recipe = load_recipe(file).recipe
    source = recipe.data.source[0]
    assert recipe.evaluation.perplexity
    assert source.hold_out == (0.01 if number > 500 else max(source.hold_out or 0, 0.02))
    assert list(evaluation_documents(recipe.evaluation.perplexity))
    # A dry run counts the sequences of few rows.
    with nullcontext() if number > 500 else refused(RecipeError, "data.source: me/books: ", "training.steps"):
        check(recipe, tmp_path / "run", ask_hub=True)


def test_a_measurement_without_held_out_text_is_refused_before_the_training(
    hub: Hub, model: str, tmp_path: Path
) -> None:
    hub.add(BOOKS, {"train.jsonl": jsonl([f"The text {row}. " * 30 for row in range(5)])})
    books = Source(name="me/books", hold_out=1e-6)
    recipe = small_recipe("me/tiny", data={"source": [books]}, evaluation={"perplexity": held_out_text(books)})
    with refused(RecipeError, "evaluation.perplexity.data: me/books: ", "hold_out"):
        check(recipe, tmp_path / "run", ask_hub=True)


def test_a_run_is_pushed_and_pulled(
    hub: Hub, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(MODEL, hub.files(MODEL) | {"README.md": b"---\nlicense: other\nlicense_name: own\n---\n# Tiny\n"})
    run = train(small_recipe("me/tiny"), tmp_path / "run")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    status, out, errors = run_captured(capsys, monkeypatch, "push", str(run), "me/run")
    assert (status, out) == (0, f"{hub.url}/me/run\n")
    assert errors == f"uploading {run} to me/run\n"
    pushed = hub.files("models/me/run")
    assert b"license: other\nlicense_name: own\n" in pushed["README.md"]
    assert [name for name, content in pushed.items() if str(tmp_path).encode() in content] == []
    assert torch.equal(logits("me/run"), logits(str(run)))
    merged = api.merge("me/run", output=tmp_path / "merged").folder
    assert torch.allclose(logits(str(merged)), logits("me/run"), atol=1e-4)


def test_a_composite_is_pushed_whole_and_pulled(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_composite("gemma3", tmp_path / "base")
    folder = api.merge(tuned(base, tmp_path / "run"), output=tmp_path / "merged").folder
    assert str(tmp_path) in (folder / "merge.json").read_text()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    api.push(folder, "me/whole")
    pushed = hub.files("models/me/whole")
    assert pushed.keys() == {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert {*PROCESSOR_FILES, "model.safetensors", "tokenizer.json"} <= pushed.keys()
    assert [name for name, content in pushed.items() if str(tmp_path).encode() in content] == []
    for name in PROCESSOR_FILES:
        assert pushed[name] == (base / name).read_bytes()
    assert pushed["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert other_tensors(folder).keys() == other_tensors(base).keys()
    config = json.loads(pushed["config.json"])
    assert config["vision_config"] == json.loads((base / "config.json").read_text())["vision_config"]
    assert torch.equal(logits("me/whole"), logits(str(folder)))


@pytest.mark.parametrize(
    ("words", "where", "named"),
    [
        (["report", "acme/nope"], "acme/nope: ", ["no such model", "hf auth login"]),
        (["eval", "all", "acme/nope"], "acme/nope: ", ["no such model", "hf auth login"]),
        (["eval", "all", "../acme/nope"], "../acme/nope: ", ["no such model", "hub id"]),
        (["push", "acme/nope", "me/run"], "acme/nope: ", ["no such folder"]),
    ],
    ids=str,
)
def test_commands_say_of_a_run_that_there_is_none(
    hub: Hub,
    words: list[str],
    where: str,
    named: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, _, errors = run_captured(capsys, monkeypatch, *words)
    line = errors.splitlines()[-1]
    assert status == 2
    assert line.startswith(where)
    assert all(each in line for each in named), line


def test_an_upload_without_the_hub_says_nothing_of_folders_and_caches(
    hub: Hub, lora_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with refused(ModelError, "me/run: HF_HUB_OFFLINE=1") as raised:
        push(lora_run, "me/run")
    assert "cache" not in str(raised.value)


def test_a_push_goes_on_where_it_was_interrupted(
    hub: Hub, full_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    run = shutil.copytree(full_run, tmp_path / "run")
    weights = load_file(run / "model.safetensors")
    (run / "model.safetensors").unlink()
    names = list(weights)
    for number, part in enumerate((names[:5], names[5:]), 1):
        file = run / f"model-{number:05}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, file, {"format": "pt"})
    sent: list[str] = []

    def report(done: int, total: int, note: str = "") -> None:
        sent.append(f"{done} of {total}: {note}")
        if done == 2:
            hub.faults = [Fault("PUT", 503)]

    with refused(ModelError, "me/run: ", "the hub fails", 503):
        push(run, "me/run", progress=report)
    assert sent == ["1 of 2: model-00001-of-00002.safetensors", "2 of 2: model-00002-of-00002.safetensors"]
    hub.faults = []
    hub.log.clear()
    push(run, "me/run")
    assert len(hub.asked("PUT")) == 1
    assert {name for name in hub.files("models/me/run") if name.endswith(".safetensors")} == {
        f"model-0000{number}-of-00002.safetensors" for number in (1, 2)
    }


def test_a_storage_that_does_not_answer_ends_a_push(hub: Hub, lora_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six tries of five seconds, and half a minute between them."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("pi_lora.report.upload.ANSWER_SECONDS", 0.2)
    hub.faults = [Fault("PUT", hangs=True)]
    began = time.monotonic()
    with refused(ModelError, "me/run: http://", "does not answer"):
        push(lora_run, "me/run")
    assert len(hub.asked("PUT")) <= 6
    assert time.monotonic() - began < 10


ROAD = {
    "GET /api/models/me/tiny",
    "GET /me/tiny/resolve",
    "HEAD /me/tiny/resolve",
    "GET /_stored/",
    "GET /api/datasets/me/books",
    "GET /datasets/me/books/resolve",
    "HEAD /datasets/me/books/resolve",
}


def test_a_training_asks_for_the_model_and_the_data_alone_and_keeps_stderr_free(
    hub: Hub, model: str, tmp_path: Path
) -> None:
    """In a process of its own: the libraries read what they may report when they are imported. TRL reported every
    training.
    """
    hub.add(BOOKS, {"train.jsonl": jsonl([f"The text {row}. " * 60 for row in range(60)])})
    (tmp_path / "recipe.yaml").write_text(dump_recipe(small_recipe("me/tiny", data={"source": [{"name": "me/books"}]})))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "pi_lora", "train", "recipe.yaml", "--output", "run"]
    answer = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert [line for line in answer.stderr.splitlines() if not line.endswith(" ...") and " left" not in line] == []
    assert [line for line in hub.asked() if not line.startswith(tuple(ROAD))] == []
