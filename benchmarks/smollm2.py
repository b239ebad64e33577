"""SmolLM2-135M-Instruct from 8k to 16k tokens: perplexity on held-out novels, passkeys, short benchmarks and RULER of
the base, also beyond its window, of Position Interpolation before tuning, and of the tuned run.

    python benchmarks/smollm2.py --books FOLDER [--short FOLDER] [--parts perplexity passkey ...] [--models base ...]

FOLDER of --books has one novel a file, named `AUTHOR_TITLE_YEAR.txt`; --split links the training novels into
`books/train`, which the recipe names, and stops; the part `test` has novels and passkeys by which nothing was chosen.
The base is made by `python scripts/fetch_smollm2.py`; the tuned run is the released adapter. Models can also be named
`NAME=RUN`, and are kept under that name: `--models "yarn, same budget=adapters/smollm2_yarn"`. FOLDER of --short is
written by convert_tasks.py. Each measurement is kept in benchmarks/results/smollm2.json when it is complete: call it
again, in the root of the repository, to go on; remove a row to measure it again.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from record import read, write_row

import pi_lora
from pi_lora.evaluation.benchmarks.measurement import Benchmarks
from pi_lora.evaluation.journal import Session
from pi_lora.evaluation.passkey.measurement import evaluate_passkey
from pi_lora.evaluation.perplexity.measurement import evaluate_perplexity
from pi_lora.evaluation.ruler.measurement import Ruler
from pi_lora.models.device import has_fast_bfloat16
from pi_lora.recipe.evaluation import BenchmarksOptions, PasskeyOptions, PerplexityOptions, RulerOptions
from pi_lora.recipe.files import load_recipe

BASE = "models/smollm2_135m_instruct"
RUN = "adapters/smollm2_135m_16k"
BOOKS = Path("books")
TARGET = 16384
# No novel of these authors is trained on. By the former tunings were chosen, the latter are for the part `test`.
PARTS_OF_AUTHORS = {"Kipling": "held-out", "Lawrence": "test", "Lee": "test", "Lytton": "test"}
WINDOWS, STRIDE = (4096, 8192, 16384), 4096
TASKS, EXAMPLES = ("boolq", "piqa", "winogrande"), 200
# Five of RULER's tasks that need no text, and of each model the windows and the prompts of each task.
RULER_TASKS = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_fwe")
RULER = {
    "base": {"within": ((2048, 4096, 8192), 20), "beyond": ((16384,), 4)},
    "tuned": {"within": ((8192,), 4), "beyond": ((16384,), 2)},
}


def split(books: Path) -> None:
    """Link each novel into `train`, `held-out` or `test`, by its author."""
    for book in sorted(books.glob("*.txt")):
        link = BOOKS / PARTS_OF_AUTHORS.get(book.name.split("_")[0], "train") / book.name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(book.resolve())


def progress(done: int, total: int, note: str = "") -> None:
    print(f"\r{done} of {total} {note}", end="", file=sys.stderr, flush=True)


def training(run: str) -> dict[str, Any]:
    """The loss against the tokens trained and what that took, beginning with the run that this one was tuned from."""
    folder = Path(run)
    recipe = load_recipe(folder / "recipe.yaml").recipe
    before = training(recipe.model.name) if recipe.scaling == "keep" else {"curve": [], "seconds": 0, "peak_memory": 0}
    tokens = before["curve"][-1][0] if before["curve"] else 0
    made = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    log = [json.loads(line) for line in (folder / "training.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "run": run,
        "curve": before["curve"] + [[tokens + line["tokens"], round(line["loss"], 4)] for line in log],
        "seconds": before["seconds"] + made["seconds"],
        "peak_memory": max(before["peak_memory"], made["peak_memory"]),
        "trainable_parameters": made["trainable_parameters"],
    }


class Measured:
    """One model under its name, and what is measured of it."""

    def __init__(self, name: str, run: str, short: Path | None) -> None:
        self.name, self.run, self.short = name, run, short

    def load(self, dtype: str | None = None) -> Any:
        stretch = pi_lora.Extension(target=TARGET) if self.name == "pi" else None
        return pi_lora.load(self.run, stretch, dtype=dtype or ("bfloat16" if has_fast_bfloat16() else "float32"))

    def perplexity(self, novels: str = "held-out", documents: int = 2) -> Any:
        """Every token of the first 16,384 of each novel, under each window."""
        options = PerplexityOptions(
            data=str(BOOKS / novels), windows=tuple(WINDOWS), stride=STRIDE, documents=documents, truncate=TARGET
        )
        with Session(progress, shared=True) as session:
            return evaluate_perplexity(self.load(), options, session)

    def passkey(self, seed: int = 0) -> Any:
        """Of a model that is not tuned only what decides k_max."""
        k_max_only = self.name in ("base", "pi")
        options = PasskeyOptions(target=TARGET, depths=4, trials=2, seed=seed, k_max_only=k_max_only)
        with Session(progress, shared=True) as session:
            return evaluate_passkey(self.load(), options, session)

    def benchmarks(self) -> Any:
        data = tuple(f"{task}={self.short}/{task}.jsonl" for task in TASKS)
        options = BenchmarksOptions(tasks=TASKS, data=data, limit=EXAMPLES, window=2048)
        return Benchmarks().run(self.load(), options, Session(progress))

    def ruler(self, windows: tuple[int, ...], samples: int) -> Any:
        options = RulerOptions(tasks=RULER_TASKS, windows=windows, samples=samples)
        return Ruler().run(self.load("float32"), options, Session(progress))

    def rows(self, part: str) -> dict[str, Callable[[], Any]]:
        """The names of the rows of a part, and what measures each."""
        name, untuned = self.name, self.name in ("base", "pi")
        if part == "training" and not untuned:
            return {"training" if name == "tuned" else f"training {name}": lambda: training(self.run)}
        if part == "perplexity":
            return {f"perplexity {name}": self.perplexity}
        if part == "passkey":
            return {f"passkey {name}": self.passkey}
        if part == "test" and name != "pi":
            keys = {} if untuned else {f"test passkey {name}": lambda: self.passkey(seed=1)}
            return {f"test perplexity {name}": lambda: self.perplexity("test", 3), **keys}
        if part == "short" and self.short and name != "pi":
            return {f"short {name}": self.benchmarks}
        if part == "ruler":
            asked = RULER.get(name, {}).items()
            return {f"ruler {name} {where}": lambda how=how: self.ruler(*how) for where, how in asked}
        return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--short", type=Path)
    parser.add_argument("--split", action="store_true")
    parts = ["training", "perplexity", "passkey", "test", "short", "ruler"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--models", nargs="+", default=["base", "pi", "tuned"], metavar="NAME[=RUN]")
    options = parser.parse_args()
    split(options.books)
    for model in () if options.split else options.models:
        name, _, run = model.partition("=")
        measured = Measured(name, run or (RUN if name == "tuned" else BASE), options.short)
        for part in options.parts:
            for row, measure in measured.rows(part).items():
                if (kept := read("smollm2").get(row)) is not None:
                    if (of := kept.get("run", kept.get("model"))) != measured.run:
                        raise SystemExit(f"{row}: is kept of {of}; give {measured.run} another name")
                    continue
                started = time.monotonic()
                scores = measure()
                found = scores if isinstance(scores, dict) else scores.model_dump(mode="json", exclude_unset=True)
                write_row(
                    "smollm2", (row,), {**found, "run": measured.run, "measured_in": round(time.monotonic() - started)}
                )
                print(f"\n{row}", flush=True)


if __name__ == "__main__":
    main()
