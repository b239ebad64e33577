"""The section of a recipe that says what text trains, and how."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from pi_lora.recipe.section import Section, Seed, Tokens

# The column of chats in TRL and in ShareGPT.
CHAT_COLUMNS = ("messages", "conversations")
# Synthetic text, made around lines of the other texts of a recipe.
RECALL = "builtin:recall"


def _as_sources(value: object) -> object:
    entries = value if isinstance(value, list | tuple) else [value]
    return tuple({"name": entry} if isinstance(entry, str) else entry for entry in entries)


class Source(Section):
    """A source of training documents, or a list of several."""

    name: Annotated[str, Field(min_length=1)]
    """Hub id, file, folder, glob, builtin:stdlib or builtin:recall."""
    weight: PositiveFloat = 1.0
    """Share of the training sequences, relative to the other sources."""
    column: str = "text"
    """Column that holds the text, in a hub data set or file of rows. For chats: `messages` or `conversations`."""
    subset: str | None = None
    """Subset of a hub data set that has several (`datasets` calls it `name`)."""
    split: str = "train"
    """Split of a hub data set."""
    revision: str = "main"
    """Branch, tag or commit of a hub data set."""
    streaming: bool = False
    """Stream a hub data set instead of downloading it completely."""
    hold_out: Annotated[float | None, Field(gt=0, lt=1)] = None
    """Share of the documents or examples, or of a single text, kept out of training to measure on."""

    @property
    def has_chats(self) -> bool:
        """Whether the rows are chats."""
        return self.column in CHAT_COLUMNS

    @property
    def has_text(self) -> bool:
        """Whether the rows are text that is not synthetic."""
        return not self.has_chats and self.name != RECALL


class Data(Section):
    """The training data: documents packed into sequences of L' tokens, or examples of a task, one per row."""

    source: Annotated[tuple[Source, ...], BeforeValidator(_as_sources), Field(min_length=1)]
    packing: Literal["wrapped", "isolated"] | None = None
    """Texts in one sequence attend to all before them (wrapped) or to themselves (isolated, default for chats)."""
    positions: Literal["contiguous", "pose"] = "contiguous"
    """Positions of the tokens. pose is PoSE: few tokens with positions spread over L'."""
    sequence_tokens: Annotated[Tokens | None, Field(gt=1)] = None
    """Tokens of a PoSE sequence, at most L'. By default L; with `scaling: keep` there is no default."""
    chunks: Annotated[int, Field(ge=2)] = 2
    """Runs of consecutive positions in a PoSE sequence (Zhu et al. 2023)."""
    min_document_tokens: PositiveInt = 1
    """Leave out documents with fewer tokens."""
    document: str | None = None
    """Column with the document of an example, to summarize or truncate."""
    summary: str | None = None
    """Column with the summary of an example; the prompt is the paper's."""
    template: str | None = None
    """Prompt of an example, with {column} for the value of a column."""
    completion: str | None = None
    """Column with the answer of an example, for `template`."""
    document_tokens: PositiveInt = 15000
    """Truncate a longer `document` to this number of tokens, or to fewer that fit."""
    completion_tokens: PositiveInt = 1000
    """Truncate a longer summary or completion to this number of tokens."""
    loss: Literal["completion", "all"] = "completion"
    """Tokens of examples and chats in the loss. completion: completions and assistant turns. all: prompts too."""
    keep_short: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of short sequences, against forgetting: chats at their own lengths, else text of L tokens."""
    epochs: PositiveInt = 1
    """Maximum number of times that a text is used."""
    special_tokens: bool = False
    """Read `</s>` and other special tokens in texts as special tokens, not as plain text."""
    seed: Seed = 0
    """Seed of the order of documents, the mixture and PoSE."""

    @property
    def has_examples(self) -> bool:
        """Whether rows are prompts with completions, rather than text to pack."""
        return self.template is not None or self.summary is not None

    @property
    def has_chats(self) -> bool:
        """Whether a source of packed text has chats."""
        return not self.has_examples and any(source.has_chats for source in self.source)

    def is_isolated(self, source: Source) -> bool:
        """Whether the texts of `source` in a packed sequence do not attend to each other."""
        return self.packing == "isolated" or (self.packing is None and source.has_chats)

    @property
    def has_isolated(self) -> bool:
        """Whether packed sequences of a source hold texts that do not attend to each other."""
        return not self.has_examples and any(map(self.is_isolated, self.source))

    def tokens_per_sequence(self, original: int, target: int) -> int:
        """Return the tokens of a packed sequence: `target` (L'); with PoSE `sequence_tokens`, or `original` (L)."""
        if self.positions == "contiguous":
            return target
        return self.sequence_tokens or original

    def conflicts(self) -> Iterator[str]:
        """Yield keys that are for another kind of data: packed text, examples or chats."""
        if self.sequence_tokens is not None and self.positions != "pose":
            yield "sequence_tokens: is the length of PoSE sequences; set positions: pose, or leave it out"
        columns = {"document", "summary", "template", "completion"}
        given = self.model_dump(include=columns, exclude_none=True).keys()
        complete = (
            {"document", "summary"},
            {"template", "completion"},
            {"template", "completion", "document"},
        )
        if given and given not in complete:
            kinds = "document and summary, or template and completion, with a document if one may be cut"
            yield f"{', '.join(given)}: examples have {kinds}; give one of the two"
        if self.has_examples and self.positions == "pose":
            yield "positions: pose: is for packed text; examples need contiguous"
        if any(source.hold_out and source.has_chats for source in self.source):
            yield "source: hold_out is for text and examples; hold chats out in a file of their own"
        is_synthetic = all(source.name == RECALL for source in self.source)
        if self.keep_short and (self.has_examples or is_synthetic):
            yield "keep_short: takes its sequences from chats or text; add a source of text, or leave it out"
        if self.has_examples and any(source.weight != 1.0 for source in self.source):
            yield "source: weight is for packed text; all examples are used equally often"
