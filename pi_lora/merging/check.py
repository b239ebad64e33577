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
from pi_lora.merging.deltas import LowRank, OutputTensor, Stack
from pi_lora.merging.writing import in_threads
from pi_lora.model_ref import ModelRef
from pi_lora.models.composite import names_in
from pi_lora.models.device import device, free_memory
from pi_lora.models.files import find_file, read_config
from pi_lora.models.loaded import MAX_PROBLEMS, load_base, load_model, load_on_meta, problems_of
from pi_lora.models.quiet import quiet_loading
from pi_lora.models.resolve import resolve_model
from pi_lora.models.source import ModelSource
from pi_lora.models.weights import StoredTensor, read_weights, spans
from pi_lora.scaling.rope import Rope
from pi_lora.scaling.verify import rotary_frequencies
from pi_lora.types import Progress

# A bound on the relative error of sums that are made in float32.
FLOAT32_ERROR = 16 * torch.finfo(torch.float32).eps
# The longest text, in tokens, and the positions at its end whose logits are compared: most context precedes them.
MAX_TEXT_TOKENS = 2048
NUM_LOGIT_POSITIONS = 256
# Relative to their size, logits of a sound merge differ by less than this many epsilons of the dtype.
MAX_LOGIT_EPSILONS = 10
# The lowest bound, for float32: the two models add in another order.
MIN_LOGIT_TOLERANCE = 1e-3
CHECK_FAILED = "{}: the merged weights failed the check and are not kept: {}"


def check_model(source: ModelSource, expected: PreTrainedModel, tensors: Sequence[OutputTensor], folder: Path) -> None:
    """Raise ModelError if the config in `folder` does not make the model of the run, `expected`.

    Names and shapes of weights, ties and rotary frequencies are compared, with both models on the meta device.
    """
    config = read_config(folder)
    state_dict = {}
    for tensor in tensors:
        state_dict[tensor.name] = torch.empty(tensor.source.shape, device="meta")
    built, report = load_on_meta(expected, config, state_dict)
    problems = problems_of(report)
    for stored_name, name in names_in(built, state_dict).items():
        if name in built.all_tied_weights_keys:
            problems.append(f"{stored_name} is tied")
    same_window = Rope(config).window == source.window
    frequencies = rotary_frequencies(built)
    expected_frequencies = rotary_frequencies(expected)
    same_frequencies = frequencies.keys() == expected_frequencies.keys() and all(
        torch.equal(frequencies[name], values) for name, values in expected_frequencies.items()
    )
    if not same_window or not same_frequencies:
        problems.append("its scaling is not the run's")
    if problems:
        named = "; ".join(sorted(problems)[:MAX_PROBLEMS])
        raise ModelError(
            f"{source.base.name}: the files do not match the config: {named}; download all files of the model"
        )


def check_tensors(run: Path, tensors: Sequence[OutputTensor], folder: Path, progress: Progress) -> str:
    """Compare the files in `folder` with the `tensors` that were to be written, and return a line for the user.

    A few rows are read at a time. Copies are compared bit by bit, sums number by number. Raise ModelError with the
    first tensor that differs.
    """
    written = read_weights(str(folder), partial(find_file, folder))

    def check(tensor: OutputTensor) -> None:
        if not _is_written(tensor, written.get(tensor.name)):
            raise ModelError(CHECK_FAILED.format(run, f"{tensor.name} is not that of base + adapter"))

    in_threads(
        check,
        tensors,
        progress=progress,
        note="checking",
    )
    num_sums = sum(tensor.delta is not None for tensor in tensors)
    num_trained = sum(tensor.source.path != tensor.file for tensor in tensors)
    num_copies = len(tensors) - num_sums - num_trained
    return (
        f"checked: {num_sums} tensors are base + adapter, "
        f"{num_trained} were trained in full, "
        f"{num_copies} are the base's"
    )


def _is_written(tensor: OutputTensor, stored: StoredTensor | None) -> bool:
    """Whether a tensor was written as a copy, or as `W + scaling B A`, added in float32 and rounded once."""
    source = tensor.source
    delta = tensor.delta
    if stored is None or stored.dtype != tensor.dtype or stored.shape != source.shape:
        return False
    if isinstance(delta, Stack):
        source_rows = source.as_matrix()
        stored_rows = stored.as_matrix()
        return all(_is_sum(source_rows, part, stored_rows, first) for first, part in delta.placed())
    if isinstance(delta, LowRank) and not delta.magnitude:
        return _is_sum(source, delta, stored)
    return all(map(torch.equal, tensor.blocks(), stored.blocks()))


