"""What a stretch gained and cost, on made-up scores of which the verdicts are known, and the command."""

import json
import math
import random
import shutil
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch

import pi_lora
from conftest import run_captured, run_command, small_recipe
from pi_lora.evaluation.benchmarks import BenchmarkScores
from pi_lora.evaluation.changes import change_of
from pi_lora.evaluation.intervals import of_means, of_successes, quantile
from pi_lora.evaluation.measurement import Scores, Value, proportion
from pi_lora.evaluation.passkey import PasskeyScores
from pi_lora.evaluation.perplexity import PerplexityScores
from pi_lora.evaluation.ruler import RulerScores
from pi_lora.evaluation.suite import differences, name_of_text_scores
from pi_lora.evaluation.summarization import SummarizationScores
from pi_lora.model_ref import ModelRef
from pi_lora.recipe.files import dump_recipe, load_recipe
from pi_lora.report.comparison import compare
from pi_lora.scaling.extension import Extension
from reported import make_run, passkey, passkey_map, perplexity, ruler, summarization


def read(windows: dict[int, list[float]], tokens: int = 1000) -> PerplexityScores:
    """Perplexities by window and document; documents of `tokens`, twice as many, ..."""
    sizes = [tokens * (number + 1) for number in range(len(next(iter(windows.values()))))]

    def rows(number: int) -> list[dict[str, Any]]:
        return [{"window": window, "perplexity": x[number], "tokens": sizes[number]} for window, x in windows.items()]

    documents = [{"name": str(number), "tokens": size, "windows": rows(number)} for number, size in enumerate(sizes)]
    whole = []
    for window, found in windows.items():
        loss = sum(size * math.log(x) for size, x in zip(sizes, found, strict=True)) / sum(sizes)
        whole.append({"window": window, "perplexity": math.exp(loss), "tokens": sum(sizes)})
    return PerplexityScores.model_validate({"model": "m", "options": {}, "windows": whole, "per_document": documents})


def one(base: Scores, run: Scores) -> dict[str, Any]:
    return {row.measurement: row for row in compare(base, run)}


def test_perplexities_are_paired_by_document() -> None:
    """Documents differ by far more than the models do, all in one direction."""
    before = [10.0, 100.0, 40.0, 20.0]
    base = read({64: before, 128: before})
    run = read({64: [x * y for x, y in zip(before, (1.03, 1.032, 1.028, 1.03), strict=True)], 128: before[::-1]})
    rows = one(base, run)
    old, beyond = rows["perplexity at 64"], rows["perplexity at 128"]
    assert old.verdict == "3.0 % worse"
    assert old.pairs == 4
    assert old.interval is not None
    assert 2.7 < old.interval[0] < old.change < old.interval[1] < 3.3
    assert beyond.verdict == "within noise"
    assert one(run, base)["perplexity at 64"].verdict == "2.9 % better"


def test_one_document_has_no_interval_and_others_do_not_pair() -> None:
    (row,) = compare(read({64: [10.0]}), read({64: [11.0]}))
    assert (row.interval, row.verdict) == (None, "10.0 % worse, but too few documents to tell: 1, about 5 would do")
    assert not list(compare(read({64: [10.0, 20.0]}), read({64: [11.0, 22.0]}, tokens=900)))


def test_a_text_that_was_edited_does_not_pair() -> None:
    """A file of the same name with as many tokens."""
    base = read({64: [10.0, 20.0]})
    assert base.per_document
    documents = [row.model_copy(update={"sha256": text}) for row, text in zip(base.per_document, "ab", strict=True)]
    base, run = (base.model_copy(update={"per_document": documents}) for _ in range(2))
    others = [row.model_copy(update={"sha256": text}) for row, text in zip(documents, "cd", strict=True)]
    edited = run.model_copy(update={"per_document": others})
    assert list(compare(base, run))
    assert not list(compare(base, edited))


def test_too_few_documents_report_how_many_are_needed() -> None:
    """Two novels that gained 71 % were "within noise"."""
    [row] = compare(read({64: [27.0, 32.0]}), read({64: [8.5, 8.6]}))
    assert row.verdict == "71.7 % better"
    [row] = compare(read({64: [27.0, 42.0]}), read({64: [8.9, 10.5]}))
    assert row.verdict == "72.6 % better, but too few documents to tell: 2, about 3 would do"
    more = [27.0, 32.0, 29.0, 30.5, 28.0]
    [row] = compare(read({64: more}), read({64: [each * 0.3 for each in more[:-1]] + [9.0]}))
    assert row.verdict == "69.3 % better"
    [row] = compare(read({64: more}), read({64: more[::-1]}))
    assert row.verdict == "within noise"


