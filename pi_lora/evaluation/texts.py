"""The text of a measurement: the default one, and the documents that the options choose from it."""

import math
import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from pi_lora.data.checks import data_problems, too_short_for
from pi_lora.data.documents import Document, looks_local
from pi_lora.data.sources import (
    FOR_TRAINING,
    PINNED,
    STDLIB,
    evaluation_documents,
    held_out_share,
    texts_of,
    trains_on,
)
from pi_lora.data.tokens import strip_eos, tokenized
from pi_lora.errors import DataError
from pi_lora.evaluation.measurement import Preview
from pi_lora.models.files import BUILTIN
from pi_lora.models.loaded import LoadedModel
from pi_lora.models.source import ModelSource
from pi_lora.recipe.data import RECALL, Data, Source
from pi_lora.recipe.evaluation import ChatOptions, SummarizationOptions, TextOptions, number_of
from pi_lora.recipe.section import Section

# The paper's choice: 128 documents of 32768 tokens and more; it is not known which. The standard library is small.
DEFAULTS: dict[str, dict[str, int]] = {
    "proof-pile": {"documents": 128, "min_tokens": 32768, "truncate": 32768, "seed": 0},
    STDLIB: {"documents": 12},
}


OptionsT = TypeVar("OptionsT", bound=TextOptions)


class TokenizedDocument(NamedTuple):
    """The name of a document, the token ids that are measured, the whole text, and a digest of it."""

    name: str
    ids: "array[int]"
    text: str
    digest: str


def complete(options: OptionsT, models: Sequence[ModelSource]) -> OptionsT:
    """Return the options with a text and the default choice of documents, where they are not set. The default text of
    the built-in model is the standard library. Raise DataError without a text.
    """
    bases = [model.recipe.model.name if model.recipe else model.base.name for model in models]
    if options.data is None and not all(base.startswith(BUILTIN) for base in bases):
        raise DataError(f"--data: name a text that {models[0].name} was not tuned on: a file, folder or hub data set")
    data = options.data or STDLIB
    default = {"data": data, **DEFAULTS.get(data, {})}
    completed = options.changed(**default | options.model_dump(exclude_none=True))
    measured = Source(name=data, **completed.model_dump(include={"subset", "split", "column"}))
    shares = [held_out_share(model.texts, measured) for model in models]
    # The part that a run was not tuned on.
    share = next(filter(None, [options.hold_out, *shares]), None)
    return completed.changed(hold_out=share)


def measured_source(options: Section) -> Source | None:
    """Return the text or rows that options of a measurement name, as a source; None if they name none."""
    if not isinstance(options, TextOptions | SummarizationOptions | ChatOptions) or options.data is None:
        return None
    # Examples have no column.
    values = {"column": "", **options.model_dump(include={"subset", "split", "column", "hold_out"})}
    # Summaries are of the validation split by default.
    return Source(name=options.data, **values | {"split": options.split or "validation"})


def training_notes(options: Section, name: str, sources: Sequence[Source]) -> Iterator[str]:
    """Yield a line if options measure texts that train the run `name`, or may train it: texts that were moved are not
    recognized.
    """
    measured = measured_source(options)
    if measured is None:
        return
    if trains_on(sources, measured):
        yield f"{measured.name}: {name} is tuned on it; measure other texts, or tune with data.source.hold_out"
    elif looks_local(measured.name):
        for source in sources:
            if looks_local(source.name) and not texts_of(source):
                yield f"{source.name}: is not here, and {name} is tuned on it; measure none of the same texts"


def text_problems(options: TextOptions, preview: Preview, **windows: int) -> list[str]:
    """Return the problems of the text that the options name, also that no document has the tokens that an option of
    `windows` or `min_tokens` needs.
    """
    source = measured_source(options)
    if source is None or source.name in PINNED:
        return []
    key = preview.key("data")
    if source.name == RECALL:
        return [f"{key}: {FOR_TRAINING}"]
    problems = data_problems(Data(source=(source,)), preview.ask_hub, key=key, held_out=True)
    if problems:
        return problems
    needed = {**windows, "min_tokens": options.min_tokens or 0}
    option = max(needed, key=needed.__getitem__)
    too_short = too_short_for(source, needed[option], preview.tokenizer)
    return [f"{key}: {too_short}; name longer texts, or lower {preview.key(option)}"] if too_short else []


def choose_documents(
    model: LoadedModel | Preview, options: TextOptions, longest: int
) -> tuple[list[TokenizedDocument], int]:
    """Return the documents that the options choose, the first or with a seed random ones, and how many others were too
    short. Raise DataError if none is long enough for windows of up to `longest` tokens.
    """
    needed = max(longest, options.min_tokens or 0)
    enough = max(needed, number_of(options.truncate) or math.inf)
    documents: Iterable[Document] = evaluation_documents(options)
    if options.seed is not None:
        documents = list(documents)
        random.Random(options.seed).shuffle(documents)
    chosen: list[TokenizedDocument] = []
    lengths = []
    for document in documents:
        ids: Any
        [ids] = tokenized(model.tokenizer, [document.text], enough=enough)
        ids = strip_eos(ids, model.tokenizer.eos_token_id)
        lengths.append(len(ids))
        if len(ids) >= needed:
            measured = array("i", ids[: number_of(options.truncate)])
            chosen.append(TokenizedDocument(document.name, measured, document.text, document.digest))
        if len(chosen) == options.documents:
            break
    if not chosen:
        shorter = f"{options.data}: the longest document has {max(lengths)} tokens, {needed} are needed"
        raise DataError(f"--data: {shorter}; name longer texts, or choose a shorter window")
    return chosen, len(lengths) - len(chosen)
