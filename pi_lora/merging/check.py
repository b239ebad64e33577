"""The check of a merge: the model that its config describes, the written tensors, and on request the logits."""

import argparse
import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from pi_lora.errors import ModelError
from pi_lora.merging.deltas import LowRank
from pi_lora.merging.layout import OutputTensor
from pi_lora.merging.tensors import StoredTensor, read_shards, spans
from pi_lora.models.device import device, free_memory
from pi_lora.models.model import Model
from pi_lora.models.stored import CONFIG_FILE
from pi_lora.models.weights import Placement, quiet_loading
from pi_lora.scaling.config import full_attention_rope, window_of
from pi_lora.scaling.verify import build_on_meta, config_of, rotary_frequencies
from pi_lora.types import Progress

# Random vectors of signs that each changed tensor is multiplied with.
VECTORS = 2
# A sum of rounding errors with random signs exceeds so many times their norm with a probability of 3e-14 (Hoeffding).
DEVIATIONS = 8.0
# The relative error of sums that are made in float32.
FLOAT32_ERROR = 4 * torch.finfo(torch.float32).eps
# The logits that are compared, at the end of a text, where most context precedes them; and the longest text on a CPU.
SCORED, LONGEST_ON_CPU = 256, 2048
# Logits of a sound merge differ by less than so many epsilons of its dtype, relative to their size.
ROUNDINGS = 10
# Problems that a message names.
SHOWN = 3


class CheckFailed(ModelError):
    """Merged weights that are not base + adapter."""


