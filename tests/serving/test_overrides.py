"""The override that each engine is given for a plain base computes what the folder of `pi-lora extend` does."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from architectures import small_composite, small_config
from conftest import refused, run_captured
from pi_lora import load, override_lines
from pi_lora.errors import ModelError, PiLoraError
from pi_lora.model_ref import ModelRef
from pi_lora.models.adapter import without_known_warnings
from pi_lora.models.resolve import resolve_model
from pi_lora.models.source import ModelSource
from pi_lora.scaling.extension import Extension
from pi_lora.scaling.rope import Rope
from pi_lora.scaling.verify import attention_factors, rotary_frequencies
from random_runs import save_base, save_run
from small_configs import llama

ENGINES = ("transformers", "mlx", "vllm", "sglang", "llama.cpp")
MROPE = small_composite("qwen2_5_vl")
DIVISORS = (*(1.0,) * 3, 1.7, *(4.0,) * 4)
# The model type, and a config or the changes of a small one; the scaling; and the engines that cannot, with the way.
CASES: dict[str, tuple[PreTrainedConfig, Extension, dict[str, str]]] = {
    "pi": (llama(), Extension(256), {}),
    "yarn": (llama(), Extension(256, scaling="yarn"), {}),
    "theta": (llama(), Extension(256, scaling="theta"), {}),
    "llama3": (llama(), Extension(256, scaling="llama3"), {"llama.cpp": "pi-lora export gguf"}),
    "factors": (
        llama(),
        Extension(256, scaling="factors", factors=DIVISORS, attention_factor=1.2),
        {"llama.cpp": "pi-lora export gguf", "mlx": "vllm", "sglang": "vllm"},
    ),
    "dynamic": (llama(), Extension(256, scaling="dynamic"), dict.fromkeys(ENGINES[1:], "yarn")),
    "per_layer": (small_config("gemma3_text"), Extension(524288), {}),
    "without_head_dim": (small_config("mixtral"), Extension(262144, scaling="yarn"), {"mlx": "theta"}),
    "mrope": (MROPE, Extension(65536, scaling="yarn"), {"mlx": "theta"}),
    "mrope_theta": (MROPE, Extension(65536, scaling="theta"), {"mlx": "pi-lora extend --output"}),
    "mrope_pi": (MROPE, Extension(65536), dict.fromkeys(("vllm", "sglang", "mlx"), "theta")),
    "proportional": (small_config("gemma4_text"), Extension(524288), dict.fromkeys(ENGINES[2:], "theta")),
}


def applied(lines: list[str], engine: str, base: Path) -> Any:
    """The config of a base under an override, as vLLM, SGLang and transformers 5 apply it."""
    if engine == "transformers":
        names: dict[str, Any] = {}
        exec("\n".join(lines[:-1]), names)
        return names["config"]
    words = shlex.split(lines[0])
    entries = json.loads(words[words.index("--hf-overrides" if engine == "vllm" else "--json-model-override-args") + 1])
    config = AutoConfig.from_pretrained(base)
    for part, changes in ((config.get_text_config(), entries.pop("text_config", {})), (config, entries)):
        part.update(changes)
    return config


def check_built(config: Any, model: ModelSource) -> None:
    """What transformers builds from a config rotates as what it builds from the config of a model."""
    kind: Any = type(model.base.meta_model)
    with torch.device("meta"):
        built, expected = kind(config), kind(model.typed_config)
    wanted = rotary_frequencies(expected)
    found = rotary_frequencies(built)
    assert found.keys() == wanted.keys()
    for name, frequencies in found.items():
        torch.testing.assert_close(frequencies, wanted[name], rtol=1e-5, atol=0)
    assert attention_factors(built) == pytest.approx(attention_factors(expected), rel=1e-5)


def check_rope(config: dict[str, Any], model: ModelSource) -> None:
    """The rope of a config is that of a model."""
    rope = Rope(config)
    assert rope.scaled_frequencies == pytest.approx(model.rope.scaled_frequencies, rel=1e-5)
    assert rope.attention_factor == pytest.approx(model.rope.attention_factor, rel=1e-5)
    assert rope.window == model.window


@pytest.mark.parametrize("case", CASES)
def test_an_override_is_the_extended_model(case: str, tmp_path: Path) -> None:
    config, extension, refusals = CASES[case]
    base = tmp_path / "base"
    if case == "without_head_dim":
        config.head_dim = None
    config.save_pretrained(base)
    model = resolve_model(ModelRef(base, extension=extension))
    stored = {**model.base.config, **json.loads((base / "config.json").read_text())}
    for engine in ENGINES:
        if engine in refusals:
            with refused(ModelError, f"{base}: {engine} ", refusals[engine]):
                override_lines(model, engine)
            continue
        lines = override_lines(model, engine)
        if engine == "mlx":
            names: dict[str, Any] = {}
            exec(lines[-1].replace("model, tokenizer = load(", "given = dict(base="), names)
            merged = {**stored, **names["given"]["model_config"]}
            check_rope(merged, model)
            if case != "proportional":  # not in transformers 4
                check_rope({**merged, "rope_parameters": None}, model)
        elif engine == "llama.cpp":
            metadata = dict(pair.split("=") for pair in shlex.split(lines[0])[-1].split(","))
            numbers = {key.partition(".")[2]: value.partition(":")[2] for key, value in metadata.items()}
            rope = {
                "rope_type": numbers["rope.scaling.type"],
                "rope_theta": float(numbers["rope.freq_base"]),
                "factor": float(numbers["rope.scaling.factor"]),
                "original_max_position_embeddings": int(numbers["rope.scaling.original_context_length"]),
            }
            check_rope({**model.config, "rope_parameters": rope}, model)
            assert int(numbers["context_length"]) == model.window
        else:
            check_built(applied(lines, engine, base), model)
            assert engine == "transformers" or str(model.window) in shlex.split(lines[0])
    assert sorted(tmp_path.rglob("*")) == [base, base / "config.json"]


def test_an_adapter_is_served_on_its_base_under_its_scaling(tmp_path: Path) -> None:
    base = save_base(llama(), tmp_path / "base")
    run = save_run(base, tmp_path / "run", r=12)
    vllm, sglang = (shlex.split(override_lines(run, engine)[0]) for engine in ("vllm", "sglang"))
    assert vllm[2] == sglang[sglang.index("--model-path") + 1] == str(base)
    assert vllm[-5:] == ["--enable-lora", "--max-lora-rank", "16", "--lora-modules", f"run={run}"]
    assert sglang[-2:] == ["--lora-paths", f"run={run}"]
    check_rope({**resolve_model(base).config, **json.loads(vllm[vllm.index("--hf-overrides") + 1])}, resolve_model(run))
    names: dict[str, Any] = {}
    with without_known_warnings():
        exec("\n".join(override_lines(run, "transformers")), names)
    found = names["model"](torch.arange(100)[None]).logits
    torch.testing.assert_close(found, load(run).module(torch.arange(100)[None]).logits, rtol=1e-5, atol=1e-5)
    for engine in ("llama.cpp", "mlx"):
        with refused(ModelError, f"{run}: {engine} ", "pi-lora merge"):
            override_lines(run, engine)  # type: ignore[arg-type]
    trained = save_run(base, tmp_path / "trained", modules_to_save=["norm"])
    with refused(ModelError, f"{trained}: vllm ", "modules_to_save", "pi-lora merge"):
        override_lines(trained, "vllm")


def test_printing_needs_an_extension_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["extend", "builtin:tiny", "--target", "1k", "--scaling", "yarn"]
    status, out, _ = run_captured(capsys, monkeypatch, *words, "--print", "vllm")
    assert status == 0
    assert out.startswith("vllm serve ")
    for wrong in ([], ["--print", "tgi"], ["--print", "vllm", "--output", "folder"]):
        assert run_captured(capsys, monkeypatch, *words, *wrong)[0] == 2
    for wrong in (words[:2], words[:4]):
        assert run_captured(capsys, monkeypatch, *wrong, "--print", "vllm")[0] == 2
    with refused(PiLoraError, "engine: tgi: ", "vllm"):
        override_lines("builtin:tiny", "tgi")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
