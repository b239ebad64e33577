"""Whether the masked loss works: the key sentence of each section, on the built-in model; `make key-sentences`.

Documents of several sections are made up, each section with one key sentence among others; the summary is the key
sentences in their order. The built-in model is extended, and the extended run is tuned on such summaries twice, with
the same data, order, steps and settings: once with the loss on the summary, once on prompt and summary alike. Both, and
the extended run as it was, write summaries of documents that no run saw. The table goes into docs/results.md, the
figures into benchmarks/results/key_sentences.json. Finished runs in `key_sentences/` are measured, not trained again.
"""

import argparse
import json
import logging
import random
import subprocess
import sys
from pathlib import Path

from machine import machine
from pages import write_block
from rich.console import Console

from pi_lora.data.recall import NAMES, THINGS, sentence
from pi_lora.errors import PiLoraError
from pi_lora.evaluation.results import SummarizationScores, as_json
from pi_lora.evaluation.summarization.measure import evaluate_summarization, evaluation_data
from pi_lora.evaluation.summarization.rouge import ROUGES
from pi_lora.evaluation.summarization.writing import Sampling, find_writer
from pi_lora.models.model import find
from pi_lora.report.summary import markdown_table

ROOT = Path(__file__).parent.parent
RUNS = Path("key_sentences")
PAGE = ROOT / "docs" / "results.md"
RESULTS = ROOT / "benchmarks" / "results" / "key_sentences.json"
TARGET, SECTIONS, TRAINING, HELD_OUT, SUMMARY_TOKENS = 512, 3, 2400, 48, 80
# The recipe of the tuning, but for its loss; the adapter goes on in the shape that recipes/demo.yaml gave it.
RECIPE = f"""\
# The key sentence of each section, by the built-in model extended to {TARGET} tokens.
model: {{name: {RUNS}/extended}}
context: {{target: {TARGET}}}
scaling: keep
tuning: {{method: lora, rank: 32, alpha: 64}}
data:
  source: {RUNS}/training.jsonl
  document: report
  summary: summary
  completion_tokens: {SUMMARY_TOKENS}
training:
  learning_rate: 2e-3
  schedule: linear
  global_batch_size: 8
  per_device_batch_size: 8
  activation_checkpointing: false
"""
ROWS = {
    "extended, not tuned": "extended",
    "tuned, loss on prompt and summary": "all",
    "tuned, loss on the summary": "completion",
}

console = Console(highlight=False)


def section(rng: random.Random, number: int) -> tuple[str, str]:
    """A section, and its key sentence."""
    key = f"Key: the {rng.choice(THINGS)} of {rng.choice(NAMES)} is {rng.randrange(10, 100)}."
    sentences = [sentence(rng) for _ in range(rng.randint(3, 9))]
    sentences.insert(rng.randrange(len(sentences) + 1), key)
    return f"Section {number}. " + " ".join(sentences), key


def write_documents(file: Path, number: int, seed: int) -> None:
    rng = random.Random(seed)
    with file.open("w", encoding="utf-8") as lines:
        for _ in range(number):
            sections = [section(rng, index + 1) for index in range(rng.randint(2, SECTIONS + 1))]
            row = {"report": "\n".join(text for text, _ in sections), "summary": " ".join(key for _, key in sections)}
            lines.write(json.dumps(row) + "\n")


def train(name: str, recipe: Path, *overrides: str) -> None:
    if (RUNS / name).exists():
        return
    words = ["train", str(recipe), *overrides, "--output", str(RUNS / name)]
    console.print(f"$ pi-lora {' '.join(words)}", soft_wrap=True)
    resume = ["--resume"] if (RUNS / f".{name}.partial").exists() else []
    subprocess.run([sys.executable, "-m", "pi_lora", *words, *resume], check=True)


def measured(name: str) -> SummarizationScores:
    writer = find_writer(find(str(RUNS / name)))
    columns = {"document": "report", "summary": "summary"}
    data = evaluation_data(writer.name, {"name": str(RUNS / "held_out.jsonl")}, columns)
    sampling = Sampling(max_new_tokens=SUMMARY_TOKENS)
    return evaluate_summarization(writer, data, sampling, RUNS / f"{name}.predictions.jsonl")


def table(rows: dict[str, SummarizationScores]) -> str:
    cells = []
    for name, scores in rows.items():
        rouge = ["{:.1f} ({:.1f} to {:.1f})".format(getattr(scores, each), *scores.intervals[each]) for each in ROUGES]
        cells.append([name, *rouge, f"{scores.ended} of {scores.examples}"])
    return markdown_table(["model", "ROUGE-1", "ROUGE-2", "ROUGE-L", "ended by itself"], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extension-steps", type=int, default=240)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    RUNS.mkdir(exist_ok=True)
    write_documents(RUNS / "training.jsonl", TRAINING, seed=1)
    write_documents(RUNS / "held_out.jsonl", HELD_OUT, seed=2)
    recipe = RUNS / "recipe.yaml"
    recipe.write_text(RECIPE)
    demo = ROOT / "recipes" / "demo.yaml"
    train("extended", demo, f"context.target={TARGET}", f"training.steps={options.extension_steps}")
    for loss in ("completion", "all"):
        train(loss, recipe, f"data.loss={loss}", f"training.steps={options.steps}")
    rows = {title: measured(name) for title, name in ROWS.items()}
    here = machine()
    RESULTS.write_text(
        json.dumps(
            {
                "machine": here,
                "steps": vars(options),
                "rows": {title: as_json(scores) for title, scores in rows.items()},
            },
            indent=2,
        )
        + "\n"
    )
    note = (
        f"\n{HELD_OUT} held-out documents, 95 % intervals by bootstrap; {options.steps} steps of 8 documents after "
        f"{options.extension_steps} of extension; {here['processor']}, {here['cores']} cores; {here['versions']}; "
        f"{here['date']}.\n"
    )
    write_block(PAGE, "key sentences", table(rows) + note)
    console.print(table(rows))


if __name__ == "__main__":
    try:
        main()
    except PiLoraError as mistake:
        print(mistake, file=sys.stderr)
        sys.exit(2)
