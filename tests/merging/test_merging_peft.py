"""What is streamed equals what PEFT makes in memory, and computes what base + adapter does; on a sibling, the sum."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoKrConfig, get_peft_model, save_as_lora
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Phi3Config, PreTrainedConfig

from conftest import small_recipe, train
from pi_lora.api import merge
from pi_lora.errors import ModelError
from pi_lora.models.adapter import without_known_warnings
from random_runs import save_base, save_run, stored, stretched, tuned
from small_configs import ALL, ATTENTION, MIXTRAL, NEOX, NORMS, SIZES, TIED, UNTIED

IDS = torch.randint(2, 1024, (2, 100), generator=torch.Generator().manual_seed(5))
EXACT_TIES = {"ensure_weight_tying": True}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

CASES: dict[str, tuple[PreTrainedConfig, dict[str, Any]]] = {
    "lora": (UNTIED, {"r": 4, "target_modules": ALL}),
    "attention only": (UNTIED, {"r": 4, "target_modules": ATTENTION}),
    "dora": (UNTIED, {"r": 4, "target_modules": ALL, "use_dora": True}),
    "rank-stabilized": (UNTIED, {"r": 4, "target_modules": ALL, "use_rslora": True}),
    "own ranks": (
        UNTIED,
        {"r": 4, "target_modules": ALL, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers\.1\..*up_proj": 3}},
    ),
    "embeddings and norms": (UNTIED, {"r": 4, "target_modules": ALL, "modules_to_save": ["embed_tokens", *NORMS]}),
    "norms": (TIED, {"r": 4, "target_modules": ALL, "modules_to_save": NORMS}),
    "head": (UNTIED, {"r": 4, "target_modules": [*ATTENTION, "lm_head"]}),
    "tied": (TIED, {"r": 4, "target_modules": ALL}),
    "tied, trained": (TIED, {"r": 4, "target_modules": ALL, "modules_to_save": ["embed_tokens", *NORMS], **EXACT_TIES}),
    "rows": (UNTIED, {"r": 4, "target_modules": ATTENTION, "trainable_token_indices": [1023, 3]}),
    "rows of both": (
        UNTIED,
        {"r": 4, "target_modules": ATTENTION, "trainable_token_indices": {"embed_tokens": [3], "lm_head": [9, 1, 5]}},
    ),
    "tied, rows": (TIED, {"r": 4, "target_modules": ATTENTION, "trainable_token_indices": [1023, 3]}),
    "rows of gpt-neox": (NEOX, {"r": 4, "target_modules": ALL, "trainable_token_indices": {"embed_in": [3, 1]}}),
    "biases": (NEOX, {"r": 4, "target_modules": ALL, "bias": "all"}),
    "gpt-neox": (NEOX, {"r": 4, "target_modules": ALL, "modules_to_save": ["embed_in", "final_layer_norm"]}),
    "phi-3": (Phi3Config(**SIZES), {"r": 4, "target_modules": ALL}),
    "joined experts": (MIXTRAL, {"r": 4, "target_modules": ATTENTION}),
}


# PEFT says what it does to tied embeddings that it was told to train, and to biases without the adapter.
KNOWN = pytest.mark.filterwarnings("ignore:.*(tie_word_embeddings|tied|disabling adapter layers with bias):UserWarning")


@KNOWN
@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_a_streamed_merge_equals_pefts(case: str, tmp_path: Path) -> None:
    config, settings = CASES[case]
    base = save_base(config, tmp_path / "base")
    run = save_run(base, tmp_path / "run", **settings)
    expected = tuned(base, run)
    logits = expected(IDS).logits
    merged = AutoModelForCausalLM.from_pretrained(merge(run, tmp_path / "merged").folder)
    assert merged.config.tie_word_embeddings == config.tie_word_embeddings
    torch.testing.assert_close(merged(IDS).logits, logits, rtol=1e-5, atol=1e-5)
    theirs = expected.merge_and_unload().state_dict()
    ours = merged.state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-6, atol=1e-6, msg=lambda text, name=name: name + text)


@KNOWN
@torch.no_grad()
@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ATTENTION, "modules_to_save": ["embed_tokens"]},
        {"target_modules": [*ATTENTION, "lm_head"]},
        {"target_modules": ATTENTION, "trainable_token_indices": {"embed_tokens": [3, 9], "lm_head": [1000]}},
        {"target_modules": ATTENTION, "trainable_token_indices": {"lm_head": [3]}},
    ],
    ids=["embeddings trained", "lora on the head", "other rows", "rows of the head"],
)
def test_a_tied_head_that_diverged_is_untied(settings: dict[str, Any], tmp_path: Path) -> None:
    """PEFT's own merging adds both changes to the one tensor, and the model is another."""
    base = save_base(TIED, tmp_path / "base")
    run = save_run(base, tmp_path / "run", r=4, **settings)
    logits = tuned(base, run)(IDS).logits
    folder = merge(run, tmp_path / "merged").folder
    merged = AutoModelForCausalLM.from_pretrained(folder)
    assert not merged.config.tie_word_embeddings
    assert not torch.equal(merged.lm_head.weight, merged.model.embed_tokens.weight)
    torch.testing.assert_close(merged(IDS).logits, logits, rtol=1e-5, atol=1e-5)
    assert "they diverged" in (folder / "README.md").read_text()


