"""Problems of the texts of a recipe that show before anything is packed: in templates, first rows and sizes."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from huggingface_hub import constants

from pi_lora.data.documents import NamedJson, files_named, is_compressed, looks_local, unread_documents
from pi_lora.data.encoders import Encoder, encoder_of
from pi_lora.data.examples import Task
from pi_lora.data.sources import BUILTIN_TEXTS, COUNTED_ROWS, Table, find_table, format_counts, streamed
from pi_lora.data.tokens import strip_eos, tokenized
from pi_lora.errors import DataError
from pi_lora.recipe.data import Data, Source
from pi_lora.recipe.schema import Recipe

# The first rows that a dry run looks at take a second.
NOTED_ROWS = 50


def check_first_rows(table: Table, encoder: Encoder, *, held_out: bool) -> None:
    """Raise DataError if the table is empty, or if an encoder leaves out all of the first rows. Usually one row, or one
    batch, is encoded. Usable rows may follow in a longer table.
    """
    counts = Counter[str]()
    first_rows, names = _first_rows(table)
    usable = next(encoder.rows(first_rows, counts, held_out=held_out), None)
    if not names:
        raise DataError(f"{table.source.name}: holds no rows; name a source with rows")
    if usable is None and counts.total() and len(names) < COUNTED_ROWS:
        reasons = ", ".join(format_counts(counts))
        raise DataError(f"{table.source.name}: none of the {len(names)} rows can be used ({reasons}); name others")


def _first_rows(table: Table) -> tuple[Table, list[str]]:
    """Return the table of the first rows, and the names of those that were read."""
    names: list[str] = []

    def read(columns: Sequence[str], _: int | None) -> Iterator[NamedJson]:
        for name, row in itertools.islice(table.read(columns, None), COUNTED_ROWS):
            names.append(name)
            yield name, row

    return replace(table, read=read), names


def source_notes(data: Data, tokenizer: Any, window: int) -> Iterator[str]:
    """Yield which documents of the sources are not read, and what is left out of the first chats or examples, cut, or
    unlike inference: a line each.
    """
    for source in data.source:
        if unread := unread_documents(source.name):
            yield f"data: {unread}"
        if data.has_examples or source.has_chats:
            counts = Counter[str]()
            encoder = encoder_of(source, data, tokenizer, window)
            first_rows, names = _first_rows(find_table(streamed(source)))
            for _ in itertools.islice(encoder.rows(first_rows, counts), NOTED_ROWS):
                pass
            for line in format_counts(counts):
                yield f"data: {source.name}: {line}, in the first {len(names)} rows"


def data_problems(
    data: Data,
    ask_hub: bool = False,
    *,
    key: str = "data.source",
    held_out: bool = False,
    tokenizer: Any = None,
    window: int = 0,
) -> list[str]:
    """Return the problems of the template and of the first rows of the sources, one a line; `key` names the sources in
    a recipe. Rows are `held_out` ones if texts are to be measured. With the `tokenizer` of a model, examples and chats
    are encoded for its `window`. Sources on the hub are streamed if `ask_hub`, read from the cache without the hub, and
    skipped otherwise.
    """
    problems: list[str] = []
    columns: Sequence[str] = ()
    encoders = {}
    try:
        if data.has_examples:
            columns = Task(data).columns
        if tokenizer is not None:
            encoders = {
                source: encoder_of(source, data, tokenizer, window)
                for source in data.source
                if data.has_examples or source.has_chats
            }
    except DataError as problem:
        line = str(problem).replace("data.source", key, 1)
        problems.append(line if line.startswith(key) or key == "data.source" else f"{key}: {line}")
        if data.has_examples and not columns:
            return problems
    for source in data.source:
        if not (ask_hub or constants.HF_HUB_OFFLINE or looks_local(source.name)):
            continue
        try:
            table = find_table(streamed(source))
            if source in encoders:
                check_first_rows(table, encoders[source], held_out=held_out)
            elif columns or source.has_chats:
                if next(table.read(columns or [source.column], None), None) is None:
                    raise DataError(f"{source.name}: holds no rows; name a source with rows")
            else:
                next(table.documents(held_out=held_out), None)
        except DataError as problem:
            problems.append(f"{key}: {problem}")
    return problems


def too_short_for(source: Source, tokens: int, tokenizer: Any = None, *, enough: int = 1) -> str | None:
    """Return the problem that fewer than `enough` held-out documents of a local source have so many tokens, as a window
    needs.

    Without a tokenizer, every byte counts as a token, and BOS is one more. Return None if the documents have them, or
    if there are too many documents.
    """
    if not looks_local(source.name) or source.name in BUILTIN_TEXTS:
        return None
    most_bytes = 0
    most_tokens = 0
    long_enough = 0
    documents = itertools.islice(find_table(source).documents(held_out=True), COUNTED_ROWS)
    for number, document in enumerate(documents, 1):
        if number == COUNTED_ROWS:
            return None
        num_bytes = len(document.text.encode(errors="surrogateescape"))
        most_bytes = max(most_bytes, num_bytes)
        if num_bytes + 1 < tokens:
            continue
        if tokenizer:
            [ids] = tokenized(tokenizer, [document.text], enough=tokens)
            num_tokens = len(strip_eos(ids, tokenizer.eos_token_id))
            if num_tokens < tokens:
                most_tokens = max(most_tokens, num_tokens)
                continue
        long_enough += 1
        if long_enough == enough:
            return None
    kind = "held-out document" if source.hold_out else "document"
    if long_enough:
        return f"{source.name}: {long_enough} {kind} has {tokens:,} tokens or more"
    longest = f"{most_tokens:,} tokens" if most_tokens else f"{most_bytes:,} bytes"
    return f"{source.name}: the longest {kind} has {longest}, and {tokens:,} tokens are needed"


def amount_problems(recipe: Recipe, original: int) -> list[str]:
    """Return the sources whose text is too short for their share of a training even if every byte is a token: one line
    each; and PoSE chunks that a sequence cannot hold. Chats and compressed files are not known without reading them;
    `original` is the window L in tokens.
    """
    data = recipe.data
    if data.has_examples:
        return []
    length = data.tokens_per_sequence(original, recipe.context.target)
    if data.positions == "pose" and data.chunks > length:
        return [f"data.chunks: {data.chunks} are more than the {length} tokens of a PoSE sequence; lower them"]
    training = recipe.training
    sequences = training.steps * training.global_batch_size * (1 - data.keep_short)
    weights = sum(source.weight for source in data.source)
    problems = []
    for source in data.source:
        if not looks_local(source.name) or source.name in BUILTIN_TEXTS:
            continue
        if source.has_chats or any(map(is_compressed, files_named(source.name))):
            continue
        table = find_table(source)
        training_bytes = table.size * (1 - (source.hold_out or 0))
        # Every text begins with BOS.
        most_tokens = (training_bytes + len(table.texts)) * data.epochs
        needed = int(sequences * source.weight / weights)
        if most_tokens < needed * length:
            held = most_tokens / length + 1
            problems.append(
                f"data.source: {source.name}: holds fewer than {held:,.0f} sequences of {length:,} tokens in "
                f"data.epochs: {data.epochs}; {needed:,} are needed for its share; add text, raise data.epochs, or "
                "lower training.steps"
            )
    return problems
