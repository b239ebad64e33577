"""What measuring a long window costs: pi-lora's way beside YaRN's (perplexity) and LongLoRA's (passkeys)."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from perplexity import straightforward

from on_gpu.setting import Setting, random_model
from pi_lora.evaluation.passkey.measure import evaluate_passkey
from pi_lora.evaluation.passkey.prompt import Grid, trials_at
from pi_lora.evaluation.perplexity.losses import Sweep, document_losses
from pi_lora.models.model import Model, find

sys.path.append(str(Path(__file__).parents[2] / "tests" / "evaluation"))
# Windows of each length beyond the first one, stride 256: enough to time.
WINDOWS_TIMED, STRIDE = 15, 256
# Trials that the plain way is timed on, of the whole grid.
TRIALS_TIMED = 2


def evaluation(setting: Setting, windows: list[int], grid: Grid, stride: int = STRIDE) -> dict[str, object]:
    """Tokens a second of perplexity at each window, and seconds of the grid, of a model with random weights."""
    target = max(*windows, grid.target)
    loaded = find("builtin:tiny").being_tuned(setting.name, random_model(setting, target, "lora").eval(), False)
    loaded.config = {**setting.config, "max_position_embeddings": target}
    return {
        "stride": stride,
        "perplexity": [perplexity_at(loaded.model, window, stride) for window in windows],
        "passkey": passkey(loaded, grid),
    }


def perplexity_at(model: torch.nn.Module, window: int, stride: int) -> dict[str, float]:
    """Tokens scored a second by both ways, on one document of random tokens."""
    generator = torch.Generator().manual_seed(0)
    document = torch.randint(0, model.config.vocab_size, (window + WINDOWS_TIMED * stride,), generator=generator)
    documents = [document.tolist()]
    straightforward(model, [documents[0][:window]], [window], stride)  # the first time chooses kernels
    plain = seconds_of(lambda: straightforward(model, documents, [window], stride))
    mine = seconds_of(lambda: document_losses(model, documents[0], Sweep((window,), stride)))
    # Beyond the first window, every one scores `stride` tokens.
    scored = window - 1 + WINDOWS_TIMED * stride
    return {"window": window, "pi_lora": scored / mine, "yarn": scored / plain}


def passkey(loaded: Model, grid: Grid) -> dict[str, float]:
    """Seconds of the whole grid; LongLoRA's way, a full prefill for every token of the answer, from a few trials."""
    from oracle_passkey import generated

    timed = [trials_at(loaded.tokenizer, grid, depth, range(1))[0] for depth in range(TRIALS_TIMED)]
    generated(loaded.model, loaded.tokenizer, timed[0], use_cache=False)
    plain = seconds_of(lambda: [generated(loaded.model, loaded.tokenizer, trial, use_cache=False) for trial in timed])
    mine = seconds_of(lambda: evaluate_passkey(loaded, grid))
    return {
        "target": grid.target,
        "depths": grid.depths,
        "trials": grid.trials,
        "pi_lora": mine,
        "longlora": plain / len(timed) * grid.depths * grid.trials,
        "longlora_trials_timed": len(timed),
    }


def seconds_of(work: Callable[[], object]) -> float:
    """By the clock; all of these end with numbers on the host, so that nothing is still under way."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
