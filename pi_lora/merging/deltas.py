"""What an adapter changes in its base, and the merged tensors: planned by name, and written a few rows at a time
(`safetensors` can only write tensors that are all in memory).
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from pi_lora.errors import ModelError
from pi_lora.merging.tensors import DTYPES, StoredTensor, read_header, spans
from pi_lora.models.files import (
    ADAPTER_WEIGHTS_FILE,
    LENGTH_BYTES,
    METADATA,
    read_adapter_settings,
)
from pi_lora.models.machine import dtype_named
from pi_lora.models.weights import finite
from pi_lora.storage import write_json
from pi_lora.types import Progress

PREFIX = "base_model.model."
# Initializations that do not change the base; PiSSA, OLoRA, CorDA and LoftQ subtract theirs from it.
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
# Kinds of LoRA whose update is not a single matrix product, or depends on the input.
NOT_MERGED = ("use_dora", "alora_invocation_tokens", "arrow_config", "target_parameters")
# Threads that read, compute and write; and bytes, more than those of a block.
THREADS, RETAINED_BYTES = 2, 2**23
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class LowRank:
    """`W + scaling B A` (Hu et al. 2021), with `a` of rank x inputs and `b` of outputs x rank."""

    a: StoredTensor
    b: StoredTensor
    scaling: float

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the base's tensor."""
        return self.b.shape[0], self.a.shape[1]

    def blocks(self, base: StoredTensor) -> Iterator[torch.Tensor]:
        """Yield the merged tensor in float32, a few rows at a time."""
        a, b = self.a.whole().float(), self.b.whole().float()
        for start, stop in spans(self.shape):
            yield base.rows(start, stop).float().addmm_(b[start:stop], a, alpha=self.scaling)


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
    """A tensor to be written in `dtype`: `source`, of the base or trained in full, with `delta` added. The base has it
    in `file`, and the merged files are divided likewise.
    """

    name: str
    dtype: torch.dtype
    file: Path
    source: StoredTensor
    delta: LowRank | Difference | None = None

    @property
    def size(self) -> int:
        """The size in bytes."""
        return math.prod(self.source.shape) * self.dtype.itemsize

    def blocks(self) -> Iterator[torch.Tensor]:
        """Yield the merged tensor, a few rows at a time: added in float32, cast once."""
        for block in self.delta.blocks(self.source) if self.delta else self.source.blocks():
            cast = block.to(self.dtype)
            if cast.is_floating_point() and not finite(cast):
                raise ModelError(
                    f"{self.source.path}: {self.name}: has infinite or NaN values once merged; "
                    f"base or adapter is damaged, or its values do not fit {self.dtype}"
                )
            yield cast


def read_adapter(folder: Path) -> dict[str, Change]:
    """Return the changes of the adapter in `folder` by the name of the weight in the base; only headers are read. Raise
    ModelError if the adapter is missing, damaged, incomplete, or of a kind that cannot be merged.
    """
    path, settings = folder / ADAPTER_WEIGHTS_FILE, read_adapter_settings(folder)
    parts = {key.removeprefix(PREFIX).removesuffix(".weight"): tensor for key, tensor in read_header(path).items()}
    kinds = [key for key in NOT_MERGED if getattr(settings, key, None)]
    if settings.init_lora_weights not in PLAIN_STARTS:
        kinds.append(f"init_lora_weights {settings.init_lora_weights}")
    if any("lora_embedding" in name for name in parts):
        kinds.append("LoRA on embeddings")
    if kinds:
        raise ModelError(
            f"{folder}: {', '.join(kinds)}: cannot be merged; convert it with PEFT to LoRA on linear layers"
        )
    changes: dict[str, Change] = {}
    for first in [name for name in parts if name.endswith(".lora_A")]:
        module = first.removesuffix(".lora_A")
        # A part that is left out here is refused: the base has no such tensor.
        if (second := f"{module}.lora_B") in parts:
            a, b = parts.pop(first), parts.pop(second)
            changes[f"{module}.weight"] = LowRank(a, b, settings.scaling(module, a.shape[0]))
    # A trained bias is saved under the layer that PEFT has wrapped.
    full = {tensor.name.removeprefix(PREFIX).replace(".base_layer.", "."): tensor for tensor in parts.values()}
    return changes | full


