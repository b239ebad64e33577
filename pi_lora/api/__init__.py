"""The commands as functions, for the command line and for Python alike: names and plain values in, typed results out.

Models are named as on the command line, or given as a loaded model, or as the run that `train` returns. Paths are
strings or `Path`, and `~` is the home folder. Every mistake that a user can correct is a `PiLoraError`.
"""

from pi_lora.api.engines import check_server, export_gguf, extend, merge, override_lines, write_reference
from pi_lora.api.information import (
    environment,
    push,
    recipe_keys,
    resolve_recipe,
    shipped_recipes,
    write_report,
    write_theory,
)
from pi_lora.api.inputs import load, resolve
from pi_lora.api.measuring import (
    compare,
    evaluate,
    evaluate_run,
)
from pi_lora.api.probing import probe, search
from pi_lora.api.texts import generate, read_prompt, summarize
from pi_lora.api.training import launch_arguments, new, plan, prepare, resolve_training, run_training, train

__all__ = [
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
