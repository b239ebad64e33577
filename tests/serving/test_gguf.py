"""`pi-lora export gguf` with scripts that stand for llama.cpp's converter; test_engines.py has the real one."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from transformers import AutoConfig

import pi_lora
from pi_lora import cli
from pi_lora.errors import ModelError, RunExistsError
from pi_lora.model_ref import ModelRef
from pi_lora.models.resolve import resolve_model
from pi_lora.scaling.extension import Extension
from pi_lora.scaling.rope import Rope
from pi_lora.scaling.scalings import Method
from pi_lora.serving.gguf import CONVERTER, _has_scaling, export_gguf, find_converter
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
    assert not cli.run(["export", "gguf", str(lora_run), "--output", str(output)])
    assert read(output, "llama.context_length", "llama.rope.scaling.type", "outtype") == [128, "linear", "f32"]
    assert list(output.parent.iterdir()) == [output]
    printed = capsys.readouterr().out
    assert f"{output}: written for llama.cpp, with a window of 128 tokens" in printed
    assert f"llama-server --model {output} --ctx-size 128" in printed
    with pytest.raises(RunExistsError, match="already exists and is not overwritten"):
        find_converter(resolve_model(str(lora_run)), output)


def test_a_run_is_converted_on_a_base_that_moved(
    lora_run: Path, small_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(lora_run, tmp_path / "run"))
    for name in ("run.json", "adapter_config.json"):
        text = (run / name).read_text()
        (run / name).write_text(text.replace(str(small_model), str(tmp_path / "moved away")))
    sources = converter(tmp_path / "sources").parent
    output = tmp_path / "model.gguf"
    words = ["export", "gguf", str(run), "--output", str(output), "--converter", str(sources)]
    with pytest.raises(ModelError, match="say where it is with --base MODEL"):
        cli.run(words)
    assert not cli.run([*words, "--base", str(small_model)])
    assert read(output, "llama.context_length") == [128]
    printed = capsys.readouterr().out
    assert f"{output}: written for llama.cpp" in printed
    assert f"pi-lora check-server http://localhost:8080 {run} --base {small_model}\n" in printed


def test_a_run_on_a_changed_base_is_converted_if_that_is_allowed(lora_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(lora_run, tmp_path / "run"))
    metadata = json.loads((run / "run.json").read_text())
    metadata["origin"]["weights"] = "0" * 64
    (run / "run.json").write_text(json.dumps(metadata))
    sources = converter(tmp_path / "sources").parent
    words = ["export", "gguf", str(run), "--converter", str(sources), "--output", str(tmp_path / "model.gguf")]
    with pytest.raises(ModelError, match="or use these with --allow-mismatch"):
        cli.run(words)
    assert not cli.run([*words, "--allow-mismatch"])


def test_full_weights_on_the_hub_are_downloaded(
    full_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_hub(full_run, "you/model", tmp_path / "hub", monkeypatch)
    export_gguf(resolve_model("you/model"), tmp_path / "model.gguf", converter(tmp_path / "sources"), "bf16")
    assert read(tmp_path / "model.gguf", "llama.context_length", "outtype") == [128, "bf16"]


def test_a_scaling_that_the_converter_drops_is_refused(small_model: Path, tmp_path: Path) -> None:
    found = resolve_model(ModelRef(str(small_model), extension=Extension(128, scaling="dynamic")))
    with pytest.raises(ModelError, match="converter drops the scaling `dynamic`; use another scaling"):
        find_converter(found, tmp_path / "model.gguf", converter(tmp_path / "sources").parent)


@pytest.mark.parametrize("scaling", ["pi", "yarn", "theta", "llama3"])
def test_a_file_without_the_scaling_of_the_model_is_not_kept(
    scaling: Method, small_model: Path, tmp_path: Path
) -> None:
    """As llama.cpp's converter writes it for Gemma 2, StableLM and Cohere."""
    extended = pi_lora.extend(
        ModelRef(str(small_model), extension=Extension(512, scaling=scaling)), output=tmp_path / "extended"
    )
    script = converter(tmp_path / "sources")
    script.write_text(script.read_text().replace('config["rope_parameters"]["rope_type"]', '"none"'))
    with pytest.raises(ModelError, match="converter drops this scaling of llama models"):
        export_gguf(resolve_model(str(extended)), tmp_path / "model.gguf", script)
    assert not list(tmp_path.glob("model.*"))


DIVISORS = [1.0, 2.0, 2.0, 2.5, 2.5, 3.0, 3.0, 3.5]


@pytest.fixture
def with_divisors(small_model: Path, tmp_path: Path) -> Path:
    """A small model under a list of divisors and a factor of the attention of 1.25."""
    extension = Extension(512, scaling="factors", factors=tuple(DIVISORS), attention_factor=1.25)
    return pi_lora.extend(ModelRef(small_model, extension=extension), tmp_path / "model")


