"""Data that is prepared ahead of training: elsewhere, once."""

import gzip
import json
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from conftest import refused, run_captured, run_command, small_recipe
from hub import Hub
from pi_lora.data import packing
from pi_lora.data.checks import data_problems
from pi_lora.errors import PiLoraError, RecipeError
from pi_lora.preflight import check, check_data
from pi_lora.recipe.data import Data
from pi_lora.recipe.files import dump_recipe
from pi_lora.training.job import pack_data


def never(done: int, total: int, note: str = "") -> None:
    pytest.fail(f"{total} tokens are packed again")


def test_data_of_a_gpu_recipe_is_prepared_without_gpus_and_read_by_training(
    small_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PI_LORA_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    for file in small_model.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    recipe = small_recipe(folder, hardware={"gpus": 8}, training={"steps": 2, "global_batch_size": 8})
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(recipe))
    assert run_command("prepare", str(file)) == 0
    said = capsys.readouterr().out
    assert "16 sequences of at most 128 tokens" in said
    assert f"{tmp_path / 'cache'}: has the data of {file}" in said
    assert len(pack_data(recipe, check_data(recipe), never).rows) == 16


def test_a_data_set_on_the_hub_is_not_streamed_before_it_is_prepared(small_model: Path, hub: Hub) -> None:
    """`prepare` reads all of it at once; `train --dry-run`, which reads nothing else, looks at its first rows."""
    recipe = small_recipe(small_model, data={"source": "people/books"})
    assert check_data(recipe).name == str(small_model)
    assert hub.log == []
    [problem] = data_problems(recipe.data, ask_hub=True)
    assert problem.startswith("data.source: people/books: ")


def rows_of(kind: str, folder: Path, number: int) -> Data:
    """The data of a recipe: rows in a file of a kind, each of about 20 tokens."""
    text = "the lamp of the cabin burns low"
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": text}]
    rows = [{"text": text, "question": "Who?", "messages": messages}] * number
    file = folder / f"rows.{kind.removesuffix('-chats').removesuffix('-examples')}"
    if ".parquet" in file.name:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif ".csv" in file.name:
        file.write_text("\n".join(["text,question", *[f"{text},Who?"] * number]))
    else:
        lines = json.dumps(rows) if file.name.endswith(".json") else "\n".join(map(json.dumps, rows))
        file.write_bytes(gzip.compress(lines.encode()) if file.suffix == ".gz" else lines.encode())
    source: dict[str, object] = {"name": str(file)}
    if kind.endswith("chats"):
        source["column"] = "messages"
    data: dict[str, object] = {"source": source}
    if kind.endswith("examples"):
        data |= {"template": "{question}", "completion": "text", "completion_tokens": 40}
    return Data.model_validate(data)


@pytest.mark.parametrize(
    "kind", "json jsonl jsonl.gz csv parquet parquet-chats jsonl-chats json-examples parquet-examples".split()
)
def test_a_dry_run_refuses_what_packing_refuses(kind: str, small_model: Path, tmp_path: Path) -> None:
    """An array of one short row passed, and the training ended."""
    model = shutil.copytree(small_model, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}")
    for number in (1, 60):
        data = rows_of(kind, tmp_path, number).model_dump()
        recipe = small_recipe(model, data=data, training={"steps": 2, "global_batch_size": 1})
        said = None
        try:
            source = check_data(recipe)
            pack_data(recipe, source)
        except PiLoraError as error:
            said = str(error)
        assert (said is None) == (number > 1)
        if said is None:
            check(recipe, tmp_path / "run", ask_hub=True)
        else:
            with refused(RecipeError, said):
                check(recipe, tmp_path / "run", ask_hub=True)


