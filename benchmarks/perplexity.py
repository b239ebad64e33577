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
import statistics
import tempfile
from pathlib import Path
from typing import Any

from record import in_a_process, seconds_of, write_run

WINDOWS, STRIDE, LARGE_VOCABULARY = [256, 512, 1024, 2048], 128, 32_000


def straightforward(
    model: Any, documents: list[list[int]], windows: list[int], stride: int = STRIDE
) -> dict[int, float]:
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


def ours(model: Any, documents: list[list[int]], windows: list[int]) -> dict[int, float]:
    """Perplexity by window, as `pi-lora eval perplexity` measures it."""
    from pi_lora.evaluation.perplexity.losses import Sweep, document_losses
    from pi_lora.evaluation.perplexity.measurement import window_scores

    sweep = Sweep(tuple(windows), STRIDE)
    scores = window_scores([document_losses(model, document, sweep) for document in documents])
    return {row.window: row.perplexity for row in scores}


CONTENDERS = {
    "straightforward": (straightforward, WINDOWS),
    "sweep": (ours, WINDOWS),
    "longest": (ours, WINDOWS[-1:]),
}


def contend(name: str, folder: str, file: str) -> dict[str, Any]:
    """Seconds, perplexities and peak memory of one contender, in this process."""
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    documents = json.loads(Path(file).read_text())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    measure, windows = CONTENDERS[name]
    # What is slow the first time only, such as the choice of kernels, is nobody's.
    measure(model, [document[: WINDOWS[-1]] for document in documents[:1]], windows[-1:])
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of loading
    found: dict[int, float] = {}
    seconds = seconds_of(lambda: found.update(measure(model, documents, windows)))
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    return {"seconds": seconds, "peak_memory": 1024 * peak, "perplexity": found}


def prepare(folder: Path, options: argparse.Namespace) -> dict[str, Path]:
    """The documents' token ids as a file in `folder`, and the folders of the two models that read them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import pi_lora
    from pi_lora.evaluation.perplexity.documents import choose_documents
    from pi_lora.models.location import BUILTIN_FOLDER
    from pi_lora.recipe.evaluation import PerplexityOptions

    loaded = pi_lora.load("builtin:tiny", pi_lora.Extension(target=WINDOWS[-1]))
    lengths = {"min_tokens": options.tokens, "truncate": options.tokens}
    asked = PerplexityOptions(data=options.data, documents=options.documents, **lengths)
    chosen = choose_documents(loaded, asked, WINDOWS[-1])
    (folder / "documents.json").write_text(json.dumps([list(each.ids) for each in chosen.documents]))
    loaded.model.save_pretrained(folder / "tiny")
    config = AutoConfig.from_pretrained(BUILTIN_FOLDER / "tiny", vocab_size=LARGE_VOCABULARY)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "random")
    return {"builtin:tiny": folder / "tiny", f"vocabulary of {LARGE_VOCABULARY}": folder / "random"}


def measured(folder: Path, documents: Path, rounds: int) -> dict[str, Any]:
    """All contenders on one model, in turns, and what follows from them."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name, runs in found.items():
            runs.append(in_a_process(__file__, "--contender", name, str(folder), str(documents)))
            print(f"  {name}: {runs[-1]['seconds']:.1f} s, {runs[-1]['peak_memory'] / 2**20:.0f} MiB", flush=True)

    def ratio(over: str, under: str) -> float:
        pairs = zip(found[over], found[under], strict=True)
        return round(statistics.median(left["seconds"] / right["seconds"] for left, right in pairs), 3)

    plain, sweep = (found[name][0]["perplexity"] for name in ("straightforward", "sweep"))
    return {
        "straightforward_over_sweep": ratio("straightforward", "sweep"),
        "sweep_over_longest": ratio("sweep", "longest"),
        "largest_relative_difference": max(abs(sweep[window] / value - 1) for window, value in plain.items()),
        "peak_memory": {name: max(run["peak_memory"] for run in runs) for name, runs in found.items()},
        "seconds": {name: [round(run["seconds"], 2) for run in runs] for name, runs in found.items()},
        "perplexity": sweep,
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
        print(json.dumps(contend(*options.contender)))
        return
    models = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, folder in prepare(Path(temporary), options).items():
            print(name)
            models[name] = measured(folder, Path(temporary) / "documents.json", options.rounds)
    facts = {"documents": options.documents, "tokens_each": options.tokens, "windows": WINDOWS, "stride": STRIDE}
    write_run("perplexity", {"data": Path(options.data).name, **facts, "models": models})


if __name__ == "__main__":
    main()
