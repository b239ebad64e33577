"""Damaged bases and adapters: one line names file and tensor, and nothing is left behind."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import refused
from pi_lora.api import merge
from pi_lora.errors import ModelError, PiLoraError
from pi_lora.model_ref import ModelRef
from random_runs import save_base, save_run
from small_configs import ALL, llama

SECOND = "model-00002-of-00003.safetensors"
ADAPTER = "adapter_model.safetensors"
Q = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    base = save_base(llama(), folder / "base", torch.bfloat16, max_shard_size="80KB")
    save_run(base, folder / "run", r=4, target_modules=ALL)
    return folder


@pytest.fixture
def broken(whole: Path, tmp_path: Path) -> Path:
    """A copy to break: `base` and `run`."""
    shutil.copytree(whole, tmp_path / "broken")
    return tmp_path / "broken"


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def flip_a_bit(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 64
    path.write_bytes(data)


def pickled(folder: Path, name: str, new: str) -> None:
    for path in folder.glob(name):
        path.rename(folder / new)


Change = Callable[[dict[str, torch.Tensor]], object]
Damage = Callable[[Path], object]


def shard(change: Change) -> Damage:
    return lambda at: edit(at / "base" / SECOND, change)


def adapter(change: Change) -> Damage:
    return lambda at: edit(at / "run" / ADAPTER, change)


def settings(**changes: object) -> Damage:
    return lambda at: edit_json(at / "run" / "adapter_config.json", **changes)


def saved_rows(tokens: list[int] | None = None) -> Damage:
    def damage(at: Path) -> None:
        adapter(lambda each: each.update({f"{PEFT}.{ROWS}": torch.zeros(2, 32)}))(at)
        settings(trainable_token_indices=tokens)(at)

    return damage


def rename_layers(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[name.replace("layers.", "layers.1")] = tensors.pop(name)


PEFT, ROWS = "base_model.model", "model.embed_tokens.token_adapter.trainable_tokens_delta"
OF_SHARD, OF_ADAPTER = f"base/{SECOND}", f"run/{ADAPTER}"
NO_ROWS = (OF_ADAPTER, ("model.embed_tokens.weight [2, 32]",))
NO_WEIGHTS = (OF_ADAPTER, ("no weights", "DeepSpeed"))
# What is done to a copy, the file or folder that the message begins with, and what it names.
DAMAGE: dict[str, tuple[Damage, str, tuple[str, ...]]] = {
    "truncated shard": (lambda at: os.truncate(at / OF_SHARD, (at / OF_SHARD).stat().st_size - 100), OF_SHARD, ()),
    "bit of the header": (lambda at: flip_a_bit(at / OF_SHARD, 9), OF_SHARD, ()),
    "bit that makes no number": (
        shard(lambda each: each[f"{Q}.weight"].view(-1)[3:4].fill_(torch.nan)),
        OF_SHARD,
        (f"{Q}.weight", "NaN", "damaged"),
    ),
    "missing shard": (lambda at: (at / OF_SHARD).unlink(), "base", (SECOND, "missing", "model.layers")),
    "tensor that its shard lacks": (
        shard(lambda each: each.pop(f"{Q}.weight")),
        "base",
        (SECOND, f"{Q}.weight", "index"),
    ),
    "pickled base": (
        lambda at: pickled(at / "base", "*.index.json", "pytorch_model.bin.index.json"),
        "base",
        ("model.safetensors", "pickle"),
    ),
    "base of another shape": (
        shard(lambda each: each.update({f"{Q}.weight": torch.zeros(8, 32)})),
        OF_ADAPTER,
        (f"{Q}.weight [32, 32]", "base"),
    ),
    "pickled adapter": (lambda at: (at / OF_ADAPTER).rename(at / "run" / "adapter_model.bin"), OF_ADAPTER, ()),
    "half an adapter": (
        adapter(lambda each: each.pop(f"{PEFT}.{Q}.lora_A.weight")),
        OF_ADAPTER,
        (f"{Q}.lora_A",),
    ),
    "adapter of other layers": (
        adapter(rename_layers),
        OF_ADAPTER,
        ("layers.10.self_attn.q_proj.weight [32, 32]", "layers.11."),
    ),
    "adapter of infinities": (
        adapter(lambda each: each[f"{PEFT}.{Q}.lora_B.weight"].fill_(torch.inf)),
        OF_SHARD,
        (f"{Q}.weight", "NaN", "damaged"),
    ),
    "adapter of another kind": (settings(peft_type="LOHA"), "run/adapter_config.json", ("peft_type LOHA", "LoRA")),
    "adapter of replicated layers": (settings(layer_replication=[[0, 1], [0, 1]]), "run", ("layer_replication",)),
    "adapter without weights": (adapter(dict.clear), *NO_WEIGHTS),
    "adapter of empty weights": (
        adapter(lambda each: each.update({name: each[name][:0] for name in each})),
        *NO_WEIGHTS,
    ),
    "adapter with another update than B A": (
        settings(arrow_config={"top_k": 1}, init_lora_weights="pissa"),
        "run",
        ("arrow_config", "init_lora_weights pissa"),
    ),
    "DoRA without lengths": (settings(use_dora=True), OF_ADAPTER, ("_proj.lora_magnitude_vector",)),
    "rows of no known tokens": (saved_rows(), *NO_ROWS),
    "rows of other tokens": (saved_rows([1, 1024]), *NO_ROWS),
    "fewer rows than tokens": (saved_rows([1, 2, 3]), *NO_ROWS),
    "adapter of embeddings": (
        adapter(lambda each: each.update({f"{PEFT}.model.embed_tokens.lora_embedding_A": torch.zeros(4, 1024)})),
        "run",
        ("LoRA on embeddings",),
    ),
    "another vocabulary": (
        lambda at: edit_json(at / "base" / "config.json", vocab_size=999),
        "run",
        ("vocab_size 999", "1024", "resize_token_embeddings"),
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_input_is_named_and_no_output_is_left(kind: str, broken: Path, tmp_path: Path) -> None:
    damage, file, names = DAMAGE[kind]
    damage(broken)
    with refused(PiLoraError, f"{broken / file}: ", *names):
        merge(ModelRef(broken / "run", base=str(broken / "base")), tmp_path / "out" / "merged")
    assert not list(tmp_path.glob("out/*"))
    assert not list(tmp_path.glob("out/.*"))


def test_a_full_disk_leaves_no_output(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with refused(ModelError, f"{tmp_path / 'merged'}: ", "a disk is full", "No space left on device"):
        merge(whole / "run", tmp_path / "merged")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_overflow_a_dtype_are_refused(broken: Path, tmp_path: Path) -> None:
    edit(broken / "base" / SECOND, lambda each: each[f"{Q}.weight"].fill_(1e6))
    with refused(PiLoraError, f"{broken / 'base' / SECOND}: {Q}.weight: ", "torch.float16"):
        merge(ModelRef(broken / "run", base=str(broken / "base")), tmp_path / "merged", dtype="float16")
    assert not (tmp_path / "merged").exists()
