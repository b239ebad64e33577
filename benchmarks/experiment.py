"""SmolLM2-135M-Instruct from 8k to 16k tokens as docs/experiments.md plans it: which scaling to tune, with a control.

    python scripts/fetch_model.py smollm2_135m_instruct
    python benchmarks/experiment.py [--split]

The novels are in 100_english_novels/corpus, one a file, named `AUTHOR_TITLE_YEAR.txt`; --split only divides them by
author. The questions are in short/, written by convert_tasks.py. The experiment is a list of `pi-lora` commands, run in
the root of the repository. A command whose result exists is left out, and an interrupted one continues: call the script
again until it prints no command.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

import record

RESULTS = Path("benchmarks/results/smollm2_16k")
NOVELS = Path("100_english_novels/corpus")
SHORT = Path("short")
BASE = "models/smollm2_135m_instruct"
BOOKS = Path("books_16k")
RUNS = Path("adapters/smollm2_16k")
MERGED = Path("models/smollm2_16k")
ORIGINAL = 8192
TARGET = 16384
STRIDE = 8192
# With this stride a token beyond 8k has at least 6k of context in a window of 8k.
SHORT_STRIDE = 2048
VALIDATION = {"Kipling": "Kim", "Morris": "Water", "Stevenson": "Catriona"}
TEST = {
    "Chesterton": "Thursday",
    "Conrad": "Almayer",
    "Doyle": "Lost",
    "Ford": "Soldier",
    "Gaskell": "Ruth",
    "Hardy": "Tess",
    "James": "Ambassadors",
    "Lawrence": "Peacock",
    "Lee": "Albany",
    "Lytton": "Novel",
}
TRAIN = (
    "Barclay_Ladies Barclay_Postern Bennet_Babylon Bennet_Helen Braddon_Audley Burnett_Garden Burnett_Princess "
    "Corelli_Innocent Corelli_Romance Galsworthy_Man Gissing_Unclassed Gissing_Women Haggard_Mines Haggard_Sheallan "
    "Meredith_Marriage Thackeray_Pendennis Thackeray_Virginians Ward_Ashe Ward_Harvest Wcollins_Basil Wcollins_Legacy"
)
SCALINGS = ("pi", "yarn", "theta")
CONTROL = "control"
# Three rates are tried of every scaling, and further ones while the highest is the best.
RATES = ("5e-4", "1e-3", "2e-3", "4e-3", "8e-3")
TRIAL_STEPS = 32
STEPS = 104
RULER_TASKS = 2
RULER_CANDIDATES = "niah_single_1,niah_multikey_2,ruler_vt,ruler_cwe,ruler_fwe"
QUESTIONS = ("boolq", "piqa", "winogrande")

Command = tuple[Path, list[str]]


def split_books(books: Path) -> None:
    """Write novels by author into train, validation and test; of a test novel the beginning and the second half."""
    for book in sorted(books.glob("*.txt")):
        author, title, _ = book.stem.split("_")
        part = part_of(author, title)
        if part is None:
            continue
        folder = BOOKS / part
        folder.mkdir(parents=True, exist_ok=True)
        text = book.read_text(encoding="utf-8")
        (folder / book.name).write_text(text, encoding="utf-8")
        if part == "test":
            middle = text.index("\n", len(text) // 2)
            second_half = text[middle:].lstrip()
            (folder / f"{book.stem}_half.txt").write_text(second_half, encoding="utf-8")


def part_of(author: str, title: str) -> str | None:
    """Return the part that a novel belongs to; None if it is left out."""
    if VALIDATION.get(author) == title:
        return "validation"
    if TEST.get(author) == title:
        return "test"
    if f"{author}_{title}" in TRAIN.split():
        return "train"
    return None


def score(measurement: str, row: str, model: list[str], *options: str) -> Command:
    """Return the command that measures a model, and the file of the scores."""
    file = RESULTS / f"{measurement} {row}.json".replace(" ", "-")
    return file, ["eval", measurement, *model, "--dtype", "bfloat16", *options, "--json", str(file)]


def perplexity(row: str, model: list[str], part: str, windows: str, *options: str, stride: int = STRIDE) -> Command:
    """Return the command that measures the first 16,384 tokens of each document of a part of the novels; with the short
    stride, of the beginnings of novels alone.
    """
    documents = BOOKS / part / "*[0-9].txt" if stride == SHORT_STRIDE else BOOKS / part
    text = ("--data", str(documents), "--windows", windows, "--stride", str(stride), "--truncate", str(TARGET))
    return score("perplexity", f"{part} {row}", model, *text, *options)


def training(name: str, scaling: str, rate: str, steps: int) -> Command:
    """Return the command that tunes with a scaling, and the file that says that the run is complete."""
    run = RUNS / name
    control = scaling == CONTROL
    keys = {
        "model.name": BASE,
        "context.target": ORIGINAL if control else TARGET,
        "context.original": "null" if control else ORIGINAL,
        "scaling": "keep" if control else scaling,
        "training.learning_rate": rate,
        "training.steps": steps,
        "training.precision": "bfloat16",
        "data.source": f"[{{name: {BOOKS}/train, weight: 0.75}}, {{name: builtin:recall, weight: 0.25}}]",
    }
    words = [f"{key}={value}" for key, value in keys.items()]
    resume = ["--resume"] if run.with_name(f".{name}.partial").exists() else []
    return run / "run.json", ["train", "smollm2_135m_16k_cpu", *words, "--output", str(run), *resume]


def untuned(scaling: str) -> list[str]:
    """Return the model and the options of the base under a scaling."""
    return [BASE, "--original", str(ORIGINAL), "--target", str(TARGET), "--scaling", scaling]


def tuned(name: str) -> list[str]:
    """Return the run of that name."""
    return [str(RUNS / name)]


def merging(name: str) -> Command:
    """Return the command that merges a run, and the file that says that the merged model is complete."""
    return MERGED / name / "config.json", ["merge", *tuned(name), "--output", str(MERGED / name)]


def measured(file: Path) -> float:
    """Return the perplexity of the longest window."""
    return float(json.loads(file.read_bytes())["windows"][-1]["perplexity"])


def commands() -> Iterator[Command]:
    """Yield the commands in order; those after a choice depend on the results before it."""
    best_untuned, best_tuned = yield from choosing_commands()
    yield from test_commands(best_untuned, best_tuned)


def choosing_commands() -> Generator[Command, None, tuple[str, str]]:
    """Yield the commands that choose rates and scalings, and return the best untuned and the best tuned scaling."""
    # Rates, and the best untuned and tuned scaling, by validation novels alone.
    chosen: dict[str, str] = {}
    rows: dict[str, float] = {}
    for scaling in SCALINGS:
        command = perplexity(f"untuned {scaling}", untuned(scaling), "validation", windows=str(TARGET))
        yield command
        rows[scaling] = measured(command[0])
    best_untuned = min(rows, key=rows.__getitem__)
    for scaling in (*SCALINGS, CONTROL):
        chosen[scaling] = yield from rate_commands(scaling)
    for scaling in (*SCALINGS, CONTROL):
        yield training(scaling, scaling, chosen[scaling], STEPS)
    for scaling in SCALINGS:
        command = perplexity(f"tuned {scaling}", tuned(scaling), "validation", windows=str(TARGET))
        yield command
        rows[scaling] = measured(command[0])
    best_tuned = min(rows, key=rows.__getitem__)
    return best_untuned, best_tuned


def rate_commands(scaling: str) -> Generator[Command, None, str]:
    """Yield the commands that try learning rates with a scaling, and return the best rate."""
    window = str(ORIGINAL if scaling == CONTROL else TARGET)
    trials: dict[float, str] = {}
    for rate in RATES:
        perplexities = list(trials)
        if len(trials) > 2 and perplexities[-1] != min(perplexities):
            break
        name = f"{scaling}_{rate}"
        command = perplexity(name, tuned(name), "validation", windows=window)
        file, _ = command
        if not file.exists():
            yield training(name, scaling, rate, TRIAL_STEPS)
        yield command
        trials[measured(file)] = rate
    return trials[min(trials)]


def test_commands(best_untuned: str, best_tuned: str) -> Iterator[Command]:
    """Yield the commands whose results are published."""
    # Once, on novels and passkeys that chose nothing, and of the tuned models as they are served: merged.
    for name in (*SCALINGS, CONTROL):
        yield merging(name)
    models = {"base": [BASE], **{f"untuned {scaling}": untuned(scaling) for scaling in SCALINGS}}
    models |= {f"tuned {scaling}": [str(MERGED / scaling)] for scaling in SCALINGS}
    models[CONTROL] = [str(MERGED / CONTROL)]
    best = f"tuned {best_tuned}"
    for row, model in models.items():
        yield perplexity(row, model, "test", windows=f"{ORIGINAL},{TARGET}")
    for row in ("base", best, CONTROL):
        name = f"{row} stride {SHORT_STRIDE}"
        yield perplexity(name, models[row], "test", windows=str(ORIGINAL), stride=SHORT_STRIDE)
    for row, model in models.items():
        if row != "untuned pi":
            window = () if "--target" in model else ("--target", str(TARGET))
            yield score("passkey", row, model, *window, "--depths", "8", "--trials", "3", "--seed", "5")
    for row in ("base", best):
        files = ",".join(f"{task}={SHORT}/{task}.jsonl" for task in QUESTIONS)
        limit = ("--tasks", ",".join(QUESTIONS), "--data", files, "--limit", "500", "--window", "2048")
        yield score("benchmarks", row, models[row], *limit)
    # RULER: the two tasks that the base does best at 4k, on other prompts than those that count.
    few = ("--windows", "4096", "--tasks", RULER_CANDIDATES, "--samples", "10", "--seed", "1")
    candidates = score("ruler", "base at 4k", [BASE], *few)
    yield candidates
    tasks = best_tasks(candidates[0])
    for row in (f"untuned {best_untuned}", best, CONTROL):
        yield score("ruler", row, models[row], "--windows", str(TARGET), "--tasks", tasks, "--samples", "10")
    # How much bfloat16 changes: two documents in float32.
    for row in ("base", best):
        name = f"{row} float32"
        file, words = perplexity(name, models[row], "test", str(TARGET), "--documents", "2")
        yield file, ["float32" if word == "bfloat16" else word for word in words]


def best_tasks(file: Path) -> str:
    """Return the names of RULER's tasks with the highest scores."""
    content = json.loads(file.read_bytes())
    by_task = content["lengths"][0]["tasks"]
    names = sorted(by_task, key=lambda task: -by_task[task]["score"])
    return ",".join(names[:RULER_TASKS])


def run_missing(commands: Iterable[Command]) -> None:
    """Run the commands whose result does not exist, and note on what machine a result was measured."""
    program = Path(sys.executable).with_name("pi-lora")
    for file, words in commands:
        if not file.exists():
            print("pi-lora", *words, file=sys.stderr, flush=True)
            subprocess.run([program, *words], check=True)
            if words[0] == "eval":
                record.write_row(f"{file.parent.name}/machines", (file.stem,), {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", action="store_true", help="only divide the novels by author")
    options = parser.parse_args()
    if not (BOOKS / "test").is_dir():
        split_books(NOVELS)
    if not options.split:
        RESULTS.mkdir(exist_ok=True)
        run_missing(commands())


if __name__ == "__main__":
    main()
