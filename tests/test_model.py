import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pi_lora.errors import ModelError, ScalingError
from pi_lora.model import extended_config, find_base, load_model, read_config, save_config
from pi_lora.rope import Interpolation
from pi_lora.run import Stretch, load

IDS = torch.randint(2, 1024, (1, 128), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def test_step_0_equals_hand_scaled_positions(small_model: Path) -> None:
    """paper.tex, Eqn. 7: the interpolated model at position m is the plain one at position m L / L'."""
    plain = load(str(small_model)).model
    interpolated = load(str(small_model), Stretch(target=256)).model
    by_hand = plain(IDS, position_ids=torch.arange(128)[None] / 4).logits
    torch.testing.assert_close(interpolated(IDS).logits, by_hand, rtol=1e-5, atol=1e-5)
    assert (interpolated(IDS).logits - plain(IDS).logits).abs().max() > 0.01


@torch.no_grad()
def test_direct_leaves_the_positions_alone(small_model: Path) -> None:
    direct = load(str(small_model), Stretch(target=256, method="direct"))
    assert direct.window == 256
    assert direct.scale == 1
    torch.testing.assert_close(direct.model(IDS).logits, load(str(small_model)).model(IDS).logits, rtol=0, atol=0)


def test_original_can_be_given(small_model: Path) -> None:
    stretched = load(str(small_model), Stretch(target=256, original=32))
    assert stretched.scale == 8
    assert stretched.tokenizer.model_max_length == stretched.window


@torch.no_grad()
def test_a_saved_config_gives_the_same_model_to_plain_transformers(small_model: Path, tmp_path: Path) -> None:
    base = find_base(str(small_model))
    config = extended_config(base, Interpolation("pi", 64, 256))
    folder = tmp_path / "extended"
    shutil.copytree(small_model, folder)
    save_config(config, folder)
    written = json.loads((folder / "config.json").read_text())
    assert written["rope_scaling"] == {"type": "linear", "rope_type": "linear", "factor": 4.0}
    assert "_name_or_path" not in written
    ours = load_model(base, config, torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(theirs(IDS).logits, ours(IDS).logits, rtol=0, atol=0)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    for name, message in {
        "builtin:huge": r"no such built-in model; there is builtin:tiny",
        "./nowhere": "no such folder",
        str(tmp_path / "nowhere"): "no such folder",
        str(tmp_path): "give a hub id, a model folder or builtin:tiny",
        "some-user/not-cached": "give a hub id, a model folder or builtin:tiny",
    }.items():
        with pytest.raises(ModelError, match=message):
            load(name)


def test_a_model_without_rotary_embeddings_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ScalingError, match="model of type gpt2: has no rotary"):
        find_base(str(tmp_path))


def test_a_truncated_weight_file_is_refused(small_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(small_model, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="its weights cannot be loaded"):
        load(str(folder))


def test_pickled_weights_are_refused(small_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(small_model, folder)
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="its weights cannot be loaded"):
        load(str(folder))


def test_a_config_that_is_missing_or_broken_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        read_config(tmp_path)
