"""Extend the context window of RoPE language models: choose a scaling, tune, measure, merge."""

import os

from pi_lora.errors import PiLoraError

# Nothing else is imported here, not even `typing`: until `pi_lora.__main__` runs, Ctrl-C ends in a traceback.
# huggingface_hub reads this when it is imported; TRL reports every training otherwise.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
TYPE_CHECKING = False
if TYPE_CHECKING:
    from pi_lora.api import (
        check_server,
        compare,
        environment,
        evaluate,
        evaluate_run,
        export_gguf,
        extend,
        generate,
        launch_arguments,
        load,
        merge,
        new,
        override_lines,
        plan,
        prepare,
        probe,
        push,
        read_prompt,
        recipe_keys,
        resolve,
        resolve_recipe,
        resolve_training,
        run_training,
        search,
        shipped_recipes,
        summarize,
        train,
        write_reference,
        write_report,
        write_theory,
    )
    from pi_lora.model_ref import ModelRef
    from pi_lora.models.loaded import LoadedModel
    from pi_lora.models.source import ModelSource
    from pi_lora.recipe.schema import Recipe
    from pi_lora.run import Run
    from pi_lora.scaling.extension import Extension

    __version__: str

# Where the classes are.
CLASSES = {
    "Extension": "pi_lora.scaling.extension",
    "LoadedModel": "pi_lora.models.loaded",
    "ModelRef": "pi_lora.model_ref",
    "ModelSource": "pi_lora.models.source",
    "Recipe": "pi_lora.recipe.schema",
    "Run": "pi_lora.run",
}
__all__ = [
    "Extension",
    "LoadedModel",
    "ModelRef",
    "ModelSource",
    "PiLoraError",
    "Recipe",
    "Run",
    "check_server",
    "compare",
    "environment",
    "evaluate",
    "evaluate_run",
    "export_gguf",
    "extend",
    "generate",
    "launch_arguments",
    "load",
    "merge",
    "new",
    "override_lines",
    "plan",
    "prepare",
    "probe",
    "push",
    "read_prompt",
    "recipe_keys",
    "resolve",
    "resolve_recipe",
    "resolve_training",
    "run_training",
    "search",
    "shipped_recipes",
    "summarize",
    "train",
    "write_reference",
    "write_report",
    "write_theory",
]


if not TYPE_CHECKING:  # a type checker would take every name for one of the module

    def __getattr__(name: str) -> object:
        """Import what needs torch only when it is asked for, so that the command line starts at once."""
        import importlib
        import importlib.metadata

        if name == "__version__":
            return importlib.metadata.version("pi-lora")
        if name in CLASSES:
            return getattr(importlib.import_module(CLASSES[name]), name)
        if name in __all__:
            return getattr(importlib.import_module("pi_lora.api"), name)
        raise AttributeError(f"module 'pi_lora' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__", "errors"]