def test_scores_of_other_texts_are_never_paired() -> None:
    """A model tuned on novels, whose base was measured on Python source: "318 % worse" where it was twice as good."""
    base, run = (PerplexityScores.model_validate(perplexity(8.5, 60.25, data)) for data in ("builtin:stdlib", "novels"))
    assert not list(compare(base, run))
    assert differences(base.options, run) == ["data"]
    other = run.model_copy(update={"options": run.options.changed(stride=64)})
    assert differences(other.options, run) == ["stride"]


def test_intervals_cover_the_true_mean_at_their_confidence() -> None:
    rng = random.Random(0)
    for number in (2, 4, 20):
        held = 0
        for _ in range(1000):
            interval = of_means([[(0.0, rng.gauss(0.1, 1), 1.0) for _ in range(number)]])
            assert interval is not None
            held += interval[0] <= 0.1 <= interval[1]
        assert 930 <= held <= 970
    interval = of_means([[(0.0, 1.0, 1.0), (0.0, 2.0, 1.0), (0.0, 4.0, 1.0)]])
    assert interval is not None
    assert interval[1] - interval[0] == pytest.approx(2 * quantile(3) * stdev([1, 2, 4]) / math.sqrt(3))


def asked(outcomes: list[list[bool]], seed: int = 0) -> PasskeyScores:
    depths = [
        {"k": 32 * (k + 1), "success_rate": sum(each) / len(each), "trials": len(each), "outcomes": each}
        for k, each in enumerate(outcomes)
    ]
    about = {"model": "m", "options": {"seed": seed}}
    k_max = sum(32 for each in outcomes if sum(each) / len(each) >= 0.2)
    return PasskeyScores.model_validate({**about, "target": 128, "k_max": k_max, "seed": seed, "depths": depths})


def test_passkeys_are_paired_by_trial() -> None:
    base, run = asked([[True] * 8, [False] * 8]), asked([[True] * 8, [True] * 7 + [False]])
    rows = one(base, run)
    row = rows["passkeys retrieved at 128"]
    assert (row.base, row.run, row.pairs, row.verdict) == (50, 93.75, 16, "43.8 points better")
    assert rows["k_max at 128"].verdict == "32 tokens longer"
    rows = one(base, asked([[True] * 8, [True] + [False] * 7]))
    assert rows["passkeys retrieved at 128"].verdict == "within noise"
    assert one(base, base)["k_max at 128"].verdict == "the same"
    assert not one(base, asked([[True] * 8] * 2, seed=1))  # other keys


def test_passkeys_of_several_lengths_compare() -> None:
    rows = one(PasskeyScores.model_validate(passkey_map()), PasskeyScores.model_validate(passkey_map()))
    assert list(rows) == ["k_max at 64", "k_max at 128"]


def test_the_interval_of_pairs_equals_bonett_and_prices() -> None:
    """Bonett and Price (2012): (12 + 1 - 2 - 1) / 102 and so on, of 100 pairs of which 12 gained and 2 lost."""
    interval = of_successes([(0, 1, 1)] * 12 + [(1, 0, 1)] * 2 + [(1, 1, 1)] * 86)
    middle, reach = (13 - 3) / 102, 1.96 * math.sqrt((16 / 102 - (10 / 102) ** 2) / 102)
    assert interval == pytest.approx((middle - reach, middle + reach))


def test_benchmarks_are_paired_where_examples_are_known() -> None:
    rng = random.Random(0)
    before = [float(rng.random() < 0.5) for _ in range(400)]
    after = [1.0 if x or number % 8 == 0 else 0.0 for number, x in enumerate(before)]

    def scores(outcomes: list[float], known: bool, prompts: str = "") -> BenchmarkScores:
        known_outcomes = outcomes if known else None
        task = {"acc": sum(outcomes) / 400, "examples": 400, "outcomes": known_outcomes, "prompts": prompts}
        return BenchmarkScores.model_validate({"model": "m", "options": {}, "tasks": {"boolq": task}})

    (paired,) = compare(scores(before, True), scores(after, True))
    assert not list(compare(scores(before, True), scores(after, True, prompts="edited")))
    (loose,) = compare(scores(before, True), scores(after, False))
    assert paired.change == pytest.approx(loose.change)
    assert (paired.pairs, paired.verdict) == (400, f"{paired.change:.1f} points better")
    assert (loose.pairs, loose.verdict) == (None, "within noise")
    assert loose.interval is not None
    errors = math.hypot(stdev(before), stdev(after)) / math.sqrt(400)
    assert loose.interval[1] - loose.interval[0] == pytest.approx(2 * 196 * errors, rel=0.02)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([0.0, 1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 0.0]),
        ([0.0, 1.0, 0.5, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 0.0]),
        ([0.0, 1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.5, 1.0, 0.0]),
    ],
)
def test_the_interval_is_of_successes_only_if_every_outcome_is_one(before: list[float], after: list[float]) -> None:
    pairs = [(*pair, 1.0) for pair in zip(before, after, strict=True)]
    expected = of_successes(pairs) if {*before, *after} == {0, 1} else of_means([pairs])
    base, run = (
        proportion("a", fmean(each), 5, values=[Value(str(n), value) for n, value in enumerate(each)])
        for each in (before, after)
    )
    row = change_of(base, run)
    assert expected
    assert row.interval == pytest.approx([100 * bound for bound in expected])
    assert (row.unit, row.pairs) == ("points", 5)


