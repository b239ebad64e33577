"""A model before its weights are read: the base at one commit, the config, and the adapter or extension on the base.

`resolve_model` makes a `ModelSource` once for each command. Planning, packing, checks and merging take it. torch and
transformers are imported where they are used: a plan of a shipped model does without.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi_lora.errors import ModelError
from pi_lora.hub import download_file
from pi_lora.models.files import (
    BUILTIN,
    PROCESSOR_FILES,
    SETTINGS_FILE,
    TOKENIZER_FILES,
    VOCABULARY_FILES,
    find_file,
    find_files,
)
from pi_lora.models.shape import Shape
from pi_lora.recipe.data import Source
from pi_lora.recipe.schema import Recipe
from pi_lora.run import Fingerprint, Run
from pi_lora.scaling.config import COMPOSITE, Config, read_rope
from pi_lora.scaling.extension import Extension, extend_config, original_notes
from pi_lora.scaling.rope import Rope
from pi_lora.scaling.scalings import Method
from pi_lora.types import Permissions

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from pi_lora.models.weights import StoredTensor


@dataclass(frozen=True)
class Base:
    """A model with all weights, at one commit.

    Attributes:
        name: The hub id, folder or built-in model, as the user or an adapter names it.
        path: The folder of the files: of a hub id in the cache of the hub, where weights are downloaded when needed.
        commit: The commit of a hub id; None of a folder.
        permissions: Whether code of the model may run.
        config: The config as transformers completes it.
        config_class: The class of the config in transformers; None of a shipped config, which only plans read.
        code: The classes of the model's own Python code, if they may run, by their keys in `auto_map`.
        shipped_shape: The shape that is shipped with the config.
    """

    name: str
    path: Path
    commit: str | None
    permissions: Permissions
    config: Config
    config_class: Any = None
    code: Mapping[str, type] = field(default_factory=dict)
    shipped_shape: Shape | None = None

    @cached_property
    def rope(self) -> Rope:
        """The rope of the layers that attend to the whole window, unextended."""
        return Rope(self.config)

    @property
    def is_folder(self) -> bool:
        """Whether the model is a folder of this machine, whose path is not the same elsewhere."""
        return self.commit is None and not self.name.startswith(BUILTIN)

    def file(self, name: str) -> Path | None:
        """Return a file, of weights downloaded from the hub if necessary, or None if the model has no such file."""
        file = find_file(self.path, name)
        if file is None and self.commit and name.endswith(".safetensors"):
            return download_file(self.name, name, self.commit)
        return file

    def read_weights(self) -> "dict[str, StoredTensor]":
        """Return the tensors by name, of files that are downloaded if necessary; only headers are read.

        Raise ModelError if some are missing or damaged.
        """
        from pi_lora.models.weights import read_weights

        return read_weights(self.name, self.file)

    def download_weights(self) -> None:
        """Download all weights of a hub id into the folder."""
        if self.commit:
            self.read_weights()

    @cached_property
    def meta_model(self) -> "PreTrainedModel":
        """The unextended model on the meta device: every module with its shape, no memory for weights."""
        from pi_lora.models.quiet import quiet_loading
        from pi_lora.scaling.verify import build_on_meta

        with quiet_loading():
            return build_on_meta(self.config_class, self.config, what="this config.json")

    @cached_property
    def shape(self) -> Shape:
        """The shape from which memory and hours are planned; ModelError for a model without decoder layers."""
        if self.shipped_shape:
            return self.shipped_shape
        from pi_lora.models.shape import shape_of

        return shape_of(self.meta_model)

    @cached_property
    def isolates_sequences(self) -> bool:
        """Whether the model can keep the sequences of a row apart; texts that ask for it are else wrapped."""
        from pi_lora.models.attention import isolates_sequences

        return isolates_sequences(self.meta_model)

    @cached_property
    def weights_digest(self) -> str:
        """A digest of the weights; ModelError if there are none."""
        from pi_lora.models.weights import weights_digest

        return weights_digest(self.read_weights())

    def fingerprint(self, tokenizer: str, data: str) -> Fingerprint:
        """Return the fingerprint of a run of this base, from the digests of its tokenizer and data."""
        return Fingerprint(
            path=str(self.path.resolve()) if self.is_folder else None,
            commit=self.commit,
            weights=self.weights_digest,
            tokenizer=tokenizer,
            data=data,
        )

    def is_base_of(self, run: Run) -> bool:
        """Whether a run was tuned from these weights; True for a run without a fingerprint."""
        recorded = run.metadata.origin
        if recorded is None:
            return True
        if recorded.commit and recorded.commit == self.commit:
            return True
        return recorded.weights == self.weights_digest


@dataclass(frozen=True)
class ModelSource:
    """A base, or a base with an adapter or an extension, before any weights are read.

    Attributes:
        name: The model as the user names it.
        base: The base, at one commit.
        config: The config that the model is loaded under, with the keys of transformers 4 and 5.
        adapter: The folder of an adapter of the base, if the model is one.
        extension: How the base is extended, if that was asked for.
        dtype: The data type to load the weights in, if that was asked for.
    """

    name: str
    base: Base
    config: Config
    adapter: Path | None = None
    extension: Extension | None = None
    dtype: str | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.window:,} tokens, scale {self.scale:g}"

    @cached_property
    def rope(self) -> Rope:
        """The rope of the layers that attend to the whole window."""
        return Rope(self.config)

    @property
    def window(self) -> int:
        """The context window in tokens."""
        return self.rope.window

    @property
    def scale(self) -> float:
        """The factor L'/L by which the window is extended; under `pi` positions are divided by it."""
        return self.rope.scale

    @property
    def scaling(self) -> Method | None:
        """The scaling of the rotary frequencies; None for an unextended model. A config says nothing of `direct`."""
        return self.extension.scaling if self.extension else self.rope.method

    @property
    def original(self) -> int:
        """The window L before the extension, in tokens."""
        if self.extension:
            return self.extension.original_of(self.base.rope)
        # A config does not say by how much `direct` extended it.
        return self.run.metadata.original or self.rope.original

    @property
    def notes(self) -> list[str]:
        """Lines for the user about the extension, or about the window of a model that is not extended."""
        rope = self.base.rope
        return list(self.extension.notes(rope) if self.extension else original_notes(rope, rope.trained))

    @property
    def permissions(self) -> Permissions:
        """The permissions that the user gives."""
        return self.base.permissions

    @property
    def shape(self) -> Shape:
        """The shape of the base."""
        return self.base.shape

    @property
    def needs_own_config(self) -> bool:
        """Whether the base would be unscaled under the config of the base."""
        return read_rope(self.config) != read_rope(self.base.config)

    @cached_property
    def run(self) -> Run:
        """The folder of the run: of the adapter, or of fully tuned or merged weights."""
        return Run(self.adapter or self.base.path)

    @cached_property
    def recipe(self) -> Recipe | None:
        """The recipe that the model was tuned by, with the dtypes of the training; None if pi-lora did not tune it."""
        return self.run.with_dtypes(self.run.recipe) if self.run.has_recipe else None

    @cached_property
    def texts(self) -> list[Source]:
        """The texts that the model and its base were tuned on, as far as `run.json` and the recipes tell."""
        texts = Run(self.base.path).texts
        return texts + [text for text in self.run.texts if text not in texts]

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the run, or of the base."""
        from pi_lora.models.code import path_for_code
        from pi_lora.models.tokenizer import load_tokenizer

        folder = self._tokenizer_path
        commit = self.base.commit if folder == self.base.path else None
        trust = self.permissions.trust_remote_code
        return load_tokenizer(
            path_for_code(self.base.name, folder, commit) if trust else folder,
            window=self.window,
            revision=commit,
            trust_remote_code=trust,
            vocabulary=self.config.get("vocab_size"),
        )

    @property
    def _tokenizer_path(self) -> Path:
        # Adapters made elsewhere may have no tokenizer.
        if self.adapter and (self.adapter / SETTINGS_FILE).is_file():
            return self.adapter
        return self.base.path

    @cached_property
    def tokenizer_files(self) -> dict[str, Path]:
        """The files of the tokenizer by name. An adapter may lack some, which are those of its base."""
        files = find_files(self._tokenizer_path, TOKENIZER_FILES)
        of_base = find_files(self.base.path, VOCABULARY_FILES)
        lacking = of_base.keys() - files.keys()
        if lacking and replace(self, adapter=None).tokenizer.get_vocab() == self.tokenizer.get_vocab():
            return of_base | files
        return files

    @cached_property
    def processor_files(self) -> dict[str, Path]:
        """The files by name from which a composite processes images and sound; none of any other model."""
        names = PROCESSOR_FILES if COMPOSITE in self.config else ()
        return find_files(self.base.path, names)

    @property
    def typed_config(self) -> "PreTrainedConfig":
        """The config as an object of transformers."""
        from pi_lora.models.quiet import quiet_loading
        from pi_lora.scaling.verify import config_of

        with quiet_loading():  # transformers does not know vLLM's keys of a `longrope`
            return config_of(self.base.config_class, self.config)

    def extended(self, extension: Extension) -> "ModelSource":
        """Return this base extended; raise ScalingError if that is impossible, or transformers does not apply it."""
        config = extend_config(self.base.config, extension)
        if self.base.config_class:
            from pi_lora.models.composite import check_reads_text_alone
            from pi_lora.models.quiet import quiet_loading
            from pi_lora.scaling.verify import check_scaling

            with quiet_loading():
                check_reads_text_alone(self.base.meta_model)
                if extension.scaling != "direct":
                    check_scaling(self.base.meta_model, self.base.config, extension)
        return replace(self, config=config, extension=extension)

    def check_base_fingerprint(self) -> None:
        """Raise ModelError if the weights of the base are not those that the adapter was tuned on."""
        if self.adapter is None or self.permissions.allow_mismatch:
            return
        if not self.base.is_base_of(self.run):
            raise ModelError(
                f"{self.adapter}: {self.base.name} ({self.base.path}) has other weights than those that it was tuned "
                "on; bring them back, or use these with --allow-mismatch"
            )
