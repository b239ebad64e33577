"""Text that training leaves out and perplexity measures: never both, and the same whatever the order."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from pi_lora.data.sources import evaluation_documents, find_corpus, held_out_text, share_to_hold_out
from pi_lora.recipe.evaluation import PerplexityOptions
from pi_lora.recipe.schema import Recipe, Source


def parts(source: Source, seed: int | None = None) -> tuple[list[str], list[str]]:
    """The texts that train, and those that are measured as `held_out_text` says."""
    options = PerplexityOptions.model_validate(held_out_text(source))
    assert options.data is not None
    measured = evaluation_documents(options.data, options.split, options.column, options.subset, options.hold_out)
    return [each.text for each in find_corpus(source).documents(seed)], [each.text for each in measured]


def shelf(folder: Path, kind: str) -> list[str]:
    texts = [f"text {number}\n" * 20 for number in range(40)]
    if kind == "files":
        for number, text in enumerate(texts):
            (folder / f"{number}.txt").write_text(text)
    elif kind == "two files":
        del texts[2:]
        for number, text in enumerate(texts):
            (folder / f"{number}.txt").write_text(text)
    else:
        (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


@pytest.mark.parametrize(("kind", "share"), [("files", 0.2), ("two files", 0.1), ("rows", 0.2)])
def test_documents_train_or_are_measured_in_every_order(tmp_path: Path, kind: str, share: float) -> None:
    texts = shelf(tmp_path, kind)
    trained, measured = parts(Source(name=str(tmp_path), hold_out=share))
    assert sorted(trained + measured) == sorted(texts)
    assert 1 <= len(measured) <= 2 * share * len(texts) + 1
    shuffled, again = parts(Source(name=str(tmp_path), hold_out=share), seed=3)
    assert (sorted(shuffled), again) == (sorted(trained), measured)
    assert shuffled != trained or kind == "two files"


def test_files_are_held_out_by_name_wherever_they_are(tmp_path: Path) -> None:
    held = []
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        shelf(tmp_path / place, "files")
        held.append(parts(Source(name=str(tmp_path / place), hold_out=0.1))[1])
    assert held[0] == held[1]


def test_of_one_text_the_end_is_held_out_from_a_line_on(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("".join(f"line {number}\n" for number in range(1000)))
    [trained], [measured] = parts(Source(name=str(book), hold_out=0.25))
    assert trained + measured == book.read_text()
    assert trained.endswith("\n")
    assert len(measured) / len(book.read_text()) == pytest.approx(0.25, abs=0.01)


def test_a_share_follows_the_text_and_the_window(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("x" * 1_000_000)
    assert [share_to_hold_out(Source(name=str(book)), target) for target in (1024, 8192, 131072)] == [0.02, 0.13, 0.2]
    assert share_to_hold_out(Source(name="owner/books"), 8192) == 0.01


@pytest.mark.parametrize(("trained", "measured"), [(0.1, None), (None, 0.1), (0.1, 0.2)])
def test_a_recipe_that_measures_what_it_trains_on_is_refused(trained: float | None, measured: float | None) -> None:
    def recipe(trained: float | None, measured: float | None) -> Recipe:
        keys = {"source": {"name": "books", "hold_out": trained}}
        evaluation = {"perplexity": {"data": "books", "hold_out": measured}}
        context = {"target": 1024}
        return Recipe.model_validate(
            {"model": {"name": "builtin:tiny"}, "context": context, "data": keys, "evaluation": evaluation}
        )

    with pytest.raises(ValidationError, match=r"evaluation.perplexity.hold_out: .* of the same text; make them equal"):
        recipe(trained, measured)
    recipe(measured, measured)
