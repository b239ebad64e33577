"""The whole method on the built-in model, on a CPU, in minutes: what `make demo` runs.

Tunes by Position Interpolation, for fewer steps than recipes/demo.yaml has, and measures the result beside the base
model, beside interpolation without tuning, and beside the released adapter, which was tuned for longer; merges; and
shows one table and one picture. What it prints was measured in this run; a finished run in `demo/` is measured again,
not trained again. `make reproduce NAME=methods` compares the methods.

    python scripts/demo.py --readme     also tune with two more seeds, and put table, picture and time into the README
"""

import logging
import shutil
import sys
import time
from pathlib import Path

from machine import machine
from pages import mean_and_range, write_block
from rich.console import Console
from rich.table import Table

from pi_lora.cli.app import progress_bar
from pi_lora.errors import Interrupted, PiLoraError
from pi_lora.evaluation.journal import Session
from pi_lora.evaluation.passkey.measurement import PasskeyScores, evaluate_passkey
from pi_lora.evaluation.perplexity.measurement import PerplexityScores, evaluate_perplexity
from pi_lora.evaluation.registry import write_scores
from pi_lora.merging.merging import merge
from pi_lora.models.device import has_fast_bfloat16
from pi_lora.models.model import Extension, load
from pi_lora.preflight import check
from pi_lora.recipe.evaluation import PasskeyOptions, PerplexityOptions
from pi_lora.recipe.files import RECIPE_FILE, load_recipe
from pi_lora.report.pictures import comparison_picture
from pi_lora.report.tables import markdown_table
from pi_lora.run import Run, staging_path
from pi_lora.training.training import prepare_data, train

ROOT = Path(__file__).parent.parent
DEMO = Path("demo")
RECIPE = ROOT / "recipes" / "demo.yaml"
RELEASED = ROOT / "adapters" / "demo"
# Steps, documents and trials for which two cores that are no faster in bfloat16 take three to six minutes in all.
STEPS, TRIALS = 180, 5
# Neither these documents nor passkeys of this seed had a part in choosing the settings.
DOCUMENTS, TOKENS, PASSKEYS = 3, 4096, 2
SEEDS = 3  # of the table in the README
ORIGINAL, TARGET, WINDOWS, STRIDE, DEPTHS = 256, 1024, [256, 512, 1024], 128, 32

Measured = tuple[PerplexityScores, PasskeyScores]

console = Console(highlight=False)


def tuned(name: str, *overrides: str) -> Path:
    output = DEMO / name
    overrides = (f"training.steps={STEPS}", *overrides)
    command = " ".join(["pi-lora train recipes/demo.yaml", *overrides, f"--output {output}"])
    if output.exists():
        console.print(f"[dim]$ {command}   (done before; remove {DEMO}/ to train again)[/dim]", soft_wrap=True)
        return output
    console.print(f"$ {command}", soft_wrap=True)
    started = time.monotonic()
    recipe, resume = load_recipe(RECIPE, overrides).recipe, Run(staging_path(output)).last_checkpoint is not None
    model = check(recipe, output, resume)
    with progress_bar("packing tokens") as progress:
        data = prepare_data(recipe, model, progress)
    with progress_bar("training") as progress:
        train(recipe, model, data, output, resume, progress)
    console.print(f"  {time.monotonic() - started:.0f} s")
    return output


def measured(name: str, model: str, stretch: Extension | None = None) -> Measured:
    options = f" --original {ORIGINAL} --target {TARGET}" if stretch else ""
    sweep = f"--windows {','.join(map(str, WINDOWS))} --stride {STRIDE}"
    sweep += f" --documents {DOCUMENTS} --truncate {TOKENS}"
    console.print(f"$ pi-lora eval perplexity {model}{options} {sweep}", soft_wrap=True)
    loaded = load(model, stretch)
    with progress_bar("perplexity") as progress:
        asked = PerplexityOptions(windows=tuple(WINDOWS), stride=STRIDE, documents=DOCUMENTS, truncate=TOKENS)
        perplexity = evaluate_perplexity(loaded, asked, Session(progress))
    depths = f"--depths {DEPTHS} --trials {TRIALS} --seed {PASSKEYS}"
    console.print(f"$ pi-lora eval passkey {model}{options or f' --target {TARGET}'} {depths}", soft_wrap=True)
    with progress_bar("passkey") as progress:
        asked = PasskeyOptions(target=TARGET, depths=DEPTHS, trials=TRIALS, seed=PASSKEYS)
        passkey = evaluate_passkey(loaded, asked, Session(progress))
    write_scores(perplexity, DEMO / "scores" / f"{name}-perplexity.json")
    write_scores(passkey, DEMO / "scores" / f"{name}-passkey.json")
    return perplexity, passkey


