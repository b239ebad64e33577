import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import lm_eval.tasks
import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from test_cli import run

from pi_lora.errors import DataError, Interrupted, PiLoraError
from pi_lora.evaluation.benchmarks import answering
from pi_lora.evaluation.benchmarks.answering import Answering, batches_of
from pi_lora.evaluation.benchmarks.local_data import FORMATS, TITLES, articles, read_examples
from pi_lora.evaluation.benchmarks.measure import FOLDERS, evaluate_benchmarks, load_tasks, manager, measure, prepare
from pi_lora.evaluation.journal import Journal
from pi_lora.evaluation.results import as_json
from pi_lora.evaluation.suite import MEASUREMENTS
from pi_lora.models.location import BUILTIN_FOLDER
from pi_lora.models.model import Extension, Model, load
from pi_lora.recipe.evaluation import BenchmarksOptions

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import lm_eval_command  # noqa: E402

LM_EVAL_TASKS = Path(lm_eval.tasks.__file__).parent
SHARED = Path(os.environ.get("PI_LORA_SHARED", Path(__file__).parents[3] / "shared")) / "data"
BATCH = 4

BOOLQ = [
    {"question": f"is {colour} a colour", "title": "Colour", "answer": colour != "stone", "passage": text}
    for colour, text in (("red", "Red is a colour of light."), ("stone", "A stone is hard. " * 60), ("blue", "Blue."))
]
PIQA = [
    {"goal": "To open a door,", "sol1": "turn the handle.", "sol2": "eat the handle."},
    {"goal": "Boil water", "sol1": "in a book", "sol2": "in a pot on the stove"},
    {"goal": "Cut bread", "sol1": "with a knife", "sol2": "with a spoon of water"},
]
PIQA_LABELS = [0, 1, 0]
WINOGRANDE = [
    {
        "sentence": "The cup did not fit the box since the _ was small.",
        "option1": "cup",
        "option2": "box",
        "answer": "2",
    },
    {"sentence": "Ann thanked Eve because _ had been helped.", "option1": "Ann", "option2": "Eve", "answer": "1"},
]
RACE = [
    {
        "article": "Tom has a dog.\u2028It is brown.",
        "question": question,
        "options": ["a dog", "a cat", "a bird", "a cow"],
        "answer": answer,
    }
    for question, answer in (("What does Tom have?", "A"), ("Tom has  _  .", "A"), ("What is brown?", "A"))
] + [{"article": "It rained.", "question": "What fell?", "options": ["rain", "snow", "ash", "tea"], "answer": "A"}]


def answering_with(loaded: Model, window: int, size: int, journal: Journal | None = None) -> Answering:
    return Answering(loaded.model, loaded.tokenizer, window, size, journal or Journal())


