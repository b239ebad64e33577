"""`pi-lora eval all`: what a run is measured on, which scores are read again, and texts that trained."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import run_captured, small_recipe
from pi_lora.evaluation.suite import name_of_text_scores, requested_of_run
from pi_lora.recipe.evaluation import BenchmarksOptions, PasskeyOptions, PerplexityOptions
from pi_lora.recipe.files import RECIPE_FILE
from pi_lora.run import Run
from random_runs import put_on_hub
from reported import make_run


@pytest.fixture(scope="module")
def trained(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose window holds the passkey prompt, as if it had been trained."""
    folder = tmp_path_factory.mktemp("runs")
    return make_run(small_model, folder / "run", {}, small_recipe(small_model, context={"target": 256}))


@pytest.fixture
def own_run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("The door is open and the road is long. " * 60)
    (tmp_path / "dev.jsonl").write_text('{"question": "is it open", "passage": "It is.", "label": 1}\n' * 3)
    return Path(shutil.copytree(trained, tmp_path / "run"))


def asks_for(folder: Path, evaluation: dict[str, Any]) -> None:
    """Let the recipe of a run name what is to be measured."""
    recipe = yaml.safe_load((folder / RECIPE_FILE).read_text())
    (folder / RECIPE_FILE).write_text(yaml.safe_dump({**recipe, "evaluation": evaluation}))


def loaded(*_: object, **__: object) -> None:
    raise AssertionError("a model was loaded")


PERPLEXITY = {"data": "text.txt", "windows": [64, 256], "stride": 32}
PASSKEY = {"depths": 2, "trials": 1, "seed": 3}
BENCHMARKS = {"tasks": ["boolq"], "limit": 2, "data": ["boolq=dev.jsonl"]}


def test_eval_all_measures_and_saves_the_measurements_of_the_recipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_run: Path
) -> None:
    asks_for(own_run, {"perplexity": PERPLEXITY, "passkey": PASSKEY, "benchmarks": BENCHMARKS})
    status, out, err = run_captured(capsys, monkeypatch, "eval", "all", "run")
    assert (status, err.count("\n"), err.count("pi-lora report")) == (0, 1, 1)
    kept = {file.stem: json.loads(file.read_text()) for file in (own_run / "scores").iterdir()}
    assert set(kept) == {"perplexity", "passkey", "benchmarks"}
    assert [row["window"] for row in kept["perplexity"]["windows"]] == [64, 256]
    assert (kept["passkey"]["seed"], len(kept["passkey"]["depths"])) == (3, 2)
    assert (kept["benchmarks"]["tasks"]["boolq"]["examples"], kept["benchmarks"]["window"]) == (2, 64)
    assert all((scores["model"], scores["scale"]) == ("run", 4) for scores in kept.values())
    assert f"{kept['perplexity']['windows'][0]['perplexity']:,.3f}" in out
    assert "k_max" in out
    assert "boolq (0-shot)" in out


def test_existing_scores_are_measured_again_only_on_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_run: Path
) -> None:
    asks_for(own_run, {"perplexity": PERPLEXITY, "passkey": PASSKEY})
    assert run_captured(capsys, monkeypatch, "eval", "all", "run")[0] == 0
    marked = own_run / "scores" / "perplexity.json"
    measured = json.loads(marked.read_text())
    marked.write_text(json.dumps({**measured, "marked": True}))
    with monkeypatch.context() as patched:
        patched.setattr("pi_lora.evaluation.suite.load_model", loaded)
        assert run_captured(capsys, monkeypatch, "eval", "all", "run")[0] == 0
    (own_run / "scores" / "passkey.json").unlink()
    status, out, err = run_captured(capsys, monkeypatch, "eval", "all", "run")
    assert (status, err.count("\n"), err.count("pi-lora report")) == (0, 1, 1)
    assert json.loads(marked.read_text())["marked"]
    assert (own_run / "scores" / "passkey.json").is_file()
    assert "perplexity" in out

    status, _, err = run_captured(capsys, monkeypatch, "eval", "all", "run", "--again")
    assert (status, err.count("\n"), err.count("pi-lora report")) == (0, 1, 1)
    assert json.loads(marked.read_text()) == measured


