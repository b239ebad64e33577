"""The deltas of an adapter, matched with the tensors of the base, and the merged tensors, a few rows at a time."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from pi_lora.errors import ModelError
from pi_lora.models.composite import names_in
from pi_lora.models.device import dtype_named
from pi_lora.models.experts import Layout, adapted_parameters
from pi_lora.models.files import ADAPTER_WEIGHTS_FILE, AdapterSettings, read_adapter_settings
from pi_lora.models.weights import COMPUTED, StoredTensor, finite, keep, read_header, spans

PEFT_PREFIX = "base_model.model."
# The end of the name of the rows that PEFT saves of an embedding or a head.
TRAINED_ROWS = ".token_adapter.trainable_tokens_delta"
# Initializations that do not change the base; PiSSA, OLoRA, CorDA and LoftQ subtract theirs from it.
UNCHANGED_BASE_INITIALIZATIONS = (True, False, "gaussian", "orthogonal", "eva")
# Kinds of LoRA whose update is not a single matrix product, depends on the input, or is of layers that the base lacks.
UNMERGEABLE_SETTINGS = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "monteclora_config",
    "use_bdlora",
)


@dataclass(frozen=True)
class LowRank:
    """`W + scaling B A` (Hu et al. 2021) of one matrix, with `a` of rank x inputs and `b` of outputs x rank.

    Of experts, PEFT 0.21 saves all A one below another, and the columns of all B by rank and expert. Projections that
    are joined share A. A transposed matrix has its inputs in rows.
    """

    a: StoredTensor
    b: StoredTensor
    scaling: float
    expert: int = 0
    num_experts: int = 1
    projection: int = 0
    num_projections: int = 1
    is_transposed: bool = False
    magnitude: StoredTensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix in the base."""
        outputs = self.b.shape[0] // self.num_projections
        inputs = self.a.shape[1]
        if self.is_transposed:
            return (inputs, outputs)
        return (outputs, inputs)

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return B and A in float32, or of a transposed matrix A and B transposed."""
        rank = self.a.shape[0] // self.num_experts
        start = self.expert * rank
        a = self.a.rows(start, start + rank).float()
        b_of_all = keep(self.b.whole)
        b_of_expert = b_of_all[:, self.expert :: self.num_experts]
        b = self._of_projection(b_of_expert)
        if self.is_transposed:
            return a.T, b.T
        return b, a

    def _of_projection(self, rows: torch.Tensor) -> torch.Tensor:
        of_projections = rows.chunk(self.num_projections)
        return of_projections[self.projection].float()

    def blocks(self, base: StoredTensor, first: int = 0) -> Iterator[torch.Tensor]:
        """Yield the merged matrix in float32, a few rows at a time. It begins at row `first` of the base."""
        b, a = self.factors()
        for start, stop in spans(self.shape):
            rows = base.rows(first + start, first + stop).float()
            rows.addmm_(b[start:stop], a, alpha=self.scaling)
            if self.magnitude:
                lengths = self._of_projection(self.magnitude.whole())
                factors = lengths[start:stop] / rows.norm(dim=1)
                rows *= factors[:, None]
            yield rows


@dataclass(frozen=True)
class Stack:
    """The changes of the matrices that a tensor of (experts, rows, columns) stacks."""

    num_experts: int
    parts: list[LowRank]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the base's tensor."""
        rows, columns = self.parts[0].shape
        num_projections = len(self.parts) // self.num_experts
        return (self.num_experts, num_projections * rows, columns)

    def transposed(self) -> "Stack":
        """Return the changes of a tensor that is stored with rows and columns exchanged."""
        parts = [replace(part, is_transposed=not part.is_transposed) for part in self.parts]
        return replace(self, parts=parts)

    def placed(self) -> Iterator[tuple[int, LowRank]]:
        """Yield the changes with the rows of the base, counted over all experts, at which they begin."""
        rows, _ = self.parts[0].shape
        for number, part in enumerate(self.parts):
            yield number * rows, part

    def blocks(self, base: StoredTensor) -> Iterator[torch.Tensor]:
        """Yield the merged tensor in float32, a few rows at a time."""
        for first, part in self.placed():
            yield from part.blocks(base.as_matrix(), first)


