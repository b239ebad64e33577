"""Commands struck at every operation on files, by SIGKILL and by signals: what is left is whole or goes on to the same
result, nothing that looks finished is not, and nothing is left locked.

`PI_LORA_STRIKES=150 pytest --all tests/faults/test_kills.py` kills so often and sends as many signals, spread over all
operations; without it a few times.
"""

import json
import os
import shutil
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import equal

from conftest import run_command, small_recipe, train
from pi_lora.api import merge
from pi_lora.recipe.files import dump_recipe
from pi_lora.recipe.schema import Recipe
from pi_lora.run import Run
from pi_lora.staging import staging_path
from processes import without_progress
from random_runs import save_run

STRIKES = int(os.environ.get("PI_LORA_STRIKES", "5"))
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What Ctrl-C is answered with at once.
ANSWER = "\nstopping after this step; Ctrl-C again stops at once\n"

# Runs a command that is struck by signal argv[3] before its operation number argv[2] on a file below argv[1], and says
# in the file argv[4] on which; 0: by none, and it says all. Files that are read count where argv[5] says so.
STRUCK = """
import os, sys
from operations import before_each
from pi_lora.__main__ import main

folder, at, signal, said, reads, *command = sys.argv[1:]
log = open(said, "w")

def strike(number, event, file):
    if number == int(at) or at == "0":
        log.write(f"{event} {file.removeprefix(folder)}\\n")
        log.flush()
    if number == int(at):
        os.kill(os.getpid(), int(signal))

sys.argv = ["pi-lora", *command]
with before_each(folder, strike, reads=reads == "yes"):
    main()
"""


def names_in(folder: Path) -> set[str]:
    return {str(each.relative_to(folder)) for each in folder.rglob("*")}


class Command(ABC):
    """A command line in a folder of its own, and what has to come of it."""

    share = 0.2  # of the strikes
    reads = "no"
    operations: list[str]

    def __init__(self, place: Path, model: Path) -> None:
        self.place, self.model = place, model

    @abstractmethod
    def arguments(self) -> list[str]:
        """The words of the command line."""

    @abstractmethod
    def check(self) -> None:
        """Look at what is left, do what a user would do then, and see that it ends as if nothing had happened."""


class Train(Command):
    share = 0.6

    def recipe(self) -> Recipe:
        steps = {**small_recipe(self.model).training.model_dump(), "steps": 4, "save_every": 1}
        text = self.place.parent / "text.txt"
        if not text.exists():
            text.write_text("".join(f"line {number} of a short text\n" for number in range(600)))
        passkey = {"depths": 1, "trials": 1}
        return small_recipe(
            self.model,
            training=steps,
            tuning={"rank": 2, "dropout": 0.1},
            data={"source": str(text)},
            evaluation={"every": 2, "passkey": passkey},
        )

    def arguments(self) -> list[str]:
        (self.place / "recipe.yaml").write_text(dump_recipe(self.recipe()))
        return ["train", "recipe.yaml", "--output", "run"]

    def reference(self) -> None:
        train(self.recipe(), self.place / "run")
        self.whole = load_file(self.place / "run" / "adapter_model.safetensors")
        self.files = names_in(self.place / "run")

    def check(self) -> None:
        output = self.place / "run"
        # The last step is measured in the finished run: what is struck meanwhile names `pi-lora eval all`.
        finished = output.exists()
        if not finished:
            train(self.recipe(), output, Run(staging_path(output)).last_checkpoint is not None)
        assert not staging_path(output).exists()
        # What is removed after the run stands under its name.
        kept = {each for each in names_in(output) if not each.startswith("checkpoints")}
        assert self.files - kept <= ({"scores/passkey-step-4.json"} if finished else set())
        assert kept <= self.files
        weights = load_file(output / "adapter_model.safetensors")
        assert weights.keys() == self.whole.keys()
        assert all(equal(weights[each], self.whole[each]) for each in weights), "other weights"
        assert [line["step"] for line in Run(output).log] == [1, 2, 3, 4]
        for file in output.glob("scores/*.json"):
            json.loads(file.read_text())


