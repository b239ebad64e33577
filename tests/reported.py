"""Run folders with results and without training, to report on."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from conftest import small_recipe
from pi_lora.models.device import hardware, versions
from pi_lora.models.resolve import resolve_model
from pi_lora.recipe.files import RECIPE_FILE, dump_recipe
from pi_lora.recipe.schema import Recipe
from pi_lora.run import Run
from pi_lora.scaling.extension import Extension
from random_runs import save_run

FACTS = {
    "original": 64,
    "trainable_parameters": 1000,
    "tokens": 1024,
    "seconds": 2.5,
    "peak_memory": 2**30,
    "loss": 1.25,
}


def perplexity(at_64: float, at_128: float, data: str = "builtin:stdlib") -> dict[str, Any]:
    windows = [{"window": 64, "perplexity": at_64, "tokens": 100}, {"window": 128, "perplexity": at_128, "tokens": 100}]
    options = {"data": data, "documents": 3, "stride": 32, "windows": [64, 128]}
    return {"measurement": "perplexity", "model": "m", "scale": 2.0, **options, "windows": windows, "options": options}


def passkey(k_max: int) -> dict[str, Any]:
    depths = [{"k": k, "distance": k, "success_rate": float(k <= k_max), "trials": 4} for k in (32, 64, 96, 128)]
    options = {"target": 128, "depths": 4, "trials": 4}
    about = {"measurement": "passkey", "model": "m", "scale": 2.0, "seed": 0}
    return {**about, "target": 128, "k_max": k_max, "depths": depths, "options": options}


def passkey_map() -> dict[str, Any]:
    lengths = [{**passkey(96), "target": target} for target in (64, 128)]
    return {**passkey(96), "lengths": lengths}


def benchmarks(accuracy: float, stderr: float | None) -> dict[str, Any]:
    """As `pi-lora eval benchmarks` writes them: a single example has no standard error."""
    task = {"acc": accuracy, "stderr": stderr, "shots": 0, "examples": 100}
    about = {"model": "m", "scale": 2.0, "dtype": "float32", "options": {"tasks": ["boolq"]}}
    return {"measurement": "benchmarks", **about, "lm_eval": "0.4.13", "tasks": {"boolq": task}}


def ruler(windows: dict[int, dict[str, list[float]]]) -> dict[str, Any]:
    """As `pi-lora eval ruler` writes them, of the outcomes by window and task."""
    lengths = [
        {
            "window": window,
            "score": fmean(fmean(found) for found in tasks.values()),
            "tasks": {
                name: {
                    "samples": len(found),
                    "length": window,
                    "tokens": window,
                    "score": fmean(found),
                    "outcomes": found,
                }
                for name, found in tasks.items()
            },
        }
        for window, tasks in windows.items()
    ]
    about = {"measurement": "ruler", "model": "m", "options": {}, "window": 64}
    return {**about, "lengths": lengths, "effective_length": max(windows)}


def summarization(rouge1: float, rouge2: float, rouge_l: float) -> dict[str, Any]:
    """As `pi-lora eval summarization` writes them."""
    rouge = {"rouge1": rouge1, "rouge2": rouge2, "rougeL": rouge_l}
    per_example = {name: [value - 1, value, value + 1] for name, value in rouge.items()}
    return {
        "measurement": "summarization",
        "model": "m",
        "scale": 2.0,
        "window": 128,
        "options": {"data": "govreport", "split": "test"},
        "examples": 1000,
        "left_out": {"empty": 0, "too_long": 0},
        "documents_cut": 3,
        **rouge,
        "per_example": per_example,
    }


SCORES = {
    "perplexity-base": perplexity(8.5, 60.25),
    "perplexity-step-0": {**perplexity(40.0, 45.5), "step": 0},
    "perplexity": perplexity(9.0, 7.125),
    "passkey-base": passkey(32),
    "passkey": passkey(128),
}


def make_run(model: Path, folder: Path, scores: dict[str, Any] = SCORES, recipe: Recipe | None = None) -> Path:
    """A run from `model` with random adapters, as if it had been trained and measured."""
    recipe = recipe or small_recipe(model)
    run = save_run(model, folder, Extension(recipe.context.target), r=2, target_modules="all-linear")
    (run / "README.md").unlink()  # PEFT's
    (run / RECIPE_FILE).write_text(dump_recipe(recipe))
    Run(run).record(
        {
            "origin": resolve_model(str(model)).base.fingerprint(tokenizer="0", data="0").model_dump(),
            **FACTS,
            "versions": versions(),
            "hardware": hardware(),
        }
    )
    log = [{"step": step, "loss": 3.0 / step, "seconds": float(step)} for step in (1, 2, 3, 4)]
    (run / "training.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    (run / "scores").mkdir()
    for name, each in scores.items():
        (run / "scores" / f"{name}.json").write_text(json.dumps(each))
    return run
