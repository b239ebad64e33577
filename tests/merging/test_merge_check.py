"""The check lets through what merging may change, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import save_base, save_run
from safetensors.torch import load_file, save_file
from test_merge_peft import ALL, MIXTRAL, NEOX, NORMS, TIED, UNTIED, llama

from pi_lora.errors import ModelError
from pi_lora.merging.check import agreement, move_as_rounding_does
from pi_lora.merging.facts import Agreement, Check, read_merge
from pi_lora.merging.merging import merge
from pi_lora.models.device import dtype_named
from pi_lora.models.stored import AdapterSettings

SETTINGS = {
    "untied": (UNTIED, {"target_modules": ALL, "modules_to_save": ["embed_tokens", *NORMS]}),
    "tied": (TIED, {"target_modules": ALL, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "dora": (UNTIED, {"target_modules": ALL, "use_dora": True}),
    "gpt-neox": (NEOX, {"target_modules": ALL}),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checked")
    base = save_base(llama(num_hidden_layers=6), folder / "base", torch.bfloat16, max_shard_size="80KB")
    return save_run(base, folder / "run", r=4, target_modules=ALL)


def check_of(folder: Path) -> Check:
    check = read_merge(folder).check
    assert check
    return check


def test_it_is_printed_and_kept(run: Path, tmp_path: Path) -> None:
    merged = merge(run, tmp_path / "merged")
    check = check_of(merged)
    assert (check.rounding, check.how, check.skipped) == ("bfloat16", "whole", None)
    assert [each.length for each in check.agreements] == [8, 32, 128]
    assert all(0 < each.relative < each.tuning / 5 for each in check.agreements)
    assert all(each.same_first > 0.9 and each.scored == each.length for each in check.agreements)
    lines = read_merge(merged).lines()
    assert len(lines) == 3
    card = (merged / "README.md").read_text()
    assert all(f"- {line}\n" in card for line in lines)


def test_in_float32_nothing_is_lost(run: Path, tmp_path: Path) -> None:
    check = check_of(merge(run, tmp_path / "merged", dtype="float32"))
    assert all(each.largest < 1e-5 and each.same_first == 1 for each in check.agreements)


def test_without_it(run: Path, tmp_path: Path) -> None:
    merged = merge(run, tmp_path / "merged", verify=False)
    assert read_merge(merged).lines() == ["not checked"]
    assert "Not compared." in (merged / "README.md").read_text()


@pytest.mark.parametrize("case", SETTINGS)
def test_layer_by_layer_says_the_same(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, settings = SETTINGS[case]
    run = save_run(save_base(config, tmp_path / "base", torch.bfloat16), tmp_path / "run", r=4, **settings)
    whole = check_of(merge(run, tmp_path / "whole"))
    monkeypatch.setattr("pi_lora.merging.check.free_memory", lambda place: 0)
    layered = check_of(merge(run, tmp_path / "layered"))
    assert (whole.how, layered.how) == ("whole", "layer by layer")
    for mine, theirs in zip(layered.agreements, whole.agreements, strict=True):
        assert mine.relative == pytest.approx(theirs.relative, rel=1e-3)
        assert mine.tuning == pytest.approx(theirs.tuning, rel=1e-3)
        assert mine.rounding == pytest.approx(theirs.rounding, rel=1e-3)


def test_what_cannot_be_read_layer_by_layer_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = save_run(save_base(MIXTRAL, tmp_path / "base"), tmp_path / "run", r=4, target_modules=["q_proj"])
    monkeypatch.setattr("pi_lora.merging.check.free_memory", lambda place: 0)
    lines = read_merge(merge(run, tmp_path / "merged")).lines()
    assert lines == ["not checked: it does not fit in memory, and its layers cannot be read one by one"]


@pytest.mark.parametrize("free", [0, 10**12], ids=["layer by layer", "whole"])
@pytest.mark.parametrize("damage", ["a weight", "the scaling", "the adapter", "the adapter of a layer", "its alpha"])
def test_a_merge_gone_wrong_is_not_kept(
    damage: str, free: int, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pi_lora.merging import check

    verify = check.verify_merge

    def damage_first(*arguments: Any) -> Check:
        folder = arguments[1]
        path = next(path for path in sorted(folder.glob("*.safetensors")) if "layers.1.mlp" in str(load_file(path)))
        tensors = load_file(path)
        if damage == "the scaling":
            config = json.loads((folder / "config.json").read_text())
            for key in ("rope_parameters", "rope_scaling"):
                del config[key]
            (folder / "config.json").write_text(json.dumps(config))
        elif damage == "a weight":
            name = "model.layers.1.mlp.up_proj.weight"
            save_file({**tensors, name: tensors[name].roll(1, 0)}, path, metadata={"format": "pt"})
        elif damage == "the adapter of a layer":
            for path in folder.glob("*.safetensors"):
                stored = load_file(run.parent / "base" / path.name)
                layer = {name: tensor for name, tensor in stored.items() if ".layers.1." in name}
                save_file(load_file(path) | layer, path, metadata={"format": "pt"})
        elif damage == "the adapter":
            for original in (run.parent / "base").glob("*.safetensors"):
                (folder / original.name).write_bytes(original.read_bytes())

        return verify(*arguments)

    monkeypatch.setattr(check, "verify_merge", damage_first)
    if damage == "its alpha":
        monkeypatch.setattr(AdapterSettings, "scaling", lambda *_: 1.9)  # instead of 8 / 4
    monkeypatch.setattr("pi_lora.merging.check.free_memory", lambda place: free)
    with pytest.raises(ModelError, match="failed the check and are not kept: ") as raised:
        merge(run, tmp_path / "merged")
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("stored", "dtype"), [("bfloat16", "bfloat16"), ("float32", "float16")])
@pytest.mark.parametrize("case", SETTINGS)
def test_a_sound_merge_differs_as_far_as_random_rounding_does(
    case: str, stored: str, dtype: str, tmp_path: Path
) -> None:
    """So it cannot fail by chance: the limit is three times as far."""
    config, settings = SETTINGS[case]
    base = save_base(config, tmp_path / "base", dtype_named(stored))
    check = check_of(merge(save_run(base, tmp_path / "run", r=4, **settings), tmp_path / "merged", dtype=dtype))
    for each in check.agreements:
        assert 0.4 < each.relative / each.rounding < 1.6
        assert each.tolerance == pytest.approx(3 * each.rounding)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_random_rounding(dtype: torch.dtype) -> None:
    """It errs like rounding, on numbers that it would leave as they are, the smallest and the largest included."""
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    rounded = values.to(dtype).float()
    moved = rounded.clone()
    move_as_rounding_does(moved, dtype)
    ratio = (moved - rounded).square().mean().sqrt() / (rounded - values).square().mean().sqrt()
    assert 0.9 < ratio < 1.3
    ends = torch.tensor([0.0, 1.0, -1.0]) * torch.finfo(dtype).max
    move_as_rounding_does(ends, dtype)
    assert ends[0] == 0
    assert ends.isfinite().all()


def test_tuning_that_rounding_would_undo_is_refused(tmp_path: Path) -> None:
    base = save_base(llama(), tmp_path / "base", torch.bfloat16)
    run = save_run(base, tmp_path / "run", r=4, target_modules=ALL)
    path = run / "adapter_model.safetensors"
    save_file({name: tensor * 0.02 for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"most of it would be lost; choose --dtype float32"):
        merge(run, tmp_path / "merged")
    assert check_of(merge(run, tmp_path / "merged", dtype="float32")).problem() is None


def test_an_adapter_that_does_nothing_passes(tmp_path: Path) -> None:
    base = save_base(llama(), tmp_path / "base", torch.bfloat16)
    run = save_run(base, tmp_path / "run", r=4, target_modules=ALL)
    path = run / "adapter_model.safetensors"
    save_file({name: tensor * 0 for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    assert all(each.relative == each.tuning == 0 for each in check_of(merge(run, tmp_path / "merged")).agreements)


def test_agreement() -> None:
    tuned = torch.tensor([[1.0, -1.0, 0.0], [2.0, 0.0, -2.0]])
    same = agreement(2, tuned, tuned, tuned, tuned)
    assert (same.largest, same.relative, same.same_first, same.tuning, same.rounding) == (0, 0, 1, 0, 0)
    merged = tuned + torch.tensor([0.0, 0.0, 1.5])
    other = agreement(2, merged, tuned, -tuned, merged - 0.5 * tuned)
    assert other.largest == 1.5
    assert other.same_first == 0.5
    assert other.relative == pytest.approx((1.5**2 * 2 / 10) ** 0.5)
    assert other.tuning == pytest.approx(2)
    assert other.rounding == pytest.approx(0.5)


@pytest.mark.parametrize("relative", [2e-4, float("nan")])
def test_what_is_no_rounding_fails(relative: float) -> None:
    facts = {"length": 8, "scored": 8, "largest": 0.1, "same_first": 1.0, "tuning": 1.0, "rounding": 1e-6}
    different = Agreement.model_validate({**facts, "relative": relative})
    check = Check(rounding="float32", how="whole", agreements=(different,))
    assert "which rounding to float32 does not explain" in str(check.problem())
