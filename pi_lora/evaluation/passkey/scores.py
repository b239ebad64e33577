"""Passkey scores."""

from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator

from pi_lora.evaluation.measurement import Result, Scores
from pi_lora.recipe.evaluation import PasskeyOptions
from pi_lora.types import Json


class PasskeyDepth(Result):
    """The trials at one depth: `k` as asked for, `distance` as placed, in tokens from the key to the end."""

    k: int
    distance: int | None = None
    success_rate: float = Field(ge=0, le=1)
    trials: int
    outcomes: list[bool] | None = None


class PasskeyLength(Result):
    """Passkey retrieval over `target` tokens of context; `k_max` in tokens, depths from the nearest."""

    target: int
    k_max: int
    depths: list[PasskeyDepth]


class PasskeyScores(Scores):
    """Passkey retrieval over `target` tokens of context; of several `lengths`, `target` is the longest."""

    measurement = "passkey"

    options: PasskeyOptions
    seed: int = 0
    decoding: str = "greedy"
    target: int
    k_max: int
    depths: list[PasskeyDepth]
    left_out: Json | None = None
    lengths: list[PasskeyLength] | None = Field(None, min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _of_the_longest(cls, content: Any) -> Any:
        # Former files of several lengths have no other numbers.
        if isinstance(content, dict) and content.get("lengths") and "target" not in content:
            longest = dict(content["lengths"][-1])
            return {**content, **{key: longest.get(key) for key in ("target", "k_max", "depths")}}
        return content

    @property
    def by_length(self) -> Sequence["PasskeyLength | PasskeyScores"]:
        """Every length of context that was measured, the shortest first."""
        return self.lengths or [self]
