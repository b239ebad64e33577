"""The paper's tables 1, 3 and 4 in small: a LLaMA of 43 million parameters, pre-trained and extended 4, 8, 16 x.

    python benchmarks/paper_in_small.py [--text SOURCE ...] [--held-out SOURCE] [--output DIR] [--tiny]

By PI and by direct tuning (FT) of all weights at the paper's part of the pre-training rate, and by PI with LoRA and
QLoRA. The text is books and code that `--text` names (files, folders, globs), or the built-in corpus; what is measured
on is `--held-out`. Runs that are in DIR (adapters/paper_in_small) already are read, not trained again. JSON goes to
benchmarks/results/, the curves to docs/; `--tiny` runs all of it on a CPU in a tiny shape, to see that it runs, and
writes both into DIR.
"""

import argparse
import json
import logging
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS, PICTURES, NAME = ROOT / "benchmarks" / "results", ROOT / "docs", "paper_in_small"
sys.path.append(str(ROOT / "scripts"))


def reproduce(options: argparse.Namespace) -> dict:
    """Pre-train, extend, measure; a progress bar for each."""
    from machine import machine
    from small.extend import base_row, extend, extensions, recipe_of
    from small.pretrain import pretrain
    from small.setting import TINY, Setting

    from pi_lora.cli.app import progress_bar
    from pi_lora.data.sources import find_corpus
    from pi_lora.recipe.schema import Source

    for source in [*options.text, options.held_out]:
        find_corpus(Source(name=source))  # a mistake shows now, not after pre-training

    setting = TINY if options.tiny else Setting()
    base, note = options.output / "base", options.output / "pretraining.json"
    if not note.exists():  # it is written last
        options.output.mkdir(parents=True, exist_ok=True)
        with progress_bar("pre-training") as tell:
            loss = pretrain(setting, options.text, base, tell, options.tiny)
        note.write_text(json.dumps({"loss": loss, "tokens": setting.pretraining_steps * setting.batch_tokens}) + "\n")
    rows = []
    for row in extensions(setting):
        recipe = recipe_of(setting, row, base, options.text, options.held_out)
        with progress_bar(row.name) as tell:
            rows.append(extend(setting, row, recipe, options.output, tell))
    return {
        "machine": machine(),
        "text": options.text,
        "held_out": options.held_out,
        "window": setting.window,
        "pretraining": json.loads(note.read_text()),
        "base": base_row(setting, base, options.held_out),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", default=["builtin:stdlib"], help="what is learned from")
    parser.add_argument("--held-out", default="builtin:stdlib", help="what is measured on: documents of 8k tokens")
    parser.add_argument("--output", type=Path, default=Path("adapters") / NAME, help="where base and runs go")
    parser.add_argument("--tiny", action="store_true", help="all of it in a tiny shape")
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from small.curves import draw
    from small.page import tables

    from pi_lora.errors import PiLoraError

    results, pictures = (options.output, options.output) if options.tiny else (RESULTS, PICTURES)
    try:
        result = reproduce(options)
        file = results / f"{NAME}.json"
        file.write_text(json.dumps(result, indent=2) + "\n")
        picture = draw(result, pictures, NAME)
    except PiLoraError as mistake:
        raise SystemExit(str(mistake)) from None
    print("\n".join(tables(result)))
    print(f"{file}, {picture}")


if __name__ == "__main__":
    main()
