"""Each command reads the config, the tokenizer and the weights of each model once."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import BUILTIN, run_command
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pi_lora.recipe.files import dump_recipe
from pi_lora.recipe.schema import Recipe

READERS = {"config": AutoConfig, "tokenizer": AutoTokenizer, "weights": AutoModelForCausalLM}


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[tuple[str, str]]]:
    """Count what is read from which folder; what a reader reads on its own behalf counts once."""
    found: Counter[tuple[str, str]] = Counter()
    inside: list[str] = []

    def counting(kind: str, read: Any) -> Any:
        def reader(path: Any, *arguments: Any, **options: Any) -> Any:
            if not inside:
                found[kind, Path(path).name] += 1
            inside.append(kind)
            try:
                return read(path, *arguments, **options)
            finally:
                inside.pop()

        return reader

    with monkeypatch.context() as patch:
        for kind, reader in READERS.items():
            patch.setattr(reader, "from_pretrained", counting(kind, reader.from_pretrained))
        yield found


def run(*words: str) -> None:
    assert run_command(*words) == 0


@pytest.fixture(scope="module")
def recipe(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sections = {
        "model": {"name": str(small_model)},
        "context": {"target": 128},
        "tuning": {"rank": 2},
        "data": {"source": "builtin:stdlib"},
        "training": {"steps": 1, "global_batch_size": 1},
    }
    file = tmp_path_factory.mktemp("recipe") / "small.yaml"
    file.write_text(dump_recipe(Recipe.model_validate(sections)))
    return file


def test_train(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with counted(monkeypatch) as reads:
        run("train", str(recipe), "--output", str(tmp_path / "run"))
    assert reads == {("config", "model"): 1, ("tokenizer", "model"): 1, ("weights", "model"): 1}


@pytest.mark.parametrize(
    "command",
    [
        ["perplexity", "--windows", "64", "--documents", "1", "--truncate", "64"],
        ["passkey", "--target", "320", "--depths", "1", "--trials", "1"],
    ],
    ids=["perplexity", "passkey"],
)
def test_eval_of_a_base_and_a_run(
    command: list[str], small_model: Path, lora_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's tokenizer is its own; its base is read for it, beside the base that is measured itself."""
    with counted(monkeypatch) as reads:
        run("eval", command[0], BUILTIN, str(lora_run), *command[1:])
    assert reads == {
        **{(kind, "tiny"): 1 for kind in READERS},
        ("config", "model"): 1,
        ("weights", "model"): 1,
        ("tokenizer", "lora"): 1,
    }


def test_merge(lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are merged and checked as files; no model is built."""
    with counted(monkeypatch) as reads:
        run("merge", str(lora_run), "--output", str(tmp_path / "merged"))
    assert reads == {("config", "model"): 1, ("tokenizer", "lora"): 1}
