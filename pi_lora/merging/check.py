"""The check of a merge: the model that its config describes, the written tensors, and on request the logits."""

import argparse
import inspect
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from pi_lora.errors import ModelError
from pi_lora.merging.deltas import LowRank, OutputTensor, in_threads
from pi_lora.merging.tensors import StoredTensor, read_weights, spans
from pi_lora.models.files import find_file, read_config
from pi_lora.models.machine import device, free_memory
from pi_lora.models.model import Model, find
from pi_lora.models.weights import quiet_loading
from pi_lora.scaling.config import window_of
from pi_lora.scaling.verify import config_of, rotary_frequencies
from pi_lora.types import Progress

# A bound on the relative error of sums that are made in float32.
FLOAT32_ERROR = 16 * torch.finfo(torch.float32).eps
# How often the bound on a sum of errors a row's product may differ.
DEVIATIONS = 8
# The logits that are compared, at the end of a text, where most context precedes them; and the longest text.
SCORED, LONGEST = 256, 2048
# Logits of a sound merge differ by less than so many epsilons of its dtype, relative to their size; and by this in
# float32, where they are sums in another order.
ROUNDINGS, ANOTHER_ORDER = 10, 1e-3
# Problems that a message names.
SHOWN = 3
FAILED = "{}: the merged weights failed the check and are not kept: {}"


def check_model(model: Model, expected: PreTrainedModel, tensors: Sequence[OutputTensor], folder: Path) -> None:
    """Raise ModelError if the model that transformers builds from the config in `folder` is not `expected`, that of the
    run: names and shapes of weights, ties, rotary frequencies. Both are on the meta device.
    """
    config = read_config(folder)
    with quiet_loading():
        built, report = type(expected).from_pretrained(
            None,
            config=config_of(model.kind, config),
            state_dict={tensor.name: torch.empty(tensor.source.shape, device="meta") for tensor in tensors},
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    problems = [f"{name} is missing" for name in report["missing_keys"]]
    problems += [f"{name} is {list(own)} instead of {list(other)}" for name, own, other in report["mismatched_keys"]]
    problems += [f"{tensor.name} is tied" for tensor in tensors if tensor.name in built.all_tied_weights_keys]
    frequencies = rotary_frequencies(built)
    same = all(torch.equal(values, frequencies[name]) for name, values in rotary_frequencies(expected).items())
    if not same or window_of(config) != model.window:
        problems.append("its scaling is not the run's")
    if problems:
        shown = "; ".join(sorted(problems)[:SHOWN])
        raise ModelError(f"{model.base}: does not make the model of the config: {shown}; download all of its files")


def check_tensors(run: Path, tensors: Sequence[OutputTensor], folder: Path, progress: Progress) -> str:
    """Compare the files in `folder` with the `tensors` that they should hold, read back a few rows at a time: copies
    bit by bit, sums by their product with random signs and in some rows number by number. Return a line for the user;
    raise ModelError with the first tensor that differs.
    """
    written = read_weights(str(folder), partial(find_file, str(folder)))

    def check(tensor: OutputTensor) -> None:
        if not _is_written(tensor, written.get(tensor.name)):
            raise ModelError(FAILED.format(run, f"{tensor.name} is not that of base + adapter"))

    in_threads(check, tensors, progress, "checking")
    summed = sum(tensor.delta is not None for tensor in tensors)
    return f"checked: {summed} tensors are base + adapter, {len(tensors) - summed} are copies"


def _is_written(tensor: OutputTensor, stored: StoredTensor | None) -> bool:
    """Whether a tensor was written as a copy, or as `W + scaling B A`, added in float32 and rounded once."""
    if stored is None or (stored.dtype, stored.shape) != (tensor.dtype, tensor.source.shape):
        return False
    if isinstance(tensor.delta, LowRank):
        return _agrees(tensor.source, tensor.delta, stored)
    return all(map(torch.equal, tensor.blocks(), stored.blocks()))


def _agrees(source: StoredTensor, delta: LowRank, stored: StoredTensor) -> bool:
    """Whether a stored tensor is the sum: each row by its product with random signs, and one of each block number by
    number.
    """
    a, b = delta.a.whole().double(), delta.b.whole().double() * delta.scaling
    kind = torch.finfo(stored.dtype)
    # Products of 16-bit numbers are exact in float32.
    columns, wide = stored.shape[1], torch.float64 if stored.dtype.itemsize > 2 else torch.float32
    signs = torch.randint(2, (columns,), generator=torch.Generator().manual_seed(0), dtype=wide) * 2 - 1
    added = (b @ (a @ signs.double())).to(wide)
    # By row, how far float32 may have moved the update of a number, or the smallest numbers of the dtype a rounded one.
    slack = (b.norm(dim=1) * a.norm(dim=0).max()).float() * FLOAT32_ERROR + kind.tiny * kind.eps
    for start, stop in spans(stored.shape):
        base, written = (tensor.rows(start, stop).to(wide) for tensor in (source, stored))
        error = written @ signs - (base @ signs + added[start:stop])
        bound = written.norm(dim=1) * (kind.eps / 2 + FLOAT32_ERROR) + slack[start:stop] * columns**0.5
        # Errors of at most e_j in n numbers add up to more than 8 |e| once in 10^13 rows (Hoeffding 1963, theorem 2).
        if not (error.abs() <= DEVIATIONS * bound).all():
            return False
        # Rounding is monotone: a number lies between the rounded ends of the interval around its exact value.
        exact = (base[0].double() + b[start] @ a).float()
        moved = exact.abs() * FLOAT32_ERROR + slack[start]
        low, high = (exact - moved).to(stored.dtype), (exact + moved).to(stored.dtype)
        if not ((low <= written[0]) & (written[0] <= high)).all():
            return False
    return True


def check_logits(model: Model, run: Path, tensors: Sequence[OutputTensor], merged: Path) -> str:
    """Compare logits of the folder `merged`, loaded as a user would, with those of base + the adapter `run`, both in
    float32 and whole. Return a line for the user; raise ModelError if they differ by more than rounding explains.
    """
    needed = sum(math.prod(tensor.source.shape) for tensor in tensors) * torch.float32.itemsize
    if needed > (free := free_memory(device())):
        return f"logits not compared: a model takes {needed / 1e9:.1f} GB in float32, {free / 1e9:.1f} GB are free"
    # Imported here: PEFT takes seconds, and merging does without.
    from pi_lora.models.adapter import load_adapter

    ids = model.tokenizer(inspect.getsource(argparse), verbose=False)["input_ids"][: min(model.window, LONGEST)]
    with quiet_loading():
        tuned = _logits(load_adapter(model.load_weights(torch.float32), run), ids)
        logits = _logits(find(str(merged), permissions=model.permissions).load("float32").model, ids)
    difference = float((logits - tuned).norm() / (tuned - tuned.mean(dim=-1, keepdim=True)).norm())
    line = f"logits at {len(ids)} tokens differ by {difference:.1e} of their size"
    epsilon = max(torch.finfo(tensor.dtype).eps for tensor in tensors if tensor.dtype.is_floating_point)
    if not difference <= max(ANOTHER_ORDER, ROUNDINGS * epsilon):
        raise ModelError(FAILED.format(run, line))
    return line


@torch.no_grad()
def _logits(model: Any, ids: list[int]) -> torch.Tensor:
    tokens = torch.tensor([ids], device=device())
    return torch.as_tensor(model.eval()(tokens, logits_to_keep=SCORED, use_cache=False).logits[0]).double().cpu()
