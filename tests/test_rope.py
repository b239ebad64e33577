from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi_lora.errors import ScalingError
from pi_lora.rope import (
    Interpolation,
    extend_config,
    in_both_dialects,
    interpolate_positions,
    read_rope,
    rotary_angles,
    scale_of,
    window_of,
)

LLAMA_5: dict[str, Any] = {
    "model_type": "llama",
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
LLAMA_4: dict[str, Any] = {"model_type": "llama", "max_position_embeddings": 2048, "rope_theta": 10000.0}
GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text",
    "max_position_embeddings": 8192,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
scales = st.integers(2, 32)
windows = st.integers(16, 8192)


@given(windows, scales)
def test_interpolated_positions_stay_in_the_original_window(original: int, factor: int) -> None:
    target = original * factor
    scale = Interpolation("pi", original, target).scale
    first, last = interpolate_positions([0, target - 1], scale)
    assert first == 0
    assert last < original


@given(st.floats(0, 1e5), st.sampled_from([2, 16, 64, 128]), st.floats(10, 1e6))
def test_scale_one_is_the_identity(position: float, head_dim: int, theta: float) -> None:
    assert rotary_angles(position, head_dim, theta, 1.0) == rotary_angles(position, head_dim, theta)


@given(st.integers(0, 1024), scales, st.sampled_from([16, 64]))
def test_position_m_under_scale_s_has_the_angles_of_m_over_s(position: int, scale: int, head_dim: int) -> None:
    scaled = rotary_angles(position, head_dim, 500.0, scale)
    assert scaled == pytest.approx(rotary_angles(position / scale, head_dim, 500.0))
    assert len(scaled) == head_dim // 2


@pytest.mark.parametrize("base", [LLAMA_5, LLAMA_4])
def test_pi_writes_both_dialects_and_keeps_theta(base: dict[str, Any]) -> None:
    extended = extend_config(base, Interpolation("pi", 2048, 16384))
    assert extended["rope_parameters"] == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
    assert extended["rope_theta"] == 10000.0
    assert extended["rope_scaling"] == {"type": "linear", "rope_type": "linear", "factor": 8.0}
    assert extended["max_position_embeddings"] == 2048
    assert window_of(extended) == 16384
    assert base in (LLAMA_5, LLAMA_4)


def test_both_dialects_read_the_same() -> None:
    extended = extend_config(LLAMA_5, Interpolation("pi", 2048, 8192))
    old_reader = {key: value for key, value in extended.items() if key != "rope_parameters"}
    assert read_rope(old_reader) == read_rope(extended)


def test_direct_declares_the_window_and_rescales_nothing() -> None:
    extended = extend_config(LLAMA_5, Interpolation("direct", 2048, 8192))
    assert scale_of(extended) == 1
    assert extended["rope_scaling"] is None
    assert window_of(extended) == 8192


def test_a_linear_base_multiplies() -> None:
    once = extend_config(LLAMA_5, Interpolation("pi", 2048, 4096))
    twice = extend_config(once, Interpolation("pi", window_of(once), 16384))
    assert scale_of(twice) == 8
    assert window_of(twice) == 16384


@given(windows, st.integers(1, 100_000))
def test_the_extended_window_is_the_target_and_the_original_stays(original: int, more: int) -> None:
    target = original + more
    extended = extend_config({**LLAMA_5, "max_position_embeddings": original}, Interpolation("pi", original, target))
    assert window_of(extended) == target
    assert extended["max_position_embeddings"] == original


def test_per_layer_ropes_change_on_full_attention_only() -> None:
    extended = extend_config(GEMMA, Interpolation("pi", 8192, 32768))
    assert extended["rope_parameters"]["full_attention"] == {
        "rope_type": "linear",
        "rope_theta": 1e6,
        "factor": 4.0,
    }
    assert extended["rope_parameters"]["sliding_attention"] == GEMMA["rope_parameters"]["sliding_attention"]
    assert extended["rope_local_base_freq"] == 1e4
    old_reader = {key: value for key, value in extended.items() if key != "rope_parameters"}
    assert read_rope(old_reader) == extended["rope_parameters"]


@pytest.mark.parametrize("kind", ["yarn", "llama3", "longrope", "dynamic"])
def test_other_scalings_are_refused_with_the_reason(kind: str) -> None:
    stretched = {**LLAMA_5, "rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}}
    with pytest.raises(ScalingError, match=f"rope_type {kind}: .*already stretched"):
        extend_config(stretched, Interpolation("pi", 2048, 8192))


def test_a_model_without_rotary_embeddings_is_refused() -> None:
    with pytest.raises(ScalingError, match="gpt2: has no rotary"):
        in_both_dialects({"model_type": "gpt2", "n_positions": 1024})


@pytest.mark.parametrize("target", [2048, 1000])
def test_a_target_that_is_not_longer_is_refused(target: int) -> None:
    with pytest.raises(ScalingError, match=f"{target} is not longer than the model's own window of 2048"):
        Interpolation("pi", 2048, target)
