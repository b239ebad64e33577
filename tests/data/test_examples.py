"""Rows of several columns to prompts and completions: nothing loses its place, and nothing is lost unsaid."""

import csv
import json
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import refused
from hub import Hub
from pi_lora.data.batches import training_data
from pi_lora.data.checks import data_problems
from pi_lora.data.examples import SUMMARIZE, Prompter, Task
from pi_lora.data.sources import find_table, share_to_hold_out
from pi_lora.errors import DataError
from pi_lora.models.resolve import resolve_model
from pi_lora.models.tokenizer import load_tokenizer
from pi_lora.recipe.data import Data, Source
from pi_lora.recipe.schema import Training

ROWS = [
    {"text": 'The cat, a "black" one,\nsat. ' * 30, "gist": "A cat sat.", "n": "1"},
    {"text": "Rain fell on the roof. " * 5, "gist": "It rained.", "n": "2"},
    {"text": "Snow.", "gist": "Cold.", "n": "3"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(resolve_model("builtin:tiny").base.path, 1024)


def data_of(source: Path | str, **keys: Any) -> Data:
    return Data.model_validate({"source": str(source), "document": "text", "summary": "gist", **keys})


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    name = file.name
    if name.endswith(".csv"):
        with file.open("w", newline="") as lines:
            writer = csv.DictWriter(lines, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet"])
def test_every_file_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    rows = [*ROWS, {"text": "a whole report " * 20_000, "gist": "", "n": "4"}]
    table = find_table(Source(name=str(write(tmp_path / name, rows))))
    found = [row for _, row in table.read(["gist", "text"], None)]
    assert found == [{"gist": row["gist"], "text": row["text"]} for row in rows]


def test_scrolls_is_read_from_its_zip_archive(tmp_path: Path, hub: Hub) -> None:
    archive = tmp_path / "gov_report.zip"
    with zipfile.ZipFile(archive, "w") as files:
        files.writestr("gov_report/validation.jsonl", '{"id": "1", "input": "Long.", "output": "Short."}\n')
    hub.add("datasets/tau/scrolls", {archive.name: archive.read_bytes()})
    source = Source(name="tau/scrolls", subset="gov_report", split="validation")
    rows = list(find_table(source).read(["input", "output"], None))
    assert rows == [("tau/scrolls/gov_report/validation.jsonl:1", {"input": "Long.", "output": "Short."})]


def test_the_summarization_template_is_the_papers() -> None:
    assert Task(data_of("x.jsonl")).prompt({"text": "A\nB"}) == (
        "Read the following article and then summarize it.\nA\nB\nNow summarize the above article.\nSummary:"
    )


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"template": "{a}", "completion": "b", "document": "c"}, "{c}"),
        ({"template": "no column", "completion": "b"}, "{column}"),
        ({"template": "{a", "completion": "b"}, "{{"),
    ],
)
def test_a_malformed_template_is_refused(keys: dict[str, str], named: str) -> None:
    with refused(DataError, "data.template: ", named):
        Task(Data.model_validate({"source": "x.jsonl", **keys}))


@given(words=st.integers(0, 400), window=st.integers(80, 400), limit=st.integers(1, 500))
def test_only_the_document_is_truncated_and_the_prompt_fits(
    tokenizer: Any, words: int, window: int, limit: int
) -> None:
    text = "reading " + "naïve words 12 " * words
    data = data_of("x.jsonl", document_tokens=limit, completion_tokens=20)
    [prompt] = Prompter(data, tokenizer, window).prompts([{"text": text, "gist": "short"}])
    assert prompt.fits
    assert len(prompt.ids) <= window - 21
    shown = tokenizer.decode(prompt.ids, skip_special_tokens=True)
    before, after = SUMMARIZE.split("{document}")
    assert shown.startswith(before)
    assert shown.endswith(after)
    kept = shown.removeprefix(before).removesuffix(after)
    assert text.startswith(kept)
    assert prompt.kept <= min(limit, prompt.document_tokens)
    assert (kept == text) == (prompt.kept == prompt.document_tokens)
    # No more is cut than has to be: of either bound, at most what tokenizing the whole costs.
    frame = len(tokenizer(SUMMARIZE.format(document=""))["input_ids"])
    assert prompt.kept >= min(limit, prompt.document_tokens, window - 21 - frame) - 4


def test_a_completion_follows_the_prompt_and_ends_with_eos(tokenizer: Any) -> None:
    prompter = Prompter(data_of("x.jsonl", completion_tokens=6), tokenizer, 200)
    short, long = prompter.completions([{"gist": " A cat.\n"}, {"gist": "one two three four five six seven"}])
    assert tokenizer.decode(short[:-1]) == " A cat."
    assert len(long) == 7
    assert short[-1] == long[-1] == tokenizer.eos_token_id
    [prompt] = prompter.prompts([{"text": "It sat."}])
    whole = tokenizer(SUMMARIZE.format(document="It sat.") + " A cat.")["input_ids"]
    assert prompt.ids + short[:-1] == whole


@pytest.mark.parametrize(
    ("template", "between"), [("{text} In short:", " "), ("{text} In short: ", ""), ("{text} In short:\n", "")]
)
def test_one_blank_stands_between_prompt_and_completion(tokenizer: Any, template: str, between: str) -> None:
    """A second one would be a token that no text of the base has there."""
    data = Data.model_validate({"source": "x.jsonl", "template": template, "completion": "gist"})
    [completion] = Prompter(data, tokenizer, 200).completions([{"gist": "A cat."}])
    assert tokenizer.decode(completion[:-1]) == f"{between}A cat."


