"""The KV cache by the sizes of makers' configs, and by the tensors that transformers keeps."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from architectures import small_composite
from pi_lora.api import merge
from pi_lora.model_ref import ModelRef
from pi_lora.models.resolve import resolve_model
from pi_lora.scaling.extension import Extension
from pi_lora.scaling.scalings import Method
from pi_lora.serving.commands import cache_bytes, serving_lines

# Numbers a token and layer, by the papers and model cards.
CACHES = {
    "llama": ({"num_key_value_heads": 8}, 32 * 2 * 8 * 128 * 16384),
    # Latent vector and rotary key.
    "deepseek_v3": ({}, 61 * (512 + 64) * 16384),
    # Every layer slides.
    "mistral": ({"sliding_window": 4096}, 32 * 2 * 8 * 128 * 4096),
    # 5 of 30 layers attend to everything, with larger heads.
    "gemma4_text": ({}, 2 * 4 * (5 * 512 * 16384 + 25 * 256 * 512)),
    # Every fourth of 48 layers; the others are linear.
    "qwen3_next": ({}, 12 * 2 * 2 * 256 * 16384),
}


@pytest.mark.parametrize("kind", CACHES)
def test_cache_bytes_match_published_sizes(kind: str) -> None:
    changes, numbers = CACHES[kind]
    assert cache_bytes(AutoConfig.for_model(kind, **changes), 16384, 2) == 2 * numbers


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"num_hidden_layers": 2, "num_key_value_heads": 2}),
        ("gpt_neox", {"num_hidden_layers": 2}),
        ("gemma3_text", {"num_hidden_layers": 6, "head_dim": 16, "num_key_value_heads": 1, "sliding_window": 16}),
        ("gptj", {"n_layer": 2, "n_embd": 32, "n_head": 4, "rotary_dim": 8}),
    ],
)
@torch.no_grad()
def test_cache_bytes_equal_those_of_transformers(kind: str, changes: dict[str, int]) -> None:
    config = AutoConfig.for_model(kind, **{**SMALL, **changes})
    cache = DynamicCache(config=config)
    AutoModelForCausalLM.from_config(config)(input_ids=torch.zeros(1, 40, dtype=torch.long), past_key_values=cache)
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    # transformers keeps one token less of a sliding window: the newest one is added to it.
    sliding = sum(hasattr(layer, "sliding_window") for layer in cache.layers)
    assert cache_bytes(config, 40, 4) == kept + sliding * 2 * 16 * 4


@pytest.mark.parametrize(("rope_type", "served"), [("linear", False), ("yarn", True), ("default", True)])
def test_vllm_serves_mrope_under_the_scalings_that_it_computes(rope_type: str, served: bool) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 1e6, "mrope_section": [2, 1, 1], "factor": 2.0}
    changes = {"num_hidden_layers": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = AutoConfig.for_model("llama", **{**SMALL, **changes}, rope_parameters=rope)
    line, after, *_ = serving_lines(config)
    assert line.startswith("vllm serve") == served
    assert served or (line.startswith("# vllm ") and "yarn" in line)
    assert after.startswith("pi-lora check-server") == served


@pytest.mark.parametrize(("kind", "served"), [("deepseek_v3", False), ("minicpm3", True)])
def test_vllm_drops_the_divisors_of_the_latent_attention_of_deepseek(kind: str, served: bool) -> None:
    lists = {"short_factor": [2.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 1.0, **lists}
    config = AutoConfig.for_model(kind, num_hidden_layers=2, qk_rope_head_dim=8, rope_parameters=rope)
    line = serving_lines(config)[0]
    assert line.startswith("vllm serve") == served
    assert served or (line.startswith("# vllm ") and "yarn" in line)


@pytest.mark.parametrize(
    ("model_type", "scaling", "exported"),
    [
        ("llama", "yarn", True),
        ("llama", "llama3", True),
        ("llama", "factors", True),
        ("qwen3", "yarn", True),
        ("qwen3", "llama3", False),
        ("qwen3", "factors", False),
    ],
)
def test_llama_cpp_is_named_where_its_converter_keeps_the_scaling(
    model_type: str, scaling: Method, exported: bool, small_model: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(small_model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    factors = (1.0,) * 7 + (4.0,) if scaling == "factors" else None
    extension = Extension(128, scaling=scaling, factors=factors)
    lines = serving_lines(resolve_model(ModelRef(str(folder), extension=extension)).typed_config)
    assert any("llama-server" in line for line in lines) == exported
    assert lines[0].startswith("vllm serve")


@pytest.mark.parametrize(("factor", "exported"), [(1.0, True), (2.0, False)])
def test_llama_cpp_is_not_named_for_pi_of_gemma4(factor: float, exported: bool) -> None:
    config = AutoConfig.for_model("gemma4_text")
    config.rope_parameters["full_attention"]["factor"] = factor
    assert any("llama-server" in line for line in serving_lines(config)) == exported


@pytest.mark.parametrize(
    ("quantization", "exported"),
    [({"quant_method": "fp8"}, True), ({"quant_method": "bitsandbytes"}, False), ({"load_in_4bit": True}, False)],
)
def test_llama_cpp_is_not_named_for_weights_that_its_converter_refuses(
    quantization: dict[str, object], exported: bool
) -> None:
    config = AutoConfig.for_model("llama", **SMALL, num_hidden_layers=2, quantization_config=quantization)
    lines = serving_lines(config)
    assert any("llama-server" in line for line in lines) == exported
    assert any("export gguf" in line for line in lines) == exported
    assert lines[0].startswith("vllm serve")


def test_a_composite_is_exported_without_towers() -> None:
    lines = serving_lines(small_composite("mistral3"))
    [comment] = [line for line in lines if line.startswith("# the GGUF")]
    assert lines[lines.index(comment) + 1].startswith("pi-lora export gguf")
    assert "--mmproj" in comment


def test_a_merge_prints_how_to_serve_it(lora_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "merged"
    merged = merge(lora_run, folder)
    config = resolve_model(str(folder)).config
    size = 128 * config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * config["head_dim"] * 4
    assert merged.serving == [
        f"vllm serve {folder} --max-model-len 128 --dtype float32",
        f"pi-lora check-server http://localhost:8000 {folder}",
        f"pi-lora export gguf {folder} --output merged.gguf --converter path/to/llama.cpp",
        "llama-server --model merged.gguf --ctx-size 128",
        f"pi-lora check-server http://localhost:8080 {folder}",
        f"# a sequence of 128 tokens takes {size / 1e6:,.0f} MB of KV cache in float32",
    ]
    assert "\nvllm serve . --max-model-len 128 --dtype float32\n" in (folder / "README.md").read_text()
