"""What an adapter does to one tensor of its base: LoRA, rank-stabilized LoRA, DoRA, or a tensor trained in full."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pi_lora.errors import ModelError
from pi_lora.merge.shards import Rows, StoredTensor, spans


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