def _is_sum(source: StoredTensor, delta: LowRank, stored: StoredTensor, first: int = 0) -> bool:
    """Whether every number of a stored matrix is `W + scaling B A`, rounded once. It begins at row `first` of its
    tensor.
    """
    stored_kind = torch.finfo(stored.dtype)
    # Merging adds in float32: what is stored in float32 is computed with more digits.
    compute_dtype = torch.float64 if stored.dtype.itemsize > 2 else torch.float32
    b, a = delta.factors()
    a = a.to(compute_dtype)
    b = b.to(compute_dtype) * delta.scaling
    # By row, how far float32 may have moved the update of a number.
    longest = a.norm(dim=0).max()
    update_error = b.norm(dim=1, keepdim=True) * longest * FLOAT32_ERROR
    # Or how far the smallest numbers of the dtype may have moved a rounded one.
    slack = update_error + stored_kind.tiny * stored_kind.eps
    for start, stop in spans(delta.shape):
        rows = (first + start, first + stop)
        exact = source.rows(*rows).to(compute_dtype)
        exact.addmm_(b[start:stop], a)
        written = stored.rows(*rows)
        # Rounding is monotone: a number lies between the rounded ends of the interval around its exact value.
        half_width = exact.abs() * FLOAT32_ERROR + slack[start:stop]
        low = (exact - half_width).to(stored.dtype)
        high = (exact + half_width).to(stored.dtype)
        is_between = (low <= written) & (written <= high)
        if not is_between.all():
            return False
    return True


def check_logits(source: ModelSource, run: Path, tensors: Sequence[OutputTensor], merged: Path) -> str:
    """Compare the logits of the folder `merged` with those of base + the adapter `run`; return a line for the user.

    Both models are loaded whole and in float32, the merged one as a user would. Raise ModelError if the logits differ
    by more than rounding explains.
    """
    num_parameters = sum(math.prod(tensor.source.shape) for tensor in tensors)
    needed = num_parameters * torch.float32.itemsize / 1e9
    free = free_memory(device()) / 1e9
    if needed > free:
        return f"logits not compared: a model takes {needed:.1f} GB in float32, {free:.1f} GB are free"
    # Imported here: PEFT takes seconds, and merging does without.
    from pi_lora.models.adapter import load_adapter

    text = inspect.getsource(argparse)
    all_ids = source.tokenizer(text, verbose=False)["input_ids"]
    ids = all_ids[: min(source.window, MAX_TEXT_TOKENS)]
    with quiet_loading():
        # Without a name, the tuned model is freed before the merged one is loaded.
        tuned_logits = _logits(
            load_adapter(load_base(source, torch.float32), run),
            ids,
        )
        merged_source = resolve_model(ModelRef(merged, **vars(source.permissions)))
        merged_model = load_model(merged_source, "float32")
        merged_logits = _logits(merged_model.module, ids)
    centered = tuned_logits - tuned_logits.mean(dim=-1, keepdim=True)
    distance = (merged_logits - tuned_logits).norm()
    difference = float(distance / centered.norm())
    line = f"logits at {len(ids)} tokens differ by {difference:.1e} of their size"
    dtypes = {tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point}
    epsilon = max(torch.finfo(dtype).eps for dtype in dtypes)
    tolerance = max(MIN_LOGIT_TOLERANCE, MAX_LOGIT_EPSILONS * epsilon)
    # A difference of NaN is refused as well.
    if not difference <= tolerance:
        raise ModelError(CHECK_FAILED.format(run, line))
    return line


@torch.no_grad()
def _logits(model: Any, ids: list[int]) -> torch.Tensor:
    tokens = torch.tensor([ids], device=device())
    model.eval()
    output = model(tokens, logits_to_keep=NUM_LOGIT_POSITIONS, use_cache=False)
    logits: torch.Tensor = output.logits[0]
    return logits.double().cpu()
