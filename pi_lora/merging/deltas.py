"""What an adapter changes in its base, and the merged tensors: planned by name, and written a few rows at a time
(`safetensors` can only write tensors that are all in memory).
"""

import json
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from pi_lora.errors import ModelError
from pi_lora.merging.tensors import DTYPES, StoredTensor, read_header, spans
from pi_lora.models.files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_WEIGHTS_FILE,
    LENGTH_BYTES,
    METADATA,
    read_adapter_settings,
)
from pi_lora.models.weights import finite
from pi_lora.types import Progress
from pi_lora.writing import write_json

PREFIX = "base_model.model."
# Initializations that do not change the base; PiSSA, OLoRA, CorDA and LoftQ subtract theirs from it.
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
# Kinds of LoRA whose update is not a single matrix product, or depends on the input.
NOT_MERGED = ("alora_invocation_tokens", "arrow_config", "layer_replication", "lora_bias", "target_parameters")
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to be written in `dtype`: `source`, of the base or trained in full, with `delta` added."""

    name: str
    dtype: torch.dtype
    source: StoredTensor
    delta: LowRank | Difference | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, which is that of the source."""
        return self.source.shape

    @property
    def size(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def blocks(self) -> Iterator[torch.Tensor]:
        """Yield the merged tensor, a few rows at a time: added in float32, cast once."""
        for block in self.delta.blocks(self.source) if self.delta else self.source.blocks():
            cast = block.to(self.dtype)
            # Only float16 has a smaller range than float32; of the others, float32 is faster to sum.
            if cast.is_floating_point() and not finite(cast if self.dtype == torch.float16 else block):
                problem = "has infinite or NaN values once merged; base or adapter is damaged, or its values do not fit"
                raise ModelError(f"{self.source.path}: {self.name}: {problem} {self.dtype}")
            yield cast


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
    for first in [name for name in parts if name.endswith(("lora_A", "lora_embedding_A"))]:
        module, kind = first.rpartition(".")[::2]
        second, magnitude, embedding = f"{first[:-1]}B", f"{module}.lora_magnitude_vector", "embedding" in kind
        # Parts that are left out here are refused: the base has no such tensors.
        if second in parts and (magnitude in parts) == bool(settings.use_dora and not embedding):
            a, b, m = parts.pop(first), parts.pop(second), parts.pop(magnitude, None)
            changes[f"{module}.weight"] = LowRank(a, b, settings.scaling(module, a.shape[0]), embedding, m)
    # A trained bias is saved under the layer that PEFT has wrapped.
    full = {tensor.name.removeprefix(PREFIX).replace(".base_layer.", "."): tensor for tensor in parts.values()}
    return changes | full


def plan_merge(
    model: PreTrainedModel,
    shards: list[list[StoredTensor]],
    run: Path,
    dtype: torch.dtype | None = None,
    before: list[list[StoredTensor]] | None = None,
) -> list[list[OutputTensor]]:
    """Match the changes of the adapter in the folder `run` with the base's tensors, by name, and return the tensors to
    write, grouped as in the base's files; `model` is on the meta device. `dtype` is what floating tensors are cast to,
    by default their own. `before` are the tensors of the base that the run was tuned on, if `shards` are those of its
    sibling, to which the difference is added of what was trained in full. Raise ModelError with all changes that do not
    fit the base.
    """
    changes, tied = read_adapter(run), model.all_tied_weights_keys
    sources = {tensor.name: tensor for shard in shards for tensor in shard}
    sources |= {name: sources[twin] for name, twin in tied.items() if twin in sources}
    problems = []
    for name, change in changes.items():
        if name not in sources:
            problems.append(f"{name} is not in the base's files")
        elif change.shape != sources[name].shape:
            problems.append(f"{name} is {list(change.shape)} here and {list(sources[name].shape)} in the base")
    if problems:
        raise ModelError(f"{run / ADAPTER_WEIGHTS_FILE}: does not fit its base: {'; '.join(problems)}")
    known = {tensor.name: tensor for shard in before or () for tensor in shard}

    def output(name: str) -> OutputTensor:
        base, change = sources[name], changes.get(name)
        cast = dtype if dtype and base.dtype.is_floating_point else base.dtype
        if not isinstance(change, StoredTensor):
            return OutputTensor(name, cast, base, change)
        return (
            OutputTensor(name, cast, base, Difference(change, known[name]))
            if known
            else OutputTensor(name, cast, change)
        )

    # Old checkpoints store the unscaled frequencies of their rope; every reader computes them from the config.
    dropped = {*tied, *(name for name in sources if name.endswith("rotary_emb.inv_freq"))}
    outputs = [[output(tensor.name) for tensor in shard if tensor.name not in dropped] for shard in shards]
    outputs[-1] += [output(name) for name, twin in tied.items() if _diverged(changes.get(name), changes.get(twin))]
    return [shard for shard in outputs if shard]


def _diverged(own: Change | None, other: Change | None) -> bool:
    """Whether two tied weights differ after tuning: PEFT trains a copy of embeddings in `modules_to_save`, from which a
    tied head diverges unless `ensure_weight_tying` was set; then it saves the one tensor under both names.
    """
    if isinstance(own, StoredTensor) and isinstance(other, StoredTensor):
        return not torch.equal(own.whole(), other.whole())
    return own is not other


def write_shards(shards: Sequence[Sequence[OutputTensor]], folder: Path, progress: Progress) -> None:
    """Write the shards to disk (fsync), and an index if there are several; `progress` is in bytes."""
    total, done, count = sum(tensor.size for shard in shards for tensor in shard), 0, len(shards)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else SAFE_WEIGHTS_NAME
        weight_map |= {tensor.name: file for tensor in shard}
        for size in _write(shard, folder / file):
            progress(done := done + size, total, "writing")
    if count > 1:
        write_json(folder / SAFE_WEIGHTS_INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write(shard: Sequence[OutputTensor], path: Path) -> Iterator[int]:
    """Write one file and yield the bytes of each block."""
    # Wider dtypes first, as the library does, which aligns what is mapped from the file.
    ordered = sorted(shard, key=lambda tensor: -tensor.dtype.itemsize)
    entries: dict[str, object] = {METADATA: {"format": "pt"}}
    end = 0
    for tensor in ordered:
        place = (end, end := end + tensor.size)
        entries[tensor.name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": place}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % LENGTH_BYTES)
    # One block is written while the next is made: torch and the kernel release Python's lock meanwhile.
    with path.open("wb") as file, ThreadPoolExecutor(1) as writer:
        writing = writer.submit(file.write, len(header).to_bytes(LENGTH_BYTES, "little") + header)
        for block in (block for tensor in ordered for block in tensor.blocks()):
            writing.result()
            writing = writer.submit(file.write, block.contiguous().view(-1).view(torch.uint8).numpy().data)
            yield block.nbytes
        writing.result()
        file.flush()
        os.fsync(file.fileno())
