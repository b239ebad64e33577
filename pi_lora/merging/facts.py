"""What is written about a merge beside the weights (`merge.json`): what was merged, and how the check came out."""

from pathlib import Path

from pydantic import BaseModel

MERGE_FILE = "merge.json"
# How far logits may differ, as a multiple of what rounding weights at random changes in them; in sound merges it is 1.3
# at most (docs/merging.md). And what adding in another order changes in float32, in the unit of `Agreement.relative`.
MARGIN, LEAST = 3.0, 1e-4


class Agreement(BaseModel, frozen=True):
    """How far merged logits agree with base + adapter over the last `scored` of `length` tokens.

    `largest`: the largest difference; `relative`: its root mean square over that of the logits; `same_first`: the share
    of tokens with the same most likely next token; in the unit of `relative`, `tuning` is what the adapter changed, and
    `rounding` what rounding the merged weights changes, as it was measured with random roundings.
    """

    length: int
    scored: int
    largest: float
    relative: float
    same_first: float
    tuning: float
    rounding: float

    @property
    def tolerance(self) -> float:
        """The largest `relative` that rounding explains."""
        return max(LEAST, MARGIN * self.rounding)


class Check(BaseModel, frozen=True):
    """The agreements at all lengths; `how` is whole or layer by layer, `skipped` the reason for making no check,
    `rounding` the coarsest dtype that the merged weights have gone through.
    """

    rounding: str
    how: str
    agreements: tuple[Agreement, ...] = ()
    skipped: str | None = None

    def problem(self) -> str | None:
        """Return why the merged weights are not the tuned model, or None. They may differ by rounding, and by less than
        half of what tuning changed: else the adapter was not added.
        """
        for each in self.agreements:
            size = f"at {each.length} tokens logits differ by {each.relative:.1e} of their size"
            if not each.relative <= each.tolerance:
                return f"{size}, which rounding to {self.rounding} does not explain (at most {each.tolerance:.1e})"
            if each.relative > max(each.tuning / 2, LEAST):
                tuning = f"after rounding to {self.rounding}, and tuning changes them by {each.tuning:.1e}"
                return f"{size} {tuning}: most of it would be lost; choose --dtype float32"
        return None

    def lines(self) -> list[str]:
        """Return the lines for the terminal and the model card."""
        if self.skipped:
            return [f"not checked: {self.skipped}"]
        how = "" if self.how == "whole" else f" {self.how}"
        return [
            f"checked{how} at {each.length} tokens: logits differ by {each.largest:.1e} at most, {each.relative:.1e} "
            f"of their size (rounding: {each.rounding:.1e}, tuning: {each.tuning:.1e}); the first choice is the same "
            f"for {each.same_first:.1%}"
            for each in self.agreements
        ]


class Merge(BaseModel, frozen=True):
    """What was merged: `onto` the stored or the quantized base; `untied` if a tied head became its own tensor. `scale`
    is L'/L, `window` L' in tokens; `check` None if there was none (yet); `assumed` what the adapter's folder does not
    say.
    """

    base: str
    run: str
    onto: str
    dtype: str
    scale: float
    window: int
    untied: bool
    assumed: str | None = None
    check: Check | None
    versions: dict[str, str]

    def lines(self) -> list[str]:
        """Return the lines for the terminal."""
        untied = ["the head was tied to the embeddings, but they diverged in tuning: it is a tensor of its own now"]
        assumed = [f"assumed: {self.assumed}"] if self.assumed else []
        return [*assumed, *(untied if self.untied else []), *(self.check.lines() if self.check else ["not checked"])]

    def card_rows(self) -> dict[str, str]:
        """Return the rows of the model card that not every merge has."""
        rows = {
            "assumed": self.assumed,
            "added onto": self.onto == "quantized" and "the base after the rounding to NF4 that it was tuned on",
            "head": self.untied and "was tied to the embeddings; they diverged, and are two tensors now",
        }
        return {name: row for name, row in rows.items() if row}


def read_merge(folder: Path) -> Merge:
    """Read what is written about the merge in `folder`."""
    return Merge.model_validate_json((folder / MERGE_FILE).read_text(encoding="utf-8"))
