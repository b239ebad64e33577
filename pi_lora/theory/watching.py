"""Queries and keys taken from a model while it reads a text, and rotated back to position 0."""

from collections.abc import Callable, Sequence
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
from pi_lora.theory.bounds import Complexes, Reals, Setting, coefficients, frequencies
from pi_lora.theory.heads import Attention, measure_layer, sampled_pairs
from pi_lora.types import Progress, silent

WATCHED = "pi_lora_watched"
TOKENS, PAIRS = 2048, 64  # of the text, at most the model's window; of each head
REPEATS = 64  # of one token, to see how a layer rotates
TOLERANCE = 0.05  # relative; rounding to bfloat16 gives 0.01, a wrong layout or frequency tenths

Positions = NDArray[np.int64]


def measure_attention(loaded: LoadedModel, text: Path, setting: Setting, progress: Progress = silent) -> Attention:
    """Take queries and keys from a model while it reads a text, and measure the scores they have at any distance.

    It reads no further than its own window, so that only the distance is beyond it. The pairs have a fixed seed.

    Raises:
        DataError: the text cannot be read, or has fewer than two tokens.
        ScalingError: the model is extended by another method than PI, or does not rotate as its config says.
    """
    if method_of(loaded.config) not in (None, "pi"):
        raise ScalingError(f"{loaded.name}: is not stretched by PI; the bounds are for its frequencies alone")
    first = next(iter(evaluation_documents(str(text))))
    ids = loaded.tokenizer(first.text, verbose=False)["input_ids"][: min(TOKENS, loaded.window)]
    if len(ids) < 2:
        raise DataError(f"{text}: holds {len(ids)} tokens; give a text of two or more")
    layers = layer_coefficients(loaded.model, ids, sampled_pairs(len(ids), PAIRS), setting, loaded.scale)
    heads, examples = [], []
    for done, (layer, h) in enumerate(layers.items(), 1):
        measured, example = measure_layer(layer, h, setting)
        heads += measured
        examples.append(example)
        progress(done, len(layers))
    return Attention(loaded.name, str(text), len(ids), PAIRS, heads, max(examples, key=lambda each: each[0].growth))


def layer_coefficients(
    model: Any, ids: Sequence[int], pairs: tuple[Positions, Positions], setting: Setting, scale: float = 1.0
) -> dict[int, Complexes]:
    """Return the `h` of pairs of tokens in a text by layer, [heads, pairs, d / 2].

    `pairs` are the positions of queries and of keys. Layers that do not rotate by `setting` and `scale` (sliding ones
    with a rope of their own, those without) are left out; raises ScalingError if none is left.
    """
    speeds = frequencies(setting.head_dim, setting.theta) / scale
    layouts = _layouts(model, ids[0], speeds)
    if not layouts:
        raise ScalingError(
            f"model of type {model.config.model_type}: no layer rotates its queries as the config says; "
            "its scores cannot be taken apart"
        )
    found: dict[int, Complexes] = {}

    def saw(layer: int, *vectors: torch.Tensor) -> None:
        if layer in layouts:
            query, key = (
                _rotated_back(each, at, layouts[layer], speeds) for each, at in zip(vectors, pairs, strict=True)
            )
            found[layer] = coefficients(query, np.repeat(key, len(query) // len(key), axis=0))

    _read(model, ids, saw)
    return dict(sorted(found.items()))


def _layouts(model: Any, token: int, speeds: Reals) -> dict[int, Positions]:
    """By layer, the order in which the numbers of a head form pairs.

    In a text of one repeated token attention averages equal values, so a layer's queries differ by rotation only.
    """
    first, last = np.array([0]), np.array([REPEATS - 1])
    numbers = np.arange(2 * len(speeds))
    halves_apart = numbers.reshape(2, -1).T.ravel()  # LLaMA in transformers
    found: dict[int, Positions] = {}

    def saw(layer: int, query: torch.Tensor, key: torch.Tensor) -> None:
        for order in (halves_apart, numbers):
            expected, other = (_rotated_back(query, at, order, speeds) for at in (first, last))
            if np.linalg.norm(other - expected) < TOLERANCE * np.linalg.norm(expected):
                found[layer] = order

    _read(model, [token] * REPEATS, saw)
    return found


def _rotated_back(vectors: torch.Tensor, at: Positions, order: Positions, speeds: Reals) -> Reals:
    """Queries or keys [heads, tokens, width] at some positions before their rotation, in the paper's order."""
    numbers = vectors[:, at].to("cpu", torch.float64).numpy()[..., order]
    plain = (numbers[..., ::2] + 1j * numbers[..., 1::2]) * np.exp(-1j * np.outer(at, speeds))
    return np.stack([plain.real, plain.imag], axis=-1).reshape(numbers.shape)


@torch.no_grad()
def _read(model: Any, ids: Sequence[int], saw: Callable[..., None]) -> None:
    """Let the model read, and pass each layer's number, rotated queries and keys [heads, tokens, width] to `saw`."""

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
        model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False, logits_to_keep=1)
    finally:
        model.set_attn_implementation(before)
