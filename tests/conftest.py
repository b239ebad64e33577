"""Shared models and runs, made once for all tests; nothing is downloaded."""

import functools
import gc
import os
import signal
import subprocess
import sys
import sysconfig
import venv

# Set before torch and transformers are imported, which read it once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# As lm-eval sets it: a test that imports it would leave others with settings that the `python` fixture does not have.
os.environ["HF_XET_HIGH_PERFORMANCE"] = "1"
# A shell starts what runs in its background with Ctrl-C ignored, and so would be every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import jinja2
import pytest
import torch
import transformers
from hypothesis import settings
from transformers import LlamaConfig, LlamaForCausalLM

from hub import hub as hub
from hub import hub_server as hub_server
from pi_lora import api, cli
from pi_lora.data import sources
from pi_lora.errors import PiLoraError, RecipeError
from pi_lora.evaluation.probe import Probe
from pi_lora.model_ref import ModelRef
from pi_lora.models.files import BUILTIN_FOLDER
from pi_lora.models.resolve import resolve_for_training
from pi_lora.models.source import ModelSource
from pi_lora.planning.gpus import Gpu
from pi_lora.planning.training_plan import TrainingPlan, plan_training
from pi_lora.preflight import check
from pi_lora.recipe.data import Source
from pi_lora.recipe.schema import Recipe
from pi_lora.report.card import write_card
from pi_lora.training.job import TrainingJob, pack_data
from pi_lora.types import NO_PERMISSIONS, UI, Permissions, Progress, showing, silent
from processes import ImportedPython, settings_of_imports, without_progress

pytest_plugins = ["lanes"]
__all__ = ["BUILTIN", "extend", "plan_of", "refused", "run_captured", "run_command", "small_recipe", "train"]

BUILTIN = "builtin:tiny"
# As in every command, so that stderr holds the lines of pi-lora alone.
transformers.logging.disable_progress_bar()
# A machine may be busy with other tests.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


def pytest_collection_finish() -> None:
    """Spare collections what is imported: accelerate asks for one after every training, of 0.4 s otherwise."""
    gc.collect()
    gc.freeze()


find_library = sources.standard_library


@functools.cache
def library_in(folder: str, source: Source) -> sources.Table:
    """Python's own sources, found once: no test changes them, and a training looks for their 500 files four times."""
    return find_library(source)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Packed sequences go to a temporary folder, never to the user's cache; processes that tests start inherit it."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PI_LORA_CACHE", str(tmp_path_factory.mktemp("cache")))
        environment.setattr(
            sources, "standard_library", lambda source: library_in(sysconfig.get_path("stdlib"), source)
        )
        # Templates of model cards, ours and PEFT's, each of which compiles for 0.05 s at every training and merge.
        environment.setattr(jinja2.Environment, "compile", functools.cache(jinja2.Environment.compile))
        yield


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """In place of `sys.executable`: a Python that has imported the heavy libraries (see `processes`), in the processes
    that torch's launcher starts as well.
    """
    with ImportedPython(tmp_path_factory.mktemp("python"), sys.path) as imported, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHON_EXEC", imported.executable)
        yield imported.executable
        assert imported.errors.read_text() == ""
        assert imported.settings == settings_of_imports(os.environ), "a test has left settings behind"


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LLaMA of two layers with the built-in model's tokenizer, in float32, window 64."""
    folder = tmp_path_factory.mktemp("small") / "model"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((BUILTIN_FOLDER / "tiny" / name).read_bytes())
    return folder


def small_recipe(path: Path | str, /, **changes: object) -> Recipe:
    """A recipe that tunes the model at `path` for a few steps; `changes` replace whole sections."""
    sections: dict[str, object] = {
        "model": {"name": str(path)},
        "context": {"target": 128},
        "tuning": {"rank": 4},
        "data": {"source": [{"name": "builtin:stdlib"}, {"name": "builtin:recall"}]},
        "training": {
            "steps": 4,
            "learning_rate": 1e-2,
            "global_batch_size": 2,
            "per_device_batch_size": 2,
            "warmup_steps": 2,
            "activation_checkpointing": False,
            "log_every": 1,
        },
    }
    return Recipe.model_validate(sections | changes)


