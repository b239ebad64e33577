"""RULER scores."""

from pydantic import Field

from pi_lora.evaluation.measurement import Result, Scores
from pi_lora.recipe.evaluation import RulerOptions

ALL_TASKS = 13
# Llama-2-7B at 4,096 tokens, over all 13 tasks (Hsieh et al. 2024, section 4).
PAPERS_THRESHOLD = 0.856
SHARE_OF_BASE = 0.95


class RulerTask(Result):
    """A task of RULER at one window: the mean of `outcomes`, the share of answers found in each of the prompts made for
    `length` tokens; `tokens` is the longest with what is written after it.
    """

    score: float = Field(ge=0, le=1)
    stderr: float | None = None
    samples: int
    length: int
    tokens: int
    outcomes: list[float] | None = None


class RulerWindow(Result):
    """The mean over the tasks of RULER at one window (tokens)."""

    window: int
    score: float = Field(ge=0, le=1)
    stderr: float | None = None
    tasks: dict[str, RulerTask]


class RelativeLength(Result):
    """The effective length in tokens by 95 % of `score`, the base's at `window`, the longest measured of its own."""

    base: str
    window: int
    score: float
    effective_length: int


class RulerScores(Scores):
    """RULER at several windows, and its effective length in tokens: up to it every mean reaches the paper's 85.6 %."""

    measurement = "ruler"

    options: RulerOptions | None = None
    seed: int = 0
    samples: int = 0
    chat_template: bool = False
    lm_eval: str | None = None
    left_out: dict[str, str] | None = None
    lengths: list[RulerWindow] = Field(min_length=1)
    effective_length: int
    relative: RelativeLength | None = None