def test_llama_cpp_gets_the_divisors_that_its_converter_drops(with_divisors: Path, tmp_path: Path) -> None:
    """Of a Llama the converter writes the type `longrope` alone, under which llama.cpp looks for other tensors."""
    file = tmp_path / "model.gguf"
    export_gguf(resolve_model(str(with_divisors)), file, converter(tmp_path / "sources"))
    assert read(file, "llama.context_length", "llama.rope.scaling.attn_factor", "outtype") == [512, 1.25, "f32"]
    reader = gguf.GGUFReader(file)
    assert not reader.get_field("llama.rope.scaling.type")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert list(tensors) == ["token_embd.weight", "rope_freqs.weight"]
    assert tensors["rope_freqs.weight"].data.tolist() == DIVISORS
    assert tensors["token_embd.weight"].data.shape == (4, 4)
    assert [path.name for path in tmp_path.glob("model.*")] == ["model.gguf"]


def test_divisors_that_llama_cpp_does_not_read_are_refused(with_divisors: Path, tmp_path: Path) -> None:
    script = converter(tmp_path / "sources")
    script.write_text(script.read_text().replace('"llama"', '"qwen3"'))
    with pytest.raises(ModelError, match="converter drops this scaling of qwen3 models"):
        export_gguf(resolve_model(str(with_divisors)), tmp_path / "model.gguf", script)
    assert not list(tmp_path.glob("model.*"))


def test_the_factor_of_the_attention_is_added_where_the_converter_writes_divisors(
    with_divisors: Path, tmp_path: Path
) -> None:
    """As llama.cpp's converter writes them for MiniCPM."""
    script = converter(tmp_path / "sources")
    named = script.read_text().replace('"llama"', '"minicpm"').replace("token_embd.weight", "rope_factors_long.weight")
    script.write_text(named)
    file = tmp_path / "model.gguf"
    export_gguf(resolve_model(str(with_divisors)), file, script)
    assert read(file, "minicpm.rope.scaling.attn_factor", "minicpm.rope.scaling.type") == [1.25, "longrope"]
    assert [tensor.name for tensor in gguf.GGUFReader(file).tensors] == ["rope_factors_long.weight"]


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "smollm3"])
def test_the_divisors_of_llama3_need_an_architecture_that_reads_them(
    architecture: str, small_model: Path, tmp_path: Path
) -> None:
    extended = pi_lora.extend(
        ModelRef(str(small_model), extension=Extension(512, scaling="llama3")), tmp_path / "model"
    )
    script = converter(tmp_path / "sources")
    named = script.read_text().replace('"llama"', f'"{architecture}"').replace("token_embd", "rope_freqs")
    script.write_text(named.replace('config["rope_parameters"]["rope_type"]', '"none"'))
    file = tmp_path / "model.gguf"
    if architecture == "llama":
        export_gguf(resolve_model(str(extended)), file, script)
        assert file.is_file()
    else:
        with pytest.raises(ModelError, match=f"converter drops this scaling of {architecture} models"):
            export_gguf(resolve_model(str(extended)), file, script)


@pytest.mark.parametrize(("written", "is_kept"), [(1.0, False), (2.0, True)])
def test_pi_of_gemma4_needs_divisors_in_the_file(written: float, is_kept: bool, tmp_path: Path) -> None:
    """The converter writes 1 for the dimensions that are rotated."""
    config = AutoConfig.for_model("gemma4_text").to_dict()
    config["rope_parameters"]["full_attention"]["factor"] = 2.0
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "gemma4")
    writer.add_tensor("rope_freqs.weight", np.array([written, 1e30], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = SimpleNamespace(config=config, rope=Rope(config))
    assert _has_scaling(gguf.GGUFReader(file), "gemma4", model) == is_kept  # type: ignore[arg-type]


def test_an_attention_factor_of_yarn_is_that_of_the_file(small_model: Path, tmp_path: Path) -> None:
    """llama.cpp multiplies `attn_factor` by 0.1 ln(factor) + 1, and reads no other factor (except for Grok)."""
    base = Path(shutil.copytree(small_model, tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.5}
    config["rope_parameters"] |= yarn
    (base / "config.json").write_text(json.dumps(config))
    extended = pi_lora.extend(ModelRef(str(base), extension=Extension(128, scaling="yarn")), tmp_path / "model")
    file = tmp_path / "model.gguf"
    export_gguf(resolve_model(str(extended)), file, converter(tmp_path / "sources"))
    [factor] = read(file, "llama.rope.scaling.attn_factor")
    assert factor == pytest.approx(1.5 / (1 + 0.1 * math.log(8)))
    assert read(file, "llama.rope.scaling.type") == ["yarn"]


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