def test_a_dry_run_reads_every_row_of_a_small_file(small_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join([json.dumps({"text": "the lamp burns low " * 20})] * 9 + ["{"]))
    recipe = small_recipe(small_model, data={"source": str(file)}, training={"steps": 12, "global_batch_size": 1})
    with refused(RecipeError, f"{file}:10: "):
        check(recipe, tmp_path / "run", ask_hub=True)


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of rows that is too large for a dry run to pack, as files of over 8 MB are."""
    monkeypatch.setattr(packing, "SMALL_BYTES", 2000)
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join([json.dumps({"text": "the lamp burns low " * 20})] * 90))
    return file


@pytest.mark.parametrize(("steps", "is_packed"), [(1, True), (30, False)])
def test_a_dry_run_says_whether_it_packed_a_large_file(
    large: Path,
    small_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
    is_packed: bool,
) -> None:
    """Packed is what a few sequences need."""
    monkeypatch.chdir(tmp_path)
    training = {"steps": steps, "global_batch_size": 1, "warmup_steps": 1}
    Path("r.yaml").write_text(dump_recipe(small_recipe(small_model, data={"source": str(large)}, training=training)))
    status, _, err = run_captured(capsys, monkeypatch, "train", "r.yaml", "--dry-run")
    assert (status, f"{large}: is not packed" in err) == (0, not is_packed), err


def test_a_dry_run_reads_the_rows_of_a_large_file(large: Path, small_model: Path, tmp_path: Path) -> None:
    recipe = small_recipe(small_model, data={"source": str(large)}, training={"steps": 30, "global_batch_size": 1})
    with large.open("a") as file:
        file.write('\n{"text": 1}')
    with refused(RecipeError, f"{large}:91: "):
        check(recipe, tmp_path / "run", ask_hub=True)


def test_rows_that_cannot_hold_the_sequences_are_refused_by_their_size(
    large: Path, small_model: Path, tmp_path: Path
) -> None:
    recipe = small_recipe(small_model, data={"source": str(large)}, training={"steps": 900, "global_batch_size": 1})
    with refused(RecipeError, f"data.source: {large}: ", "900"):
        check(recipe, tmp_path / "run")


def test_a_dry_run_counts_a_small_file_beside_other_sources(small_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"text": "the lamp burns low"}))
    sources = [{"name": str(file)}, {"name": "builtin:stdlib"}, {"name": "builtin:recall"}]
    recipe = small_recipe(small_model, data={"source": sources}, training={"steps": 20, "global_batch_size": 1})
    with refused(RecipeError, f"data.source: {file}: "):
        check(recipe, tmp_path / "run", ask_hub=True)


def test_a_dry_run_says_what_is_left_out_of_the_first_chats(
    small_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And that an answer follows an empty thought at inference alone."""
    model = shutil.copytree(small_model, tmp_path / "model")
    prompt = "{% if add_generation_prompt %}[assistant]<think></think>{% endif %}"
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}" + prompt
    )
    rows = [{"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ada."}]}] * 90
    long = {"messages": [{"role": "user", "content": "Who? " * 200}, {"role": "assistant", "content": "Ada."}]}
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, [long, *rows])))
    data = {"source": {"name": str(tmp_path / "chats.jsonl"), "column": "messages"}}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_recipe(small_recipe(model, data=data, training={"steps": 1, "global_batch_size": 1})))
    assert run_command("train", str(recipe), "--output", str(tmp_path / "run"), "--dry-run") == 0
    said = capsys.readouterr().out
    assert "chats of over 128 tokens left out: 1" in said
    assert "<think></think>" in said


@pytest.mark.parametrize("examples", [False, True])
def test_a_dry_run_counts_few_rows_on_the_hub(examples: bool, small_model: Path, hub: Hub) -> None:
    """They were not packed, and the training ended."""
    rows = [{"question": "Who?", "text": "the lamp burns low"}] * 3
    hub.add("datasets/me/few", {"train.jsonl": "\n".join(map(json.dumps, rows)).encode()})
    data: dict[str, object] = {"source": "me/few"}
    if examples:
        data |= {"template": "{question}", "completion": "text", "completion_tokens": 40}
    recipe = small_recipe(small_model, data=data, training={"steps": 20, "global_batch_size": 1})
    with refused(RecipeError, "training.steps: " if examples else "data.source: me/few: "):
        check(recipe, small_model / "run", ask_hub=True)
    enough = small_recipe(small_model, data=data, training={"steps": 3, "global_batch_size": 1})
    if examples:
        check(enough, small_model / "run", ask_hub=True)
