"""Each causal language model of transformers and each composite, built small, is extended or refused as docs/models.md
says of it.
"""

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
    WINDOW,
    Verdict,
    base_of,
    examine,
    examine_composite,
    has_rope,
    page,
    positions_matter_to_full_layers,
    small_config,
    stretched,
    times_scale,
    verdicts_on_page,
)
from conftest import refused
from pi_lora.errors import ScalingError
from pi_lora.scaling.config import LOCAL_ATTENTION
from pi_lora.scaling.model_types import MODEL_TYPES as FACTS
from pi_lora.scaling.scalings import Method

PAGE_IS_OF_ANOTHER = f"from transformers {transformers.__version__}." not in PAGE.read_text(encoding="utf-8")
ON_PAGE, COMPOSITES_ON_PAGE = verdicts_on_page()


def check_verdict(found: Verdict, promised: list[str], on_page: dict[str, Verdict]) -> None:
    """What is promised is verified by every transformers; the page is about one, which may have other architectures."""
    assert found.note
    assert found.outcome == "verified" or found.model_type not in promised
    if PAGE_IS_OF_ANOTHER:
        pytest.skip(f"{found.outcome}: {found.note}; not compared: docs/models.md is about another transformers")
    assert found == on_page[found.model_type]


@pytest.mark.parametrize("model_type", dict.fromkeys([*PROMISED, *MODEL_TYPES]))
def test_position_m_has_the_angles_of_m_over_s_or_the_model_is_refused(model_type: str) -> None:
    check_verdict(examine(model_type), PROMISED, ON_PAGE)


@pytest.mark.parametrize("name", dict.fromkeys([*PROMISED_COMPOSITES, *COMPOSITE_TYPES]))
def test_the_language_model_of_a_composite_is_verified_or_refused(name: str) -> None:
    check_verdict(examine_composite(name), PROMISED_COMPOSITES, COMPOSITES_ON_PAGE)


def test_only_local_layers_rotate_in_the_listed_architectures() -> None:
    """No config says it, so `MODEL_TYPES` does; this is what it should say."""
    local = {name for name, facts in FACTS.items() if facts.only_local_rope}
    with_both = [name for name in MODEL_TYPES if has_rope(name) and has_local_and_full_layers(name)]
    assert {name for name in with_both if not positions_matter_to_full_layers(name)} == local


def has_local_and_full_layers(model_type: str) -> bool:
    kinds = set(CONFIG_MAPPING[model_type]().to_dict().get("layer_types") or [])
    return bool(kinds & LOCAL_ATTENTION and kinds - LOCAL_ATTENTION)


# Architecture, changes of its config, where the line begins, and the reason.
REFUSED: dict[str, tuple[str, dict[str, Any], str, object]] = {
    "no positions at all": ("gpt2", {}, "model of type gpt2", "no rotary position embeddings"),
    "a rope fixed in the code": ("gptj", {}, "model of type gptj", "that its config describes"),
    "ALiBi beside a rope in the config": ("falcon", {"alibi": True}, "model of type falcon", "ALiBi"),
    "a rope that the model does not build": (
        "granitemoehybrid",
        {"position_embedding_type": "nope"},
        "model of type granitemoehybrid",
        "without rotary",
    ),
    "a rope that is switched off": ("zamba2", {"use_mem_rope": False}, "model of type zamba2", "without rotary"),
    "ropes of parts that do not see the config's": ("blt", {}, "model of type blt", "does not apply the scaling"),
    "a config class that rejects the scaling": ("phimoe", {}, "model of type phimoe", "with this scaling"),
    "every layer slides": ("mistral", {"sliding_window": WINDOW // 2}, f"context.target: {4 * WINDOW}", WINDOW // 2),
    "every layer slides, by type": (
        "ministral",
        {"sliding_window": WINDOW // 2},
        f"context.target: {4 * WINDOW}",
        WINDOW // 2,
    ),
}


@pytest.mark.parametrize(("model_type", "changes", "where", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_config_that_cannot_be_extended_is_refused_with_the_reason(
    model_type: str, changes: dict[str, Any], where: str, reason: object
) -> None:
    config = small_config(model_type) if has_rope(model_type) else CONFIG_MAPPING[model_type]()
    for name, value in changes.items():
        setattr(config, name, value)
    with refused(ScalingError, where, reason):
        stretched(config)


def test_mixed_or_disabled_sliding_windows_are_accepted() -> None:
    for model_type, changes in {
        "gemma2": {"sliding_window": 8},
        "qwen2": {"sliding_window": 8, "use_sliding_window": False},
    }.items():
        config = CONFIG_MAPPING[model_type](**{**small_config(model_type).to_dict(), **changes})
        assert stretched(config)[1]["rope_parameters"]["factor"] == 4


@pytest.mark.parametrize("model_type", PROMISED)
def test_promised_architectures_accept_the_other_methods_or_name_those_that_fit(model_type: str) -> None:
    declared: dict[Method, int] = {"dynamic": WINDOW, "yarn": 4 * WINDOW}
    for method, window in declared.items():
        if model_type == "phi3":
            with refused(ScalingError, f"scaling: {method}", "phi3", "pi", "theta", "factors"):
                times_scale(base_of(model_type), method)
        else:
            assert times_scale(base_of(model_type), method)["max_position_embeddings"] == window


@pytest.mark.skipif(PAGE_IS_OF_ANOTHER, reason="docs/models.md is about another transformers")
def test_the_page_of_models_has_these_verdicts_alone() -> None:
    """`python tests/architectures.py` writes it. Each verdict is compared above."""
    written = page(ON_PAGE.__getitem__, COMPOSITES_ON_PAGE.__getitem__)
    assert PAGE.read_text(encoding="utf-8") == written
