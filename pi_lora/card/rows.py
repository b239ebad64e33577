"""What a card says a run is: how it reads positions, what was trained on what, at which cost, and its limits."""

from collections.abc import Mapping
from typing import Any

from pi_lora.recipe.schema import Recipe
from pi_lora.rope import Config, method_of, scale_of, window_of


def positions(config: Config) -> str:
    """What becomes of position indices, in words."""
    scale = scale_of(config)
    return {
        "pi": f"positions are divided by {scale:g}",
        None: "positions are not rescaled",
        "dynamic": f"rotary frequencies are stretched for long inputs (dynamic NTK, factor {scale:g})",
        "yarn": f"rotary frequencies are stretched by YaRN, factor {scale:g}",
    }[method_of(config)]


def recipe_rows(recipe: Recipe) -> dict[str, str]:
    """What was trained, how, and on what."""
    tuning, training = recipe.tuning, recipe.training
    variant = (", rank-stabilized" if tuning.rank_stabilized else "") + (", DoRA" if tuning.dora else "")
    adapter = f", rank {tuning.rank}, alpha {tuning.lora_alpha:g}{variant}, on {tuning.targets}"
    with_norms = "; embeddings and norms in full" if tuning.embeddings_and_norms else ""
    total = sum(source.weight for source in recipe.data.source)
    return {
        "method": f"`{tuning.method}`" + (adapter + with_norms if tuning.method != "full" else ", every weight"),
        "steps": f"{training.steps:,} of {training.global_batch_size} sequences, rate {training.learning_rate:g}",
        "data": ", ".join(f"`{source.name}` ({source.weight / total:.0%})" for source in recipe.data.source),
    }


def cost_rows(made_with: Mapping[str, Any]) -> dict[str, str]:
    """Tokens, time, memory and versions, from `run.json`."""
    versions = ", ".join(f"{name} {version}" for name, version in made_with["versions"].items())
    memory = made_with["peak_memory"] / 2**30
    return {
        "cost": f"{made_with['tokens']:,} tokens in {made_with['seconds']:,.0f} seconds, at most {memory:.1f} GiB a "
        f"process, on {made_with['hardware']}",
        "last loss": f"{made_with['loss']:.3f} nats a token",
        "versions": f"{versions}, Python {made_with['python']}"
        + (f"; pi-lora at commit `{made_with['commit']}`" if made_with["commit"] else ""),
    }


def limits(config: Config) -> str:
    """What nobody should expect of the model."""
    short = (
        f"Positions are divided by {scale_of(config):g} in short inputs too: within the original window, the paper "
        "(Chen et al. 2023, section 3.4) finds benchmarks somewhat below the base's. "
        if method_of(config) == "pi"
        else ""
    )
    return (
        f"Nothing was tuned beyond {window_of(config):,} tokens. {short}What is not listed under *Measured* was not "
        "measured. License, languages and biases are those of the base and the data."
    )
