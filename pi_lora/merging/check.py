"""The check of a merge: logits of the merged folder against base + adapter, each whole or a layer at a time."""

import gc
import math
from collections.abc import Sequence, Set
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from transformers import AutoModelForCausalLM, PreTrainedModel

from pi_lora.data.sources import standard_library
from pi_lora.merging.deltas import after_nf4
from pi_lora.merging.facts import Agreement, Check
from pi_lora.merging.layout import Plan, computed_sources
from pi_lora.merging.shards import BLOCK, StoredTensor, base_shards
from pi_lora.models.adapter import load_adapter
from pi_lora.models.device import device, dtype_named, free_memory
from pi_lora.models.model import Model, find
from pi_lora.models.weights import Placement, quiet_loading
from pi_lora.scaling.config import Config
from pi_lora.scaling.verify import config_of
from pi_lora.types import Progress

# How many logits are compared, at the end of each sequence, where most context precedes them; and the longest sequence
# on a processor, which takes minutes for it through billions of weights.
SCORED, MOST_ON_CPU = 256, 2048
# The share of free memory that the plan may take; the rest is for the file cache, fragments and the libraries.
SHARE = 0.8
FLOAT32_BYTES = 4


def verify_merge(found: Model, merged: Path, plan: Plan, progress: Progress) -> Check:
    """Compare logits of the folder `merged` with those of `found`, a base and its adapter, both in float32. One model
    is in memory at a time, and if it does not fit, one of its layers at a time.
    """
    longest = min(found.window, MOST_ON_CPU) if device().type == "cpu" else found.window
    fits = _memory_for(plan, found.config, longest) < SHARE * free_memory(device())
    # Python's own sources, another part of them for each length.
    texts = (document.text for document in standard_library("test").documents())
    ids = (token for text in texts for token in found.tokenizer(text, verbose=False)["input_ids"])
    lengths = sorted({max(2, longest // part) for part in (16, 4, 1)})
    sequences = [torch.tensor(list(islice(ids, length))) for length in lengths]
    for how in ["whole"] * fits + ["layer by layer"] * (not plan.joined):
        progress(0, 2, f"checking, {how}")
        try:
            agreements = _agreements(found, merged, plan, sequences, how == "whole", progress)
        except Exception as error:
            # The plan is an estimate, and others use the memory too.
            if how != "whole" or not _out_of_memory(error):
                raise
        else:
            return Check(rounding=plan.rounding, how=how, agreements=agreements)
        gc.collect()
        torch.cuda.empty_cache()
    skipped = "it does not fit in memory, and its layers cannot be read one by one"
    return Check(rounding=plan.rounding, how="layer by layer", skipped=skipped)


def _agreements(
    found: Model, merged: Path, plan: Plan, sequences: Sequence[torch.Tensor], whole: bool, progress: Progress
) -> tuple[Agreement, ...]:
    with quiet_loading():
        tuned = _tuned(found, plan.rounded, whole)
        expected = [_logits(tuned, ids) for ids in sequences]
        with tuned.disable_adapter():
            untuned = [_logits(tuned, ids) for ids in sequences]
        del tuned
        progress(1, 2, "checking")
        full = _merged(merged, whole)
        logits = [_logits(full, ids) for ids in sequences]
        _round_at_random(full, plan.exact, dtype_named(plan.rounding))
        rounded = [_logits(full, ids) for ids in sequences]
    return tuple(map(agreement, map(len, sequences), logits, expected, untuned, rounded))


def _memory_for(plan: Plan, config: Config, tokens: int) -> int:
    """Return the bytes of all weights in float32, of all logits that are kept, and of a layer's activations."""
    keys = ("vocab_size", "hidden_size", "intermediate_size")
    vocabulary, hidden, intermediate = (int(config.get(key) or 0) for key in keys)
    # Those of tuned, untuned, merged and rounded weights, at up to three lengths.
    logits = 12 * SCORED * vocabulary
    # The residual stream, what attention makes of it, and the MLP's gate, up and product; a mask has a byte each.
    activations = tokens * (8 * hidden + 3 * intermediate) + tokens * tokens // FLOAT32_BYTES
    return (plan.numbers.total() + logits + activations) * FLOAT32_BYTES


def _out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, is a lack of memory; torch has no class of it for a CPU."""
    if error is None or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return error is not None
    return "can't allocate memory" in str(error) or _out_of_memory(error.__cause__)


def agreement(
    length: int, merged: torch.Tensor, tuned: torch.Tensor, untuned: torch.Tensor, rounded: torch.Tensor
) -> Agreement:
    """Compare float32 logits, each of tokens x vocabulary: `untuned` are those of the extended base alone, `rounded` of
    the merged weights after a second rounding.
    """
    size = _rms(tuned - tuned.mean(dim=-1, keepdim=True))
    return Agreement(
        length=length,
        scored=len(tuned),
        largest=float((merged - tuned).abs().max()),
        relative=_rms(merged - tuned) / size,
        same_first=float((merged.argmax(-1) == tuned.argmax(-1)).double().mean()),
        tuning=_rms(tuned - untuned) / size,
        rounding=_rms(rounded - merged) / size,
    )


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean(dtype=torch.float64).sqrt())


@torch.no_grad()
def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    answer = model(input_ids=ids[None].to(device()), logits_to_keep=min(SCORED, len(ids)), use_cache=False)
    logits: torch.Tensor = answer.logits[0].float().cpu()
    return logits


def _tuned(found: Model, rounded: Set[str], whole: bool) -> Any:
    assert found.adapter
    if not whole:
        return _by_layer(found, found.config, rounded, found.adapter)
    place: Placement = "quantized" if rounded else "device"
    return load_adapter(found.load_weights(torch.float32, place=place), found.adapter)


def _merged(folder: Path, whole: bool) -> Any:
    """Load the merged folder as a user would: nothing is said about scaling."""
    if not whole:
        base = find(str(folder))
        return _by_layer(base, base.base_config)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device()).eval()


def _round_at_random(model: Any, exact: Set[str], dtype: torch.dtype) -> None:
    """Move all weights of a merged model but the `exact` ones as far as rounding to `dtype` does, in place or when they
    are read: how far its logits then move is how far a sound merge may be from base + adapter.
    """
    for module in model.modules():
        if isinstance(module, _Read) and module.name not in exact:
            module.rounding = dtype
    for name, weight in model.named_parameters():
        if not (name in exact or weight.is_meta or ".parametrizations." in name):
            move_as_rounding_does(weight.data, dtype)


def move_as_rounding_does(values: torch.Tensor, dtype: torch.dtype) -> None:
    """Add to each of `values`, which may be numbers of `dtype` already, the error of a random number near it."""
    largest = torch.finfo(dtype).max
    chance = torch.Generator(values.device).manual_seed(0)
    for part in torch.split(values.view(-1), BLOCK):
        near = part * (0.5 + torch.rand(part.shape, generator=chance, device=part.device))
        part += near.clamp_(-largest, largest).to(dtype).float() - near


class _Read(nn.Module):
    """What a weight becomes that is read each time when the model computes with it, and not kept."""

    def __init__(self, name: str, tensor: StoredTensor, through_nf4: bool) -> None:
        super().__init__()
        self.name, self.tensor, self.through_nf4 = name, tensor, through_nf4
        self.rounding: torch.dtype | None = None

    def forward(self, _empty: torch.Tensor) -> torch.Tensor:
        values = (after_nf4(self.tensor) if self.through_nf4 else self.tensor.whole()).to(device(), torch.float32)
        if self.rounding is not None:
            move_as_rounding_does(values, self.rounding)
        return values


def _by_layer(base: Model, config: Config, rounded: Set[str] = frozenset(), adapter: Path | None = None) -> Any:
    """Build the model of `config` with `adapter` on it; it reads the weights of `base`, `rounded` ones through NF4."""
    with init_empty_weights():  # buffers have values
        own = config_of(base.kind, config)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(own, dtype=torch.float32)
    _, sources, _ = computed_sources(model, chain.from_iterable(base_shards(base)))
    weights = []
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            source = f"{path}.{name}"
            weights.append((module, name, _Read(source, sources[source], source in rounded)))
            # On the meta device they would move PEFT 0.21's adapters there, which torch 2.13 computes with silently.
            empty = torch.tensor(math.nan, device=device()).expand(weight.shape)
            module.register_parameter(name, nn.Parameter(empty, requires_grad=False))
    # The copies that PEFT makes of modules to train them whole have their own weights.
    whole = load_adapter(model, adapter, low_cpu_mem_usage=True) if adapter else model.eval()
    for module, name, read in weights:
        register_parametrization(module, name, read, unsafe=True)
    for buffer in whole.buffers():
        buffer.data = buffer.data.to(device())
    return whole
