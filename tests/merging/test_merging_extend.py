"""A base that is extended without tuning: what the folder holds, and what transformers makes of it."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import extend, refused, run_captured
from pi_lora.api import load
from pi_lora.errors import ModelError
from pi_lora.evaluation.probe import probe
from pi_lora.model_ref import ModelRef
from pi_lora.models.resolve import resolve_model
from pi_lora.recipe.evaluation import ProbeOptions
from pi_lora.scaling.extension import Extension
from random_runs import save_run

IDS = torch.randint(2, 1024, (2, 256), generator=torch.Generator().manual_seed(5))
YARN = Extension(256, scaling="yarn")


@torch.no_grad()
def test_an_extended_folder_is_the_base_with_the_scaling(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, small_model: Path, tmp_path: Path
) -> None:
    folder, words = tmp_path / "extended", ["--target", "256", "--scaling", "yarn"]
    (small_model / "model.safetensors").chmod(0o600)
    status, out, _ = run_captured(capsys, monkeypatch, "extend", str(small_model), *words, "--output", str(folder))
    assert status == 0
    assert f"vllm serve {folder} --max-model-len 256" in out
    expected = load(ModelRef(str(small_model), extension=YARN)).module(IDS).logits
    for model in (load(str(folder)).module, AutoModelForCausalLM.from_pretrained(folder)):
        torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-6, atol=1e-6)
    assert (expected - load(str(small_model)).module(IDS).logits).abs().max() > 0.01
    own, linked = ((place / "model.safetensors").stat() for place in (small_model, folder))
    assert own.st_ino == linked.st_ino
    assert own.st_mode & 0o777 == 0o600
    assert AutoTokenizer.from_pretrained(folder).model_max_length == 256
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_scaling"]["rope_type"] == config["rope_parameters"]["rope_type"] == "yarn"
    card = (folder / "README.md").read_text()
    assert "vllm serve . --max-model-len 256" in card
    assert "adapter" not in card


def test_the_card_of_an_extended_model_has_the_scores_of_the_probe(small_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The door is open and the road is long. " * 60)
    options = ProbeOptions(target=(256,), data=str(text), documents=1, trials=1, scalings=("yarn",))
    found = probe(resolve_model(ModelRef(small_model, dtype="float32")), options)
    extend(resolve_model(ModelRef(str(small_model), extension=YARN)), tmp_path / "extended", found)
    before, after = (found.at(256).scalings[name] for name in ("direct", "yarn"))
    card = (tmp_path / "extended" / "README.md").read_text()
    assert f"| {before.windows[1].text} | {after.windows[1].text} |" in card
    assert "model-index" in card
    assert ".partial" not in card
    kept = json.loads((tmp_path / "extended" / "scores" / "perplexity-step-0.json").read_text())
    assert kept["windows"][1]["perplexity"] == after.windows[1].value
    with refused(ModelError, "probe: ", "direct", "yarn", "theta"):
        extend(
            resolve_model(ModelRef(str(small_model), extension=Extension(256, scaling="theta"))),
            tmp_path / "other",
            found,
        )
    assert not (tmp_path / "other").exists()


def test_weights_are_copied_file_by_file_to_another_disk(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, folder = tmp_path / "base", tmp_path / "extended"
    AutoModelForCausalLM.from_pretrained(small_model).save_pretrained(base, max_shard_size="20KB")
    shards = {file.name for file in base.glob("model*")}
    assert len(shards) > 2

    def no_link(*_: object) -> None:
        raise OSError("another disk")

    monkeypatch.setattr(os, "link", no_link)
    extend(resolve_model(ModelRef(str(base), extension=YARN)), folder)
    assert {file.name for file in folder.glob("model*")} == shards
    assert all((folder / name).read_bytes() == (base / name).read_bytes() for name in shards)
    (base / sorted(shards)[0]).unlink()
    with refused(ModelError, f"{base}: ", sorted(shards)[0]):
        extend(resolve_model(ModelRef(str(base), extension=YARN)), tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_chat_model_stops_where_its_template_ends_a_turn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, small_model: Path, tmp_path: Path
) -> None:
    """Extended or merged, with a generation config that names EOS alone, or with none."""
    base = Path(shutil.copytree(small_model, tmp_path / "base"))
    (base / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}<s>{% endfor %}")
    run = save_run(base, tmp_path / "run")
    shutil.copy(base / "chat_template.jinja", run)
    commands = {
        "extended": ["extend", str(base), "--target", "128", "--scaling", "yarn"],
        "merged": ["merge", str(run)],
    }
    for given in ({"max_new_tokens": 9, "eos_token_id": 1}, {}):
        (base / "generation_config.json").write_text(json.dumps(given))
        if not given:
            (base / "generation_config.json").unlink()
        for name, words in commands.items():
            folder = tmp_path / f"{name}{len(given)}"
            status, _, err = run_captured(capsys, monkeypatch, *words, "--output", str(folder))
            assert status == 0
            assert [line.count("<s>") for line in err.splitlines() if "eos_token_id" in line] == [1]
            assert json.loads((folder / "generation_config.json").read_text()) == {**given, "eos_token_id": [1, 0]}