@pytest.mark.parametrize(
    ("perplexity", "passkey"), [({"documents": 1}, {"depths": 1}), ({"windows": [256]}, {"trials": 2})], ids=str
)
def test_scores_of_other_options_are_measured_and_replaced(
    perplexity: dict[str, Any],
    passkey: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    own_run: Path,
) -> None:
    """Also by a smaller measurement."""
    for other, others in (({}, {}), (perplexity, passkey)):
        asks_for(own_run, {"perplexity": PERPLEXITY | other, "passkey": PASSKEY | others})
        assert run_captured(capsys, monkeypatch, "eval", "all", "run")[0] == 0
    for name, changes in (("perplexity", perplexity), ("passkey", passkey)):
        written = json.loads((own_run / "scores" / f"{name}.json").read_text())["options"]
        assert {key: written[key] for key in changes} == changes


def test_a_recipe_without_measurements_gets_perplexity_and_passkey(own_run: Path) -> None:
    asked = requested_of_run(Run(own_run))
    assert asked == {"perplexity": PerplexityOptions(), "passkey": PasskeyOptions()}
    asks_for(own_run, {"every": 5})
    assert requested_of_run(Run(own_run)) == asked
    asks_for(own_run, {"benchmarks": {}})
    assert requested_of_run(Run(own_run)) == {"benchmarks": BenchmarksOptions()}


def test_scores_of_another_text_have_a_file_of_their_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_run: Path
) -> None:
    asks_for(own_run, {"perplexity": {**PERPLEXITY, "documents": 1, "bos": "document"}})
    others = ["other.txt", "books/other.txt"]
    (own_run.parent / "books").mkdir()
    for number, other in enumerate(others):
        text = f"A light burns in window {number} of the old house. "
        (own_run.parent / other).write_text(text * 60)
    for words in ([], *(["--data", other] for other in others), ["--data", "text.txt"]):
        assert run_captured(capsys, monkeypatch, "eval", "all", "run", *words)[0] == 0
    kept = {file.stem: json.loads(file.read_text()) for file in (own_run / "scores").iterdir()}
    assert kept.pop("perplexity")["data"] == "text.txt"
    assert sorted(scores["data"] for scores in kept.values()) == sorted(others)
    for scores in kept.values():
        options = {key: scores["options"][key] for key in ("windows", "documents", "bos")}
        assert options == {"windows": [64, 256], "documents": 1, "bos": "document"}
    asks_for(own_run, {"perplexity": {**PERPLEXITY, "documents": 1, "stride": 64}})
    assert run_captured(capsys, monkeypatch, "eval", "all", "run")[0] == 0
    assert json.loads((own_run / "scores" / "perplexity.json").read_text())["stride"] == 64


def test_a_broken_score_is_measured_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_run: Path
) -> None:
    asks_for(own_run, {"passkey": PASSKEY})
    file = own_run / "scores" / "passkey.json"
    file.write_text("{")
    status, _, err = run_captured(capsys, monkeypatch, "eval", "all", "run")
    assert (status, err.count("\n"), err.startswith(f"{file.relative_to(own_run.parent)}: ")) == (2, 1, True)
    assert run_captured(capsys, monkeypatch, "eval", "all", "run", "--again")[0] == 0
    assert len(json.loads(file.read_text())["depths"]) == 2


def test_compare_measures_both_models_with_the_options_of_the_recipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_run: Path, small_model: Path
) -> None:
    """Once: a second comparison reads the scores."""
    command = ("compare", str(small_model), "run", "--json", "compared.json")
    files = [own_run / "scores" / name for name in ("passkey.json", "passkey-base.json", "passkey-step-0.json")]
    for trials in (2, 1):
        asks_for(own_run, {"passkey": {**PASSKEY, "trials": trials}})
        assert run_captured(capsys, monkeypatch, *command)[0] == 0
        assert [json.loads(file.read_text())["options"]["trials"] for file in files] == [trials] * 3
    with monkeypatch.context() as patched:
        patched.setattr("pi_lora.evaluation.suite.load_model", loaded)
        assert run_captured(capsys, monkeypatch, *command)[0] == 0


