"""Summaries of real reports by a run that is tuned on them: which rows are measured, scores, going on, the commands."""

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer

from conftest import refused, run_captured, small_recipe
from pi_lora.api import evaluate, load
from pi_lora.data.batches import training_data
from pi_lora.data.sources import hash_to_unit, trains_on
from pi_lora.errors import DataError, Interrupted
from pi_lora.evaluation.generation import generate
from pi_lora.evaluation.measurement import Session
from pi_lora.evaluation.perplexity import Perplexity
from pi_lora.evaluation.summarization import Summarization, complete, summarize
from pi_lora.evaluation.texts import measured_source
from pi_lora.models.files import BUILTIN_FOLDER
from pi_lora.models.loaded import LoadedModel
from pi_lora.models.resolve import resolve_model
from pi_lora.models.source import ModelSource
from pi_lora.recipe.evaluation import PerplexityOptions, Sampling, SummarizationOptions
from pi_lora.recipe.schema import Recipe
from pi_lora.terminal import TERMINAL
from pi_lora.types import showing
from reported import make_run

REPORTS = Path(__file__).parents[1] / "data" / "texts" / "gao_reports.jsonl"
COLUMNS = {"document": "report", "summary": "summary", "completion_tokens": 40}


def reports(held_out: bool) -> list[dict[str, str]]:
    """The reports that `recipe_of` holds out, or trains on."""
    rows = [json.loads(line) for line in REPORTS.read_text().splitlines()]
    return [row for row in rows if (hash_to_unit(row["report"]) < 0.3) == held_out]


def recipe_of(base: Path, **source: Any) -> Recipe:
    data = {"source": {"name": str(REPORTS), **source}, **COLUMNS, "document_tokens": 100}
    return small_recipe(base, context={"target": 512}, data=data)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the built-in model, as if it had been tuned on the reports."""
    base = BUILTIN_FOLDER / "tiny"
    return make_run(base, tmp_path_factory.mktemp("runs") / "tuned", {}, recipe_of(base, hold_out=0.3))


@pytest.fixture
def tuned_on(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModelSource]:
    """The source of the run, as if it had been tuned on another source of rows."""

    def source_of(**source: Any) -> ModelSource:
        monkeypatch.setattr("pi_lora.run.Run.recipe", recipe_of(tuned, **source))
        return resolve_model(str(tuned))

    return source_of


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
    with pytest.raises(Interrupted), Session(journalled=True) as session:
        Summarization().run(loaded, options, session)
    at: list[tuple[int, int]] = []
    with Session(lambda done, total, note="": at.append((done, total)), journalled=True) as session:
        scores = Summarization().run(loaded, options, session)
    assert (scores, texts[examples:], at) == (whole, texts[:examples], [(2, 3), (3, 3)])

    assert scores.rouge1 > scores.rouge2
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


def test_all_models_are_asked_the_same(
    tuned: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their order, and whichever prompt each was tuned on."""
    prompts: list[list[list[int]]] = []

    def recorded(_: Any, batch: list[list[int]], __: Any) -> list[str]:
        prompts.append(batch)
        return [""] * len(batch)

    monkeypatch.setattr("pi_lora.evaluation.summarization.generate", recorded)
    base = BUILTIN_FOLDER / "tiny"
    rows = {"name": str(REPORTS), "hold_out": 0.3}
    data = {**COLUMNS, "source": rows, "summary": None, "template": "{report} In short:", "completion": "summary"}
    other = make_run(base, tmp_path / "other", {}, small_recipe(base, context={"target": 512}, data=data))
    sizes = {"limit": 1, "document_tokens": 50}
    alone = {run: evaluate(run, "summarization", **sizes).options for run in (tuned, other)}
    asked = dict(zip(alone, prompts, strict=True))
    assert asked[tuned] != asked[other]
    for models, chosen in (([base, tuned], tuned), ([tuned, other], tuned)):
        prompts.clear()
        with showing(TERMINAL):
            measured = evaluate(models, "summarization", **sizes)
        assert [scores.options for scores in measured] == [alone[chosen]] * 2
        assert prompts == [asked[chosen]] * 2
        lines = capsys.readouterr().err.splitlines()
        [other_model] = {*models} - {chosen}
        assert [line.partition(": ")[0] for line in lines if str(chosen) in line] == [str(other_model)]


