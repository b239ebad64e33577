"""Options of every measurement: a section of a recipe, the options of its command, and kept whole in its scores."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, PositiveInt

from pi_lora.recipe.section import LIST, Section, Seed, Texts, Tokens, Windows

# The paper's stride, and the shortest window that is measured unless --windows says otherwise; both in tokens.
STRIDE = SHORTEST_WINDOW = 256


def default_windows(window: int, shortest: int | None = None) -> tuple[int, ...]:
    """Return `window` and its halves in tokens, down to the `shortest`, or to 256.

    >>> default_windows(1024), default_windows(1024, 512)
    ((256, 512, 1024), (512, 1024))
    """
    halves = [window]
    while halves[0] // 2 >= max(SHORTEST_WINDOW, shortest or 0):
        halves.insert(0, halves[0] // 2)
    return tuple(halves)


class PerplexityOptions(Section):
    """Sliding-window perplexity (paper, section 3.2)."""

    data: str | None = None
    """a file, folder, glob or hub id; `pg19` or `proof-pile`; of the built-in model builtin:stdlib"""
    windows: Windows = None
    """in tokens; by default L', L'/2, ... while the stride fits"""
    stride: Tokens | None = None
    """tokens; by default 256, or half the shortest window"""
    documents: PositiveInt | None = None
    """how many; by default all, of builtin:stdlib 12"""
    truncate: Tokens | None = None
    """tokens of each document that are measured; by default all"""
    min_tokens: Tokens | None = None
    """shorter documents are left out"""
    seed: Seed | None = None
    """draw documents at random; by default the first"""
    split: str = "test"
    """of a hub data set or builtin:stdlib"""
    column: str = "text"
    """of rows: the one that holds the text"""
    subset: str | None = None
    """of a hub data set that has several"""
    hold_out: float | None = Field(None, gt=0, lt=1)
    """only the share that a source with the same `hold_out` keeps out of training"""

    def conflicts(self) -> Iterator[str]:
        """Yield what no window fits."""
        if self.windows and self.stride and self.stride > min(self.windows):
            yield f"stride: {self.stride} is longer than the shortest window, {min(self.windows)}; lower it"
        if self.windows and self.truncate and self.truncate < max(self.windows):
            yield f"truncate: {self.truncate} tokens do not hold a window of {max(self.windows)}; raise it"

    def sweep(self, window: int) -> tuple[tuple[int, ...], int]:
        """Return windows, the shortest first, and stride in tokens, for a model that reads `window` tokens."""
        windows = tuple(sorted(self.windows or default_windows(window, self.stride)))
        return windows, self.stride or min(STRIDE, max(1, windows[0] // 2))


class PasskeyOptions(Section):
    """Passkey retrieval (paper, section 3.3)."""

    target: Tokens | None = None
    """tokens of context; by default L'"""
    targets: Windows = None
    """several lengths of context instead of `target`"""
    depths: PositiveInt = 32
    """number of distances, uniformly spaced up to the target"""
    trials: PositiveInt = 10
    """random keys at each distance"""
    seed: Seed = 0
    """of the random keys"""

    @property
    def longest(self) -> int | None:
        """The longest context in tokens."""
        return max(self.targets) if self.targets else self.target


class ProbeOptions(Section):
    """What a probe of untuned scalings measures; no part of a recipe."""

    target: Annotated[tuple[Tokens, ...], LIST, Field(min_length=1)]
    """L', the window to extend to; several to see how far"""
    scalings: Texts | None = None
    """by default those of pi, yarn, theta that suit, and the model's own"""
    data: str | None = None
    """a file, folder, glob or hub id; `pg19` or `proof-pile`; of the built-in model builtin:stdlib"""
    column: str = "text"
    """of rows: the one that holds the text"""
    documents: PositiveInt | None = None
    """how many; by default 1 to 12, by the target"""
    trials: PositiveInt | None = None
    """passkeys at each distance; by default 1 to 10, by the target"""
    seed: Seed = 0
    """of the passkeys"""


class BenchmarksOptions(Section):
    """Short-context benchmarks (paper, table 5), of the finished run only."""

    tasks: Annotated[Texts, Field(min_length=1)] = ("boolq", "piqa", "race_middle", "race_high", "winogrande")
    """tasks or groups of lm-eval"""
    window: int | None = Field(None, gt=1)
    """tokens that an input is cut to; by default the shortest L of the models"""
    limit: PositiveInt | None = None
    """examples of each task; by default all"""
    batch_size: PositiveInt = 8
    """inputs per forward pass"""
    data: Texts = ()
    """local data in the schema of a task's own data set: `boolq=FILE`"""