@pytest.mark.parametrize("name", ["base", "knowledge-base", "x-step-3"])
def test_a_text_named_like_a_stage_is_not_taken_for_one(own_run: Path, name: str) -> None:
    [file] = [each for each in requested_of_run(Run(own_run), f"texts/{name}") if each.startswith("perplexity-")]
    kept = Run(own_run).scores_file(file)
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("{}")
    assert Run(own_run).score_files() == [("tuned", file, kept)]


@pytest.mark.parametrize(
    ("name", "evaluation", "where"),
    [
        ("gone", {}, "gone: "),
        ("run", {"benchmarks": {**BENCHMARKS, "data": ["boolq=gone.jsonl"]}}, "evaluation.benchmarks.data: boolq: "),
        ("run", {"perplexity": {**PERPLEXITY, "data": "gone.txt"}}, "evaluation.perplexity.data: gone.txt: "),
        ("run", {"perplexity": {**PERPLEXITY, "min_tokens": 9999}}, "evaluation.perplexity.data: text.txt: "),
        ("run", {"passkey": PASSKEY, "context": {"data": "gone.txt"}}, "evaluation.context.data: gone.txt: "),
        ("run", {"passkey": {**PASSKEY, "target": 16}}, "evaluation.passkey.target: 16 "),
        ("run", {"chat": {"data": "dev.jsonl"}}, "evaluation.chat.data: "),
        ("run", {"summarization": {"data": "dev.jsonl", "document": "passage"}}, "evaluation.summarization.data: "),
        ("run --data gone.txt", {"perplexity": PERPLEXITY}, "--data: gone.txt: "),
    ],
)
def test_a_mistake_is_one_line_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    own_run: Path,
    name: str,
    evaluation: dict[str, Any],
    where: str,
) -> None:
    asks_for(own_run, evaluation)
    monkeypatch.setattr("pi_lora.evaluation.suite.load_model", loaded)
    status, out, err = run_captured(capsys, monkeypatch, "eval", "all", *name.split())
    assert (status, out, err.startswith(where)) == (2, "", True), err
    assert {line.split(": ")[0] for line in err.splitlines()} == {where.split(": ")[0]}


def test_a_mistake_is_named_before_a_model_is_loaded_to_be_compared_or_probed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_run: Path, small_model: Path
) -> None:
    for module in ("suite", "probe"):
        monkeypatch.setattr(f"pi_lora.evaluation.{module}.load_model", loaded)
    asks_for(own_run, {"perplexity": {**PERPLEXITY, "data": "gone.txt"}, "summarization": {"data": "none.jsonl"}})
    for words, wheres in (
        (("compare", str(small_model), "run"), ["evaluation.perplexity.data: ", "evaluation.summarization.data: "]),
        (("probe", str(small_model), "--target", "256", "--data", "gone.txt"), ["--data: gone.txt: "]),
        (("probe", str(small_model), "--target", "256,9999", "--data", "text.txt"), ["--data: text.txt: "]),
        (("probe", str(small_model), "--target", "96", "--data", "text.txt"), ["--target: 96 "]),
        (
            ("eval", "perplexity", "run", str(small_model), "--data", "text.txt", "--windows", "64,9999"),
            ["--data: text.txt: "],
        ),
        (("eval", "context", "run", "--data", "text.txt", "--min-tokens", "9999"), ["--data: text.txt: "]),
    ):
        status, out, err = run_captured(capsys, monkeypatch, *words)
        lines = err.splitlines()
        assert (status, out) == (2, ""), err
        assert [line.startswith(where) for line, where in zip(lines, wheres, strict=True)] == [True] * len(wheres)
        assert words[0] != "eval" or f"lower {words[-2]}" in err


