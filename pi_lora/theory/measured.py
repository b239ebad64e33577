"""Queries and keys of a real text, taken from a model while it reads, and turned back to before their rotation."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from pi_lora.data.corpus import evaluation_documents
from pi_lora.errors import DataError, ScalingError
from pi_lora.models.load import LoadedModel
from pi_lora.scaling.config import method_of
from pi_lora.theory.bounds import (
    Complexes,
    Reals,
    Setting,
    attention_score,
    coefficients,
    extrapolation_bound,
    frequencies,
    interpolation_bound,
    linear_score,
    papers_interpolation_bound,
)

WATCHED = "pi_lora_watched"
REPEATS = 64  # of one token, to see how a layer rotates
NOT_ALIKE = 0.05  # relative; rounding to bfloat16 gives 0.01, a wrong layout or frequency tenths

Saw = Callable[[int, torch.Tensor, torch.Tensor], None]
Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True)
class Rotation:
    """How the heads of a model rotate: `head_dim` numbers, the base, and what positions are divided by."""

    head_dim: int
    theta: float
    scale: float = 1.0

    def angles(self, positions: NDArray[np.int64]) -> Reals:
        """In radians, [positions, d / 2]."""
        return np.outer(positions / self.scale, frequencies(self.head_dim, self.theta))


def layer_coefficients(
    model: Any, ids: Sequence[int], pairs: Pairs, rotation: Rotation, progress: Callable[[int, int], None] | None = None
) -> dict[int, Complexes]:
    """The `h` of pairs of tokens in a text, by layer: [heads, pairs, d / 2].

    `pairs` are the positions of queries and of keys. Layers that do not rotate as `rotation` says (sliding ones with a
    rope of their own, those without) are left out.

    Raises:
        ScalingError: no layer does.
    """
    layouts = _layouts(model, ids[0], rotation)
    if not layouts:
        raise ScalingError(
            f"model of type {model.config.model_type}: no layer rotates its queries as the config says; "
            "its scores cannot be taken apart"
        )
    found: dict[int, Complexes] = {}
    queries_at, keys_at = pairs

    def saw(layer: int, query: torch.Tensor, key: torch.Tensor) -> None:
        if layer in layouts:
            of_query = _turned_back(query[:, queries_at], queries_at, layouts[layer], rotation)
            of_key = _turned_back(key[:, keys_at], keys_at, layouts[layer], rotation)
            found[layer] = coefficients(of_query, np.repeat(of_key, len(of_query) // len(of_key), axis=0))
            if progress:
                progress(len(found), len(layouts))

    _read(model, ids, saw)
    return dict(sorted(found.items()))


def _layouts(model: Any, token: int, rotation: Rotation) -> dict[int, Any]:
    """By layer, the order in which the numbers of a head make pairs.

    In a text of one token repeated, attention averages equal values, so that every layer sees the same at all positions
    and its queries differ by their rotation alone.
    """
    last = np.array([REPEATS - 1])
    found = {}

    def saw(layer: int, query: torch.Tensor, key: torch.Tensor) -> None:
        first, turned = _numbers(query[:, [0]]), query[:, last]
        for order in _orders(rotation.head_dim):
            expected = first[..., order]
            difference = _turned_back(turned, last, order, rotation) - expected
            if np.linalg.norm(difference) < NOT_ALIKE * np.linalg.norm(expected):
                found[layer] = order

    _read(model, [token] * REPEATS, saw)
    return found


def _orders(head_dim: int) -> Iterator[NDArray[np.int64]]:
    """Where the numbers of the paper's pairs stand in a head: half of it apart (LLaMA in transformers), or in a row."""
    yield np.arange(head_dim).reshape(2, -1).T.ravel()
    yield np.arange(head_dim)


def _turned_back(vectors: torch.Tensor, at: NDArray[np.int64], order: NDArray[np.int64], rotation: Rotation) -> Reals:
    """Rotated queries or keys [heads, positions, width] in the paper's order, as before they were rotated."""
    numbers = _numbers(vectors)[..., order]
    plain = (numbers[..., ::2] + 1j * numbers[..., 1::2]) * np.exp(-1j * rotation.angles(at))
    return np.stack([plain.real, plain.imag], axis=-1).reshape(numbers.shape)


def _numbers(tensor: torch.Tensor) -> Reals:
    return np.asarray(tensor.to("cpu", torch.float64).numpy(), dtype=np.float64)


@torch.no_grad()
def _read(model: Any, ids: Sequence[int], saw: Saw) -> None:
    """Let the model read, and hand on each layer's rotated queries and keys, [heads, tokens, width]."""
    with _watched(model, saw):
        model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False, logits_to_keep=1)


@contextmanager
def _watched(model: Any, saw: Saw) -> Iterator[None]:
    """Attention as PyTorch computes it, which shows what it gets."""

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        saw(module.layer_idx, query[0], key[0])
        output = functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=options.get("scaling"), enable_gqa=True
        )
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register(WATCHED, attend)
    AttentionMaskInterface.register(WATCHED, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(WATCHED)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


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
    """Json by layer and head: `pairs` queries and keys of each, among the first `tokens` of a text."""

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


TOKENS = 2048  # of the text, or as many as the model was trained for
PAIRS = 64


def measure_attention(
    loaded: LoadedModel, text: Path, setting: Setting, progress: Callable[[int, int], None] | None = None
) -> Attention:
    """Take queries and keys from a model while it reads a text, and measure the scores they would have at any distance.

    It reads no further than its own window, so that what is beyond comes of the distance alone. The pairs are drawn
    with a fixed seed.

    Raises:
        DataError: the text cannot be read, or has fewer than two tokens.
        ScalingError: the model is stretched otherwise than by PI, or does not rotate as its config says.
    """
    if method_of(loaded.config) not in (None, "pi"):
        raise ScalingError(f"{loaded.name}: is not stretched by PI; the bounds are for its frequencies alone")
    first = next(iter(evaluation_documents(str(text))))
    ids = loaded.tokenizer(first.text, verbose=False)["input_ids"][: min(TOKENS, loaded.window)]
    if len(ids) < 2:
        raise DataError(f"{text}: holds {len(ids)} tokens; give a text of two or more")
    rotation = Rotation(setting.head_dim, setting.theta, loaded.scale)
    layers = layer_coefficients(loaded.model, ids, sampled_pairs(len(ids), PAIRS), rotation)
    heads: list[HeadScores] = []
    for done, (layer, h) in enumerate(layers.items(), 1):
        heads += measure_layer(layer, h, setting)
        if progress:
            progress(done, len(layers))
    return Attention(loaded.name, str(text), len(ids), PAIRS, heads)
