"""Which tensors a merge writes, and from what: names, ties and shapes of the model matched with files and adapter."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from pi_lora.errors import ModelError
from pi_lora.merging.deltas import Change, after_nf4, check_finite, read_adapter
from pi_lora.merging.shards import Planned, StoredTensor, spans
from pi_lora.models.finite import finite
from pi_lora.models.stored import ADAPTER_WEIGHTS_FILE, AdapterSettings

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Plan:
    """The tensors to write, grouped as in the base's files; `rounded` are the computed names of those that go through
    NF4, `exact` of those that are certain to be as the base stores them. `untied`: a tied head has become a tensor of
    its own; `joined`: transformers joins some tensors when it loads.
    """

    shards: list[list[Planned]]
    rounded: frozenset[str]
    exact: frozenset[str]
    untied: bool
    joined: bool

    @property
    def tensors(self) -> list[Planned]:
        """All tensors to write."""
        return [tensor for shard in self.shards for tensor in shard]

    @property
    def numbers(self) -> Counter[str]:
        """How many numbers are written in each dtype."""
        count = Counter[str]()
        for tensor in self.tensors:
            count[str(tensor.dtype).removeprefix("torch.")] += math.prod(tensor.shape)
        return count

    @property
    def rounding(self) -> str:
        """The coarsest dtype that merged weights go through; those after NF4 are bfloat16 before anything is added."""
        return "bfloat16" if self.rounded else self.numbers.most_common(1)[0][0]


def plan_merge(
    model: PreTrainedModel,
    shards: list[list[StoredTensor]],
    run: Path,
    settings: AdapterSettings,
    dtype: torch.dtype | None = None,
    quantized: bool = False,
) -> Plan:
    """Match the changes of the adapter in the folder `run` with the base's tensors; `model` is on the meta device.
    `dtype` is what floating tensors are cast to, by default their own; `quantized` adds the adapter to the base's
    weights after NF4. Raise ModelError with all that the base lacks, or all changes that do not fit it.
    """
    adapter, tied = run / ADAPTER_WEIGHTS_FILE, dict(model.all_tied_weights_keys)
    stored = [tensor for shard in shards for tensor in shard]
    names, sources, joined = computed_sources(model, stored)
    if not joined and (lacking := sorted(set(model.state_dict()) - set(sources) - set(tied))):
        raise ModelError(f"{stored[0].path.parent}: the base lacks {', '.join(lacking)}; download all of its files")
    changes, untied = _settle_ties(adapter, read_adapter(run, settings), tied, model)
    _check_matches(adapter, changes, sources)
    rounded = frozenset[str]()
    if quantized:  # what transformers stores in four bits if bitsandbytes quantizes the model
        left_out = [*get_keys_to_not_convert(model), *(model._keep_in_fp32_modules or [])]
        linear = [name for name, module in model.named_modules() if type(module) is nn.Linear]
        rounded = frozenset(f"{name}.weight" for name in linear if should_convert_module(name, left_out))

    def planned(tensor: StoredTensor, name: str, computed: str | None) -> Planned:
        cast = dtype if dtype and tensor.dtype in FLOATS else tensor.dtype
        change = changes.get(computed) if computed else None
        return Planned(name, cast, tensor.shape, lambda: _blocks(name, tensor, change, cast, computed in rounded))

    def kept(tensor: StoredTensor) -> bool:
        # Old checkpoints store the unscaled frequencies of their rope; every reader computes them from the config.
        return names.get(tensor.name) not in tied and not tensor.name.endswith("rotary_emb.inv_freq")

    same = (each for each in stored if dtype in (None, each.dtype) and not quantized)
    exact = frozenset(names[each.name] for each in same if each.name in names) - changes.keys()
    written = [[planned(each, each.name, names.get(each.name)) for each in shard if kept(each)] for shard in shards]
    written[-1] += [planned(sources[name], name, name) for name in untied]
    return Plan([shard for shard in written if shard], rounded, exact, bool(untied), joined)


def computed_sources(
    model: PreTrainedModel, stored: Iterable[StoredTensor]
) -> tuple[dict[str, str], dict[str, StoredTensor], bool]:
    """Match what files store with what `model` computes: return the computed names by stored name, the tensors by
    computed name, tied ones under both, and whether transformers joins others into one.

    transformers 5 computes some architectures under other names than it stores them under, and joins tensors (experts);
    PEFT relies on the same mapping. Raises ModelError if a tensor is there twice or has another shape than the model's.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    joining = [each for each in mapping if isinstance(each, WeightConverter)]
    state = model.state_dict()  # has tied weights under each of their names
    sources: dict[str, StoredTensor] = {}
    joined = False
    for tensor in stored:
        name, pattern = rename_source_key(tensor.name, renamings, joining, model.base_model_prefix, state)
        if name not in state and tensor.name in state:
            name, pattern = tensor.name, None
        joined |= pattern is not None
        if pattern is not None or name not in state:
            continue
        if name in sources:
            raise ModelError(f"{tensor}: is {name}, and so is {sources[name]}; keep one of them")
        if tensor.shape != state[name].shape:
            raise ModelError(f"{tensor}: is {_by(tensor.shape)} but the config says {_by(state[name].shape)}")
        sources[name] = tensor
    names = {tensor.name: name for name, tensor in sources.items()}
    twins = {name: sources[twin] for name, twin in model.all_tied_weights_keys.items() if twin in sources}
    return names, sources | twins, joined