def check_model(found: Model, tensors: Sequence[OutputTensor], folder: Path) -> None:
    """Raise ModelError if the model that transformers builds from the config in `folder` is not that of the run: names
    and shapes of weights, ties, rotary frequencies. It is built on the meta device, before any weight is written.
    """
    trust, config = found.permissions.remote_code, json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    with quiet_loading():
        expected, built = (build_on_meta(found.kind, each, trust) for each in (found.config, config))
        _, report = type(built).from_pretrained(
            None,
            config=config_of(found.kind, config),
            state_dict={tensor.name: torch.empty(tensor.shape, device="meta") for tensor in tensors},
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    problems = [f"{name} is missing" for name in report["missing_keys"]]
    problems += [f"{name} is {list(own)} instead of {list(other)}" for name, own, other in report["mismatched_keys"]]
    problems += [f"{tensor.name} is tied" for tensor in tensors if tensor.name in built.all_tied_weights_keys]
    frequencies = rotary_frequencies(built)
    same = all(torch.equal(values, frequencies[name]) for name, values in rotary_frequencies(expected).items())
    if (
        not same
        or full_attention_rope(config) != full_attention_rope(found.config)
        or window_of(config) != found.window
    ):
        problems.append("its scaling is not the run's")
    if problems:
        shown = "; ".join(sorted(problems)[:SHOWN])
        raise ModelError(f"{found.base}: does not make the model of the config: {shown}; download all of its files")


def check_tensors(found: Model, tensors: Sequence[OutputTensor], folder: Path, progress: Progress) -> list[str]:
    """Compare the files in `folder` with the `tensors` that they should hold, read back a few rows at a time: sums on
    random vectors (Freivalds 1977) and in one random row of each block, copies bit by bit. Return what to tell the
    user; raise ModelError with the first tensor that differs.
    """
    shards = read_shards(str(folder), lambda name: path if (path := folder / name).is_file() else None)
    written = {tensor.name: tensor for shard in shards for tensor in shard}
    random, squares = torch.Generator().manual_seed(0), torch.zeros(3, dtype=torch.float64)
    total, done = sum(tensor.size for tensor in tensors), 0
    for tensor in tensors:
        stored = written.get(tensor.name)
        if stored is None or (stored.dtype, stored.shape) != (tensor.dtype, tensor.shape):
            raise _failed(found, f"{tensor.name} is missing, or has another dtype or shape")
        if tensor.delta is None:
            rows = tensor.source_rows()
            same = all(torch.equal(rows(*span).to(tensor.dtype), stored.rows(*span)) for span in spans(tensor.shape))
        else:
            same, sums = _compare_sum(tensor, tensor.delta, stored, random)
            squares += sums
        if not same:
            raise _failed(found, f"{tensor.name} is not that of base + adapter")
        progress(done := done + tensor.size, total, "checking")
    summed = [tensor for tensor in tensors if tensor.delta]
    line = f"checked: {len(summed)} tensors are base + adapter, {len(tensors) - len(summed)} are copies"
    if not summed:
        return [line]
    tuning, rounding, size = squares.sqrt().tolist()
    effects = f"tuning changes weights by {tuning / size:.1e} of their size, rounding by {rounding / size:.1e}"
    lost = ["rounding undoes much of so small a tuning; --dtype float32 keeps it"]
    return [f"{line}; {effects}", *(lost if tuning < 2 * rounding else [])]


def _compare_sum(
    tensor: OutputTensor, delta: LowRank, stored: StoredTensor, random: torch.Generator
) -> tuple[bool, torch.Tensor]:
    """Return whether a stored tensor is `W + scaling B A` (DoRA scales it) in float64, rounded once; and the sums of
    squares of what tuning changed, of the rounding errors, and of the tensor, all times the random vectors.
    """
    rows, (left, right) = tensor.source_rows(), (matrix.double() for matrix in delta.matrices())
    left, (height, width) = left * delta.scaling, tensor.shape
    by_row, by_column = torch.ones(height).double(), torch.ones(width).double()
    if (factors := delta.dora_factors(rows)) is not None:
        by_row, by_column = (by_row, factors.double()) if delta.transposed else (factors.double(), by_column)
    right = right * by_column
    signs = torch.randint(0, 2, (VECTORS, width), generator=random).double() * 2 - 1
    inputs, added = signs * by_column, signs @ right.T @ left.T
    limits = torch.finfo(stored.dtype)
    precision, smallest = max(limits.eps / 2, FLOAT32_ERROR), limits.smallest_normal * limits.eps
    norms = left.norm(dim=1) * right.norm()
    same, squares = True, torch.zeros(3, dtype=torch.float64)
    for start, stop in spans(tensor.shape):
        span = slice(start, stop)
        base, values, scales = rows(start, stop).double(), stored.rows(start, stop).double(), by_row[span]
        untuned, result = inputs @ base.T, signs @ values.T
        expected = scales * (untuned + added[:, span])
        size = values.norm(dim=1) + scales.abs() * norms[span] + smallest * width**0.5
        same &= bool(((result - expected).abs() <= DEVIATIONS * precision * size).all())
        # One row exactly: no farther off than the nearest number of the stored dtype.
        row = int(torch.randint(stop - start, (), generator=random))
        scale, weights, update = scales[row], base[row] * by_column, left[start + row]
        exact = scale * (weights + update @ right)
        terms = scale.abs() * (weights.abs() + update.abs() @ right.abs())
        nearest = (exact.to(stored.dtype).double() - exact).abs()
        same &= bool(((values[row] - exact).abs() <= nearest + FLOAT32_ERROR * terms).all())
        squares += torch.stack([part.square().sum() for part in (expected - untuned, result - expected, result)])
    return same, squares


def check_logits(found: Model, tensors: Sequence[OutputTensor], merged: Path) -> list[str]:
    """Compare logits of the folder `merged`, loaded as a user would, with those of base + adapter, both in float32 and
    whole. Return what to tell the user; raise ModelError if they differ by more than rounding, or half of the tuning.
    """
    needed = sum(tensor.size // tensor.dtype.itemsize for tensor in tensors) * torch.float32.itemsize
    if needed > (free := free_memory(device())):
        return [f"logits not compared: a model takes {needed / 1e9:.1f} GB in float32, {free / 1e9:.1f} GB are free"]
    # Imported here: PEFT takes seconds, and merging does without.
    from pi_lora.models.adapter import load_adapter

    assert found.adapter
    longest = found.window if device().type != "cpu" else min(found.window, LONGEST_ON_CPU)
    ids = torch.tensor([found.tokenizer(inspect.getsource(argparse), verbose=False)["input_ids"][:longest]])
    place: Placement = "quantized" if any(tensor.quantized for tensor in tensors) else "device"
    with quiet_loading():
        model = load_adapter(found.load_weights(torch.float32, place=place), found.adapter)
        tuned = _logits(model, ids)
        with model.disable_adapter():
            untuned = _logits(model, ids)
        del model
        trust = found.permissions.remote_code
        full = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32, trust_remote_code=trust)
        logits = _logits(full.to(device()).eval(), ids)
    differences = (logits - tuned, tuned - untuned, tuned - tuned.mean(dim=-1, keepdim=True))
    difference, tuning, size = (float(each.square().mean().sqrt()) for each in differences)
    same = (logits.argmax(-1) == tuned.argmax(-1)).double().mean()
    line = f"logits at {ids.shape[1]} tokens differ by {difference / size:.1e} of their size, tuning changes them by "
    line += f"{tuning / size:.1e}; the first choice is the same for {same:.1%}"
    precision = ROUNDINGS * max(torch.finfo(tensor.dtype).eps for tensor in tensors if tensor.dtype.is_floating_point)
    if not difference <= max(precision * size, tuning / 2):
        raise _failed(found, line)
    return [line]


@torch.no_grad()
def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids.to(device()), logits_to_keep=SCORED, use_cache=False).logits
    return logits[0].double().cpu()


def _failed(found: Model, problem: str) -> "CheckFailed":
    return CheckFailed(f"{found.adapter}: the merged weights failed the check and are not kept: {problem}")
