"""Perplexity scores."""

from pydantic import Field

from pi_lora.evaluation.measurement import Result, Scores
from pi_lora.recipe.evaluation import PerplexityOptions


class WindowPerplexity(Result):
    """The perplexity at one window length (tokens) over `tokens` scored tokens, each weighted equally, and their loss
    in bits over the `bytes` of UTF-8 text that they stand for.
    """

    window: int
    perplexity: float
    tokens: int
    bits_per_byte: float | None = None
    bytes: int | None = None


class DocumentPerplexity(Result):
    """The perplexities of one document."""

    name: str
    tokens: int
    windows: list[WindowPerplexity]


class PositionLoss(Result):
    """The mean loss in nats of tokens with `first` to `last` - 1 tokens before them in their window."""

    first: int = Field(alias="from")
    last: int = Field(alias="to")
    loss: float
    tokens: int


class LossByPosition(Result):
    """The loss by position in windows of `window` tokens that do not overlap."""

    window: int
    bins: list[PositionLoss]


class PerplexityScores(Scores):
    """Sliding-window perplexity of `documents`, chosen and truncated as the options say."""

    measurement = "perplexity"

    options: PerplexityOptions
    data: str = ""
    documents: int | None = None
    documents_too_short: int | None = None
    bos: bool | None = None
    stride: int = 0
    weighting: str = "token"
    windows: list[WindowPerplexity]
    per_document: list[DocumentPerplexity] | None = None
    by_position: LossByPosition | None = None
