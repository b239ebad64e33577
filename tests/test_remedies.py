"""The remedy of a message is tried: a key, value, option or command that a message names ends well."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from conftest import run_captured

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
    if "{0}" in advised and "run" in pattern:
        lora_run: Any = request.getfixturevalue("lora_run")
        shutil.copytree(lora_run, "run")
    status, _, errors = run_captured(capsys, monkeypatch, *words(refused))
    remedy = re.search(pattern, errors)
    assert (status, bool(remedy)) == (2, True), errors
    assert remedy
    assert not Path("new.yaml").exists()
    status, _, errors = run_captured(capsys, monkeypatch, *words(advised.format(*remedy.groups())))
    assert status == 0, errors


def words(command: str) -> list[str]:
    """Split a command at blanks, but those in quotes."""
    return [quoted or plain for quoted, plain in re.findall(r"'([^']*)'|(\S+)", command)]