def plan_merge(
    model: PreTrainedModel,
    base: Mapping[str, StoredTensor],
    run: Path,
    dtype: str | None = None,
    before: Mapping[str, StoredTensor] | None = None,
) -> list[OutputTensor]:
    """Match the changes of the adapter in the folder `run` with the tensors of the `base`, by name, and return the
    tensors to write; `model` is on the meta device. `dtype` is what floating tensors are cast to, by default their own.
    `before` are the tensors of the base that the run was tuned on, if `base` is a sibling, to which the difference is
    added of what was trained in full. Raise ModelError with all changes that do not fit the base.
    """
    changes, tied = read_adapter(run), model.all_tied_weights_keys
    sources = {**base, **{name: base[twin] for name, twin in tied.items() if twin in base}}
    problems = [
        f"{name} {list(change.shape)}"
        for name, change in changes.items()
        if name not in sources or change.shape != sources[name].shape
    ]
    if problems:
        raise ModelError(f"{run / ADAPTER_WEIGHTS_FILE}: does not fit its base, which has no {'; '.join(problems)}")

    def output(name: str) -> OutputTensor:
        source, change = sources[name], changes.get(name)
        cast = dtype_named(dtype) if dtype and source.dtype.is_floating_point else source.dtype
        if not isinstance(change, StoredTensor):
            return OutputTensor(name, cast, source.path, source, change)
        if before:
            own = before[name if name in before else tied[name]]
            return OutputTensor(name, cast, source.path, source, Difference(change, own))
        return OutputTensor(name, cast, source.path, change)

    return [
        output(name)
        for name in sources
        # Old checkpoints store the unscaled frequencies of their rope; every reader computes them from the config.
        if not name.endswith("rotary_emb.inv_freq")
        and (name not in tied or _diverged(changes.get(name), changes.get(tied[name])))
    ]


def _diverged(own: Change | None, other: Change | None) -> bool:
    """Whether two tied weights differ after tuning: PEFT trains a copy of embeddings in `modules_to_save`, from which a
    tied head diverges unless `ensure_weight_tying` was set; then it saves the one tensor under both names.
    """
    if isinstance(own, StoredTensor) and isinstance(other, StoredTensor):
        return not torch.equal(own.whole(), other.whole())
    return own is not other


def in_threads(
    work: Callable[[OutputTensor], object], tensors: Sequence[OutputTensor], progress: Progress, note: str
) -> None:
    """Do `work` for all tensors in threads, where torch and the kernel release Python's lock; `progress` is in bytes.

    Blocks are too small to share: on a busy machine, threads of torch that wait for each other took ten times as long.
    """
    total, done, threads = sum(tensor.size for tensor in tensors), 0, torch.get_num_threads()
    torch.set_num_threads(1)
    # glibc keeps the memory of blocks up to the size of the largest that was freed, and gives larger ones back to the
    # system each time, which took a sixth of a check.
    torch.empty(RETAINED_BYTES, dtype=torch.uint8)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            for tensor, _ in zip(tensors, pool.map(work, tensors), strict=True):
                progress(done := done + tensor.size, total, note)
    finally:
        torch.set_num_threads(threads)


def write_tensors(tensors: Sequence[OutputTensor], folder: Path, progress: Progress) -> None:
    """Write the tensors to the disk (fsync), and an index if there are several files."""
    places: dict[str, StoredTensor] = {}
    files = sorted({tensor.file for tensor in tensors})
    for number, file in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else SAFE_WEIGHTS_NAME
        places |= _make_file([tensor for tensor in tensors if tensor.file == file], folder / name)

    def write(tensor: OutputTensor) -> None:
        place = places[tensor.name]
        with place.path.open("r+b") as out:
            out.seek(place.offset)
            for block in tensor.blocks():
                out.write(block.contiguous().view(-1).view(torch.uint8).numpy().data)

    in_threads(write, tensors, progress, "storage")
    weight_map = {name: place.path.name for name, place in places.items()}
    for name in set(weight_map.values()):
        with (folder / name).open("r+b") as out:
            os.fsync(out.fileno())
    if len(files) > 1:
        total = sum(tensor.size for tensor in tensors)
        write_json(folder / SAFE_WEIGHTS_INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _make_file(shard: Sequence[OutputTensor], file: Path) -> dict[str, StoredTensor]:
    """Write the header of a file, and return the places of its tensors by name."""
    entries: dict[str, object] = {METADATA: {"format": "pt"}}
    end = 0
    # Wider dtypes first, as the library does, which aligns what is mapped from the file.
    for tensor in sorted(shard, key=lambda tensor: -tensor.dtype.itemsize):
        place = (end, end := end + tensor.size)
        entries[tensor.name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": tensor.source.shape, "data_offsets": place}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % LENGTH_BYTES)
    with file.open("wb") as out:
        out.write(len(header).to_bytes(LENGTH_BYTES, "little") + header)
        out.truncate(out.tell() + end)
    return read_header(file)
