"""The whole method on the built-in model, on a CPU, in minutes: what `make demo` runs.

Tunes by Position Interpolation, for fewer steps than recipes/demo.yaml has, and measures the result beside the base
model, beside interpolation without tuning, and beside the released adapter, which was tuned for longer; merges; and
shows one table and one picture. What it prints was measured in this run; a finished run in `demo/` is measured again,
not trained again. `make reproduce NAME=methods` compares the methods.

    python scripts/demo.py --publish     also put table and picture into docs/
"""

import logging
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from timeit import repeat
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from arguments import parser_of, train_words
from machine import machine
from pages import made_on, write_block
from pi_lora import api
from pi_lora.cli import main as pi_lora
from pi_lora.drawing import Panel, figure_of, save
from pi_lora.evaluation.suite import MEASUREMENTS, read_scores
from pi_lora.models.device import has_fast_bfloat16
from pi_lora.recipe.files import load_recipe
from pi_lora.report.scores import markdown_table

ROOT = Path(__file__).parent.parent
DEMO = Path("demo")
RECIPE = ROOT / "recipes" / "demo.yaml"
RELEASED = ROOT / "adapters" / "demo"
# Steps, documents and trials for which two cores that are no faster in bfloat16 take about four minutes in all.
STEPS = 100
DOCUMENTS = 3
TRIALS = 3
# Forward passes over TARGET tokens that take as long as the training, and as long as the rest; one core, 2026-11-29.
PASSES = 720
ORIGINAL = 256
TARGET = 1024
DEPTHS = 32
STRIDE = 256
SWEEP = f"--windows 256,512,1024 --stride {STRIDE} --documents {DOCUMENTS} --truncate 4096".split()
# Neither those documents nor passkeys of this seed had a part in choosing the settings.
PASSKEYS = f"--depths {DEPTHS} --trials {TRIALS} --seed 2".split()
TO_TARGET = ["--target", str(TARGET)]
UNTUNED = ["--original", str(ORIGINAL), *TO_TARGET]
MAP = ["--targets", "512,1024"]  # lengths of the heat map

console = Console(highlight=False)


def run(*words: str) -> None:
    """Print a command of pi-lora and run it in this process, which has loaded the libraries."""
    console.print("$ pi-lora", *words, soft_wrap=True)
    sys.argv = ["pi-lora", *words]
    try:
        pi_lora()
    except SystemExit as ended:
        if ended.code == 130:  # after Ctrl-C
            console.print("to continue the demo: make demo")
        if ended.code:
            raise


def tuned() -> str:
    """Tune, unless a run is there; return the run."""
    output = DEMO / "live"
    if output.exists():
        console.print(f"{output}: trained before; remove {DEMO}/ to train again")
    else:
        run(*train_words(str(RECIPE), output, f"training.steps={STEPS}"))
    return str(output)


def measured(name: str, model: str, lengths: list[str] = TO_TARGET, extension: Sequence[str] = ()) -> list[Any]:
    """Measure perplexity and passkeys; return the scores of both, which stay in demo/scores."""
    folder = DEMO / "scores"
    folder.mkdir(parents=True, exist_ok=True)
    scores = []
    for measurement, options in (("perplexity", SWEEP), ("passkey", [*PASSKEYS, *lengths])):
        file = folder / f"{name}-{measurement}.json"
        run("eval", measurement, model, *extension, *options, "--json", str(file))
        scores.append(read_scores(file))
    return scores


def minutes_here() -> float:
    """Return the minutes that the demo takes on this machine, as busy as it is, by the time of a forward pass."""
    model = api.load("builtin:tiny", dtype="float32").module
    seconds = pass_seconds(model)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=has_fast_bfloat16()):
        seconds += pass_seconds(model)
    return PASSES * seconds / 60


@torch.no_grad()
def pass_seconds(model: Any) -> float:
    """Return the median seconds of a forward pass over TARGET tokens."""
    tokens = torch.zeros(1, TARGET, dtype=torch.long, device=model.device)
    return median(repeat(lambda: model(input_ids=tokens), number=1))


def show(models: dict[str, list[Any]]) -> None:
    """Print and keep one table and one picture."""
    head = ["model", "perplexity at 256", "perplexity at 512", "perplexity at 1024", "k_max"]
    rows = []
    for name, (perplexity, passkey) in models.items():
        rows.append([name, *(f"{window.perplexity:.2f}" for window in perplexity.windows), str(passkey.k_max)])
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    (DEMO / "table.md").write_text(markdown_table(head, rows), encoding="utf-8")
    panels: list[Panel] = []
    for index, measurement in enumerate(("perplexity", "passkey")):
        panels += MEASUREMENTS[measurement].panels({name: scores[index] for name, scores in models.items()})
    save(figure_of(*panels, window=ORIGINAL), DEMO / "demo.png")


def into_docs() -> None:
    """Write the table and the picture into docs/."""
    arithmetic = "bfloat16" if has_fast_bfloat16() else "float32"
    note = (
        f"`make demo`, one seed, on {DOCUMENTS} documents (stride {STRIDE}), and {TRIALS} passkeys at each of {DEPTHS} "
        f"distances. Trained in {arithmetic}. {made_on(machine())}"
    )
    table = (DEMO / "table.md").read_text()
    write_block(ROOT / "docs" / "experiments.md", "demo", f"{table}\n{note}\n")
    shutil.copy(DEMO / "demo.png", ROOT / "docs" / "demo.png")


def main() -> None:
    started = time.monotonic()
    parser = parser_of(__doc__)
    parser.add_argument("--publish", action="store_true", help="put table and picture into docs/")
    published = parser.parse_args().publish
    logging.getLogger("transformers").setLevel(logging.ERROR)
    console.print(f"[bold]A model that reads {ORIGINAL} tokens learns to read {TARGET}.[/bold]")
    console.print(f"This takes about {minutes_here():.0f} minutes here, by the time of a forward pass.\n")
    live = tuned()
    released_steps = load_recipe(RELEASED / "recipe.yaml").recipe.training.steps
    models = {
        "base, extrapolating": measured("base", "builtin:tiny"),
        "PI, untuned": measured("untuned", "builtin:tiny", lengths=[], extension=UNTUNED),
        f"PI, {STEPS} steps": measured("live", live, lengths=MAP),
        f"PI, released, {released_steps} steps": measured("released", str(RELEASED)),
    }
    merged = DEMO / "merged"
    if not merged.exists():
        run("merge", live, "--output", str(merged))
    show(models)
    seconds = time.monotonic() - started
    if published:
        into_docs()
    console.print(f"demo.png, table.md and scores/ are in {DEMO}/   {seconds:.0f} s in all\n")
    console.print(
        f"Try next: .venv/bin/pi-lora eval perplexity builtin:tiny {merged} --data README.md --windows 256,1024\n"
        "(the built-in model was trained on Python code, and reads prose badly; compare the columns)"
    )


if __name__ == "__main__":
    main()
