"""What a base stores survives: a head under a config that ties it. The written config is that of the weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FalconConfig, PreTrainedConfig

from conftest import extend, refused, small_recipe, train
from pi_lora.api import load, merge
from pi_lora.errors import ModelError
from pi_lora.model_ref import ModelRef
from pi_lora.models.resolve import resolve_model
from pi_lora.scaling.extension import Extension
from random_runs import TOKENIZER, put_on_hub, save_base, save_run, stored
from small_configs import SIZES, llama

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
INDEX = "model.safetensors.index.json"
IDS = torch.arange(2, 130)[None]


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def with_own_head(folder: Path, config: PreTrainedConfig | None = None) -> Path:
    """A model with a head of its own, and a config that ties it to the embeddings."""
    save_base(config or llama(), folder)
    edit(folder / "config.json", tie_word_embeddings=True)
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return with_own_head(tmp_path / "base")


def logits(folder: Path, **changes: Any) -> torch.Tensor:
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **changes)
        return torch.as_tensor(model(IDS).logits)


def check_head_is_kept(base: Path, folder: Path) -> None:
    """The head is stored, and the config lets every engine read it."""
    torch.testing.assert_close(stored(folder)[HEAD], stored(base)[HEAD], rtol=0, atol=0.05)
    assert not torch.equal(stored(folder)[HEAD], stored(folder)[EMBEDDINGS])
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_head_that_the_config_ties_is_measured(base: Path) -> None:
    torch.testing.assert_close(load(str(base)).module(IDS).logits, logits(base, tie_word_embeddings=False))


def test_a_head_that_the_config_ties_survives_full_tuning(base: Path, tmp_path: Path) -> None:
    run = train(small_recipe(base, tuning={"method": "full"}), tmp_path / "run")
    check_head_is_kept(base, run)
    torch.testing.assert_close(load(str(run)).module(IDS).logits, logits(run))


def test_a_head_that_the_config_ties_survives_lora_and_merging(base: Path, tmp_path: Path) -> None:
    """The embeddings train, and the head does not follow them."""
    run = train(small_recipe(base), tmp_path / "run")
    merged = merge(run, tmp_path / "merged", check="logits").folder
    check_head_is_kept(base, merged)
    assert torch.equal(stored(merged)[HEAD], stored(base)[HEAD])
    torch.testing.assert_close(logits(merged), load(str(run)).module(IDS).logits, rtol=1e-4, atol=1e-4)


def test_a_head_that_the_config_ties_survives_extending(base: Path, tmp_path: Path) -> None:
    check_head_is_kept(
        base, extend(resolve_model(ModelRef(str(base), extension=Extension(128))), tmp_path / "extended")
    )


def test_a_stored_head_that_equals_the_embeddings_stays_tied(tmp_path: Path) -> None:
    base = save_base(llama(tie_word_embeddings=True), tmp_path / "base")
    weights = stored(base)
    save_file({**weights, HEAD: weights[EMBEDDINGS].clone()}, base / "model.safetensors", {"format": "pt"})
    # A single file is read rather than those of an index that was left beside it.
    index = {"weight_map": {HEAD: "model-00001-of-00002.safetensors"}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    merged = merge(save_run(base, tmp_path / "run", r=4, target_modules=["q_proj"]), tmp_path / "merged").folder
    assert HEAD not in stored(merged)
    assert json.loads((merged / "config.json").read_text())["tie_word_embeddings"] is True


def test_tied_embeddings_may_be_stored_as_the_head_alone(tmp_path: Path) -> None:
    base = save_base(llama(tie_word_embeddings=True), tmp_path / "base")
    expected = stored(base)
    weights = {HEAD if name == EMBEDDINGS else name: tensor for name, tensor in expected.items()}
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    merged = merge(save_run(base, tmp_path / "run", r=4, target_modules=["q_proj"]), tmp_path / "merged").folder
    assert HEAD not in stored(merged)
    assert torch.equal(stored(merged)[EMBEDDINGS], expected[EMBEDDINGS])


def test_another_head_under_other_names_is_merged_or_refused(tmp_path: Path) -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
    base = with_own_head(tmp_path / "base", FalconConfig(**sizes, tie_word_embeddings=False))
    with refused(ModelError, f"{base}: ", "head", "tie_word_embeddings: false"):
        load(str(base))
    run = save_run(base, tmp_path / "run", r=4, target_modules=["query_key_value"])
    merged = merge(run, tmp_path / "merged")
    assert torch.equal(stored(merged.folder)[HEAD], stored(base)[HEAD])
    assert json.loads((merged.folder / "config.json").read_text())["tie_word_embeddings"] is False


def test_another_head_on_the_hub_is_kept_once_it_is_in_the_cache(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_hub(base, "owner/base", tmp_path / "hub", monkeypatch)
    assert resolve_model("owner/base").config["tie_word_embeddings"] is False


def test_a_tie_does_not_depend_on_what_is_downloaded(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several files the index decides, whatever the numbers of a head that it lists."""
    weights = stored(base)
    (base / "model.safetensors").unlink()
    for equal in (True, False):
        folder = Path(shutil.copytree(base, tmp_path / f"equal-{equal}"))
        head = weights[EMBEDDINGS].clone() if equal else weights[HEAD]
        save_file({HEAD: head}, folder / "model-00001-of-00002.safetensors", {"format": "pt"})
        others = {name: tensor for name, tensor in weights.items() if name != HEAD}
        save_file(others, folder / "model-00002-of-00002.safetensors", {"format": "pt"})
        places = {name: f"model-0000{1 if name == HEAD else 2}-of-00002.safetensors" for name in weights}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
        put_on_hub(folder, "owner/all", tmp_path / f"hub-{equal}", monkeypatch)
        downloaded = resolve_model("owner/all").config
        for file in folder.glob("*.safetensors"):
            file.unlink()
        put_on_hub(folder, "owner/small-files", tmp_path / f"hub-{equal}", monkeypatch)
        assert resolve_model("owner/small-files").config == downloaded
        assert downloaded["tie_word_embeddings"] is False


