"""Configs are read and written in both dialects: the window, the scale, and what every reader makes of an extension."""

from copy import deepcopy
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import refused
from pi_lora.errors import ScalingError
from pi_lora.scaling.config import full_attention_rope, local_window, read_rope, with_legacy_rope_keys
from pi_lora.scaling.extension import Extension, extend_config
from pi_lora.scaling.rope import Rope, normalize_max_positions
from pi_lora.scaling.scalings import Method

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
BASES = [LLAMA_5, LLAMA_4, GEMMA]
windows = st.integers(16, 8192)


@pytest.mark.parametrize("base", [LLAMA_5, LLAMA_4])
def test_pi_writes_both_dialects_and_keeps_theta(base: dict[str, Any]) -> None:
    before = deepcopy(base)
    extended = extend_config(base, Extension(16384, 2048))
    assert extended["rope_parameters"] == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
    assert extended["rope_theta"] == 10000.0
    assert extended["rope_scaling"] == {"type": "linear", "rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}
    assert extended["max_position_embeddings"] == 2048
    assert Rope(extended).window == 16384
    assert base == before


def test_direct_declares_the_window_and_rescales_nothing() -> None:
    extended = extend_config(LLAMA_5, Extension(8192, 2048, "direct"))
    assert Rope(extended).scale == 1
    assert extended["rope_scaling"] is None
    assert Rope(extended).window == 8192


@given(windows, st.integers(1, 100_000))
def test_the_extended_window_is_the_target_and_the_original_stays(original: int, more: int) -> None:
    target = original + more
    extended = extend_config({**LLAMA_5, "max_position_embeddings": original}, Extension(target, original))
    assert Rope(extended).window == target
    assert extended["max_position_embeddings"] == original


DEEPSEEK_V3 = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
# Of configs on the hub: what they declare, their scaling, their tokenizer's limit, and the window that they mean.
PUBLISHED = {
    "deepseek-ai/deepseek-coder-6.7b-base": (16384, {"type": "linear", "factor": 4.0}, 16384, 16384),
    "lmsys/vicuna-7b-v1.5-16k": (4096, {"type": "linear", "factor": 4.0}, 16384, 16384),
    "Yukang/Llama-2-7b-longlora-32k-ft": (4096, {"type": "linear", "factor": 8.0}, None, 32768),
    "deepseek-ai/DeepSeek-V3": (163840, DEEPSEEK_V3, 131072, 163840),
    # As their cards say how to extend them.
    "Qwen/Qwen2.5-7B": (32768, {"type": "yarn", "factor": 4.0}, 131072, 131072),
    "meta-llama/Llama-3.1-8B": (131072, {"rope_type": "llama3", "factor": 8.0}, None, 131072),
    "google/gemma-3-4b-pt": (131072, {"rope_type": "linear", "factor": 8.0}, None, 131072),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_window_is_read_as_each_architecture_defines_it(name: str) -> None:
    declared, scaling, longest_input, window = PUBLISHED[name]
    config = {"model_type": "llama", "max_position_embeddings": declared, "rope_theta": 1e5, "rope_scaling": scaling}
    if "gemma" in name:
        config |= {"model_type": "gemma3_text", "rope_local_base_freq": 1e4}
    read = normalize_max_positions(config, longest_input)
    assert Rope(read).window == window
    if Rope(read).method == "pi":
        extended = extend_config(read, Extension(2 * window, window))
        assert (Rope(extended).window, Rope(extended).scale) == (2 * window, 2 * Rope(config).scale)


def test_per_layer_ropes_change_on_full_attention_only() -> None:
    extended = extend_config(GEMMA, Extension(32768, 8192))
    assert extended["rope_parameters"]["full_attention"] == {
        "rope_type": "linear",
        "rope_theta": 1e6,
        "factor": 4.0,
    }
    assert extended["rope_parameters"]["sliding_attention"] == GEMMA["rope_parameters"]["sliding_attention"]
    assert extended["rope_local_base_freq"] == 1e4
    old_reader = {key: value for key, value in extended.items() if key != "rope_parameters"}
    assert read_rope(old_reader) == extended["rope_parameters"]


def test_dynamic_is_written_in_every_dialect() -> None:
    """Engines multiply `max_position_embeddings` by the factor, and transformers rescales beyond it: it stays L."""
    extended = extend_config(LLAMA_5, Extension(8192, 2048, "dynamic"))
    assert extended["rope_parameters"] == {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    assert extended["rope_scaling"] == {"type": "dynamic", "rope_type": "dynamic", "factor": 4.0}
    assert extended["max_position_embeddings"] == 2048


def test_yarn_is_written_in_every_dialect() -> None:
    """transformers 4 divides `max_position_embeddings` by the original, and SGLang reads it as it is: it is L'."""
    extended = extend_config(LLAMA_5, Extension(8192, 2048, "yarn"))
    parameters = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert extended["rope_parameters"] == {**parameters, "rope_theta": 10000.0}
    assert extended["rope_scaling"] == {"type": "yarn", **parameters}
    assert extended["max_position_embeddings"] == 8192


@given(
    st.sampled_from(["pi", "yarn", "theta", "llama3", "dynamic"]),
    windows,
    st.integers(1, 100_000),
    st.sampled_from(BASES),
)
def test_every_method_declares_target_and_scale_in_both_dialects(
    method: Method, original: int, more: int, base: dict[str, Any]
) -> None:
    target = original + more
    small = {**base, "max_position_embeddings": original, "head_dim": 16}
    extended = extend_config(small, Extension(target, original, method))
    old_reader = {key: value for key, value in extended.items() if key != "rope_parameters"}
    for config in (extended, old_reader):
        assert Rope(config).window == target
        assert Rope(config).scale == pytest.approx(target / original)
        assert Rope(config).method == method
    assert read_rope(old_reader) == extended["rope_parameters"]
    assert with_legacy_rope_keys(old_reader) == with_legacy_rope_keys(extended) == extended


@given(st.sampled_from(get_args(Method)), st.integers(1, 512), st.integers(1, 512))
def test_an_extended_config_is_recognized_as_an_extension_of_its_base(
    method: Method, more: int, even_more: int
) -> None:
    base = {**LLAMA_5, "max_position_embeddings": 64, "head_dim": 16}
    factors = (1.0,) * 7 + (4.0,) if method == "factors" else None
    run = extend_config(base, Extension(64 + more, 64, method, factors=factors))
    assert Rope(run).extends(Rope(base))
    further = extend_config(base, Extension(64 + more + even_more, 64))
    interpolated = extend_config(base, Extension(64 + more, 64))
    assert Rope(further).extends(Rope(interpolated))
    assert not Rope(interpolated).extends(Rope(further))
    assert Rope(run).extends(Rope(interpolated)) == (method == "pi")


@pytest.mark.parametrize("method", ["dynamic", "yarn", "llama3"])
def test_an_interpolated_base_is_refused_with_the_scalings_that_fit(method: Method) -> None:
    once = extend_config(LLAMA_5, Extension(4096, 2048))
    with refused(ScalingError, f"scaling: {method}", "linear", "pi", "theta", "direct"):
        extend_config(once, Extension(8192, 4096, method))


def test_phi3_is_interpolated_as_longrope() -> None:
    base = {**LLAMA_5, "model_type": "phi3", "hidden_size": 64, "num_attention_heads": 4}
    with refused(ScalingError, "scaling: yarn", "phi3", "pi", "theta", "factors"):
        extend_config(base, Extension(4096, 2048, "yarn"))
    once = extend_config(base, Extension(4096, 2048))
    assert once["rope_scaling"] == {"type": "longrope", "short_factor": [2.0] * 8, "long_factor": [2.0] * 8}
    assert once["max_position_embeddings"] == once["original_max_position_embeddings"] == 4096
    # vLLM multiplies cosines by a factor that it derives from the two windows.
    assert once["rope_parameters"]["original_max_position_embeddings"] == 4096
    twice = extend_config(once, Extension(16384, Rope(once).window))
    assert (Rope(twice).scale, Rope(twice).window, Rope(twice).method) == (8, 16384, "pi")


@pytest.mark.parametrize("method", ["pi", "yarn", "theta", "factors"])
def test_sections_for_time_height_and_width_stay_for_every_reader(method: Method) -> None:
    """vLLM reads positions of images by them; transformers 5 prefers `rope_scaling`."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}
    base = {**LLAMA_5, "hidden_size": 64, "num_attention_heads": 4, "rope_parameters": rope}
    factors = (1.0,) * 7 + (4.0,) if method == "factors" else None
    extended = extend_config(base, Extension(8192, 2048, method, factors=factors))
    assert extended["rope_scaling"]["mrope_section"] == extended["rope_parameters"]["mrope_section"] == [4, 2, 2]


@pytest.mark.parametrize("base", [LLAMA_5, GEMMA])
@pytest.mark.parametrize("name", ["default", "mrope"])
def test_the_name_of_a_rope_in_transformers_4_changes_with_it(base: dict[str, Any], name: str) -> None:
    """Qwen2-VL has `"type": "mrope"`, which transformers 5 keeps beside the `rope_type`, and which 4 prefers."""
    nested = deepcopy(base["rope_parameters"])
    nested.get("full_attention", nested)["type"] = name
    extended = extend_config({**base, "rope_parameters": nested}, Extension(16384, 8192, "yarn"))
    assert extended["rope_scaling"]["type"] == extended["rope_scaling"]["rope_type"] == "yarn"
    rope = extended["rope_parameters"]
    assert "type" not in rope.get("full_attention", rope)


def test_divisors_that_divide_nothing_are_refused_as_such() -> None:
    with refused(ScalingError, "scaling: factors: divides no frequency"):
        extend_config({**LLAMA_5, "head_dim": 16}, Extension(4096, scaling="factors", factors=(1.0,) * 8))


def test_zamba_rotates_the_heads_of_its_attention() -> None:
    config = {**LLAMA_5, "attention_head_dim": 32, "hidden_size": 64, "num_attention_heads": 4}
    assert Rope(config).dimensions == (32, 32)


def test_ropes_per_layer_type_unknown_to_transformers_4_get_no_top_level_fields() -> None:
    """transformers 5 would give a top-level `rope_scaling` to the sliding layers too, or replace both ropes by it."""
    extended = extend_config({**GEMMA, "model_type": "mimo_v2_flash"}, Extension(32768, 8192))
    assert Rope(extended).scale == 4
    assert not {"rope_scaling", "rope_theta", "rope_local_base_freq"} & extended.keys()


@pytest.mark.parametrize("method", ["pi", "dynamic"])
def test_olmo_in_transformers_4_reads_two_fields(method: Method) -> None:
    extended = extend_config({**LLAMA_5, "model_type": "olmo2"}, Extension(4096, 2048, method))
    assert extended["rope_scaling"] == {"type": {"pi": "linear"}.get(method, method), "factor": 2.0}


def test_gpt_neox_gets_its_own_field_names_too() -> None:
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    extended = extend_config({**LLAMA_5, "model_type": "gpt_neox", "rope_parameters": rope}, Extension(4096, 2048))
    assert (extended["rotary_emb_base"], extended["rotary_pct"]) == (500.0, 0.5)


@pytest.mark.parametrize(
    ("fields", "reach"),
    [
        ({}, None),
        ({"sliding_window": None}, None),
        ({"sliding_window": 4096}, 4096),
        ({"sliding_window": 4096, "use_sliding_window": False}, None),
        ({"sliding_window": 4096, "layer_types": ["sliding_attention", "full_attention"]}, None),
        ({"sliding_window": 4096, "layer_types": ["sliding_attention"] * 2}, 4096),
        ({"attention_chunk_size": 8192, "layer_types": ["chunked_attention"]}, 8192),
        ({"sliding_window": 4096, "layer_types": ["full_attention"]}, None),
    ],
)
def test_the_attention_span_is_that_of_the_longest_layer(fields: dict[str, Any], reach: int | None) -> None:
    assert local_window({**LLAMA_5, **fields}) == reach


@given(st.integers(1, 16384), st.integers(2049, 16384))
def test_layers_that_attend_to_less_than_the_window_are_refused(sliding: int, target: int) -> None:
    """Others, as those of Ministral 8B, never attended to less than everything, nor do they after the extension."""
    base = {**LLAMA_5, "sliding_window": sliding}
    if sliding >= 2048:
        extended = extend_config(base, Extension(target, 2048))
        assert Rope(extended).window == target
        assert extended["sliding_window"] == max(sliding, target)
    elif sliding < target:
        with refused(ScalingError, f"context.target: {target}", sliding):
            extend_config(base, Extension(target, 2048))


@pytest.mark.parametrize("scaling", [{"factor": "4.0"}, {"factor": None}, {"factor": 4.0, "rope_theta": "1e4"}])
@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_rope_without_numbers_is_refused_in_a_line(kind: str, scaling: dict[str, Any]) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 2048, **scaling}
    key = "rope_theta" if scaling.get("rope_theta") else "factor"
    with refused(ScalingError, f"model of type llama: {key}", repr(scaling[key]), "config.json"):
        extend_config({**LLAMA_5, "rope_parameters": rope}, Extension(16384, scaling="yarn"))


def test_a_config_without_a_window_is_refused() -> None:
    with refused(ScalingError, "model of type llama", "max_position_embeddings", "config.json"):
        assert Rope({"model_type": "llama", "rope_theta": 1e4}).window


@pytest.mark.parametrize("method", ["pi", "yarn", "theta", "llama3", "dynamic", "direct"])
@pytest.mark.parametrize("dynamic", [{"factor": 6.0}, {"factor": 1.0}, {"factor": 2.0, "mscale": 1.0}])
def test_a_dynamic_base_is_extended_from_the_window_of_constant_frequencies(
    method: Method, dynamic: dict[str, Any]
) -> None:
    """Of InternLM3: transformers computes the frequencies of a plain rope in inputs of up to the declared length."""
    plain = {**LLAMA_5, "head_dim": 64}
    base = {**plain, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, **dynamic}}
    assert Rope(base).trained == 2048
    expected = extend_config(plain, Extension(16384, 2048, method))
    assert extend_config(base, Extension(16384, None, method)) == expected
    assert Rope(expected).extends(Rope(base))
    with refused(ScalingError, "context.original: 4096", 2048):
        extend_config(base, Extension(16384, 4096, method))


HUNYUAN = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0, "mscale": 1.0}


@pytest.mark.parametrize("dialect", ["rope_parameters", "rope_scaling"])
def test_an_alpha_is_a_constant_theta(dialect: str) -> None:
    """theta x alpha^(d/(d-2)): of 64 dimensions, 1e4 x 1000^(64/62)."""
    config = {**LLAMA_4, "model_type": "hunyuan_v1_dense", "head_dim": 64, dialect: HUNYUAN}
    plain = {"rope_type": "default", "rope_theta": pytest.approx(12496091.41, rel=1e-9)}
    rope = Rope(config)
    assert rope.parameters == plain
    assert (rope.window, rope.method, rope.depends_on_length) == (2048, None, False)
    assert extend_config(config, Extension(8192, None, "yarn"))["rope_parameters"] == {
        **plain,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
    }
    assert Rope({**config, "model_type": "llama"}).depends_on_length  # transformers computes no alpha there


@pytest.mark.parametrize("method", ["pi", "yarn", "theta"])
@pytest.mark.parametrize("key", ["model_max_length", "max_sequence_length", "seq_length", "n_positions", "n_ctx"])
def test_windows_under_other_names_follow_the_extension(method: Method, key: str) -> None:
    """vLLM takes `model_max_length`, or the smallest of the others."""
    base = {**LLAMA_5, "head_dim": 64, key: 2048}
    extended = extend_config(base, Extension(8192, None, method))
    assert extended[key] == extended["max_position_embeddings"]
    assert Rope(extended).window == 8192
    assert key not in extend_config({**base, key: None}, Extension(8192, None, method)) or extended[key]


def test_a_window_beside_a_shorter_one_is_that_of_command_r() -> None:
    config = {**LLAMA_5, "model_max_length": 8192}
    assert Rope(config).window == 8192
    extended = extend_config(config, Extension(32768))
    assert Rope(extended).window == 32768
    assert extended["rope_parameters"]["factor"] == 4.0


def test_dual_chunks_are_left_out_with_a_line_and_their_window_is_l() -> None:
    chunks = {"chunk_size": 1024, "local_size": 64, "original_max_position_embeddings": 1024}
    config = {**LLAMA_5, "dual_chunk_attention_config": chunks}
    extension = Extension(4096, None, "yarn")
    extended = extend_config(config, extension)
    assert "dual_chunk_attention_config" not in extended
    assert extended["rope_parameters"]["factor"] == 4.0
    [note] = extension.notes(Rope(config))
    assert "dual_chunk_attention_config" in note
    assert not list(extension.notes(Rope(LLAMA_5)))[1:]


@pytest.mark.parametrize("key", ["use_dynamic_ntk", "use_logn_attn"])
def test_positions_that_code_changes_by_the_length_are_refused(key: str) -> None:
    with refused(ScalingError, "model of type llama", key, "false"):
        extend_config({**LLAMA_5, key: True}, Extension(4096))
    assert extend_config({**LLAMA_5, key: False}, Extension(4096))


def test_an_original_window_beside_the_rope_is_that_of_the_rope() -> None:
    """transformers prefers it to the one in the rope."""
    base = {**LLAMA_5, "original_max_position_embeddings": 512}
    extended = extend_config(base, Extension(8192, 2048, "yarn"))
    rope = extended["rope_parameters"]
    assert extended["original_max_position_embeddings"] == rope["original_max_position_embeddings"] == 2048


@pytest.mark.parametrize("target", [2048, 1000])
def test_a_target_that_is_not_longer_is_refused(target: int) -> None:
    with refused(ScalingError, f"context.target: {target}", 2048):
        extend_config(LLAMA_5, Extension(target, 2048))


def test_layers_without_a_rope_have_none_in_either_dialect() -> None:
    """transformers writes null for layers that have none."""
    full = {"rope_type": "default", "rope_theta": 1e6}
    nested = {"full_attention": full, "sliding_attention": None}
    config = {"model_type": "gemma3_text", "rope_parameters": nested, "max_position_embeddings": 512}
    both = with_legacy_rope_keys(config)
    assert both["rope_parameters"] == nested
    assert both["rope_theta"] == 1e6
    assert "rope_local_base_freq" not in both


def test_a_yarn_without_its_original_window_multiplies_the_declared_one() -> None:
    rope = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": None}
    assert Rope({"model_type": "llama", "max_position_embeddings": 2048, "rope_parameters": rope}).window == 8192


@pytest.mark.parametrize("original", [None, 8192, 16384, 32768])
def test_a_scaled_base_is_extended_from_the_window_of_its_config(original: int | None) -> None:
    """`original` says how long the model was trained (DeepSeek-V2-Lite: 32,768 of 163,840); the factor follows from the
    window that the frequencies were scaled for.
    """
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 8192}
    config = {**LLAMA_5, "max_position_embeddings": 32768, "rope_parameters": rope}
    extension = Extension(65536, original, "yarn")
    extended = extend_config(config, extension)
    assert (extended["rope_parameters"]["factor"], Rope(extended).window) == (8.0, 65536)
    assert extension.original_of(Rope(config)) == (original or 32768)
    for target in (16385, 32768):
        with refused(ScalingError, f"context.target: {target}", 32768):
            extend_config(config, Extension(target, original, "yarn"))


@pytest.mark.parametrize("original", [None, 2048, 4096])
def test_searched_factors_are_multiplied_from_the_window_that_they_are_for(original: int | None) -> None:
    """As of Phi-4-mini, whose long factors are for 131,072 tokens."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 32, "long_factor": [1.0, 8.0] * 16}
    config = {**LLAMA_5, "max_position_embeddings": 4096, "head_dim": 64, "rope_parameters": rope}
    extended = extend_config(config, Extension(8192, original))
    assert extended["rope_parameters"]["long_factor"] == [2.0, 16.0] * 16
    stated = {**config, "rope_parameters": {**rope, "factor": 4.0}}
    assert extend_config(stated, Extension(8192, original))["rope_parameters"]["factor"] == 8.0
    with refused(ScalingError, "context.target: 3000", 4096):
        extend_config(config, Extension(3000, original))


def test_a_scaled_base_was_not_trained_beyond_its_window() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 8192}
    config = {**LLAMA_5, "max_position_embeddings": 32768, "rope_parameters": rope}
    with refused(ScalingError, "context.original: 40000", 32768):
        extend_config(config, Extension(65536, 40000, "yarn"))


@pytest.mark.parametrize("target", [50_000, 65_536, 100_000])
def test_a_target_that_the_factor_does_not_divide_is_reached(target: int) -> None:
    config = {**LLAMA_5, "head_dim": 64, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}
    assert target <= Rope(extend_config(config, Extension(target, None, "theta"))).window < target + 3


def test_frequencies_divided_by_one_number_are_divided_further() -> None:
    """Phi-3 under `pi`. Under a larger theta, an adapter would not be known as that of the base."""
    config = {**LLAMA_5, "model_type": "phi3", "head_dim": 64, "original_max_position_embeddings": 2048}
    once = extend_config(config, Extension(4096, None, "pi"))
    assert Rope(once).scalings == ("pi", "direct")
    twice = full_attention_rope(extend_config(once, Extension(10_000, None, "pi")))
    assert set(twice["long_factor"]) == {10_000 / 2048}


@pytest.mark.parametrize(
    ("model_type", "declared", "theta", "trained"),
    [
        ("qwen3", 40960, 1e6, 32768),
        ("qwen3", 32768, 1e6, 32768),
        ("qwen3", 40960, 5e6, 40960),
        ("qwen2", 131072, 1e6, 32768),
        ("qwen2", 131072, 1e4, 131072),  # Qwen2.5-Math, and what is distilled into it
        ("deepseek_v2", 163840, 1e4, 32768),
        ("deepseek_v2", 163840, 1e6, 163840),
        ("llama", 40960, 1e6, 40960),
    ],
)
def test_the_trained_window_is_known_by_what_a_config_says(
    model_type: str, declared: int, theta: float, trained: int
) -> None:
    config = {"model_type": model_type, "max_position_embeddings": declared, "rope_theta": theta}
    rope = Rope(config)
    assert (rope.trained, rope.original, rope.window) == (trained, trained, declared)
    assert Extension(4 * declared).original_of(rope) == trained
    assert Extension(4 * declared, declared).original_of(rope) == declared
    # An extended model of the same type is another.
    extended = extend_config({**config, "head_dim": 64}, Extension(2 * declared, scaling="yarn"))
    assert Rope(extended).trained == 2 * declared


def test_bands_may_touch() -> None:
    """As of Llama 4 Scout: a frequency is kept or divided, with nothing between."""
    bands = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    rope = {**bands, "rope_theta": 5e5, "original_max_position_embeddings": 8192}
    divisors = Rope({**LLAMA_5, "head_dim": 128, "rope_parameters": rope}).divisors
    assert {round(divisor, 6) for divisor in divisors} == {1.0, 16.0}