def show(models: dict[str, list[Measured]]) -> None:
    """Print and keep one table, of a model's runs the mean and the range, and one picture, of the first of them."""
    head = ["model", *(f"perplexity at {window}" for window in WINDOWS), "k_max"]
    rows = []
    for name, runs in models.items():
        sweeps = [[row.perplexity for row in perplexity.windows] for perplexity, _ in runs]
        reached = mean_and_range([passkey.k_max for _, passkey in runs], ".0f")
        rows.append([name, *(mean_and_range(window, ".2f") for window in zip(*sweeps, strict=True)), reached])
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    DEMO.mkdir(exist_ok=True)
    (DEMO / "table.md").write_text(markdown_table(head, rows), encoding="utf-8")
    perplexities = {name: runs[0][0] for name, runs in models.items()}
    passkeys = {name: runs[0][1] for name, runs in models.items()}
    comparison_picture([perplexities, passkeys], ORIGINAL, DEMO / "demo.png")


def into_readme(seconds: float) -> None:
    here = machine()
    arithmetic = "bfloat16" if has_fast_bfloat16() else "float32"
    on = f"{here['cores']} cores of {here['processor']}, training in {arithmetic}; {here['versions']}"
    how = f"{DOCUMENTS.documents} documents, {DEPTHS} distances, {TRIALS} trials each"
    seeds = f"Of the {STEPS} steps, {SEEDS} seeds, mean and range"
    note = f"`make demo` in {seconds:.0f} s, one seed: {how}. {seeds}. {on}; {here['date']}."
    write_block(ROOT / "README.md", "demo", f"{(DEMO / 'table.md').read_text()}\n{note}\n")
    shutil.copy(DEMO / "demo.png", ROOT / "docs" / "demo.png")


def main() -> None:
    started = time.monotonic()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    console.print(f"[bold]A model that reads {ORIGINAL} tokens learns to read {TARGET}.[/bold]\n")
    live = tuned("live")
    rows = {
        "base, extrapolating": [measured("base", "builtin:tiny")],
        "PI, step 0": [measured("step-0", "builtin:tiny", Extension(TARGET, ORIGINAL))],
        f"PI, {STEPS} steps": [measured("live", str(live))],
    }
    if (RELEASED / RECIPE_FILE).is_file():
        steps = load_recipe(RELEASED / RECIPE_FILE).recipe.training.steps
        rows[f"PI, released, {steps} steps"] = [measured("released", str(RELEASED))]
    merged = DEMO / "merged"
    if not merged.exists():
        console.print(f"$ pi-lora merge {live} --output {merged}")
        with progress_bar("merging") as progress:
            merge(live, merged, progress=progress)
    show(rows)
    seconds = time.monotonic() - started
    if "--readme" in sys.argv[1:]:
        for seed in range(1, SEEDS):
            name = f"live-{seed}"
            run = tuned(name, f"training.seed={seed}", f"data.seed={seed}")
            rows[f"PI, {STEPS} steps"].append(measured(name, str(run)))
        show(rows)
        into_readme(seconds)
    files = f"{DEMO / 'demo.png'}, {DEMO / 'table.md'}, {DEMO / 'scores'}/"
    console.print(f"{files}   {seconds:.0f} s in all\n")
    console.print(f"Try next: .venv/bin/pi-lora eval perplexity {merged} --data README.md --windows 256,1024")


if __name__ == "__main__":
    try:
        main()
    except Interrupted as interruption:
        print(f"{interruption}: make demo", file=sys.stderr)
        sys.exit(130)
    except PiLoraError as mistake:
        print(mistake, file=sys.stderr)
        sys.exit(2)
