"""The model that transformers builds has the frequencies and the factor of cosines of the formulas, to 1e-5."""

from typing import Any

import pytest
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from conftest import BUILTIN, refused
from pi_lora.errors import ScalingError
from pi_lora.models.resolve import resolve_model
from pi_lora.scaling.extension import Extension
from pi_lora.scaling.rope import Rope
from pi_lora.scaling.scalings import Method

TYPES: dict[Method, str] = {"pi": "linear", "yarn": "yarn", "llama3": "llama3", "factors": "longrope"}


@pytest.mark.parametrize("method", TYPES)
@pytest.mark.parametrize("changed", ["one frequency", "cosines"])
def test_a_scaling_that_is_computed_slightly_otherwise_is_refused(
    method: Method, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a ten thousandth, in one frequency or in all cosines: bounds would let it pass."""
    divisors = (1.5,) * 16 if method == "factors" else None
    extension = Extension(512, scaling=method, factors=divisors)
    base = resolve_model(BUILTIN)
    assert base.extended(extension).window == 512
    right = ROPE_INIT_FUNCTIONS[TYPES[method]]

    def slightly_wrong(*inputs: Any, **options: Any) -> Any:
        frequencies, factor = right(*inputs, **options)
        if changed == "cosines":
            return frequencies, factor * 1.0001
        frequencies[8] *= 1.0001
        return frequencies, factor

    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, TYPES[method], slightly_wrong)
    with refused(ScalingError, "model of type llama"):
        base.extended(extension)


@pytest.mark.parametrize(
    ("rope", "factor"),
    [
        ({"rope_type": "linear", "factor": 8.0, "attention_factor": None}, 1.0),
        ({"rope_type": "yarn", "factor": 1.0}, 1.0),
        # 0.1 ln 4 + 1
        ({"rope_type": "yarn", "factor": 4.0}, 1.13862943),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5}, 0.5),
        ({"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        # (0.2 ln 4 + 1) / (0.1 ln 4 + 1)
        ({"rope_type": "yarn", "factor": 4.0, "mscale": 2.0, "mscale_all_dim": 1.0}, 1.12175114),
        # (1 + ln 4 / ln 256) ^ 0.5
        ({"rope_type": "longrope", "factor": None}, 1.11803399),
        ({"rope_type": "longrope", "factor": 1.0}, 1.0),
    ],
)
def test_the_factor_of_cosines_is_stated_or_the_default_of_the_rope_type(rope: dict[str, Any], factor: float) -> None:
    rope = {"rope_theta": 1e4, "original_max_position_embeddings": 256, **rope}
    config = {"max_position_embeddings": 1024, "rope_parameters": rope}
    assert Rope(config).attention_factor == pytest.approx(factor, rel=1e-8)
