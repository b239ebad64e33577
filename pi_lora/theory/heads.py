"""Queries and keys taken from a model while it reads a text, and how large their scores become at any distance."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pi_lora.data.sources import evaluation_documents
from pi_lora.errors import DataError, ScalingError
from pi_lora.models.model import Model
from pi_lora.scaling.config import method_of
from pi_lora.theory import bounds
from pi_lora.theory.bounds import Complexes, Reals, Setting
from pi_lora.types import Progress, silent

WATCHED = "pi_lora_watched"
TOKENS, PAIRS = 2048, 64  # of the text, at most the model's window; of each head
REPEATS = 64  # of one token, to see how a layer rotates
TOLERANCE = 0.05  # relative; rounding to bfloat16 gives 0.01, a wrong layout or frequency tenths

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class HeadScores:
    """The scores of one head, each number the largest over its pairs and distances."""

    layer: int
    head: int
    coefficient: float  # `max |h|`
    inside: float  # `|a(s)|` at whole distances in [0, L)
    beyond: float  # and in [L, L')
    between: float  # `|a - a_linear|` at the distances under PI
    beyond_share: float  # of the bound for the same pair and distance (Eqn. 8)
    between_share: float  # of the interpolation bound
    papers_share: float  # of the paper's (Eqn. 5)
    growth: float  # largest score beyond over largest inside, of one pair


@dataclass(frozen=True)
class Attention:
    """Scores by layer and head, of `pairs` queries and keys each among the first `tokens` of a text."""

    model: str
    text: str
    tokens: int
    pairs: int
    heads: list[HeadScores]
    example: tuple[HeadScores, Complexes]  # the `h` [d / 2] of the pair that grows most beyond, and its head


def measure_attention(loaded: Model, text: Path, setting: Setting, progress: Progress = silent) -> Attention:
    """Take queries and keys from a model while it reads a text, no further than its window, and measure their scores at
    any distance. Raise DataError if the text has fewer than two tokens, ScalingError if another method than PI extended
    it.
    """
    if method_of(loaded.config) not in (None, "pi"):
        raise ScalingError(f"{loaded.name}: is not stretched by PI; the bounds are for its frequencies alone")
    first = next(iter(evaluation_documents(str(text))))
    ids = loaded.tokenizer(first.text, verbose=False)["input_ids"][: min(TOKENS, loaded.window)]
    if len(ids) < 2:
        raise DataError(f"{text}: holds {len(ids)} tokens; give a text of two or more")
    layers = layer_coefficients(loaded.model, ids, sampled_pairs(len(ids), PAIRS), setting, loaded.scale)
    heads: list[HeadScores] = []
    examples: list[tuple[HeadScores, Complexes]] = []
    for done, (layer, h) in enumerate(layers.items(), 1):
        scores, growth = _measure_layer(layer, h, setting)
        head, pair = np.unravel_index(growth.argmax(), growth.shape)
        heads += scores
        examples.append((scores[head], h[head, pair]))
        progress(done, len(layers))
    return Attention(loaded.name, str(text), len(ids), PAIRS, heads, max(examples, key=lambda each: each[0].growth))


def _measure_layer(layer: int, h: Complexes, setting: Setting) -> tuple[list[HeadScores], Reals]:
    """Return the scores of a layer's pairs, `h` [heads, pairs, d / 2], and the growth of each pair."""
    inside, beyond, between = bounds.distances(setting)
    d, c = setting.head_dim, setting.theta
    largest = np.abs(h).max(-1)[..., None]
    at_home, away = (np.abs(bounds.attention_score(h, s, c)) for s in (inside, beyond))
    off = np.abs(bounds.attention_score(h, between, c) - bounds.linear_score(h, between, c))
    growth = away.max(-1) / at_home.max(-1)
    columns = {
        "coefficient": largest,
        "inside": at_home,
        "beyond": away,
        "between": off,
        "beyond_share": away / bounds.extrapolation_bound(d, c, largest, beyond),
        "between_share": off / bounds.interpolation_bound(d, c, largest, between),
        "papers_share": off / bounds.interpolation_bound(d, c, largest, between, papers=True),
        "growth": growth[..., None],
    }
    by_head = {name: values.max((1, 2)).tolist() for name, values in columns.items()}
    heads = [HeadScores(layer, head, **{name: by_head[name][head] for name in by_head}) for head in range(len(h))]
    return heads, growth


