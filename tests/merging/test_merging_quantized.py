"""Quantized bases: what transformers dequantizes is what an adapter is added to, and full weights are written."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

from architectures import small_config
from conftest import refused, reporting, run_command, small_recipe, train
from hub import Hub
from pi_lora.api import extend, load, merge
from pi_lora.errors import ModelError
from pi_lora.model_ref import ModelRef
from pi_lora.models.loaded import load_base
from pi_lora.models.quantized import check_loadable, dequantized
from pi_lora.models.resolve import resolve_model
from pi_lora.models.weights import read_header
from pi_lora.preflight import check
from pi_lora.scaling.extension import Extension
from random_runs import TWICE, save_base, save_run, stored
from small_configs import SIZES

NEEDS_BITSANDBYTES = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
# Rows and columns that are no multiple of what shares a scale.
LLAMA_SIZES = {**SIZES, "hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 1}
LLAMA = LlamaConfig(**LLAMA_SIZES)


def mark(folder: Path, **quantization: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "quantization_config": quantization}))


def with_bitsandbytes(folder: Path, **options: Any) -> None:
    plain = save_base(LLAMA, folder, torch.bfloat16)
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=BitsAndBytesConfig(**options)).save_pretrained(
        folder
    )


def with_fp8(folder: Path, kind: str = "llama", block: int | None = 64, **sizes: int) -> None:
    """As Qwen and DeepSeek publish theirs: every block divided by a scale of its own."""
    config = LlamaConfig(**{**LLAMA_SIZES, **sizes}) if kind == "llama" else small_config(kind)
    config.vocab_size = 1024
    save_base(config, folder, torch.bfloat16)
    tensors = {}
    for name, weight in stored(folder).items():
        tensors[name] = weight
        if name.endswith("_proj.weight"):
            rows, columns = weight.shape
            shape = (-(-rows // block), -(-columns // block)) if block else (1, 1)
            scales = torch.rand(shape) * 0.001 + 0.0001
            tensors[name] = (torch.randn(rows, columns) * 100).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales if block else scales.reshape(())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    size = [block, block] if block else None
    mark(folder, quant_method="fp8", activation_scheme="dynamic", weight_block_size=size)


def with_mxfp4(folder: Path) -> None:
    config: Any = small_config("gpt_oss")
    config.vocab_size = 1024
    config.rope_parameters = {**config.rope_parameters, "factor": 4.0, "original_max_position_embeddings": 16}
    save_base(config, folder, torch.bfloat16)
    tensors = {}
    for name, weight in stored(folder).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, rows, columns = weight.shape
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, columns, rows // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 121, (experts, columns, rows // 32), dtype=torch.uint8)
        else:
            tensors[name] = weight
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    mark(folder, quant_method="mxfp4", modules_to_not_convert=["self_attn", "lm_head", "router", "embed_tokens"])


ADAPTER: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 4}
FOUR_BIT = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
KINDS: dict[str, Callable[[Path], None]] = {
    "nf4": lambda folder: with_bitsandbytes(folder, **FOUR_BIT, bnb_4bit_use_double_quant=True),
    "nf4, scales in float32": lambda folder: with_bitsandbytes(folder, **FOUR_BIT),
    "nf4, stored as bfloat16": lambda folder: with_bitsandbytes(
        folder, **FOUR_BIT, bnb_4bit_quant_storage=torch.bfloat16
    ),
    "nf4, stored as float32": lambda folder: with_bitsandbytes(
        folder, **FOUR_BIT, bnb_4bit_quant_storage=torch.float32
    ),
    "int8": lambda folder: with_bitsandbytes(folder, load_in_8bit=True),
    "fp8": with_fp8,
    "fp8, one block that is cut": lambda folder: with_fp8(folder, intermediate_size=40),
    "fp8, one scale": lambda folder: with_fp8(folder, block=None),
    "fp8 experts": lambda folder: with_fp8(folder, "qwen3_moe", 16),
    "mxfp4": with_mxfp4,
}


@pytest.fixture(params=[pytest.param(kind, marks=NEEDS_BITSANDBYTES if "nf4" in kind else ()) for kind in KINDS])
def base(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Several blocks a matrix, whose rows are no multiple of what shares a scale.
    monkeypatch.setattr("pi_lora.models.weights.BLOCK", 1000 if request.param in ("fp8 experts", "mxfp4") else 5000)
    KINDS[request.param](tmp_path / "base")
    return tmp_path / "base"


def weight_of(module: Any, name: str) -> torch.Tensor:
    """A weight as the library dequantizes it, before it is rounded."""
    weight = module.get_parameter(name)
    if hasattr(weight, "quant_state"):
        from bitsandbytes.functional import dequantize_4bit

        weight.quant_state.dtype = torch.float32
        return torch.as_tensor(dequantize_4bit(weight.data, weight.quant_state))
    if weight.dtype == torch.int8:
        return weight.data.float() * weight.SCB[:, None] / 127
    return torch.as_tensor(weight)


@torch.no_grad()
def test_an_adapter_is_merged_into_the_dequantized_base(base: Path, tmp_path: Path) -> None:
    source = resolve_model(str(base))
    check_loadable(source.base, source.base.read_weights())
    module = load_base(source, torch.float32)
    for name, weight in dequantized(source.base.read_weights(), source.config).items():
        if name in module.state_dict():
            blocks = torch.cat([block.flatten() for block in weight.blocks()])
            torch.testing.assert_close(blocks.float(), weight_of(module, name).float().flatten(), rtol=1e-6, atol=0)
    kind = source.config["model_type"]
    run = save_run(base, tmp_path / "run", Extension(128, scaling="yarn") if kind == "gpt_oss" else TWICE, **ADAPTER)
    merged = merge(run, tmp_path / "merged", check="logits")
    assert any("logits" in line for line in merged.lines)
    config = json.loads((merged.folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    assert {weight.dtype for weight in stored(merged.folder).values()} == {torch.bfloat16}


@pytest.mark.parametrize(("rows", "block"), [(32, 16), (24, 16), (32, None)])
def test_stacked_experts_in_fp8_are_dequantized(
    rows: int, block: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Qwen publishes those of vision-language models. The last block of an expert may be cut, or be all of it."""
    monkeypatch.setattr("pi_lora.models.weights.BLOCK", 300)
    numbers = (torch.randn(3, rows, 48) * 50).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, 3) if block else torch.rand(3, 1, 1)
    file = tmp_path / "model.safetensors"
    save_file({"experts.gate_up_proj": numbers, "experts.gate_up_proj_scale_inv": scales}, file)
    size = [block, block] if block else None
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": size}}
    weight = dequantized(read_header(file), config)["experts.gate_up_proj"]
    of_numbers = scales.repeat_interleave(block or rows, dim=1)[:, :rows].repeat_interleave(block or 48, dim=2)
    expected = numbers.float() * of_numbers
    assert torch.equal(torch.cat(list(weight.blocks())).view(3, rows, 48), expected)
    save_file({"experts.gate_up_proj_scale_inv": scales}, file)
    with refused(ModelError, "experts.gate_up_proj: ", "scales"):
        dequantized(read_header(file), config)


