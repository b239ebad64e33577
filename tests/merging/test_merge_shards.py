"""How the merged files are divided and written, and in how much memory."""

import json
import stat
from pathlib import Path

import pytest
import torch
from random_runs import save_base, save_run
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_merge_peft import ATTENTION, llama

from pi_lora.merging.merging import merge
from pi_lora.merging.tensors import StoredTensor

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter on the attention of a bfloat16 base in three files."""
    folder = tmp_path_factory.mktemp("sharded")
    base = save_base(llama(), folder / "base", torch.bfloat16, max_shard_size="80KB")
    return save_run(base, folder / "run", r=4, target_modules=ATTENTION)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def files(folder: Path) -> dict[str, set[str]]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found[path.name] = set(file.keys())
    return found


def test_the_bases_division_is_kept(run: Path, tmp_path: Path) -> None:
    base = run.parent / "base"
    merged = merge(run, tmp_path / "merged", check="none").folder
    assert files(merged) == files(base)
    assert len(files(merged)) == 3
    index = json.loads((merged / INDEX).read_text())
    before, after = weights(base), weights(merged)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.rsplit(".", 2)[-2] in ATTENTION}
    assert index["weight_map"] == json.loads((base / INDEX).read_text())["weight_map"]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in after.values())
    assert {stat.S_IMODE(path.stat().st_mode) for path in merged.iterdir()} == {0o644}


def test_old_frequencies_are_left_out_and_integers_kept(run: Path, tmp_path: Path) -> None:
    """The first LLaMA's files have the frequencies of the unscaled rope beside the weights."""
    tensors = weights(run.parent / "base")
    path = tmp_path / "base"
    path.mkdir()
    (path / "config.json").write_bytes((run.parent / "base" / "config.json").read_bytes())
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "steps": torch.tensor(7)}
    save_file({**tensors, **extra}, path / "model.safetensors")
    merged = weights(merge(run, tmp_path / "merged", base=str(path), check="none").folder)
    assert merged.keys() - tensors.keys() == {"steps"}
    assert merged["steps"] == 7


def test_no_more_than_a_block_is_read_at_once(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    rows = StoredTensor.rows

    def noted(tensor: StoredTensor, start: int, stop: int) -> torch.Tensor:
        block = rows(tensor, start, stop)
        read.append((tensor.name, block.numel()))
        return block

    monkeypatch.setattr("pi_lora.merging.tensors.BLOCK", 200)
    monkeypatch.setattr(StoredTensor, "rows", noted)
    merge(run, tmp_path / "merged", check="none")
    assert max(numbers for name, numbers in read if "lora_" not in name) <= 200
    assert len(read) > 400