def test_a_single_file_counts_before_an_index_that_was_left_beside_it(base: Path, tmp_path: Path) -> None:
    """As in transformers: new weights were saved into a folder with older shards."""
    save_base(llama(), tmp_path / "older", max_shard_size="40KB", seed=1)
    older = [*(tmp_path / "older").glob("model-*"), tmp_path / "older" / "model.safetensors.index.json"]
    for file in older:
        shutil.copyfile(file, base / file.name)
    expected = load_file(base / "model.safetensors")
    run = save_run(base, tmp_path / "run", r=4, target_modules=["q_proj"])
    merged = merge(run, tmp_path / "merged").folder
    assert torch.equal(stored(merged)[EMBEDDINGS], expected[EMBEDDINGS])
    extended = extend(resolve_model(ModelRef(str(base), extension=Extension(128))), tmp_path / "extended")
    assert {path.name for path in extended.glob("*.safetensors*")} == {"model.safetensors"}
    for file in older[:-1]:
        (base / file.name).unlink()
    merge(run, tmp_path / "again")


NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def test_a_merged_config_is_that_of_the_written_weights(tmp_path: Path) -> None:
    """The adapter brings the config of the quantized copy that it was trained on, in the words of transformers 4."""
    base = save_base(llama(), tmp_path / "base", torch.bfloat16)
    run = save_run(base, tmp_path / "run", r=4, target_modules=["q_proj"])
    edit(run / "config.json", quantization_config=NF4, torch_dtype="float16", tie_word_embeddings=True)
    merged = merge(run, tmp_path / "merged").folder
    config = json.loads((merged / "config.json").read_text())
    assert not {"quantization_config", "torch_dtype"} & config.keys()
    assert (config["dtype"], config["tie_word_embeddings"]) == ("bfloat16", False)
    assert {tensor.dtype for tensor in stored(merged).values()} == {torch.bfloat16}
    assert load(str(merged)).window == 128
    assert set(TOKENIZER) <= {path.name for path in merged.iterdir()}
