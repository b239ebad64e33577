"""How large the scores of a model's queries and keys become, by head: inside the window, beyond it, and under PI."""

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from pi_lora.theory.bounds import (
    Complexes,
    Reals,
    Setting,
    attention_score,
    extrapolation_bound,
    interpolation_bound,
    linear_score,
    papers_interpolation_bound,
)
from pi_lora.types import Json

DISTANCES = 2048  # at most as many inside, beyond and in between, evenly spread


@dataclass(frozen=True)
class HeadScores:
    """The scores of one head, each number the largest over its pairs and distances.

    `coefficient`: `max |h|`. `inside`, `beyond`: `|a(s)|` at whole distances in [0, L) and [L, L'). `between`:
    `|a - a_linear|` at the distances under PI. The shares are of the bound for the same pair and distance: Eqn. 8, the
    interpolation bound, and the paper's (Eqn. 5). `growth`: largest score beyond over largest inside, of one pair.
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


# The `h` [d / 2] of the pair whose score grows most beyond the window, and the scores of its head.
Example = tuple[HeadScores, Complexes]


@dataclass(frozen=True)
class Attention:
    """Scores by layer and head, of `pairs` queries and keys each among the first `tokens` of a text."""

    model: str
    text: str
    tokens: int
    pairs: int
    heads: list[HeadScores]
    example: Example

    def as_json(self) -> Json:
        """Return all but the example."""
        content = {key: value for key, value in vars(self).items() if key != "example"}
        return {**content, "heads": [asdict(each) for each in self.heads]}


def measure_layer(layer: int, h: Complexes, setting: Setting) -> tuple[list[HeadScores], Example]:
    """Return the scores of a layer's pairs, `h` [heads, pairs, d / 2], and the pair that grows most."""
    inside, beyond, between = distances(setting)
    d, c = setting.head_dim, setting.theta
    largest = np.abs(h).max(-1)[..., None]
    at_home = np.abs(attention_score(h, inside, c))
    away = np.abs(attention_score(h, beyond, c))
    off = np.abs(attention_score(h, between, c) - linear_score(h, between, c))
    growth = away.max(-1) / at_home.max(-1)
    columns = {
        "coefficient": largest,
        "inside": at_home,
        "beyond": away,
        "between": off,
        "beyond_share": away / extrapolation_bound(d, c, largest, beyond),
        "between_share": off / interpolation_bound(d, c, largest, between),
        "papers_share": off / papers_interpolation_bound(d, c, largest, between),
        "growth": growth[..., None],
    }
    by_head = {name: values.max((1, 2)) for name, values in columns.items()}
    heads = [
        HeadScores(layer, head, **{name: float(values[head]) for name, values in by_head.items()})
        for head in range(len(h))
    ]
    head, pair = np.unravel_index(growth.argmax(), growth.shape)
    return heads, (heads[head], h[head, pair])


def distances(setting: Setting) -> tuple[Reals, Reals, Reals]:
    """Return whole distances inside the window and beyond it, and the fractional ones that PI makes of whole ones."""
    inside = _spread(np.arange(setting.original))
    beyond = _spread(np.arange(setting.original, setting.target))
    # The remainder is exact where a division is not: it is 0 for a whole distance.
    extended = np.arange(setting.target)
    fractional = extended[extended * setting.original % setting.target != 0]
    return inside.astype(float), beyond.astype(float), _spread(fractional) * setting.original / setting.target


def sampled_pairs(tokens: int, number: int, seed: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return positions of `number` queries, and of a key at or before each."""
    random = np.random.default_rng(seed)
    queries = random.integers(0, tokens, number)
    return queries, random.integers(0, queries + 1)


def _spread(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """All of `values`, or `DISTANCES` of them from the first to the last."""
    if len(values) <= DISTANCES:
        return values
    return values[np.linspace(0, len(values) - 1, DISTANCES).round().astype(np.int64)]
