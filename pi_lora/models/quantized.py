"""Quantized weights, dequantized a few rows at a time as they are read."""

import importlib.util
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from pi_lora.errors import ModelError
from pi_lora.models.files import BITSANDBYTES, quantization_of, read_card
from pi_lora.models.source import Base
from pi_lora.models.weights import StoredTensor, keep
from pi_lora.scaling.config import Config

# Kinds that transformers dequantizes when it loads them, for a training as well.
DEQUANTIZED_ON_LOADING = ("fp8", "mxfp4")
# The parts of a quantized weight, by what follows its name or that of its module. Scales of activations are ignored.
NUMBERS = "numbers"
SCALES = ("absmax", "SCB", "scales", "scale_inv")
PARTS_OF_MODULES = r"\.(SCB|weight_format|input_scale|activation_scale)$"
# The ends of the names of the scales of bitsandbytes.
ENDS_OF_BITSANDBYTES = (".absmax", ".SCB")
# The scales of bitsandbytes that have a scale in common.
NESTED_BLOCK = 256


def check_quantization(base: Base) -> None:
    """Raise ModelError if the weights of `base` are of a kind that is not dequantized here."""
    kind = quantization_of(base.config)
    if kind == BITSANDBYTES and importlib.util.find_spec(BITSANDBYTES) is None:
        raise ModelError(f"{base.name}: needs the package {BITSANDBYTES}; pip install 'pi-lora[qlora]'")
    if kind in (None, BITSANDBYTES, *DEQUANTIZED_ON_LOADING):
        return
    original = read_card(base.path).get("base_model")
    named = f" ({original})" if original else ""
    raise ModelError(
        f"{base.name}: has weights quantized by {kind}, which are not dequantized here; "
        f"name the model that it was made from{named}, or remove quantization_config from config.json if they are plain"
    )


def check_is_quantized(base: Base, stored: Iterable[str]) -> None:
    """Raise ModelError if the config of `base` says that bitsandbytes quantized the weights, but none of the `stored`
    tensors has a name of its scales.
    """
    if quantization_of(base.config) != BITSANDBYTES:
        return
    if not any(tensor.endswith(ENDS_OF_BITSANDBYTES) for tensor in stored):
        raise ModelError(
            f"{base.name}: config.json has a quantization_config, but the weights are not quantized; "
            "remove it from config.json"
        )


class Header(Protocol):
    """The header of a tensor: of a file on this machine, or as the hub returns it."""

    @property
    def shape(self) -> Sequence[int]:
        """The numbers along each axis."""


def check_loadable(base: Base, stored: Mapping[str, Header]) -> None:
    """Raise ModelError if transformers does not dequantize the `stored` weights of `base` correctly.

    transformers 5.23 takes the rows of an FP8 matrix divided by the number of its scales as the height of a block. That
    is wrong if the last block is cut, except if it is the only one. The same holds for columns.
    """
    check_is_quantized(base, stored)
    quantization = base.config.get("quantization_config") or {}
    block = quantization.get("weight_block_size")
    if block is None:
        return
    for key, scales in stored.items():
        weight, part = _part_of(key)
        if part != "scale_inv" or weight not in stored:
            continue
        sizes = stored[weight].shape[-2:]
        for size, block_size, num_scales in zip(sizes, block, scales.shape[-2:], strict=False):
            if num_scales > 1 and size % block_size:
                raise ModelError(
                    f"{base.name}: {weight}: {size} rows or columns are not whole FP8 blocks of {block_size}, "
                    "which transformers does not dequantize correctly; name the same model in bfloat16"
                )


@dataclass(frozen=True)
class Quantized(StoredTensor):
    """A weight that is read as bfloat16 or a wider type, with the tensors that hold its numbers and their scales."""

    numbers: StoredTensor
    scales: StoredTensor


@dataclass(frozen=True)
class Fp8(Quantized):
    """A matrix or stack in 8-bit floating point, with a scale for every block of rows and columns of a matrix, or one
    for a matrix or for all.
    """

    block: list[int] | None

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Read rows `start` to `stop` (exclusive)."""
        numbers = self.numbers.as_matrix().rows(start, stop).float()
        scales = self.scales.as_matrix().whole().float()
        if scales.numel() > 1:
            num_rows, num_columns = self.numbers.shape[-2:]
            height, width = self.block or (num_rows, num_columns)
            rows = torch.arange(start, stop)
            matrices = rows // num_rows
            of_rows = matrices * self.scales.shape[-2] + rows % num_rows // height
            of_columns = torch.arange(num_columns) // width
            scales = scales[of_rows][:, of_columns]
        return numbers * scales


@dataclass(frozen=True)
class Int8(Quantized):
    """A matrix of bytes with a scale for every row (LLM.int8)."""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Read rows `start` to `stop` (exclusive)."""
        numbers = self.numbers.rows(start, stop).float()
        scales = self.scales.rows(start, stop)
        return numbers * scales[:, None] / 127


