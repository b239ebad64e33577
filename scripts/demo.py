"""The whole method on the built-in model, on a CPU: what `make demo` runs.

Tunes by Position Interpolation, on whole sequences and on short ones with PoSE, and directly, with the same
steps; measures each beside the base model and beside interpolation without tuning; merges; and shows one table and one
picture. What it prints was measured in this run; finished runs in `demo/` are measured again, not trained again.
"""

import logging
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pi_lora.data.sources import Choice
from pi_lora.errors import Interrupted, PiLoraError
from pi_lora.evaluation.passkey.measure import evaluate_passkey
from pi_lora.evaluation.passkey.prompt import Grid
from pi_lora.evaluation.perplexity.measure import evaluate_perplexity
from pi_lora.evaluation.results import PasskeyScores, PerplexityScores, write_scores
from pi_lora.merging.merging import merge
from pi_lora.models.load import Stretch, load
from pi_lora.preflight import check
from pi_lora.recipe.files import load_recipe
from pi_lora.report.pictures import comparison_picture
from pi_lora.report.summary import markdown_table
from pi_lora.run_folder import last_checkpoint, staging_path
from pi_lora.training.training import train

ROOT = Path(__file__).parent.parent
DEMO = Path("demo")
RECIPE = ROOT / "recipes" / "demo.yaml"
ORIGINAL, TARGET, WINDOWS, STRIDE, DOCUMENTS, DEPTHS, TRIALS = 256, 1024, [256, 512, 1024], 128, 6, 32, 10

console = Console(highlight=False)
COLUMNS = (
    TextColumn("  {task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeRemainingColumn(),
    TextColumn("{task.fields[note]}"),
)


class Bar:
    """A progress bar that the library's callbacks move."""

    def __init__(self, title: str) -> None:
        self.progress = Progress(*COLUMNS, console=console, transient=True, disable=not console.is_terminal)
        self.title = title

    def __enter__(self) -> "Bar":
        self.progress.start()
        self.task = self.progress.add_task(self.title, total=None, note="")
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def __call__(self, done: int, total: int, note: str = "") -> None:
        self.progress.update(self.task, completed=done, total=total, note=note)


def tuned(name: str, *overrides: str) -> Path:
    output = DEMO / name
    command = " ".join(["pi-lora train recipes/demo.yaml", *overrides, f"--output {output}"])
    if output.exists():
        console.print(f"[dim]$ {command}   (done before; remove {DEMO}/ to train again)[/dim]")
        return output
    console.print(f"$ {command}")
    started = time.monotonic()
    with Bar("tuning") as bar:
        resume = last_checkpoint(staging_path(output)) is not None
        train(check(load_recipe(RECIPE, overrides).recipe, output, resume), bar)
    console.print(f"  {time.monotonic() - started:.0f} s")
    return output


def measured(name: str, model: str, stretch: Stretch | None = None) -> tuple[PerplexityScores, PasskeyScores]:
    options = f" --original {ORIGINAL} --target {TARGET}" if stretch else ""
    sweep = f"--windows 256,512,1024 --stride {STRIDE} --documents {DOCUMENTS}"
    console.print(f"$ pi-lora eval perplexity {model}{options} {sweep}", soft_wrap=True)
    loaded = load(model, stretch)
    with Bar("documents") as bar:
        perplexity = evaluate_perplexity(loaded, "builtin:stdlib", WINDOWS, STRIDE, Choice(DOCUMENTS), bar)
    console.print(f"$ pi-lora eval passkey {model}{options or f' --target {TARGET}'}", soft_wrap=True)
    with Bar("trials") as bar:
        passkey = evaluate_passkey(loaded, Grid(TARGET, DEPTHS, TRIALS), bar)
    write_scores(perplexity, DEMO / "scores" / f"{name}-perplexity.json")
    write_scores(passkey, DEMO / "scores" / f"{name}-passkey.json")
    return perplexity, passkey


def show(models: dict[str, tuple[PerplexityScores, PasskeyScores]]) -> None:
    """Print and keep one table and one picture."""
    head = ["model", *(f"perplexity at {window}" for window in WINDOWS), "k_max"]
    rows = [
        [name, *(f"{row.perplexity:.2f}" for row in perplexity.windows), str(passkey.k_max)]
        for name, (perplexity, passkey) in models.items()
    ]
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    DEMO.mkdir(exist_ok=True)
    (DEMO / "table.md").write_text(markdown_table(head, rows), encoding="utf-8")
    perplexities = {name: perplexity for name, (perplexity, _) in models.items()}
    passkeys = {name: passkey for name, (_, passkey) in models.items()}
    comparison_picture(perplexities, passkeys, ORIGINAL, DEMO / "demo.png")


def main() -> None:
    started = time.monotonic()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    console.print(f"[bold]A model that reads {ORIGINAL} tokens learns to read {TARGET}.[/bold]\n")
    interpolated, skipping = tuned("pi"), tuned("skip", "data.positions=skip")
    direct = tuned("direct", "scaling=direct")
    rows = {
        "base, extrapolating": measured("base", "builtin:tiny"),
        "PI, step 0": measured("step-0", "builtin:tiny", Stretch(TARGET, ORIGINAL)),
        "PI, tuned": measured("pi", str(interpolated)),
        "PI, PoSE": measured("skip", str(skipping)),
        "direct tuning": measured("direct", str(direct)),
    }
    merged = DEMO / "merged"
    if not merged.exists():
        console.print(f"$ pi-lora merge {interpolated} --output {merged}")
        merge(interpolated, merged)
    show(rows)
    files = f"{DEMO / 'demo.png'}, {DEMO / 'table.md'}, {DEMO / 'scores'}/"
    console.print(f"{files}   {time.monotonic() - started:.0f} s in all\n")
    console.print("Try next:")
    console.print(f"  .venv/bin/pi-lora eval perplexity {merged} --data README.md --windows 256,1024", soft_wrap=True)
    console.print(
        "  .venv/bin/pi-lora train recipes/demo.yaml context.target=2048 --output adapters/2048", soft_wrap=True
    )
    console.print("  .venv/bin/pi-lora show recipes/demo.yaml")


if __name__ == "__main__":
    try:
        main()
    except Interrupted as interruption:
        print(f"{interruption}: make demo", file=sys.stderr)
        sys.exit(130)
    except PiLoraError as mistake:
        print(mistake, file=sys.stderr)
        sys.exit(2)
