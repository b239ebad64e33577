"""`pi-lora export gguf` with scripts that stand for llama.cpp's converter; test_engines.py has the real one."""

import json
from pathlib import Path

import gguf
import pytest

import pi_lora
from pi_lora import cli
from pi_lora.errors import ModelError, RunExistsError
from pi_lora.models.resolve import resolve_model
from pi_lora.scaling.config import Method
from pi_lora.scaling.extension import Extension
from pi_lora.serving.gguf import CONVERTER, export_gguf, find_converter
from random_runs import put_on_hub

# What llama.cpp's converter writes about positions, and one tensor.
STANDS_FOR = """
import json, sys, gguf, numpy as np
folder, file, kind = sys.argv[1], sys.argv[3], sys.argv[5]
config = json.load(open(folder + "/config.json"))
writer = gguf.GGUFWriter(file, "llama")
writer.add_context_length(config["max_position_embeddings"])
writer.add_rope_scaling_type(gguf.RopeScalingType(config["rope_parameters"]["rope_type"]))
writer.add_string("outtype", kind)
writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""


def converter(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    script = folder / CONVERTER
    script.write_text(STANDS_FOR)
    return script


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_CPP", raising=False)


def read(file: Path, *names: str) -> list[object]:
    reader = gguf.GGUFReader(file)
    return [reader.get_field(name).contents() for name in names]


def test_a_run_is_merged_and_converted_with_its_window(
    lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    converter(tmp_path / "sources")
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path / "sources"))
    output = tmp_path / "out" / "model.gguf"
    assert not cli.app(["export", "gguf", str(lora_run), "--output", str(output)], result_action="return_value")
    assert read(output, "llama.context_length", "llama.rope.scaling.type", "outtype") == [128, "linear", "f32"]
    assert list(output.parent.iterdir()) == [output]
    printed = capsys.readouterr().out
    assert f"{output}: written for llama.cpp, with a window of 128 tokens" in printed
    assert f"llama-server --model {output} --ctx-size 128" in printed
    with pytest.raises(RunExistsError, match="already exists and is not overwritten"):
        find_converter(resolve_model(str(lora_run)), output)


def test_full_weights_on_the_hub_are_downloaded(
    full_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_hub(full_run, "you/model", tmp_path / "hub", monkeypatch)
    export_gguf(resolve_model("you/model"), tmp_path / "model.gguf", converter(tmp_path / "sources"), "bf16")
    assert read(tmp_path / "model.gguf", "llama.context_length", "outtype") == [128, "bf16"]


def test_a_scaling_that_the_converter_drops_is_refused(small_model: Path, tmp_path: Path) -> None:
    found = resolve_model(str(small_model), Extension(128, scaling="dynamic"))
    with pytest.raises(ModelError, match="converter drops the scaling `dynamic`; use another scaling"):
        find_converter(found, tmp_path / "model.gguf", converter(tmp_path / "sources").parent)


@pytest.mark.parametrize("scaling", ["pi", "yarn", "theta", "cope"])
def test_a_file_without_the_scaling_of_the_model_is_not_kept(
    scaling: Method, small_model: Path, tmp_path: Path
) -> None:
    """As llama.cpp's converter writes it for Gemma 2, StableLM and Cohere."""
    extended = pi_lora.extend(str(small_model), target=512, scaling=scaling, output=tmp_path / "extended")
    script = converter(tmp_path / "sources")
    script.write_text(script.read_text().replace('config["rope_parameters"]["rope_type"]', '"none"'))
    with pytest.raises(ModelError, match="converter drops the scaling of llama models"):
        export_gguf(resolve_model(str(extended)), tmp_path / "model.gguf", script)
    assert not list(tmp_path.glob("model.*"))


def test_a_file_without_the_factor_of_the_attention_is_not_kept(small_model: Path, tmp_path: Path) -> None:
    """As llama.cpp's converter writes it for MiniCPM."""
    divisors = tmp_path / "found.json"
    script = converter(tmp_path / "sources")
    named = script.read_text().replace("token_embd.weight", "rope_factors_long.weight")
    script.write_text(named)
    for attention_factor in (1.0, 1.25):
        divisors.write_text(json.dumps({"factors": [2.0] * 7 + [3.0], "attention_factor": attention_factor}))
        folder = tmp_path / str(attention_factor)
        pi_lora.extend(str(small_model), folder, target=512, scaling="factors", factors=divisors)
        model = resolve_model(str(folder))
        if attention_factor == 1:
            export_gguf(model, tmp_path / "kept.gguf", script)
        else:
            with pytest.raises(ModelError, match="drops the scaling of llama models, or a factor of the attention"):
                export_gguf(model, tmp_path / "model.gguf", script)
    assert [file.name for file in tmp_path.glob("*.gguf")] == ["kept.gguf"]
    with_factor = 'writer.add_string("outtype", kind)\nwriter.add_rope_scaling_attn_factors(1.25)'
    script.write_text(named.replace('writer.add_string("outtype", kind)', with_factor))
    export_gguf(model, tmp_path / "model.gguf", script)


def test_a_missing_or_failing_converter_is_one_line(full_run: Path, tmp_path: Path) -> None:
    found, file = resolve_model(str(full_run)), tmp_path / "model.gguf"
    with pytest.raises(ModelError, match=r"no such converter; it is in llama\.cpp's repository .* --converter"):
        find_converter(found, file, tmp_path)
    script = converter(tmp_path / "sources")
    begins_to_write = "import sys\nopen(sys.argv[3], 'w').write('a part')\n"
    script.write_text(f"{begins_to_write}import a_package_that_nobody_has")
    with pytest.raises(ModelError, match=r"ModuleNotFoundError: No module named .*; see what it needs") as caught:
        export_gguf(found, file, script)
    assert "\n" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"sources"}
