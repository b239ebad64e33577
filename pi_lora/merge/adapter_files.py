"""An adapter folder as PEFT writes it, read without PEFT: which tensors change which weights, and how."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pi_lora.errors import ModelError
from pi_lora.merge.deltas import Change, LowRank, Replacement
from pi_lora.merge.shards import StoredTensor, read_header
from pi_lora.run_folder import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE

PREFIX = "base_model.model."
PARTS = re.compile(r"\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(\.weight)?$")
# Starting points that leave the base as it is; PiSSA, OLoRA, CorDA and LoftQ subtract theirs from it.
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
# Kinds of LoRA whose update is not one matrix product, or not always there.
NOT_MERGED = ("alora_invocation_tokens", "arrow_config", "layer_replication", "lora_bias", "target_parameters")


@dataclass(frozen=True)
class Adapter:
    """The changes by the name that transformers computes a weight under, and the file that they are in."""

    path: Path
    changes: Mapping[str, Change]


def read_adapter(folder: Path, settings: Mapping[str, Any], transposed: frozenset[str]) -> Adapter:
    """What the adapter in `folder` does; `transposed` names the linear weights that are stored inputs x outputs.

    Raises:
        ModelError: it is missing, damaged, pickled, or not made of whole adapters.
    """
    path = folder / ADAPTER_WEIGHTS_FILE
    if not path.is_file():
        pickled = path.with_suffix(".bin")
        reason = "pickle can run code and is not read; save it as safetensors" if pickled.is_file() else "is missing"
        raise ModelError(f"{pickled if pickled.is_file() else path}: {reason}")
    modules: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    changes: dict[str, Change] = {}
    for key, tensor in read_header(path).items():
        name = key.removeprefix(PREFIX)
        if part := PARTS.search(name):
            modules[name[: part.start()]][part.group(1)] = tensor
        else:
            # A trained bias is saved under the layer that PEFT has wrapped.
            changes[name.replace(".base_layer.", ".")] = Replacement(tensor)
    unknown = []
    for module, parts in modules.items():
        weight = f"{module}.weight"
        change = _low_rank(module, parts, settings, weight in transposed)
        if change is None or weight in changes:
            unknown += [tensor.name for tensor in parts.values()]
        else:
            changes[weight] = change
    if unknown:
        raise ModelError(f"{path}: does not add up to whole adapters: {', '.join(unknown)}; tune or download it again")
    return Adapter(path, changes)


def read_settings(folder: Path) -> dict[str, Any]:
    """PEFT's settings of the adapter in `folder`.

    Raises:
        ModelError: they cannot be read, or are of a kind that cannot be merged.
    """
    path = folder / ADAPTER_CONFIG_FILE
    try:
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({error}); tune or download it again") from None
    if settings.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type {settings.get('peft_type')}: only LoRA and its kin can be merged")
    if kinds := [key for key in NOT_MERGED if settings.get(key)]:
        raise ModelError(
            f"{path}: {', '.join(kinds)}: such an adapter has no weights of its own to merge into the base"
        )
    if (start := settings.get("init_lora_weights", True)) not in PLAIN_STARTS:
        raise ModelError(f"{path}: init_lora_weights {start}: changed the base too; convert it to plain LoRA with PEFT")
    return settings


def _low_rank(
    module: str, parts: Mapping[str, StoredTensor], settings: Mapping[str, Any], transposed: bool
) -> LowRank | None:
    """The update of one module, or None where its parts do not fit together."""
    embedding = "lora_embedding_A" in parts
    a, b = (parts.get(f"lora_{'embedding_' if embedding else ''}{part}") for part in "AB")
    magnitude = parts.get("lora_magnitude_vector")
    if a is None or b is None or len(parts) != 2 + (magnitude is not None) or len(a.shape) != 2 or len(b.shape) != 2:
        return None
    if a.shape[0] != b.shape[1] or bool(settings.get("use_dora")) != (magnitude is not None):
        return None
    if magnitude is not None and magnitude.shape != b.shape[:1]:
        return None
    return LowRank(a, b, scaling_of(module, a.shape[0], settings), embedding or transposed, magnitude)


def scaling_of(module: str, rank: int, settings: Mapping[str, Any]) -> float:
    """What `B A` is multiplied by: alpha / rank, or alpha / sqrt(rank) (rank-stabilized, Kalajdzievski 2023).

    >>> scaling_of("model.layers.0.mlp.up_proj", 4, {"lora_alpha": 8, "alpha_pattern": {"mlp.up_proj": 2}})
    0.5
    """
    alpha = settings["lora_alpha"]
    for pattern, own in (settings.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = own
            break
    return float(alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank))
