"""The check of a merge lets sound merges through, reports every broken tensor and config, and removes what failed."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import refused, reporting
from pi_lora.api import merge
from pi_lora.errors import ModelError
from pi_lora.merging.check import check_logits, check_model, check_tensors
from pi_lora.merging.merging import Merge, plan_merge
from pi_lora.model_ref import ModelRef
from pi_lora.models.device import dtype_named
from pi_lora.models.files import save_config
from pi_lora.models.resolve import resolve_model
from pi_lora.types import silent
from random_runs import put_on_hub, save_base, save_run, stored, tuned
from small_configs import ALL, NEOX, NORMS, TIED, UNTIED, llama

SETTINGS = {
    "untied": (UNTIED, {"target_modules": ALL, "modules_to_save": ["embed_tokens", *NORMS]}),
    "tied": (TIED, {"target_modules": ALL, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "head": (UNTIED, {"target_modules": ["q_proj", "v_proj", "up_proj", "down_proj", "lm_head"]}),
    "gpt-neox": (NEOX, {"target_modules": ALL}),
}
Tensors = dict[str, torch.Tensor]
UP, QUERY, NORM = "model.layers.1.mlp.up_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.input_layernorm"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checked")
    base = save_base(llama(num_hidden_layers=3), folder / "base", torch.bfloat16, max_shard_size="80KB")
    return save_run(base, folder / "run", r=4, target_modules=ALL)


def merge_plainly(run: Path, folder: Path, dtype: str | None = None) -> Merge:
    """Write a merge in parts: what the checks of the parts take."""
    folder.mkdir()
    planned = plan_merge(resolve_model(str(run)), dtype=dtype)
    planned.write_small_files(folder)
    planned.write_weights(folder, "none", silent)
    return planned


@pytest.fixture(scope="module")
def planned(run: Path) -> Merge:
    """The merge in the folder `merged` beside the run."""
    return merge_plainly(run, run.with_name("merged"))


@pytest.fixture
def merged(planned: Merge, tmp_path: Path) -> Path:
    """A copy of the merge, to be broken."""
    return Path(shutil.copytree(planned.run.with_name("merged"), tmp_path / "merged"))


def exact(run: Path, name: str, scaling: float = 2.0) -> torch.Tensor:
    adapter = load_file(run / "adapter_model.safetensors")
    a, b = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    return stored(run.parent / "base")[f"{name}.weight"].float() + scaling * b @ a


def edit(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
    """Replace the tensors of a folder; None removes one, from the index as well."""
    for path in folder.glob("*.safetensors"):
        changed = {name: change(name, tensor) for name, tensor in load_file(path).items()}
        save_file(
            {name: t.contiguous() for name, t in changed.items() if t is not None}, path, metadata={"format": "pt"}
        )
        index = folder / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        for name in (name for name, tensor in changed.items() if tensor is None):
            del content["weight_map"][name]
        index.write_text(json.dumps(content))


def one(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path, Path], None]:
    return lambda folder, _: edit(folder, lambda key, tensor: change(tensor) if key == f"{name}.weight" else tensor)


def configured(**changes: Any) -> Callable[[Path, Path], None]:
    def write(folder: Path, _: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return write


def rope(**changes: Any) -> dict[str, Any]:
    return {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0, **changes}


def with_scaling(scaling: float) -> Callable[[Path, Path], None]:
    def change(folder: Path, run: Path) -> None:
        edit(folder, lambda key, t: exact(run, key[:-7], scaling).to(t.dtype) if "_proj" in key else t)

    return change


def set_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[-1] = torch.nan
    return tensor


def one_step_up(tensor: torch.Tensor, place: tuple[int, int]) -> torch.Tensor:
    tensor.view(torch.int16)[place] += 1
    return tensor


def from_base(*files: str) -> Callable[[Path, Path], None]:
    def copy(folder: Path, run: Path) -> None:
        for path in (path for file in files for path in folder.glob(file)):
            shutil.copyfile(run.parent / "base" / path.name, path)

    return copy


BROKEN: dict[str, Callable[[Path, Path], None]] = {
    "scaled wrongly": with_scaling(1.9),
    "no adapter": from_base("*.safetensors"),
    "one shard old": from_base("model-00002*"),
    "no adapter in one tensor": lambda folder, run: one(
        QUERY, lambda _: stored(run.parent / "base")[f"{QUERY}.weight"]
    )(folder, run),
    "transposed": one(QUERY, torch.t),
    "rows swapped": one(UP, lambda tensor: tensor[[0, 2, 1, *range(3, len(tensor))]]),
    "another layer's": lambda folder, run: one(UP, lambda t: exact(run, UP.replace("1", "0")).to(t.dtype))(folder, run),
    "cut instead of rounded": lambda folder, run: one(
        UP, lambda t: (exact(run, UP).view(torch.int32) & -65536).view(torch.float32).to(t.dtype)
    )(folder, run),
    # By a single step of bfloat16, in the first row and in the middle of a block.
    "a number rounded up": one(UP, lambda tensor: one_step_up(tensor, (0, 5))),
    "a number of a later row rounded up": one(UP, lambda tensor: one_step_up(tensor, (1, 5))),
    "a copy that is not": one(NORM, lambda tensor: tensor.float().mul(1.01).to(tensor.dtype)),
    "NaN": one(UP, set_nan),
    "another dtype": one(NORM, lambda tensor: tensor.half()),
    "a tensor missing": one(NORM, lambda _: None),
}
CONFIGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unscaled": ({"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}, ("scaling",)),
    "another factor": ({"rope_parameters": rope(factor=4.0)}, ("scaling",)),
    "another theta": ({"rope_parameters": rope(rope_theta=20000.0)}, ("scaling",)),
    "another window": ({"max_position_embeddings": 128}, ("scaling",)),
    "a tied head": ({"tie_word_embeddings": True}, ("lm_head.weight", "tied")),
    "another width": ({"intermediate_size": 64}, ("mlp.down_proj.weight", "[32, 48]", "[32, 64]")),
    "a layer too many": ({"num_hidden_layers": 4}, ("model.layers.3.input_layernorm.weight", "missing")),
}


@pytest.mark.parametrize("how", BROKEN)
def test_every_broken_tensor_is_reported(how: str, run: Path, planned: Merge, merged: Path) -> None:
    BROKEN[how](merged, run)
    with refused(ModelError, f"{run}: "):
        check_tensors(run, planned.tensors, merged, silent)


@pytest.mark.parametrize("how", CONFIGS)
def test_a_config_of_another_model_is_refused(how: str, planned: Merge, merged: Path) -> None:
    changes, names = CONFIGS[how]
    save_config({**planned.config, **changes}, merged)
    with refused(ModelError, f"{planned.source.base.name}: ", *names):
        check_model(planned.source, planned.expected, planned.tensors, merged)


def test_the_written_parts_pass_their_checks(run: Path, planned: Merge, merged: Path) -> None:
    check_model(planned.source, planned.expected, planned.tensors, merged)
    assert check_tensors(run, planned.tensors, merged, silent)


@pytest.mark.parametrize(("check", "named"), [("tensors", "_proj.weight"), ("logits", "logits at 128 tokens")])
def test_a_merge_that_fails_a_check_is_removed(check: Any, named: str, run: Path, tmp_path: Path) -> None:
    """The weights of the base come to stand in place of the merged ones just before the check."""

    def break_weights(done: int, total: int, note: str = "") -> None:
        [folder] = [path for path in tmp_path.iterdir() if path.is_dir()]
        if (note, done) == (("writing", total) if check == "tensors" else ("comparing logits", 0)):
            from_base("*.safetensors")(folder, run)

    with reporting(break_weights), refused(ModelError, f"{run}: ", "not kept", named):
        merge(run, tmp_path / "merged", check=check)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("base", "dtype"), [("bfloat16", "bfloat16"), ("float32", "float16"), ("float32", "float32")])
@pytest.mark.parametrize("case", SETTINGS)
def test_a_sound_merge_passes_the_check(
    case: str, base: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pi_lora.models.weights.BLOCK", 500)  # several blocks a matrix, the last of them shorter
    config, settings = SETTINGS[case]
    run = save_run(save_base(config, tmp_path / "base", dtype_named(base)), tmp_path / "run", r=4, **settings)
    merged = merge(run, tmp_path / "merged", dtype=dtype)
    assert json.loads((merged.folder / "config.json").read_text())["dtype"] == dtype
    [line] = merged.lines
    summed, trained, copied = map(int, re.findall(r"\d+", line))
    assert summed >= 8
    assert trained + copied >= 6
    assert (trained > 0) == ("modules_to_save" in settings)


def test_logits_are_compared_on_request(run: Path, tmp_path: Path) -> None:
    merged = merge(run, tmp_path / "merged", check="logits")
    checked, line = merged.lines
    assert checked == "checked: 21 tensors are base + adapter, 0 were trained in full, 9 are the base's"
    assert 0 < float(line.split()[6]) < 0.02
    assert f"- {checked}\n- {line}\n" in (merged.folder / "README.md").read_text()
    assert json.loads((merged.folder / "merge.json").read_text())["checks"] == [checked, line]


def test_logits_that_do_not_fit_in_memory_are_one_line(
    run: Path, planned: Merge, merged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pi_lora.merging.check.free_memory", lambda place: 1000)
    line = check_logits(planned.source, run, planned.tensors, merged)
    assert line.startswith("logits not compared: ")
    assert "\n" not in line


def test_a_merge_needs_no_tokenizer(run: Path, tmp_path: Path) -> None:
    for name in ("base", "run"):
        shutil.copytree(run.parent / name, tmp_path / name)
        for path in (tmp_path / name).glob("tokenizer*"):
            path.unlink()
    assert merge(ModelRef(tmp_path / "run", base=str(tmp_path / "base")), tmp_path / "merged").lines


OWN = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_a_model_with_its_own_code_is_merged_with_permission(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Path(shutil.copytree(run.parent / "base", tmp_path / "base"))
    (base / "own.py").write_text(OWN)
    adapter = Path(shutil.copytree(run, tmp_path / "run"))
    for folder, prefix in ((base, ""), (adapter, "someone/own--")):
        code = {"AutoConfig": f"{prefix}own.OwnConfig", "AutoModelForCausalLM": f"{prefix}own.OwnModel"}
        configured(model_type="own", auto_map=code)(folder, run)
    put_on_hub(base, "someone/own", tmp_path / "hub", monkeypatch)
    merged = merge(ModelRef(adapter, base="someone/own", trust_remote_code=True), tmp_path / "merged")
    assert merged.lines[0].startswith("checked: 21 tensors")


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 10 * 2.0**-7), ("float16", 10 * 2.0**-10), ("float32", 1e-3)])
@torch.no_grad()
def test_logits_may_differ_by_ten_roundings_of_the_dtype(dtype: str, most: float, run: Path, tmp_path: Path) -> None:
    """Or, of float32, by a thousandth: the two models add in another order. A longer head makes all logits larger."""
    planned = merge_plainly(run, tmp_path / "merged", dtype)
    ids = torch.arange(2, 130)[None]
    logits = tuned(run.parent / "base", run)(ids).logits.double()
    relative = float(logits.norm() / (logits - logits.mean(dim=-1, keepdim=True)).norm())

    def check_with(difference: float) -> str:
        folder = Path(shutil.copytree(tmp_path / "merged", tmp_path / f"by {difference}"))
        longer = 1 + difference / relative
        one("lm_head", lambda head: (head.double() * longer).to(head.dtype))(folder, run)
        return check_logits(planned.source, run, planned.tensors, folder)

    assert float(check_with(0.96 * most).split()[6]) == pytest.approx(0.96 * most, rel=0.03)
    with refused(ModelError, f"{run}: ", "not kept", "logits"):
        check_with(1.04 * most)
