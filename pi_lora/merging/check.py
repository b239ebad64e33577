"""The check of a merge: the written tensors against base and adapter, and on request the logits."""

import argparse
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from transformers import AutoModelForCausalLM

from pi_lora.errors import ModelError
from pi_lora.merging.deltas import LowRank
from pi_lora.merging.layout import MergePlan, OutputTensor
from pi_lora.merging.tensors import StoredTensor, read_shards, spans
from pi_lora.models.device import device, dtype_named, free_memory
from pi_lora.models.model import Model
from pi_lora.models.stored import CONFIG_FILE
from pi_lora.models.weights import quiet_loading
from pi_lora.scaling.config import full_attention_rope, window_of
from pi_lora.scaling.verify import build_on_meta, config_of, rotary_frequencies
from pi_lora.types import Progress

# Random vectors of signs that each changed tensor is multiplied with.
VECTORS = 4
# A sum of rounding errors with random signs exceeds so many times their norm with a probability of 3e-14 (Hoeffding).
DEVIATIONS = 8.0
# Relative errors of sums that are made in float32: of each number, and of one after the sum over an adapter's rank.
FLOAT32 = 4 * torch.finfo(torch.float32).eps
# Logits that are compared, at the end of the text, where most context precedes them; and the longest text on a CPU.
SCORED, LONGEST_ON_CPU = 256, 2048
# Logits of sound merges differ by a few epsilons of their dtype, in units of their size, after all layers.
ROUNDINGS = 10
# Problems that a message names.
SHOWN = 3


class TensorCheck(BaseModel, frozen=True):
    """How many written tensors are base + adapter, and how many are copies; the root mean square of what tuning and
    rounding to `dtype` change in the former, relative to that of the weights.
    """

    summed: int
    copied: int
    dtype: str
    tuning: float
    rounding: float

    def lines(self) -> list[str]:
        """Return the lines for the terminal and the model card."""
        checked = f"checked: {self.summed} tensors are base + adapter, {self.copied} are copies"
        if not self.summed:
            return [checked]
        effects = f"tuning changes weights by {self.tuning:.1e} of their size, rounding to {self.dtype} by"
        lost = "rounding undoes much of so small a tuning; --dtype float32 keeps it"
        return [f"{checked}; {effects} {self.rounding:.1e}", *([lost] if self.tuning < 2 * self.rounding else [])]


class LogitCheck(BaseModel, frozen=True):
    """How far merged logits differ from those of base + adapter over the last `scored` of `length` tokens.

    `largest`: the largest difference; `relative`: the root mean square over that of the logits; `tuning`: what the
    adapter changed, in the same unit; `explained`: what rounding may change; `same_first`: the share of tokens with
    the same most likely next token.
    """

    length: int
    scored: int
    largest: float
    relative: float
    tuning: float
    explained: float
    same_first: float

    @property
    def agree(self) -> bool:
        """Whether rounding explains the difference, or it is less than half of what tuning changed."""
        return self.relative <= max(self.explained, self.tuning / 2)

    def lines(self) -> list[str]:
        """Return the lines for the terminal and the model card."""
        return [
            f"checked at {self.length} tokens: logits differ by {self.largest:.1e} at most, {self.relative:.1e} of "
            f"their size (tuning: {self.tuning:.1e}); the first choice is the same for {self.same_first:.1%}"
        ]


