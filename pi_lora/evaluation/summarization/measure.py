"""ROUGE of a model's summaries, kept batch by batch, so that an interrupted measurement continues; and the summary of
one document.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ValidationError
from rouge_score.rouge_scorer import RougeScorer
from transformers import TextStreamer

from pi_lora.data.examples import Account, Prompt, Prompter, Task, prompted
from pi_lora.data.sources import SCROLLS, find_table
from pi_lora.distributed import is_leader
from pi_lora.errors import DataError
from pi_lora.evaluation.forward import described, prompts_at_once
from pi_lora.evaluation.journal import Session
from pi_lora.evaluation.metrics import Interval
from pi_lora.evaluation.summarization.generation import generate
from pi_lora.evaluation.summarization.scores import ROUGES, SummarizationScores
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import Sampling, SummarizationOptions
from pi_lora.recipe.schema import Data
from pi_lora.run import Run
from pi_lora.types import Json
from pi_lora.writing import first_problem, write_whole

GOVREPORT: Json = {"source": {"name": SCROLLS, "subset": "gov_report"}, "document": "input", "summary": "output"}
# Columns of a user's own rows unless they say: the words of the recipe's keys.
COLUMNS: Json = {"source": {}, "document": "document", "summary": "summary"}
PROMPT_KEYS = ("document", "summary", "template", "completion", "document_tokens", "special_tokens")
RESAMPLES = 1000


class Summaries(BaseModel):
    """The texts that were written after a batch of prompts."""

    texts: list[str]


def evaluation_data(model: str, options: SummarizationOptions) -> Data:
    """Return the rows to measure `model` on, and their prompts, as a recipe's `data`: those of the options if they name
    data, else what the run was tuned on if that were examples, else GovReport; of the validation split unless the
    options say. Raise DataError if keys do not go together.
    """
    run = Run(Path(model))
    tuned_on = run.recipe.data if run.has_recipe else None
    rows = COLUMNS if options.data else GOVREPORT
    if tuned_on is not None and tuned_on.has_examples:
        rows = {**tuned_on.model_dump(), "source": {} if options.data else tuned_on.source[0].model_dump()}
    other_prompt: Json = {}
    if options.template:
        other_prompt = {"document": None, "summary": None, "completion": None}
    elif options.document and options.summary:
        other_prompt = {"template": None, "completion": None}
    given = options.model_dump(include=set(PROMPT_KEYS), exclude_defaults=True)
    if options.max_new_tokens:
        given["completion_tokens"] = options.max_new_tokens
    source = options.model_dump(include={"subset", "split"}, exclude_none=True)
    source |= {"name": options.data} if options.data else {}
    try:
        source = {"split": "validation", **rows["source"], **source}
        return Data.model_validate({**rows, **other_prompt, **given, "source": source})
    except ValidationError as error:
        raise DataError(f"--data: {first_problem(error)}") from None


def complete(options: SummarizationOptions, data: Data) -> SummarizationOptions:
    """Return the options with what `evaluation_data` found, so that another model is measured on the same rows."""
    source = data.source[0]
    named = {"data": source.name, "subset": source.subset, "split": source.split}
    return options.changed(**data.model_dump(include=set(PROMPT_KEYS)), **named, max_new_tokens=data.completion_tokens)


def evaluate_summarization(loaded: Model, options: SummarizationOptions, session: Session) -> SummarizationScores:
    """Score by ROUGE what a model writes. Raise DataError if the data cannot be read, lacks a column or holds nothing,
    or the window is too short.
    """
    data = evaluation_data(loaded.name, options)
    options = complete(options, data)
    task, table, account = Task.of(data), find_table(data.source[0]), Account()
    prompter = Prompter(task, loaded.tokenizer, loaded.window)
    batches = prompted(table.read(task.columns, None), prompter, account, options.limit)
    examples = [example for batch in batches for example in batch]
    if not examples:
        no_room = f"--max-new-tokens: {task.completion_tokens} leave no room for a document of {table.name}"
        raise account.nothing(
            table.name, f"{no_room} in the window of {loaded.window} tokens; choose fewer, or a model that reads more"
        )
    for line in account.left_out:
        session.say(line)
    prompts = [prompt for _, _, prompt in examples]
    references = [row[task.completion] for _, row, _ in examples]
    texts = _written(loaded, prompts, options, session, {"data": table.identity(), "task": asdict(task)})
    if options.predictions and is_leader():
        lines = [
            json.dumps({"id": name, "prediction": text, "reference": reference}) + "\n"
            for (name, _, _), text, reference in zip(examples, texts, references, strict=True)
        ]
        write_whole(Path(options.predictions), "".join(lines))
    means, intervals = rouge(texts, references)
    return SummarizationScores(
        **described(loaded),
        options=options,
        task=asdict(task),
        examples=len(examples),
        left_out={"empty": len(account.empty), "too_long": len(account.too_long)},
        documents_cut=sum(prompt.kept < prompt.document_tokens for prompt in prompts),
        **means,
        intervals=intervals,
    )


def _written(
    loaded: Model, prompts: Sequence[Prompt], options: SummarizationOptions, session: Session, decided_by: Json
) -> list[str]:
    """Return a summary for each prompt. Each batch has its own seed, so that neither interruptions nor the number of
    processes change what is written.
    """
    size = options.batch_size or prompts_at_once(loaded.window)
    decided_by = {**decided_by, "options": options.model_dump(exclude={"predictions"}), "batch_size": size}
    journal = session.journal(loaded, decided_by)
    starts = [str(start) for start in range(0, len(prompts), size)]
    mine = list(journal.share(starts))

    def write(start: str) -> Summaries:
        batch = [prompt.ids for prompt in prompts[int(start) : int(start) + size]]
        texts = generate(loaded, batch, options, options.seed + int(start))
        session.progress(mine.index(start) + 1, len(mine))
        return Summaries(texts=texts)

    written = journal.measure(Summaries, starts, write)
    return [text for start in starts for text in written[start].texts]


def rouge(predictions: Sequence[str], references: Sequence[str]) -> tuple[dict[str, float], dict[str, Interval]]:
    """Return the means of ROUGE-1, -2 and -L (Lin 2004) of predictions against one reference each, in percent, as
    SCROLLS computes them, and their 95 % intervals from bootstrap samples of the examples.

    >>> rouge(["The cats sat."], ["the cat sat"])[0]["rougeL"]
    100.0
    """
    scorer = RougeScorer(list(ROUGES), use_stemmer=True)
    pairs = zip(references, predictions, strict=True)
    scores = [[100 * score.fmeasure for score in scorer.score(*pair).values()] for pair in pairs]
    values = np.array(scores)  # (examples, 3)
    samples = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    bounds = np.percentile(values[samples].mean(axis=1), [2.5, 97.5], axis=0)
    means = dict(zip(ROUGES, values.mean(axis=0).tolist(), strict=True))
    return means, {name: (low, high) for name, low, high in zip(ROUGES, *bounds.tolist(), strict=True)}


def summarize(loaded: Model, name: str, text: str, sampling: Sampling, say: Callable[[str], object]) -> None:
    """Print a summary of `text` as it is written, by the prompt that the model was tuned on or the paper's, and `say`
    what was cut off; raise DataError if the prompt needs more than a document, or the window has no room for one.
    """
    data = evaluation_data(loaded.name, SummarizationOptions(**sampling.model_dump()))
    task = Task.of(data)
    if task.document is None or task.prompt_columns != [task.document]:
        raise DataError(
            f"{loaded.name}: was tuned on prompts of {' and '.join(task.prompt_columns)}, not of a document alone; "
            "write such rows and measure them with pi-lora eval summarization"
        )
    # All that fits is read, also where examples of training were cut shorter.
    task = replace(task, document_tokens=loaded.window)
    [prompt] = Prompter(task, loaded.tokenizer, loaded.window).prompts([{str(task.document): text}])
    if not prompt.fits:
        raise DataError(
            f"--max-new-tokens: {task.completion_tokens} leave no room for a document in the {loaded.window} tokens "
            f"that {loaded.name} reads; choose fewer"
        )
    if prompt.kept < prompt.document_tokens:
        cut = f"{prompt.document_tokens:,} tokens are longer than the window of {loaded.name}"
        say(f"{name}: {cut}; truncated to the first {prompt.kept:,}")
    sampling = sampling.changed(max_new_tokens=task.completion_tokens)
    streamer = TextStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
    generate(loaded, [prompt.ids], sampling, sampling.seed, streamer)
