"""An adapter on a sibling of the base that it was tuned on."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from random_runs import save_base, save_run
from safetensors.torch import load_file, save_file
from test_merge_peft import ALL, NORMS, TIED, UNTIED

from pi_lora.errors import ModelError
from pi_lora.merging.merging import merge

CASES = {
    "lora": (UNTIED, {"target_modules": ALL}),
    "trained in full": (UNTIED, {"target_modules": ALL, "modules_to_save": ["embed_tokens", *NORMS]}),
    "tied": (TIED, {"target_modules": ALL, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}


@pytest.mark.parametrize("case", CASES)
def test_the_difference_is_added_to_the_sibling(case: str, tmp_path: Path) -> None:
    config, settings = CASES[case]
    base = save_base(config, tmp_path / "base")
    run = save_run(base, tmp_path / "run", r=4, **settings)
    sibling = Path(shutil.copytree(base, tmp_path / "sibling"))
    tensors = load_file(sibling / "model.safetensors")
    save_file({name: t * 1.1 + 0.01 for name, t in tensors.items()}, sibling / "model.safetensors", {"format": "pt"})
    for name, entry in (("config.json", {"eos_token_id": 7}), ("tokenizer_config.json", {"chat_template": "{{ 1 }}"})):
        (sibling / name).write_text(json.dumps({**json.loads((sibling / name).read_text()), **entry}))
    own = weights(merge(run, tmp_path / "own").folder)
    merged = merge(run, tmp_path / "merged", base=str(sibling), sibling=True)
    before, after = weights(base), weights(sibling)
    assert own.keys() == weights(merged.folder).keys()
    for name, tensor in weights(merged.folder).items():
        expected = after[name] + own[name] - before[name]
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: name + text)
    config_file = json.loads((merged.folder / "config.json").read_text())
    assert (config_file["eos_token_id"], config_file["rope_parameters"]["factor"]) == (7, 2.0)
    settings_file = json.loads((merged.folder / "tokenizer_config.json").read_text())
    assert settings_file["model_max_length"] == 128
    said = f"tuned on {base}, and added to {sibling}"
    assert merged.lines()[0] == f"sibling: {said}"
    assert merged.lines()[1].startswith("checked: ")
    assert f"| sibling | {said} |" in (merged.folder / "README.md").read_text()


def test_it_has_to_be_asked_for(lora_run: Path, small_model: Path, tmp_path: Path) -> None:
    sibling = Path(shutil.copytree(small_model, tmp_path / "sibling"))
    [file] = sibling.glob("*.safetensors")
    save_file({name: tensor * 1.1 for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(ModelError, match="has other weights than those that it was tuned on"):
        merge(lora_run, tmp_path / "merged", base=str(sibling))
    assert merge(lora_run, tmp_path / "merged", base=str(sibling), sibling=True).checks
    with pytest.raises(ModelError, match="--sibling: name the sibling of its base with --base"):
        merge(lora_run, tmp_path / "other", sibling=True)