def test_a_run_on_the_hub_is_measured_and_compared_by_its_id(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    own_run: Path,
    small_model: Path,
    tmp_path: Path,
) -> None:
    asks_for(own_run, {"perplexity": PERPLEXITY})
    put_on_hub(own_run, "you/run", tmp_path / "hub", monkeypatch)
    status, _, err = run_captured(capsys, monkeypatch, "eval", "all", "you/run")
    assert (status, err.count("\n"), err.count("pi-lora report")) == (0, 1, 1)
    [file] = (tmp_path / "hub").glob("models--you--run/snapshots/*/scores/perplexity.json")
    scores = json.loads(file.read_text())
    assert scores["model"] == "you/run"
    status, _, err = run_captured(
        capsys, monkeypatch, "compare", str(small_model), "you/run", "--json", "compared.json"
    )
    assert (status, err.count(f"pi-lora report {file.parents[1]}")) == (0, 1), err
    [short, long] = json.loads(Path("compared.json").read_text())["rows"]
    assert [short["run"], long["run"]] == [row["perplexity"] for row in scores["windows"]]
    assert short["run"] != short["base"]


def trains_on(folder: Path, **source: Any) -> None:
    """Let the recipe of a run say that it was tuned on this text."""
    recipe = yaml.safe_load((folder / RECIPE_FILE).read_text())
    (folder / RECIPE_FILE).write_text(
        yaml.safe_dump({**recipe, "data": {"source": [source]}, "evaluation": {"passkey": PASSKEY}})
    )


def test_an_interruption_names_the_scores_that_are_saved(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_run: Path
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    asks_for(own_run, {"perplexity": {**PERPLEXITY, "documents": 1}, "passkey": PASSKEY})
    monkeypatch.setattr("pi_lora.evaluation.passkey.Passkey.measure", interrupt)
    status, _, err = run_captured(capsys, monkeypatch, "eval", "all", "run")
    assert status == 130
    [line] = err.splitlines()
    assert "run/scores/perplexity.json" in line
    # Nothing is measured before the interruption now.
    status, _, err = run_captured(capsys, monkeypatch, "eval", "all", "run")
    assert (status, "perplexity.json" in err) == (130, False)


def test_a_report_of_an_unmeasured_run_names_the_command_that_measures_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_run: Path
) -> None:
    """A recipe without measurements names no text to measure."""
    status, _, err = run_captured(capsys, monkeypatch, "report", "run")
    assert (status, "pi-lora eval perplexity run --data" in err) == (2, True)
    asks_for(own_run, {"passkey": PASSKEY})
    _, _, err = run_captured(capsys, monkeypatch, "report", "run")
    command = err.partition("pi-lora ")[2].split()
    assert run_captured(capsys, monkeypatch, *command)[0] == 0
    assert run_captured(capsys, monkeypatch, "report", "run")[0] == 0


def test_texts_that_train_are_marked_and_not_published(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_run: Path
) -> None:
    words = ("eval", "all", "run", "--data", "./text.txt")
    asks_for(own_run, {"passkey": PASSKEY})
    run_captured(capsys, monkeypatch, *words)
    run_captured(capsys, monkeypatch, "report", "run")
    assert "perplexity at 256" in (own_run / "README.md").read_text().partition("\n---\n")[0]
    trains_on(own_run, name="text.txt")
    status, out, err = run_captured(capsys, monkeypatch, *words, "--again")
    assert status == 0
    assert err.startswith("./text.txt: run is tuned on it")
    assert "data.source.hold_out" in err
    assert "run is tuned on it" in " ".join(out.split())
    [scores] = (own_run / "scores").glob("perplexity-text_text_txt_*.json")
    assert json.loads(scores.read_text())["tuned_on"]
    run_captured(capsys, monkeypatch, "report", "run")
    card = (own_run / "README.md").read_text()
    assert "the model is tuned on it" in card
    assert "**Reads**" not in card
    metadata, _, _ = card.removeprefix("---\n").partition("\n---\n")
    [results] = yaml.safe_load(metadata)["model-index"]
    assert {entry["metrics"][0]["name"].split(",")[0] for entry in results["results"]} == {"k_max at 256"}


