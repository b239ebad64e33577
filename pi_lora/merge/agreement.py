"""Whether two models say the same: their logits on the same tokens, beside what tuning and rounding change."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