class Merge(Command):
    reads = "yes"

    def arguments(self) -> list[str]:
        if not (self.place / "adapter").exists():
            save_run(self.model, self.place / "adapter", r=2, target_modules=["q_proj"])
        return ["merge", "adapter", "--output", "merged", "--reference"]

    def reference(self) -> None:
        self.arguments()
        merge(self.place / "adapter", self.place / "merged", reference=True)
        self.whole = (self.place / "merged" / "model.safetensors").read_bytes()
        self.files = names_in(self.place / "merged")

    def check(self) -> None:
        output = self.place / "merged"
        if not output.exists():
            merge(self.place / "adapter", output, reference=True)
        assert not staging_path(output).exists()
        assert names_in(output) == self.files
        assert (output / "model.safetensors").read_bytes() == self.whole
        assert json.loads((output / "merge.json").read_text())["checks"]


class Eval(Command):
    def arguments(self) -> list[str]:
        options = "--target 128 --original 64 --depths 3 --trials 1 --json result.json"
        return ["eval", "passkey", str(self.model), *options.split()]

    def reference(self) -> None:
        self.again()
        self.whole = (self.place / "result.json").read_text()

    def again(self) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.chdir(self.place)
            patched.setenv("PI_LORA_CACHE", str(self.place / "cache"))
            assert run_command(*self.arguments()) == 0

    def check(self) -> None:
        result = self.place / "result.json"
        assert not result.exists() or result.read_text() == self.whole
        self.again()
        assert result.read_text() == self.whole
        assert not list(self.place.glob("cache/evaluations/*"))


COMMANDS: dict[str, type[Any]] = {"train": Train, "merge": Merge, "eval": Eval}


def started(python: str, command: Command, at: int, number: int) -> tuple[int, str, list[str]]:
    """Run it to its end or the strike; return its status, what it said on stderr, and the operations."""
    said = command.place.parent / "said"
    options = [str(command.place), str(at), str(number), str(said), command.reads]
    done = subprocess.run(
        [python, "-c", STRUCK, *options, *command.arguments()],
        cwd=command.place,
        env={**os.environ, "PI_LORA_CACHE": str(command.place / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, without_progress(done.stderr), said.read_text().splitlines()


def emptied(place: Path) -> None:
    for each in place.iterdir():
        if each.name == "adapter":
            continue
        shutil.rmtree(each) if each.is_dir() else each.unlink()


@pytest.fixture(scope="module", params=COMMANDS)
def command(
    request: pytest.FixtureRequest, python: str, small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Command]:
    """A command whose undisturbed result is known, and its operations."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "place").mkdir()
    made = COMMANDS[request.param](folder / "place", small_model)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PI_LORA_CACHE", str(folder / "cache"))
        made.reference()
        emptied(made.place)
        status, errors, made.operations = started(python, made, 0, 0)
        assert (status, errors) == (0, ""), errors
        made.check()
        yield made


@pytest.mark.parametrize("by", ["SIGKILL", "signals"])
def test_a_command_struck_at_any_moment_continues_to_the_same_result(by: str, command: Command, python: str) -> None:
    wanted = max(1, round(STRIKES * command.share))
    operations = len(command.operations)
    for strike in range(wanted):
        # Spread over all operations; those of signals lie between those of kills.
        at = 1 + (2 * strike + (by == "signals")) * operations // (2 * wanted)
        number = signal.SIGKILL if by == "SIGKILL" else SIGNALS[strike % 3]
        emptied(command.place)
        status, errors, on = started(python, command, at, number)
        where = f"{number.name} before operation {at} of {operations}: {' '.join(on)}"
        assert on, where
        if by == "SIGKILL":
            assert status == -number, (where, errors)
        else:
            assert status in (0, 130, -number), (where, errors)
            errors = errors.replace(ANSWER, "")
            assert errors.count("\n") <= 1, (where, errors)
            assert "Traceback" not in errors, (where, errors)
        try:
            command.check()
        except BaseException as error:
            error.add_note(where)
            raise
