"""What is streamed equals what PEFT makes in memory, and computes what base + adapter does."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoKrConfig, get_peft_model, save_as_lora
from transformers import AutoModelForCausalLM, Phi3Config, PreTrainedConfig

from conftest import refused, small_recipe, train
from pi_lora.api import merge
from pi_lora.errors import ModelError
from pi_lora.model_ref import ModelRef
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
def test_a_streamed_merge_equals_pefts(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pi_lora.models.weights.BLOCK", 500)  # several blocks a matrix
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
    with refused(ModelError, f"{run}: ", base, "vocab_size 1024", 1026, "resize_token_embeddings"):
        merge(ModelRef(run, base=base), tmp_path / "merged")
    logits = tuned(tmp_path / "resized", run)(IDS).logits
    merged = merge(run, tmp_path / "merged").folder
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(merged)(IDS).logits, logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trained_rows_are_rounded_once_and_other_rows_are_those_of_the_base(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [1023, 3, 156]  # the last one begins a block
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
    with refused(ModelError, f"{run / 'adapter_config.json'}: ", "peft.save_as_lora(FOLDER, model, rank=1.0)"):
        merge(ModelRef(run, base=str(base)), tmp_path / "merged")
    save_as_lora(run, adapted, rank=1.0)
    merged = AutoModelForCausalLM.from_pretrained(
        merge(ModelRef(run, base=str(base)), tmp_path / "merged", check="logits").folder
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