def sampled_pairs(tokens: int, number: int) -> tuple[Positions, Positions]:
    """Return positions of `number` queries, and of a key at or before each; always the same."""
    random = np.random.default_rng(0)
    queries = random.integers(0, tokens, number)
    return queries, random.integers(0, queries + 1)


def layer_coefficients(
    model: Any, ids: Sequence[int], pairs: tuple[Positions, Positions], setting: Setting, scale: float = 1.0
) -> dict[int, Complexes]:
    """Return the `h` of pairs of queries and keys, given by their positions, by layer: [heads, pairs, d / 2]. Layers
    that do not rotate by `setting` and `scale` are left out; raise ScalingError if none is left.
    """
    speeds = bounds.frequencies(setting.head_dim, setting.theta) / scale
    layouts = _layouts(model, ids[0], speeds)
    if not layouts:
        raise ScalingError(
            f"model of type {model.config.model_type}: no layer rotates its queries as the config says; give another"
        )
    found: dict[int, Complexes] = {}
    vectors = _read(model, ids, pairs)
    for layer, order in sorted(layouts.items()):
        query, key = (_rotated_back(*each, order, speeds) for each in zip(vectors[layer], pairs, strict=True))
        found[layer] = bounds.coefficients(query, np.repeat(key, len(query) // len(key), axis=0))
    return found


def _layouts(model: Any, token: int, speeds: Reals) -> dict[int, list[int]]:
    """By layer, the order in which the numbers of a head form pairs. In a text of one repeated token attention averages
    equal values, so a layer's queries differ by rotation only.
    """
    numbers = list(range(2 * len(speeds)))
    halves_apart = np.reshape(numbers, (2, -1)).T.ravel().tolist()  # LLaMA in transformers
    found: dict[int, list[int]] = {}
    ends = np.array([0, REPEATS - 1])
    for layer, (query, _) in _read(model, [token] * REPEATS, (ends, ends)).items():
        for order in (halves_apart, numbers):
            first, last = _rotated_back(query, ends, order, speeds).swapaxes(0, 1)
            if np.linalg.norm(last - first) < TOLERANCE * np.linalg.norm(first):
                found[layer] = order
    return found


def _rotated_back(vectors: Reals, at: Positions, order: list[int], speeds: Reals) -> Reals:
    """Queries or keys [heads, tokens, width] at the positions `at` before their rotation, in the paper's order."""
    numbers = vectors[..., order]
    plain = (numbers[..., ::2] + 1j * numbers[..., 1::2]) * np.exp(-1j * np.outer(at, speeds))
    return np.stack([plain.real, plain.imag], axis=-1).reshape(numbers.shape)


@torch.no_grad()
def _read(model: Any, ids: Sequence[int], pairs: tuple[Positions, Positions]) -> dict[int, list[Reals]]:
    """Let the model read, and return the rotated queries and keys of `pairs` by layer, [heads, pairs, width]."""
    found: dict[int, list[Reals]] = {}

    def attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: Any, mask: Any, **options: Any) -> Any:
        taken = zip((query, key), pairs, strict=True)
        found[module.layer_idx] = [each[0][:, at].to("cpu", torch.float64).numpy() for each, at in taken]
        return sdpa_attention_forward(module, query, key, value, mask, scaling=options.get("scaling"))

    AttentionInterface.register(WATCHED, attend)
    AttentionMaskInterface.register(WATCHED, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(WATCHED)
    try:
        model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False, logits_to_keep=1)
    finally:
        model.set_attn_implementation(before)
    return found
