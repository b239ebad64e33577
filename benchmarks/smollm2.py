"""The released adapter of SmolLM2-135M-Instruct, 8k to 16k tokens, its base, and other scalings of one small budget.

    python scripts/fetch_smollm2.py
    python benchmarks/smollm2.py --books FOLDER [--short FOLDER] [--split]

FOLDER of --books has one novel a file, named `AUTHOR_TITLE_YEAR.txt`; --split only links the novels into `books/`. The
FOLDER of --short is written by convert_tasks.py. The rows are those of the `pi-lora eval` commands listed here, and are
kept in benchmarks/results/smollm2.json: call the script again, in the root of the repository, to continue. The commands
that tuned the runs are in docs/experiments.md.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from experiment import BASE, TARGET, untuned
from record import read, write_row

BOOKS = Path("books")
# No novel of these authors is trained on. Tunings were chosen by `held-out`; `test` was measured once, after that.
PARTS_OF_AUTHORS = {"Kipling": "held-out", "Lawrence": "test", "Lee": "test", "Lytton": "test"}
MODELS = {"base": [BASE], "pi": untuned("pi"), "tuned": ["adapters/smollm2_135m_16k"]}
SAME_BUDGET = {f"{scaling}, same budget": [f"adapters/smollm2_{scaling}"] for scaling in ("direct", "yarn", "pi")}
SWEEP = ["--windows", "4096,8192,16384", "--stride", "4096", "--truncate", str(TARGET)]
TASKS = ("boolq", "piqa", "winogrande")
RULER_TASKS = "niah_single_1,niah_multikey_2,niah_multikey_3,ruler_vt,ruler_fwe"
# Windows, and prompts of each task and window.
RULER = {
    "base within": ("2048,4096,8192", "20"),
    "base beyond": ("16384", "4"),
    "tuned within": ("8192", "4"),
    "tuned beyond": ("16384", "2"),
}


def split_books(books: Path) -> None:
    """Link each novel into `train`, `held-out` or `test`, by its author."""
    for book in sorted(books.glob("*.txt")):
        link = BOOKS / PARTS_OF_AUTHORS.get(book.name.split("_")[0], "train") / book.name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(book.resolve())


def commands(short: Path | None) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each row and the words of `pi-lora eval` that measure it."""
    for name, model in (MODELS | SAME_BUDGET).items():
        yield f"perplexity {name}", ["perplexity", *model, "--data", str(BOOKS / "held-out"), *SWEEP]
    for name, model in MODELS.items():
        words = ["--target", str(TARGET)] if name == "base" else []
        yield f"passkey {name}", ["passkey", *model, "--depths", "4", "--trials", "2", *words]
    for name in ("base", "tuned"):
        yield f"test perplexity {name}", ["perplexity", *MODELS[name], "--data", str(BOOKS / "test"), *SWEEP]
        if short:
            files = ",".join(f"{task}={short}/{task}.jsonl" for task in TASKS)
            asked = ["--tasks", ",".join(TASKS), "--data", files, "--limit", "200", "--window", "2048"]
            yield f"short {name}", ["benchmarks", *MODELS[name], *asked]
    for row, (windows, samples) in RULER.items():
        asked = ["--windows", windows, "--tasks", RULER_TASKS, "--samples", samples]
        yield f"ruler {row}", ["ruler", *MODELS[row.split()[0]], *asked]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--short", type=Path)
    parser.add_argument("--split", action="store_true")
    options = parser.parse_args()
    split_books(options.books)
    for row, words in () if options.split else commands(options.short):
        if row in read("smollm2"):
            continue
        with tempfile.NamedTemporaryFile() as scores:
            command = ["-m", "pi_lora", "eval", *words, "--dtype", "float32", "--json", scores.name]
            subprocess.run([sys.executable, *command], check=True)
            write_row("smollm2", (row,), json.load(scores))


if __name__ == "__main__":
    main()