def check_model(found: Model, plan: MergePlan, folder: Path) -> None:
    """Raise ModelError if the model that transformers builds from the config in `folder` is not that of the run: names
    and shapes of weights, ties, rotary frequencies. It is built on the meta device, before any weight is written.
    """
    kind, trust = found.kind, found.permissions.remote_code
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    weights = {tensor.name: torch.empty(tensor.source.shape, device="meta") for tensor in plan.tensors}
    with quiet_loading():
        model, report = type(build_on_meta(kind, config, trust)).from_pretrained(
            None,
            config=config_of(kind, config),
            state_dict=weights,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        expected = rotary_frequencies(build_on_meta(kind, found.config, trust))
    frequencies = rotary_frequencies(model)
    problems = [f"the base lacks {name}" for name in sorted(report["missing_keys"])]
    problems += [f"{name} is {list(own)} instead of {list(built)}" for name, own, built in report["mismatched_keys"]]
    problems += [f"{name} is tied in config.json" for name in model.all_tied_weights_keys if name in weights]
    if frequencies.keys() != expected.keys() or not all(map(torch.equal, frequencies.values(), expected.values())):
        problems.append("the rotary frequencies are not the run's")
    if (full_attention_rope(config), window_of(config)) != (full_attention_rope(found.config), found.window):
        problems.append("the scaling in config.json is not the run's")
    if problems:
        more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ModelError(f"{found.base}: cannot be merged: {'; '.join(problems[:SHOWN])}{more}; download it again")


def check_tensors(found: Model, plan: MergePlan, folder: Path, progress: Progress) -> TensorCheck:
    """Compare the files in `folder` with `plan`: read each tensor back, a few rows at a time. A product of matrices is
    verified on random vectors (Freivalds 1977) and in one random row of each block, everything else bit by bit. Raise
    ModelError with the first tensor that differs.
    """
    shards = read_shards(str(folder), lambda name: path if (path := folder / name).is_file() else None)
    written = {tensor.name: tensor for shard in shards for tensor in shard}
    if other := sorted(written.keys() ^ {tensor.name for tensor in plan.tensors}):
        raise _failed(found, f"{other[0]} is missing or unknown")
    random = torch.Generator().manual_seed(0)
    energies = torch.zeros(3, dtype=torch.float64)
    total, done = sum(tensor.size for tensor in plan.tensors), 0
    for tensor in plan.tensors:
        stored = written[tensor.name]
        if (stored.dtype, stored.shape) != (tensor.dtype, tensor.source.shape):
            raise _failed(found, f"{tensor.name} has another dtype or shape")
        if tensor.delta is not None:
            energies += _check_sum(found, tensor, tensor.delta, stored, random)
        else:
            rows = tensor.source_rows()
            if not all(torch.equal(rows(*span).to(stored.dtype), stored.rows(*span)) for span in spans(stored.shape)):
                raise _failed(found, f"{tensor.name} differs from {tensor.source}")
        progress(done := done + tensor.size, total, "checking")
    tuning, rounding, size = energies.sqrt().tolist()
    summed = sum(tensor.delta is not None for tensor in plan.tensors)
    return TensorCheck(
        summed=summed,
        copied=len(plan.tensors) - summed,
        dtype=plan.dtype,
        tuning=tuning / (size or 1),
        rounding=rounding / (size or 1),
    )


def _check_sum(
    found: Model, tensor: OutputTensor, delta: LowRank, stored: StoredTensor, random: torch.Generator
) -> torch.Tensor:
    """Raise ModelError if a stored tensor is not `W + scaling B A` (of DoRA scaled), rounded once. Return the sums of
    squares of what tuning changed, of rounding errors, and of the tensor, all times the random vectors.
    """
    rows = tensor.source_rows()
    left, right = (matrix.double() for matrix in delta.matrices())
    left *= delta.scaling
    by_row, by_column = torch.ones(stored.shape[0], 1).double(), torch.ones(stored.shape[1], 1).double()
    if (magnified := delta.magnification(rows)) is not None:
        (by_column if delta.transposed else by_row)[:, 0] = magnified
    signs = torch.randint(0, 2, (stored.shape[1], VECTORS), generator=random).double() * 2 - 1
    inputs = by_column * signs
    low = left @ (right @ inputs)
    precision = torch.finfo(stored.dtype)
    # Of each number, relative to base and delta; and of the smallest.
    rounding = max(precision.eps / 2, FLOAT32)
    smallest = precision.smallest_normal * precision.eps * stored.shape[1] ** 0.5
    largest = left.norm(dim=1) * (right * by_column.T).norm()
    energies = torch.zeros(3, dtype=torch.float64)
    for start, stop in spans(stored.shape):
        span = slice(start, stop)
        base, values = rows(start, stop).double(), stored.rows(start, stop).double()
        untuned = base @ inputs
        expected, result = by_row[span] * (untuned + low[span]), values @ signs
        limit = DEVIATIONS * (rounding * (values.norm(dim=1) + by_row[span, 0] * largest[span]) + smallest)
        # One row exactly: as near as the number that is nearest in the stored dtype.
        row = int(torch.randint(start, stop, (), generator=random))
        exact = by_row[row] * (base[row - start] + left[row] @ right) * by_column[:, 0]
        terms = by_row[row] * (base[row - start].abs() + left[row].abs() @ right.abs()) * by_column[:, 0]
        nearest = (exact.to(stored.dtype).double() - exact).abs() + FLOAT32 * terms
        sums_agree = ((result - expected).abs() <= limit[:, None]).all()
        if not (sums_agree and ((values[row - start] - exact).abs() <= nearest).all()):
            raise _failed(found, f"{tensor.name} is not base + adapter in rows {start} to {stop - 1}")
        energies += torch.stack(
            [(expected - untuned).square().sum(), (result - expected).square().sum(), result.square().sum()]
        )
    return energies


def _failed(found: Model, problem: str) -> ModelError:
    return ModelError(f"{found.adapter}: the merged weights failed the check and are not kept: {problem}")


def compare_logits(found: Model, plan: MergePlan, merged: Path) -> LogitCheck:
    """Compare logits of the folder `merged`, loaded as a user would, with those of base + adapter, both in float32 and
    whole. Raise ModelError if a model does not fit in memory, or the logits differ by more than rounding explains.
    """
    needed = sum(tensor.size // tensor.dtype.itemsize for tensor in plan.tensors) * torch.float32.itemsize
    if needed > (free := free_memory(device())):
        sizes = f"a model takes {needed / 1e9:.1f} GB in float32, and {free / 1e9:.1f} GB are free"
        raise ModelError(f"{merged}: merged, but its logits are not compared: {sizes}; leave out --check logits")
    # Imported here: PEFT takes seconds, and merging does without.
    from pi_lora.models.adapter import load_adapter

    assert found.adapter
    longest = min(found.window, LONGEST_ON_CPU) if device().type == "cpu" else found.window
    ids = torch.tensor(found.tokenizer(inspect.getsource(argparse), verbose=False)["input_ids"][:longest])
    quantized = any(tensor.quantized for tensor in plan.tensors)
    with quiet_loading():
        base = found.load_weights(torch.float32, place="quantized" if quantized else "device")
        model = load_adapter(base, found.adapter)
        tuned = _logits(model, ids)
        with model.disable_adapter():
            untuned = _logits(model, ids)
        del base, model
        trust = found.permissions.remote_code
        full = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32, trust_remote_code=trust)
        logits = _logits(full.to(device()).eval(), ids)
    size = _rms(tuned - tuned.mean(dim=-1, keepdim=True))
    return LogitCheck(
        length=len(ids),
        scored=len(logits),
        largest=float((logits - tuned).abs().max()),
        relative=_rms(logits - tuned) / size,
        tuning=_rms(tuned - untuned) / size,
        explained=ROUNDINGS * torch.finfo(dtype_named(plan.dtype)).eps,
        same_first=float((logits.argmax(-1) == tuned.argmax(-1)).double().mean()),
    )


@torch.no_grad()
def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    answer = model(input_ids=ids[None].to(device()), logits_to_keep=min(SCORED, len(ids)), use_cache=False)
    logits: torch.Tensor = answer.logits[0].float().cpu()
    return logits


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean(dtype=torch.float64).sqrt())
