"""SmolLM2-135M-Instruct from 8k to 16k tokens as docs/experiments.md plans it: which scaling to tune, with a control.

    python scripts/fetch_model.py smollm2_135m_instruct
    python benchmarks/experiment.py [--split]

The novels are in 100_english_novels/corpus, one a file, named `AUTHOR_TITLE_YEAR.txt`; --split only divides them by
author. The questions are in short/, written by convert_tasks.py. The experiment is a list of `pi-lora` commands, run in
the root of the repository. The last word of a command is the file or folder that it writes. A command whose result
exists, or whose run no missing result needs, is left out, and an interrupted one continues: call the script again until
it prints no command.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import record  # first: it finds scripts/
from arguments import parser_of
from pi_lora import cli
from pi_lora.staging import staging_path

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
AT_TARGET = f"--windows {TARGET} --stride {STRIDE}"
# With this stride a token beyond 8k has at least 6k of context in a window of 8k.
SHORT_STRIDE = 2048
# AUTHOR_TITLE by part.
PARTS = {
    "validation": "Kipling_Kim Morris_Water Stevenson_Catriona",
    "test": (
        "Chesterton_Thursday Conrad_Almayer Doyle_Lost Ford_Soldier Gaskell_Ruth Hardy_Tess James_Ambassadors "
        "Lawrence_Peacock Lee_Albany Lytton_Novel"
    ),
    "train": (
        "Barclay_Ladies Barclay_Postern Bennet_Babylon Bennet_Helen Braddon_Audley Burnett_Garden Burnett_Princess "
        "Corelli_Innocent Corelli_Romance Galsworthy_Man Gissing_Unclassed Gissing_Women Haggard_Mines "
        "Haggard_Sheallan Meredith_Marriage Thackeray_Pendennis Thackeray_Virginians Ward_Ashe Ward_Harvest "
        "Wcollins_Basil Wcollins_Legacy"
    ),
}
SCALINGS = ("pi", "yarn", "theta")
CONTROL = "control"
# The rates that were tried of every scaling, and those that validation chose.
RATES = {
    "pi": ("5e-4", "1e-3", "2e-3", "4e-3", "8e-3"),
    "yarn": ("5e-4", "1e-3", "2e-3"),
    "theta": ("5e-4", "1e-3", "2e-3"),
    CONTROL: ("5e-4", "1e-3", "2e-3"),
}
CHOSEN_RATES = {"pi": "4e-3", "yarn": "1e-3", "theta": "1e-3", CONTROL: "1e-3"}
# The scaling that is best on the validation novels, untuned and tuned.
BEST_UNTUNED = "untuned yarn"
BEST = "tuned yarn"
AGAIN_IN_FLOAT32 = ("base", BEST_UNTUNED, BEST)
TRIAL_STEPS = 32
STEPS = 104
# The two of the candidates that the base does best at 4k.
RULER_TASKS = "niah_single_1,ruler_vt"
RULER_CANDIDATES = "niah_single_1,niah_multikey_2,ruler_vt,ruler_cwe,ruler_fwe"
QUESTIONS = ("boolq", "piqa", "winogrande")
# As JSON, which has no spaces.
MIXTURE = f'{{"name":"{BOOKS}/train","weight":0.75}},{{"name":"builtin:recall","weight":0.25}}'


def split_books(books: Path) -> None:
    """Write novels by author into train, validation and test."""
    for part, novels in PARTS.items():
        for novel in novels.split():
            for book in books.glob(f"{novel}_*.txt"):
                write_book(book, part)


def write_book(book: Path, part: str) -> None:
    """Copy a novel; of a test novel the second half as well, as a document of its own."""
    folder = BOOKS / part
    folder.mkdir(parents=True, exist_ok=True)
    text = book.read_text(encoding="utf-8")
    (folder / book.name).write_text(text, encoding="utf-8")
    if part == "test":
        middle = text.index("\n", len(text) // 2)
        second_half = text[middle:].lstrip()
        (folder / f"{book.stem}_half.txt").write_text(second_half, encoding="utf-8")


def score(
    measurement: str, row: str, model: str, options: str, *, results: Path = RESULTS, dtype: str = "bfloat16"
) -> str:
    """Return the command that measures a model."""
    name = f"{measurement} {row}".replace(" ", "-")
    return f"eval {measurement} {model} --dtype {dtype} {options} --json {results}/{name}.json"


def perplexity(row: str, model: str, documents: str, options: str, dtype: str = "bfloat16") -> str:
    """Return the command that measures the first 16,384 tokens of each document of a part of the novels."""
    part, *_ = documents.split("/")
    options = f"--data {BOOKS}/{documents} {options} --truncate {TARGET}"
    return score("perplexity", f"{part} {row}", model, options, dtype=dtype)


def training(run: Path, keys: str, sources: str = MIXTURE) -> str:
    """Return the command that tunes."""
    return f"train smollm2_135m_16k_cpu {keys} data.source=[{sources}] --output {run}"


def extension(scaling: str) -> str:
    """Return the keys of an extension; the control reads no further than the base."""
    if scaling == CONTROL:
        return f"context.target={ORIGINAL} context.original=null scaling=keep"
    return f"context.target={TARGET} context.original={ORIGINAL} scaling={scaling}"


def tuning(name: str, scaling: str, rate: str, steps: int) -> str:
    """Return the command that tunes with a scaling."""
    schedule = f"training.learning_rate={rate} training.steps={steps} training.precision=bfloat16"
    return training(RUNS / name, f"model.name={BASE} {extension(scaling)} {schedule}")


def untuned(scaling: str, base: str = BASE, original: int = ORIGINAL, target: int = TARGET) -> str:
    """Return the model and the options of a base under a scaling."""
    return f"{base} --original {original} --target {target} --scaling {scaling}"


def commands() -> Iterator[str]:
    """Yield the commands in order."""
    yield from validation_commands()
    yield from test_commands()


def validation_commands() -> Iterator[str]:
    """Yield the commands that tune, and those whose results chose rates and scalings."""
    for scaling in SCALINGS:
        yield perplexity(f"untuned {scaling}", untuned(scaling), "validation", AT_TARGET)
    for scaling, rates in RATES.items():
        window = ORIGINAL if scaling == CONTROL else TARGET
        for rate in rates:
            name = f"{scaling}_{rate}"
            yield tuning(name, scaling, rate, TRIAL_STEPS)
            yield perplexity(name, f"{RUNS}/{name}", "validation", f"--windows {window} --stride {STRIDE}")
        yield tuning(scaling, scaling, CHOSEN_RATES[scaling], STEPS)
    for scaling in SCALINGS:
        yield perplexity(f"tuned {scaling}", f"{RUNS}/{scaling}", "validation", AT_TARGET)


def test_commands() -> Iterator[str]:
    """Yield the commands whose results are published."""
    # Once, on novels and passkeys that chose nothing, and of the tuned models as they are served: merged.
    for name in (*SCALINGS, CONTROL):
        yield f"merge {RUNS}/{name} --output {MERGED}/{name}"
    models = {"base": BASE}
    models |= {f"untuned {scaling}": untuned(scaling) for scaling in SCALINGS}
    models |= {f"tuned {scaling}": f"{MERGED}/{scaling}" for scaling in SCALINGS}
    models[CONTROL] = f"{MERGED}/{CONTROL}"
    for row, model in models.items():
        yield perplexity(row, model, "test", f"--windows {ORIGINAL},{TARGET} --stride {STRIDE}")
    for row in ("base", BEST, CONTROL):
        # Of the beginnings of novels alone.
        options = f"--windows {ORIGINAL} --stride {SHORT_STRIDE}"
        yield perplexity(f"{row} stride {SHORT_STRIDE}", models[row], "test/*[0-9].txt", options)
    for row, model in models.items():
        if row != "untuned pi":
            yield score("passkey", row, to_target(model, TARGET), "--depths 8 --trials 3 --seed 5")
    questions = ",".join(QUESTIONS)
    files = ",".join(f"{task}={SHORT}/{task}.jsonl" for task in QUESTIONS)
    for row in ("base", BEST):
        yield score("benchmarks", row, models[row], f"--tasks {questions} --data {files} --limit 500 --window 2048")
    # RULER: tasks were chosen by other prompts than those that count.
    few = f"--windows 4096 --tasks {RULER_CANDIDATES} --samples 10 --seed 1"
    yield score("ruler", "base at 4k", BASE, few)
    for row in (BEST_UNTUNED, BEST, CONTROL):
        yield score("ruler", row, models[row], f"--windows {TARGET} --tasks {RULER_TASKS} --samples 10")
    # How much bfloat16 and the kernel that is not in this repository change: two documents in float32.
    for row in AGAIN_IN_FLOAT32:
        yield perplexity(f"{row} float32", models[row], "test", f"{AT_TARGET} --documents 2", dtype="float32")


def to_target(model: str, target: int) -> str:
    """Return a model with the target, unless its options have one already."""
    return model if "--target" in model else f"{model} --target {target}"


def missing(commands: Iterable[str]) -> list[str]:
    """Return the commands whose result is missing. A run or merged model that others read is made for them alone."""
    lines = [*commands]
    needed: list[str] = []
    for command in reversed(lines):
        *_, result = command.split()
        readers = [other for other in lines if f" {result} " in other]
        is_kept = result.startswith("benchmarks/") or not readers
        if not Path(result).exists() and (is_kept or any(reader in needed for reader in readers)):
            needed.insert(0, command)
    return needed


def run_missing(commands: Iterable[str]) -> None:
    """Run what is missing, and note on what machine a result was measured. The commands run in this process: starting
    one would take longer than many of them take on a GPU.
    """
    for command in missing(commands):
        print("pi-lora", command, file=sys.stderr, flush=True)
        name, *_, last = words = command.split()
        result = Path(last)
        if name == "train" and staging_path(result).exists():
            words.append("--resume")
        cli.run(words)
        if name == "eval":
            results = result.parent.relative_to("benchmarks/results")
            record.write_row(f"{results}/machines", (result.stem,), {})


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--split", action="store_true", help="only divide the novels by author")
    options = parser.parse_args()
    if not (BOOKS / "test").is_dir():
        split_books(NOVELS)
    if not options.split:
        RESULTS.mkdir(exist_ok=True)
        run_missing(commands())


if __name__ == "__main__":
    main()