def lines(rows: list[Any]) -> str:
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with made-up examples of every task, in the data sets' own schemas and under their own names."""
    folder = tmp_path / "data"
    contents = {
        "boolq/dev.jsonl": lines(BOOLQ),
        "piqa/valid.jsonl": lines(PIQA),
        "piqa/valid-labels.lst": lines(PIQA_LABELS),
        "winogrande/dev.jsonl": lines(WINOGRANDE),
        "race_high/test.jsonl": lines(RACE),
        "race_middle/1.txt": json.dumps(
            {
                "article": "Tom has a dog.",
                "questions": ["What does Tom have?", "Is it brown?"],
                "options": [["a dog", "a cat", "a bird", "a cow"], ["yes", "no", "never", "often"]],
                "answers": ["A", "B"],
                "id": "middle1.txt",
            },
            indent=1,
        ),
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


@pytest.fixture(scope="module")
def tiny() -> Model:
    return load("builtin:tiny")


def test_the_papers_tasks_have_one_list() -> None:
    assert BenchmarksOptions().tasks == tuple(TITLES) == tuple(FORMATS)


def test_the_papers_folders_hold_what_lm_eval_finds() -> None:
    few, all_of_them = manager(paper=True).task_index, manager(paper=False).task_index
    assert len(all_of_them) > 14000
    for name in ("boolq", "piqa", "race", "winogrande"):
        assert few[name].yaml_path == all_of_them[name].yaml_path
        assert few[name].yaml_path.parent in [LM_EVAL_TASKS / folder for folder in FOLDERS]


OTHER_TASKS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    # By the likeliest choice, by perplexity, by text that is generated: all that lm-eval does.
    "openbookqa": (
        "openbookqa/openbookqa.yaml",
        [
            {
                "question_stem": stem,
                "choices": {"text": ["the sun", "a stone is hard", "a fork", "rain"], "label": list("ABCD")},
                "answerKey": key,
            }
            for stem, key in (("Light comes from", "A"), ("Wet streets come from", "D"), ("To eat, take", "C"))
        ],
    ),
    "wikitext": ("wikitext/wikitext.yaml", [{"page": "The cat sat . " * 50}, {"page": " = A dog = \n barks"}]),
    "triviaqa": (
        "triviaqa/default.yaml",
        [
            {"question": f"Who was {name}", "answer": {"aliases": [name, "a man"]}}
            for name in ("Ann", "Tom the cat", "Eve who " * 200)
        ],
    ),
}


@pytest.fixture
def without_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval asks several programs for the versions of everything."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)


