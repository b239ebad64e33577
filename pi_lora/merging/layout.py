"""Which tensors a merge writes, and from what: the base's files matched with the adapter."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from pi_lora.errors import ModelError
from pi_lora.merging.deltas import Change, LowRank, Rows, after_nf4, check_finite, read_adapter
from pi_lora.merging.tensors import StoredTensor, spans
from pi_lora.models.finite import finite
from pi_lora.models.stored import ADAPTER_WEIGHTS_FILE, AdapterSettings

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to be written in `dtype`: `source` of the base or trained in full, through NF4 if `quantized`, with
    `delta` added.
    """

    name: str
    dtype: torch.dtype
    source: StoredTensor
    delta: LowRank | None = None
    quantized: bool = False

    @property
    def size(self) -> int:
        """The size in bytes."""
        return math.prod(self.source.shape) * self.dtype.itemsize

    def source_rows(self) -> Rows:
        """Return what reads rows of the tensor that the delta is added to."""
        if not self.quantized:
            return self.source.rows
        values = after_nf4(self.source)
        return lambda start, stop: values[start:stop]

    def blocks(self) -> Iterator[torch.Tensor]:
        """Yield the merged tensor, a few rows at a time: added in float32, cast once."""
        rows = self.source_rows()
        for block in self.delta.blocks(rows) if self.delta else (rows(*span) for span in spans(self.source.shape)):
            cast = block.to(self.dtype)
            # Only float16 has a smaller range than float32; of the others, float32 is faster to sum.
            if cast.is_floating_point() and not finite(cast if self.dtype == torch.float16 else block):
                check_finite(self.source)
                raise ModelError(f"{self.name}: its merged values do not fit {self.dtype}; choose another --dtype")
            yield cast


@dataclass(frozen=True)
class MergePlan:
    """The tensors to write, grouped as in the base's files; `untied`: a tied head has become a tensor of its own."""

    shards: list[list[OutputTensor]]
    untied: bool

    @property
    def tensors(self) -> list[OutputTensor]:
        """All tensors to write."""
        return [tensor for shard in self.shards for tensor in shard]

    @property
    def dtype(self) -> str:
        """The dtype of most numbers."""
        numbers = Counter[torch.dtype]()
        for tensor in self.tensors:
            numbers[tensor.dtype] += math.prod(tensor.source.shape)
        return str(numbers.most_common(1)[0][0]).removeprefix("torch.")


def plan_merge(
    model: PreTrainedModel,
    shards: list[list[StoredTensor]],
    run: Path,
    settings: AdapterSettings,
    dtype: torch.dtype | None = None,
    quantized: bool = False,
) -> MergePlan:
    """Match the changes of the adapter in the folder `run` with the base's tensors, by name; `model` is on the meta
    device. `dtype` is what floating tensors are cast to, by default their own; `quantized` adds the adapter to the
    base's weights after NF4. Raise ModelError with all changes that do not fit the base.
    """
    adapter, tied = run / ADAPTER_WEIGHTS_FILE, dict(model.all_tied_weights_keys)
    stored = {tensor.name: tensor for shard in shards for tensor in shard}
    sources = stored | {name: stored[twin] for name, twin in tied.items() if twin in stored}
    changes, untied = _settle_ties(adapter, read_adapter(run, settings), tied, model)
    _check_matches(adapter, changes, sources)
    # What bitsandbytes quantizes of a language model: every linear layer but the head.
    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    rounded = {f"{name}.weight" for name in linear if model.get_submodule(name) is not model.get_output_embeddings()}
    if quantized and (renamed := sorted(rounded - sources.keys())):
        raise ModelError(f"--onto quantized: {renamed[0]} has another name in the base's files; use --onto base")

    def output(name: str) -> OutputTensor:
        change, base = changes.get(name), sources[name]
        cast = dtype if dtype and base.dtype in FLOATS else base.dtype
        if isinstance(change, StoredTensor):
            return OutputTensor(name, cast, change)
        return OutputTensor(name, cast, base, change, quantized and name in rounded)

    def kept(name: str) -> bool:
        # Old checkpoints store the unscaled frequencies of their rope; every reader computes them from the config.
        return name not in tied and not name.endswith("rotary_emb.inv_freq")

    outputs = [[output(tensor.name) for tensor in shard if kept(tensor.name)] for shard in shards]
    outputs[-1] += map(output, untied)
    return MergePlan([shard for shard in outputs if shard], bool(untied))


def _settle_ties(
    adapter: Path, changes: Mapping[str, Change], tied: Mapping[str, str], model: PreTrainedModel
) -> tuple[dict[str, Change], list[str]]:
    """Return the changes without those that tying makes redundant, and the tied weights that differ after tuning: PEFT
    trains a copy of embeddings in `modules_to_save`, from which a tied head diverges unless `ensure_weight_tying` was
    set; then it saves the one tensor under both names.
    """
    settled, untied = dict(changes), []
    for name, twin in tied.items():
        change, other = changes.get(name), changes.get(twin)
        if (
            isinstance(change, StoredTensor)
            and isinstance(other, StoredTensor)
            and torch.equal(change.whole(), other.whole())
        ):
            del settled[name]
        elif (change or other) and model.get_submodule(name.rpartition(".")[0]) is model.get_output_embeddings():
            untied.append(name)
        elif change or other:
            raise ModelError(f"{adapter}: {name} and {twin} are tied in this architecture but were tuned apart")
    return settled, untied


def _check_matches(adapter: Path, changes: Mapping[str, Change], sources: Mapping[str, StoredTensor]) -> None:
    problems = []
    for name, change in changes.items():
        if (source := sources.get(name)) is None:
            problems.append(f"{name} is not in the base's files")
        elif source.shape != change.shape:
            problems.append(f"{name} is {_by(change.shape)} here and {_by(source.shape)} in the base")
        elif source.dtype not in FLOATS:
            problems.append(f"{name} is stored as {source.dtype}, to which nothing can be added")
    if problems:
        raise ModelError(f"{adapter}: does not fit its base: {'; '.join(problems)}")


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a number"
