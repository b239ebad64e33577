"""The check: the merged folder, loaded as a user would, against base + adapter, on real text up to the window."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM

from pi_lora.adapter import load_adapter
from pi_lora.errors import ModelError
from pi_lora.merge.agreement import Check, agreement, lengths_to_check
from pi_lora.merge.layerwise import streamed, streamed_tuned
from pi_lora.merge.plan import Plan
from pi_lora.model import BaseModel, device, load_model, load_tokenizer, quiet_loading
from pi_lora.rope import Config, window_of

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
    report = progress or (lambda done, total, note: None)
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
    from pi_lora.data.stdlib import stdlib_documents

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