class RulerOptions(Section):
    """RULER (Hsieh et al. 2024) through lm-eval, of the finished run only."""

    windows: Windows = None
    """in tokens; by default L', L'/2, ... down to L"""
    tasks: Texts | None = None
    """of lm-eval's 13; by default all"""
    samples: int = Field(100, gt=0, le=500)
    """prompts of each task and window"""
    seed: Seed = 0
    """of the prompts"""
    batch_size: PositiveInt | None = None
    """prompts at once; by default as many as 16,384 tokens hold"""


class Sampling(Section):
    """How text is generated."""

    temperature: float = Field(0.5, ge=0)
    """of sampling; 0 takes the likeliest token"""
    top_p: float = Field(0.95, gt=0, le=1)
    """sample among the likeliest tokens of this share"""
    max_new_tokens: PositiveInt | None = None
    """the longest summary; as tuned, or 1000"""
    seed: Seed = 0
    """of sampling"""


class SummarizationOptions(Sampling):
    """Summaries of long documents, scored by ROUGE (paper, section 3.5), of the finished run only."""

    data: str | None = None
    """files, a folder, a glob or a hub id; what was tuned on, or GovReport"""
    subset: str | None = None
    """of a hub data set"""
    split: str | None = None
    """of a hub data set; validation by default"""
    document: str | None = None
    """the column to summarize"""
    summary: str | None = None
    """the column it is compared with"""
    template: str | None = None
    """another prompt than the paper's, with {column} for a column"""
    completion: str | None = None
    """with `template`: the column that holds the answer"""
    document_tokens: Tokens | None = None
    """cut documents to them; as tuned, or 15000"""
    special_tokens: bool = False
    """read `</s>` and its like in texts as special tokens, not as text"""
    limit: PositiveInt | None = None
    """only the first examples; by default all"""
    batch_size: PositiveInt | None = None
    """summaries at once; by default as many as 16,384 tokens hold"""


class ChatOptions(Section):
    """The assistant's turns of chats: perplexity, and what changed against a base, of the finished run only."""

    data: str
    """chats: a file, folder, glob or hub id"""
    column: str = "messages"
    """of rows: the one that holds the messages, or `conversations`"""
    split: str = "train"
    """of a hub data set"""
    base: str | None = None
    """the model to compare with, as the one that was tuned; by default none"""
    window: int | None = Field(None, gt=1)
    """tokens; longer chats are left out; by default the shortest window of the models"""
    limit: PositiveInt | None = None
    """only the first chats; by default all"""


class ShortEvaluation(Section):
    """What is smaller in the measurements during training; what is left out is as in those of the finished run."""

    documents: PositiveInt | None = None
    """of perplexity; dealt out over processes, as depths are"""
    truncate: Tokens | None = None
    """of perplexity"""
    stride: Tokens | None = None
    """of perplexity"""
    depths: PositiveInt | None = None
    """of passkey"""
    trials: PositiveInt | None = None
    """of passkey"""


class Evaluation(Section):
    """What is measured of a run, and how often during training."""

    every: PositiveInt | None = None
    """steps between measurements, beginning at step 0"""
    perplexity: PerplexityOptions | None = None
    passkey: PasskeyOptions | None = None
    benchmarks: BenchmarksOptions | None = None
    ruler: RulerOptions | None = None
    summarization: SummarizationOptions | None = None
    chat: ChatOptions | None = None
    while_training: ShortEvaluation | None = None

    def in_short(self) -> "Evaluation":
        """Return what is measured every so many steps: smaller where `while_training` says so, and no benchmarks. Raise
        RecipeError if a smaller value does not fit the others.
        """
        smaller = self.while_training or ShortEvaluation()
        of_perplexity = smaller.model_dump(exclude_none=True, exclude={"depths", "trials"})
        of_passkey = smaller.model_dump(exclude_none=True, include={"depths", "trials"})
        return Evaluation(
            perplexity=self.perplexity and self.perplexity.changed(**of_perplexity),
            passkey=self.passkey and self.passkey.changed(**of_passkey),
        )
