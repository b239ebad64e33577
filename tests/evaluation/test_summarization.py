"""The whole road on real reports: tune a few steps on summaries alone, write, score, stop in the middle and go on."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer

from conftest import run_captured, small_recipe, train
from pi_lora.api import load
from pi_lora.data.batches import training_data
from pi_lora.data.sources import hash_to_unit, trains_on
from pi_lora.errors import DataError, Interrupted
from pi_lora.evaluation.generation import generate
from pi_lora.evaluation.measurement import Session
from pi_lora.evaluation.perplexity import Perplexity
from pi_lora.evaluation.summarization import Summarization, complete
from pi_lora.evaluation.texts import measured_source
from pi_lora.models.resolve import resolve_model
from pi_lora.recipe.evaluation import PerplexityOptions, Sampling, SummarizationOptions
from pi_lora.recipe.schema import Recipe

REPORTS = Path(__file__).parents[1] / "data" / "texts" / "gao_reports.jsonl"
COLUMNS = {"document": "report", "summary": "summary", "completion_tokens": 40}


def reports(held_out: bool) -> list[dict[str, str]]:
    """The reports that `recipe_of` holds out, or trains on."""
    rows = [json.loads(line) for line in REPORTS.read_text().splitlines()]
    return [row for row in rows if (hash_to_unit(row["report"]) < 0.3) == held_out]


def recipe_of(base: Path, source: Path) -> Recipe:
    """Two steps round the reports, from an extended run."""
    return small_recipe(
        base,
        context={"target": 512},
        scaling="keep",
        data={
            "source": {"name": str(source), "hold_out": 0.3},
            **COLUMNS,
            "document_tokens": 100,
        },
        training={
            "steps": 2,
            "learning_rate": 1e-3,
            "global_batch_size": 8,
            "per_device_batch_size": 4,
            "warmup_steps": 1,
            "activation_checkpointing": False,
            "log_every": 1,
        },
    )


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model, extended to 512 tokens by one step."""
    training = {"steps": 1, "global_batch_size": 1, "activation_checkpointing": False}
    recipe = small_recipe("builtin:tiny", context={"target": 512}, training=training)
    return train(recipe, tmp_path_factory.mktemp("runs") / "extended")