def test_the_held_out_part_of_a_training_text_is_measured_by_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_run: Path
) -> None:
    (own_run.parent / "books").mkdir()
    for number in range(8):
        (own_run.parent / "books" / f"{number}.txt").write_text(f"Door {number} is open and the road is long. " * 40)
    trains_on(own_run, name="books", hold_out=0.3)
    words = ("--windows", "64", "--stride", "32", "--json", "scores.json")
    for name in ("books", str(own_run.parent / "books")):
        status, _, err = run_captured(capsys, monkeypatch, "eval", "perplexity", "run", "--data", name, *words)
        assert (status, "tuned on it" in err) == (0, False)
        scores = json.loads(Path("scores.json").read_text())
        assert scores["options"]["hold_out"] == 0.3
        assert scores["documents"] < 8
    # Relative names in a recipe are those of the folder where the training began.
    run = json.loads((own_run / "run.json").read_text())
    (own_run / "run.json").write_text(json.dumps({**run, "directory": str(own_run.parent)}))
    monkeypatch.chdir("books")
    assert run_captured(capsys, monkeypatch, "eval", "perplexity", "../run", "--data", "../books", *words)[0] == 0
    assert json.loads(Path("scores.json").read_text())["options"]["hold_out"] == 0.3
    trains_on(own_run, name="gone/", hold_out=0.3)
    _, _, err = run_captured(capsys, monkeypatch, "eval", "perplexity", "../run", "--data", "../books", *words)
    assert err.startswith("gone/: ")
    assert "../run is tuned on it" in err.splitlines()[0]


def test_a_run_is_tuned_on_the_texts_of_the_run_before_it(own_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(own_run.parent))
    trains_on(own_run, name="~/text.*")
    assert [source.name for source in Run(own_run).texts] == [str(own_run.parent / "text.*")]
    further = Path(shutil.copytree(own_run, own_run.parent / "further"))
    recipe = yaml.safe_load((further / RECIPE_FILE).read_text())
    recipe |= {"model": {"name": "run"}, "data": {"source": "other.txt"}}
    (further / RECIPE_FILE).write_text(yaml.safe_dump(recipe))
    facts = json.loads((further / "run.json").read_text()) | {"directory": str(own_run.parent)}
    (further / "run.json").write_text(json.dumps(facts))
    names = [Path(source.name).name for source in Run(further).texts]
    assert names == ["text.*", "other.txt"]


def test_a_note_on_trained_texts_is_printed_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_run: Path
) -> None:
    evaluation = {"perplexity": {**PERPLEXITY, "documents": 1}, "context": {"data": "text.txt", "window": 128}}
    trains_on(own_run, name="text.txt")
    asks_for(own_run, evaluation)
    status, _, err = run_captured(capsys, monkeypatch, "eval", "all", "run")
    assert (status, err.count("run is tuned on it")) == (0, 1)
    recipe = yaml.safe_load((own_run / RECIPE_FILE).read_text())
    Path("new.yaml").write_text(yaml.safe_dump({**recipe, "context": {"target": 256}}))
    status, out, err = run_captured(capsys, monkeypatch, "train", "new.yaml", "--dry-run", "data.epochs=4")
    assert (status, (out + err).count("text.txt: the run is tuned on it")) == (0, 1)


@pytest.mark.parametrize("data", ["novel.txt", "*.txt"])
def test_texts_of_one_name_in_two_folders_have_two_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    names = set()
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "novel.txt").write_text(folder)
        monkeypatch.chdir(tmp_path / folder)
        names.add(name_of_text_scores(data))
    assert len(names) == 2
