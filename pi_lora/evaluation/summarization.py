"""Summaries of long documents (paper.tex, section 3.5), scored by ROUGE and journalled batch by batch: of the rows that
a run was tuned on, of GovReport, or of other rows; and the summary of one document.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from statistics import fmean

from pydantic import Field

from pi_lora.data.chats import chat_problem
from pi_lora.data.checks import data_problems
from pi_lora.data.documents import looks_local
from pi_lora.data.examples import EMPTY, NO_EXAMPLE, TOO_LONG, Prompter, Task
from pi_lora.data.sources import SCROLLS, find_table, format_counts, streamed, trains_on
from pi_lora.errors import DataError
from pi_lora.evaluation.duration import budget_here
from pi_lora.evaluation.forward import prompts_at_once
from pi_lora.evaluation.generation import generate
from pi_lora.evaluation.measurement import (
    About,
    Measurement,
    Metric,
    Preview,
    Scores,
    Session,
    Value,
    average,
    header_of,
)
from pi_lora.models.loaded import LoadedModel
from pi_lora.models.source import ModelSource
from pi_lora.recipe.budget import MAX_SAMPLES, affordable
from pi_lora.recipe.data import Data
from pi_lora.recipe.evaluation import Sampling, SummarizationOptions, number_of
from pi_lora.recipe.schema import Recipe
from pi_lora.storage import digest_of
from pi_lora.types import Json, ui

GOVREPORT = Data.model_validate(
    {
        "source": {"name": SCROLLS, "subset": "gov_report"},
        "document": "input",
        "summary": "output",
    }
)
PROMPT_KEYS = {"document", "summary", "template", "completion", "document_tokens", "special_tokens"}
SOURCE_KEYS = {"subset", "split", "revision", "hold_out"}
ROUGES = ("rouge1", "rouge2", "rougeL")


class SummarizationScores(Scores):
    """ROUGE F1 in percent over `examples`, `per_example` of the `rows`, a digest of the `texts` of all rows, and the
    number of truncated documents.
    """

    measurement = "summarization"

    options: SummarizationOptions
    examples: int = 0
    left_out: Json | None = None
    documents_cut: int = 0
    rouge1: float
    rouge2: float
    rougeL: float
    per_example: dict[str, list[float]] = Field(default={})
    rows: list[str] | None = None
    texts: str = ""


class Summarization(Measurement[SummarizationOptions, SummarizationScores]):
    """Summaries of long documents, scored by ROUGE (paper, section 3.5)."""

    options = SummarizationOptions
    scores = SummarizationScores

    def prepare(self, options: SummarizationOptions, models: Sequence[ModelSource]) -> SummarizationOptions:
        """Fill in the rows and the prompt, the same for all models: by default those of the first model that was tuned
        on examples, of rows those that were held out, or GovReport. Raise DataError if all of them trained.
        """
        import rouge_score  # noqa: F401  # before weights are read

        chosen = next(filter(has_task, models), models[0])
        completed, data = complete(options, chosen.recipe)
        [source] = data.source
        if options.data is None and looks_local(source.name) and not source.hold_out:
            raise DataError(
                f"{chosen.name}: was tuned on all rows of {source.name}; name others with --data, "
                "or tune with data.source.hold_out"
            )
        for model in models:
            own, _ = complete(options, model.recipe)
            differing = [key.replace("_", " ") for key, value in completed if getattr(own, key) != value]
            if differing:
                ui.say(f"{model.name}: is measured as {chosen.name}, with its {', '.join(differing)}")
        tokens = completed.document_tokens or max(model.window for model in models)
        limit = options.limit or affordable(budget_here(), tokens, MAX_SAMPLES)
        # The prompt of a tuning is raw.
        chat = False if options.chat == "auto" and has_task(chosen) else options.chat
        return completed.changed(limit=limit, chat=chat)

    def problems(self, options: SummarizationOptions, preview: Preview) -> list[str]:
        """Return the problems of rows that the options name, and of their prompt."""
        if options.data is None:
            return []
        _, rows = complete(options, preview.recipe)
        return data_problems(
            rows,
            preview.ask_hub,
            key=preview.key("data"),
            held_out=True,
            tokenizer=preview.tokenizer,
            window=preview.window,
        )

    def measure(self, model: LoadedModel, options: SummarizationOptions, session: Session) -> SummarizationScores:
        """Score the summaries of a model. Raise DataError if the data cannot be read, lacks a column or is empty, or if
        the window is too short.
        """
        data = rows_of(options)
        prompter = Prompter(data, model.tokenizer, model.window, chat=options.chat is True)
        [source] = data.source
        limit = number_of(options.limit)
        table = find_table(streamed(source) if limit else source)
        counts = Counter[str]()
        examples = list(prompter.examples(table, counts, limit, held_out=True))
        if not examples:
            raise DataError(f"{source.name}: {NO_EXAMPLE}")
        for line in format_counts(counts):
            session.say(line)
        prompts = [prompt for _, _, prompt, _ in examples]
        references = [row[prompter.task.completion] for _, row, _, _ in examples]
        batch_size = prompts_at_once(model, model.window, options.batch_size)

        def write_batch(start: int) -> list[str]:
            """Generate a batch of summaries. Every batch has a seed, so that neither interruptions nor the number of
            processes change the summaries.
            """
            batch = [prompt.ids for prompt in prompts[start : start + batch_size]]
            seed = (options.seed + start) % 2**32
            return generate(model, batch, options.changed(seed=seed))

        about = About("summarization", f"{len(prompts)} summaries", ("limit", len(prompts) // 4))
        decided_by = {"rows": table.identity, "batch_size": batch_size}
        starts = range(0, len(prompts), batch_size)
        batches = session.map_items(model, options, decided_by, items=starts, function=write_batch, about=about)
        summaries = list(chain.from_iterable(batches))
        rouges = rouge(summaries, references)
        means: Json = {name: fmean(f1_scores) for name, f1_scores in rouges.items()}
        return SummarizationScores(
            **header_of(model),
            options=options,
            examples=len(examples),
            left_out={"empty": counts[EMPTY], "too_long": counts[TOO_LONG]},
            documents_cut=sum(prompt.kept < prompt.document_tokens for prompt in prompts),
            **means,
            per_example=rouges,
            rows=[name for name, _, _, _ in examples],
            texts=digest_of([str(row) for _, row, _, _ in examples]),
            tuned_on=is_tuned_on(model.source, data),
        )

    def metrics(self, scores: SummarizationScores) -> Iterator[Metric]:
        """Yield ROUGE-1, -2 and -L with intervals over examples."""
        for name in ROUGES:
            f1_scores = scores.per_example.get(name, ())
            rows = scores.rows or range(len(f1_scores))
            yield average(
                label=f"ROUGE-{name[-1]}",
                mean=getattr(scores, name),
                values=[Value(f"example {row}{scores.texts}", f1) for row, f1 in zip(rows, f1_scores, strict=True)],
                digits=2,
                dataset=scores.options.data or "",
                hub_name=name,
            )


def has_task(model: ModelSource) -> bool:
    """Whether a model was tuned on prompts with completions."""
    return model.recipe is not None and model.recipe.data.has_examples


def complete(options: SummarizationOptions, tuned_by: Recipe | None) -> tuple[SummarizationOptions, Data]:
    """Return the complete options, and their rows and prompts as the data section of a recipe.

    Options that are not set are those of the recipe that a run was `tuned_by`, or those for GovReport. The default
    split of a hub data set is the split that the tuning held a part out of; without such a part it is `validation`, or
    `test` for a run that was tuned on `validation`. Raise RecipeError if keys conflict.
    """
    default_data = tuned_by.data if tuned_by and tuned_by.data.has_examples else GOVREPORT
    defaults = {
        **default_data.model_dump(include=PROMPT_KEYS),
        "max_new_tokens": default_data.completion_tokens,
        "split": "validation",
    }
    tuned_on = [source for source in default_data.source if options.data in (None, source.name)]
    if tuned_on:
        source = max(tuned_on, key=lambda source: source.hold_out or 0)
        defaults |= {"data": source.name, "subset": source.subset, "revision": source.revision}
        if source.split == "validation":
            defaults["split"] = "test"
        if source.hold_out and options.split in (None, source.split):
            defaults |= {"split": source.split, "hold_out": source.hold_out}
    if options.template:
        defaults |= {"document": None, "summary": None}
    requested = options.model_dump(exclude_unset=True, exclude_none=True)
    completed = options.changed(**{**defaults, **requested})
    return completed, rows_of(completed)


def rows_of(options: SummarizationOptions) -> Data:
    """Return the rows and prompts that complete options name, as the data section of a recipe."""
    return GOVREPORT.changed(
        **options.model_dump(include=PROMPT_KEYS),
        source={"name": options.data, **options.model_dump(include=SOURCE_KEYS, exclude_none=True)},
        completion_tokens=options.max_new_tokens,
    )


def is_tuned_on(model: ModelSource, data: Data) -> bool:
    """Whether a model may be tuned on the rows that `data` holds out: if other columns decide, other rows trained."""
    source = data.source[0].changed(column="")  # as of the texts of a run
    tuned = model.recipe.data if model.recipe else None
    if not tuned or not tuned.has_examples or Task(tuned).held_out_by != Task(data).held_out_by:
        source = source.changed(hold_out=None)
    return trains_on(model.texts, source)


def rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, list[float]]:
    """Return ROUGE-1, -2 and -L (Lin 2004) in percent, computed as in SCROLLS, of predictions with one reference each.

    >>> rouge(["The cats sat."], ["the cat sat"])["rougeL"]
    [100.0]
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGES), use_stemmer=True)
    scores = [scorer.score(*pair) for pair in zip(references, predictions, strict=True)]
    return {name: [100 * score[name].fmeasure for score in scores] for name in ROUGES}


def summarize(loaded: LoadedModel, name: str, text: str, sampling: Sampling, say: Callable[[str], object]) -> str:
    """Print a summary of `text` as it is generated, and return the summary. The prompt is the one that the model was
    tuned on, or the paper's, in the chat template if the model has one. `say` reports the truncation of the text. Raise
    DataError if the prompt has more columns than a document, or the window has no room for a document.
    """
    # The document may fill the window, also if the documents of the training were truncated to fewer tokens.
    options = SummarizationOptions(**sampling.model_dump(), document_tokens=loaded.window)
    options, data = complete(options, loaded.source.recipe)
    in_template = not has_task(loaded.source) and not chat_problem(loaded.tokenizer)
    prompter = Prompter(data, loaded.tokenizer, loaded.window, chat=in_template)
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
    [summary] = generate(loaded, [prompt.ids], options, stream=True)
    return summary