def test_truncated_and_skipped_rows_are_counted(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PI_LORA_CACHE", str(tmp_path / "cache"))
    rows = [*ROWS, {"text": " ", "gist": "x"}, {"text": "x", "gist": None}, {"text": "Fine.", "gist": "Good."}]
    file, training = write(tmp_path / "rows.jsonl", rows), Training(steps=1, global_batch_size=1)
    found = training_data(data_of(file, completion_tokens=8), training, tokenizer, 64, 90)
    assert found.tokens == [len(row["input_ids"]) for row in found.rows]
    lengths = f"4 sequences of at most {max(found.tokens)} tokens"
    assert found.messages == [lengths, "empty rows left out: 2", "documents cut: 2"]
    # From the cache too.
    again = training_data(data_of(file, completion_tokens=8), training, tokenizer, 64, 90)
    assert again.messages == found.messages
    [counts] = (tmp_path / "cache" / "sequences").glob("*.json")
    counts.write_text("damaged")
    again = training_data(data_of(file, completion_tokens=8), training, tokenizer, 64, 90)
    assert again.messages == [lengths]
    texts = [tokenizer.decode(row["input_ids"][row["loss_mask"]]) for row in found.rows]
    assert texts[2:] == [" Cold.</s>", " Good.</s>"]
    keys = {"template": "Say {text}:", "completion": "gist", "document": None, "summary": None, "completion_tokens": 8}
    found = training_data(data_of(file, **keys), training, tokenizer, 64, 90)
    assert found.messages[1:] == ["empty rows left out: 2", "rows too long for the window left out: 1"]


def test_a_column_of_the_prompt_may_be_empty(tmp_path: Path, tokenizer: Any) -> None:
    """As the input of most rows of Alpaca; a row without a prompt, or without its document, is left out."""
    rows = [{"i": "Say it.", "x": "", "a": "it"}, {"i": "", "x": " ", "a": "it"}, {"i": "Say x.", "x": "x", "a": "x"}]
    file, training = write(tmp_path / "rows.jsonl", rows), Training(steps=1, global_batch_size=1)
    keys = {"template": "{i}\n{x}\nA:", "completion": "a", "summary": None, "completion_tokens": 8}
    for document, left in ((None, ["Say it.\n\nA: it</s>", "Say x.\nx\nA: x</s>"]), ("x", ["Say x.\nx\nA: x</s>"])):
        found = training_data(data_of(file, document=document, **keys), training, tokenizer, 64, 90)
        assert [tokenizer.decode(row["input_ids"], skip_special_tokens=False)[3:] for row in found.rows] == left
        assert found.messages[1] == f"empty rows left out: {3 - len(left)}"


@pytest.mark.parametrize("document", ["text", None])
def test_rows_are_held_out_by_their_prompt_and_a_document_with_all_its_rows(
    tmp_path: Path, tokenizer: Any, document: str | None
) -> None:
    rows = [{"q": f"question {n % 3}", "text": f"text {n // 3}", "a": f"{n}"} for n in range(300)]
    file = write(tmp_path / "rows.jsonl", rows)
    source = Source(name=str(file), hold_out=0.2)
    data = Data(source=[source], template="{q} {text}", completion="a", document=document, completion_tokens=20)
    prompter = Prompter(data, tokenizer, 200)
    table = find_table(source)
    trained, measured = (
        [row for _, row, _, _ in prompter.examples(table, Counter(), held_out=held_out)] for held_out in (False, True)
    )
    assert sorted(int(row["a"]) for row in trained + measured) == list(range(300))
    assert 30 <= len(measured) <= 90
    texts_of_both = {row["text"] for row in trained} & {row["text"] for row in measured}
    assert bool(texts_of_both) == (document is None)


@pytest.mark.parametrize("column", ["text", "messages"])
def test_a_source_without_rows_is_a_problem_before_training(tmp_path: Path, column: str) -> None:
    (tmp_path / "rows.jsonl").write_text("\n")
    (tmp_path / "rows.txt").write_text("")
    rows = tmp_path / "rows.jsonl"
    for data in (Data.model_validate({"source": {"name": str(rows), "column": column}}), data_of(rows)):
        [problem] = data_problems(data)
        assert problem.startswith(f"data.source: {rows}: holds no ")
    assert share_to_hold_out(Source(name=str(tmp_path / "rows.txt")), 512) == 0.02


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("rows.txt", ["column gist", "files of rows", ".jsonl", "text and gist"]),
        ("rows.jsonl:1", ["column text", "document and summary", "columns: body, gist"]),
    ],
)
def test_a_source_without_the_columns_of_examples_is_told_what_to_name(
    tmp_path: Path, name: str, names: list[str]
) -> None:
    """Text needs files of rows; rows have other columns."""
    file, _, _ = name.partition(":")
    write(tmp_path / file, [{"body": "text", "gist": "text"}])
    [problem] = data_problems(data_of(tmp_path / file))
    assert problem.startswith(f"data.source: {tmp_path / name}: ")
    assert all(each in problem for each in names)


@pytest.mark.parametrize(("steps", "batch"), [(3, 2), (2, 4)])
def test_more_steps_than_examples_are_refused(tmp_path: Path, tokenizer: Any, steps: int, batch: int) -> None:
    data = data_of(write(tmp_path / "rows.jsonl", ROWS), completion_tokens=8)
    with refused(DataError, f"training.steps: {steps} of {batch}", "1 epoch", "3 examples"):
        training_data(data, Training(steps=steps, global_batch_size=batch), tokenizer, 64, 90)
