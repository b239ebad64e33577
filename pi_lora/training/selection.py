"""The gain of documents from distant context, by which a recipe chooses them: LongFilter (Deng et al. 2025, arXiv
2510.25804), with differences of losses in place of divergences.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

from pi_lora.data.documents import Document
from pi_lora.data.tokens import tokenized, tokenizer_identity
from pi_lora.evaluation.context import context_losses
from pi_lora.evaluation.forward import check_numbers
from pi_lora.evaluation.measurement import append_journal, read_journal
from pi_lora.models import device as devices
from pi_lora.models.loaded import LoadedModel, load_base
from pi_lora.models.source import ModelSource
from pi_lora.recipe.data import Selection
from pi_lora.recipe.evaluation import ContextOptions
from pi_lora.recipe.schema import Recipe
from pi_lora.storage import cache_folder, digest_of
from pi_lora.types import Json


@dataclass(frozen=True)
class Gains:
    """Scores documents by the base of a recipe under its untuned scaling. Gains are kept in the cache, a line for each
    text, so that an interrupted scoring continues.
    """

    recipe: Recipe
    source: ModelSource
    select: Selection

    @cached_property
    def decided_by(self) -> Json:
        """JSON that decides the gain of a text. The device does not: one machine reads what another one scored."""
        return {
            "weights": self.source.base.weights_digest,
            "config": dict(self.source.config),
            "method": self.recipe.tuning.method,
            "tokenizer": tokenizer_identity(self.source.tokenizer),
            "context": [self.recipe.context.target, self.select.windows],
        }

    @cached_property
    def _folder(self) -> Path:
        return cache_folder() / "gains" / digest_of(self.decided_by)

    @cached_property
    def _gains(self) -> dict[str | int, float | None]:
        return dict(read_journal(self._folder))

    @cached_property
    def _model(self) -> LoadedModel:
        """The base, without an adapter, in the dtype in which a training step computes."""
        module = load_base(
            self.source,
            devices.dtype_named(devices.computes_in(self.recipe)),
            attention=self.recipe.model.attention,
            placement="quantized" if self.recipe.tuning.method == "qlora" else "device",
        )
        return LoadedModel(self.source, module.eval())

    def score(self, document: Document) -> float | None:
        """Return the gain of a document, from the cache if it is there. Without it the base is loaded, once."""
        digest = document.digest
        if digest not in self._gains:
            self._gains[digest] = self._gain(document.text)
            append_journal(digest, self._gains[digest], self._folder)
        return self._gains[digest]

    def _gain(self, text: str) -> float | None:
        """Return the mean gain in nats of the tokens beyond the near context, in the first whole windows of a text or
        in all of a shorter text; None for a text that is no longer than the near context.
        """
        target, short_window, stride = ContextOptions().sizes(self.recipe.context.target)
        [ids] = tokenized(self.source.tokenizer, [text])
        if len(ids) <= short_window:
            return None
        window = min(target, len(ids))
        gains: list[float] = []
        starts = range(0, len(ids) - window + 1, window)
        for start in starts[: self.select.windows]:
            context = ids[start : start + window]
            far, near = context_losses(self._model, context, short_window, stride)
            gains += (near - far).tolist()
        gain = fmean(gains)
        check_numbers(self._model, math.isfinite(gain))
        return gain
