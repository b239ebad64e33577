"""A model without its weights: what transformers calls each of them, which are tied, transposed or quantized."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from pi_lora.errors import ModelError
from pi_lora.merge.deltas import Adapter, Change, Dequantized, LowRank, Replacement, finite, not_finite
from pi_lora.merge.shards import Planned, Rows, StoredTensor, spans
from pi_lora.models.base import quiet_loading


@dataclass(frozen=True)
class Names:
    """By stored name: what a tensor is computed under; and those that are computed as parts of others."""

    computed: Mapping[str, str]
    joined: frozenset[str]


def skeleton(folder: Path) -> PreTrainedModel:
    """The float32 model of a folder's `config.json`; weights take no memory, buffers are real."""
    with quiet_loading(), init_empty_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.float32
        )
    return model.eval()


def computed_names(model: PreTrainedModel, stored: Iterable[str]) -> Names:
    """What `model` calls the tensors that files call `stored`.

    transformers 5 computes some architectures under other names than it stores them under, and joins tensors (experts);
    its own mapping says how, the one that PEFT relies on as well.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    joining = [each for each in mapping if isinstance(each, WeightConverter)]
    # Tied weights are in it under each of their names.
    state = model.state_dict()
    found, joined = {}, set()
    for name in sorted(stored, key=dot_natural_key):
        computed, pattern = rename_source_key(name, renamings, joining, model.base_model_prefix, state)
        if computed not in state and name in state:
            computed, pattern = name, None
        if pattern is not None:
            joined.add(name)
        elif computed in state:
            found[name] = computed
    return Names(found, frozenset(joined))


def tied_weights(model: PreTrainedModel) -> dict[str, str]:
    """The weights that `model` does not store, and which one each of them is."""
    return dict(model.all_tied_weights_keys)


def output_embedding(model: PreTrainedModel) -> str:
    """The name of the weight that makes logits."""
    head = model.get_output_embeddings()
    return next(f"{name}.weight" for name, module in model.named_modules() if module is head)


def transposed_weights(model: nn.Module) -> frozenset[str]:
    """The linear weights that are stored inputs x outputs."""
    return frozenset(f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D))


def quantized_weights(model: PreTrainedModel) -> frozenset[str]:
    """The weights that transformers keeps in four bits when it loads `model` quantized by bitsandbytes."""
    left_out = [*get_keys_to_not_convert(model), *(model._keep_in_fp32_modules or [])]
    return frozenset(
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module) is nn.Linear and should_convert_module(name, left_out)
    )


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Old checkpoints carry the unscaled frequencies of their rope; every reader computes them from the config.
LEFT_OUT = "rotary_emb.inv_freq"


@dataclass(frozen=True)
class Plan:
    """The tensors to write, grouped as in the base's files.

    `untied`: a tied head has become a tensor of its own; `joined`: some are stored in parts.
    """

    shards: list[list[Planned]]
    untied: bool
    joined: bool

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(tensor.size for shard in self.shards for tensor in shard)

    @property
    def numbers(self) -> int:
        """How many there are in all tensors."""
        return sum(math.prod(tensor.shape) for shard in self.shards for tensor in shard)

    @property
    def dtype(self) -> torch.dtype:
        """What most numbers are stored in."""
        count = Counter[torch.dtype]()
        for shard in self.shards:
            for tensor in shard:
                count[tensor.dtype] += math.prod(tensor.shape)
        return count.most_common(1)[0][0]


def plan_merge(
    model: PreTrainedModel,
    shards: list[list[StoredTensor]],
    adapter: Adapter,
    dtype: torch.dtype | None = None,
    quantized: bool = False,
) -> Plan:
    """Match the adapter's changes with the base's tensors; `model` is the base's skeleton.

    `dtype` is what floating tensors are cast to, each one's own by default; `quantized` puts the adapter on the base's
    weights after NF4.

    Raises:
        ModelError: a change has no tensor or one of another shape, or the base lacks a tensor: all are named.
    """
    names = computed_names(model, (tensor.name for shard in shards for tensor in shard))
    tied = tied_weights(model)
    sources = _sources(model, shards, names.computed)
    if not names.joined and (lacking := sorted(set(model.state_dict()) - set(sources) - set(tied))):
        raise ModelError(f"{shards[0][0].path.parent}: the base lacks {', '.join(lacking)}; get all of its files")
    changes, untied = _settle_ties(adapter, tied, output_embedding(model))
    sources |= {each: sources[tied[each]] for each in untied}
    _check_matches(adapter, changes, sources)
    making = _Making(changes, quantized_weights(model) if quantized else frozenset(), dtype)
    written = [
        [
            making.planned(tensor, tensor.name, names.computed.get(tensor.name))
            for tensor in shard
            if names.computed.get(tensor.name) not in tied and not tensor.name.endswith(LEFT_OUT)
        ]
        for shard in shards
    ]
    written[-1] += [making.planned(sources[each], each, each) for each in untied]
    return Plan([shard for shard in written if shard], bool(untied), bool(names.joined))


@dataclass(frozen=True)
class _Making:
    """How tensors come to be: what changes them, which are rounded to NF4 before, and what all are cast to."""

    changes: Mapping[str, Change]
    rounded: frozenset[str]
    dtype: torch.dtype | None

    def planned(self, stored: StoredTensor, name: str, computed: str | None) -> Planned:
        """The tensor to be written as `name`, from a stored one that is computed under another name, or not at all."""
        cast = self.dtype if self.dtype and stored.dtype in FLOATS else stored.dtype
        change = self.changes.get(computed) if computed else None
        rounded = computed in self.rounded
        return Planned(
            name, cast, stored.shape, lambda: _blocks(Dequantized(stored) if rounded else stored, change, cast, name)
        )


def _sources(
    model: PreTrainedModel, shards: list[list[StoredTensor]], names: Mapping[str, str]
) -> dict[str, StoredTensor]:
    """The base's tensors by computed name, each found once and of the shape that the model has."""
    expected = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    sources: dict[str, StoredTensor] = {}
    for tensor in (tensor for shard in shards for tensor in shard if tensor.name in names):
        computed = names[tensor.name]
        if computed in sources:
            raise ModelError(f"{tensor.where}: stands for {computed}, as {sources[computed].where} does; keep one")
        if tensor.shape != expected[computed]:
            raise ModelError(f"{tensor.where}: is {_by(tensor.shape)} where the config says {_by(expected[computed])}")
        sources[computed] = tensor
    return sources


