"""How large the scores of real queries and keys are inside the window, beyond it and in between, beside the bounds."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pi_lora.theory.bounds import (
    Complexes,
    Reals,
    attention_score,
    extrapolation_bound,
    interpolation_bound,
    linear_score,
    papers_interpolation_bound,
)
from pi_lora.theory.setting import Setting

DISTANCES = 2048  # at most as many inside, beyond and in between, evenly spread


@dataclass(frozen=True)
class HeadScores:
    """What the pairs of one head come to, each number the largest over its pairs and distances.

    `coefficient` is `max |h|`; `inside` and `beyond` are `|a(s)|` at whole distances in [0, L) and [L, L'), `between`
    is `|a - a_linear|` at the distances of PI. The shares are of the bounds for the same pair and distance: of Eqn. 8,
    of the interpolation bound, and of the paper's (Eqn. 5). `growth` is how many times as large as inside the score of
    one pair becomes beyond the window, and `example` the `h` of that pair.
    """

    layer: int
    head: int
    coefficient: float
    inside: float
    beyond: float
    between: float
    beyond_share: float
    between_share: float
    papers_share: float
    growth: float
    example: tuple[complex, ...]

    def as_json(self) -> dict[str, Any]:
        """For a file, without the example."""
        return {key: value for key, value in asdict(self).items() if key != "example"}


@dataclass(frozen=True)
class Attention:
    """Scores by layer and head: `pairs` queries and keys of each, among the first `tokens` of a text."""

    model: str
    text: str
    tokens: int
    pairs: int
    heads: list[HeadScores]


def measure_layer(layer: int, h: Complexes, setting: Setting) -> list[HeadScores]:
    """The scores of a layer's pairs, `h` [heads, pairs, d / 2], at the distances of `setting`."""
    inside, beyond, between = distances(setting)
    d, c = setting.head_dim, setting.theta
    largest = np.abs(h).max(-1)[..., None]
    at_home = np.abs(attention_score(h, inside, c))
    away = np.abs(attention_score(h, beyond, c))
    off = np.abs(attention_score(h, between, c) - linear_score(h, between, c))
    away_shares = away / extrapolation_bound(d, c, largest, beyond)
    off_shares, papers_shares = (
        off / bound(d, c, largest, between) for bound in (interpolation_bound, papers_interpolation_bound)
    )
    growth = away.max(-1) / at_home.max(-1)
    return [
        HeadScores(
            layer=layer,
            head=head,
            coefficient=float(largest[head].max()),
            inside=float(at_home[head].max()),
            beyond=float(away[head].max()),
            between=float(off[head].max()),
            beyond_share=float(away_shares[head].max()),
            between_share=float(off_shares[head].max()),
            papers_share=float(papers_shares[head].max()),
            growth=float(growth[head].max()),
            example=tuple(h[head, growth[head].argmax()].tolist()),
        )
        for head in range(len(h))
    ]


def distances(setting: Setting) -> tuple[Reals, Reals, Reals]:
    """Whole distances inside the window and beyond it, and those that PI makes of whole ones between two of them."""
    inside = _spread(np.arange(setting.original))
    beyond = _spread(np.arange(setting.original, setting.target))
    # Exact where a division would not be: a whole distance is one whose remainder is 0.
    stretched = np.arange(setting.target)
    fractional = stretched[stretched * setting.original % setting.target != 0]
    return inside.astype(float), beyond.astype(float), _spread(fractional) * setting.original / setting.target


def sampled_pairs(tokens: int, number: int, seed: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions of `number` queries, and of a key for each, at or before it."""
    random = np.random.default_rng(seed)
    queries = random.integers(0, tokens, number)
    return queries, random.integers(0, queries + 1)


def _spread(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """All of `values`, or `DISTANCES` of them from the first to the last."""
    if len(values) <= DISTANCES:
        return values
    return values[np.linspace(0, len(values) - 1, DISTANCES).round().astype(np.int64)]