@pytest.mark.parametrize("make", [with_fp8, with_mxfp4])
def test_lora_trains_on_a_base_that_transformers_dequantizes(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "base")
    recipe = small_recipe(tmp_path / "base", scaling="yarn")
    run = train(recipe, tmp_path / "run")
    assert load(str(run)).window == 128
    assert merge(run, tmp_path / "merged", check="logits").lines


def test_fp8_blocks_that_transformers_dequantizes_wrongly_are_not_loaded(tmp_path: Path) -> None:
    """A merge without a comparison of logits does not load the base; one with it is refused before it is written."""
    with_fp8(tmp_path / "base", intermediate_size=96)
    base = resolve_model(str(tmp_path / "base")).base
    headers = base.read_weights()
    name = "model.layers.0.mlp.down_proj.weight"
    run = save_run(tmp_path / "base", tmp_path / "run", **ADAPTER)
    notes: list[str] = []
    refuses: tuple[Callable[[], object], ...] = (
        lambda: check_loadable(base, headers),
        lambda: load(base.name),
        lambda: check(small_recipe(base.name), tmp_path / "trained"),
        lambda: merge(run, tmp_path / "merged", check="logits"),
    )
    for refuse in refuses:
        with (
            reporting(lambda done, total, note: notes.append(note)),
            refused(ModelError, f"{base.name}: {name}: ", 96, 64, "bfloat16"),
        ):
            refuse()
    assert "writing" not in notes
    merged = stored(merge(run, tmp_path / "merged").folder)
    blocks = torch.cat(list(dequantized(headers, base.config)[name].blocks()))
    assert torch.equal(merged[name], blocks.bfloat16())


