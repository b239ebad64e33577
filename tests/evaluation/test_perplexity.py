"""`pi-lora eval perplexity`: which documents, what the result says, going on, several processes and several models."""

import gzip
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from conftest import refused, run_captured
from pi_lora.api import load
from pi_lora.data.sources import PINNED
from pi_lora.errors import DataError, Interrupted, ModelError
from pi_lora.evaluation import perplexity
from pi_lora.evaluation.measurement import Session, as_json
from pi_lora.evaluation.perplexity import (
    Perplexity,
)
from pi_lora.evaluation.texts import choose_documents
from pi_lora.models.loaded import LoadedModel
from pi_lora.models.resolve import resolve_model
from pi_lora.recipe.evaluation import PerplexityOptions
from pi_lora.recipe.files import RECIPE_FILE, dump_recipe, load_recipe
from pi_lora.terminal import out as terminal

WORDS = "the road is long and the night is dark but a light burns in every window of the old house".split()


def text(words: int, start: int = 0) -> str:
    return " ".join(WORDS[(start + index * index) % len(WORDS)] for index in range(words))


@pytest.fixture
def loaded(small_model: Path) -> LoadedModel:
    return load(str(small_model))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Seven documents of 20 to 200 words, and the folder they lie in."""
    for index, words in enumerate((120, 20, 200, 150, 20, 170, 140)):
        (tmp_path / f"{index}.txt").write_text(text(words, index))
    return tmp_path


def options(source: Path, *windows: int, **others: Any) -> PerplexityOptions:
    return PerplexityOptions(data=str(source), windows=windows or (64,), **{"stride": 32, **others})


def names(loaded: LoadedModel, source: Path, longest: int = 64, **choice: Any) -> list[str]:
    chosen, _ = choose_documents(loaded, PerplexityOptions(data=str(source), **choice), longest)
    return [Path(document.name).stem for document in chosen]


def test_perplexity_scores_hold_their_options(loaded: LoadedModel, folder: Path) -> None:
    asked = options(folder, 32, 64, stride=16, documents=3, truncate=140)
    scores = Perplexity().run(loaded, asked, Session())
    said = {
        "model": loaded.name,
        "scale": 1.0,
        "scaling": None,
        "dtype": "float32",
        "kernel": "blockwise",
        "window": 64,
        "data": str(folder),
        "documents": 3,
        "documents_too_short": 1,
        "options": asked.model_dump(mode="json"),
        "bos": "each window",
        "stride": 16,
        "weighting": "token",
    }
    assert {key: value for key, value in as_json(scores).items() if key in said} == said
    assert [row.tokens for row in scores.windows] == [417, 417]
    documents = scores.per_document or []
    assert [(Path(each.name).name, each.tokens) for each in documents] == [
        ("0.txt", 140),
        ("2.txt", 140),
        ("3.txt", 140),
    ]
    log_mean = sum(torch.tensor(each.windows[1].perplexity).log().item() for each in documents) / 3
    assert scores.windows[1].perplexity == pytest.approx(torch.tensor(log_mean).exp().item(), rel=1e-5)


def test_a_seed_draws_documents_at_random(loaded: LoadedModel, folder: Path) -> None:
    drawn = {tuple(names(loaded, folder, documents=2, seed=seed)) for seed in range(8)}
    assert len(drawn) > 3
    assert names(loaded, folder, documents=2, seed=5) == names(loaded, folder, documents=2, seed=5)
    assert sorted(names(loaded, folder, seed=1)) == ["0", "2", "3", "5", "6"]
    long_ones, too_short = choose_documents(loaded, PerplexityOptions(data=str(folder), seed=1), 300)
    assert (len(long_ones), too_short) == (2, 5)


def test_a_selection_without_documents_is_refused(loaded: LoadedModel, folder: Path) -> None:
    longest = len(loaded.tokenizer(text(200, 2))["input_ids"])
    with refused(DataError, f"--data: {folder}: ", longest, 5000):
        names(loaded, folder, min_tokens=5000, seed=1)


@pytest.mark.parametrize("weight", [math.inf, 1e6])
def test_losses_with_an_infinite_perplexity_are_refused(loaded: LoadedModel, folder: Path, weight: float) -> None:
    """Infinite ones, and finite ones above the 709 nats that exp() takes."""
    with torch.no_grad():
        loaded.module.model.norm.weight.fill_(weight)
    with refused(ModelError, f"{loaded.name}: ", "float32"):
        Perplexity().run(loaded, options(folder, documents=1), Session())


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Where the file of a preset lies in the hub's cache, as a download would leave it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def place(preset: str) -> Path:
        source, uploaded = PINNED[preset]
        repository = tmp_path / "hub" / f"datasets--{source.name.replace('/', '--')}"
        file = repository / "snapshots" / source.revision / uploaded
        file.parent.mkdir(parents=True)
        return file

    return place


def test_proof_pile_is_subsampled_as_in_the_paper(loaded: LoadedModel, hub: Callable[[str], Path]) -> None:
    whole = len(loaded.tokenizer(text(40_000))["input_ids"])
    assert whole > 33_000
    rows = [{"text": text(40_000, index) if index % 2 else text(50, index), "meta": {}} for index in range(6)]
    with gzip.open(hub("proof-pile"), "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    asked = Perplexity().prepare(PerplexityOptions(data="proof-pile", documents=2), [loaded.source])
    chosen, _ = choose_documents(loaded, asked, 64)
    assert [len(each.ids) for each in chosen] == [32768, 32768]
    assert (asked.documents, asked.min_tokens, asked.truncate, asked.seed) == (2, 32768, 32768, 0)
    assert Perplexity().prepare(PerplexityOptions(data="proof-pile"), [loaded.source]).documents == 128
    lines = {int(each.name.rpartition(":")[2]) for each in chosen}
    assert lines < {2, 4, 6}


def test_the_standard_library_is_the_default_of_the_built_in_model_alone(
    loaded: LoadedModel, small_model: Path
) -> None:
    """A model tuned on novels was measured on Python source, and looked four times worse than it was. Of the library
    twelve documents are enough, unless more are asked for.
    """
    tiny = resolve_model("builtin:tiny")
    for asked, number in ((PerplexityOptions(), 12), (PerplexityOptions(documents=20), 20)):
        options = Perplexity().prepare(asked, [tiny])
        assert (options.data, options.documents) == ("builtin:stdlib", number)
    with refused(DataError, "--data: ", small_model):
        Perplexity().run(loaded, PerplexityOptions(), Session())
    with refused(DataError, "--data: "):
        Perplexity().prepare(PerplexityOptions(), [tiny, loaded.source])


def test_a_run_is_measured_on_the_held_out_text_of_its_recipe(lora_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(lora_run, tmp_path / "run")
    with refused(DataError, "--data: "):
        Perplexity().prepare(PerplexityOptions(), [resolve_model(str(run))])
    recipe = load_recipe(
        run / RECIPE_FILE, ["evaluation.perplexity={data: novels, documents: 3, windows: [64], bos: document}"]
    ).recipe
    (run / RECIPE_FILE).write_text(dump_recipe(recipe))
    options = Perplexity().prepare(
        PerplexityOptions(stride=16), [resolve_model(str(run)), resolve_model("builtin:tiny")]
    )
    assert (options.data, options.documents, options.windows, options.stride) == ("novels", 3, (64,), 16)
    assert options.bos == "document"
    # A value that is given counts, also if it is the default.
    assert Perplexity().prepare(PerplexityOptions(bos="window"), [resolve_model(str(run))]).bos == "window"
    assert Perplexity().prepare(PerplexityOptions(data="mine"), [resolve_model(str(run))]).documents == 20


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of every forward pass; Ctrl-C comes in the third, once."""
    measured: list[int] = []
    really = perplexity.scored_losses

    def scored_losses(model: Any, document: Any, *others: Any, **options: Any) -> Any:
        measured.append(len(document))
        if len(measured) == 3:
            raise KeyboardInterrupt
        return really(model, document, *others, **options)

    monkeypatch.setattr(perplexity, "scored_losses", scored_losses)
    return measured


