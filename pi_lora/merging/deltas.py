"""What an adapter changes in its base: LoRA, rank-stabilized LoRA or DoRA of a weight, or a tensor trained in full."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from pi_lora.errors import ModelError
from pi_lora.merging.tensors import PICKLED, StoredTensor, read_header, spans
from pi_lora.models.device import device
from pi_lora.models.finite import finite
from pi_lora.models.stored import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, AdapterSettings, read_adapter_settings
from pi_lora.models.weights import QUANTIZED_FROM

PREFIX = "base_model.model."
PARTS = re.compile(r"\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(\.weight)?$")
# Initializations that do not change the base; PiSSA, OLoRA, CorDA and LoftQ subtract theirs from it.
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
# Kinds of LoRA whose update is not a single matrix product, or depends on the input.
NOT_MERGED = ("alora_invocation_tokens", "arrow_config", "layer_replication", "lora_bias", "target_parameters")

# Reads a tensor from a first to a last row (exclusive).
Rows = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True)
class LowRank:
    """`W + scaling B A` (Hu et al. 2021), with `a` of rank x inputs and `b` of outputs x rank.

    `transposed`: the base stores inputs x outputs, as embeddings (tokens x hidden) do. With a `magnitude` m for each
    output it is DoRA (Liu et al. 2024, Eqn. 5): each output's weights are scaled to the norm m.
    """

    a: StoredTensor
    b: StoredTensor
    scaling: float
    transposed: bool
    magnitude: StoredTensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the base's tensor."""
        outputs, inputs = self.b.shape[0], self.a.shape[1]
        return (inputs, outputs) if self.transposed else (outputs, inputs)

    def matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `left` (rows x rank) and `right` (rank x columns) in float32; scaling left @ right is added to W."""
        a, b = _in_float32(self.a), _in_float32(self.b)
        return (a.T, b.T) if self.transposed else (b, a)

    def blocks(self, rows: Rows) -> Iterator[torch.Tensor]:
        """Yield the merged tensor in float32 and the base's orientation, a few rows at a time."""
        magnified = self.magnification(rows)
        for (start, stop), block in zip(spans(self.shape), self._sums(rows), strict=True):
            if magnified is not None:
                block *= magnified if self.transposed else magnified[start:stop, None]
            yield block

    def magnification(self, rows: Rows) -> torch.Tensor | None:
        """Return the factor of each output that DoRA scales its weights by, magnitude over norm; None for LoRA."""
        if self.magnitude is None:
            return None
        axis = 0 if self.transposed else 1
        squares = [block.square().sum(axis, dtype=torch.float64) for block in self._sums(rows)]
        norms = (torch.stack(squares).sum(0) if self.transposed else torch.cat(squares)).sqrt()
        return _in_float32(self.magnitude) / norms.float()

    def _sums(self, rows: Rows) -> Iterator[torch.Tensor]:
        left, right = self.matrices()
        for start, stop in spans(self.shape):
            yield rows(start, stop).float().addmm_(left[start:stop], right, alpha=self.scaling)


# A tensor that was trained in full replaces the base's.
Change = StoredTensor | LowRank


def check_finite(tensor: StoredTensor) -> None:
    """Raise ModelError if a tensor has infinite or NaN values."""
    if not all(map(finite, tensor.blocks())):
        raise ModelError(f"{tensor}: has infinite or NaN values; the file is damaged, download it again")


def after_nf4(tensor: StoredTensor) -> torch.Tensor:
    """Return a tensor in bfloat16 after NF4 (Dettmers et al. 2023), whose scales are quantized over all of it."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = tensor.whole().to(device(), QUANTIZED_FROM)
    values: torch.Tensor = dequantize_4bit(*quantize_4bit(weight, compress_statistics=True, quant_type="nf4"))
    return values.cpu()


def read_settings(folder: Path) -> AdapterSettings:
    """Read the settings of the adapter in `folder`; raise ModelError if its kind cannot be merged."""
    path, settings = folder / ADAPTER_CONFIG_FILE, read_adapter_settings(folder)
    if kinds := [key for key in NOT_MERGED if getattr(settings, key, None)]:
        raise ModelError(f"{path}: {', '.join(kinds)}: such an adapter cannot be added to the base's weights")
    if (start := settings.init_lora_weights) not in PLAIN_STARTS:
        raise ModelError(f"{path}: init_lora_weights {start}: changed the base too; convert it to plain LoRA with PEFT")
    return settings


def read_adapter(folder: Path, settings: AdapterSettings) -> dict[str, Change]:
    """Return the changes of the adapter in `folder` by the name that transformers computes a weight under; raise
    ModelError if the adapter is missing, damaged, pickled or incomplete.
    """
    path = folder / ADAPTER_WEIGHTS_FILE
    if not path.is_file():
        if (pickled := path.with_suffix(".bin")).is_file():
            raise ModelError(f"{pickled}: {PICKLED}")
        raise ModelError(f"{path}: is missing; tune or download it again")
    modules: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    changes: dict[str, Change] = {}
    for key, tensor in read_header(path).items():
        name = key.removeprefix(PREFIX)
        if part := PARTS.search(name):
            modules[name[: part.start()]][part.group(1)] = tensor
        else:
            # A trained bias is saved under the layer that PEFT has wrapped.
            changes[name.replace(".base_layer.", ".")] = tensor
    updates = {f"{module}.weight": _low_rank(module, parts, settings) for module, parts in modules.items()}
    unfit = [module for module in modules if f"{module}.weight" in changes or updates[f"{module}.weight"] is None]
    if unknown := [tensor.name for module in unfit for tensor in modules[module].values()]:
        raise ModelError(f"{path}: incomplete or unknown parts: {', '.join(unknown)}; tune or download it again")
    return changes | {weight: update for weight, update in updates.items() if update}


def _low_rank(module: str, parts: Mapping[str, StoredTensor], settings: AdapterSettings) -> LowRank | None:
    """Return the update of one module, or None if its parts do not fit together."""
    embedding = "lora_embedding_A" in parts
    names = ["lora_embedding_A", "lora_embedding_B"] if embedding else ["lora_A", "lora_B"]
    names += ["lora_magnitude_vector"] if settings.use_dora else []
    if parts.keys() != set(names):
        return None
    a, b, *magnitude = (parts[name] for name in names)
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        return None
    if any(each.shape != b.shape[:1] for each in magnitude):
        return None
    return LowRank(a, b, settings.scaling(module, a.shape[0]), embedding, *magnitude)


def _in_float32(tensor: StoredTensor) -> torch.Tensor:
    check_finite(tensor)
    return tensor.whole().float()