@pytest.fixture(scope="module")
def tuned(extended: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The extended run, tuned further on the reports."""
    return train(recipe_of(extended, REPORTS), tmp_path_factory.mktemp("runs") / "tuned")


def test_an_interrupted_summarization_resumes_to_the_same_rouge(
    tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PI_LORA_CACHE", str(tmp_path / "cache"))
    loaded = load(str(tuned))
    asked = Summarization().prepare(SummarizationOptions(), [loaded.source])
    assert (asked.data, asked.document, asked.max_new_tokens) == (str(REPORTS), "report", 40)
    assert (asked.document_tokens, asked.hold_out) == (100, 0.3)
    examples, texts = 6, list[str]()

    def recorded(*arguments: Any) -> list[str]:
        texts.extend(found := generate(*arguments))
        return found

    monkeypatch.setattr("pi_lora.evaluation.summarization.generate", recorded)
    options = SummarizationOptions(max_new_tokens=12, limit=examples, batch_size=2)
    whole = Summarization().run(loaded, options, Session())
    write, batches = loaded.module.generate, 0

    def interrupted(**inputs: Any) -> Any:
        nonlocal batches
        batches += 1
        if batches == 2:
            raise KeyboardInterrupt
        return write(**inputs)

    monkeypatch.setattr(loaded.module, "generate", interrupted)
    with pytest.raises(Interrupted, match="what was measured is kept"), Session(journalled=True) as session:
        Summarization().run(loaded, options, session)
    at: list[tuple[int, int]] = []
    with Session(lambda done, total, note="": at.append((done, total)), journalled=True) as session:
        scores = Summarization().run(loaded, options, session)
    assert (scores, texts[examples:], at) == (whole, texts[:examples], [(2, 3), (3, 3)])

    assert scores.examples == examples
    assert (scores.window, scores.scale, scores.documents_cut) == (512, 2.0, examples)
    assert scores.left_out == {"empty": 0, "too_long": 0}
    references = [row["summary"] for row in reports(held_out=True)]
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    own = [scorer.score(reference, text) for reference, text in zip(references, texts[:examples], strict=False)]
    for name, metric in zip(("rouge1", "rouge2", "rougeL"), Summarization().metrics(scores), strict=True):
        values = [100 * score[name].fmeasure for score in own]
        assert [value.value for value in metric.values] == scores.per_example[name] == values
        assert getattr(scores, name) == metric.value == pytest.approx(sum(values) / examples, abs=1e-9)
        reach = 2.57 * statistics.stdev(values) / math.sqrt(examples)  # Student's t of six
        expected = (metric.value - reach, metric.value + reach)
        assert metric.interval == (pytest.approx(expected) if reach else None)


def test_sampling_is_seeded_and_a_greedy_batch_equals_single_prompts(tuned: Path) -> None:
    loaded = load(str(tuned))
    prompts = [loaded.tokenizer("The report says " * n)["input_ids"] for n in (1, 7, 30)]
    drawn = Sampling(temperature=0.9, max_new_tokens=8)
    first, again, other = (generate(loaded, prompts, drawn.changed(seed=seed)) for seed in (0, 0, 1))
    assert first == again != other
    greedy = Sampling(temperature=0.0, max_new_tokens=8)
    for prompt, text in zip(prompts, generate(loaded, prompts, greedy), strict=True):
        ids = torch.tensor([prompt])
        expected = loaded.module.generate(input_ids=ids, max_new_tokens=8, do_sample=False)[0, len(prompt) :]
        assert text == loaded.tokenizer.decode(expected, skip_special_tokens=True).strip()


def test_reports_that_are_measured_have_not_trained(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(str(tuned))
    recipe = loaded.source.recipe
    assert recipe
    tokenizer = loaded.tokenizer
    made = training_data(recipe.data, recipe.training, tokenizer, 256, 512)
    trained = [tokenizer.decode(row["input_ids"]) for row in made.rows]
    assert len(trained) == len(reports(held_out=False))
    prompts = []

    def recorded(_: Any, batch: list[list[int]], __: Any) -> list[str]:
        prompts.extend(tokenizer.decode(ids) for ids in batch)
        return [""] * len(batch)

    monkeypatch.setattr("pi_lora.evaluation.summarization.generate", recorded)
    # By default, and where the user names the same file.
    for options in (SummarizationOptions(), SummarizationOptions(data=str(REPORTS))):
        prompts.clear()
        assert not Summarization().run(loaded, options, Session()).tuned_on
        assert len(prompts) == len(reports(held_out=True))
        assert not [text for text in trained if text.startswith(tuple(prompts))]


def test_rows_that_another_column_holds_out_are_marked_as_tuned_on(
    tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other rows trained than those that the new prompt, or a column of texts, holds out."""
    monkeypatch.setattr("pi_lora.evaluation.summarization.generate", lambda _, batch, __: [""] * len(batch))
    loaded = load(str(tuned))
    for document, completion, is_marked in (("report", "summary", False), ("summary", "report", True)):
        options = SummarizationOptions(
            template=f"Read {{{document}}} Now write:",
            document=document,
            completion=completion,
            document_tokens=50,
            max_new_tokens=8,
            limit=4,
        )
        assert Summarization().run(loaded, options, Session()).tuned_on == is_marked
    asked = PerplexityOptions(data=str(REPORTS), column="summary")
    for column in ("summary", "text"):
        completed = Perplexity().prepare(asked.changed(column=column), [loaded.source])
        assert completed.hold_out is None
        measured = measured_source(completed)
        assert measured
        assert trains_on(loaded.source.run.texts, measured)
        assert trains_on(loaded.source.run.texts, measured.changed(hold_out=loaded.source.run.texts[0].hold_out))


def test_a_run_tuned_on_all_rows_of_a_file_asks_for_others(extended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small_recipe(extended, scaling="keep", data={"source": str(REPORTS), **COLUMNS})
    monkeypatch.setattr("pi_lora.run.Run.recipe", recipe)
    source = resolve_model(str(extended))
    with pytest.raises(DataError, match=r"was tuned on all rows of .*gao_reports\.jsonl; name others with --data"):
        Summarization().prepare(SummarizationOptions(), [source])
    assert Summarization().prepare(SummarizationOptions(data="others.jsonl"), [source]).document == "report"


def test_a_run_without_a_task_is_measured_on_govreport(extended: Path) -> None:
    asked, data = complete(SummarizationOptions(), resolve_model(str(extended)).recipe)
    assert (asked.data, asked.subset, asked.split) == ("tau/scrolls", "gov_report", "validation")
    assert (data.document, data.summary, data.document_tokens) == ("input", "output", 15000)
    assert complete(asked, resolve_model("builtin:tiny").recipe) == (asked, data)
    other = SummarizationOptions(data="x.csv", template="{q}?", completion="a")
    _, data = complete(other, resolve_model("builtin:tiny").recipe)
    assert (data.source[0].name, data.source[0].subset) == ("x.csv", None)
    assert (data.template, data.completion, data.document) == ("{q}?", "a", None)


def test_a_hub_data_set_is_measured_on_its_validation_split(extended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was tuned on the split `train` is not measured on it."""
    tuned = small_recipe(extended, scaling="keep", data={"source": {"name": "me/reports", "split": "train"}, **COLUMNS})
    monkeypatch.setattr("pi_lora.run.Run.recipe", tuned)
    asked, _ = complete(SummarizationOptions(), resolve_model(str(extended)).recipe)
    assert (asked.data, asked.split, asked.document) == ("me/reports", "validation", "report")
    assert complete(SummarizationOptions(split="test"), resolve_model(str(extended)).recipe)[0].split == "test"


@pytest.mark.parametrize(
    ("source", "asked", "split", "hold_out"),
    [
        ({"split": "train", "hold_out": 0.1}, {}, "train", 0.1),
        ({"split": "train", "hold_out": 0.1}, {"split": "test"}, "test", None),
        ({"split": "train", "hold_out": 0.1}, {"data": "me/reports"}, "train", 0.1),
        ({"split": "validation"}, {}, "test", None),
    ],
)
def test_of_a_hub_data_set_the_rows_that_trained_are_not_measured(
    extended: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: dict[str, Any],
    asked: dict[str, str],
    split: str,
    hold_out: float | None,
) -> None:
    data = {"source": {"name": "me/reports", "revision": "v1", **source}, **COLUMNS}
    monkeypatch.setattr("pi_lora.run.Run.recipe", small_recipe(extended, scaling="keep", data=data))
    options, measured = complete(SummarizationOptions.model_validate(asked), resolve_model(str(extended)).recipe)
    [read] = measured.source
    assert (read.name, read.split, read.hold_out, read.revision) == ("me/reports", split, hold_out, "v1")
    assert complete(options, resolve_model("builtin:tiny").recipe) == (options, measured)


def test_eval_summarization_and_summarize_print_and_write_summaries(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tuned: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--data", str(REPORTS), "--limit", "3", "--max-new-tokens", "12"]
    status, out, err = run_captured(
        capsys, monkeypatch, "eval", "summarization", str(tuned), *options, "--json", "scores.json"
    )
    assert status == 0
    scores = json.loads(Path("scores.json").read_text())
    assert scores["model"] == str(tuned)
    assert scores["examples"] == 3
    assert f"{scores['rougeL']:.2f} (" in out
    assert "max new tokens 12, " in " ".join(out.split())

    Path("report.md").write_text("The agency found much to mend. " * 200)
    status, out, err = run_captured(capsys, monkeypatch, "summarize", str(tuned), "report.md", "--max-new-tokens", "30")
    assert status == 0
    assert out.strip()
    assert err.startswith("report.md: ")
    assert "longer than the window" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["summarize", "builtin:tiny", "gone.txt"], "gone.txt: cannot be read ([Errno 2] No such file or directory"),
        (["summarize", "builtin:tiny", "some.txt"], "--max-new-tokens: 1000 leave no room for a document in the 256"),
        (
            ["eval", "summarization", "builtin:tiny", "--data", "rows.jsonl"],
            "rows.jsonl:1: has no text in column input; name the column of texts, or of chats (messages",
        ),
        (
            ["eval", "summarization", "builtin:tiny", "--data", "rows.jsonl", "--document", "a", "--summary", "b"],
            "rows.jsonl: no row has a prompt that fits the window and a completion",
        ),
        (
            ["eval", "summarization", "builtin:tiny", "--data", "rows.jsonl", "--template", "{a}"],
            "template: examples have document and summary, or template and completion",
        ),
        (
            ["eval", "summarization", "builtin:tiny", "--data", "empty.jsonl", "--document", "a", "--summary", "b"],
            "empty.jsonl: no row has a prompt that fits the window and a completion",
        ),
    ],
    ids=lambda value: " ".join(value)[-50:] if isinstance(value, list) else "",
)
def test_a_mistake_in_eval_summarization_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    line: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("some.txt").write_text("Some text.")
    Path("rows.jsonl").write_text('{"a": "x", "b": "y"}\n')
    Path("empty.jsonl").write_text('{"a": "", "b": "y"}\n{"a": "x", "b": null}\n')
    status, out, err = run_captured(capsys, monkeypatch, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(line)
    assert err.count("\n") == 1
