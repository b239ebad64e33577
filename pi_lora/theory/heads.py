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
from pi_lora.errors import ScalingError
from pi_lora.models.model import Model
from pi_lora.theory import bounds
from pi_lora.theory.bounds import Complexes, Reals, Setting

WATCHED = "pi_lora_watched"
TOKENS, PAIRS = 2048, 64  # of the text, at most the model's window; of each head
REPEATS = 64  # of one token, to see how a layer rotates
TOLERANCE = 0.05  # relative; rounding to bfloat16 gives 0.01, a wrong layout or frequency tenths

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Attention:
    """Scores of `pairs` queries and keys of each head among the first `tokens` of a text: for each head of each layer
    the largest over its pairs and distances, as `largest_scores` names them.
    """

    model: str
    text: str
    tokens: int
    pairs: int
    heads: list[dict[str, float]]

    @property
    def largest(self) -> dict[str, float]:
        """The largest score of all heads by its name."""
        return {name: max(head[name] for head in self.heads) for name in self.heads[0]}


def measure_attention(loaded: Model, text: Path, setting: Setting) -> Attention:
    """Take queries and keys from a model while it reads a text, no further than its window, and measure their scores at
    any distance. Raise ScalingError if no layer rotates them as `setting` says.
    """
    first = next(iter(evaluation_documents(str(text))))
    ids = loaded.tokenizer(first.text, verbose=False, split_special_tokens=True)["input_ids"][
        : min(TOKENS, loaded.window)
    ]
    layers = layer_coefficients(loaded.model, ids, sampled_pairs(len(ids), PAIRS), setting, loaded.scale)
    heads = []
    for layer, h in layers.items():
        scores = largest_scores(h, setting)
        heads += [
            {"layer": layer, "head": head, **{name: float(of[head]) for name, of in scores.items()}}
            for head in range(len(h))
        ]
    return Attention(loaded.name, str(text), len(ids), PAIRS, heads)


def largest_scores(h: Complexes, setting: Setting) -> dict[str, Reals]:
    """Return the largest numbers of each head [heads] over its pairs, of coefficients `h` [heads, pairs, d / 2]:
    `|a(s)|` in [0, L) and in [L, L'); as shares of the bounds for the same pair and distance, `|a(s)|` in [L, L') and
    `|a - a_linear|` at the distances under PI, the latter also of the paper's bound (Eqn. 5); and the growth of one
    pair, its largest score beyond over its largest inside.
    """
    at_home, away, between = bounds.distances(setting)
    d, c = setting.head_dim, setting.theta
    largest = np.abs(h).max(-1)[..., None]
    inside, beyond = (np.abs(bounds.attention_score(h, s, c)) for s in (at_home, away))
    off = np.abs(bounds.attention_score(h, between, c) - bounds.linear_score(h, between, c))
    columns = {
        "inside": inside,
        "beyond": beyond,
        "beyond_share": beyond / bounds.extrapolation_bound(d, c, largest, away),
        "between_share": off / bounds.interpolation_bound(d, c, largest, between),
        "papers_share": off / bounds.interpolation_bound(d, c, largest, between, papers=True),
        "growth": beyond.max(-1, keepdims=True) / inside.max(-1, keepdims=True),
    }
    return {name: values.max((1, 2)) for name, values in columns.items()}


def sampled_pairs(tokens: int, number: int) -> tuple[Positions, Positions]:
    """Return positions of `number` queries, and of a key at or before each; always the same."""
    random = np.random.default_rng(0)
    queries = random.integers(0, tokens, number)
    return queries, random.integers(0, queries + 1)


def layer_coefficients(
    model: Any, ids: Sequence[int], pairs: tuple[Positions, Positions], setting: Setting, scale: float = 1.0
) -> dict[int, Complexes]:
    """Return the coefficients `h_j = (q_2j + i q_2j+1) (k_2j - i k_2j+1)` (Eqn. 3) of pairs of queries and keys before
    their rotation, given by their positions, by layer: [heads, pairs, d / 2]. Layers that do not rotate by `setting`
    and `scale`, or pair other numbers than LLaMA's layers do, are left out; raise ScalingError if none is left.
    """
    speeds = bounds.frequencies(setting.head_dim, setting.theta) / scale
    # In a text of one repeated token attention averages equal values: a layer's queries differ by their rotation only.
    ends = np.array([0, REPEATS - 1])
    found: dict[int, Complexes] = {}
    repeated = _before_rotation(model, [ids[0]] * REPEATS, (ends, ends), speeds)
    for layer, (query, key) in sorted(_before_rotation(model, ids, pairs, speeds).items()):
        first, last = repeated[layer][0].swapaxes(0, 1)
        if np.linalg.norm(last - first) < TOLERANCE * np.linalg.norm(first):
            found[layer] = query * np.repeat(key, len(query) // len(key), axis=0).conj()
    if not found:
        raise ScalingError(
            f"model of type {model.config.model_type}: no layer rotates its queries as the config says; give another"
        )
    return found


@torch.no_grad()
def _before_rotation(
    model: Any, ids: Sequence[int], pairs: tuple[Positions, Positions], speeds: Reals
) -> dict[int, list[Complexes]]:
    """Let the model read, and return the queries and keys of `pairs` by layer as complex numbers [heads, pairs, d / 2],
    rotated back from their positions; the two numbers of one are half a head apart, as in LLaMA.
    """
    half = len(speeds)
    taken: dict[int, list[Complexes]] = {}

    def attend(module: Any, query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> Any:
        taken[module.layer_idx] = []
        for vectors, positions in zip((query, key), pairs, strict=True):
            numbers = vectors[0][:, positions].to("cpu", torch.float64).numpy()
            rotated = numbers[..., :half] + 1j * numbers[..., half : 2 * half]
            taken[module.layer_idx].append(rotated * np.exp(-1j * np.outer(positions, speeds)))
        return sdpa_attention_forward(module, query, key, *rest, **options)

    AttentionInterface.register(WATCHED, attend)
    AttentionMaskInterface.register(WATCHED, sdpa_mask)
    model.set_attn_implementation(WATCHED)
    model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False, logits_to_keep=1)
    return taken
