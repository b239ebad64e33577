"""Benchmarks: the scores of lm-eval on the same rows, going on, and mistakes before a model is read."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
import pytest
import torch
import yaml
from accelerate import PartialState
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from tokenizers.processors import TemplateProcessing

from conftest import refused, run_captured, small_recipe
from pi_lora.api import load
from pi_lora.errors import DataError, Interrupted, ModelError, RecipeError
from pi_lora.evaluation import harness
from pi_lora.evaluation.benchmarks import Benchmarks, BenchmarkScores
from pi_lora.evaluation.harness import FOLDER, PAPERS, RankedLM, articles, find_benchmarks, manager
from pi_lora.evaluation.measurement import Session
from pi_lora.evaluation.suite import scores_table
from pi_lora.models.loaded import LoadedModel
from pi_lora.preflight import check
from pi_lora.recipe.evaluation import BenchmarksOptions

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import convert_tasks  # noqa: E402

BATCH = 4
RACE = [
    {
        "article": "Tom has a dog.\u2028It is brown.",
        "question": question,
        "options": ["a dog", "a cat", "a bird", "a cow"],
        "answer": "A",
    }
    for question in ("What does Tom have?", "Tom has  _  .", "What is brown?")
] + [{"article": "It rained.", "question": "What fell?", "options": ["rain", "snow", "ash", "tea"], "answer": "A"}]
ROWS: dict[str, list[dict[str, Any]]] = {
    "boolq": [
        {"question": f"is {colour} a colour", "passage": text, "label": int(colour != "stone")}
        for colour, text in (("red", "Red is a colour."), ("stone", "A stone is hard. " * 60), ("blue", "Blue."))
    ],
    "piqa": [
        {"goal": "To open a door,", "sol1": "turn the handle.", "sol2": "eat the handle.", "label": 0},
        {"goal": "Boil water", "sol1": "in a book", "sol2": "in a pot on the stove", "label": 1},
        {"goal": "Cut bread", "sol1": "with a knife", "sol2": "with a spoon of water", "label": 0},
    ],
    "winogrande": [
        {
            "sentence": "The cup did not fit the box: the _ was small.",
            "option1": "cup",
            "option2": "box",
            "answer": "2",
        },
        {"sentence": "Ann thanked Eve because _ was helped.", "option1": "Ann", "option2": "Eve", "answer": "1"},
    ],
    "race_high": list(articles(datasets.Dataset.from_list(RACE))),
    "race_middle": RACE,
    "ja_leaderboard_jnli": [{"sentence1": f"{n} cats", "sentence2": "A cat", "label": n % 3} for n in range(6)],
}
# Of the tasks, the files of lm-eval.
BASES = {
    "boolq": "super_glue/boolq/default.yaml",
    "piqa": "piqa/piqa.yaml",
    "winogrande": "winogrande/default.yaml",
    "race_high": "race/race.yaml",
}


def lines(rows: list[Any]) -> str:
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """`--data` of every task: made-up examples in the schema of its data set."""
    for name, rows in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text(lines(rows))
    return {name: f"{name}={tmp_path / name}.jsonl" for name in ROWS}


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load("builtin:tiny")


@pytest.fixture
def ending() -> LoadedModel:
    """The same model with a tokenizer that puts EOS after every text."""
    model = load("builtin:tiny")
    model.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        "<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    assert model.tokenizer("a")["input_ids"][-1] == model.tokenizer.eos_token_id
    return model


def options(files: dict[str, str], *names: str, **others: Any) -> BenchmarksOptions:
    return BenchmarksOptions(tasks=names, data=tuple(files[name] for name in names), **others)


def measured(model: LoadedModel, asked: BenchmarksOptions) -> BenchmarkScores:
    with Session(journalled=True) as session:
        return Benchmarks().run(model, asked, session)


def ranked(model: LoadedModel, window: int = 300, batch_size: int = BATCH) -> RankedLM:
    return RankedLM(model, window, batch_size, BenchmarksOptions(), Session())


@pytest.mark.slow  # the index of all tasks of lm-eval takes ten seconds
def test_lm_eval_finds_every_task_of_the_papers_folders() -> None:
    assert BenchmarksOptions().tasks == tuple(PAPERS)
    for folder in PAPERS.values():
        name = Path(folder).name
        assert manager(folder).task_index[name].yaml_path == manager("").task_index[name].yaml_path


@pytest.fixture
def their_tasks(files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Task files of lm-eval that read the same examples, without a line of this package."""
    # lm-eval asks several programs for the versions of everything.
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)
    (tmp_path / "tasks").mkdir()
    for name, base in BASES.items():
        data = {"data_files": {"test": str(tmp_path / f"{name}.jsonl")}, "cache_dir": str(tmp_path / "tasks" / "cache")}
        task = {
            "include": str(FOLDER / base),
            "task": f"own_{name}",
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": data,
            "training_split": None,
            "validation_split": None,
            "test_split": "test",
        }
        (tmp_path / "tasks" / f"own_{name}.yaml").write_text(yaml.safe_dump(task))
    return tmp_path / "tasks"