def test_a_run_tuned_on_a_prompt_is_asked_with_it_and_its_base_in_the_chat_template(
    tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[str] = []

    def recorded(model: LoadedModel, batch: list[list[int]], *_: Any, **__: Any) -> list[str]:
        prompts.extend(model.tokenizer.batch_decode(batch))
        return [""] * len(batch)

    monkeypatch.setattr("pi_lora.evaluation.summarization.generate", recorded)
    monkeypatch.setattr("pi_lora.evaluation.prompting.PasskeyTest", lambda *_: pytest.fail("passkeys decide"))
    run, base = (load(name) for name in (tuned, "builtin:tiny"))
    for model in (run, base):
        model.tokenizer.chat_template = "{% for each in messages %}[{{ each.role }}]{{ each.content }}{% endfor %}"
        summarize(model, "report.md", "The agency found much to mend.", Sampling(max_new_tokens=20), str)
    assert evaluate(run, "summarization", limit=1).options.chat is False
    assert ["[user]" in prompt for prompt in prompts] == [False, True, False]


def test_a_run_tuned_on_all_rows_of_a_file_asks_for_others(tuned_on: Callable[..., ModelSource], tuned: Path) -> None:
    with refused(DataError, f"{tuned}: ", REPORTS, "--data", "data.source.hold_out"):
        Summarization().prepare(SummarizationOptions(), [tuned_on()])
    assert Summarization().prepare(SummarizationOptions(data="others.jsonl"), [tuned_on()]).document == "report"


def test_a_run_without_a_task_is_measured_on_govreport(lora_run: Path) -> None:
    asked, data = complete(SummarizationOptions(), resolve_model(str(lora_run)).recipe)
    assert (asked.data, asked.subset, asked.split) == ("tau/scrolls", "gov_report", "validation")
    assert (data.document, data.summary, data.document_tokens) == ("input", "output", 15000)
    assert complete(asked, resolve_model("builtin:tiny").recipe) == (asked, data)
    other = SummarizationOptions(data="x.csv", template="{q}?", completion="a")
    _, data = complete(other, resolve_model("builtin:tiny").recipe)
    assert (data.source[0].name, data.source[0].subset) == ("x.csv", None)
    assert (data.template, data.completion, data.document) == ("{q}?", "a", None)


@pytest.mark.parametrize(
    ("source", "asked", "split", "hold_out"),
    [
        ({"split": "train"}, {}, "validation", None),
        ({"split": "train"}, {"split": "test"}, "test", None),
        ({"split": "train", "hold_out": 0.1}, {}, "train", 0.1),
        ({"split": "train", "hold_out": 0.1}, {"split": "test"}, "test", None),
        ({"split": "train", "hold_out": 0.1}, {"data": "me/reports"}, "train", 0.1),
        ({"split": "validation"}, {}, "test", None),
    ],
)
def test_of_a_hub_data_set_the_rows_that_trained_are_not_measured(
    tuned_on: Callable[..., ModelSource],
    source: dict[str, Any],
    asked: dict[str, str],
    split: str,
    hold_out: float | None,
) -> None:
    recipe = tuned_on(name="me/reports", revision="v1", **source).recipe
    options, measured = complete(SummarizationOptions.model_validate(asked), recipe)
    [read] = measured.source
    assert (read.name, read.split, read.hold_out, read.revision) == ("me/reports", split, hold_out, "v1")
    assert (options.document, options.summary) == ("report", "summary")
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
    assert str(tuned) in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "where", "names"),
    [
        ("summarize builtin:tiny gone.txt", "gone.txt: ", ""),
        ("summarize builtin:tiny some.txt", "--max-new-tokens: 1000 ", "256"),
        ("eval summarization builtin:tiny --data rows.jsonl", "--data: rows.jsonl:1: ", "input"),
        ("eval summarization builtin:tiny --data rows.jsonl --document a --summary b", "--data: rows.jsonl: ", ""),
        ("eval summarization builtin:tiny --data rows.jsonl --template {a}", "template: ", "completion"),
        ("eval summarization builtin:tiny --data empty.jsonl --document a --summary b", "--data: empty.jsonl: ", ""),
    ],
)
def test_a_mistake_in_eval_summarization_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: str,
    where: str,
    names: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("some.txt").write_text("Some text.")
    Path("rows.jsonl").write_text('{"a": "x", "b": "y"}\n')
    Path("empty.jsonl").write_text('{"a": "", "b": "y"}\n{"a": "x", "b": null}\n')
    status, out, err = run_captured(capsys, monkeypatch, *words.split())
    assert (status, out, err.count("\n"), err.startswith(where), names in err) == (2, "", 1, True, True), err
