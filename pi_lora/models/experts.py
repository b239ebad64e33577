"""Experts: weights of a model that stack a matrix for each expert, and the matrices that files hold instead."""

from collections import defaultdict
from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

from pi_lora.errors import ModelError

# How transformers 5 joins stored matrices: those of experts are stacked, and gate and up projections joined.
JOINED = ([MergeModulelist], [MergeModulelist, Concatenate], [Concatenate])
ROUTERS = {"gate", "router"}
# Their Mamba layers pass the weight of this projection to a kernel, past any adapter; PEFT 0.21 refuses to adapt it.
MAMBA_TYPES = {"falcon_h1"}
MAMBA_OUTPUT = "out_proj"


class Layout:
    """How the weights of a model are stored.

    transformers 5 stacks the experts of most models when it loads them. Files have a tensor for each expert and each
    projection, or the stack.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.weights = model.state_dict()
        transforms = get_model_conversion_mapping(model)
        self.converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]

    @property
    def projections(self) -> set[str]:
        """The names of the stored projections of experts, such as `gate_proj`."""
        patterns = [pattern for converter in self.converters for pattern in converter.source_patterns]
        return {pattern.split(".")[-2] for pattern in patterns if "experts.*." in pattern}

    def num_experts(self, name: str) -> int:
        """Return the number of matrices in a weight of the model; 1 for a name that the model does not have."""
        weight = self.weights.get(name)
        if weight is None or weight.dim() != 3:
            return 1
        return len(weight)

    def is_transposed(self, name: str) -> bool:
        """Whether inputs are in the rows of the matrices of a weight."""
        if name not in self.weights:
            return False
        module, _, _ = name.rpartition(".")
        return getattr(self.model.get_submodule(module), "is_transposed", False)

    def parts(self, name: str) -> list[str]:
        """Return the names of the matrices that the weight `name` joins: all projections of an expert, then the next.

        Raise ModelError if files hold that weight in another form.
        """
        experts = range(self.num_experts(name))
        for converter in self.converters:
            reverse = converter.reverse_transform()
            stored_name, pattern = reverse.rename_source_key(name)
            operations = [type(operation) for operation in converter.operations]
            if pattern is None or operations == [Transpose]:
                continue
            if operations not in JOINED:
                raise ModelError(
                    f"{name}: files store it in a form into which no adapter can be merged; adapt other modules"
                )
            first_pattern = reverse.target_patterns[0]
            of_projections = [stored_name.replace(first_pattern, other) for other in reverse.target_patterns]
            return [_part_of_expert(part, expert, experts) for expert in experts for part in of_projections]
        return [_part_of_expert(name, expert, experts) for expert in experts]


def _part_of_expert(name: str, expert: int, experts: range) -> str:
    """Return the name of the matrix of an expert: a tensor of its own, or a row of a stack."""
    if "*" in name:
        return name.replace("*", str(expert))
    if len(experts) == 1:
        return name
    return f"{name}[{expert}]"


def linear_targets(model: PreTrainedModel) -> tuple[str | list[str], list[str]]:
    """Return all linear layers without the head and routers as `target_modules` of PEFT, and stacked experts as its
    `target_parameters`.

    Routers do not train, for stability (as in Unsloth's guides), nor do projections inside a kernel of Mamba. PEFT 0.21
    takes the name of a projection of experts to mean the experts. So projections of such names in dense and shared MLPs
    are parameters too; quantized ones do not train.
    """
    stacks = set()
    for name, weight in model.named_parameters():
        module, _, parameter = name.rpartition(".")
        class_name = type(model.get_submodule(module)).__name__
        of_experts = module.endswith(".experts") or "Experts" in class_name
        if of_experts and weight.dim() == 3:
            _, _, module_name = module.rpartition(".")
            stacks.add(f"{module_name}.{parameter}")
    projections = Layout(model).projections
    left_out = set(ROUTERS)
    if model.config.model_type in MAMBA_TYPES:
        left_out.add(MAMBA_OUTPUT)
    if not stacks and not projections and left_out == ROUTERS:
        return "all-linear", []
    modules = set()
    parameters = sorted(stacks)
    for name, module in model.named_modules():
        path = name.split(".")
        is_linear = isinstance(module, nn.Linear) and module is not model.get_output_embeddings()
        if not is_linear or not left_out.isdisjoint(path):
            continue
        if path[-1] not in projections:
            modules.add(path[-1])
        elif module.weight.is_floating_point():
            parameters.append(f"{name}.weight")
    return sorted(modules), parameters


def adapted_parameters(model: PreTrainedModel, targets: Iterable[str]) -> dict[str, str]:
    """Return the names of the weights that PEFT adapts as `target_parameters`, by the modules of the saved matrices.

    PEFT 0.21 wraps a module once for each of its parameters, the first one innermost.
    """
    weights_of_modules = defaultdict(list)
    endings = tuple(f".{target}" for target in targets)
    for name, _ in model.named_parameters():
        if f".{name}".endswith(endings):
            module, _, _ = name.rpartition(".")
            weights_of_modules[module].append(name)
    names = {}
    for module, weights in weights_of_modules.items():
        for depth, weight in enumerate(reversed(weights)):
            names[module + depth * ".base_layer"] = weight
    return names
