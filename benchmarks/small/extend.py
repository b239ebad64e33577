"""Extending the small LLaMA through pi-lora's own training, measured as it goes."""

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pi_lora.data.sources import Choice
from pi_lora.evaluation.passkey.measure import evaluate_passkey
from pi_lora.evaluation.passkey.prompt import Grid
from pi_lora.evaluation.perplexity.measure import evaluate_perplexity
from pi_lora.models.device import device
from pi_lora.models.model import load
from pi_lora.preflight import check
from pi_lora.recipe.schema import Recipe
from pi_lora.training.training import train
from small.setting import Setting

Row = dict[str, Any]
Tell = Callable[[int, int, str], None]
# Of text and of recall documents, as the demo's recipe has them.
TEXT, RECALL = 0.4, 0.6


@dataclass(frozen=True)
class Extension:
    """One row of the tables."""

    scaling: str
    method: str
    target: int

    @property
    def name(self) -> str:
        """Of its run folder."""
        return f"{self.scaling}-{self.method}-{self.target}"


def extensions(setting: Setting) -> Iterator[Extension]:
    """PI and direct tuning of all weights as in the paper, and PI by LoRA and QLoRA beside them."""
    for scale in setting.scales:
        for scaling, method in (("direct", "full"), ("pi", "full"), ("pi", "lora"), ("pi", "qlora")):
            yield Extension(scaling, method, scale * setting.window)


def recipe_of(setting: Setting, row: Extension, base: Path, sources: Sequence[str], held_out: str) -> Recipe:
    """As `pi-lora train` takes it."""
    sequences = max(1, setting.tokens_a_step // row.target)
    text = [{"name": source, "weight": TEXT / len(sources)} for source in sources]
    return Recipe.model_validate(
        {
            "model": {"name": str(base)},
            "context": {"target": row.target},
            "scaling": row.scaling,
            "tuning": {"method": row.method, "rank": setting.rank},
            # The base has seen its text many times over as well.
            "data": {"source": [*text, {"name": "builtin:recall", "weight": RECALL}], "epochs": 20},
            "training": {
                "steps": setting.steps,
                "learning_rate": setting.tuning_rate(row.method),
                "global_batch_size": sequences,
                "log_every": 1,
                "activation_checkpointing": False,
            },
            "evaluation": {
                "every": setting.every,
                "perplexity": {
                    "data": held_out,
                    "windows": setting.windows(row.target),
                    "stride": setting.window // 2,
                    "documents": setting.documents,
                },
                "passkey": {"depths": setting.depths, "trials": setting.trials},
            },
        }
    )


def extend(setting: Setting, row: Extension, recipe: Recipe, folder: Path, tell: Tell) -> Row:
    """Train a row where its run is not there yet, and read what was measured at each step."""
    run = folder / row.name
    if not run.exists():
        train(check(recipe, run), tell)
        gc.collect()
    steps = sorted(int(file.stem.rpartition("-")[2]) for file in (run / "scores").glob("passkey-step-*.json"))
    return {
        "scaling": row.scaling,
        "method": row.method,
        "target": row.target,
        "steps": [{"step": step, **measured_at(run / "scores", step)} for step in steps],
    }


def measured_at(scores: Path, step: int) -> Row:
    """Perplexity by window, and `k_max` in tokens."""
    perplexity, passkey = (
        json.loads((scores / f"{name}-step-{step}.json").read_text()) for name in ("perplexity", "passkey")
    )
    return {
        "perplexity": {str(each["window"]): each["perplexity"] for each in perplexity["windows"]},
        "k_max": passkey["k_max"],
    }


def base_row(setting: Setting, base: Path, held_out: str) -> Row:
    """The base as it is, at every window of the largest extension, and the passkeys of its own."""
    loaded = load(str(base))
    windows = setting.windows(max(setting.scales) * setting.window)
    loaded.model.to(device())
    perplexity = evaluate_perplexity(loaded, held_out, windows, setting.window // 2, Choice(setting.documents))
    grid = Grid(min(setting.scales) * setting.window, setting.depths, setting.trials)
    passkey = evaluate_passkey(loaded, grid)
    found = {str(each.window): each.perplexity for each in perplexity.windows}
    return {"perplexity": found, "k_max": passkey.k_max}
