"""The reference to a model: the name and the options that a user gives."""

import os
from dataclasses import dataclass
from typing import TypedDict

from pi_lora.errors import PiLoraError
from pi_lora.scaling.extension import Extension
from pi_lora.types import Permissions


class ModelOptions(TypedDict, total=False):
    """The options of `load` and `resolve`: the fields of `ModelRef` without the name."""

    base: str | os.PathLike[str] | None
    revision: str | None
    extension: Extension | None
    dtype: str | None
    trust_remote_code: bool
    allow_mismatch: bool


@dataclass(frozen=True)
class ModelRef:
    """A model as a user names it; a string or a path is short for one without options.

    Attributes:
        name: A hub id, a folder of full weights, `builtin:tiny`, or a run or adapter, which brings its own scaling.
        base: The place of the base of a run or adapter, if it moved.
        revision: The branch, tag or commit of a hub id; all files are read at one commit of it.
        extension: The extension of a plain base that was not tuned, such as `Extension(target=16384)`.
        dtype: The data type of the loaded weights: `float32`, `bfloat16` or `float16`. By default as stored on a GPU,
            float32 on a CPU, and bfloat16 after QLoRA.
        trust_remote_code: Run Python code that the model brings.
        allow_mismatch: Use a run although its base or data changed.
    """

    name: str | os.PathLike[str]
    base: str | os.PathLike[str] | None = None
    revision: str = "main"
    extension: Extension | None = None
    dtype: str | None = None
    trust_remote_code: bool = False
    allow_mismatch: bool = False

    @property
    def permissions(self) -> Permissions:
        """The permissions that the user gives."""
        return Permissions(self.trust_remote_code, self.allow_mismatch)

    def __post_init__(self) -> None:
        """Raise PiLoraError for a name that is none, such as a loaded model."""
        if not isinstance(self.name, str | os.PathLike):
            kind = type(self.name).__name__
            raise PiLoraError(
                f"ModelRef: {kind} is no name of a model; give a name, or use the {kind} without ModelRef"
            )

    @classmethod
    def of(cls, model: str | os.PathLike[str]) -> "ModelRef":
        """Return a name as a reference without options."""
        return model if isinstance(model, ModelRef) else cls(model)

    def __fspath__(self) -> str:
        return os.fspath(self.name)
