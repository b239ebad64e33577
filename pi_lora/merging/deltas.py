"""What an adapter changes in its base: LoRA, rank-stabilized LoRA or DoRA of a weight, or a tensor trained in full."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from pi_lora.errors import ModelError
from pi_lora.merging.tensors import StoredTensor, read_header, spans
from pi_lora.models.device import device
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
        """Return `left` (rows x rank) and `right` (rank x columns) in float32; `scaling left right` is added."""
        a, b = self.a.whole().float(), self.b.whole().float()
        return (a.T, b.T) if self.transposed else (b, a)

    def blocks(self, rows: Rows) -> Iterator[torch.Tensor]:
        """Yield the merged tensor in float32 and the base's orientation, a few rows at a time."""
        factors = self.dora_factors(rows)
        for (start, stop), block in zip(spans(self.shape), self._sums(rows), strict=True):
            if factors is not None:
                block *= factors if self.transposed else factors[start:stop, None]
            yield block

    def dora_factors(self, rows: Rows) -> torch.Tensor | None:
        """Return the magnitude of each output over the norm of its weights; None without DoRA."""
        if self.magnitude is None:
            return None
        axis = 0 if self.transposed else 1
        squares = [block.square().sum(axis, dtype=torch.float64) for block in self._sums(rows)]
        norms = (torch.stack(squares).sum(0) if self.transposed else torch.cat(squares)).sqrt()
        return self.magnitude.whole().float() / norms.float()

    def _sums(self, rows: Rows) -> Iterator[torch.Tensor]:
        left, right = self.matrices()
        for start, stop in spans(self.shape):
            yield rows(start, stop).float().addmm_(left[start:stop], right, alpha=self.scaling)


# A tensor that was trained in full replaces the base's.
Change = StoredTensor | LowRank


def after_nf4(tensor: StoredTensor) -> torch.Tensor:
    """Return a tensor in bfloat16 after NF4 (Dettmers et al. 2023), whose scales are quantized over all of it."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = tensor.whole().to(device(), QUANTIZED_FROM)
    values: torch.Tensor = dequantize_4bit(*quantize_4bit(weight, compress_statistics=True, quant_type="nf4"))
    return values.cpu()


def read_adapter(folder: Path) -> dict[str, Change]:
    """Return the changes of the adapter in `folder` by the name of the weight in the base; only headers are read. Raise
    ModelError if the adapter is missing, damaged, incomplete, or of a kind that cannot be merged.
    """
    config, path, settings = folder / ADAPTER_CONFIG_FILE, folder / ADAPTER_WEIGHTS_FILE, read_adapter_settings(folder)
    if kinds := [key for key in NOT_MERGED if getattr(settings, key, None)]:
        raise ModelError(f"{config}: {', '.join(kinds)}: such an adapter cannot be added to the base's weights")
    if (start := settings.init_lora_weights) not in PLAIN_STARTS:
        raise ModelError(
            f"{config}: init_lora_weights {start}: changed the base too; convert it to plain LoRA with PEFT"
        )
    if not path.is_file():
        raise ModelError(f"{path}: is missing (pickle can run code and is not read); tune or download it again")
    modules: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    changes: dict[str, Change] = {}
    for key, tensor in read_header(path).items():
        name = key.removeprefix(PREFIX)
        if part := PARTS.search(name):
            modules[name[: part.start()]][part.group(1)] = tensor
        else:
            # A trained bias is saved under the layer that PEFT has wrapped.
            changes[name.replace(".base_layer.", ".")] = tensor
    for module, parts in modules.items():
        if (update := _low_rank(module, parts, settings)) is None or f"{module}.weight" in changes:
            unknown = ", ".join(tensor.name for tensor in parts.values())
            raise ModelError(f"{path}: incomplete or unknown parts: {unknown}; tune or download it again")
        changes[f"{module}.weight"] = update
    return changes


def _low_rank(module: str, parts: dict[str, StoredTensor], settings: AdapterSettings) -> LowRank | None:
    """Return the update of one module, or None if its parts do not fit together."""
    embedding = "lora_embedding_A" in parts
    names = ["lora_embedding_A", "lora_embedding_B"] if embedding else ["lora_A", "lora_B"]
    names += ["lora_magnitude_vector"] if settings.use_dora else []
    if parts.keys() != set(names):
        return None
    a, b, *magnitude = (parts[name] for name in names)
    shapes = [tensor.shape for tensor in (a, b, *magnitude)]
    fitting = [(rank := a.shape[0], *a.shape[1:2]), (*b.shape[:1], rank), *[b.shape[:1] for _ in magnitude]]
    return LowRank(a, b, settings.scaling(module, rank), embedding, *magnitude) if shapes == fitting else None