@dataclass(frozen=True)
class WithTrainedRows(StoredTensor):
    """An embedding or a head, `original`, with the stored rows in place of those of `tokens`; it is read in float32."""

    original: StoredTensor
    tokens: list[int]

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Read rows `start` to `stop` (exclusive)."""
        block = self.original.rows(start, stop).float()
        for number, token in enumerate(self.tokens):
            if start <= token < stop:
                block[token - start] = super().rows(number, number + 1)
        return block


# A tensor that was trained in full replaces the base's.
Change = StoredTensor | LowRank | Stack


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to be written in `dtype`: `source`, of the base or trained in full, with `delta` added.

    `file` holds the tensor in the base; the merged files have the same division.
    """

    name: str
    dtype: torch.dtype
    file: Path
    source: StoredTensor
    delta: LowRank | Stack | None = None

    @property
    def size(self) -> int:
        """The size in bytes."""
        return math.prod(self.source.shape) * self.dtype.itemsize

    def blocks(self) -> Iterator[torch.Tensor]:
        """Yield the merged tensor, a few rows at a time: added in float32, cast once."""
        blocks = self.delta.blocks(self.source) if self.delta else self.source.blocks()
        for block in blocks:
            cast = block.to(self.dtype)
            if cast.is_floating_point() and not finite(cast):
                raise ModelError(
                    f"{self.source.path}: {self.name}: has infinite or NaN values once merged; "
                    f"base or adapter is damaged, or its values do not fit {self.dtype}"
                )
            yield cast


def read_adapter(folder: Path, model: PreTrainedModel, originals: Mapping[str, StoredTensor]) -> dict[str, Change]:
    """Return the changes of the adapter in `folder` by the name of the weight in `model`, those of experts by the names
    of the matrices that the weight stacks; only headers are read. `originals` are the tensors of the base.

    Raise ModelError if the adapter is missing, damaged, incomplete, or of a kind that cannot be merged.
    """
    settings = read_adapter_settings(folder)
    file = folder / ADAPTER_WEIGHTS_FILE
    stored = read_header(file)
    if not min((tensor.size for tensor in stored.values()), default=0):
        raise ModelError(
            f"{file}: holds no weights or empty ones, as DeepSpeed saves those that it has not gathered; save it again"
        )
    all_parts = {}
    for key, tensor in stored.items():
        name = key.removeprefix(PEFT_PREFIX).removesuffix(".weight")
        all_parts[name] = tensor
    parts = _without_copies(all_parts)
    _check_mergeable(folder, settings, parts)
    changes: dict[str, Change] = {}
    layout = Layout(model)
    adapted = adapted_parameters(model, settings.target_parameters or ())
    modules = [*dict.fromkeys(name.rpartition(".")[0] for name in parts if name.endswith((".lora_A", ".lora_B")))]
    names = names_in(model, [f"{module}.weight" for module in modules])
    needed = ["lora_A", "lora_B", "lora_magnitude_vector"] if settings.use_dora else ["lora_A", "lora_B"]
    for module in modules:
        for part in needed:
            if f"{module}.{part}" not in parts:
                raise ModelError(f"{file}: lacks {module}.{part}; tune or download it again")
        a = parts.pop(f"{module}.lora_A")
        b = parts.pop(f"{module}.lora_B")
        name = names[f"{module}.weight"]
        parameter = adapted.get(name.removesuffix(".weight"))
        weight = parameter or name
        rank = a.shape[0] // layout.num_experts(weight)
        change = LowRank(
            a,
            b,
            scaling=settings.scaling(parameter or module, rank),
            magnitude=parts.pop(f"{module}.lora_magnitude_vector", None),
        )
        changes |= _divided(change, layout, weight)
    others = {}
    for tensor in parts.values():
        name = tensor.name.removeprefix(PEFT_PREFIX)
        # A trained bias is saved under the layer that PEFT has wrapped.
        name = name.replace(".base_layer.", ".").replace(TRAINED_ROWS, ".weight")
        others[name] = tensor
    saved = _by_name_in(model, others)
    changes |= saved
    for module, tokens in settings.trainable_token_indices.items():
        for name, rows in saved.items():
            original = originals.get(name)
            # Rows that are left out here are refused for their shape.
            if (
                original
                and rows.name.endswith(module + TRAINED_ROWS)
                and len(tokens) == rows.shape[0]
                and max(tokens) < original.shape[0]
            ):
                whole = vars(replace(rows, shape=original.shape))
                changes[name] = WithTrainedRows(**whole, original=original, tokens=tokens)
    return changes