def their_manager(folder: Path) -> lm_eval.tasks.TaskManager:
    return lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)


@pytest.mark.parametrize("chat", [False, True])
def test_scores_equal_lm_evals_own_tasks(
    tiny: LoadedModel, files: dict[str, str], their_tasks: Path, monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    template = (Path(__file__).parents[1] / "data" / "templates" / "chatml.jinja").read_text()
    monkeypatch.setattr(tiny.tokenizer, "chat_template", template)
    found = measured(tiny, options(files, *BASES, batch_size=BATCH, window=300, chat=chat)).tasks
    model = HFLM(tiny.module, tokenizer=tiny.tokenizer, max_length=300, batch_size=BATCH)
    names: list[Any] = [f"own_{name}" for name in BASES]
    manager = their_manager(their_tasks)
    theirs: Any = simple_evaluate(model, tasks=names, task_manager=manager, apply_chat_template=chat)
    for name, ours in found.items():
        scores, samples = theirs["results"][f"own_{name}"], theirs["samples"][f"own_{name}"]
        assert (ours.examples, ours.shots) == (len(samples), 0)
        assert (ours.acc, ours.stderr) == (scores["acc,none"], scores["acc_stderr,none"])
        assert ours.outcomes == [sample["acc"] for sample in samples]
    assert found["race_high"].examples == 2


def test_the_description_of_a_task_is_part_of_the_question_in_a_chat(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-eval gives it as the turn of a system, which some templates refuse."""
    turns = "{% for each in messages %}[{{ each.role }}]{{ each.content }}{% endfor %}"
    monkeypatch.setattr(tiny.tokenizer, "chat_template", turns)
    asked = [{"role": "system", "content": "Yes or no."}, {"role": "user", "content": "Is it far?"}]
    assert re.fullmatch(r"\[user\]Yes or no\.\s+Is it far\?\[assistant\]", ranked(tiny).apply_chat_template(asked))


def test_a_few_shot_task_is_reported_as_few_shot(
    tiny: LoadedModel, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the folder of that task alone, because the index of all tasks takes ten seconds."""
    monkeypatch.setattr(harness, "manager", lambda _: manager("japanese_leaderboard"))
    name = "ja_leaderboard_jnli"
    scores = measured(tiny, options(files, name, window=1024, limit=2))
    assert (scores.tasks[name].shots, scores.tasks[name].examples) == (3, 2)
    assert next(iter(scores_table([scores]).columns[0].cells)).startswith(f"{name} (3-shot)")


def test_an_interrupted_benchmark_reuses_its_answers(
    tiny: LoadedModel, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PI_LORA_CACHE", str(tmp_path / "cache"))
    asked = options(files, "boolq", "piqa", batch_size=1, window=300)
    forward = HFLM._model_call
    calls: list[int] = []
    stop_at = 0

    def call(self: HFLM, *arguments: Any, **others: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        return forward(self, *arguments, **others)

    monkeypatch.setattr(HFLM, "_model_call", call)
    whole, needed = measured(tiny, asked), len(calls)
    stop_at = needed + needed - 1  # in the second of the texts
    with pytest.raises(Interrupted):
        measured(tiny, asked)
    at: list[tuple[int, int, str]] = []
    with Session(lambda done, total, note="": at.append((done, total, note)), journalled=True) as session:
        again = Benchmarks().run(tiny, asked, session)
    assert again == whole
    assert len(calls) == needed + needed + 1
    assert at == [(1, 6, "piqa at 300"), (2, 6, "piqa at 300")]
    assert not list((tmp_path / "cache").glob("evaluations/*"))


def test_lm_evals_wrapper_leaves_the_logits_of_a_run_unchanged(lora_run: Path) -> None:
    """lm-eval ties embeddings anew, which PEFT's trained copies do not survive: wrapping must change no logit."""
    loaded = load(str(lora_run))
    ids = torch.arange(2, 40)[None]
    with torch.no_grad():
        before = loaded.module(input_ids=ids).logits
        lm = ranked(loaded, 64, 1)
        assert torch.equal(loaded.module(input_ids=ids).logits, before)
        assert torch.equal(lm.model(ids).logits, before)
    assert loaded.tokenizer.model_max_length == 128


def test_logits_that_are_not_finite_are_refused(files: dict[str, str]) -> None:
    broken = load("builtin:tiny")
    with torch.no_grad():
        broken.module.get_input_embeddings().weight.fill_(float("nan"))
    with refused(ModelError, "builtin:tiny: ", "NaN", "float32"):
        measured(broken, options(files, "piqa"))


def test_race_middle_groups_the_questions_of_an_article(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file and of the hub, the questions of an article are put together."""
    tasks = [find_benchmarks(options(files, "race_middle"))]
    asked: list[dict[str, Any]] = []

    def load_dataset(**wanted: Any) -> dict[str, datasets.Dataset]:
        asked.append(wanted)
        return {"test": datasets.Dataset.from_list(RACE)}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    tasks.append(find_benchmarks(BenchmarksOptions(tasks=("race_middle",))))
    assert asked == [{"path": "ehovy/race", "name": "middle"}]
    for task in (each["race_middle"] for each in tasks):
        assert list(task.eval_docs) == ROWS["race_high"]
        text = task.doc_to_text(task.eval_docs[0])
        beginning = "Article: Tom has a dog.\u2028It is brown.\n\nQuestion: What does Tom have?\nAnswer: a dog\n"
        assert text.startswith(beginning)
        assert text.endswith("What is brown?")


def test_files_of_the_authors_are_converted_to_tasks(tmp_path: Path) -> None:
    boolq = {"question": "is red a colour", "passage": "Red.", "answer": True, "title": "Red"}
    piqa = [{key: row[key] for key in ("goal", "sol1", "sol2")} for row in ROWS["piqa"]]
    contents = {
        "boolq/dev.jsonl": lines([boolq]),
        "piqa/valid.jsonl": lines(piqa),
        "piqa/valid-labels.lst": "0\n1\n0\n",
        "winogrande/dev.jsonl": lines(ROWS["winogrande"]),
    }
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    converted = tmp_path / "converted"
    convert_tasks.convert(tmp_path, converted)
    assert json.loads((converted / "boolq.jsonl").read_text())["label"] == 1
    for name in ("piqa", "winogrande"):
        assert (converted / f"{name}.jsonl").read_text() == lines(ROWS[name])


@pytest.mark.parametrize(
    ("words", "where", "names"),
    [
        ("--tasks winogrand", "--tasks: winogrand: ", ""),
        ("--tasks boolq --data boolq=gone.jsonl", "--data: boolq: gone.jsonl: ", ""),
        ("--tasks boolq --data piqa=boolq.jsonl", "--data: piqa: ", "TASK=FILE"),
        ("--tasks boolq --data boolq=piqa.jsonl", "piqa.jsonl: ", "passage"),
        ("--tasks gsm8k --data gsm8k=gsm8k.jsonl", "--tasks: gsm8k: ", "accuracy"),
        ("--tasks race_middle", "--tasks: race_middle ", ""),
        ("--tasks boolq --data boolq=answers.jsonl", "answers.jsonl: ", "label"),
        ("--tasks boolq --data boolq=hidden.jsonl", "hidden.jsonl:2: ", "-1"),
        ("--tasks boolq --data boolq=null.ndjson.gz", "null.ndjson.gz:2: ", "None"),
    ],
)
@pytest.mark.usefixtures("files")
def test_a_mistake_is_one_line_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: str,
    where: str,
    names: str,
) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.chdir(tmp_path)
    Path("gsm8k.jsonl").write_text(lines([{"question": "What is 1 and 1?", "answer": "Two.\n#### 2"}] * 6))
    # As the authors of BoolQ write it.
    Path("answers.jsonl").write_text(lines([{"question": "is it", "passage": "It is.", "answer": True}]))
    # As the test split of SuperGLUE has labels.
    example = {"question": "is it", "passage": "It is."}
    Path("hidden.jsonl").write_text(lines([{**example, "label": 1}, {**example, "label": -1}]))
    Path("null.ndjson.gz").write_bytes(gzip.compress(lines([{**example, "label": 1}, example]).encode()))
    monkeypatch.setattr("pi_lora.evaluation.suite.load_model", loaded)
    # The index of all tasks takes ten seconds.
    monkeypatch.setattr(harness, "manager", lambda folder: manager(folder or "gsm8k"))
    status, out, err = run_captured(capsys, monkeypatch, "eval", "benchmarks", "builtin:tiny", *words.split())
    assert (status, out, err.count("\n"), err.startswith(where), names in err) == (2, "", 1, True, True), err


def test_a_recipe_with_an_unknown_task_is_refused_before_it_trains(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "manager", lambda folder: manager(folder or "gsm8k"))
    recipe = small_recipe(small_model, evaluation={"benchmarks": {"tasks": ["boolq", "winogrand"]}})
    with refused(RecipeError, "evaluation.benchmarks.tasks: winogrand: "):
        check(recipe, tmp_path / "run")


def test_more_processes_than_examples_are_refused(
    tiny: LoadedModel, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = options(files, "winogrande")
    PartialState()  # of one process: the variables below start none
    for name, value in {"WORLD_SIZE": "3", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with refused(DataError, "winogrande: "):
        Benchmarks().run(tiny, asked, Session())


@pytest.mark.slow
def test_two_processes_write_the_same_benchmark_scores_as_one(
    python: str, files: dict[str, str], tmp_path: Path
) -> None:
    command = ["-m", "pi_lora", "eval", "benchmarks", "builtin:tiny", "--tasks", "boolq,piqa"]
    command += [f"--data={files[name]}" for name in ("boolq", "piqa")]
    command += ["--batch-size", "1", "--window", "300", "--json"]
    subprocess.run([python, *command, str(tmp_path / "one.json")], check=True, capture_output=True)
    launcher = [python, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    launcher += ["--main_process_port", "0", "--dynamo_backend", "no", "--mixed_precision", "no", "--num_machines", "1"]
    subprocess.run([*launcher, *command, str(tmp_path / "two.json")], check=True, capture_output=True)
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    for name, score in one["tasks"].items():  # sums of the same numbers in another order
        other = two["tasks"].pop(name)
        assert other.pop("stderr") == pytest.approx(score.pop("stderr"))
        assert other == score
    assert one | {"tasks": {}} == two


def test_no_eos_stands_between_a_question_and_an_answer(
    tiny: LoadedModel, ending: LoadedModel, files: dict[str, str]
) -> None:
    asked = options(files, "piqa", "winogrande")
    assert measured(ending, asked).tasks == measured(tiny, asked).tasks
    prompts = ["The sea was", "The lamp of the house"]
    of_plain, of_ending = (ranked(model).tok_batch_encode(prompts) for model in (tiny, ending))
    assert all(map(torch.equal, of_plain, of_ending))
