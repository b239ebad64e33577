"""What a sweep of windows costs: pi-lora's, beside a straightforward script's, and beside the longest window alone.

    python benchmarks/perplexity.py [--rounds 3] [--documents 1] [--tokens 6144] [--data builtin:stdlib]

The straightforward script does what YaRN's evaluator does: for every length, every window goes through the model by
itself, and the loss comes from `labels=`, that is from all logits of the window. Contenders run in turns, each in a
process of its own, so that its peak memory is its own. Measured on the built-in model, and on a random one of its shape
with a vocabulary of 32,000, as LLaMA's. JSON goes to benchmarks/results/.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "perplexity.json"
WINDOWS, STRIDE, LARGE_VOCABULARY = [256, 512, 1024, 2048], 128, 32_000


def straightforward(model, documents: list[list[int]], windows: list[int], stride: int = STRIDE) -> dict[int, float]:
    """Perplexity by window: one window a forward pass, batch 1, all logits; weighted by token, to be comparable."""
    import torch

    found = {}
    for window in windows:
        total = tokens = 0
        for document in documents:
            scored_to = 1
            for start in range(0, len(document), stride):
                end = min(start + window, len(document))
                ids = torch.tensor([document[start:end]], device=model.device)
                labels = ids.clone()
                labels[:, : scored_to - start] = -100
                with torch.no_grad():
                    loss = model(input_ids=ids, labels=labels).loss
                total += loss.item() * (end - scored_to)
                tokens += end - scored_to
                scored_to = end
                if end == len(document):
                    break
        found[window] = math.exp(total / tokens)
    return found


def ours(model, documents: list[list[int]], windows: list[int]) -> dict[int, float]:
    """Perplexity by window, as `pi-lora eval perplexity` measures it."""
    from pi_lora.evaluation.perplexity.losses import Sweep, document_losses, window_scores

    sweep = Sweep(tuple(windows), STRIDE)
    scores = window_scores([document_losses(model, document, sweep) for document in documents])
    return {row.window: row.perplexity for row in scores}


CONTENDERS = {
    "straightforward": (straightforward, WINDOWS),
    "sweep": (ours, WINDOWS),
    "longest": (ours, WINDOWS[-1:]),
}


def contend(name: str, folder: Path, file: Path) -> dict:
    """Seconds, perplexities and peak memory of one contender, in this process."""
    import torch
    from transformers import AutoModelForCausalLM, logging

    from pi_lora.models.device import device

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    documents = json.loads(file.read_text())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").to(device()).eval()
    measure, windows = CONTENDERS[name]
    loaded = reset_peak_memory(model.device.type)
    # What is slow the first time only, such as the choice of kernels, is nobody's.
    measure(model, [document[: WINDOWS[-1]] for document in documents[:1]], windows[-1:])
    started, started_cpu = time.perf_counter(), time.process_time()
    found = measure(model, documents, windows)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
    peak = torch.cuda.max_memory_allocated() if model.device.type == "cuda" else resident("VmHWM")
    memory = {"peak_memory": peak, "above_loaded_model": peak - loaded}
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, **memory, "perplexity": found}


def reset_peak_memory(device: str) -> int:
    """Forget the peak of what came before, which is loading; the bytes in use now."""
    import torch

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(field: str) -> int:
    """Bytes of this process in memory, now (VmRSS) or at most (VmHWM), as Linux counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def prepare(folder: Path, options: argparse.Namespace) -> dict[str, Path]:
    """The documents' token ids as a file in `folder`, and the folders of the two models that read them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from pi_lora.data.sources import Choice
    from pi_lora.evaluation.perplexity.measure import choose_documents
    from pi_lora.models.location import BUILTIN_FOLDER
    from pi_lora.models.model import Extension, load

    loaded = load("builtin:tiny", Extension(WINDOWS[-1]))
    choice = Choice(documents=options.documents, min_tokens=options.tokens, truncate=options.tokens)
    chosen = choose_documents(loaded, options.data, choice, WINDOWS[-1])
    (folder / "documents.json").write_text(json.dumps([list(each.ids) for each in chosen.documents]))
    loaded.model.save_pretrained(folder / "tiny")
    config = AutoConfig.from_pretrained(BUILTIN_FOLDER / "tiny", vocab_size=LARGE_VOCABULARY)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "random")
    return {"builtin:tiny": folder / "tiny", f"vocabulary of {LARGE_VOCABULARY}": folder / "random"}


def measured(folder: Path, documents: Path, rounds: int) -> dict:
    """All contenders on one model, in turns, and what follows from them."""
    found: dict[str, list[dict]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name, each in found.items():
            command = [sys.executable, __file__, "--contender", name, str(folder), str(documents)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            each.append(json.loads(done.stdout.splitlines()[-1]))
            last = each[-1]
            clocks = f"{last['seconds']:.1f} s, {last['cpu_seconds']:.1f} of a processor"
            print(f"  {name}: {clocks}, {last['above_loaded_model'] / 2**20:.0f} MiB", flush=True)

    def ratio(over: str, under: str, seconds: str = "seconds") -> float:
        pairs = zip(found[over], found[under], strict=True)
        return round(statistics.median(left[seconds] / right[seconds] for left, right in pairs), 3)

    perplexities = {name: each[0]["perplexity"] for name, each in found.items()}
    errors = [
        abs(perplexities["sweep"][window] / value - 1) for window, value in perplexities["straightforward"].items()
    ]
    return {
        "straightforward_over_sweep": ratio("straightforward", "sweep"),
        "sweep_over_longest": ratio("sweep", "longest"),
        # Processor time leaves out what else the machine did.
        "straightforward_over_sweep_cpu": ratio("straightforward", "sweep", "cpu_seconds"),
        "sweep_over_longest_cpu": ratio("sweep", "longest", "cpu_seconds"),
        "largest_relative_difference": max(errors),
        **{
            memory: {name: max(run[memory] for run in each) for name, each in found.items()}
            for memory in ("peak_memory", "above_loaded_model")
        },
        **{
            clock: {name: [round(run[clock], 2) for run in each] for name, each in found.items()}
            for clock in ("seconds", "cpu_seconds")
        },
        "perplexity": perplexities["sweep"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--documents", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=6144, help="of each document")
    parser.add_argument("--data", default="builtin:stdlib")
    parser.add_argument("--contender", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        name, folder, documents = options.contender
        print(json.dumps(contend(name, Path(folder), Path(documents))))
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.path.insert(0, str(ROOT / "scripts"))
    from machine import machine

    rows = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, folder in prepare(Path(temporary), options).items():
            print(name)
            rows[name] = measured(folder, Path(temporary) / "documents.json", options.rounds)
    result = {
        "machine": machine(),
        "threads": os.environ.get("OMP_NUM_THREADS", "all"),
        "data": Path(options.data).name,
        "documents": options.documents,
        "tokens_each": options.tokens,
        "windows": WINDOWS,
        "stride": STRIDE,
        "models": rows,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    for name, row in rows.items():
        above = {contender: f"{bytes_ / 2**20:.0f} MiB" for contender, bytes_ in row["above_loaded_model"].items()}
        print(
            f"{name}: {row['straightforward_over_sweep']:.2f} x faster than the straightforward script, "
            f"{row['sweep_over_longest']:.2f} x the longest window alone; "
            f"{above['sweep']} above the loaded model at most, against {above['straightforward']}"
        )


if __name__ == "__main__":
    main()
