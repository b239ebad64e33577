"""Base + adapter as full weights that every engine loads: planned by name, written a few rows at a time, checked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from transformers import PreTrainedConfig, PreTrainedModel

from pi_lora.errors import ModelError
from pi_lora.merging.check import check_logits, check_model, check_tensors
from pi_lora.merging.deltas import OutputTensor, match_tensors
from pi_lora.merging.writing import write_tensors
from pi_lora.models.composite import names_in
from pi_lora.models.files import is_local
from pi_lora.models.quantized import check_loadable, check_quantization, dequantized
from pi_lora.models.quiet import quiet_loading
from pi_lora.models.saving import save_history, save_without_weights
from pi_lora.models.source import ModelSource
from pi_lora.run import MERGE_FILE, MergeRecord
from pi_lora.scaling.config import Config
from pi_lora.scaling.verify import build_on_meta, config_of
from pi_lora.storage import write_json
from pi_lora.types import Progress

Check = Literal["tensors", "logits", "none"]
CHECKS: tuple[Check, ...] = get_args(Check)


@dataclass(frozen=True)
class Merge:
    """A merge whose tensors are matched by name, before any weights are read.

    Attributes:
        source: The model that is written: base, config, tokenizer.
        run: The folder of the adapter.
        expected: The module of the run's config on the meta device.
        tensors: The tensors to write.
        config: The config to write.
        lines: Messages for the user; checks add theirs.
    """

    source: ModelSource
    run: Path
    expected: PreTrainedModel
    tensors: list[OutputTensor]
    config: Config
    lines: list[str]

    @property
    def typed_config(self) -> PreTrainedConfig:
        """The config as an object of transformers."""
        with quiet_loading():
            return config_of(type(self.expected.config), self.config)

    def write_small_files(self, folder: Path) -> None:
        """Write config and tokenizer; raise ModelError if that config does not make the model of the run."""
        save_without_weights(self.source, self.config, folder)
        check_model(
            source=self.source,
            expected=self.expected,
            tensors=self.tensors,
            folder=folder,
        )

    def write_weights(self, folder: Path, check: Check, progress: Progress) -> None:
        """Write the weights, and compare the written tensors with base + adapter, and on request the logits.

        Raise ModelError if they differ, or if the base cannot be loaded to compute the logits.
        """
        if check == "logits":
            base = self.source.base
            check_loadable(base, base.read_weights())
        write_tensors(self.tensors, folder, progress)
        if check == "none":
            self.lines.append("not checked")
            return
        line = check_tensors(self.run, self.tensors, folder, progress)
        self.lines.append(line)
        if check == "logits":
            progress(0, 0, "comparing logits")
            line = check_logits(self.source, self.run, self.tensors, folder)
            self.lines.append(line)

    def write_history(self, folder: Path) -> None:
        """Write the history of the run and `merge.json`, as the last files: a folder with a recipe is a begun run."""
        base = self.source.base
        record = MergeRecord(
            base=str(base.path.resolve()) if base.is_folder else base.name,
            run=str(self.run.resolve()) if is_local(self.source.name) else self.source.name,
            checks=self.lines,
        )
        write_json(folder / MERGE_FILE, record.model_dump())
        save_history(self.source, folder)


@dataclass(frozen=True)
class Merged:
    """A merged model, which stands for the path of its folder.

    Attributes:
        folder: The folder of full weights.
        lines: Messages for the user, and the results of the checks.
        serving: The commands that serve the folder and check the server.
    """

    folder: Path
    lines: list[str]
    serving: list[str]

    def __fspath__(self) -> str:
        return str(self.folder)


def plan_merge(run: ModelSource, *, dtype: str | None) -> Merge:
    """Match the tensors of an adapter with those of the base, and check that they belong together.

    Args:
        run: The run, on the base that the user names, or on the base that it was tuned on.
        dtype: The dtype that floating tensors are cast to; by default the stored one.

    Raises:
        ModelError: `run` is no adapter, or the base is missing, damaged, of an unknown quantization, or another one.
    """
    adapter = run.adapter
    if adapter is None:
        raise ModelError(f"{run.name}: holds no adapter; name a run of lora tuning (full tuning needs no merge)")
    run.check_base_fingerprint()
    base = run.base
    check_quantization(base)
    plain_config = dict(run.config)
    plain_config.pop("quantization_config", None)
    with quiet_loading():
        expected = build_on_meta(base.config_class, plain_config)
    base_tensors = dequantized(base.read_weights(), base.config)
    tensors = match_tensors(
        model=expected,
        base=base_tensors,
        run=adapter,
        dtype=dtype,
    )
    largest = max(tensors, key=lambda tensor: tensor.size)
    stored_dtype = str(largest.dtype).removeprefix("torch.")
    config = {
        **plain_config,
        "architectures": [type(expected).__name__],
        "dtype": stored_dtype,
    }
    lines = []
    names = names_in(expected, [tensor.name for tensor in tensors])
    if any(name in expected.all_tied_weights_keys for name in names.values()):
        config["tie_word_embeddings"] = False
        lines.append("head: was tied to the embeddings, but they diverged: it is a tensor of its own now")
    return Merge(
        source=run,
        run=adapter,
        expected=expected,
        tensors=tensors,
        config=config,
        lines=lines,
    )
