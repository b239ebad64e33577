"""Summaries of long documents (paper.tex, section 3.5), of the rows that a run was tuned on, of GovReport, or of a
user's own: scored by ROUGE, and kept batch by batch; and the summary of one document.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean

from pydantic import Field

from pi_lora.data.examples import EMPTY, NO_EXAMPLE, TOO_LONG, Prompter
from pi_lora.data.sources import SCROLLS, find_table, format_counts
from pi_lora.errors import DataError
from pi_lora.evaluation.forward import prompts_at_once
from pi_lora.evaluation.generation import generate
from pi_lora.evaluation.measurement import Measurement, Metric, Scores, Session, Value, average
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import Sampling, SummarizationOptions
from pi_lora.recipe.schema import Data
from pi_lora.types import Json

SOURCE: Json = {"name": SCROLLS, "subset": "gov_report"}
GOVREPORT = Data.model_validate({"source": SOURCE, "document": "input", "summary": "output"})
PROMPT_KEYS = {"document", "summary", "template", "completion", "document_tokens", "special_tokens"}
ROUGES = ("rouge1", "rouge2", "rougeL")


class SummarizationScores(Scores):
    """ROUGE F1 in percent over `examples`, the values `per_example`, and the number of documents that were cut."""

    measurement = "summarization"

    options: SummarizationOptions
    examples: int = 0
    left_out: Json | None = None
    documents_cut: int = 0
    rouge1: float
    rouge2: float
    rougeL: float
    per_example: dict[str, list[float]] = Field(default={})


class Summarization(Measurement[SummarizationOptions, SummarizationScores]):
    """Summaries of long documents, scored by ROUGE (paper, section 3.5)."""

    scores = SummarizationScores

    def prepare(self, options: SummarizationOptions, models: Sequence[Model]) -> SummarizationOptions:
        """Fill in the rows, by default those that the first model was tuned on, or GovReport."""
        return complete(options, models[0])[0]

    def check(self, options: SummarizationOptions) -> None:
        """Import the package that scores summaries."""
        import rouge_score  # noqa: F401

    def measure(self, model: Model, options: SummarizationOptions, session: Session) -> Json:
        """Score the summaries of a model. Raise DataError if the data cannot be read, lacks a column or holds nothing,
        or the window is too short.
        """
        _, data = complete(options, model)
        prompter = Prompter(data, model.tokenizer, model.window)
        table, counts = find_table(data.source[0]), Counter[str]()
        examples = list(prompter.examples(table.read(prompter.task.columns, None), counts, options.limit))
        if not examples:
            raise DataError(f"{data.source[0].name}: {NO_EXAMPLE}")
        for line in format_counts(counts):
            session.say(line)
        size = options.batch_size or prompts_at_once(model.window)

        def write(start: int) -> list[str]:
            """Write a batch of summaries with a seed of its own, so that neither interruptions nor the number of
            processes change them.
            """
            batch = [prompt.ids for _, _, prompt, _ in examples[start : start + size]]
            return generate(model, batch, options.changed(seed=(options.seed + start) % 2**32))

        decided_by = {**options.model_dump(), "rows": table.identity, "batch_size": size}
        written = session.measure(model, decided_by, range(0, len(examples), size), write)
        texts = [text for batch in written for text in batch]
        references = [row[prompter.task.completion] for _, row, *_ in examples]
        rouges = rouge(texts, references)
        return {
            "examples": len(examples),
            "left_out": {"empty": counts[EMPTY], "too_long": counts[TOO_LONG]},
            "documents_cut": sum(prompt.kept < prompt.document_tokens for _, _, prompt, _ in examples),
            **{name: fmean(values) for name, values in rouges.items()},
            "per_example": rouges,
        }

    def metrics(self, scores: SummarizationScores) -> list[Metric]:
        """Return ROUGE-1, -2 and -L with their intervals over examples."""
        metrics = []
        for name in ROUGES:
            values = [Value(f"example {index}", value) for index, value in enumerate(scores.per_example.get(name, ()))]
            mean, data = getattr(scores, name), scores.options.data or ""
            metrics.append(average(f"ROUGE-{name[-1]}", mean, values, digits=2, dataset=data, hub_name=name))
        return metrics


def complete(options: SummarizationOptions, model: Model) -> tuple[SummarizationOptions, Data]:
    """Return the options with all that decides the rows and their prompts, so that another model is measured on the
    same, and the rows and prompts as in a recipe. What is left open is as a run was tuned, or as for GovReport; of a
    hub data set the validation split. Raise RecipeError if keys do not go together.
    """
    usual = model.recipe.data if model.recipe and model.recipe.data.has_examples else GOVREPORT
    defaults = {**usual.model_dump(include=PROMPT_KEYS), "split": "validation"}
    if options.data is None:
        defaults |= {"data": usual.source[0].name, "subset": usual.source[0].subset}
    if options.template:
        defaults |= {"document": None, "summary": None}
    given = options.model_dump(exclude_defaults=True)
    options = options.changed(**{"max_new_tokens": usual.completion_tokens, **defaults, **given})
    source = {"name": options.data, "subset": options.subset, "split": options.split}
    prompts = options.model_dump(include=PROMPT_KEYS)
    return options, GOVREPORT.changed(**prompts, source=source, completion_tokens=options.max_new_tokens)


def rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, list[float]]:
    """Return ROUGE-1, -2 and -L (Lin 2004) of predictions against one reference each, in percent, as SCROLLS computes
    them.

    >>> rouge(["The cats sat."], ["the cat sat"])["rougeL"]
    [100.0]
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGES), use_stemmer=True)
    scores = [scorer.score(*pair) for pair in zip(references, predictions, strict=True)]
    return {name: [100 * score[name].fmeasure for score in scores] for name in ROUGES}


def summarize(loaded: Model, name: str, text: str, sampling: Sampling, say: Callable[[str], object]) -> None:
    """Print a summary of `text` as it is generated, by the prompt that the model was tuned on or the paper's, and `say`
    how much was cut off. Raise DataError if the prompt needs more than a document, or the window has no room for one.
    """
    # All that fits is read, also where examples of training were cut shorter.
    options = SummarizationOptions(**sampling.model_dump(), document_tokens=loaded.window)
    options, data = complete(options, loaded)
    prompter = Prompter(data, loaded.tokenizer, loaded.window)
    columns = prompter.task.prompt_columns
    if columns != [data.document]:
        raise DataError(
            f"{loaded.name}: was tuned on prompts of {' and '.join(columns)}; "
            "try pi-lora eval summarization on such rows"
        )
    [prompt] = prompter.prompts([dict.fromkeys(columns, text)])
    if not prompt.fits:
        raise DataError(
            f"--max-new-tokens: {data.completion_tokens} leave no room for a document in the {loaded.window} tokens "
            f"that {loaded.name} reads; choose fewer, or a model that reads more"
        )
    if prompt.kept < prompt.document_tokens:
        say(
            f"{name}: {prompt.document_tokens:,} tokens are longer than the window of {loaded.name}; "
            f"truncated to the first {prompt.kept:,}"
        )
    generate(loaded, [prompt.ids], options, stream=True)
