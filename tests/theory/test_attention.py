"""Scores of real queries and keys: taken apart as the model rotates them, and within the bounds."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_cli import run
from transformers import AutoModelForCausalLM
from transformers.models.auto import CONFIG_MAPPING

from pi_lora.errors import ScalingError
from pi_lora.models.model import load
from pi_lora.theory.bounds import Setting, attention_score, distances, setting_of
from pi_lora.theory.heads import layer_coefficients

TEXT = Path(__file__).parents[2] / "README.md"
IDS = torch.randint(2, 60, (40,), generator=torch.Generator().manual_seed(1)).tolist()
# Positions of queries and of keys.
PAIRS = (np.arange(8, 40, 2), np.arange(0, 32, 2) // 3)
# Heads that rotate in part (gpt_neox), shared keys, and layers of other ropes or none.
KINDS = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 16},
    "gpt_neox": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    "gemma3_text": {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64},
    "smollm3": {"no_rope_layers": [0, 1], "num_key_value_heads": 2},
}


def small(kind: str) -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
    options = {**sizes, **KINDS.get(kind, {})}
    config = CONFIG_MAPPING[kind](
        bos_token_id=0, eos_token_id=0, num_attention_heads=4, max_position_embeddings=64, **options
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_the_model_computes(kind: str) -> None:
    """`a(m - n)` from the coefficients is the eager kernel's product of the rotated query and key; rotary part only."""
    model = small(kind)
    setting = setting_of(model.config.to_dict())
    queries, keys = PAIRS
    found = layer_coefficients(model, IDS, (queries, keys), setting)
    assert list(found) == ([1] if kind in ("gemma3_text", "smollm3") else [0, 1])
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    code = importlib.import_module(type(model).__module__)
    eager = code.eager_attention_forward

    def note(module: Any, query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> Any:
        seen[module.layer_idx] = (query[0], key[0].repeat_interleave(query.shape[1] // key.shape[1], 0))
        return eager(module, query, key, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code, "eager_attention_forward", note)
        model.set_attn_implementation("eager")
        model(input_ids=torch.tensor([IDS]))
    for layer, h in found.items():
        query, key = (each[..., : setting.head_dim].double().numpy() for each in seen[layer])
        for pair, (m, n) in enumerate(zip(queries, keys, strict=True)):
            score = attention_score(h[:, pair], [m - n], setting.theta)[:, 0]
            np.testing.assert_allclose(score, (query[:, m] * key[:, n]).sum(-1), atol=1e-4 * abs(h).max())


def test_the_scale_of_an_extended_model_counts(lora_run: Path) -> None:
    """Layers whose frequencies are not those of the setting over the scale are left out; and so are all of Cohere's,
    which rotates pairs of neighbours.
    """
    loaded = load(str(lora_run))
    setting = setting_of(loaded.config)
    assert (setting.original, setting.target) == (64, 128)
    assert list(layer_coefficients(loaded.model, IDS, PAIRS, setting, 2.0)) == [0, 1]
    with pytest.raises(ScalingError, match="no layer rotates"):
        layer_coefficients(loaded.model, IDS, PAIRS, setting)
    neighbours = small("cohere")
    with pytest.raises(ScalingError, match="model of type cohere: no layer rotates"):
        layer_coefficients(neighbours, IDS, PAIRS, setting_of(neighbours.config.to_dict()))


def test_distances_are_whole_or_in_between() -> None:
    inside, beyond, between = distances(Setting(original=96, target=256))
    assert inside.tolist() == list(range(96))
    assert beyond.tolist() == list(range(96, 256))
    assert all(each % 1 for each in between)
    assert set(between) < {each * 96 / 256 for each in range(256)}
    assert len(between) == 256 - 256 // 8 * 1


def test_the_command_measures_the_builtin_model_within_the_bounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And above the paper's interpolation bound, which does not hold for every query and key."""
    folder, file = tmp_path / "figures", tmp_path / "theory.json"
    options = ["--model", "builtin:tiny", "--target", "1024", "--text", str(TEXT)]
    status, printed, errors = run(capsys, monkeypatch, "theory", *options, "--output", str(folder), "--json", str(file))
    assert status == 0, errors
    assert "64 queries and keys a head from 256 tokens" in printed
    measured = json.loads(file.read_text())["measured"]
    layers, largest = measured["layers"], measured["largest"]
    assert list(layers) == list(map(str, range(6)))
    assert all(len(heads["inside"]) == 8 for heads in layers.values())
    assert 0 < largest["between_share"] <= 1
    assert 0 < largest["beyond_share"] <= 1
    assert largest["papers_share"] > 1
