"""The remedy of a message is tried: a key, value, option or command that a message names ends well."""

import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import run_captured, run_command, small_recipe
from pi_lora.recipe.files import dump_recipe

RECIPE = """\
model: {name: 'builtin:tiny'}
context: {target: 512}
data: {source: {name: long.txt}}
training: {steps: 2, global_batch_size: 2, warmup_steps: 1}
"""
ONE_KEY = "--depths 1 --trials 1"
# A command that is refused, the part of the message that is the remedy, and the command that follows it. Words with
# blanks are quoted.
REMEDIES = {
    "mistyped key": ("show r.yaml training.stps=3", r"did you mean (\w+)\?", "show r.yaml training.{0}=3"),
    "unknown key": ("show r.yaml training.zzz=3", r"choose from (\w+),", "show r.yaml training.{0}=3"),
    "key of a section": ("show r.yaml training.rank=8", r"did you mean (\S+)\?", "show r.yaml {0}=8"),
    "key of no section": ("show r.yaml steps=3", r"did you mean (\S+)\?", "show r.yaml {0}=3"),
    "missing key": ("show noname.yaml", r": (model\.name): missing; add it", "show noname.yaml {0}=builtin:tiny"),
    "unknown value": ("show r.yaml tuning.method=lara", r"should be '(\w+)'", "show r.yaml tuning.method={0}"),
    "unknown scaling": ("show r.yaml scaling=yarnn", r"'(yarn)'", "show r.yaml scaling={0}"),
    "unknown schedule": ("show r.yaml training.schedule=x", r"'(\w+)'", "show r.yaml training.schedule={0}"),
    "no such recipe": ("show rr.yaml", r"pi-lora (recipes) lists", "{0}"),
    "keys that need another": (
        "show r.yaml data.sequence_tokens=256",
        r"set (positions): (pose)",
        "show r.yaml data.sequence_tokens=256 data.{0}={1}",
    ),
    "keys that exclude another": (
        "show r.yaml data.sequence_tokens=256",
        r"(sequence_tokens):.* or leave it out",
        "show r.yaml",
    ),
    "a stride above the window": (
        "show r.yaml 'evaluation.perplexity={data: x, windows: [256], stride: 300}'",
        r"shortest window, (\d+); lower it",
        "show r.yaml 'evaluation.perplexity={{data: x, windows: [256], stride: {0}}}'",
    ),
    "a truncation below the window": (
        "show r.yaml 'evaluation.perplexity={data: x, windows: [256], truncate: 200}'",
        r"a window of (\d+); raise it",
        "show r.yaml 'evaluation.perplexity={{data: x, windows: [256], truncate: {0}}}'",
    ),
    "a batch that does not divide": (
        "show r.yaml training.per_device_batch_size=2 training.global_batch_size=3",
        r"is not a multiple of (\d+)",
        "show r.yaml training.per_device_batch_size=2 training.global_batch_size={0}",
    ),
    "a key for GPUs that needs a package": (
        "train r.yaml training.tracking=[wandb] hardware.offload_activations=true --dry-run",
        r"(?s)offload_activations: needs a GPU; leave it out.*pip install wandb",
        "train r.yaml --dry-run",
    ),
    "too short a text to measure": (
        "train r.yaml 'evaluation.perplexity={data: short.txt}' --dry-run",
        r"(evaluation\.perplexity)\.(data): .*name longer texts",
        "train r.yaml '{0}={{{1}: long.txt}}' --dry-run",
    ),
    "an unknown GPU": (
        "new builtin:tiny --target 512 --gpu H1000 --output new.yaml",
        r"name one of (\w+),",
        "new builtin:tiny --target 512 --gpu {0} --output new.yaml",
    ),
    "a recipe that exists": (
        "new builtin:tiny --target 512 --gpu cpu --output r.yaml",
        r"another file with (--output)",
        "new builtin:tiny --target 512 --gpu cpu {0} new.yaml",
    ),
    "a new target below the window": (
        "new builtin:tiny --target 200 --gpu cpu --output new.yaml",
        r"own window of (\d+)",
        "new builtin:tiny --target {0}0 --gpu cpu --output new.yaml",
    ),
    "a probe of another model": (
        "new builtin:tiny --target 512 --gpu cpu --output new.yaml --probe probe.json",
        r"leave the option out",
        "new builtin:tiny --target 512 --gpu cpu --output new.yaml",
    ),
    "too short a context for a passkey": (
        f"eval passkey builtin:tiny --target 20 {ONE_KEY}",
        r"needs (\d+); choose a longer one",
        f"eval passkey builtin:tiny --target {{0}} {ONE_KEY}",
    ),
    "a scaling without a target": (
        f"eval passkey builtin:tiny --scaling pi {ONE_KEY}",
        r"need (--target)",
        f"eval passkey builtin:tiny --scaling pi {{0}} 512 {ONE_KEY}",
    ),
    "documents below the window": (
        "eval perplexity builtin:tiny --data short.txt",
        r"lower (--windows)",
        "eval perplexity builtin:tiny --data short.txt {0} 2",
    ),
    "an unknown scaling of extend": (
        "extend builtin:tiny --target 512 --scaling longrope --output model",
        r'Choose from: "(\w+)"',
        "extend builtin:tiny --target 512 --scaling {0} --output model",
    ),
    "an unknown dtype": (
        "generate builtin:tiny --dtype int8 --prompt x --tokens 1",
        r'Choose from: "(\w+)"',
        "generate builtin:tiny --dtype {0} --prompt x --tokens 1",
    ),
    "an extended base under another scaling": (
        "train r.yaml model.name=extended context.target=1024 --dry-run",
        r"; use (yarn)",
        "train r.yaml model.name=extended context.target=1024 scaling={0} --dry-run",
    ),
    "an extended base at its own window": (
        "train r.yaml model.name=extended scaling=yarn --dry-run",
        r"by (scaling): (keep) within",
        "train r.yaml model.name=extended {0}={1} --dry-run",
    ),
    "a target beyond a window that is kept": (
        "train r.yaml model.name=extended context.target=1024 scaling=keep --dry-run",
        r"window of extended, (\d+) tokens.* lower the target",
        "train r.yaml model.name=extended context.target={0} scaling=keep --dry-run",
    ),
    "a run to tune further": (
        "train r.yaml model.name=run context.target=128 tuning.rank=4 --dry-run",
        r"in a recipe: (scaling): (keep)",
        "train r.yaml model.name=run context.target=128 tuning.rank=4 {0}={1} --dry-run",
    ),
    "an adapter that names no base": (
        "merge nobase --output merged",
        r"with (--base) MODEL",
        "merge nobase --output merged {0} base",
    ),
    "a base to merge": ("merge builtin:tiny", r"name a (run) of lora", "merge {0} --output merged"),
}


