"""Each command reads the config, the tokenizer and the weights of each model once, and builds no more than it needs."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from conftest import run_command, small_recipe
from pi_lora.recipe.files import dump_recipe
from random_runs import save_run

READERS = {"config": AutoConfig, "tokenizer": AutoTokenizer, "weights": AutoModelForCausalLM}


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count what is read from which folder, and what is built on the meta device; what a reader does on its own behalf
    counts once.
    """
    found: Counter[str] = Counter()
    inside: list[str] = []

    def counting(kind: str, read: Any) -> Any:
        def reader(source: Any, *arguments: Any, **options: Any) -> Any:
            if not inside:
                found[f"{kind} {Path(source).name}" if isinstance(source, str | Path) else kind] += 1
            inside.append(kind)
            try:
                return read(source, *arguments, **options)
            finally:
                inside.pop()

        return reader

    with monkeypatch.context() as patch:
        for kind, reader in READERS.items():
            patch.setattr(reader, "from_pretrained", counting(kind, reader.from_pretrained))
        patch.setattr(AutoModelForCausalLM, "from_config", counting("meta", AutoModelForCausalLM.from_config))
        yield found


@pytest.mark.parametrize(
    ("command", "reads"),
    [
        # The meta models are the plain and the extended one, whose frequencies are compared.
        ("train {recipe} --output {out}", ["config model", "meta", "meta", "tokenizer model", "weights model"]),
        ("train {recipe} --output {out} --dry-run", ["config model", "meta", "meta", "tokenizer model"]),
        ("plan {recipe} --gpu cpu", ["config model", "meta", "meta"]),
        # The tokenizer of a run is its own; the base of a run is read for it, beside the base that is measured.
        # The meta models give the operations of a pass.
        (
            "eval passkey {model} {run} --target 320 --depths 1 --trials 1",
            [*["config model", "meta", "weights model"] * 2, "tokenizer model", "tokenizer run"],
        ),
        # Tensors are merged as files. The second model is built by `from_pretrained` from the config that was written.
        ("merge {run} --output {out}", ["config model", "meta", "tokenizer run"]),
    ],
    ids=["train", "dry run", "plan", "eval", "merge"],
)
def test_commands_read_every_file_of_a_model_once(
    command: str, reads: list[str], small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = save_run(small_model, tmp_path / "run", r=2, target_modules=["q_proj"])
    # A folder of which nothing is known yet.
    model = Path(shutil.copytree(small_model, tmp_path / "model"))
    settings = json.loads((run / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(model)
    (run / "adapter_config.json").write_text(json.dumps(settings))
    recipe = tmp_path / "small.yaml"
    recipe.write_text(dump_recipe(small_recipe(model)))
    with counted(monkeypatch) as found:
        words = command.format(recipe=recipe, model=model, run=run, out=tmp_path / "out").split()
        assert run_command(*words) == 0
    assert sorted(found.elements()) == sorted(reads)
