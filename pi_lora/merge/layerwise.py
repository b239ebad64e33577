"""Models that compute with one layer at a time in memory: each reads its weights as it begins, then forgets them."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pi_lora.adapter import load_adapter
from pi_lora.merge.base_files import base_shards
from pi_lora.merge.quantized import Dequantized
from pi_lora.merge.shards import Rows, StoredTensor
from pi_lora.merge.skeleton import computed_names, quantized_weights, skeleton, tied_weights
from pi_lora.model import BaseModel, device, find_base

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
