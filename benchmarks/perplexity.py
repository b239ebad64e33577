"""The cost of a sweep of windows: pi-lora's beside a straightforward script's.

    python benchmarks/perplexity.py

The straightforward script does what YaRN's evaluator does: for every length, every window goes through the model by
itself, and the loss comes from `labels=`, that is from all logits of the window. Both run in turns, each in a process
of its own, so that its peak memory is its own. Measured on the built-in model, and on a random one of its shape with a
vocabulary of 32,000, as LLaMA's. JSON goes to benchmarks/results/.
"""

import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import cost_here, in_a_process, write_run

WINDOWS = [256, 512, 1024, 2048]
STRIDE = 128
TOKENS = 6144
LARGE_VOCABULARY = 32_000
ROUNDS = 3
DATA = "builtin:stdlib"


def straightforward(
    model: Any, documents: list[list[int]], windows: list[int], stride: int = STRIDE
) -> dict[int, float]:
    """Perplexity by window: one window a forward pass, batch 1, all logits; weighted by token, to be comparable."""
    perplexities = {}
    for window in windows:
        total = 0.0
        tokens = 0
        for document in documents:
            total += straightforward_loss(model, document, window, stride)
            tokens += len(document) - 1
        perplexities[window] = math.exp(total / tokens)
    return perplexities


def straightforward_loss(model: Any, document: list[int], window: int, stride: int) -> float:
    """The sum of the losses of all tokens of a document but the first, in nats."""
    import torch

    total = 0.0
    scored_to = 1
    for start in range(0, len(document), stride):
        end = min(start + window, len(document))
        ids = torch.tensor([document[start:end]], device=model.device)
        labels = ids.clone()
        labels[:, : scored_to - start] = -100
        with torch.no_grad():
            loss = model(input_ids=ids, labels=labels).loss
        total += loss.item() * (end - scored_to)
        scored_to = end
        if end == len(document):
            break
    return total


def ours(model: Any, documents: list[list[int]], windows: list[int], stride: int = STRIDE) -> dict[int, float]:
    """Perplexity by window, as `pi-lora eval perplexity` measures it."""
    from pi_lora.evaluation.forward import pass_tokens
    from pi_lora.evaluation.perplexity import Sweep, pass_losses, window_scores

    sweep = Sweep(tuple(windows), stride)
    losses = []
    for document in documents:
        for pieces in sweep.passes(len(document), pass_tokens(model)):
            losses.extend(pass_losses(model, document, pieces))
    return {row.window: row.perplexity for row in window_scores(losses, sweep.windows)}


CONTENDERS = {"straightforward": straightforward, "sweep": ours}


def contend(name: str, folder: str, file: str) -> dict[str, Any]:
    """Seconds, perplexities and peak memory of one contender, in this process."""
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    document = json.loads(Path(file).read_text())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    measure = CONTENDERS[name]
    # What is slow the first time only, such as the choice of kernels, is nobody's.
    measure(model, [document[: WINDOWS[-1]]], WINDOWS[-1:])
    perplexities: dict[int, float] = {}
    cost = cost_here(lambda: perplexities.update(measure(model, [document], WINDOWS)))
    return {**cost, "perplexity": perplexities}


def prepare(folder: Path) -> dict[str, Path]:
    """The token ids of a document as a file in `folder`, and the folders of the two models that read it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import pi_lora
    from pi_lora.evaluation.texts import choose_documents
    from pi_lora.models.files import BUILTIN_FOLDER
    from pi_lora.recipe.evaluation import PerplexityOptions

    loaded = pi_lora.load("builtin:tiny", pi_lora.Extension(target=WINDOWS[-1]))
    options = PerplexityOptions(data=DATA, documents=1, min_tokens=TOKENS, truncate=TOKENS)
    (document,), _ = choose_documents(loaded, options, WINDOWS[-1])
    (folder / "document.json").write_text(json.dumps(list(document.ids)))
    loaded.module.save_pretrained(folder / "tiny")
    config = AutoConfig.from_pretrained(BUILTIN_FOLDER / "tiny", vocab_size=LARGE_VOCABULARY)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "random")
    return {"builtin:tiny": folder / "tiny", f"vocabulary of {LARGE_VOCABULARY}": folder / "random"}


def measured(folder: Path, document: Path) -> dict[str, Any]:
    """Both contenders on one model, in turns, and what follows from them."""
    runs_of: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    for _ in range(ROUNDS):
        for name, runs in runs_of.items():
            run = in_a_process(__file__, name, str(folder), str(document))
            runs.append(run)
            print(f"  {name}: {run['seconds']:.1f} s")
    plain = runs_of["straightforward"]
    sweep = runs_of["sweep"]
    ratios = [slow["seconds"] / fast["seconds"] for slow, fast in zip(plain, sweep, strict=True)]
    perplexities = zip(plain[0]["perplexity"].values(), sweep[0]["perplexity"].values(), strict=True)
    peaks = {}
    seconds = {}
    for name, runs in runs_of.items():
        peaks[name] = max(run["peak_bytes"] for run in runs)
        seconds[name] = [round(run["seconds"], 2) for run in runs]
    return {
        "straightforward_over_sweep": round(statistics.median(ratios), 3),
        "largest_relative_difference": max(abs(mine / theirs - 1) for theirs, mine in perplexities),
        "peak_memory": peaks,
        "seconds": seconds,
        "perplexity": sweep[0]["perplexity"],
    }


def main() -> None:
    if len(sys.argv) > 1:
        name, model_folder, document = sys.argv[1:]
        print(json.dumps(contend(name, model_folder, document)))
        return
    models = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, folder in prepare(Path(temporary)).items():
            print(name)
            models[name] = measured(folder, Path(temporary) / "document.json")
    facts = {"data": DATA, "tokens": TOKENS, "windows": WINDOWS, "stride": STRIDE}
    write_run("perplexity", {**facts, "models": models})


if __name__ == "__main__":
    main()
