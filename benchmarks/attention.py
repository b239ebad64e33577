"""What the blockwise kernel saves on a CPU: transformers' `sdpa` beside `auto`, in seconds and memory.

    python scripts/fetch_model.py gemma3_270m
    python scripts/fetch_model.py smollm2_135m_instruct
    python benchmarks/attention.py

Gemma 3 270M has windows of 512 tokens in 15 of 18 layers, SmolLM2-135M has none. The layers alone run at two
lengths, a training step of `pi-lora train` at the first one. Each kernel has a process of its own. A row is kept in
benchmarks/results/attention.json when it is measured.
"""

import resource
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from plan_memory import CHECKPOINTING, DATA, MODEL, RECIPE
from record import apart, parser_of, training_log, write_row

GEMMA = "models/gemma3_270m"
KERNELS = ("sdpa", "auto")
LENGTHS = (8192, 32768)
STEPS = 3

Cost = Mapping[str, Any]


def layers(model: str, tokens: int, kernel: str) -> Cost:
    """The forward pass of all layers on random tokens, without the head, as a measurement loads them."""
    import torch

    from pi_lora.models.device import dtype_named
    from pi_lora.models.loaded import load_base
    from pi_lora.models.resolve import resolve_model

    dtype = dtype_named(fast_dtype())
    loaded = load_base(resolve_model(model), dtype, attention=kernel).eval()
    ids = torch.randint(loaded.config.vocab_size, (1, tokens))
    with torch.inference_mode():
        # What is slow the first time only, such as the choice of kernels, is nobody's.
        loaded.base_model(ids[:, :64], use_cache=False)
        started = time.perf_counter()
        loaded.base_model(ids, use_cache=False)
        seconds = time.perf_counter() - started
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": round(seconds, 4), "peak_bytes": 1024 * kibibytes}


def training(model: str, tokens: int, kernel: str) -> Cost:
    """A step of `pi-lora train` by its own log, after a first one that does not count."""
    changes = (
        f"model.attention={kernel}",
        f"data.sequence_tokens={tokens}",
        f"training.steps={STEPS}",
        "context.target=65536",
        CHECKPOINTING,
    )
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "steps.yaml"
        recipe.write_text(RECIPE.format(model=model, data=DATA), encoding="utf-8")
        first, *_, last = training_log(str(recipe), *changes, "--force")
    seconds = last["seconds"] - first["seconds"]
    return {
        "seconds": round(seconds / (STEPS - 1), 2),
        "peak_bytes": last["peak_memory"],
        "first_loss": first["loss"],
    }


def fast_dtype() -> str:
    """The dtype in which this processor is the fastest."""
    from pi_lora.models.device import has_fast_bfloat16

    return "bfloat16" if has_fast_bfloat16() else "float32"


def compare(name: str, work: Callable[[str, int, str], Cost], model: str, tokens: int) -> None:
    """Measure with both kernels, keep the costs, and print them."""
    costs = {kernel: apart(work, model, tokens, kernel) for kernel in KERNELS}
    faster = costs["sdpa"]["seconds"] / costs["auto"]["seconds"]
    row = {"name": name, "tokens": tokens, "dtype": fast_dtype(), **costs, "times_as_fast": round(faster, 3)}
    print(row, flush=True)
    write_row("attention", ("rows", f"{name}, {tokens} tokens"), row)


def main() -> None:
    parser_of(__doc__).parse_args()
    short, long = LENGTHS
    compare("layers of Gemma 3 270M", layers, GEMMA, short)
    compare("layers of Gemma 3 270M", layers, GEMMA, long)
    compare("layers of SmolLM2-135M", layers, MODEL, short)
    compare("training step of Gemma 3 270M", training, GEMMA, short)


if __name__ == "__main__":
    main()