@pytest.mark.parametrize("kind", REMEDIES)
def test_the_remedy_of_a_message_ends_well(
    kind: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(RECIPE)
    Path("noname.yaml").write_text(RECIPE.replace("name: 'builtin:tiny'", ""))
    Path("short.txt").write_text("The road.")
    Path("long.txt").write_text("The road is long and the door is open. " * 400)
    Path("probe.json").write_text('{"model": "other", "original": 64, "targets": []}')
    refused, pattern, advised = REMEDIES[kind]
    if "run" in refused + pattern or "nobase" in refused:
        lora_run: Any = request.getfixturevalue("lora_run")
        Path("base").symlink_to(request.getfixturevalue("small_model"))
        shutil.copytree(lora_run, "run")
        shutil.copytree(lora_run, "nobase")
        settings = json.loads(Path("nobase/adapter_config.json").read_text())
        Path("nobase/adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": None}))
    if "extended" in refused:
        assert run_command(*words("extend builtin:tiny --target 512 --scaling yarn --output extended")) == 0
    status, _, errors = run_captured(capsys, monkeypatch, *words(refused))
    remedy = re.search(pattern, errors)
    assert (status, bool(remedy)) == (2, True), errors
    assert remedy
    assert not Path("new.yaml").exists()
    status, _, errors = run_captured(capsys, monkeypatch, *words(advised.format(*remedy.groups())))
    assert status == 0, errors


def test_an_interrupted_run_is_resumed_as_its_message_says(
    small_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    steps = {"steps": 9, "global_batch_size": 2, "warmup_steps": 1, "log_every": 1}
    Path("r.yaml").write_text(dump_recipe(small_recipe(small_model, training=steps)))
    log = tmp_path / ".run.partial" / "training.jsonl"

    def interrupt() -> None:
        while not log.exists():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    status, _, errors = run_captured(capsys, monkeypatch, *words("train r.yaml --output run"))
    thread.join()
    assert status == 130, errors
    status, _, errors = run_captured(capsys, monkeypatch, *words("merge run --output merged"))
    remedy = re.search(r"pi-lora (train run --resume)", errors)
    assert status == 2
    assert remedy, errors
    assert run_command(*words(remedy[1])) == 0
    assert run_command(*words("merge run --output merged")) == 0


@pytest.mark.parametrize(
    "plan",
    [
        "7b_16k tuning.method=lora training.activation_checkpointing=false --gpu 48GB",
        "7b_16k tuning.method=lora --gpu 24GB",
    ],
)
def test_the_change_that_a_plan_suggests_fits(
    plan: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, _ = run_captured(capsys, monkeypatch, "plan", *words(plan))
    remedy = re.search(r"does not fit.*change that fits: (.+)", out)
    assert status == 0
    assert remedy, out
    _, changed, _ = run_captured(capsys, monkeypatch, "plan", *words(plan), *words(remedy[1]))
    assert "memory: " in changed
    assert "does not fit" not in changed


def words(command: str) -> list[str]:
    """Split a command at blanks, but those in quotes."""
    return [quoted or plain for quoted, plain in re.findall(r"'([^']*)'|(\S+)", command)]
