"""The probe of untuned scalings, and the search for divisors of the rotary frequencies."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi_lora.api.inputs import (
    AnyModel,
    FilePath,
    command,
    join_launched_processes,
    optional_path,
    path_of,
    resolve,
    section_of,
)
from pi_lora.errors import RunExistsError
from pi_lora.types import LIBRARIES, ui

if TYPE_CHECKING:
    from pi_lora.evaluation.probe import Probe
    from pi_lora.evaluation.search import SearchResult


@command
def probe(
    model: AnyModel,
    target: int | str | Sequence[int | str],
    *,
    json: FilePath | None = None,
    progress: bool = False,
    **options: Any,
) -> "Probe":
    """Measure before any tuning which scaling suits a model, as `pi-lora probe` does.

    Args:
        model: A plain base.
        target: L', the window to extend to, in tokens; several to see how far the model reaches.
        json: A file to write the probe to, for `new` and `extend`.
        progress: Whether to show a progress bar.
        options: The options of the command: `data`, `scalings`, `factors`, `documents`, `trials`, `seed`, `column`.

    Returns:
        The probe: `at(target)` has the scores of all `scalings`, and the `best` one.

    Raises:
        PiLoraError: An option is wrong, the model is a run, or a scaling does not suit it.
    """
    with ui.working(LIBRARIES):
        from pi_lora.evaluation import probe as probing
        from pi_lora.recipe.evaluation import ProbeOptions

        targets = [target] if isinstance(target, int | str) else target
        section = section_of(ProbeOptions, {**options, "target": targets})
        source = resolve(model)
        join_launched_processes()
    file = optional_path(json)
    probed = probing.probe(source, section, json=file)
    _show_probe(probed, file)
    return probed


def _show_probe(probed: "Probe", file: Path | None) -> None:
    """Show the results of a probe that is kept in `file`, and what to do next."""
    from pi_lora.evaluation.probe import next_command, probe_table

    scalings = [scaling for result in probed.targets for scaling in result.scalings.values()]
    if not any(scaling.retrieved and scaling.retrieved.value for scaling in scalings):
        ui.show(f"{probed.model}: finds no passkey at any length; retrieval cannot be searched for with pi-lora search")
    for result in probed.targets:
        ui.show_table(probe_table(probed, result))
        advice = "no tuning is needed"
        if not result.enough:
            advice = "tuning can add to it"
            if file is None:
                advice += "; --json FILE keeps this for pi-lora new --probe FILE"
        ui.show(f"{result.summary}; {advice}:")
        ui.copy(next_command(probed, result, file))


@command
def search(
    model: AnyModel,
    target: int,
    output: FilePath,
    *,
    progress: bool = False,
    **options: Any,
) -> "SearchResult":
    """Search for the divisors of the rotary frequencies with which a model reads and retrieves best at a target window,
    as `pi-lora search` does. `probe` measures them with `factors=output`.

    Args:
        model: A plain base.
        target: L', the window to extend to, in tokens.
        output: The new file. It serves as `context.factors` of a recipe, and as `factors` of `probe` and `extend`.
        progress: Whether to show a progress bar.
        options: The options of the command: `data`, `column`, `minutes`, `documents`, `seed`.

    Returns:
        The `factors`, the divisors of all frequencies, with the `attention_factor` and the scores.

    Raises:
        PiLoraError: An option is wrong, the file exists, the model cannot be extended so, or the text is too short.
    """
    with ui.working(LIBRARIES):
        from pi_lora.evaluation.search import probe_command, search
        from pi_lora.recipe.evaluation import SearchOptions

    section = section_of(SearchOptions, {"target": target, **options})
    source = resolve(model)
    file = path_of(output)
    if file.exists():
        raise RunExistsError(f"{file}: exists, and is not overwritten; remove it, or name another --output")
    result = search(source, section, file)
    ui.show(f"{file}: divisors found in {result.steps:,} steps; measure them on other text beside untuned scalings:")
    ui.copy(probe_command(result, file))
    return result