@KNOWN
@torch.no_grad()
@pytest.mark.parametrize("config", [UNTIED, TIED])
def test_lora_on_the_head_is_merged_beside_the_copies_that_peft_saves(config: Any, tmp_path: Path) -> None:
    base = save_base(config, tmp_path / "base")
    run = save_run(base, tmp_path / "run", r=4, target_modules=["q_proj", "lm_head"], with_base_layers=True)
    assert "base_model.model.lm_head.base_layer.weight" in stored(run)
    logits = tuned(base, run)(IDS).logits
    merged = AutoModelForCausalLM.from_pretrained(merge(run, tmp_path / "merged").folder)
    torch.testing.assert_close(merged(IDS).logits, logits, rtol=1e-5, atol=1e-5)


@KNOWN
@torch.no_grad()
@pytest.mark.parametrize("modules", [None, ["embed_tokens", "lm_head"]])
def test_an_extended_vocabulary_is_merged_into_a_base_with_as_many_embeddings(
    modules: list[str] | None, tmp_path: Path
) -> None:
    """PEFT notices the resizing and saves embeddings and head, trained ones three times."""
    base = save_base(UNTIED, tmp_path / "base")
    resized = AutoModelForCausalLM.from_pretrained(base)
    resized.resize_token_embeddings(1026)
    resized.save_pretrained(tmp_path / "resized")
    run = save_run(
        tmp_path / "resized",
        tmp_path / "run",
        with_base_layers=True,
        r=4,
        target_modules=["q_proj"],
        modules_to_save=modules,
    )
    with pytest.raises(ModelError, match=r"vocab_size 1024 instead of 1026; .* \(resize_token_embeddings\) and"):
        merge(run, tmp_path / "merged", base=base)
    logits = tuned(tmp_path / "resized", run)(IDS).logits
    merged = merge(run, tmp_path / "merged").folder
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(merged)(IDS).logits, logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trained_rows_are_rounded_once_and_other_rows_are_those_of_the_base(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [1023, 3, 500]
    base = save_base(TIED, tmp_path / "base", torch.bfloat16)
    run = save_run(base, tmp_path / "run", r=4, target_modules=ATTENTION, trainable_token_indices=tokens)
    monkeypatch.setattr("pi_lora.models.weights.BLOCK", 5000)
    merged = merge(run, tmp_path / "merged", dtype=dtype, check="logits")
    expected = stored(base)[EMBEDDING].to(getattr(torch, dtype))
    [name] = [name for name in stored(run) if "trainable_tokens" in name]
    expected[tokens] = stored(run)[name].to(expected.dtype)
    assert torch.equal(stored(merged.folder)[EMBEDDING], expected)
    assert HEAD not in stored(merged.folder)


@torch.no_grad()
@pytest.mark.parametrize("kind", [LoHaConfig, LoKrConfig])
def test_other_adapters_are_merged_once_peft_has_written_them_as_lora(kind: type[Any], tmp_path: Path) -> None:
    base = save_base(UNTIED, tmp_path / "base")
    run = save_run(base, tmp_path / "run", r=4, target_modules=ATTENTION)
    with without_known_warnings():
        adapted = get_peft_model(stretched(base, run), kind(task_type="CAUSAL_LM", r=4, target_modules=ALL))
    torch.manual_seed(1)
    for weight in adapted.parameters():
        if weight.requires_grad:
            weight.add_(torch.randn_like(weight) * 0.3)
    logits = adapted.eval()(IDS).logits
    adapted.save_pretrained(run, save_embedding_layers=False)
    with pytest.raises(ModelError, match=r"only LoRA .* as LoRA: peft\.save_as_lora\(FOLDER, model, rank=1\.0\)$"):
        merge(run, tmp_path / "merged", base=str(base))
    save_as_lora(run, adapted, rank=1.0)
    merged = AutoModelForCausalLM.from_pretrained(
        merge(run, tmp_path / "merged", base=str(base), check="logits").folder
    )
    torch.testing.assert_close(merged(IDS).logits, logits, rtol=1e-3, atol=1e-4)
    assert (stretched(base, run)(IDS).logits - logits).abs().max() > 0.1


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_a_qlora_adapter_is_added_to_the_unquantized_base(tmp_path: Path) -> None:
    base = save_base(TIED, tmp_path / "base", torch.bfloat16)
    recipe = small_recipe(base, tuning={"method": "qlora", "rank": 4, "target_modules": "attention"})
    run = train(recipe, tmp_path / "run")
    expected = tuned(base, run).merge_and_unload().state_dict()
    for name, weight in stored(merge(run, tmp_path / "merged").folder).items():
        assert torch.equal(weight, expected[name].to(torch.bfloat16)), name


def sibling_of(base: Path, folder: Path) -> Path:
    sibling = Path(shutil.copytree(base, folder / "sibling"))
    tensors = {name: tensor * 1.1 + 0.01 for name, tensor in stored(sibling).items()}
    save_file(tensors, sibling / "model.safetensors", {"format": "pt"})
    return sibling


@KNOWN
@pytest.mark.parametrize(
    "case", ["lora", "embeddings and norms", "tied, trained", "tied, diverged", "rows of both", "tied, rows"]
)
def test_merging_into_a_sibling_adds_the_same_difference(case: str, tmp_path: Path) -> None:
    diverged = (TIED, {"r": 4, "target_modules": ATTENTION, "modules_to_save": ["embed_tokens", "lm_head"]})
    config, settings = CASES.get(case, diverged)
    base = save_base(config, tmp_path / "base")
    run = save_run(base, tmp_path / "run", **settings)
    sibling = sibling_of(base, tmp_path)
    for name, entry in (("config.json", {"eos_token_id": 7}), ("tokenizer_config.json", {"chat_template": "{{ 1 }}"})):
        (sibling / name).write_text(json.dumps({**json.loads((sibling / name).read_text()), **entry}))
    own = stored(merge(run, tmp_path / "own").folder)
    merged = merge(run, tmp_path / "merged", base=str(sibling), sibling=True)
    before, after = ({HEAD: tensors[EMBEDDING], **tensors} for tensors in (stored(base), stored(sibling)))
    assert own.keys() == stored(merged.folder).keys()
    for name, tensor in stored(merged.folder).items():
        expected = after[name] + own[name] - before[name]
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: name + text)
    config_file = json.loads((merged.folder / "config.json").read_text())
    assert (config_file["eos_token_id"], config_file["rope_parameters"]["factor"]) == (7, 2.0)
    settings_file = json.loads((merged.folder / "tokenizer_config.json").read_text())
    assert settings_file["model_max_length"] == 128
    said = "tuned on base, and added to sibling"
    assert merged.lines[0] == f"sibling: {said}"
    assert merged.lines[-1].startswith("checked: ")
    assert f"- sibling: {said}" in (merged.folder / "README.md").read_text()