def _settle_ties(
    adapter: Path, changes: Mapping[str, Change], tied: Mapping[str, str], model: PreTrainedModel
) -> tuple[dict[str, Change], list[str]]:
    """Return the changes without those that tying makes redundant, and the tied weights that differ after tuning: PEFT
    trains a copy of embeddings in `modules_to_save`, from which a tied head diverges unless `ensure_weight_tying` was
    set; then it saves the one tensor under both names.
    """
    settled, untied = dict(changes), []
    for weight, twin in tied.items():
        mine, its = changes.get(weight), changes.get(twin)
        if isinstance(mine, StoredTensor) and isinstance(its, StoredTensor) and mine.equals(its):
            del settled[weight]
        elif (mine or its) and model.get_submodule(weight.rpartition(".")[0]) is model.get_output_embeddings():
            untied.append(weight)
        elif mine or its:
            raise ModelError(f"{adapter}: {weight} and {twin} are tied in this architecture but were tuned apart")
    return settled, untied


def _check_matches(adapter: Path, changes: Mapping[str, Change], sources: Mapping[str, StoredTensor]) -> None:
    problems = []
    for name, change in changes.items():
        if (source := sources.get(name)) is None:
            problems.append(f"{name} is not in the base")
        elif source.shape != change.shape:
            problems.append(f"{name} is {_by(change.shape)} here and {_by(source.shape)} in the base")
        elif source.dtype not in FLOATS:
            problems.append(f"{name} is stored as {source.dtype}, to which nothing can be added")
    if problems:
        raise ModelError(f"{adapter}: does not fit its base: {'; '.join(problems)}")


def _blocks(
    name: str, stored: StoredTensor, change: Change | None, dtype: torch.dtype, rounded: bool
) -> Iterator[torch.Tensor]:
    """Yield the merged tensor, a few rows at a time: added in float32, cast once."""
    source, rows = stored, stored.rows
    if isinstance(change, StoredTensor):
        source, rows, change = change, change.rows, None
    elif rounded:
        values = after_nf4(stored)
        rows = lambda start, stop: values[start:stop]  # noqa: E731
    for block in change.blocks(rows) if change else (rows(*span) for span in spans(stored.shape)):
        cast = block.to(dtype)
        # Only float16 has a smaller range than float32; of the others, float32 is faster to sum.
        if cast.is_floating_point() and not finite(cast if dtype == torch.float16 else block):
            check_finite(source)
            raise ModelError(f"{name}: its merged values do not fit {dtype}; choose another --dtype")
        yield cast


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a number"