def test_summaries_of_other_rows_are_not_compared() -> None:
    """A longer window takes longer rows; a file may have been edited."""
    rows = [f"rows.jsonl:{number}" for number in range(1, 4)]
    base = SummarizationScores.model_validate({**summarization(40, 20, 30), "rows": rows})
    run = SummarizationScores.model_validate({**summarization(42, 22, 32), "rows": rows})
    other = SummarizationScores.model_validate({**summarization(20, 10, 15), "rows": [*rows[:2], "rows.jsonl:9"]})
    assert one(base, run)["ROUGE-1"].change == 2
    assert not one(base, other)
    assert not one(base, run.model_copy(update={"texts": "edited"}))


def test_ruler_is_paired_by_prompt() -> None:
    base_outcomes = {64: {"a": [1.0, 1.0, 0.5, 1.0], "b": [1.0, 0.75, 1.0, 1.0]}, 128: {"a": [0.0] * 4, "b": [0.0] * 4}}
    run_outcomes = {64: {"a": [1.0, 1.0, 0.5, 1.0], "b": [1.0, 0.75, 1.0, 0.75]}, 128: {"a": [1.0] * 4, "b": [0.5] * 4}}
    base = RulerScores.model_validate(ruler(base_outcomes))
    run = RulerScores.model_validate(ruler(run_outcomes))
    rows = one(base, run)
    assert rows["RULER at 64"].verdict == "within noise"
    assert rows["RULER at 64"].pairs == 8
    beyond = rows["RULER at 128"]
    assert beyond.verdict == "75.0 points better"
    assert beyond.interval is not None
    assert beyond.interval[0] < 75 < beyond.interval[1], "all differ alike, which is no certainty"


