"""What a run's checks add to loading it: `pi_lora.load` beside transformers and PEFT alone, in turns, in one process.

    python benchmarks/loading.py [--rounds 9] [--folder DIR]

Checked are the digest of the base, that weights are complete and finite, those of the adapter too, and the tokenizer. A
run of SmolLM2-135M (`python scripts/fetch_smollm2.py` makes its base) and one on a random LLaMA of 1.1 billion
parameters in bfloat16; both become float32. Files are read from the page cache, so that the checks show as much as they
can. JSON goes to benchmarks/results/.
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from merge import make
from record import ROOT, write_run

import pi_lora

SMOLLM2 = ROOT / "adapters" / "smollm2_135m_16k", ROOT / "models" / "smollm2_135m_instruct"


def load_plainly(run: Path, base: Path) -> None:
    """Base, scaling, adapter and tokenizer, with no check."""
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(run)
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, config=config, dtype=torch.float32), run)
    AutoTokenizer.from_pretrained(run)


def seconds(load: Callable[[], object]) -> dict[str, float]:
    gc.collect()
    began, worked = time.monotonic(), time.process_time()
    load()
    return {"clock": time.monotonic() - began, "processor": time.process_time() - worked}


def compared(run: Path, base: Path, rounds: int) -> dict[str, dict[str, float]]:
    """The fewest seconds of both, alternating which comes first: other work only adds to them."""
    ways = {
        "checked": lambda: pi_lora.load(str(run), dtype="float32"),
        "unchecked": lambda: load_plainly(run, base),
    }
    seconds(ways["unchecked"])
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in sorted(ways, reverse=bool(number % 2)):
            found[way].append(seconds(ways[way]))
    result = {}
    for clock in ("clock", "processor"):
        least = {way: round(min(each[clock] for each in times), 3) for way, times in found.items()}
        result[clock] = {**least, "ratio": round(least["checked"] / least["unchecked"], 3)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    options = parser.parse_args()
    models = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        make(folder)
        torch.set_default_dtype(torch.float32)
        runs = {"SmolLM2-135M": SMOLLM2, "random LLaMA, 1.1B": (folder / "run", folder / "base")}
        for title, (run, base) in runs.items():
            models[title] = compared(run, base, options.rounds)
            print(title, models[title], flush=True)
    write_run("loading", {"threads": torch.get_num_threads(), "rounds": options.rounds, "models": models})


if __name__ == "__main__":
    main()
