"""SmolLM2-135M-Instruct from 8k to 16k tokens: perplexity on held-out novels, passkeys, short benchmarks and RULER of
the base, also beyond its window, of Position Interpolation before tuning, and of the tuned run.

    python benchmarks/smollm2.py --books FOLDER [--short FOLDER] [--parts perplexity passkey ...] [--models base ...]

FOLDER of --books has one novel a file, named `AUTHOR_TITLE_YEAR.txt`; --split links the training novels into
`books/train`, which the recipe names, and stops; the part `test` has novels and passkeys by which nothing was chosen.
The base is made by `python scripts/smollm2.py`, the tuned run is the released adapter, or another one with `--run`.
FOLDER of --short has BoolQ, PIQA and WinoGrande. Each measurement is kept in benchmarks/results/smollm2.json when it is
complete, and an interrupted one goes on: call it again, in the root of the repository. `--same-budget pi=RUN yarn=RUN
direct=RUN` measures the perplexity of runs that were tuned with one budget and other scalings.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pi_lora.data.sources import Choice
from pi_lora.evaluation.benchmarks.measure import evaluate_benchmarks, prepare
from pi_lora.evaluation.passkey.measure import evaluate_passkey
from pi_lora.evaluation.passkey.prompt import Grid
from pi_lora.evaluation.perplexity.measure import evaluate_perplexity
from pi_lora.evaluation.results import Scores
from pi_lora.evaluation.ruler.measure import evaluate_ruler
from pi_lora.evaluation.ruler.prompts import find_texts
from pi_lora.models.device import has_fast_bfloat16
from pi_lora.models.model import Extension, Model, load
from pi_lora.recipe.files import RECIPE_FILE, load_recipe
from pi_lora.run import Run

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "smollm2.json"
BASE = "models/smollm2_135m_instruct"
RUN = "adapters/smollm2_135m_16k"
TARGET = 16384
# No novel of these authors is trained on. By the former tunings were chosen, the latter are for the part `test`.
PARTS_OF_AUTHORS = {"Kipling": "held-out", "Lawrence": "test", "Lee": "test", "Lytton": "test"}
WINDOWS = (4096, 8192, 16384)
STRIDE, DOCUMENTS = 4096, 2
GRID, TEST_GRID = Grid(TARGET, depths=4, trials=2), Grid(TARGET, depths=4, trials=2, seed=1)
TASKS = ("boolq", "piqa", "winogrande")
EXAMPLES = 200
# Five of RULER's tasks that need no text, and of each model the windows and the prompts of each task.
RULER_TASKS = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_fwe")
RULER = {
    "base": {"within": ((2048, 4096, 8192), 20), "beyond": ((16384,), 4)},
    "tuned": {"within": ((8192,), 4), "beyond": ((16384,), 2)},
}

sys.path.insert(0, str(ROOT / "scripts"))


def split(books: Path, into: Path) -> None:
    """Link each novel into `train`, `held-out` or `test`, by its author."""
    for book in sorted(books.glob("*.txt")):
        part = PARTS_OF_AUTHORS.get(book.name.split("_")[0], "train")
        link = into / part / book.name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(book.resolve())


def loaded(which: str, run: str, dtype: str | None) -> Model:
    if which == "tuned":
        return load(run, dtype=dtype)
    return load(BASE, None if which == "base" else Extension(TARGET), dtype)


def progress(done: int, total: int, note: str = "") -> None:
    print(f"\r{done} of {total} {note}", end="", file=sys.stderr, flush=True)


def perplexity(model: Model, novels: Path, documents: int = DOCUMENTS) -> Scores:
    """Every token of the first 16,384 of each novel, under each window."""
    choice = Choice(documents=documents, truncate=max(WINDOWS))
    return evaluate_perplexity(model, str(novels), WINDOWS, STRIDE, choice, progress, shared=True)


def passkey(model: Model, which: str, grid: Grid = GRID) -> Scores:
    """Of a model that is not tuned only what decides k_max."""
    return evaluate_passkey(model, grid, progress, k_max_only=which != "tuned", shared=True)


def short(model: Model, folder: Path) -> Scores:
    """The result names the data without the folder, which is this machine's."""
    scores = evaluate_benchmarks(model, prepare(TASKS, (str(folder),)), EXAMPLES, 8, 2048, progress)
    return scores.model_copy(update={"data": {task: Path(place).name for task, place in scores.data.items()}})