def test_an_interrupted_evaluation_resumes_from_its_journal(
    loaded: LoadedModel,
    folder: Path,
    interrupted: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("PI_LORA_CACHE", str(cache))

    def measure(stride: int = 32, journalled: bool = True) -> tuple[Any, int]:
        interrupted[3:] = []
        with Session(journalled=journalled) as session:
            asked = options(folder, 32, 64, stride=stride)
            return Perplexity().run(loaded, asked, session), len(interrupted) - 3

    with pytest.raises(Interrupted):
        measure()
    whole, passes = measure(journalled=False)
    _, others = measure(stride=16)
    assert others >= passes, "another stride is another measurement"
    assert measure() == (whole, passes - 2)
    assert not list((cache / "evaluations").iterdir())


@pytest.mark.parametrize(("changed", "kept"), [("model.safetensors", 0), ("README.md", 2)])
def test_changed_weights_invalidate_the_journal_and_a_changed_card_does_not(
    loaded: LoadedModel, folder: Path, interrupted: list[int], changed: str, kept: int
) -> None:
    def measure() -> int:
        interrupted[3:] = []
        with Session(journalled=True) as session:
            Perplexity().run(loaded, options(folder), session)
        return len(interrupted) - 3

    with pytest.raises(Interrupted):
        measure()
    file = Path(loaded.name) / changed
    file.touch()
    os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns + 1))
    resumed = measure()
    if changed == "README.md":
        file.unlink()  # other tests share the model
    assert resumed == measure() - kept


def test_several_models_are_printed_side_by_side(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    small_model: Path,
    lora_run: Path,
) -> None:
    monkeypatch.chdir(folder)
    options = ["--data", ".", "--truncate", "150", "--stride", "32", "--json", "both.json"]
    models = [str(small_model), str(lora_run)]
    monkeypatch.setattr(terminal, "width", 300)
    status, out, err = run_captured(capsys, monkeypatch, "eval", "perplexity", *models, *options)
    assert status == 0
    both = json.loads(Path("both.json").read_text())
    assert [(each["model"], each["scale"]) for each in both] == [(models[0], 1.0), (models[1], 2.0)]
    # Without --windows, all are measured up to the longest that one of them reads.
    assert [[row["window"] for row in each["windows"]] for each in both] == [[64, 128], [64, 128]]
    assert err == ""
    for each in both:
        assert f"{each['windows'][0]['perplexity']:,.3f}" in out
        assert len(each["by_position"]["bins"]) == 32
        assert f"{each['by_position']['bins'][-1]['loss']:.3f}" not in out


def test_an_eos_added_by_the_tokenizer_is_not_scored(loaded: LoadedModel, folder: Path) -> None:
    expected, _ = choose_documents(loaded, options(folder), 64)
    ends = [("<s>", 0), ("</s>", 1)]
    loaded.tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A </s>", special_tokens=ends)
    chosen, _ = choose_documents(loaded, options(folder), 64)
    assert [each.ids for each in chosen] == [each.ids for each in expected]
    assert loaded.tokenizer("a")["input_ids"][-1] == loaded.tokenizer.eos_token_id
