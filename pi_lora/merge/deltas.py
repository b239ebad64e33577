"""What an adapter does to one tensor of its base: LoRA, rank-stabilized LoRA, DoRA, or a tensor trained in full."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from pi_lora.errors import ModelError
from pi_lora.merge.shards import Rows, StoredTensor, read_header, spans
from pi_lora.models.base import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, device


@dataclass(frozen=True)
class Replacement:
    """The tensor itself was trained, and takes the base's place."""

    source: StoredTensor

    def blocks(self, _base: Rows) -> Iterator[torch.Tensor]:
        """The trained tensor, a few rows at a time."""
        return (self.source.rows(*span) for span in spans(self.source.shape))


@dataclass(frozen=True)
class LowRank:
    """`W + scaling B A` (Hu et al. 2021), with `a` of rank x inputs and `b` of outputs x rank.

    `transposed`: the base stores inputs x outputs, as embeddings (tokens x hidden) and transformers' Conv1D do. With a
    `magnitude` m for each output it is DoRA (Liu et al. 2024, Eqn. 5): each output's weights are scaled to the norm m.
    """

    a: StoredTensor
    b: StoredTensor
    scaling: float
    transposed: bool
    magnitude: StoredTensor | None = None

    def blocks(self, base: Rows) -> Iterator[torch.Tensor]:
        """The merged tensor in float32 and the base's orientation, a few rows at a time."""
        factors = self._factors(base)
        for span in spans(base.shape):
            merged = self._sum(base, span, factors[0], factors[1])
            if self.magnitude:
                merged *= self._row_scales(merged, span) if factors[2] is None else factors[2]
            yield merged

    def shape(self) -> tuple[int, int]:
        """Of the tensor that this is added to."""
        outputs, inputs = self.b.shape[0], self.a.shape[-1]
        return (inputs, outputs) if self.transposed else (outputs, inputs)

    def _factors(self, base: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """`left @ right` is the update as stored; and what DoRA scales columns by, which takes a pass of its own."""
        a, b = whole_in_float32(self.a), whole_in_float32(self.b)
        left, right = (a.T, b.T) if self.transposed else (b, a)
        if not (self.magnitude and self.transposed):
            return left, right, None
        squares = torch.zeros(base.shape[1], dtype=torch.float64)
        for span in spans(base.shape):
            squares += self._sum(base, span, left, right).square().sum(0, dtype=torch.float64)
        return left, right, whole_in_float32(self.magnitude) / squares.sqrt().float()

    def _sum(self, base: Rows, span: tuple[int, int], left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return base.rows(*span).float().addmm_(left[slice(*span)], right, alpha=self.scaling)

    def _row_scales(self, merged: torch.Tensor, span: tuple[int, int]) -> torch.Tensor:
        assert self.magnitude
        norms: torch.Tensor = torch.linalg.vector_norm(merged, dim=1)
        return (self.magnitude.rows(*span).float() / norms)[:, None]


Change = Replacement | LowRank


def finite(block: torch.Tensor) -> bool:
    """Whether all numbers are finite: a sum tells it in one pass, unless the sum itself is too large."""
    return bool(block.float().sum().isfinite() or block.float().isfinite().all())


def whole_in_float32(tensor: StoredTensor) -> torch.Tensor:
    """A small tensor of the adapter.

    Raises:
        ModelError: it holds infinities or what is no number.
    """
    values = tensor.whole()
    if not finite(values):
        raise not_finite(tensor)
    return values.float()


def not_finite(tensor: Rows) -> ModelError:
    """What to say of a tensor that holds infinities or what is no number, as a damaged file does."""
    return ModelError(f"{tensor.where}: holds values that are no finite numbers; the file is damaged, get it again")


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


@dataclass(frozen=True)
class Dequantized:
    """A stored tensor after NF4 (Dettmers et al. 2023); held whole, since the second quantization is over all of it."""

    stored: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the stored tensor."""
        return self.stored.shape

    @property
    def where(self) -> str:
        """How an error names the stored tensor."""
        return self.stored.where

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` in bfloat16, the type that a quantized base computes in."""
        return self._values[start:stop].clone()

    @cached_property
    def _values(self) -> torch.Tensor:
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        weight = self.stored.whole().to(device(), torch.bfloat16)
        values: torch.Tensor = dequantize_4bit(*quantize_4bit(weight, compress_statistics=True, quant_type="nf4"))
        return values.cpu()


def check_bitsandbytes() -> None:
    """Nothing, where bitsandbytes is installed.

    Raises:
        ModelError: it is not.
    """
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise ModelError("--onto quantized: needs bitsandbytes; pip install pi-lora[qlora]") from None
