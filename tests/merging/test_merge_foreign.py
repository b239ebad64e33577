"""Adapters that other tools made: a PEFT folder with little more than the adapter."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from random_runs import save_run, tuned
from transformers import AutoModelForCausalLM

from pi_lora.cli import main
from pi_lora.errors import ModelError
from pi_lora.merging.merging import merge
from pi_lora.models.model import Extension


@pytest.fixture
def run(small_model: Path, tmp_path: Path) -> Path:
    return save_run(small_model, tmp_path / "adapter", r=4, target_modules=["q_proj", "v_proj"])


@pytest.fixture
def adapter(run: Path) -> Path:
    """As TRL, axolotl and Unsloth may leave it: without config and tokenizer, and with no name of its base."""
    settings = run / "adapter_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "base_model_name_or_path": None}))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (run / name).unlink()
    return run


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.arange(2, 100)[None]).logits
    return found


def test_its_base_and_its_scaling_are_stated(
    small_model: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = logits(tuned(small_model, run))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "adapter_config.json"):
        kept = json.loads((run / name).read_text())
        (run / name).unlink()
    (run / "adapter_config.json").write_text(json.dumps({**kept, "base_model_name_or_path": None}))
    merged = tmp_path / "merged"
    options = ["--base", str(small_model), "--target", "128", "--original", "64", "--output", str(merged)]
    monkeypatch.setattr("sys.argv", ["pi-lora", "merge", str(run), *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    said = capsys.readouterr().out
    assert f"assumed: {run} was tuned under pi to 128 tokens, as stated\n" in said
    assert "checked: 4 tensors are base + adapter" in said
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(merged)), expected, atol=1e-4)
    assert "positions are divided by 2" in (merged / "README.md").read_text()


def test_without_a_word_the_scaling_is_the_base_s(small_model: Path, adapter: Path, tmp_path: Path) -> None:
    merged = merge(adapter, tmp_path / "merged", base=str(small_model))
    line, check = merged.lines()
    assert line.startswith(
        f"assumed: {adapter} was tuned under the scaling of {small_model} to 64 tokens, as it has no config"
    )
    assert line.endswith("state it with --target and --original")
    assert check.startswith("checked: ")
    assert json.loads((merged.folder / "config.json").read_text())["rope_parameters"]["rope_type"] == "default"
    assert f"| assumed | {line.removeprefix('assumed: ')} |" in (merged.folder / "README.md").read_text()


def test_a_base_that_nobody_names_is_asked_for(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"base_model_name_or_path: is missing; .* merge .*adapter --base MODEL$"):
        merge(adapter, tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_the_scaling_of_a_run_is_not_stated_again(small_model: Path, lora_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="brings its own scaling; leave out --original, --target and --scaling"):
        merge(lora_run, tmp_path / "merged", extension=Extension(128))


def test_a_base_of_quantized_weights_is_refused(small_model: Path, adapter: Path, tmp_path: Path) -> None:
    """As adapters by Unsloth name theirs (-bnb-4bit)."""
    base = Path(shutil.copytree(small_model, tmp_path / "base-bnb-4bit"))
    config = json.loads((base / "config.json").read_text())
    nf4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (base / "config.json").write_text(json.dumps({**config, "quantization_config": nf4}))
    with pytest.raises(ModelError, match=r"base-bnb-4bit: has quantized weights; name the model that it was made from"):
        merge(adapter, tmp_path / "merged", base=str(base))
    assert not (tmp_path / "merged").exists()
