"""Options of every measurement. They are a section of a recipe, options of a command, and a part of the scores."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from pi_lora.recipe.budget import MAX_DOCUMENTS, affordable, passes_of, passkeys_within, truncation_within
from pi_lora.recipe.data import CHAT_COLUMNS
from pi_lora.recipe.section import LIST, Section, Seed, Texts, Tokens, Windows, sections_in
from pi_lora.types import Json

# The near context of LongPPL in tokens.
SHORT_WINDOW = 4096
# The shortest of the default windows in tokens, or a quarter of the longest if that is more; L is always one of them.
SHORTEST_WINDOW = 256


def _no_chats(column: str) -> str:
    if column in CHAT_COLUMNS:
        raise ValueError(f"{column} holds chats; name a column of texts")
    return column


TextColumn = Annotated[str, AfterValidator(_no_chats)]
# A number of documents, examples or tokens, or all of them.
Amount = PositiveInt | Literal["all"]
Length = Tokens | Literal["all"]


def number_of(amount: Amount | None) -> int | None:
    """Return an amount as a number; None for all."""
    return amount if isinstance(amount, int) else None


def default_windows(window: int, shortest: int, originals: Iterable[int] = ()) -> tuple[int, ...]:
    """Return `window` and its halves in tokens, down to the `shortest`, and the `originals` between them.

    >>> default_windows(1024, 512), default_windows(131072, 40960, [40960])
    ((512, 1024), (40960, 65536, 131072))
    """
    windows = {window, *(original for original in originals if shortest <= original < window)}
    while window // 2 >= shortest:
        window //= 2
        windows.add(window)
    return tuple(sorted(windows))


class TextOptions(Section):
    """The text that is measured, and the documents of it."""

    data: str | None = None
    """File, folder, glob or hub id, `pg19` or `proof-pile`. By default builtin:stdlib for the built-in model."""
    documents: Amount | None = None
    """Number of documents, or `all`. By default 1 to 20, fewer for longer windows."""
    truncate: Length | None = None
    """Tokens of each document that are measured, or `all`. By default some of the longest windows, or one."""
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
    """Windows to measure, in tokens. By default L', L'/2, L'/4, and down to L, but none below 256 or the stride."""
    stride: Tokens | None = None
    """Tokens by which the window slides; the paper's is 256. By default half the shortest window."""
    bos: Literal["window", "document"] = "window"
    """Place of BOS, if the tokenizer adds one: the start of each window, or of each document alone."""

    def conflicts(self) -> Iterator[str]:
        """Yield a stride or truncation that does not fit the windows."""
        if self.windows and self.stride and self.stride > min(self.windows):
            yield f"stride: {self.stride} is longer than the shortest window, {min(self.windows)}; lower it"
        if self.windows and isinstance(self.truncate, int) and self.truncate < max(self.windows):
            yield f"truncate: {self.truncate} tokens do not hold a window of {max(self.windows)}; raise it"

    def sweep(self, window: int, originals: Iterable[int] = ()) -> tuple[tuple[int, ...], int]:
        """Return the windows, the shortest first, and the stride in tokens, for models whose longest window is
        `window`, and whose original ones are `originals`.
        """
        shortest = max(min([max(SHORTEST_WINDOW, window // 4), *originals]), self.stride or 1)
        windows = tuple(sorted(self.windows or default_windows(window, shortest, originals)))
        return windows, self.stride or max(1, windows[0] // 2)

    def sizes(self, window: int, originals: Iterable[int], budget: int) -> Json:
        """Return windows, stride, truncation and number of documents, where they are not set within a budget of tokens,
        for models as `sweep` takes them.
        """
        windows, stride = self.sweep(window, originals)
        truncate = self.truncate or truncation_within(budget, windows[-1], stride)
        measured = truncate if isinstance(truncate, int) else windows[-1]
        tokens = windows[-1] * passes_of(windows[-1], stride, measured)
        documents = self.documents or affordable(budget, tokens, MAX_DOCUMENTS)
        return {"windows": windows, "stride": stride, "truncate": truncate, "documents": documents}


class ContextOptions(TextOptions):
    """Gain of the tokens from distant context; LongPPL (Fang et al. 2024)."""

    window: Tokens | None = None
    """Length of the whole context in tokens. Windows are consecutive. By default L'."""
    short_window: Tokens | None = None
    """Fewest last tokens as context; up to `stride` more. By default 4096, or half the window if less."""
    stride: Tokens | None = None
    """Tokens that are predicted from the same last tokens. By default a quarter of `short_window`."""
    key_tokens: str | None = None
    """File with the scores of another model on the same documents, for its key tokens. By default the model's own."""

    def conflicts(self) -> Iterator[str]:
        """Yield a short window or a truncation that does not fit the window."""
        if self.window and self.short_window and self.short_window >= self.window:
            yield f"short_window: {self.short_window} is no shorter than the window, {self.window}; lower it"
        if self.window and isinstance(self.truncate, int) and self.truncate < self.window:
            yield f"truncate: {self.truncate} tokens do not hold a window of {self.window}; raise it"

    def sizes(self, window: int) -> tuple[int, int, int]:
        """Return the window, the near context and the stride in tokens, for a model with this `window`."""
        window = self.window or window
        short_window = self.short_window or min(SHORT_WINDOW, window // 2)
        return window, short_window, self.stride or max(1, short_window // 4)

    def amount(self, window: int, budget: int) -> Json:
        """Return truncation and number of documents, where they are not set within a budget of tokens."""
        window, short_window, stride = self.sizes(window)
        # A token is read in the whole window, and in the near contexts that overlap.
        tokens = window * (2 + short_window / stride)
        truncate = self.truncate or window * affordable(budget // MAX_DOCUMENTS, tokens, MAX_DOCUMENTS)
        windows = truncate // window if isinstance(truncate, int) else 1
        documents = self.documents or affordable(budget, windows * tokens, MAX_DOCUMENTS)
        return {"truncate": truncate, "documents": documents}


class PromptOptions(Section):
    """How a measurement asks a model."""

    chat: Literal["auto"] | bool = "auto"
    """Ask in the model's chat template. `auto` does where that retrieves more passkeys; base models stay raw."""


class PasskeyOptions(PromptOptions):
    """Passkey retrieval and k_max (paper, section 3.3)."""

    target: Tokens | None = None
    """Tokens of context. By default L'."""
    targets: Windows = None
    """Several context lengths in tokens, instead of `target`."""
    depths: PositiveInt | None = None
    """Number of distances, uniformly spaced up to the target. By default 4 to 32, fewer for longer targets."""
    trials: PositiveInt | None = None
    """Random keys at each distance. By default 1 to 10, fewer for longer targets."""
    seed: Seed = 0
    """Seed of the random keys."""

    @property
    def longest(self) -> int | None:
        """The longest context in tokens."""
        return max(self.targets) if self.targets else self.target

    def amount(self, budget: int) -> Json:
        """Return depths and trials, where they are not set within a budget of tokens."""
        depths, trials = passkeys_within(budget, sum(self.targets or [self.target or 1]))
        return {"depths": self.depths or depths, "trials": self.trials or trials}


class ProbeOptions(PromptOptions):
    """Options of a probe of untuned scalings. They are no part of a recipe."""

    target: Annotated[tuple[Tokens, ...], LIST, Field(min_length=1)]
    """L', the window to extend to. Give several to compare how far the model extends."""
    scalings: Texts | None = None
    """Scalings to compare. By default those of pi, yarn, theta and llama3 that suit the model, and the model's own."""
    factors: str | None = None
    """File that `pi-lora search` wrote, for the scaling `factors`."""
    data: str | None = None
    """File, folder, glob or hub id, `pg19` or `proof-pile`. By default builtin:stdlib for the built-in model."""
    column: TextColumn = "text"
    """Column that holds the text, if documents are rows."""
    documents: PositiveInt | None = None
    """Number of documents. By default 1 to 20, fewer for longer targets."""
    trials: PositiveInt | None = None
    """Random passkeys at each distance. By default 1 to 10, fewer for longer targets."""
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


class BenchmarksOptions(PromptOptions):
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

    @property
    def files(self) -> dict[str, str]:
        """The local files by task."""
        parts = (entry.partition("=") for entry in self.data)
        return {task: file for task, _, file in parts}

    def conflicts(self) -> Iterator[str]:
        """Yield files of other tasks."""
        if unknown := ", ".join(self.files.keys() - set(self.tasks)):
            yield f"data: {unknown}: is not TASK=FILE with one of the tasks; correct it"


class RulerOptions(PromptOptions):
    """RULER and the effective length (Hsieh et al. 2024) through lm-eval."""

    windows: Windows = None
    """Windows to measure, in tokens. By default L', L'/2, ... down to L."""
    tasks: Texts | None = None
    """RULER tasks of lm-eval. By default all 13."""
    samples: Annotated[int | None, Field(gt=0, le=500)] = None
    """Prompts of each task and window. By default 1 to 100, fewer for longer windows."""
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


class SummarizationOptions(PromptOptions, Sampling):
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
    limit: Amount | None = None
    """Number of examples, from the first, or `all`. By default 1 to 100, fewer for longer documents."""
    batch_size: PositiveInt | None = None
    """Summaries per batch. By default as many as fit into 16,384 tokens."""


class ChatOptions(Section):
    """Perplexity of the assistant's turns in chats, and their KL divergence from another model."""

    data: str
    """File, folder, glob or hub id of the chats."""
    column: str = "messages"
    """Column that holds the messages: `messages`, or `conversations` of ShareGPT."""
    split: str = "train"
    """Split of a hub data set."""
    divergence_from: str | None = None
    """Model from which the KL divergence is measured, for example the one that was tuned. By default none."""
    window: Annotated[int | None, Field(gt=1)] = None
    """Window in tokens; longer chats are left out. By default the shortest window of the models."""
    limit: Amount | None = None
    """Number of chats, from the first, or `all`. By default 10 to 1,000, fewer for a longer window."""


# The keys of `while_training` that concern passkeys.
PASSKEY_KEYS = {"depths", "trials"}


class ShortEvaluation(Section):
    """Smaller values for the measurements during training. Other values are those of the finished run."""

    documents: Amount | None = None
    """Number of documents for perplexity. Processes share them, as they share the depths."""
    truncate: Length | None = None
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
