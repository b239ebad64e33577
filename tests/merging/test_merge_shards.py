"""How the merged files are divided and written, and in how much memory."""

import contextlib
import json
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest
import torch
from random_runs import save_base, save_run
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_merge_peft import ATTENTION, llama
from transformers import AutoModelForCausalLM

from pi_lora.cli.merge import size_in
from pi_lora.errors import PiLoraError
from pi_lora.merging.merging import merge
from pi_lora.merging.tensors import StoredTensor
from pi_lora.run import staging_path

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
    assert index["weight_map"] == json.loads((base / INDEX).read_text())["weight_map"]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights(merged).values())
    assert {stat.S_IMODE(path.stat().st_mode) for path in merged.iterdir()} == {0o644}


def test_what_was_not_tuned_is_the_same_to_the_bit(run: Path, tmp_path: Path) -> None:
    before, after = weights(run.parent / "base"), weights(merge(run, tmp_path / "merged", check="none").folder)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.rsplit(".", 2)[-2] in ATTENTION}


@pytest.mark.parametrize(("size", "count"), [(None, 3), (20_000, 4), (10**9, 1)])
def test_other_divisions_hold_the_same(run: Path, tmp_path: Path, size: int | None, count: int) -> None:
    merged = merge(run, tmp_path / "merged", shard_size=size, check="none").folder
    assert len(files(merged)) == count
    assert (merged / INDEX).exists() == (count > 1)
    as_base = weights(merge(run, tmp_path / "other", check="none").folder)
    assert all(torch.equal(as_base[name], tensor) for name, tensor in weights(merged).items())
    AutoModelForCausalLM.from_pretrained(merged)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_another_dtype(run: Path, tmp_path: Path, dtype: str) -> None:
    merged = merge(run, tmp_path / "merged", dtype=dtype).folder
    assert json.loads((merged / "config.json").read_text())["dtype"] == dtype
    assert {str(tensor.dtype) for tensor in weights(merged).values()} == {f"torch.{dtype}"}


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


def test_progress_ends_at_the_size(run: Path, tmp_path: Path) -> None:
    told = []
    merge(run, tmp_path / "m", check="none", progress=lambda done, total, note: told.append((done, total)))
    size = sum(tensor.nbytes for tensor in weights(tmp_path / "m").values())
    assert told[-1] == (size, size)
    assert told == sorted(told)


MERGE = (
    "import sys; from pathlib import Path; from pi_lora.merging.merging import merge; merge(*map(Path, sys.argv[1:]))"
)


def test_killed_at_any_moment_nothing_looks_finished(python: str, run: Path, tmp_path: Path) -> None:
    def attempt(output: Path, seconds: float | None) -> float:
        """Merge, and kill so many seconds after something of it is on the disk; how long it had."""
        with subprocess.Popen([python, "-c", MERGE, str(run), str(output)], stdout=subprocess.PIPE) as process:
            while process.poll() is None and not staging_path(output).exists():
                time.sleep(0.001)
            begin = time.monotonic()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
            process.kill()
            # The pipe closes when the merging process itself has ended.
            process.communicate()
        assert process.returncode in (0, -signal.SIGKILL)
        return time.monotonic() - begin

    attempt(tmp_path / "warm", None)
    whole = attempt(tmp_path / "whole", None)
    expected = weights(tmp_path / "whole")
    finished = 0
    for number in range(20):
        output = tmp_path / f"killed-{number}"
        attempt(output, number / 20 * whole)
        if output.exists():
            finished += 1
            # How its check came out is written beside merge.json and the card, which it then replaces.
            names = {path.name for path in output.iterdir()} - {".merge.json.part", ".README.md.part"}
            assert names == {path.name for path in (tmp_path / "whole").iterdir()}
            assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(output).items())
        # Beside it lies what was begun, under no name that a command takes, and in nobody's way.
        assert {path.name for path in tmp_path.glob(f"*killed-{number}*")} <= {output.name, staging_path(output).name}
    assert finished < 20
    begun = next(path for path in tmp_path.iterdir() if path.name.endswith(".partial"))
    merge(run, tmp_path / begun.name.removeprefix(".").removesuffix(".partial"))
    assert not begun.exists()


@pytest.mark.parametrize("text", ["5", "5 parsecs", "0GB", "-1GB", "many"])
def test_sizes_of_files(text: str) -> None:
    if text == "5":
        assert size_in(text) == 5
        return
    with pytest.raises(PiLoraError, match=r"--shard-size: .*; write it as 5GB"):
        size_in(text)


def test_a_base_on_the_hub(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub client's cache, as a download would have left it."""
    kept = tmp_path / "hub" / "models--someone--base"
    shutil.copytree(run.parent / "base", kept / "snapshots" / ("a" * 40))
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    merged = merge(run, tmp_path / "merged", base="someone/base").folder
    assert json.loads((merged / "merge.json").read_text())["base"] == "someone/base"
    as_local = weights(merge(run, tmp_path / "local", check="none").folder)
    assert all(torch.equal(as_local[name], tensor) for name, tensor in weights(merged).items())
    (kept / "snapshots" / ("a" * 40) / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(PiLoraError, match=r"someone/base: model-00002-of-00003\.safetensors: is missing"):
        merge(run, tmp_path / "other", base="someone/base")
