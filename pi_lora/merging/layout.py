"""Which tensors a merge writes, and from what: the base's files matched with the adapter."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from pi_lora.errors import ModelError
from pi_lora.merging.deltas import Change, LowRank, Rows, after_nf4, read_adapter
from pi_lora.merging.tensors import StoredTensor, spans
from pi_lora.models.finite import finite
from pi_lora.models.stored import ADAPTER_WEIGHTS_FILE


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to be written in `dtype`: `source`, of the base or trained in full, with `delta` added; `quantized` if
    it goes through NF4 before.
    """

    name: str
    dtype: torch.dtype
    source: StoredTensor
    delta: LowRank | None = None
    quantized: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, which is that of the source."""
        return self.source.shape

    @property
    def size(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def source_rows(self) -> Rows:
        """Return what reads rows of the tensor that the delta is added to."""
        if not self.quantized:
            return self.source.rows
        values = after_nf4(self.source)
        return lambda start, stop: values[start:stop]

    def blocks(self) -> Iterator[torch.Tensor]:
        """Yield the merged tensor, a few rows at a time: added in float32, cast once."""
        rows = self.source_rows()
        for block in self.delta.blocks(rows) if self.delta else (rows(*span) for span in spans(self.shape)):
            cast = block.to(self.dtype)
            # Only float16 has a smaller range than float32; of the others, float32 is faster to sum.
            if cast.is_floating_point() and not finite(cast if self.dtype == torch.float16 else block):
                reason = f"base or adapter is damaged, or its values do not fit {self.dtype}"
                raise ModelError(f"{self.source.path}: {self.name}: has infinite or NaN values once merged; {reason}")
            yield cast


def plan_merge(
    model: PreTrainedModel,
    shards: list[list[StoredTensor]],
    run: Path,
    dtype: torch.dtype | None = None,
    quantized: bool = False,
) -> list[list[OutputTensor]]:
    """Match the changes of the adapter in the folder `run` with the base's tensors, by name, and return the tensors to
    write, grouped as in the base's files; `model` is on the meta device. `dtype` is what floating tensors are cast to,
    by default their own; `quantized` adds the adapter to the base's weights after NF4. Raise ModelError with all
    changes that do not fit the base.
    """
    changes, adapter, tied = read_adapter(run), run / ADAPTER_WEIGHTS_FILE, dict(model.all_tied_weights_keys)
    stored = {tensor.name: tensor for shard in shards for tensor in shard}
    sources = stored | {name: stored[twin] for name, twin in tied.items() if twin in stored}
    untied = [name for name, twin in tied.items() if _diverged(changes, name, twin)]
    if problems := [problem for name, change in changes.items() if (problem := _misfit(name, change, sources))]:
        raise ModelError(f"{adapter}: does not fit its base: {'; '.join(problems)}")
    # What bitsandbytes quantizes of a language model: every linear layer but the head.
    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    rounded = {f"{name}.weight" for name in linear if model.get_submodule(name) is not model.get_output_embeddings()}
    if quantized and (renamed := sorted(rounded - sources.keys())):
        raise ModelError(f"--onto quantized: {renamed[0]} has another name in the base's files; use --onto base")

    def output(name: str) -> OutputTensor:
        change, base = changes.get(name), sources[name]
        cast = dtype if dtype and base.dtype.is_floating_point else base.dtype
        if isinstance(change, StoredTensor):
            return OutputTensor(name, cast, change)
        return OutputTensor(name, cast, base, change, quantized and name in rounded)

    def kept(name: str) -> bool:
        # Old checkpoints store the unscaled frequencies of their rope; every reader computes them from the config.
        return name not in tied and not name.endswith("rotary_emb.inv_freq")

    outputs = [[output(tensor.name) for tensor in shard if kept(tensor.name)] for shard in shards]
    outputs[-1] += map(output, untied)
    return [shard for shard in outputs if shard]


def _diverged(changes: dict[str, Change], name: str, twin: str) -> bool:
    """Whether two tied weights differ after tuning: PEFT trains a copy of embeddings in `modules_to_save`, from which a
    tied head diverges unless `ensure_weight_tying` was set; then it saves the one tensor under both names.
    """
    own, other = changes.get(name), changes.get(twin)
    if isinstance(own, StoredTensor) and isinstance(other, StoredTensor):
        return not torch.equal(own.whole(), other.whole())
    return own is not None or other is not None


def _misfit(name: str, change: Change, sources: dict[str, StoredTensor]) -> str | None:
    """Return why a change cannot be made to the base, or None."""
    if (source := sources.get(name)) is None:
        return f"{name} is not in the base's files"
    if source.shape != change.shape:
        return f"{name} is {list(change.shape)} here and {list(source.shape)} in the base"
    return None if source.dtype.is_floating_point else f"{name} is stored as {source.dtype}"