def test_merging_into_a_sibling_needs_the_option(lora_run: Path, small_model: Path, tmp_path: Path) -> None:
    sibling = sibling_of(small_model, tmp_path)
    with pytest.raises(ModelError, match="has other weights than those that it was tuned on"):
        merge(lora_run, tmp_path / "merged", base=str(sibling))
    assert merge(lora_run, tmp_path / "merged", base=str(sibling), sibling=True).lines
    with pytest.raises(ModelError, match="--sibling: name the sibling of its base with --base"):
        merge(lora_run, tmp_path / "other", sibling=True)


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "rope_theta 1000000.0 instead of 500.0",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 1.5}},
            "(rope_type linear instead of default|factor 1.5 instead of None|own scale 1.5 does not lead)",
        ),
        ({"max_position_embeddings": 128}, "a window of 128 tokens, and the run extends to 128"),
    ],
)
@pytest.mark.parametrize("scaling", ["pi", "theta"])
def test_a_model_with_other_positions_is_no_sibling(
    entries: dict[str, Any], problem: str, scaling: str, small_model: Path, tmp_path: Path
) -> None:
    run = train(small_recipe(small_model, scaling=scaling), tmp_path / "run")
    sibling = sibling_of(small_model, tmp_path)
    config = json.loads((sibling / "config.json").read_text())
    (sibling / "config.json").write_text(json.dumps(config | entries))
    with pytest.raises(ModelError, match=problem):
        merge(run, tmp_path / "merged", base=str(sibling), sibling=True)


def test_a_run_that_extends_nothing_is_merged_into_a_sibling_of_the_same_window(
    small_model: Path, tmp_path: Path
) -> None:
    run = train(small_recipe(small_model, scaling="keep", context={"target": 64}), tmp_path / "run")
    merged = merge(run, tmp_path / "merged", base=str(sibling_of(small_model, tmp_path)), sibling=True)
    assert json.loads((merged.folder / "config.json").read_text())["max_position_embeddings"] == 64
