"""Prompts and completions of a task: the template around a row's columns, in token ids, cut so that all fits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from pi_lora.errors import DataError
from pi_lora.recipe.schema import Data

# The paper's, to the letter (paper.tex, `fig:summ-format`), where "# .... Document goes here" stands for the document.
# That one newline divides lines, and that a space comes between `Summary:` and the summary, is our reading.
SUMMARIZE = """\
Read the following article and then summarize it.
{document}
Now summarize the above article.
Summary:"""
# A prompt is tokenized as a whole, which may take a token or two more than its parts did; then more is cut.
ATTEMPTS = 8

Texts = Mapping[str, str]


@dataclass(frozen=True)
class Task:
    """The columns of a prompt with the text around them, and the column of the completion.

    `pieces` are texts, each with the column that follows it, None at the end. `document` is the column that is cut, to
    its first `document_tokens` or to what fits; `completion_tokens` is the longest that is learned and written.
    """

    pieces: tuple[tuple[str, str | None], ...]
    completion: str
    document: str | None
    document_tokens: int
    completion_tokens: int

    @classmethod
    def of(cls, data: Data) -> "Task":
        """Return the task of a recipe's `data`, which has examples; raise DataError if its template is malformed."""
        pieces = _pieces(SUMMARIZE if data.template is None else data.template)
        if data.template is None:
            pieces = tuple((text, data.document if name else None) for text, name in pieces)
        completion = data.completion or data.summary or ""
        task = cls(pieces, completion, data.document, data.document_tokens, data.completion_tokens)
        if task.document is not None and task.document not in task.read:
            raise DataError(f"data.template: has no {{{task.document}}}, which data.document names; put it in")
        return task

    @property
    def read(self) -> list[str]:
        """The columns of the prompt, in order."""
        return list(dict.fromkeys(column for _, column in self.pieces if column is not None))

    @property
    def columns(self) -> list[str]:
        """All columns that a row must have, those of the prompt first."""
        return list(dict.fromkeys([*self.read, self.completion]))

    def prompt(self, row: Texts) -> str:
        """Return the prompt of a row.

        >>> Task((("Q: ", "q"), (" A:", None)), "a", None, 9, 9).prompt({"q": "Why?"})
        'Q: Why? A:'
        """
        return "".join(text + (row[column] if column is not None else "") for text, column in self.pieces)


@dataclass(frozen=True)
class Prompt:
    """A prompt in token ids, which holds the first `kept` of the document's `document_tokens`.

    `fits`: it leaves room for a completion without dropping the whole document.
    """

    ids: list[int]
    document_tokens: int = 0
    kept: int = 0
    fits: bool = True


class Prompter:
    """Encodes rows of a task for a model that reads `window` tokens.

    A prompt leaves room for `completion_tokens` and EOS, so that whatever the document, nothing after it is cut.
    """

    def __init__(self, task: Task, tokenizer: Any, window: int) -> None:
        self.task, self.tokenizer = task, tokenizer
        self.longest = window - task.completion_tokens - 1

    def prompts(self, rows: Sequence[Texts]) -> list[Prompt]:
        """Return the prompts of rows, as the tokenizer begins a text; many at a time are encoded in parallel."""
        column = self.task.document
        if column is None:
            return [Prompt(ids, fits=len(ids) <= self.longest) for ids in self._framed(rows)]
        frames = self._framed([{**row, column: ""} for row in rows])
        documents = self._documents([row[column] for row in rows])
        most = [max(0, min(self.task.document_tokens, self.longest - len(frame))) for frame in frames]
        kept = [min(len(document.ids), each) for document, each in zip(documents, most, strict=True)]
        cut = [{**row, column: each.first(n)} for row, each, n in zip(rows, documents, kept, strict=True)]
        found = []
        for row, document, ids, number in zip(rows, documents, self._framed(cut), kept, strict=True):
            for _ in range(ATTEMPTS):
                if len(ids) <= self.longest or number == 0:
                    break
                number = max(0, number - (len(ids) - self.longest))
                [ids] = self._framed([{**row, column: document.first(number)}])
            fits = len(ids) <= self.longest and (number > 0 or not document.ids)
            found.append(Prompt(ids, len(document.ids), number, fits))
        return found

    def completions(self, rows: Sequence[Texts]) -> list[list[int]]:
        """Return what follows the prompts, cut to `completion_tokens`, and EOS, which the model has to learn too.

        A space joins it to a prompt that does not end in one. It is tokenized after the prompt's last words, since
        tokenizers treat the start of a text differently.
        """
        last, column = self.task.pieces[-1]
        tail = last[-20:] if column is None else ""
        texts = [("" if tail[-1:].isspace() else " ") + row[self.task.completion].strip() for row in rows]
        before, *after = self._plain([tail, *(tail + text for text in texts)])
        found = []
        for text, ids in zip(texts, after, strict=True):
            # Where the two merged into one token, the text is tokenized by itself.
            own = ids[len(before) :] if ids[: len(before)] == before else self._plain([text])[0]
            found.append([*own[: self.task.completion_tokens], self.tokenizer.eos_token_id])
        return found

    def _framed(self, rows: Sequence[Texts]) -> list[list[int]]:
        """Encode with the tokenizer's own BOS, but without the EOS that some add."""
        encoded: list[list[int]] = self.tokenizer([self.task.prompt(row) for row in rows], verbose=False)["input_ids"]
        return [ids[:-1] if ids[-1:] == [self.tokenizer.eos_token_id] else ids for ids in encoded]

    def _plain(self, texts: list[str]) -> list[list[int]]:
        encoded: list[list[int]] = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return encoded

    def _documents(self, texts: list[str]) -> "list[_Document]":
        fast = self.tokenizer.is_fast
        found = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
        offsets = found["offset_mapping"] if fast else [None] * len(texts)
        return [_Document(*each, self.tokenizer) for each in zip(texts, found["input_ids"], offsets, strict=True)]


@dataclass(frozen=True)
class _Document:
    text: str
    ids: list[int]
    offsets: list[tuple[int, int]] | None  # where each token lies in the text; None if the tokenizer cannot tell
    tokenizer: Any

    def first(self, number: int) -> str:
        """Return the text of the first `number` tokens."""
        if number == len(self.ids):
            return self.text
        if self.offsets is None:
            return str(self.tokenizer.decode(self.ids[:number]))
        return self.text[: self.offsets[number - 1][1]] if number else ""


def _pieces(template: str) -> tuple[tuple[str, str | None], ...]:
    """Return texts, each with the column after it; raise DataError if the template is malformed.

    >>> _pieces("German: {german} English:")
    (('German: ', 'german'), (' English:', None))
    """
    try:
        parsed = list(Formatter().parse(template))
        if any(column == "" or form or conversion for _, column, form, conversion in parsed):
            raise ValueError("has braces with something else than the name of a column")
    except ValueError as error:
        raise DataError(f"data.template: {error}; write {{column}} for a column, and {{{{ }}}} for braces") from None
    if not any(column for _, column, _, _ in parsed):
        raise DataError("data.template: names no column; write {column} where one goes")
    return tuple((text, column) for text, column, _, _ in parsed)