def train(
    recipe: Recipe,
    output: Path,
    resume: bool = False,
    progress: Progress = silent,
    permissions: Permissions = NO_PERMISSIONS,
) -> Path:
    """Check a recipe and train it."""
    source = check(recipe, output, resume=resume, permissions=permissions)
    training = TrainingJob(recipe, source, output, resume)
    return training.run(pack_data(recipe, source), progress=progress, write_card=write_card).path


def reporting(progress: Progress) -> AbstractContextManager[None]:
    """Call `progress` with the work that the functions of pi_lora do in this context."""
    return showing(UI(progress=lambda title: nullcontext(progress)))


def extend(source: ModelSource, output: Path, probe: Probe | None = None) -> Path:
    """Write an extended base, with the scores of a probe, as `pi-lora extend` does."""
    assert source.extension
    file = None
    if probe:
        file = output.with_name(f"{output.name}_probe.json")
        file.write_text(probe.model_dump_json(by_alias=True, exclude_unset=True))
    return api.extend(ModelRef(source.name, extension=source.extension), output, probe=file)


def plan_of(recipe: Recipe, gpu: Gpu) -> TrainingPlan:
    """Plan a recipe, from the shipped shape of its model if there is one."""
    return plan_training(recipe, resolve_for_training(recipe, shipped=True), gpu)


def run_command(*words: str) -> int:
    """Run `pi-lora WORDS` in this process and return its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pi-lora", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return int(ended.value.code or 0)


def run_captured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str
) -> tuple[int, str, str]:
    """Run `pi-lora WORDS` in this process and return its exit status, stdout, and stderr without lines of progress."""
    monkeypatch.setattr(sys, "argv", ["pi-lora", *words])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    captured = capsys.readouterr()
    return int(exit_.value.code or 0), captured.out, without_progress(captured.err)


@contextmanager
def refused(kind: type[PiLoraError], where: str, *names: object) -> Iterator[pytest.ExceptionInfo[PiLoraError]]:
    """The block ends in an error of this kind, of one line that begins with `where` and has all `names`: what the user
    needs, as numbers, files, options and commands. The words between them are free. In a recipe's list of mistakes, one
    line has them.
    """
    with pytest.raises(kind) as raised:
        yield raised
    lines = str(raised.value).splitlines()
    assert len(lines) == 1 or isinstance(raised.value, RecipeError), lines
    assert any(line.startswith(where) and all(str(name) in line for name in names) for line in lines), lines


@pytest.fixture(scope="session")
def lora_run(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished LoRA run from `small_model`, 64 to 128 tokens."""
    return train(small_recipe(small_model), tmp_path_factory.mktemp("runs") / "lora")


@pytest.fixture(scope="session")
def full_run(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of all weights from `small_model`, 64 to 128 tokens."""
    recipe = small_recipe(small_model, tuning={"method": "full"})
    return train(recipe, tmp_path_factory.mktemp("runs") / "full")


OLD_TRANSFORMERS = "4.57.6"


@pytest.fixture(scope="session")
def in_transformers_4(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """An environment with transformers 4: what a script with arguments prints there."""
    folder = tmp_path_factory.mktemp("transformers_4")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    packages = [f"torch=={torch.__version__.partition('+')[0]}", f"transformers=={OLD_TRANSFORMERS}"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    outside = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    version = f"import transformers; assert transformers.__version__ == '{OLD_TRANSFORMERS}', transformers.__version__"

    def run(script: str, *arguments: object) -> str:
        command = [str(python), "-c", f"{version}\n{script}", *map(str, arguments)]
        answer = subprocess.run(command, check=True, env=outside, cwd=folder, capture_output=True, text=True)
        printed: str = answer.stdout
        return printed

    return run
