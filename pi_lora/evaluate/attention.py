"""The attention scores of a model on a text, beside the bounds of the paper's section 2."""

from collections.abc import Callable
from pathlib import Path

from pi_lora.data.corpus import evaluation_documents
from pi_lora.errors import DataError, ScalingError
from pi_lora.rope import method_of
from pi_lora.run import LoadedModel
from pi_lora.theory.measured import Attention, HeadScores, measure_layer, sampled_pairs
from pi_lora.theory.setting import Setting
from pi_lora.theory.watching import Rotation, layer_coefficients

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