@NEEDS_BITSANDBYTES
@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_a_quantization_config_of_weights_that_are_not_quantized_is_refused(
    bits: str, small_model: Path, tmp_path: Path
) -> None:
    base = Path(shutil.copytree(small_model, tmp_path / "base"))
    mark(base, quant_method="bitsandbytes", **{bits: True})
    refuses: tuple[Callable[[], object], ...] = (
        lambda: train(small_recipe(base), tmp_path / "run"),
        lambda: extend(ModelRef(str(base), extension=Extension(128, scaling="yarn")), tmp_path / "extended"),
        lambda: load(str(base)),
    )
    for refuse in refuses:
        with refused(ModelError, f"{base}: ", "config.json", "quantization_config"):
            refuse()


@NEEDS_BITSANDBYTES
def test_a_base_on_the_hub_is_refused_by_its_headers(small_model: Path, tmp_path: Path, hub: Hub) -> None:
    base = Path(shutil.copytree(small_model, tmp_path / "base"))
    mark(base, quant_method="bitsandbytes", load_in_8bit=True)
    hub.add("models/someone/model", base)
    with refused(ModelError, "someone/model: ", "config.json", "quantization_config"):
        check(small_recipe("someone/model"), tmp_path / "run", ask_hub=True)


def test_an_empty_quantization_config_is_none(small_model: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(small_model, tmp_path / "base"))
    mark(base)
    assert check(small_recipe(base), tmp_path / "run")
    extend(ModelRef(str(base), extension=Extension(128, scaling="yarn")), tmp_path / "extended")
    assert "quantization_config" not in json.loads((tmp_path / "extended" / "config.json").read_text())


def test_quantized_weights_whose_config_does_not_say_so_are_refused(tmp_path: Path) -> None:
    with_fp8(tmp_path / "base")
    run = save_run(tmp_path / "base", tmp_path / "run", **ADAPTER)
    file = tmp_path / "base" / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]
    file.write_text(json.dumps(config))
    with refused(ModelError, f"{tmp_path / 'base' / 'model.safetensors'}: ", "config.json", "quantization_config"):
        merge(run, tmp_path / "merged")


def test_a_quantization_that_is_not_dequantized_is_refused_with_the_original(
    small_model: Path, lora_run: Path, tmp_path: Path
) -> None:
    base = Path(shutil.copytree(small_model, tmp_path / "base"))
    mark(base, quant_method="gptq", bits=4)
    for card in ("", "---\n[no mapping\n---\n"):
        (base / "README.md").write_text(card)
        with refused(ModelError, f"{base}: ", "gptq"):
            train(small_recipe(base), tmp_path / "run")
    (base / "README.md").write_text("---\nbase_model: owner/original\n---\n")
    with refused(ModelError, f"{base}: ", "gptq", "owner/original"):
        merge(ModelRef(lora_run, base=str(base)), tmp_path / "merged")
    words = ["extend", str(base), "--target", "128", "--scaling", "yarn", "--output", str(tmp_path / "extended")]
    assert run_command(*words) == 2
    assert not (tmp_path / "extended").exists()
