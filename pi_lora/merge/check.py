"""Whether two models say the same: their logits on the same tokens, beside what tuning and rounding change."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from pi_lora.errors import ModelError
from pi_lora.merge.deltas import Dequantized
from pi_lora.merge.layout import Plan, computed_names, quantized_weights, skeleton, tied_weights
from pi_lora.merge.shards import Rows, StoredTensor, base_shards
from pi_lora.models.adapter import load_adapter
from pi_lora.models.base import BaseModel, device, find_base, load_model, load_tokenizer, quiet_loading
from pi_lora.scaling.config import Config, window_of
from pi_lora.types import silent

# Root mean square of the difference over that of the logits. Rounding moves each weight by half a step of its dtype at
# most (2^-8 of it in bfloat16, 2^-11 in float16), and errors grow with depth; float32's come from adding in another
# order. docs/merging.md has what was measured.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


@dataclass(frozen=True)
class Agreement:
    """Of one sequence of `length` tokens, over its last `scored`: the largest difference of two logits, its root mean
    square relative to the logits', the share of tokens with the same first choice, and what tuning had changed.
    """

    length: int
    scored: int
    largest: float
    relative: float
    same_first: float
    tuning: float


@dataclass(frozen=True)
class Check:
    """All sequences; `how` is whole or layer by layer, `skipped` why there are none.

    `rounding` is the coarsest dtype that the merged weights have gone through.
    """

    rounding: str
    how: str
    agreements: tuple[Agreement, ...]
    skipped: str | None = None

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> "Check":
        """What `dataclasses.asdict` made of one."""
        return cls(**{**facts, "agreements": tuple(Agreement(**each) for each in facts["agreements"])})

    def problem(self) -> str | None:
        """Why the merged weights are not the model that was tuned; None where they are.

        They may differ by rounding, and by less than half of what tuning changed: else the adapter has not arrived.
        """
        for each in self.agreements:
            if math.isnan(each.relative) or each.relative > TOLERANCES[self.rounding]:
                return (
                    f"logits differ by {each.relative:.1e} of their size at {each.length} tokens, which rounding to "
                    f"{self.rounding} does not explain (at most {TOLERANCES[self.rounding]:.0e})"
                )
            if each.relative > max(each.tuning / 2, TOLERANCES["float32"]):
                return (
                    f"at {each.length} tokens rounding to {self.rounding} changes logits by {each.relative:.1e} of "
                    f"their size, tuning by {each.tuning:.1e}: most of it would be lost; choose --dtype float32"
                )
        return None

    def lines(self) -> list[str]:
        """For the terminal and the card."""
        if self.skipped:
            return [f"not checked: {self.skipped}"]
        how = "" if self.how == "whole" else f" {self.how}"
        return [
            f"checked{how} at {each.length} tokens: logits differ by {each.largest:.1e} at most, {each.relative:.1e} "
            f"of their size (tuning: {each.tuning:.1e}); the first choice is the same for {each.same_first:.1%}"
            for each in self.agreements
        ]


def agreement(length: int, merged: torch.Tensor, tuned: torch.Tensor, untuned: torch.Tensor) -> Agreement:
    """Compare float32 logits, each of tokens x vocabulary; `untuned` are the stretched base's without the adapter."""
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
    """A sixteenth, a quarter and all of a window in tokens, but at most `most`.

    >>> lengths_to_check(16384, None), lengths_to_check(16384, 4096), lengths_to_check(20, None)
    ([1024, 4096, 16384], [256, 1024, 4096], [2, 5, 20])
    """
    longest = min(window, most or window)
    return sorted({max(2, longest // part) for part in (16, 4, 1)})


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean(dtype=torch.float64).sqrt())


# What PEFT calls the layer that it has put an adapter around.
WRAPPED = "base_layer"


@dataclass(frozen=True)
class Place:
    """A weight of a module: its name there, and where its values lie."""

    module: nn.Module
    name: str
    tensor: Rows

    def read(self) -> None:
        """Put the values there, in float32."""
        self._put(self.tensor.rows(0, self.tensor.shape[0]).to(device(), torch.float32))

    def forget(self) -> None:
        """Put one number there, repeated without taking memory; not a real one, lest it be computed with unnoticed.

        Tensors on the meta device would drag PEFT 0.21's adapters there, and torch 2.13 multiplies by them silently.
        """
        self._put(torch.tensor(math.nan, device=device()).expand(self.tensor.shape))

    def _put(self, values: torch.Tensor) -> None:
        self.module.register_parameter(self.name, nn.Parameter(values, requires_grad=False))


def streamed(folder: Path) -> Any:
    """The model in a folder of full weights."""
    model = skeleton(folder)
    return _streaming(model, _forgotten(model, _stored(model, find_base(str(folder)))), _layers(model))


def streamed_tuned(base: BaseModel, run: Path, quantized: bool) -> Any:
    """`base` under the config of `run` and with its adapter, which is in memory whole; `quantized`: after NF4."""
    model = skeleton(run)
    stored = _stored(model, base)
    rounded = quantized_weights(model) if quantized else ()
    places = _forgotten(model, {**stored, **{name: Dequantized(stored[name]) for name in rounded}})
    layers = _layers(model)
    return _streaming(load_adapter(model, run, weightless=True), places, layers)


def _stored(model: PreTrainedModel, base: BaseModel) -> dict[str, StoredTensor]:
    """Where each weight of `model` lies, by its name in it."""
    tensors = {tensor.name: tensor for shard in base_shards(base) for tensor in shard}
    found = {computed: tensors[name] for name, computed in computed_names(model, tensors).computed.items()}
    return {**found, **{name: found[twin] for name, twin in tied_weights(model).items()}}


def _forgotten(model: PreTrainedModel, weights: Mapping[str, Rows]) -> list[Place]:
    """Every weight of `model`, with nothing in it yet."""
    places = [
        Place(module, name, weights[f"{path}.{name}"])
        for path, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    ]
    for place in places:
        place.forget()
    return places


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers."""
    return [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]


def _streaming(model: Any, places: Iterable[Place], layers: Iterable[nn.Module]) -> Any:
    """Read weights when what they belong to begins: a decoder layer as a whole, else a module with its adapter."""
    owners = {child: parent for parent in model.modules() for name, child in parent.named_children() if name == WRAPPED}
    owners |= {part: layer for layer in layers for part in layer.modules()}
    held: dict[nn.Module, list[Place]] = defaultdict(list)
    for place in places:
        held[owners.get(place.module, place.module)].append(place)
    for owner, its in held.items():
        owner.register_forward_pre_hook(lambda _module, _inputs, its=its: _each(its, Place.read))
        owner.register_forward_hook(lambda _module, _inputs, _output, its=its: _each(its, Place.forget))
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device())
    return model.eval()


def _each(places: Iterable[Place], action: Callable[[Place], None]) -> None:
    for place in places:
        action(place)


# Logits that are compared, at the end of each sequence: they have seen the most.
SCORED = 256
# A processor takes minutes for a longer sequence through billions of weights.
MOST_ON_CPU = 2048
# Of what is free, how much the weights may take; the rest is for activations and logits.
SHARE = 0.7
FLOAT32_BYTES = 4


def verify_merge(
    base: BaseModel,
    config: Config,
    run: Path,
    merged: Path,
    quantized: bool,
    plan: Plan,
    progress: Callable[[int, int, str], None] | None = None,
) -> Check:
    """Compare logits; both models compute in float32, so that what differs is what merging changed.

    One model is in memory at a time, and where one does not fit, one layer at a time.

    Raises:
        ModelError: the merged weights are not the model that was tuned.
    """
    fits = plan.numbers * FLOAT32_BYTES < SHARE * _free_memory()
    how = "whole" if fits else "layer by layer"
    # Weights after NF4 are bfloat16 before anything is added.
    rounding = "bfloat16" if quantized else str(plan.dtype).removeprefix("torch.")
    if not fits and plan.joined:
        return Check(rounding, how, (), "it does not fit in memory, and its layers cannot be read one by one")
    report = progress or silent
    lengths = lengths_to_check(window_of(config), MOST_ON_CPU if device().type == "cpu" else None)
    sequences = _real_text(load_tokenizer(run, window_of(config)), lengths)
    report(0, 2, f"checking, {how}")
    with quiet_loading():
        tuned = _tuned(base, config, run, quantized) if fits else streamed_tuned(base, run, quantized)
        expected = [(_logits(tuned, ids), _untuned_logits(tuned, ids)) for ids in sequences]
        del tuned
        report(1, 2, f"checking, {how}")
        found = _merged(merged) if fits else streamed(merged)
        logits = [_logits(found, ids) for ids in sequences]
    pairs = zip(sequences, logits, expected, strict=True)
    check = Check(rounding, how, tuple(agreement(len(ids), mine, *theirs) for ids, mine, theirs in pairs))
    if problem := check.problem():
        raise ModelError(f"{run}: the merged weights failed the check and are not kept: {problem}")
    return check


def _tuned(base: BaseModel, config: Config, run: Path, quantized: bool) -> Any:
    return load_adapter(load_model(base, config, torch.float32, place="quantized" if quantized else "device"), run)


def _merged(folder: Path) -> Any:
    """As a user would: nothing is said about scaling."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device()).eval()


@torch.no_grad()
def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The last logits, tokens x vocabulary, in float32 on the host."""
    answer = model(input_ids=ids[None].to(device()), logits_to_keep=min(SCORED, len(ids)), use_cache=False)
    logits: torch.Tensor = answer.logits[0].float().cpu()
    return logits


def _untuned_logits(tuned: Any, ids: torch.Tensor) -> torch.Tensor:
    with tuned.disable_adapter():
        return _logits(tuned, ids)


def _real_text(tokenizer: Any, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Token ids of text that is present wherever Python is, not the same for each length."""
    from pi_lora.data.corpus import stdlib_documents

    ids: list[int] = []
    for _, text in stdlib_documents("held-out"):
        ids += tokenizer(text, verbose=False)["input_ids"]
        if len(ids) >= sum(lengths):
            break
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    return [torch.tensor(ids[start : start + length]) for start, length in zip(starts, lengths, strict=True)]


def _free_memory() -> int:
    """In bytes, where the models would be."""
    if device().type == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return int(psutil.virtual_memory().available)
