"""The models that people extend: a small one of each family under every scaling that suits it."""

import functools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    GptOssConfig,
    LlamaConfig,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    SmolLM3Config,
)

from conftest import extend, refused
from pi_lora.errors import ScalingError
from pi_lora.model_ref import ModelRef
from pi_lora.models.resolve import resolve_model
from pi_lora.scaling.config import full_attention_rope
from pi_lora.scaling.extension import Extension, extend_config
from pi_lora.scaling.rope import Rope
from pi_lora.scaling.scalings import Method
from pi_lora.scaling.verify import build_on_meta, check_scaling, rotary_frequencies

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
}
LAYERS = ["sliding_attention", "full_attention"]
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
# As the makers' configs say it; the attention factor of Olmo 3 is YaRN's own for 8.
ROPES: dict[str, dict[str, Any]] = {
    "llama3": {**LLAMA3, "original_max_position_embeddings": 8192},
    "qwen": {**YARN, "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    "olmo": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        "full_attention": {
            **YARN,
            "rope_theta": 5e5,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "attention_factor": 1.2079441541679836,
        },
    },
    "deepseek": {
        **YARN,
        "rope_theta": 1e4,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "phi": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [1.0 + 5.0 * i for i in range(8)],
    },
    "gemma3": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    },
}
MIXTURE = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
FAMILIES: dict[str, PreTrainedConfig] = {
    "Llama 3": LlamaConfig(
        **{**SMALL, "max_position_embeddings": 8192}, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    ),
    "Llama 3.1": LlamaConfig(**SMALL, rope_parameters=ROPES["llama3"]),
    "Qwen 3": Qwen3Config(**SMALL, head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "Qwen 3 under YaRN": Qwen3Config(**SMALL, head_dim=16, rope_parameters=ROPES["qwen"]),
    "gpt-oss": GptOssConfig(**SMALL, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    "Olmo 3": Olmo3Config(
        **{**SMALL, "max_position_embeddings": 65536}, layer_types=LAYERS, rope_parameters=ROPES["olmo"]
    ),
    "Phi 3": Phi3Config(**{**SMALL, "max_position_embeddings": 4096}, pad_token_id=0),
    "Phi 4 mini": Phi3Config(
        **SMALL, pad_token_id=0, original_max_position_embeddings=4096, rope_parameters=ROPES["phi"]
    ),
    "SmolLM3": SmolLM3Config(**SMALL, pad_token_id=0),
    "GLM 4": Glm4Config(**{**SMALL, "max_position_embeddings": 2048}, head_dim=16, pad_token_id=0),
    "Gemma 3": Gemma3TextConfig(**SMALL, head_dim=16, layer_types=LAYERS, rope_parameters=ROPES["gemma3"]),
    "Gemma 4": Gemma4TextConfig(
        **SMALL, vocab_size_per_layer_input=64, head_dim=16, global_head_dim=32, layer_types=LAYERS
    ),
    "DeepSeek V3": DeepseekV3Config(
        **{**SMALL, "max_position_embeddings": 163840, "num_key_value_heads": 4},
        **MIXTURE,
        **LATENT,
        num_experts_per_tok=2,
        rope_parameters=ROPES["deepseek"],
    ),
}
SCALED = ("pi", "yarn", "theta", "llama3", "factors")
SUITABLE = [
    (family, method)
    for family, config in FAMILIES.items()
    for method in Rope(config.to_dict()).scalings
    if method in SCALED
]


def fourfold(config: dict[str, Any], method: Method) -> Extension:
    """To four times the window; under `factors` with a divisor of its own for each frequency, the last one huge."""
    window = Rope(config).window
    factors = None
    if method == "factors":
        factors = (*(1 + 0.5 * index for index in range(len(Rope(config).frequencies) - 1)), 1e9)
    return Extension(4 * window, window, method, factors=factors)


def extended(family: str, method: Method) -> tuple[dict[str, Any], dict[str, Any]]:
    config = FAMILIES[family].to_dict()
    return config, extend_config(config, fourfold(config, method))


@functools.cache
def plain_model(family: str) -> PreTrainedModel:
    """A family before any extension, on the meta device."""
    return build_on_meta(type(FAMILIES[family]), FAMILIES[family].to_dict())


def frequencies(model: PreTrainedModel) -> NDArray[np.float64]:
    """What transformers computes for full-attention layers."""
    found = rotary_frequencies(model)
    [values] = [each for name, each in found.items() if "original" not in name and "sliding" not in name]
    return values.double().numpy()


def formula(config: Mapping[str, Any]) -> NDArray[np.float64]:
    """The same by the papers' formulas, each written out here."""
    rope = full_attention_rope(config)
    head = config.get("qk_rope_head_dim") or config.get("head_dim") or 16
    if rope["rope_type"] == "proportional":  # the first quarter of a head's angles rotates, of 32 dimensions
        plain = rope["rope_theta"] ** -(np.arange(0, 32, 2) / 32)
        plain[4:] = 0
        return plain / rope.get("factor", 1)
    dimensions = int(head * rope.get("partial_rotary_factor", 1))
    plain = rope["rope_theta"] ** -(np.arange(0, dimensions, 2) / dimensions)
    factor, length = rope.get("factor", 1), rope.get("original_max_position_embeddings")
    match rope["rope_type"]:
        case "default":
            return plain
        case "linear":
            return plain / factor
        case "longrope":
            return plain / np.array(rope["long_factor"])
        case "llama3":
            wavelengths = 2 * math.pi / plain
            smooth = (length / wavelengths - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            smooth = np.clip(smooth, 0, 1)
            return (1 - smooth) * plain / factor + smooth * plain
        case "yarn":

            def dimension(rotations: float) -> float:
                return dimensions * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

            low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
            if rope.get("truncate", True):
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, dimensions - 1)
            ramp = np.clip((np.arange(dimensions // 2) - low) / (high - low), 0, 1)
            return plain / factor * ramp + plain * (1 - ramp)
    raise ValueError(rope["rope_type"])


def window_in_vllm(config: Mapping[str, Any]) -> int:
    """The window by the rule of vLLM's `_get_and_verify_max_len`, of the config in transformers' present dialect."""
    window, factor = config["max_position_embeddings"], 1.0
    rope = config["rope_parameters"]
    for each in rope.values() if "full_attention" in rope else [rope]:
        if "gemma3" not in config["model_type"] and each["rope_type"] not in ("su", "longrope", "llama3"):
            factor = each.get("factor", factor)
            if each["rope_type"] == "yarn":
                window = each["original_max_position_embeddings"]
    return round(window * factor)


@pytest.mark.parametrize(("family", "method"), SUITABLE)
def test_frequencies_in_transformers_equal_the_formula_of_every_suitable_scaling(family: str, method: Method) -> None:
    config, after = extended(family, method)
    window = Rope(config).window
    plain = plain_model(family)
    check_scaling(plain, config, fourfold(config, method))
    found = frequencies(build_on_meta(type(FAMILIES[family]), after))
    assert found == pytest.approx(formula(after), rel=1e-5)
    assert not np.array_equal(found, frequencies(plain))
    assert Rope(after).window == window_in_vllm(after) == 4 * window
    assert Rope(after).method == method
    assert Rope(after).scale / (Rope(config).scale if method in ("pi", "yarn", "llama3") else 1) == pytest.approx(4)


def extended_folder(family: str, folder: Path, method: Method | None = None) -> Path:
    """A base of the family with small random weights, and the folder that `extend` makes of it."""
    config = FAMILIES[family].to_dict()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(type(FAMILIES[family]).from_dict(config)).save_pretrained(folder / "base")
    method = method or ("yarn" if "yarn" in Rope(config).scalings else Rope(config).scalings[0])
    extend(resolve_model(ModelRef(str(folder / "base"), extension=fourfold(config, method))), folder / "extended")
    return folder / "extended"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_extended_folder_of_each_family_is_read_with_its_scaling(family: str, tmp_path: Path) -> None:
    folder = extended_folder(family, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert frequencies(model) == pytest.approx(formula(config), rel=1e-5)
    assert Rope(config).window == window_in_vllm(config) == 4 * Rope(FAMILIES[family].to_dict()).window
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    assert all(torch.equal(weight, base[name]) for name, weight in model.state_dict().items())


# Without a type in transformers 4: Gemma 4.
IN_4 = sorted(FAMILIES.keys() - {"Gemma 4"})
FREQUENCIES_IN_4 = """
import json, sys, torch
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    ends = ("rotary_emb", "rotary_embs.full_attention")
    [rotary] = [each for name, each in model.named_modules() if name.endswith(ends)]
    if rotary.rope_type == "longrope":
        rotary(torch.zeros(1), torch.tensor([[model.config.max_position_embeddings - 1]]))
    print(json.dumps(rotary.inv_freq.tolist()))
"""


@pytest.mark.slow
def test_transformers_4_reads_each_family_with_its_scaling(
    in_transformers_4: Callable[..., str], tmp_path: Path
) -> None:
    extensions: list[tuple[str, Method | None]] = [(family, None) for family in IN_4]
    extensions += [(family, "factors") for family in IN_4 if "factors" in Rope(FAMILIES[family].to_dict()).scalings]
    folders = [
        extended_folder(family, tmp_path / str(number), method) for number, (family, method) in enumerate(extensions)
    ]
    answer = in_transformers_4(FREQUENCIES_IN_4, *folders)
    for (family, _), folder, line in zip(extensions, folders, answer.splitlines(), strict=True):
        config = json.loads((folder / "config.json").read_text())
        assert json.loads(line) == pytest.approx(formula(config), rel=1e-5), family


@pytest.mark.parametrize("family", FAMILIES)
def test_unsuitable_scalings_are_refused_and_suitable_ones_named(family: str) -> None:
    suitable = Rope(FAMILIES[family].to_dict()).scalings
    for method in set(SCALED) - set(suitable):
        with refused(ScalingError, f"scaling: {method}", *suitable):
            extended(family, method)


def test_theta_divides_the_lowest_frequency_by_the_scale() -> None:
    for family in ("Llama 3", "GLM 4", "Gemma 4"):
        _, after = extended(family, "theta")
        before = frequencies(plain_model(family))
        scaled = frequencies(build_on_meta(type(FAMILIES[family]), after))
        rotated = before > 0
        assert scaled[rotated][-1] == pytest.approx(before[rotated][-1] / 4, rel=1e-4)
        assert scaled[0] == before[0]


def test_a_given_theta_is_written() -> None:
    config = FAMILIES["Llama 3"].to_dict()
    after = extend_config(config, Extension(65536, 8192, "theta", theta=8e6))
    assert full_attention_rope(after)["rope_theta"] == after["rope_theta"] == 8e6
    with refused(ScalingError, "context.theta", 400000, 500000):
        extend_config(config, Extension(65536, 8192, "theta", theta=4e5))


def test_the_attention_factor_of_yarn_follows_its_factor() -> None:
    _, after = extended("Olmo 3", "yarn")
    assert "attention_factor" not in full_attention_rope(after)
    own = {**FAMILIES["Qwen 3 under YaRN"].to_dict()}
    own["rope_parameters"] = {**own["rope_parameters"], "attention_factor": 0.5}
    kept = extend_config(own, Extension(262144, 131072, "yarn"))
    assert full_attention_rope(kept)["attention_factor"] == 0.5


def test_layers_without_rope_stay_without_positions() -> None:
    _, after = extended("SmolLM3", "yarn")
    assert after["no_rope_layers"] == FAMILIES["SmolLM3"].no_rope_layers


def test_short_inputs_of_a_longrope_keep_their_factors() -> None:
    config, after = extended("Phi 4 mini", "pi")
    assert after["rope_scaling"]["short_factor"] == config["rope_parameters"]["short_factor"]
    assert set(after["rope_scaling"]) == {"type", "short_factor", "long_factor"}
    assert torch.tensor(after["rope_scaling"]["long_factor"]).sum() == 4 * sum(config["rope_parameters"]["long_factor"])
