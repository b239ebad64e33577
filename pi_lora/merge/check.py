"""The check of a merge: logits of the merged folder against base + adapter, each whole or a layer at a time."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from pi_lora.data.corpus import stdlib_documents
from pi_lora.errors import ModelError
from pi_lora.merge.deltas import after_nf4
from pi_lora.merge.facts import Agreement, Check
from pi_lora.merge.layout import Plan, computed_names
from pi_lora.merge.shards import base_shards
from pi_lora.models.adapter import load_adapter
from pi_lora.models.base import BaseModel, Placement, device, find_base, load_model, quiet_loading
from pi_lora.models.load import FoundModel
from pi_lora.scaling.config import Config
from pi_lora.types import Progress

# The number of logits that are compared, at the end of each sequence, where most context precedes them.
SCORED = 256
# A processor takes minutes for a longer sequence through billions of weights.
MOST_ON_CPU = 2048
# The share of free memory that the weights may take; the rest is for activations and logits.
SHARE = 0.7
FLOAT32_BYTES = 4
# The attribute in which a PEFT layer keeps the layer that it wraps.
WRAPPED = "base_layer"
Read = Callable[[], torch.Tensor]
# A module and its name for a weight, the weight's shape, and what reads its values.
Weight = tuple[nn.Module, str, torch.Size, Read]


def verify_merge(found: FoundModel, merged: Path, plan: Plan, progress: Progress) -> Check:
    """Compare logits of the folder `merged` with those of `found`, a base and its adapter, both in float32.

    One model is in memory at a time, and if it does not fit, one of its layers at a time. Raises ModelError if the
    merged weights are not the model that was tuned.
    """
    fits = plan.numbers.total() * FLOAT32_BYTES < SHARE * _free_memory()
    how = "whole" if fits else "layer by layer"
    # Weights after NF4 are bfloat16 before anything is added.
    rounding = "bfloat16" if plan.rounded else plan.numbers.most_common(1)[0][0]
    if not fits and plan.joined:
        skipped = "it does not fit in memory, and its layers cannot be read one by one"
        return Check(rounding=rounding, how=how, skipped=skipped)
    lengths = lengths_to_check(found.window, MOST_ON_CPU if device().type == "cpu" else None)
    sequences = _real_text(found.tokenizer, lengths)
    progress(0, 2, f"checking, {how}")
    with quiet_loading():
        tuned = _tuned(found, plan, fits)
        expected = [_logits(tuned, ids) for ids in sequences]
        with tuned.disable_adapter():
            untuned = [_logits(tuned, ids) for ids in sequences]
        del tuned
        progress(1, 2, f"checking, {how}")
        full = _merged(merged, fits)
        logits = [_logits(full, ids) for ids in sequences]
    agreements = map(agreement, map(len, sequences), logits, expected, untuned)
    check = Check(rounding=rounding, how=how, agreements=tuple(agreements))
    if problem := check.problem():
        raise ModelError(f"{found.adapter}: the merged weights failed the check and are not kept: {problem}")
    return check


def agreement(length: int, merged: torch.Tensor, tuned: torch.Tensor, untuned: torch.Tensor) -> Agreement:
    """Compare float32 logits, each of tokens x vocabulary; `untuned` are those of the extended base alone."""
    size = _rms(tuned - tuned.mean(dim=-1, keepdim=True))
    return Agreement(
        length=length,
        scored=len(tuned),
        largest=float((merged - tuned).abs().max()),
        relative=_rms(merged - tuned) / size,
        same_first=float((merged.argmax(-1) == tuned.argmax(-1)).double().mean()),
        tuning=_rms(tuned - untuned) / size,
    )


def lengths_to_check(window: int, most: int | None) -> Sequence[int]:
    """Return a sixteenth, a quarter and all of a window in tokens, or of `most` if that is less.

    >>> lengths_to_check(16384, None), lengths_to_check(16384, 4096), lengths_to_check(20, None)
    ([1024, 4096, 16384], [256, 1024, 4096], [2, 5, 20])
    """
    longest = min(window, most or window)
    return sorted({max(2, longest // part) for part in (16, 4, 1)})


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean(dtype=torch.float64).sqrt())


@torch.no_grad()
def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the last logits, tokens x vocabulary, in float32 on the host."""
    answer = model(input_ids=ids[None].to(device()), logits_to_keep=min(SCORED, len(ids)), use_cache=False)
    logits: torch.Tensor = answer.logits[0].float().cpu()
    return logits