def test_compare_measures_missing_scores_on_a_named_text(
    small_model: Path,
    lora_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(lora_run, tmp_path / "run")
    _, _, refusal = run_captured(capsys, monkeypatch, "compare", str(small_model), "run")
    assert refusal.startswith("--data: name a text that run")
    recipe = load_recipe(tmp_path / "run" / "recipe.yaml", ["evaluation.passkey={target: 256, depths: 2, trials: 2}"])
    (tmp_path / "run" / "recipe.yaml").write_text(dump_recipe(recipe.recipe))
    Path("novel.txt").write_text("The road is long and the door is open. " * 40)
    words = ["--data", "novel.txt", "--json", "compared.json"]
    status, out, err = run_captured(capsys, monkeypatch, "compare", str(small_model), "run", *words)
    assert status == 0, err
    assert "pi-lora report run" in err
    assert "k_max at" in out
    assert "data novel.txt, documents 20, " in " ".join(out.split())
    assert "split test, column text, windows 64/128, " in " ".join(out.split())
    of_text = name_of_text_scores("novel.txt")
    assert "novel.txt" in json.loads(Path("compared.json").read_text())["settings"][of_text]
    kept = {file.stem: json.loads(file.read_text()) for file in Path("run/scores").iterdir()}
    names = {f"{name}{stage}" for name in (of_text, "passkey") for stage in ("", "-base", "-step-0")}
    assert set(kept) == names
    assert kept["passkey-base"]["model"] == kept["passkey-step-0"]["model"] == str(small_model)
    assert [kept[name]["scaling"] for name in ("passkey-base", "passkey-step-0", "passkey")] == [None, "pi", "pi"]
    assert "Compared with no tuning: " in out
    untuned = json.loads(Path("compared.json").read_text())["untuned"]
    assert {row["measurement"] for row in untuned} == {
        "perplexity at 64",
        "perplexity at 128",
        "k_max at 256",
        "passkeys retrieved at 256",
    }
    assert kept[of_text]["options"] == kept[f"{of_text}-base"]["options"]
    assert run_captured(capsys, monkeypatch, "compare", str(small_model), "run", *words) == (0, out, "")
    status, without, _ = run_captured(capsys, monkeypatch, "compare", str(small_model), "run", *words, "--no-untuned")
    assert (status, "Compared with no tuning: " in without) == (0, False)
    shutil.copytree(small_model, "moved")
    assert run_captured(capsys, monkeypatch, "compare", "moved", "run", *words)[0] == 0
    assert {file.stem: json.loads(file.read_text()) for file in Path("run/scores").iterdir()} == kept
    # Another version of a library is a line, and measures nothing again.
    of_base = Path(f"run/scores/{of_text}-base.json")
    kept[f"{of_text}-base"]["versions"]["torch"] = "1.0.0"
    of_base.write_text(json.dumps(kept[f"{of_text}-base"]))
    assert run_captured(capsys, monkeypatch, "compare", str(small_model), "run", *words)[0] == 0
    assert json.loads(of_base.read_text()) == kept[f"{of_text}-base"]
    settings = json.loads(Path("compared.json").read_text())["settings"]
    assert [name for name in settings if f"torch 1.0.0 and {torch.__version__}" in settings[name]] == [of_text]
    assert run_command("report", "run") == 0
    assert f"torch 1.0.0 and {torch.__version__}" in Path("run/README.md").read_text()
    # Rows of an earlier text name it.
    Path("other.txt").write_text("The sea is cold and the ship is old. " * 40)
    other = ["--data", "other.txt", *words[2:], "--no-untuned"]
    assert run_captured(capsys, monkeypatch, "compare", str(small_model), "run", *other)[0] == 0
    rows = [row["measurement"] for row in json.loads(Path("compared.json").read_text())["rows"]]
    assert [heading for heading in rows if heading.startswith("perplexity at 64")] == [
        "perplexity at 64",
        "perplexity at 64, novel.txt",
    ]


def test_another_model_than_the_base_is_refused_or_named(
    small_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was given as BASE stood in the table as "base"."""
    scores = {"passkey": passkey(96), "passkey-base": {**passkey(32), "model": str(small_model)}}
    run = make_run(small_model, tmp_path / "run", scores, small_recipe(small_model, evaluation={"passkey": {}}))
    status, out, err = run_captured(capsys, monkeypatch, "compare", "builtin:tiny", str(run))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"{run}: ")
    assert all(name in err for name in (str(small_model), "builtin:tiny", "--another"))
    status, out, err = run_captured(capsys, monkeypatch, "compare", "builtin:tiny", str(run), "--another")
    assert status == 0, err
    assert "builtin:tiny (another model)" in out
    assert json.loads((run / "scores" / "passkey-base.json").read_text())["k_max"] == 32


def test_the_extended_base_is_another_model(
    small_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the weights of the base, whose scores in the run stood in the table as those of it."""
    scores = {"passkey": passkey(96), "passkey-base": {**passkey(32), "model": str(small_model)}}
    run = make_run(small_model, tmp_path / "run", scores, small_recipe(small_model, evaluation={"passkey": {}}))
    window = load_recipe(run / "recipe.yaml").recipe.context.target
    extended = pi_lora.extend(
        ModelRef(str(small_model), extension=Extension(window, scaling="yarn")), tmp_path / "extended"
    )
    status, out, err = run_captured(capsys, monkeypatch, "compare", str(extended), str(run))
    assert (status, out) == (2, "")
    assert err.startswith(f"{run}: ")
    assert all(name in err for name in (str(small_model), str(extended), "--another"))
    status, out, err = run_captured(capsys, monkeypatch, "compare", str(extended), str(run), "--another")
    assert status == 0, err
    assert "(another model)" in out
    assert json.loads((run / "scores" / "passkey-base.json").read_text())["k_max"] == 32


def test_a_dynamic_base_reads_no_further_than_its_constant_frequencies(
    small_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As InternLM3, whose window is longer than many targets."""
    base = shutil.copytree(small_model, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "dynamic", "factor": 16.0}
    (base / "config.json").write_text(json.dumps(config))
    recipe = small_recipe(base, evaluation={"passkey": {}})
    scores = {"passkey": passkey(96), "passkey-base": {**passkey(32), "model": str(base)}}
    run = make_run(base, tmp_path / "run", scores, recipe)
    status, out, err = run_captured(capsys, monkeypatch, "compare", str(base), str(run), "--no-untuned")
    assert status == 0, err
    assert "(another model)" not in out
