"""Each command reads the config, the tokenizer and the weights of each model once."""

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from conftest import run_command, small_recipe
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
def test_commands_read_every_file_of_a_model_once(
    command: str, reads: list[str], small_model: Path, lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "small.yaml"
    recipe.write_text(dump_recipe(small_recipe(small_model)))
    with counted(monkeypatch) as found:
        assert run_command(*command.format(recipe=recipe, run=lora_run, out=tmp_path / "out").split()) == 0
    assert sorted(found.elements()) == sorted(reads)


# Runs a command in a process in which nothing was read before, and prints what was read and built how often.
COUNTED = """
import json, sys
import json
import subprocess
from collections import Counter
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from pi_lora import cli
from pi_lora.scaling import verify

counts, inside = Counter(), []

def counting(kind, call):
    def counted(*arguments, **options):
        if not inside:
            counts[kind] += 1
        inside.append(kind)
        try:
            return call(*arguments, **options)
        finally:
            inside.pop()
    return counted

for kind, reader in {"config": AutoConfig, "tokenizer": AutoTokenizer, "weights": AutoModelForCausalLM}.items():
    reader.from_pretrained = counting(kind, reader.from_pretrained)
AutoModelForCausalLM.from_config = counting("meta model", AutoModelForCausalLM.from_config)
sys.argv = ["pi-lora", *sys.argv[1:]]
try:
    cli.main()
except SystemExit as ended:
    assert not ended.code, ended.code
with open("counts.json", "w") as file:
    json.dump(counts, file)
"""


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        # The meta models are the plain and the extended one, whose frequencies are compared.
        ("train recipe.yaml --output run", {"config": 1, "tokenizer": 1, "weights": 1, "meta model": 2}),
        ("train recipe.yaml --dry-run", {"config": 1, "tokenizer": 1, "meta model": 2}),
        ("plan recipe.yaml --gpu cpu", {"config": 1, "meta model": 2}),
        ("eval passkey {model} --target 320 --depths 1 --trials 1", {"config": 1, "tokenizer": 1, "weights": 1}),
        ("eval passkey {run} --depths 1 --trials 1", {"config": 1, "tokenizer": 1, "weights": 1}),
        # The second model is built by `from_pretrained` from the config that was written, to check it.
        ("merge {run} --output merged", {"config": 1, "tokenizer": 1, "meta model": 1}),
    ],
)
def test_a_fresh_process_reads_and_builds_everything_once(
    python: str, command: str, expected: dict[str, int], small_model: Path, lora_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").write_text(dump_recipe(small_recipe(small_model)))
    words = command.format(model=small_model, run=lora_run).split()
    subprocess.run([python, "-c", COUNTED, *words], cwd=tmp_path, check=True, capture_output=True)
    assert json.loads((tmp_path / "counts.json").read_text()) == expected
