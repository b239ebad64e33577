"""What an adapter changes in its base: LoRA, rank-stabilized LoRA or DoRA of a weight, or a tensor trained in full."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from pi_lora.errors import ModelError
from pi_lora.merging.tensors import StoredTensor, read_header, spans
from pi_lora.models.files import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, read_adapter_settings

PREFIX = "base_model.model."
# Initializations that do not change the base; PiSSA, OLoRA, CorDA and LoftQ subtract theirs from it.
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
# Kinds of LoRA whose update is not a single matrix product, or depends on the input.
NOT_MERGED = ("alora_invocation_tokens", "arrow_config", "layer_replication", "lora_bias", "target_parameters")


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

    def row_factors(self, base: StoredTensor) -> torch.Tensor:
        """Return what DoRA multiplies each row of the sum with: its magnitude over its norm; ones without DoRA."""
        if self.magnitude is None:
            return torch.ones(self.shape[0])
        return self.magnitude.whole().float() / torch.cat([rows.norm(dim=1) for rows in self._sums(base)])

    def blocks(self, base: StoredTensor) -> Iterator[torch.Tensor]:
        """Yield the merged tensor in float32 and the base's orientation, a few rows at a time."""
        factors = self.row_factors(base)
        for (start, stop), rows in zip(spans(self.shape), self._sums(base), strict=True):
            yield rows.mul_(factors[start:stop, None]) if self.magnitude else rows

    def _sums(self, base: StoredTensor) -> Iterator[torch.Tensor]:
        left, right = self.matrices()
        for start, stop in spans(self.shape):
            yield base.rows(start, stop).float().addmm_(left[start:stop], right, alpha=self.scaling)


@dataclass(frozen=True)
class Difference:
    """What a tensor trained in full has more than that of the base `before`, added to that of a sibling."""

    trained: StoredTensor
    before: StoredTensor

    def blocks(self, base: StoredTensor) -> Iterator[torch.Tensor]:
        """Yield the sum in float32, a few rows at a time."""
        blocks = zip(base.blocks(), self.trained.blocks(), self.before.blocks(), strict=True)
        return (own.float() + (trained.float() - before.float()) for own, trained, before in blocks)


# A tensor that was trained in full replaces the base's.
Change = StoredTensor | LowRank


def read_adapter(folder: Path) -> dict[str, Change]:
    """Return the changes of the adapter in `folder` by the name of the weight in the base; only headers are read. Raise
    ModelError if the adapter is missing, damaged, incomplete, or of a kind that cannot be merged.
    """
    config, path, settings = folder / ADAPTER_CONFIG_FILE, folder / ADAPTER_WEIGHTS_FILE, read_adapter_settings(folder)
    kinds = [key for key in NOT_MERGED if getattr(settings, key, None)]
    if settings.init_lora_weights not in PLAIN_STARTS:
        kinds.append(f"init_lora_weights {settings.init_lora_weights}")
    if kinds:
        raise ModelError(f"{config}: {', '.join(kinds)}: cannot be merged; convert it to plain LoRA with PEFT")
    if not path.is_file():
        raise ModelError(f"{path}: is missing (pickle can run code and is not read); tune or download it again")
    changes: dict[str, Change] = {}
    parts = {key.removeprefix(PREFIX).removesuffix(".weight"): tensor for key, tensor in read_header(path).items()}
    for name in [name for name in parts if name.endswith(("lora_A", "lora_embedding_A"))]:
        module, other, magnitude = (
            name.rpartition(".")[0],
            f"{name[:-1]}B",
            f"{name.rpartition('.')[0]}.lora_magnitude_vector",
        )
        embedding = "embedding" in other
        # Parts that are left out here are refused: the base has no such tensors.
        if other in parts and (magnitude in parts) == bool(settings.use_dora) and not (embedding and settings.use_dora):
            a, b, m = parts.pop(name), parts.pop(other), parts.pop(magnitude, None)
            changes[f"{module}.weight"] = LowRank(a, b, settings.scaling(module, a.shape[0]), embedding, m)
    # A trained bias is saved under the layer that PEFT has wrapped.
    full = {tensor.name.removeprefix(PREFIX).replace(".base_layer.", "."): tensor for tensor in parts.values()}
    return changes | full
