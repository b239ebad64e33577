"""Each command reads the config, the tokenizer and the weights of each model once."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import run_command, small_recipe
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pi_lora.recipe.files import dump_recipe

READERS = {"config": AutoConfig, "tokenizer": AutoTokenizer, "weights": AutoModelForCausalLM}


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count what is read from which folder; what a reader reads on its own behalf counts once."""
    found: Counter[str] = Counter()
    inside: list[str] = []

    def counting(kind: str, read: Any) -> Any:
        def reader(path: Any, *arguments: Any, **options: Any) -> Any:
            if not inside:
                found[f"{kind} {Path(path).name}"] += 1
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


@pytest.mark.parametrize(
    ("command", "reads"),
    [
        ("train {recipe} --output {out}", ["config model", "tokenizer model", "weights model"]),
        # The run's tokenizer is its own; its base is read for it, beside the base that is measured itself.
        (
            "eval passkey builtin:tiny {run} --target 320 --depths 1 --trials 1",
            ["config tiny", "tokenizer tiny", "weights tiny", "config model", "tokenizer lora", "weights model"],
        ),
        # Tensors are merged and checked as files; no model is built.
        ("merge {run} --output {out}", ["config model", "tokenizer lora"]),
    ],
    ids=["train", "eval", "merge"],
)
def test_reads(
    command: str, reads: list[str], small_model: Path, lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "small.yaml"
    recipe.write_text(dump_recipe(small_recipe(small_model)))
    with counted(monkeypatch) as found:
        assert run_command(*command.format(recipe=recipe, run=lora_run, out=tmp_path / "out").split()) == 0
    assert sorted(found.elements()) == sorted(reads)
