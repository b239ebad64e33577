from typing import Any

import pytest
import transformers
from architectures import (
    MODEL_TYPES,
    PAGE,
    PROMISED,
    PROMISED_COMPOSITES,
    examine,
    examine_composite,
    has_rope,
    page,
    positions_matter_to_full_layers,
    small_config,
    stretched,
)
from transformers import CONFIG_MAPPING

from pi_lora.errors import ScalingError
from pi_lora.scaling.config import LOCAL_ATTENTION, LOCAL_ROPE_ONLY, Method


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_position_m_has_the_angles_of_m_over_s_or_the_model_is_refused(model_type: str) -> None:
    assert examine(model_type).note


@pytest.mark.parametrize("model_type", PROMISED)
def test_every_promised_architecture_is_verified(model_type: str) -> None:
    assert examine(model_type).outcome == "verified"


@pytest.mark.parametrize("model_type", PROMISED_COMPOSITES)
def test_the_language_model_of_every_promised_composite_is_verified(model_type: str) -> None:
    assert examine_composite(model_type).outcome == "verified"


def test_only_local_layers_rotate_in_the_listed_architectures() -> None:
    """No config says it, so `LOCAL_ROPE_ONLY` is a list; this is what it should hold."""
    with_both = [name for name in MODEL_TYPES if has_rope(name) and has_local_and_full_layers(name)]
    assert {name for name in with_both if not positions_matter_to_full_layers(name)} == LOCAL_ROPE_ONLY


def has_local_and_full_layers(model_type: str) -> bool:
    kinds = set(CONFIG_MAPPING[model_type]().to_dict().get("layer_types") or [])
    return bool(kinds & LOCAL_ATTENTION and kinds - LOCAL_ATTENTION)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no positions at all": ("gpt2", {}, "no rotary position embeddings"),
    "a rope fixed in the code": ("gptj", {}, "that its config describes"),
    "ALiBi beside a rope in the config": ("falcon", {"alibi": True}, "has ALiBi"),
    "a rope that the model does not build": ("granitemoehybrid", {"position_embedding_type": "nope"}, "without rotary"),
    "a rope that is switched off": ("zamba2", {"use_mem_rope": False}, "built without rotary"),
    "ropes of parts that do not see the config's": ("blt", {}, "does not apply the scaling"),
    "a config class that rejects the scaling": ("phimoe", {}, "cannot be built with this scaling"),
    "every layer slides": (
        "mistral",
        {"sliding_window": 128},
        "every layer of this model attends to at most 128",
    ),
    "every layer slides, by type": (
        "ministral",
        {"sliding_window": 128},
        "every layer of this model attends to at most 128",
    ),
}


@pytest.mark.parametrize(("model_type", "changes", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_config_that_cannot_be_extended_is_refused_with_the_reason(
    model_type: str, changes: dict[str, Any], reason: str
) -> None:
    config = small_config(model_type) if has_rope(model_type) else CONFIG_MAPPING[model_type]()
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ScalingError, match=reason):
        stretched(config)


def test_mixed_or_disabled_sliding_windows_are_accepted() -> None:
    for model_type, changes in {
        "gemma2": {"sliding_window": 8},
        "qwen2": {"sliding_window": 8, "use_sliding_window": False},
    }.items():
        config = CONFIG_MAPPING[model_type](**{**small_config(model_type).to_dict(), **changes})
        assert stretched(config)[1]["rope_parameters"]["factor"] == 4


@pytest.mark.parametrize("method", ["dynamic", "yarn"])
@pytest.mark.parametrize("model_type", [name for name in PROMISED if name != "phi3"])
def test_promised_architectures_accept_the_other_methods(model_type: str, method: Method) -> None:
    config = small_config(model_type)
    assert stretched(config, method)[1]["max_position_embeddings"] == {"dynamic": 64, "yarn": 256}[method]


@pytest.mark.parametrize("method", ["dynamic", "yarn"])
def test_phi3_refuses_the_other_methods(method: Method) -> None:
    with pytest.raises(
        ScalingError, match=f"scaling: {method}: not possible for a phi3 model with rope type default; use pi"
    ):
        stretched(small_config("phi3"), method)


def test_the_page_of_models_equals_what_the_architectures_do() -> None:
    """`python tests/architectures.py` writes it; another transformers may know other architectures."""
    if f"from transformers {transformers.__version__}." not in PAGE.read_text(encoding="utf-8"):
        pytest.skip(f"docs/models.md is about another transformers than {transformers.__version__}")
    assert PAGE.read_text(encoding="utf-8") == page()