def _settle_ties(adapter: Adapter, tied: Mapping[str, str], head: str) -> tuple[dict[str, Change], list[str]]:
    """The changes without what tying makes redundant, and the weights that training has set apart from their twin.

    PEFT trains embeddings through `modules_to_save` as a copy, from which a tied head diverges unless
    `ensure_weight_tying` was set; it then saves the one tensor under both names.
    """
    changes, untied = dict(adapter.changes), []
    for weight, twin in tied.items():
        mine, its = changes.get(weight), changes.get(twin)
        if mine is None and its is None:
            continue
        if isinstance(mine, Replacement) and isinstance(its, Replacement) and _equal(mine.source, its.source):
            del changes[weight]
        elif weight == head:
            untied.append(weight)
        else:
            raise ModelError(f"{adapter.path}: {weight} and {twin} are one in this architecture, but were tuned apart")
    return changes, untied


def _check_matches(adapter: Adapter, changes: Mapping[str, Change], sources: Mapping[str, StoredTensor]) -> None:
    problems = []
    for name, change in changes.items():
        shape = change.shape() if isinstance(change, LowRank) else change.source.shape
        if name not in sources:
            problems.append(f"{name} is not in the base")
        elif sources[name].shape != shape:
            problems.append(f"{name} is {_by(shape)} here and {_by(sources[name].shape)} in the base")
        elif sources[name].dtype not in FLOATS:
            problems.append(f"{name} is stored as {sources[name].dtype}, to which nothing can be added")
    if problems:
        raise ModelError(f"{adapter.path}: does not fit its base: {'; '.join(problems)}")


def _blocks(base: Rows, change: Change | None, dtype: torch.dtype, name: str) -> Iterator[torch.Tensor]:
    """The merged tensor, a few rows at a time: added in float32, cast once."""
    for block in change.blocks(base) if change else (base.rows(*span) for span in spans(base.shape)):
        cast = block.to(dtype)
        # Only float16 ends long before float32 does; where they are as good, float32 is the faster to look through.
        if cast.is_floating_point() and not finite(cast if dtype == torch.float16 else block):
            read = change.source if isinstance(change, Replacement) else base
            if not all(finite(read.rows(*span)) for span in spans(read.shape)):
                raise not_finite(read)
            raise ModelError(f"{name}: its merged values do not fit {dtype}; choose another --dtype")
        yield cast


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    return one.shape == other.shape and all(
        torch.equal(one.rows(*span), other.rows(*span)) for span in spans(one.shape)
    )


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a number"
