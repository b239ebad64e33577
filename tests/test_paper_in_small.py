"""benchmarks/paper_in_small.py: what it asks `pi-lora train` for, its tables, and all of it in a tiny shape."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "scripts")]
import torch  # noqa: E402
from small import curves, page  # noqa: E402
from small.extend import extensions, recipe_of  # noqa: E402
from small.setting import TINY, Setting  # noqa: E402


def share_that_never_turns(window: int, theta: float, width: int) -> float:
    """Of the dimensions of a head, those whose wavelength is longer than the window."""
    wavelengths = [2 * math.pi * theta ** (2 * pair / width) for pair in range(width // 2)]
    return sum(each > window for each in wavelengths) / len(wavelengths)


def test_the_base_is_a_llama_in_small() -> None:
    setting = Setting()
    with torch.device("meta"):
        model = LlamaForCausalLM(setting.config())
    assert 30e6 < sum(weight.numel() for weight in model.parameters()) < 60e6
    width = setting.hidden // setting.heads
    llama = share_that_never_turns(2048, 10000.0, LlamaConfig().hidden_size // LlamaConfig().num_attention_heads)
    assert share_that_never_turns(setting.window, setting.theta, width) == pytest.approx(llama, abs=1.5 / (width // 2))


def test_windows_double_up_to_the_target() -> None:
    assert Setting().windows(4096) == [512, 1024, 2048, 4096]


def test_recipes_tune_at_the_papers_part_of_the_rate() -> None:
    setting = Setting()
    rows = list(extensions(setting))
    assert [(row.target, row.scaling, row.method) for row in rows[:4]] == [
        (2048, "direct", "full"),
        (2048, "pi", "full"),
        (2048, "pi", "lora"),
        (2048, "pi", "qlora"),
    ]
    assert {row.target // setting.window for row in rows} == {4, 8, 16}
    for row in rows:
        recipe = recipe_of(setting, row, Path("base"), ["books", "code"], "others")
        times = 1 if row.method == "full" else 10
        assert recipe.training.learning_rate == pytest.approx(setting.rate / 15 * times)
        assert recipe.training.global_batch_size * row.target == setting.tokens_a_step
        assert recipe.evaluation.perplexity
        assert recipe.evaluation.perplexity.windows == tuple(
            512 * 2**each for each in range(row.target.bit_length() - 9)
        )
        assert sum(source.weight for source in recipe.data.source[:2]) == pytest.approx(0.4)


def test_the_tables_are_the_papers() -> None:
    steps = [
        {"step": step, "perplexity": {"512": 9.0 - step, "2048": 8.0 - step}, "k_max": 512 * step} for step in (0, 4)
    ]
    row = {"scaling": "pi", "method": "lora", "target": 2048, "steps": steps}
    base = {"perplexity": {"512": 7.0, "2048": 70.0, "4096": 700.0}, "k_max": 0}
    lines = [line for line in page.tables({"window": 512, "base": base, "rows": [row]}) if line.startswith("| ")]
    assert lines == [
        "| window | by | weights | 512 | 2,048 | 4,096 |",
        "| 512 | none |  | 7.00 | 70.00 | 700.00 |",
        "| 2,048 | PI | lora | 5.00 | 4.00 |  |",
        "| window | by | weights | 0 | 4 |",
        "| 2,048 | PI | lora | 8.00 | 4.00 |",
        "| window | by | weights | 0 | 4 |",
        "| 2,048 | PI | lora | 0 | 2,048 |",
    ]


def test_the_curves_are_a_column_for_each_target(tmp_path: Path) -> None:
    def row(scaling: str, method: str, target: int) -> dict[str, object]:
        steps = [
            {"step": step, "perplexity": {str(target): 30.0 / (1 + step)}, "k_max": target * step // 4}
            for step in range(5)
        ]
        return {"scaling": scaling, "method": method, "target": target, "steps": steps}

    ways = (("direct", "full"), ("pi", "full"), ("pi", "lora"), ("pi", "qlora"))
    picture = curves.draw({"rows": [row(*way, target) for target in (2048, 8192) for way in ways]}, tmp_path, "small")
    figure = curves.figure_of({"rows": [row(*way, target) for target in (2048, 8192) for way in ways]})
    assert picture == tmp_path / "small.png"
    assert picture.stat().st_size > 10_000
    upper, lower = figure.axes[:2], figure.axes[2:]
    assert [each.get_title() for each in upper] == ["to 2,048 tokens", "to 8,192 tokens"]
    assert [len(each.lines) for each in figure.axes] == [4] * 4
    assert list(upper[1].lines[3].get_ydata()) == [30.0 / (1 + step) for step in range(5)]
    assert list(lower[1].lines[3].get_ydata()) == [2048 * step for step in range(5)]
    assert [text.get_text() for text in figure.legends[0].texts] == ["FT, full", "PI, full", "PI, lora", "PI, qlora"]


@pytest.mark.parametrize("option", ["--text", "--held-out"])
def test_a_text_that_is_not_there_is_found_before_anything_is_made(python: str, tmp_path: Path, option: str) -> None:
    script = str(ROOT / "benchmarks" / "paper_in_small.py")
    command = [python, script, "--tiny", option, "nowhere.txt", "--output", "made"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode
    assert done.stderr.splitlines()[-1].startswith("nowhere.txt: no such file or folder")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_all_of_it_runs_in_a_tiny_shape_and_goes_on_from_what_is_there(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="pip install pi-lora[qlora]")
    command = [sys.executable, str(ROOT / "benchmarks" / "paper_in_small.py"), "--tiny", "--output", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    result = json.loads((tmp_path / "paper_in_small.json").read_text())
    assert len(result["rows"]) == 12
    assert [each["step"] for each in result["rows"][0]["steps"]] == [0, 1, 2]
    assert list(result["base"]["perplexity"]) == [str(window) for window in TINY.windows(1024)]
    run = tmp_path / "pi-lora-256"
    assert (tmp_path / "paper_in_small.png").is_file()
    assert {"README.md", "adapter_model.safetensors"} <= {file.name for file in run.iterdir()}
    made = (run / "run.json").stat().st_mtime_ns
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    assert (run / "run.json").stat().st_mtime_ns == made
