"""`pi-lora export gguf` with scripts that stand for llama.cpp's converter; test_engines.py has the real one."""

from pathlib import Path

import gguf
import pytest
from random_runs import put_on_hub

from pi_lora import cli
from pi_lora.errors import ModelError, RunExistsError
from pi_lora.merging.llama_cpp import CONVERTER, export_gguf

# What llama.cpp's converter writes about positions, and one tensor; a case replaces some of it.
STANDS_FOR = """
import json, sys, gguf, numpy as np
folder, file, kind = sys.argv[1], sys.argv[3], sys.argv[5]
config = json.load(open(folder + "/config.json"))
rope = config["rope_parameters"]
says = {{"type": rope["rope_type"], "factor": rope.get("factor"), "theta": rope["rope_theta"]}}
says.update({changes})
writer = gguf.GGUFWriter(file, "llama")
writer.add_context_length(config["max_position_embeddings"])
writer.add_rope_freq_base(says["theta"])
if says["type"] != "default":
    writer.add_rope_scaling_type(gguf.RopeScalingType(says["type"]))
    writer.add_rope_scaling_factor(says["factor"])
writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""


def converter(folder: Path, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    script = folder / CONVERTER
    script.write_text(STANDS_FOR.format(changes=changes))
    return script


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_CPP", raising=False)


def test_a_run_is_merged_converted_and_gets_its_window(
    lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    converter(tmp_path / "sources")
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path / "sources"))
    output = tmp_path / "out" / "model.gguf"
    assert not cli.app(["export", "gguf", str(lora_run), "--output", str(output)], result_action="return_value")
    reader = gguf.GGUFReader(output)
    said = {key: reader.get_field(f"llama.{key}").contents() for key in ("context_length", "rope.scaling.type")}
    assert said == {"context_length": 128, "rope.scaling.type": "linear"}
    assert list(output.parent.iterdir()) == [output]
    printed = capsys.readouterr().out
    assert (
        "checked: rope.scaling.type linear, rope.scaling.factor 2.0, rope.freq_base 500.0, context_length 128"
        in printed
    )
    assert f"{output}: written for llama.cpp" in printed
    with pytest.raises(RunExistsError, match="already exists and is not overwritten"):
        export_gguf(str(lora_run), output)


def test_full_weights_are_converted_as_they_are(full_run: Path, small_model: Path, tmp_path: Path) -> None:
    script = converter(tmp_path / "sources")
    exported, *_ = export_gguf(str(full_run), tmp_path / "tuned.gguf", script)
    values = "rope.scaling.type linear, rope.scaling.factor 2.0, rope.freq_base 500.0, context_length 128"
    assert exported == f"checked: {values}"
    plain, *_ = export_gguf(str(small_model), tmp_path / "plain.gguf", script)
    assert plain == "checked: rope.freq_base 500.0, context_length 64"


def test_full_weights_on_the_hub_are_downloaded(
    full_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_hub(full_run, "you/model", tmp_path / "hub", monkeypatch)
    exported, *_ = export_gguf("you/model", tmp_path / "model.gguf", converter(tmp_path / "sources"))
    assert exported.endswith("context_length 128")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "default"}, "rope.scaling.type is missing; rope.scaling.factor is missing"),
        ({"factor": 4.0}, "rope.scaling.factor is 4.0"),
        ({"theta": 10000.0}, "rope.freq_base is 10000.0"),
    ],
)
def test_a_file_that_is_another_model_is_not_kept(
    changes: dict[str, object], message: str, full_run: Path, tmp_path: Path
) -> None:
    script = converter(tmp_path / "sources", **changes)
    with pytest.raises(ModelError) as caught:
        export_gguf(str(full_run), tmp_path / "out" / "model.gguf", script)
    assert str(caught.value) == f"{full_run}: the converter wrote another model, which is not kept: {message}"
    assert list((tmp_path / "out").iterdir()) == []


def test_a_missing_or_failing_converter_is_one_line(full_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no such converter; it is in llama\.cpp's repository .* --converter"):
        export_gguf(str(full_run), tmp_path / "model.gguf", tmp_path)
    script = converter(tmp_path / "sources")
    script.write_text("import a_package_that_nobody_has")
    with pytest.raises(ModelError, match=r"ModuleNotFoundError: No module named .*; see what it needs") as caught:
        export_gguf(str(full_run), tmp_path / "model.gguf", script)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "model.gguf").exists()