def _real_text(tokenizer: Any, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Return token ids of Python's own sources, different ones for each length."""
    texts = (text for _, text in stdlib_documents("held-out"))
    ids = (token for text in texts for token in tokenizer(text, verbose=False)["input_ids"])
    return [torch.tensor(list(islice(ids, length))) for length in lengths]


def _free_memory() -> int:
    return int(torch.cuda.mem_get_info()[0] if device().type == "cuda" else psutil.virtual_memory().available)


def _tuned(found: FoundModel, plan: Plan, whole: bool) -> Any:
    """Load base and adapter; unless `whole`, the base's weights are read by layer."""
    assert found.adapter
    if whole:
        place: Placement = "quantized" if plan.rounded else "device"
        return load_adapter(load_model(found.base, found.config, torch.float32, place=place), found.adapter)
    values = {name: tensor.whole for name, tensor in plan.sources.items()}
    values |= {name: partial(after_nf4, plan.sources[name]) for name in plan.rounded}
    return _by_layer(_without_weights(found.base, found.config), values, found.adapter)


def _merged(folder: Path, whole: bool) -> Any:
    """Load the merged folder as a user would: nothing is said about scaling."""
    if whole:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device()).eval()
    base = find_base(str(folder))
    model = _without_weights(base, base.config)
    tensors = {tensor.name: tensor for shard in base_shards(base) for tensor in shard}
    values = {computed: tensors[name].whole for name, computed in computed_names(model, tensors)[0].items()}
    return _by_layer(model, values | {name: values[twin] for name, twin in model.all_tied_weights_keys.items()})


def _without_weights(base: BaseModel, config: Config) -> PreTrainedModel:
    """Build a model with real buffers and weights that take no memory."""
    with init_empty_weights():
        own = base.kind.from_dict(deepcopy(dict(config)))
        model: PreTrainedModel = AutoModelForCausalLM.from_config(own, dtype=torch.float32)
    return model


def _by_layer(model: PreTrainedModel, values: Mapping[str, Read], adapter: Path | None = None) -> Any:
    """Put `adapter` on `model`; each decoder layer, and each module outside of them, reads its weights when it begins
    and forgets them when it ends.
    """
    weights = [
        (module, name, weight.shape, values[f"{path}.{name}"])
        for path, module in model.named_modules()
        for name, weight in module.named_parameters(recurse=False)
    ]
    _fill(weights, forget=True)
    layers = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    whole = load_adapter(model, adapter, weightless=True) if adapter else model.eval()
    # A module outside of the layers reads its weights before its adapter, which uses them (DoRA).
    owners = {child: parent for parent in whole.modules() for name, child in parent.named_children() if name == WRAPPED}
    owners |= {part: layer for layer in layers for part in layer.modules()}
    held: dict[nn.Module, list[Weight]] = defaultdict(list)
    for weight in weights:
        held[owners.get(weight[0], weight[0])].append(weight)
    for owner, its in held.items():
        owner.register_forward_pre_hook(lambda _module, _inputs, its=its: _fill(its))
        owner.register_forward_hook(lambda _module, _inputs, _output, its=its: _fill(its, forget=True))
    for buffer in whole.buffers():
        buffer.data = buffer.data.to(device())
    return whole


def _fill(weights: Iterable[Weight], forget: bool = False) -> None:
    """Read the values of weights, or replace them by a single NaN, repeated without taking memory.

    Weights on the meta device would move PEFT 0.21's adapters there, and torch 2.13 multiplies by them silently.
    """
    for module, name, shape, read in weights:
        empty = torch.tensor(math.nan, device=device()).expand(shape)
        values = empty if forget else read().to(device(), torch.float32)
        module.register_parameter(name, nn.Parameter(values, requires_grad=False))
