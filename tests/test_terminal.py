"""Nothing but our own lines reaches the terminal, whatever the libraries below have to say.

What they say while they are imported is in the errors of the `python` fixture's server, which has to have none.
"""

import gc
import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import run_command, small_recipe
from pi_lora import terminal
from pi_lora.__main__ import main
from pi_lora.recipe.files import dump_recipe
from pi_lora.terminal import progress_bar, working
from processes import without_progress

ROOT = Path(__file__).parent.parent
DEMO = str(ROOT / "recipes" / "demo.yaml")
SMALL = ["training.steps=2", "training.global_batch_size=2", "training.per_device_batch_size=1", "training.log_every=1"]


def errors_of(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done
    return without_progress(done.stderr)


def be_the_second_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With texts and questions."""
    folder = tmp_path_factory.mktemp("terminal")
    document = "The agency found much to mend. It has since mended it. "
    (folder / "text.txt").write_text(document * 80)
    (folder / "longer_than_the_base_reads.txt").write_text(document * 30)
    rows = [{"document": document, "summary": "Much was mended."}] * 3
    (folder / "reports.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"goal": "Open a door.", "sol1": "Turn the handle.", "sol2": "Eat the handle.", "label": 0}] * 2
    (folder / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "found.json").write_text(json.dumps({"factors": [2.0] * 16, "attention_factor": 1.1}))
    return folder


@pytest.fixture(scope="module")
def run(python: str, folder: Path) -> Path:
    assert errors_of(folder, python, "-m", "pi_lora", "train", DEMO, *SMALL, "--output", "run") == ""
    return folder / "run"


@pytest.mark.parametrize(
    "command",
    [
        "train small.yaml tuning.method=full training.save_every=1 --output full",
        "eval perplexity {run} --data text.txt --windows 64,128",
        "merge {run} --output merged",
    ],
)
def test_a_command_prints_no_line_of_a_library_that_is_imported(
    command: str,
    folder: Path,
    small_model: Path,
    lora_run: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    Path("small.yaml").write_text(dump_recipe(small_recipe(small_model)))
    assert run_command(*command.format(run=lora_run).split()) == 0
    assert without_progress(capfd.readouterr().err) == ""


@pytest.mark.parametrize(
    "command",
    [
        "train {demo} {small} tuning.method=qlora --output qlora",
        "train {demo} {small} hardware.cpu_processes=2 training.save_every=1 --output two",
        "extend builtin:tiny --target 1024 --scaling factors --factors found.json --output extended",
        "eval perplexity run --data text.txt --windows 256,1024",
        "eval benchmarks run --data piqa=piqa.jsonl --tasks piqa",
        "eval summarization run --data reports.jsonl --document document --summary summary --max-new-tokens 5",
        "summarize run longer_than_the_base_reads.txt --max-new-tokens 5",
        "plan {demo}",
    ],
)
def test_a_command_prints_no_line_of_a_library(python: str, run: Path, command: str) -> None:
    if "qlora" in command:
        pytest.importorskip("bitsandbytes", reason="pip install pi-lora[qlora]")
    if "benchmarks" in command:
        pytest.importorskip("lm_eval", reason="pip install pi-lora[eval]")
    words = command.format(demo=DEMO, small=" ".join(SMALL)).split()
    assert errors_of(run.parent, python, "-m", "pi_lora", *words) == ""


def test_searched_divisors_are_tuned_and_merged_without_a_line_of_a_library(python: str, folder: Path) -> None:
    """transformers does not know the keys that vLLM reads."""
    found = ("scaling=factors", "context.factors=found.json")
    for words in (("train", DEMO, *SMALL, *found, "--output", "searched"), ("merge", "searched", "--output", "whole")):
        assert errors_of(folder, python, "-m", "pi_lora", *words) == ""


def test_the_demo_prints_no_line_of_a_library(python: str, folder: Path, run: Path) -> None:
    """Its steps, with fewer of each, beside another run in place of the released one."""
    less = "demo.SWEEP = '--windows 256,512,1024 --stride 256 --documents 1 --truncate 1024'.split(); "
    less += f"demo.PASSKEYS, demo.RELEASED = '--depths 2 --trials 1'.split(), demo.Path({str(run)!r})"
    shorter = "words = demo.train_words; "
    shorter += f"demo.train_words = lambda recipe, output, *overrides: words(recipe, output, *overrides, *{SMALL!r})"
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); import demo; {less}; {shorter}; demo.main()"
    assert errors_of(folder, python, "-c", code) == ""
    names = [line.split(" | ")[0] for line in (folder / "demo" / "table.md").read_text().splitlines()[2:]]
    assert names == ["| base, extrapolating", "| PI, untuned", "| PI, 100 steps", "| PI, released, 2 steps"]


def test_slow_work_is_announced(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "LONG", 0.05)
    for what, seconds in (("loading a", 0.3), ("loading b", 0.0)):
        with working(what):
            time.sleep(seconds)
    be_the_second_process(monkeypatch)
    with working("loading c"):
        time.sleep(0.3)
    errors = capsys.readouterr().err
    assert errors == "loading a ...\n"
    assert without_progress(errors) == ""


@dataclass
class Clock:
    """The time in seconds that progress is reported at."""

    now: float = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(terminal, "_last_line", clock.now)
    return clock


def test_progress_of_an_unknown_amount_has_no_total(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    with progress_bar("preparing examples") as progress:
        progress(1, 0, "")
        clock.now = 70
        progress(1200, 0, "")
    assert capsys.readouterr().err == "preparing examples: 1,200\n"


def test_progress_is_printed_as_lines_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """One a minute, however often the note changes, and however many bars a command has."""
    calls = (0, 0, ""), (10, 1, "loss 2"), (10.5, 2, "loss 1"), (69, 10, "loss 2"), (71, 11, "loss 2")
    for _ in range(2):
        with progress_bar("training") as progress:
            for seconds, done, note in calls:
                clock.now = seconds
                progress(done, 1011, note)
        for bar, end in (("first", 110), ("second", 140)):
            with progress_bar(bar) as progress:
                for done, seconds in enumerate((end - 30, end - 10, end)):
                    clock.now = seconds
                    progress(done, 2, "")
        be_the_second_process(monkeypatch)
    errors = capsys.readouterr().err
    assert errors.splitlines() == ["training: 10 of 1,011, 1:55:07 left, loss 2", "second: 1 of 2, 0:00:20 left"]
    assert without_progress(errors) == ""


def test_garbage_collection_is_enabled_again_after_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("pi_lora.cli.main", lambda: seen.append(gc.isenabled()))
    monkeypatch.setattr("pi_lora.__main__.QUIET", {})  # the settings of the processes that other tests start
    main()
    with working():
        seen.append(gc.isenabled())
    assert [*seen, gc.isenabled()] == [False, False, True]