def ruler(model: Model, windows: Sequence[int], samples: int) -> Scores:
    return evaluate_ruler(model, find_texts(RULER_TASKS), windows, samples, progress=progress)


def agreement(held_out: Path) -> float:
    """How far, as a share, the perplexity of 2,048 tokens of each novel in bfloat16 is from that in float32."""
    both, choice = [], Choice(documents=DOCUMENTS, truncate=2048)
    for dtype in ("bfloat16", "float32"):
        scores = evaluate_perplexity(load(BASE, dtype=dtype), str(held_out), (2048,), 2048, choice)
        both.append(scores.windows[0].perplexity)
    return both[0] / both[1] - 1


def training(run: str) -> dict[str, Any]:
    """The loss against the tokens trained and what that took, beginning with the run that this one was tuned from."""
    folder = Path(run)
    recipe = load_recipe(folder / RECIPE_FILE).recipe
    before = training(recipe.model.name) if recipe.scaling == "keep" else {"curve": [], "seconds": 0, "peak_memory": 0}
    tokens = before["curve"][-1][0] if before["curve"] else 0
    made = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    curve = [[tokens + line["tokens"], round(line["loss"], 4)] for line in Run(folder).log]
    return {
        "run": run,
        "curve": before["curve"] + curve,
        "seconds": before["seconds"] + made["seconds"],
        "peak_memory": max(before["peak_memory"], made["peak_memory"]),
        "trainable_parameters": made["trainable_parameters"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--short", type=Path)
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--parts", nargs="*", default=["perplexity", "passkey", "test", "short", "ruler"])
    parser.add_argument("--models", nargs="*", default=["base", "pi", "tuned"])
    parser.add_argument("--run", default=RUN)
    parser.add_argument("--same-budget", nargs="+", default=[], metavar="SCALING=RUN")
    options = parser.parse_args()
    split(options.books, Path("books"))
    if not options.split:
        same_budget = dict(each.split("=") for each in options.same_budget)
        measure(options.parts, options.models, options.run, options.short, same_budget)


def measure(
    parts: Sequence[str], models: Sequence[str], run: str, short_data: Path | None, same_budget: Mapping[str, str]
) -> None:
    from machine import machine

    held_out, test = Path("books/held-out"), Path("books/test")
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    results["machine"] = machine()
    dtype = "bfloat16" if has_fast_bfloat16() else "float32"

    def keep(name: str, make: Callable[[], object]) -> None:
        if name in results:
            return
        started = time.monotonic()
        made = make()
        results[name] = made.model_dump(mode="json", exclude_unset=True) if isinstance(made, Scores) else made
        results.setdefault("seconds", {})[name] = round(time.monotonic() - started)
        RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        print(f"\n{name}: {results['seconds'][name]} s", flush=True)

    if "tuned" in models:
        keep("training", lambda: training(run))
    for part in parts:
        for which in models:
            if part == "perplexity":
                keep(f"perplexity {which}", lambda which=which: perplexity(loaded(which, run, dtype), held_out))
            elif part == "passkey":
                keep(f"passkey {which}", lambda which=which: passkey(loaded(which, run, dtype), which))
            elif part == "test" and which != "pi":
                keep(f"test perplexity {which}", lambda which=which: perplexity(loaded(which, run, dtype), test, 3))
                if which == "tuned":
                    keep("test passkey tuned", lambda: passkey(loaded("tuned", run, dtype), "tuned", TEST_GRID))
            elif part == "ruler":
                for where, (windows, samples) in RULER.get(which, {}).items():
                    asked = partial(ruler, windows=windows, samples=samples)
                    keep(f"ruler {which} {where}", lambda which=which, asked=asked: asked(loaded(which, run, None)))
            elif part == "short" and short_data is not None and which != "pi":
                keep(f"short {which}", lambda which=which: short(loaded(which, run, dtype), short_data))
    for scaling, tuned in same_budget.items():
        name = f"{scaling}, same budget"
        keep(f"training {name}", lambda tuned=tuned: training(tuned))
        keep(f"perplexity {name}", lambda tuned=tuned: perplexity(loaded("tuned", tuned, dtype), held_out))
    if dtype == "bfloat16":
        keep("bfloat16 over float32", lambda: agreement(held_out))


if __name__ == "__main__":
    main()
