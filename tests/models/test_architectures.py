from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING

from architectures import (
    COMPOSITE_TYPES,
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
    verdicts_on_page,
)
from pi_lora.errors import ScalingError
from pi_lora.scaling.config import LOCAL_ATTENTION, LOCAL_ROPE_ONLY, Method

# Another transformers may know other architectures.
PAGE_IS_OF_ANOTHER = f"from transformers {transformers.__version__}." not in PAGE.read_text(encoding="utf-8")
ON_PAGE, COMPOSITES_ON_PAGE = verdicts_on_page()


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_position_m_has_the_angles_of_m_over_s_or_the_model_is_refused(model_type: str) -> None:
    """As the page of models says of it."""
    found = examine(model_type)
    assert found.note
    assert found == ON_PAGE[model_type] or PAGE_IS_OF_ANOTHER


@pytest.mark.parametrize("model_type", PROMISED)
def test_every_promised_architecture_is_verified(model_type: str) -> None:
    assert examine(model_type).outcome == "verified"


@pytest.mark.parametrize("model_type", COMPOSITE_TYPES)
def test_the_language_model_of_a_composite_is_verified_or_refused(model_type: str) -> None:
    """As the page of models says of it, and it is verified if it is promised."""
    found = examine_composite(model_type)
    assert found == COMPOSITES_ON_PAGE[model_type] or PAGE_IS_OF_ANOTHER
    assert found.outcome == "verified" or model_type not in PROMISED_COMPOSITES


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


@pytest.mark.skipif(PAGE_IS_OF_ANOTHER, reason="docs/models.md is about another transformers")
def test_the_page_of_models_has_these_verdicts_alone() -> None:
    """`python tests/architectures.py` writes it. Each verdict is compared above."""
    written = page(ON_PAGE.__getitem__, COMPOSITES_ON_PAGE.__getitem__)
    assert PAGE.read_text(encoding="utf-8") == written
