"""Queries and keys taken from a model while it reads a text, and how large their scores become at any distance."""

from collections.abc import Sequence
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
from pi_lora.types import Json

WATCHED = "pi_lora_watched"
TOKENS, PAIRS = 2048, 64  # of the text, at most the model's window; of each head
REPEATS = 64  # of one token, to see how a layer rotates
TOLERANCE = 0.05  # relative; rounding to bfloat16 gives 0.01, a wrong layout or frequency tenths

Positions = NDArray[np.int64]


def measure_attention(loaded: Model, text: Path, setting: Setting) -> Json:
    """Take `pairs` queries and keys of each head while a model reads the first `tokens` of a text, no further than its
    window, and measure their scores at any distance: the largest of each head by layer, as `largest_scores` names
    them, and of all heads. Raise ScalingError if no layer rotates them as `setting` says.
    """
    first = next(iter(evaluation_documents(str(text))))
    ids = loaded.tokenizer(first.text, verbose=False, split_special_tokens=True)["input_ids"]
    ids = ids[: min(TOKENS, loaded.window)]
    random = np.random.default_rng(0)
    queries = random.integers(0, len(ids), PAIRS)
    pairs = queries, random.integers(0, queries + 1)
    found = layer_coefficients(loaded.model, ids, pairs, setting, loaded.scale)
    layers = {layer: largest_scores(h, setting) for layer, h in found.items()}
    heads = next(iter(layers.values()))
    largest = {name: max(max(each[name]) for each in layers.values()) for name in heads}
    return {"text": str(text), "tokens": len(ids), "pairs": PAIRS, "largest": largest, "layers": layers}


def largest_scores(h: Complexes, setting: Setting) -> dict[str, list[float]]:
    """Return the largest numbers of each head over its pairs, of coefficients `h` [heads, pairs, d / 2]: `|a(s)|` in
    [0, L) and in [L, L'); as shares of the bounds for the same pair and distance, `|a(s)|` in [L, L') and
    `|a - a_linear|` at the distances under PI, the latter also of the paper's bound (Eqn. 5).
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
    }
    return {name: values.max((1, 2)).tolist() for name, values in columns.items()}


def layer_coefficients(
    model: Any, ids: Sequence[int], pairs: tuple[Positions, Positions], setting: Setting, scale: float = 1.0
) -> dict[int, Complexes]:
    """Return the coefficients `h_j = (q_2j + i q_2j+1) (k_2j - i k_2j+1)` (Eqn. 3) of pairs of queries and keys before
    their rotation, given by their positions, by layer: [heads, pairs, d / 2]. Layers that do not rotate by `setting`
    and `scale`, or pair other numbers than LLaMA's layers do, are left out; raise ScalingError if none is left.
    """
    speeds = bounds.frequencies(setting.head_dim, setting.theta) / scale
    # In a text of one repeated token attention averages equal values: only the rotation differs between positions, so
    # coefficients are the same at every distance.
    ends, start = np.array([0, REPEATS - 1]), np.array([0, 0])
    repeated = _coefficients(model, [ids[0]] * REPEATS, (ends, start), speeds)
    found = {}
    for layer, h in sorted(_coefficients(model, ids, pairs, speeds).items()):
        first, last = repeated[layer].swapaxes(0, 1)
        if np.linalg.norm(last - first) < TOLERANCE * np.linalg.norm(first):
            found[layer] = h
    if not found:
        raise ScalingError(
            f"model of type {model.config.model_type}: no layer rotates its queries as the config says; give another"
        )
    return found


@torch.no_grad()
def _coefficients(
    model: Any, ids: Sequence[int], pairs: tuple[Positions, Positions], speeds: Reals
) -> dict[int, Complexes]:
    """Let the model read, and return by layer the products of queries with keys as complex numbers [heads, pairs,
    d / 2], rotated back by their distance; the two numbers of one are half a head apart, as in LLaMA.
    """
    half = len(speeds)
    rotation = np.exp(-1j * np.outer(pairs[0] - pairs[1], speeds))
    taken: dict[int, Complexes] = {}

    def attend(module: Any, query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> Any:
        rotated = []
        for vectors, positions in zip((query, key), pairs, strict=True):
            numbers = vectors[0][:, positions].to("cpu", torch.float64).numpy()
            rotated.append(numbers[..., :half] + 1j * numbers[..., half : 2 * half])
        keys = np.repeat(rotated[1], query.shape[1] // key.shape[1], axis=0)
        taken[module.layer_idx] = rotated[0] * keys.conj() * rotation
        return sdpa_attention_forward(module, query, key, *rest, **options)

    AttentionInterface.register(WATCHED, attend)
    AttentionMaskInterface.register(WATCHED, sdpa_mask)
    model.set_attn_implementation(WATCHED)
    model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False, logits_to_keep=1)
    return taken