def _without_copies(parts: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Leave out the copies that PEFT saves of embeddings and head beside what was trained, if one of them has an
    adapter or the vocabulary was extended.
    """
    trained = {}
    for name, tensor in parts.items():
        module, _, part = name.rpartition(".")
        is_base = part == "base_layer" and f"{module}.lora_A" in parts
        is_copy = part in ("original_module", "modules_to_save") and module in parts
        if not is_base and not is_copy:
            trained[name] = tensor
    return trained


def _divided(change: LowRank, layout: Layout, weight: str) -> Iterator[tuple[str, LowRank]]:
    """Yield the names of the matrices that a weight of the model joins, and their parts of its change."""
    names = layout.parts(weight)
    num_experts = layout.num_experts(weight)
    num_projections = len(names) // num_experts
    for number, name in enumerate(names):
        yield (
            name,
            replace(
                change,
                expert=number // num_projections,
                num_experts=num_experts,
                projection=number % num_projections,
                num_projections=num_projections,
                is_transposed=layout.is_transposed(weight),
            ),
        )


def _check_mergeable(folder: Path, settings: AdapterSettings, parts: Iterable[str]) -> None:
    """Raise ModelError with the properties of an adapter that keep it from being merged."""
    obstacles = [key for key in UNMERGEABLE_SETTINGS if getattr(settings, key, None)]
    if settings.init_lora_weights not in UNCHANGED_BASE_INITIALIZATIONS:
        obstacles.append(f"init_lora_weights {settings.init_lora_weights}")
    if any("lora_embedding" in name for name in parts):
        obstacles.append("LoRA on embeddings")
    if obstacles:
        raise ModelError(
            f"{folder}: {', '.join(obstacles)}: cannot be merged; convert it with PEFT to LoRA on linear layers"
        )


def match_tensors(
    model: PreTrainedModel,
    base: Mapping[str, StoredTensor],
    run: Path,
    dtype: str | None,
) -> list[OutputTensor]:
    """Match the changes of an adapter with the tensors of the base, by name, and return the tensors to write.

    Args:
        model: The model of the run, on the meta device.
        base: The tensors of the base, under names that transformers changes to those of the model.
        run: The folder of the adapter.
        dtype: The dtype that floating tensors are cast to; by default the stored one.

    Raises:
        ModelError: Changes do not fit the base; the message names all of them.
    """
    tied = model.all_tied_weights_keys
    stored = _by_name_in(model, base)
    sources = dict(stored)
    for name, twin in tied.items():
        if twin in stored:
            sources.setdefault(name, stored[twin])
        # Some files hold a tied weight under the name of the head alone.
        if name in stored:
            sources.setdefault(twin, stored[name])
    changes = read_adapter(run, model, sources)
    _stack_experts(changes, stored, Layout(model))
    problems = [
        f"{name} {list(change.shape)}"
        for name, change in changes.items()
        if name not in sources or change.shape != sources[name].shape
    ]
    if problems:
        raise ModelError(
            f"{run / ADAPTER_WEIGHTS_FILE}: does not fit its base, which has no {'; '.join(problems)}; "
            "name the base that it was tuned from"
        )

    def output_tensor(name: str) -> OutputTensor:
        source = sources[name]
        change = changes.get(name)
        output = OutputTensor(
            name=stored[name].name if name in stored else name,
            dtype=dtype_named(dtype) if dtype and source.dtype.is_floating_point else source.dtype,
            file=source.path,
            source=source,
        )
        if isinstance(change, StoredTensor):
            return replace(output, source=change)
        return replace(output, delta=change)

    def is_copy(name: str) -> bool:
        twin = tied.get(name)
        if twin not in sources or _diverged(sources[name], sources[twin]):
            return False
        return not _diverged(changes.get(name), changes.get(twin))

    outputs = []
    for name in sources:
        if not name.endswith(COMPUTED) and not is_copy(name):
            outputs.append(output_tensor(name))
    return outputs


def _stack_experts(changes: dict[str, Change], stored: Mapping[str, StoredTensor], layout: Layout) -> None:
    """Replace the changes of the matrices that a stored tensor stacks by one for the tensor."""
    for name, tensor in stored.items():
        if len(tensor.shape) != 3:
            continue
        num_experts = tensor.shape[0]
        names = [f"{name}[{expert}]" for expert in range(num_experts)]
        if layout.num_experts(name) > 1:
            names = layout.parts(name)
        if changes.keys() >= set(names):
            parts: list[Any] = [changes.pop(part) for part in names]
            stack = Stack(num_experts, parts)
            if stack.shape != tensor.shape:
                stack = stack.transposed()
            changes[name] = stack


def _by_name_in(model: PreTrainedModel, stored: Mapping[str, Any]) -> dict[str, Any]:
    names = names_in(model, stored)
    return {names[name]: value for name, value in stored.items()}


def _diverged(change: Change | None, twin_change: Change | None) -> bool:
    """Whether two tied weights differ, or their changes by tuning.

    PEFT trains a copy of embeddings in `modules_to_save`, from which a tied head diverges unless `ensure_weight_tying`
    was set. With `ensure_weight_tying`, PEFT saves the one tensor under both names. It saves trained rows once.
    """
    if change is None and isinstance(twin_change, WithTrainedRows):
        return False
    if isinstance(change, StoredTensor) and isinstance(twin_change, StoredTensor):
        return change is not twin_change and not change.equals(twin_change)
    return change is not twin_change
