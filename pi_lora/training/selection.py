"""The gain of documents from distant context, by which a recipe may choose them: LongFilter (Deng et al. 2025, arXiv
2510.25804), with the losses of the tokens in place of its divergences.
"""

import gc
import math
from dataclasses import dataclass
from statistics import fmean

import torch

from pi_lora.data.documents import Document
from pi_lora.data.selection import Scored
from pi_lora.data.sources import Table
from pi_lora.data.tokens import added_bos, strip_eos, tokenized, tokenizer_identity
from pi_lora.errors import DataError
from pi_lora.evaluation.context import context_losses, near_context
from pi_lora.evaluation.forward import check_numbers, pass_tokens
from pi_lora.evaluation.measurement import append_journal, read_journal
from pi_lora.models import device as devices
from pi_lora.models.loaded import LoadedModel, load_base
from pi_lora.models.source import ModelSource
from pi_lora.recipe.schema import Recipe, Selection
from pi_lora.scaling.config import depends_on_length
from pi_lora.storage import cache_folder, digest_of
from pi_lora.types import Json, Progress


@dataclass(frozen=True)
class Gains:
    """Scores documents by the base of a recipe under its untuned scaling. Scores are kept in the cache, one file per
    process with a line per text, so that an interrupted scoring continues.
    """

    recipe: Recipe
    source: ModelSource

    @property
    def short_window(self) -> int:
        """The near context in tokens."""
        return near_context(self.recipe.context.target)

    @property
    def fewest_tokens(self) -> int:
        """The tokens of the shortest document that has a score and trains."""
        return max(self.short_window + 1, self.recipe.data.min_document_tokens)

    def identity(self, select: Selection) -> Json:
        """Return as JSON all that decides the gain of a text, without the device and its rounding: what one machine
        scores, others read.
        """
        return {
            "weights": self.source.base.weights_digest,
            "config": dict(self.source.config),
            "quantized": self.recipe.tuning.method == "qlora",
            "tokenizer": tokenizer_identity(self.source.tokenizer),
            "special_tokens": self.recipe.data.special_tokens,
            "context": [self.recipe.context.target, select.windows, self.short_window, self.fewest_tokens],
        }

    def scores(self, table: Table, select: Selection, progress: Progress) -> list[Scored]:
        """Return the documents of a table with their gains in nats, each text once. The base is loaded if there is one
        without a score. Raise DataError if all documents are too short.
        """
        folder = cache_folder() / "gains" / digest_of(self.identity(select))
        gains = dict(read_journal(folder))
        names = {document.digest: document.name for document in table.documents()}
        missing = names.keys() - gains.keys()
        if missing:
            model = self._load()
            for document in table.documents():
                if document.digest not in gains:
                    gain = self._gain(model, document, select.windows)
                    gains[document.digest] = gain
                    append_journal(document.digest, gain, folder)
                    progress(len(missing & gains.keys()), len(missing), "documents scored")
            # The model has references to itself; its memory is needed for the training.
            del model
            gc.collect()
            torch.cuda.empty_cache()
        scored = [Scored(gains[digest], digest, name) for digest, name in names.items() if gains[digest] is not None]
        if not scored:
            raise DataError(
                f"data.source: {table.source.name}: no document has {self.fewest_tokens:,} tokens, so that none has "
                "distant context; name longer ones, or leave select out"
            )
        return scored

    def _load(self) -> LoadedModel:
        """Load the base as a training step computes it, without an adapter."""
        recipe = self.recipe
        dtype = devices.dtype_named(devices.computes_in(recipe))
        base = load_base(
            self.source,
            dtype,
            attention=recipe.model.attention,
            placement="quantized" if recipe.tuning.method == "qlora" else "device",
        )
        return LoadedModel(self.source, base.eval())

    def _gain(self, model: LoadedModel, document: Document, windows: int) -> float | None:
        """Return the mean gain over the tokens beyond the near context in the first whole windows of a document, or in
        all of a shorter one; None for a document that is too short.
        """
        [ids] = tokenized(model.tokenizer, [document.text], self.recipe.data.special_tokens)
        ids = strip_eos(ids, model.tokenizer.eos_token_id)
        if len(ids) < self.fewest_tokens:
            return None
        window = min(self.recipe.context.target, len(ids))
        gains: list[float] = []
        for start in range(0, len(ids) - window + 1, window)[:windows]:
            far, near = context_losses(
                model.module,
                ids[start : start + window],
                short_window=self.short_window,
                stride=max(1, self.short_window // 4),
                bos=added_bos(model.tokenizer),
                tokens_at_once=1 if depends_on_length(model.source.config) else pass_tokens(model.module),
            )
            gains += (near - far).tolist()
        gain = fmean(gains)
        check_numbers(model, math.isfinite(gain))
        return gain
