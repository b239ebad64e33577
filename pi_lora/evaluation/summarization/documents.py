"""The rows that summaries are measured on, as a run was tuned on them, of GovReport, or a user's own; and the summary
of one document.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from pi_lora.data.sources import SCROLLS
from pi_lora.errors import DataError
from pi_lora.evaluation.generation import Write, generate
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import Sampling, SummarizationOptions
from pi_lora.recipe.schema import Data
from pi_lora.run import Run
from pi_lora.types import Json
from pi_lora.writing import first_problem

GOVREPORT: Json = {"source": {"name": SCROLLS, "subset": "gov_report"}, "document": "input", "summary": "output"}
# Columns of a user's own rows unless they say: the words of the recipe's keys.
COLUMNS: Json = {"source": {}, "document": "document", "summary": "summary"}
PROMPT_KEYS = {"document", "summary", "template", "completion", "document_tokens", "special_tokens"}


def evaluation_data(model: str, options: SummarizationOptions) -> Data:
    """Return the rows to measure `model` on, and their prompts, as a recipe's `data`: those of the options if they name
    data, else what the run was tuned on if that were examples, else GovReport; of the validation split unless the
    options say. Raise DataError if keys do not go together.
    """
    run = Run(Path(model))
    rows = COLUMNS if options.data else GOVREPORT
    if run.has_recipe and run.recipe.data.has_examples:
        tuned_on = run.recipe.data
        rows = {**tuned_on.model_dump(), "source": {} if options.data else tuned_on.source[0].model_dump()}
    given = options.model_dump(include=PROMPT_KEYS, exclude_defaults=True)
    if options.template:
        given = {"document": None, "summary": None, **given}
    if options.max_new_tokens:
        given["completion_tokens"] = options.max_new_tokens
    named = {"name": options.data, "subset": options.subset, "split": options.split}
    source = {"split": "validation", **rows["source"], **{key: name for key, name in named.items() if name}}
    try:
        return Data.model_validate({**rows, **given, "source": source})
    except ValidationError as error:
        raise DataError(f"--data: {first_problem(error)}") from None


def complete(options: SummarizationOptions, data: Data) -> SummarizationOptions:
    """Return the options with what `evaluation_data` found, so that another model is measured on the same rows."""
    source = data.source[0]
    named = {"data": source.name, "subset": source.subset, "split": source.split}
    return options.changed(**data.model_dump(include=PROMPT_KEYS), **named, max_new_tokens=data.completion_tokens)


def summarize(
    loaded: Model, name: str, text: str, sampling: Sampling, say: Callable[[str], object], write: Write
) -> None:
    """Write a summary of `text` as it is generated, by the prompt that the model was tuned on or the paper's, and `say`
    what was cut off; raise DataError if the prompt needs more than a document, or the window has no room for one.
    """
    # Imported here, as in the measurement.
    from pi_lora.data.examples import Prompter, Task

    data = evaluation_data(loaded.name, SummarizationOptions(**sampling.model_dump()))
    # All that fits is read, also where examples of training were cut shorter.
    task = replace(Task.of(data), document_tokens=loaded.window)
    if task.document is None or task.prompt_columns != [task.document]:
        columns = " and ".join(task.prompt_columns)
        raise DataError(
            f"{loaded.name}: was tuned on prompts of {columns}; try pi-lora eval summarization on such rows"
        )
    [prompt] = Prompter(task, loaded.tokenizer, loaded.window).prompts([{task.document: text}])
    if not prompt.fits:
        raise DataError(no_room(loaded, task.completion_tokens))
    if prompt.kept < prompt.document_tokens:
        cut = f"{prompt.document_tokens:,} tokens are longer than the window of {loaded.name}"
        say(f"{name}: {cut}; truncated to the first {prompt.kept:,}")
    generate(loaded, [prompt.ids], sampling.changed(max_new_tokens=task.completion_tokens), sampling.seed, write)


def no_room(loaded: Model, completion_tokens: int) -> str:
    """Return that the window holds no document beside its summary."""
    left = f"{completion_tokens} leave no room for a document in the {loaded.window} tokens"
    return f"--max-new-tokens: {left} that {loaded.name} reads; choose fewer, or a model that reads more"