@dataclass(frozen=True)
class Mxfp4(Quantized):
    """Stacked experts in 4-bit floating point, with a scale for 32 numbers; their rows are the columns in the file."""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Read rows `start` to `stop` (exclusive), counted over all experts."""
        _, _, groups, size = self.numbers.shape
        height = 2 * groups * size
        experts = range(start // height, (stop - 1) // height + 1)
        rows = torch.cat([keep(self.expert, number) for number in experts])
        first = start - experts.start * height
        return rows[first : first + stop - start]

    def expert(self, number: int) -> torch.Tensor:
        """Read the matrix of one expert."""
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        blocks = self.numbers.rows(number, number + 1)
        scales = self.scales.rows(number, number + 1)
        stack: torch.Tensor = convert_moe_packed_tensors(blocks, scales)
        return stack[0]


@dataclass(frozen=True)
class FourBit(Quantized):
    """A matrix of bitsandbytes: 4-bit codes, and a scale for every block, which may have scales of their own."""

    parts: tuple[tuple[str, StoredTensor], ...]
    block: int

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Read rows `start` to `stop` (exclusive)."""
        from bitsandbytes.functional import QuantState, dequantize_4bit  # an optional package

        columns = self.shape[1]
        step = self.block * NESTED_BLOCK
        first = start * columns // step * step
        last_step = math.ceil(stop * columns / step)
        last = min(math.prod(self.shape), last_step * step)
        last_block = math.ceil(last / self.block)
        parts = {name: tensor.whole() for name, tensor in self.parts}
        parts["absmax"] = self.scales.rows(first // self.block, last_block)
        if "nested_absmax" in parts:
            parts["nested_absmax"] = parts["nested_absmax"][first // step : last_step]
        state = QuantState.from_dict(parts, device=torch.device("cpu"))
        state.shape = torch.Size([last - first])
        state.dtype = torch.float32
        codes = self.numbers.rows(first // 2, math.ceil(last / 2))
        values = dequantize_4bit(codes, state).flatten()
        skipped = start * columns - first
        number = (stop - start) * columns
        return values[skipped : skipped + number].view(-1, columns)


def dequantized(stored: Mapping[str, StoredTensor], config: Config) -> dict[str, StoredTensor]:
    """Return the weights of a model by name; those that are quantized are dequantized as they are read.

    Raise ModelError if they are, and the config does not say so.
    """
    if quantization_of(config) is None:
        for tensor in stored.values():
            if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
                raise ModelError(
                    f"{tensor.path}: {tensor.name}: is quantized, but config.json has no quantization_config; "
                    "download it again"
                )
        return dict(stored)
    weights: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for key, tensor in stored.items():
        name, part = _part_of(key)
        weights[name][part] = tensor
    block = config["quantization_config"].get("weight_block_size")
    return {name: _joined(name, parts, block) for name, parts in weights.items()}


def _part_of(key: str) -> tuple[str, str]:
    """Return the name of the weight to which a tensor belongs, and the part of the weight that it is."""
    key = re.sub(PARTS_OF_MODULES, r".weight.\1", key)
    found = re.fullmatch(r"(.*\.weight)\.(.+)|(.*)_(scale_inv|blocks|scales)", key)
    if found is None:
        return key, NUMBERS
    name, part = (group for group in found.groups() if group)
    return name, part


def _joined(name: str, parts: dict[str, StoredTensor], block: list[int] | None) -> StoredTensor:
    numbers = parts.pop("blocks", None) or parts.pop(NUMBERS, None)
    if numbers is None:
        raise ModelError(f"{name}: has scales but no quantized weights; download the model again")
    scales = next((parts.pop(part) for part in SCALES if part in parts), None)
    if scales is None:
        return numbers
    common: dict[str, Any] = {
        **vars(numbers),
        "name": name,
        "dtype": torch.bfloat16,
        "numbers": numbers,
        "scales": scales,
    }
    if scales.name.endswith(".absmax"):
        settings = next(tensor for part, tensor in parts.items() if part.startswith("quant_state"))
        state = json.loads(bytes(settings.whole().tolist()))
        common["shape"] = tuple(state["shape"])
        # For FSDP, the bytes are stored as numbers of another dtype.
        common["numbers"] = replace(numbers, dtype=torch.uint8, shape=(numbers.size, 1))
        return FourBit(**common, parts=tuple(parts.items()), block=state["blocksize"])
    if scales.name.endswith(".SCB"):
        return Int8(**common)
    if scales.name.endswith("_scales"):
        experts, columns, groups, size = numbers.shape
        common["shape"] = (experts, groups * size * 2, columns)
        return Mxfp4(**common)
    return Fp8(**common, block=block)
