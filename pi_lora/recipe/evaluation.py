"""Options of every measurement. They are a section of a recipe, options of a command, and a part of the scores."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from pi_lora.recipe.data import CHAT_COLUMNS
from pi_lora.recipe.section import LIST, Section, Seed, Texts, Tokens, Windows, sections_in

# The paper's stride in tokens.
STRIDE = 256
# The near context of LongPPL in tokens.
SHORT_WINDOW = 4096
# The shortest window of the default windows, in tokens.
SHORTEST_WINDOW = 256


def _no_chats(column: str) -> str:
    if column in CHAT_COLUMNS:
        raise ValueError(f"{column} holds chats; name a column of texts")
    return column


TextColumn = Annotated[str, AfterValidator(_no_chats)]


def default_windows(window: int, shortest: int | None = None) -> tuple[int, ...]:
    """Return `window` and its halves in tokens, down to the `shortest`, or to 256.

    >>> default_windows(1024), default_windows(1024, 512)
    ((256, 512, 1024), (512, 1024))
    """
    limit = max(SHORTEST_WINDOW, shortest or 0)
    windows = [window]
    while windows[0] // 2 >= limit:
        windows.insert(0, windows[0] // 2)
    return tuple(windows)


class TextOptions(Section):
    """The text that is measured, and the documents of it."""

    data: str | None = None
    """File, folder, glob or hub id, `pg19` or `proof-pile`. By default builtin:stdlib for the built-in model."""
    documents: PositiveInt | None = None
    """Number of documents. By default all; 12 of builtin:stdlib."""
    truncate: Tokens | None = None
    """Tokens of each document that are measured. By default all."""
    min_tokens: Tokens | None = None
    """Leave out documents with fewer tokens."""
    seed: Seed | None = None
    """Draw the documents at random with this seed. By default the first ones are taken."""
    split: str = "test"
    """Split of a hub data set or of builtin:stdlib."""
    column: TextColumn = "text"
    """Column that holds the text, if documents are rows."""
    subset: str | None = None
    """Subset of a hub data set that has several."""
    hold_out: Annotated[float | None, Field(gt=0, lt=1)] = None
    """Measure only the share of the text that a data source with the same `hold_out` keeps out of training."""


class PerplexityOptions(TextOptions):
    """Sliding-window perplexity (paper, section 3.2)."""

    windows: Windows = None
    """Windows to measure, in tokens. By default L', L'/2, ... down to 256, or to a longer stride."""
    stride: Tokens | None = None
    """Tokens by which the window slides. By default 256, or half the shortest window if that is less."""
    bos: Literal["window", "document"] = "window"
    """Place of BOS, if the tokenizer adds one: the start of each window, or of each document alone."""

    def conflicts(self) -> Iterator[str]:
        """Yield a stride or truncation that does not fit the windows."""
        if self.windows and self.stride and self.stride > min(self.windows):
            yield f"stride: {self.stride} is longer than the shortest window, {min(self.windows)}; lower it"
        if self.windows and self.truncate and self.truncate < max(self.windows):
            yield f"truncate: {self.truncate} tokens do not hold a window of {max(self.windows)}; raise it"

    def sweep(self, window: int) -> tuple[tuple[int, ...], int]:
        """Return the windows, the shortest first, and the stride in tokens, for a model with this `window`."""
        windows = tuple(sorted(self.windows or default_windows(window, self.stride)))
        default_stride = min(STRIDE, max(1, windows[0] // 2))
        return windows, self.stride or default_stride


class ContextOptions(TextOptions):
    """Gain of the tokens from distant context; LongPPL (Fang et al. 2024)."""

    window: Tokens | None = None
    """Length of the whole context in tokens. Windows are consecutive. By default L'."""
    short_window: Tokens | None = None
    """Fewest tokens of the near context; it grows by at most `stride`. By default 4096, or half the window if less."""
    stride: Tokens | None = None
    """Tokens that are predicted from the same near context. By default a quarter of `short_window`."""
    key_tokens: str | None = None
    """File with the scores of another model on the same documents, for its key tokens. By default the model's own."""

    def conflicts(self) -> Iterator[str]:
        """Yield a short window or a truncation that does not fit the window."""
        if self.window and self.short_window and self.short_window >= self.window:
            yield f"short_window: {self.short_window} is no shorter than the window, {self.window}; lower it"
        if self.window and self.truncate and self.truncate < self.window:
            yield f"truncate: {self.truncate} tokens do not hold a window of {self.window}; raise it"

    def sizes(self, window: int) -> tuple[int, int, int]:
        """Return the window, the near context and the stride in tokens, for a model with this `window`."""
        window = self.window or window
        short_window = self.short_window or min(SHORT_WINDOW, window // 2)
        return window, short_window, self.stride or max(1, short_window // 4)


class PasskeyOptions(Section):
    """Passkey retrieval and k_max (paper, section 3.3)."""

    target: Tokens | None = None
    """Tokens of context. By default L'."""
    targets: Windows = None
    """Several context lengths in tokens, instead of `target`."""
    depths: PositiveInt = 32
    """Number of distances, uniformly spaced up to the target."""
    trials: PositiveInt = 10
    """Random keys at each distance."""
    seed: Seed = 0
    """Seed of the random keys."""

    @property
    def longest(self) -> int | None:
        """The longest context in tokens."""
        return max(self.targets) if self.targets else self.target


class ProbeOptions(Section):
    """Options of a probe of untuned scalings. They are no part of a recipe."""

    target: Annotated[tuple[Tokens, ...], LIST, Field(min_length=1)]
    """L', the window to extend to. Give several to compare how far the model extends."""
    scalings: Texts | None = None
    """Scalings to compare. By default those of pi, yarn and theta that suit the model, and the model's own."""
    factors: str | None = None
    """File that `pi-lora search` wrote, for the scaling `factors`."""
    data: str | None = None
    """File, folder, glob or hub id, `pg19` or `proof-pile`. By default builtin:stdlib for the built-in model."""
    column: TextColumn = "text"
    """Column that holds the text, if documents are rows."""
    documents: PositiveInt | None = None
    """Number of documents. By default 1 to 12, depending on the target."""
    trials: PositiveInt | None = None
    """Random passkeys at each distance. By default 1 to 10, depending on the target."""
    seed: Seed = 0
    """Seed of the random passkeys."""


class SearchOptions(Section):
    """Options of a search for divisors of the rotary frequencies. They are no part of a recipe."""

    target: Tokens
    """L', the window to extend to, as 16384 or 16k."""
    data: str | None = None
    """File, folder, glob or hub id. The search reads up to 16 documents after those that are left for the test."""
    column: TextColumn = "text"
    """Column that holds the text, if documents are rows."""
    minutes: PositiveFloat = 30.0
    """Minutes of the search. It ends earlier if the loss of the needles does not move."""
    documents: PositiveInt = 4
    """Number of documents, from the first, that are left for the test of the result. The search reads at least one."""
    seed: Seed = 0
    """Seed of the search and the needles."""


class BenchmarksOptions(Section):
    """Short-context benchmarks (paper, table 5) through lm-eval."""

    tasks: Annotated[Texts, Field(min_length=1)] = ("boolq", "piqa", "race_middle", "race_high", "winogrande")
    """Tasks or task groups of lm-eval."""
    window: Annotated[int | None, Field(gt=1)] = None
    """Truncate inputs to this number of tokens. By default the shortest L of the models."""
    limit: PositiveInt | None = None
    """Examples of each task. By default all."""
    batch_size: PositiveInt = 8
    """Inputs per forward pass."""
    data: Texts = ()
    """Local files in the schema of the task's data set, as `boolq=FILE`."""


class RulerOptions(Section):
    """RULER and the effective length (Hsieh et al. 2024) through lm-eval."""

    windows: Windows = None
    """Windows to measure, in tokens. By default L', L'/2, ... down to L."""
    tasks: Texts | None = None
    """RULER tasks of lm-eval. By default all 13."""
    samples: Annotated[int, Field(gt=0, le=500)] = 100
    """Prompts of each task and window."""
    seed: Seed = 0
    """Seed of the prompts."""
    batch_size: PositiveInt | None = None
    """Prompts per batch. By default as many as fit into 16,384 tokens."""


class Sampling(Section):
    """Options of text generation."""

    temperature: Annotated[float, Field(ge=0)] = 0.5
    """Sampling temperature; 0 always takes the most probable token (greedy decoding)."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Sample from the most probable tokens that together have this probability (nucleus sampling)."""
    max_new_tokens: PositiveInt | None = None
    """Maximum length of a summary in tokens. By default as in tuning, or 1000."""
    seed: Seed = 0
    """Seed of the sampling."""


class SummarizationOptions(Sampling):
    """Summaries of long documents, scored by ROUGE (paper, section 3.5): GovReport's, or as a run was tuned."""

    data: str | None = None
    """Files, folder, glob or hub id of the examples. By default the data of the tuning, or GovReport."""
    subset: str | None = None
    """Subset of a hub data set that has several."""
    split: str | None = None
    """Split of a hub data set. By default validation, or that of the tuning if `hold_out` is set."""
    revision: str | None = None
    """Branch, tag or commit of a hub data set. By default that of the tuning."""
    hold_out: Annotated[float | None, Field(gt=0, lt=1)] = None
    """Measure only the share of the examples that a data source with the same `hold_out` keeps out of training."""
    document: str | None = None
    """Column of the document to summarize."""
    summary: str | None = None
    """Column of the reference summary."""
    template: str | None = None
    """Prompt to use instead of the paper's, with {column} for the value of a column."""
    completion: str | None = None
    """Column of the reference answer, for `template`."""
    document_tokens: Tokens | None = None
    """Truncate documents to this number of tokens. By default as in tuning, or 15000."""
    special_tokens: bool = False
    """Read `</s>` and other special tokens in texts as special tokens, not as plain text."""
    limit: PositiveInt | None = None
    """Use only this number of examples, from the first. By default all."""
    batch_size: PositiveInt | None = None
    """Summaries per batch. By default as many as fit into 16,384 tokens."""


class ChatOptions(Section):
    """Perplexity of the assistant's turns in chats; against a base, also the KL divergence."""

    data: str
    """File, folder, glob or hub id of the chats."""
    column: str = "messages"
    """Column that holds the messages: `messages`, or `conversations` of ShareGPT."""
    split: str = "train"
    """Split of a hub data set."""
    base: str | None = None
    """Model to compare with, for example the model that was tuned. By default none."""
    window: Annotated[int | None, Field(gt=1)] = None
    """Window in tokens; longer chats are left out. By default the shortest window of the models."""
    limit: PositiveInt | None = None
    """Use only this number of chats, from the first. By default all."""


# The keys of `while_training` that concern passkeys.
PASSKEY_KEYS = {"depths", "trials"}


class ShortEvaluation(Section):
    """Smaller values for the measurements during training. Other values are those of the finished run."""

    documents: PositiveInt | None = None
    """Number of documents for perplexity. Processes share them, as they share the depths."""
    truncate: Tokens | None = None
    """Tokens of each document that are measured for perplexity."""
    stride: Tokens | None = None
    """Tokens by which the window of perplexity slides."""
    depths: PositiveInt | None = None
    """Number of distances of passkeys."""
    trials: PositiveInt | None = None
    """Random passkeys at each distance."""


class Evaluation(Section):
    """The measurements of a run, and how often they are made during training."""

    every: PositiveInt | None = None
    """Training steps between measurements of perplexity and passkeys, from step 0. By default only the finished run."""
    perplexity: PerplexityOptions | None = None
    context: ContextOptions | None = None
    passkey: PasskeyOptions | None = None
    benchmarks: BenchmarksOptions | None = None
    ruler: RulerOptions | None = None
    summarization: SummarizationOptions | None = None
    chat: ChatOptions | None = None
    while_training: ShortEvaluation | None = None

    @classmethod
    def measurements(cls) -> dict[str, type[Section]]:
        """Return the sections that are measurements, by name."""
        sections = {name: next(sections_in(field.annotation), None) for name, field in cls.model_fields.items()}
        return {name: section for name, section in sections.items() if section not in (None, ShortEvaluation)}

    def in_short(self) -> "Evaluation":
        """Return the measurements during training: perplexity and passkeys, with the values of `while_training`. Raise
        RecipeError if a smaller value does not fit the others.
        """
        smaller = self.while_training or ShortEvaluation()
        perplexity = self.perplexity
        if perplexity:
            perplexity = perplexity.changed(**smaller.model_dump(exclude_none=True, exclude=PASSKEY_KEYS))
        passkey = self.passkey
        if passkey:
            passkey = passkey.changed(**smaller.model_dump(exclude_none=True, include=PASSKEY_KEYS))
        return Evaluation(perplexity=perplexity, passkey=passkey)