@pytest.mark.usefixtures("without_versions")
def test_made_up_files_score_as_lm_evals_own_tasks_on_them(tiny: Model, files: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    lm_eval_command.write_tasks(own, files)
    problems = [{key: row[key] for key in ("question", "answer", "options")} for row in RACE]
    by_hand = [
        {"article": RACE[0]["article"], "problems": str(problems[:3])},
        {"article": RACE[3]["article"], "problems": str(problems[3:])},
    ]
    (own / "race.jsonl").write_text(lines(by_hand))
    lm_eval_command.write_task(own, "race_high", "race/race.yaml", own / "race.jsonl", "test")
    names = ["boolq", "piqa", "winogrande", "race_high", *OTHER_TASKS]
    data = [str(files)]
    split = {"split": "test", "test_split": "test", "validation_split": None}
    for name, (base, rows) in OTHER_TASKS.items():
        (own / f"{name}.jsonl").write_text(lines(rows))
        lm_eval_command.write_task(own, name, base, own / f"{name}.jsonl", **split)
        data.append(f"{name}={own / name}.jsonl")
    model = HFLM(tiny.model, tokenizer=load("builtin:tiny").tokenizer, max_length=300, batch_size=BATCH)
    manager = lm_eval.tasks.TaskManager(include_path=str(own), include_defaults=False)
    theirs = simple_evaluate(model, tasks=[f"own_{name}" for name in names], task_manager=manager)
    assert theirs is not None
    found = evaluate_benchmarks(tiny, prepare(names, data), batch_size=BATCH, window=300)
    for name in names:
        scores, ours = theirs["results"][f"own_{name}"], found.tasks[name]
        assert ours.examples == len(theirs["samples"][f"own_{name}"])
        if "acc,none" in scores:
            assert (ours.acc, ours.stderr) == (scores["acc,none"], scores["acc_stderr,none"])
            assert (ours.acc_norm, ours.metrics) == (scores.get("acc_norm,none"), None)
    assert found.tasks["race_high"].examples == 2
    assert found.tasks["wikitext"].metrics == {
        name: theirs["results"]["own_wikitext"][f"{name},none"]
        for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")
    }
    written, scores = found.tasks["triviaqa"], theirs["results"]["own_triviaqa"]
    assert written.metrics == {
        name: scores[name] for name in ("exact_match,remove_whitespace", "exact_match_stderr,remove_whitespace")
    }
    assert written.truncated_inputs == 1


@pytest.mark.usefixtures("without_versions")
def test_a_group_scores_as_lm_evals(tiny: Model, files: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    lm_eval_command.write_tasks(own, files)
    group = {"group": "pair", "task": ["own_boolq", "own_piqa"], "aggregate_metric_list": [{"metric": "acc"}]}
    (own / "pair.yaml").write_text(json.dumps(group))
    manager = lm_eval.tasks.TaskManager(include_path=str(own), include_defaults=False)
    model = HFLM(tiny.model, tokenizer=load("builtin:tiny").tokenizer, max_length=256, batch_size=BATCH)
    theirs = simple_evaluate(model, tasks=["pair"], task_manager=manager)
    assert theirs is not None
    score = measure(answering_with(tiny, 256, BATCH), "pair", dict(manager.load(["pair"])), None)
    expected = theirs["results"]["pair"]
    assert (score.acc, score.stderr) == (expected["acc,none"], expected["acc_stderr,none"])
    assert score.examples == 6


def their_own(tasks: Path, limit: int, window: int) -> dict[str, Any]:
    """What lm-eval's command does: it loads the model itself. Its index of all of its tasks takes half a minute."""
    arguments = {"pretrained": str(BUILTIN_FOLDER / "tiny"), "dtype": "float32", "max_length": window}
    manager = lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False)
    names = [lm_eval_command.PREFIX + name for name in lm_eval_command.NAMES]
    found = simple_evaluate(
        "hf", arguments, names, limit=limit, batch_size=BATCH, device="cpu", task_manager=manager, log_samples=False
    )
    assert found is not None
    return {name: found["results"][lm_eval_command.PREFIX + name] for name in lm_eval_command.NAMES}


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"needs the data sets in {SHARED}")
@pytest.mark.usefixtures("without_versions")
@pytest.mark.parametrize("command", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_real_data_scores_as_lm_evals_own_command(tiny: Model, tmp_path: Path, command: bool) -> None:
    own, limit, window = tmp_path / "own", 12, 256
    lm_eval_command.write_tasks(own, SHARED)
    theirs = lm_eval_command.theirs(own, limit, BATCH, window) if command else their_own(own, limit, window)
    ours = evaluate_benchmarks(tiny, prepare(lm_eval_command.NAMES, [str(SHARED)]), limit, BATCH).tasks
    for name, scores in theirs.items():
        assert (ours[name].acc, ours[name].stderr) == (scores["acc,none"], scores["acc_stderr,none"])
        assert ours[name].examples == limit
    assert ours["boolq"].truncated_inputs


REQUESTS = [
    (("context", "answer"), list(range(2, 2 + context)), [7 + index % 5] * answer)
    for index, (context, answer) in enumerate(
        [(5, 1), (5, 1), (30, 2), (4, 3), (5, 1), (300, 1), (30, 2), (12, 5), (9, 1)]
    )
]


def test_batches_are_lm_evals(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Likelihoods equal those of lm-eval's own class to the last bit, since they come from the same forward passes."""
    passes: dict[type, list[torch.Size]] = {HFLM: [], Answering: []}
    forward = HFLM._model_call

    def counted(self: HFLM, inputs: torch.Tensor, *rest: Any, **others: Any) -> torch.Tensor:
        passes[type(self)].append(inputs.shape)
        return forward(self, inputs, *rest, **others)

    monkeypatch.setattr(HFLM, "_model_call", counted)
    for size in (1, 3, 20):
        theirs = HFLM(tiny.model, tokenizer=load("builtin:tiny").tokenizer, max_length=256, batch_size=size)
        ours = answering_with(tiny, 256, size)
        expected = theirs._loglikelihood_tokens(REQUESTS, disable_tqdm=True)
        assert ours._loglikelihood_tokens(REQUESTS) == expected
        assert ours.truncated_inputs == 1
        assert len(batches_of(REQUESTS, size)) == len(passes[HFLM])
        assert passes[Answering] == passes[HFLM]
        passes[HFLM].clear()
        passes[Answering].clear()


class Gathered(Exception):
    pass


def test_several_processes_share_the_batches(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = answering_with(tiny, 256, 2)._loglikelihood_tokens(REQUESTS)
    monkeypatch.setenv("WORLD_SIZE", "2")
    shares: list[list[Any]] = []

    def gather(found: list[Any]) -> list[Any]:
        shares.append(found)
        if len(shares) == 1:
            raise Gathered
        return shares[0] + shares[1]

    monkeypatch.setattr(answering, "from_all", gather)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(Gathered):
        answering_with(tiny, 256, 2)._loglikelihood_tokens(REQUESTS)
    monkeypatch.setenv("RANK", "0")
    assert answering_with(tiny, 256, 2)._loglikelihood_tokens(REQUESTS) == alone
    computed = [{key for key, _ in share} for share in shares]
    assert len(computed[0] | computed[1]) == len(batches_of(REQUESTS, 2)) == len(computed[0]) + len(computed[1])
    assert abs(len(computed[0]) - len(computed[1])) <= 1


def test_rolling_perplexities_are_kept_and_shared(tiny: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ask = SimpleNamespace(args=("The cat sat on the mat. " * 80,))
    alone = answering_with(tiny, 256, 2, Journal(tmp_path))
    done: list[tuple[int, int, str]] = []
    alone.progress = lambda *at: done.append(at)  # type: ignore[assignment,misc]
    perplexities = alone.loglikelihood_rolling([ask])
    theirs = HFLM(tiny.model, tokenizer=load("builtin:tiny").tokenizer, max_length=256, batch_size=2)
    assert perplexities == theirs.loglikelihood_rolling([ask])  # type: ignore[list-item]
    assert done == [(2, 0, ""), (3, 0, "")]

    def computed(*_: Any, **__: Any) -> None:
        raise AssertionError("a batch was computed again")

    monkeypatch.setattr(HFLM, "_model_call", computed)
    assert answering_with(tiny, 256, 2, Journal(tmp_path)).loglikelihood_rolling([ask]) == perplexities


def test_greedy_texts_are_kept_and_shared(tiny: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ("cat", "dog", "dog", "sun " * 300, "old man", "sea")
    prompts: list[Any] = [
        SimpleNamespace(args=(f"The {each} is", {"until": [], "max_gen_toks": 5 + (each == "sea"), "do_sample": False}))
        for each in words
    ]
    theirs = HFLM(tiny.model, tokenizer=load("builtin:tiny").tokenizer, max_length=256, batch_size=2)
    expected = theirs.generate_until(prompts)
    done: list[tuple[int, int, str]] = []
    ours = answering_with(tiny, 256, 2, Journal(tmp_path))
    ours.progress = lambda *at: done.append(at)  # type: ignore[assignment,misc]
    ours.note = lambda indices, texts: f"{indices} {len(texts)}"
    assert ours.generate_until(prompts) == expected
    assert (ours.truncated_inputs, ours.asked) == (1, 6)
    assert [each[:2] for each in done] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert done[0][2] == "[3, 4] 2"
    shares: list[list[Any]] = []

    def gather(found: list[Any]) -> list[Any]:
        shares.append(found)
        return shares[0] + shares[-1]

    def written(*_: Any, **__: Any) -> None:
        raise AssertionError("a batch was written again")

    monkeypatch.setattr(answering, "from_all", gather)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(KeyError):  # what the other process has is not there yet
        answering_with(tiny, 256, 2).generate_until(prompts)
    monkeypatch.setenv("RANK", "0")
    assert answering_with(tiny, 256, 2).generate_until(prompts) == expected
    assert [len(share) for share in shares] == [2, 2]
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(HFLM, "_model_generate", written)
    assert answering_with(tiny, 256, 2, Journal(tmp_path)).generate_until(prompts) == expected


def test_sampled_texts_are_lm_evals_and_the_same_in_every_process(
    tiny: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = {"until": ["."], "max_gen_toks": 5, "do_sample": True, "temperature": 1.0}
    prompts: list[Any] = [
        SimpleNamespace(args=(f"The {each} is", settings)) for each in ("cat", "dog", "dog", "sun " * 300)
    ]
    theirs = HFLM(tiny.model, tokenizer=load("builtin:tiny").tokenizer, max_length=256, batch_size=2)
    torch.manual_seed(3)
    expected = theirs.generate_until(prompts)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        ours = answering_with(tiny, 256, 2)
        torch.manual_seed(3)
        assert ours.generate_until(prompts) == expected
        assert (ours.truncated_inputs, ours.asked) == (1, 4)


def test_an_interrupted_measurement_goes_on(
    tiny: Model, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PI_LORA_CACHE", str(tmp_path / "cache"))
    prepared = prepare(["boolq"], [f"boolq={files / 'boolq' / 'dev.jsonl'}"])
    whole = evaluate_benchmarks(tiny, prepared, batch_size=1)
    batches = 0
    forward = HFLM._model_call

    def interrupted(self: HFLM, *arguments: Any, **others: Any) -> torch.Tensor:
        nonlocal batches
        batches += 1
        if batches == 3:
            raise KeyboardInterrupt
        return forward(self, *arguments, **others)

    monkeypatch.setattr(HFLM, "_model_call", interrupted)
    with pytest.raises(Interrupted, match="builtin:tiny: interrupted after 2 batches; the same command goes on"):
        evaluate_benchmarks(tiny, prepared, batch_size=1)
    at: list[tuple[int, int, str]] = []
    again = evaluate_benchmarks(
        tiny, prepared, batch_size=1, progress=lambda done, total, note="": at.append((done, total, note))
    )
    assert again == whole
    # Two of the batches were kept, the third was cut off.
    assert batches - 3 == at[-1][1] - 2
    assert at[-1] == (at[-1][1], at[-1][1], "BoolQ")
    assert not list((tmp_path / "cache").glob("evaluations/*"))


def test_the_journal_is_read_and_written(tiny: Model, tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    first = answering_with(tiny, 256, 2, journal)._loglikelihood_tokens(REQUESTS)
    kept = Journal(tmp_path)
    assert answering_with(tiny, 256, 2, kept)._loglikelihood_tokens(REQUESTS) == first
    begun = next(iter(kept.found))
    kept.found[begun] = [(-1.0, False)] * len(batches_of(REQUESTS, 2)[0])
    changed = answering_with(tiny, 256, 2, kept)._loglikelihood_tokens(REQUESTS)
    assert [index for index in range(len(REQUESTS)) if changed[index] != first[index]] == sorted(
        batches_of(REQUESTS, 2)[0]
    )


def test_a_run_keeps_its_weights(lora_run: Path) -> None:
    """lm-eval ties embeddings anew, which PEFT's trained copies do not survive: wrapping must change no logit."""
    loaded = load(str(lora_run))
    ids = torch.arange(2, 40)[None]
    with torch.no_grad():
        before = loaded.model(input_ids=ids).logits
        answering_with(loaded, 64, 1)
        assert torch.equal(loaded.model(input_ids=ids).logits, before)
    assert "tie_weights" not in vars(loaded.model)
    assert loaded.tokenizer.model_max_length == 128


def test_the_scaling_is_on_and_the_window_original(files: Path) -> None:
    prepared = prepare(["boolq"], [str(files)])
    plain, stretched = (
        evaluate_benchmarks(load("builtin:tiny", stretch), prepared) for stretch in (None, Extension(target=1024))
    )
    assert (plain.scale, plain.window) == (1, 256)
    assert (stretched.scale, stretched.window) == (4, 256)
    assert plain.tasks["boolq"].truncated_inputs == stretched.tasks["boolq"].truncated_inputs == 2
    task = prepared["boolq"].tasks["tasks"]["boolq"]
    likelihoods = []
    for stretch in (None, Extension(target=1024)):
        loaded = load("builtin:tiny", stretch)
        model = answering_with(loaded, 256, 1)
        likelihoods.append(model.loglikelihood(task.instances))
    assert likelihoods[0] != likelihoods[1]


def test_an_answer_longer_than_the_window_is_refused(tiny: Model, files: Path) -> None:
    prepared = prepare(["piqa"], [str(files)])
    with pytest.raises(DataError, match=r"--window: 4 tokens do not hold an answer of [0-9]+ that is asked about"):
        evaluate_benchmarks(tiny, prepared, window=4)
    assert evaluate_benchmarks(tiny, prepared, window=32).window == 32


def test_what_lm_eval_cannot_measure_is_one_line(tiny: Model, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(lines(OTHER_TASKS["triviaqa"][1]))
    prepared = prepare(["triviaqa"], [f"triviaqa={tmp_path / 'rows.jsonl'}"])
    with pytest.raises(
        DataError, match=r"^triviaqa: lm-eval cannot measure it \(Invalid configuration: .*256.*\); leave"
    ):
        evaluate_benchmarks(tiny, prepared)


def test_one_example_has_no_standard_error(tiny: Model, files: Path) -> None:
    score = evaluate_benchmarks(tiny, prepare(["winogrande"], [str(files)]), limit=1).tasks["winogrande"]
    assert (score.examples, score.stderr) == (1, None)
    assert as_json(score)["stderr"] is None
    assert score.acc in (0, 1)


def test_race_is_read_in_every_schema_of_its_own(files: Path, tmp_path: Path) -> None:
    (archive,) = read_examples("race_middle", files / "race_middle")
    assert archive["problems"].count("question") == 2
    rows = [
        {
            "article": "Tom has a dog.",
            "question": "What does Tom have?",
            "options": ["a dog", "a cat", "a bird", "a cow"],
            "answer": "A",
        },
        {
            "article": "Tom has a dog.",
            "question": "Is it brown?",
            "options": ["yes", "no", "never", "often"],
            "answer": "B",
        },
    ]
    (tmp_path / "rows.jsonl").write_text(lines(rows))
    assert read_examples("race_middle", tmp_path / "rows.jsonl") == [archive] == articles(rows)


def test_race_middle_is_race_high_on_other_articles(files: Path) -> None:
    middle, high = (load_tasks(name, files / "race_high")[name]["tasks"][name] for name in ("race_middle", "race_high"))
    for document in high.eval_docs:
        assert middle.doc_to_text(document) == high.doc_to_text(document)
        assert middle.doc_to_choice(document) == high.doc_to_choice(document)
        assert middle.doc_to_target(document) == high.doc_to_target(document)
    text = high.doc_to_text(high.eval_docs[0])
    assert text.startswith(
        "Article: Tom has a dog.\u2028It is brown.\n\nQuestion: What does Tom have?\nAnswer: a dog\n"
    )
    assert text.endswith("What is brown?")


def test_race_middle_from_the_hub_is_put_together_by_article(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def load_dataset(**wanted: Any) -> dict[str, datasets.Dataset]:
        asked.append(wanted)
        return {"test": datasets.Dataset.from_list(RACE)}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = load_tasks("race_middle", None)["race_middle"]["tasks"]["race_middle"]
    assert asked == [{"path": "ehovy/race", "name": "middle"}]
    assert list(task.eval_docs) == articles(RACE)
    assert len(task.eval_docs) == 2


def test_using_local_files_is_reported_to_nobody(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` counts on its servers what its loaders are used for, unless it is offline."""
    counted: list[str] = []
    monkeypatch.setattr("datasets.load.increase_load_count", counted.append)
    prepare(tuple(TITLES), [str(files)])
    assert counted == []


def damaged(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(content) and None


MISTAKES = [
    (
        "boolq",
        damaged("boolq/dev.jsonl", '{"question": "q", "answer": true}'),
        "dev.jsonl:1: passage: Field required, in",
    ),
    (
        "boolq",
        damaged("boolq/dev.jsonl", '\n{"question": "q", "passage": "p", "answer": "yes"}'),
        'dev.jsonl:2: answer: Input should be a valid boolean, in "yes"; BoolQ has question, passage, answer',
    ),
    ("boolq", damaged("boolq/dev.jsonl", "[1]"), "dev.jsonl:1: Input should be an object, in [1]; BoolQ"),
    ("boolq", damaged("boolq/dev.jsonl", '{"question'), "dev.jsonl:1: Invalid JSON: EOF"),
    ("boolq", damaged("boolq/dev.jsonl", "\n"), "boolq: holds no examples"),
    (
        "boolq",
        lambda folder: (folder / "boolq/dev.jsonl").write_bytes(b"\xff\xfe\x00"),
        "dev.jsonl: cannot be read as UTF-8 text",
    ),
    ("boolq", lambda folder: (folder / "boolq/dev.jsonl").unlink(), "boolq: holds none of dev.jsonl, valid.jsonl"),
    ("piqa", lambda folder: (folder / "piqa/valid-labels.lst").unlink(), "valid-labels.lst: no such file; PIQA"),
    ("piqa", damaged("piqa/valid-labels.lst", "0\n1\n"), "valid-labels.lst: has 2 labels for 3 lines of valid.jsonl"),
    ("piqa", damaged("piqa/valid-labels.lst", "0\n1\n2\n"), "valid-labels.lst:3: is 2; PIQA has 0 or 1"),
    (
        "winogrande",
        damaged("winogrande/dev.jsonl", lines([{**WINOGRANDE[0], "sentence": "No."}])),
        "sentence: String should match pattern '_'",
    ),
    (
        "winogrande",
        damaged("winogrande/dev.jsonl", lines([{**WINOGRANDE[0], "answer": "3"}])),
        "answer: Input should be '1' or '2', in \"3\"",
    ),
    (
        "race_high",
        damaged("race_high/test.jsonl", lines([{**RACE[0], "answer": "E"}])),
        "test.jsonl:1: answers: Input should be 'A', 'B', 'C' or 'D', in \"E\"",
    ),
    (
        "race_high",
        damaged("race_high/test.jsonl", lines([{**RACE[0], "options": ["a"]}])),
        'options: List should have at least 4 items after validation, not 1, in ["a"]; RACE-H',
    ),
    (
        "race_middle",
        damaged("race_middle/1.txt", '{"article": "a", "questions": ["q"]}'),
        "1.txt: options: Field required",
    ),
    (
        "race_middle",
        damaged("race_middle/1.txt", '{"article": "a", "questions": ["q"], "options": [], "answers": []}'),
        "1.txt: has not as many options and answers as questions",
    ),
]


@pytest.mark.parametrize(("task", "damage", "line"), MISTAKES, ids=[line for _, _, line in MISTAKES])
def test_a_file_of_another_schema_is_named_with_line_and_field(
    files: Path, task: str, damage: Callable[[Path], Any], line: str
) -> None:
    damage(files)
    with pytest.raises(DataError) as raised:
        prepare([task], [f"{task}={files / task}"])
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--tasks", "boolq,winogrand"],
            f"--tasks: winogrand: no such benchmark in lm-eval {lm_eval.__version__}; did you mean winogrande or ",
        ),
        (
            ["--tasks", "boolq", "--data", "boolq=gone.jsonl"],
            "gone.jsonl: no such file or folder; name one that holds BoolQ",
        ),
        (
            ["--tasks", "boolq", "--data", "bolq=gone.jsonl"],
            "--data: bolq=gone.jsonl: is neither TASK=FILE nor a folder of what is asked for, boolq;",
        ),
        (["--tasks", "boolq", "--data", "piqa=gone.jsonl"], "--data: piqa=gone.jsonl: is neither TASK=FILE nor"),
        (["--tasks", "boolq", "--data", "."], "--data: .: is neither TASK=FILE nor a folder of"),
        (["--tasks", "boolq", "--data", "gone"], "--data: gone: is neither TASK=FILE nor a folder of"),
        (["--tasks", "mmlu", "--data", "mmlu=gone.jsonl"], "--data: mmlu=gone.jsonl: mmlu is a group of several tasks"),
        (
            ["--tasks", "copa", "--data", "copa=gone.jsonl"],
            "gone.jsonl: no such file or folder; name one that holds copa",
        ),
        (["--tasks", "copa"], "copa: cannot be had from the hub ("),
        (["--tasks", "race_middle"], "RACE-M: cannot be had from the hub ("),
        (["--original", "256"], "--original, --scaling: go with --target"),
    ],
)
def test_a_mistake_is_one_line_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    line: str,
) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pi_lora.models.model.Model.load", loaded)
    status, out, err = run(capsys, monkeypatch, "eval", "benchmarks", "builtin:tiny", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(line)
    assert err.count("\n") == 1


def test_without_lm_eval_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PiLoraError, match=r"needs the package lm_eval; pip install 'pi-lora\[eval\]'"):
        MEASUREMENTS["benchmarks"].prepare(BenchmarksOptions())


def test_the_command_shows_models_side_by_side(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, files: Path, small_model: Path, tmp_path: Path
) -> None:
    result = tmp_path / "scores.json"
    options = ["--data", str(files), "--limit", "2", "--json", str(result)]
    status, out, err = run(
        capsys,
        monkeypatch,
        "eval",
        "benchmarks",
        "builtin:tiny",
        str(small_model),
        "--tasks",
        "winogrande,piqa",
        *options,
    )
    assert (status, err) == (0, "")
    scores = json.loads(result.read_text())
    assert [each["model"] for each in scores] == ["builtin:tiny", str(small_model)]
    assert [each["window"] for each in scores] == [256, 64]
    assert all(list(each["tasks"]) == ["winogrande", "piqa"] for each in scores)
    assert all(each["tasks"]["piqa"]["examples"] == 2 for each in scores)
    assert scores[0]["data"] == {name: str(files / name) for name in ("winogrande", "piqa")}
    assert (scores[0]["limit"], scores[0]["lm_eval"], scores[0]["shots"]) == (2, lm_eval.__version__, 0)
    assert f"{100 * scores[0]['tasks']['winogrande']['acc']:.1f}" in out
    assert "WinoGrande" in out
    status, _, _ = run(capsys, monkeypatch, "eval", "benchmarks", "builtin:tiny", "--tasks", "piqa", *options)
    assert json.loads(result.read_text()) == scores[0] | {
        "data": {"piqa": str(files / "piqa")},
        "tasks": {"piqa": scores[0]["tasks"]["piqa"]},
    }


@pytest.mark.slow
def test_two_processes_write_what_one_writes(python: str, files: Path, tmp_path: Path) -> None:
    command = [
        "-m",
        "pi_lora",
        "eval",
        "benchmarks",
        "builtin:tiny",
        "--data",
        str(files),
        "--batch-size",
        "1",
        "--json",
    ]
    subprocess.run([python, *command, str(tmp_path / "one.json")], check=True, capture_output=True)
    launcher = [python, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    launcher += ["--main_process_port", "0", "--dynamo_backend", "no", "--mixed_precision", "no", "--num_machines", "1"]
    subprocess.run([*launcher, *command, str(tmp_path / "two.json")], check=True, capture_output=True)
    assert (tmp_path / "one.json").read_text() == (tmp_path / "two.json").read_text()
