"""Experts: weights of the model that stack one matrix for each expert, and the tensors that files hold instead."""

from collections import defaultdict
from collections.abc import Iterable

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

from pi_lora.errors import ModelError

# How transformers 5 joins the stored matrices of experts: stacked, or stacked with gate and up projections joined.
STACKING = ([MergeModulelist], [MergeModulelist, Concatenate])


class Layout:
    """How the weights of a model are stored.

    transformers 5 stacks the experts of most models when it loads them. Files have a tensor for each expert and each
    projection, or the stack.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.converters = []
        for transform in get_model_conversion_mapping(model):
            if isinstance(transform, WeightConverter):
                self.converters.append(transform)

    def parts(self, name: str, num_experts: int) -> list[str]:
        """Return the names of the matrices that the weight `name` stacks: all projections of an expert, then the next.

        Raise ModelError if files hold that weight in another form.
        """
        for converter in self.converters:
            reverse = converter.reverse_transform()
            stored_name, pattern = reverse.rename_source_key(name)
            if pattern is None:
                continue
            operations = [type(operation) for operation in converter.operations]
            if operations == [Transpose]:
                break
            if operations not in STACKING:
                raise ModelError(f"{name}: is stored in a form of its own, which cannot be merged")
            first_pattern = reverse.target_patterns[0]
            of_projections = [stored_name.replace(first_pattern, other) for other in reverse.target_patterns]
            return [part.replace("*", str(expert)) for expert in range(num_experts) for part in of_projections]
        return [f"{name}[{expert}]" for expert in range(num_experts)]


def adapted_parameters(model: PreTrainedModel, targets: Iterable[str]) -> dict[str, str]:
    """Return the names of the weights that PEFT adapts as `target_parameters`, by the modules of the saved matrices.

    PEFT 0.21 wraps a module once for each of its parameters, the first one innermost.
    """
    weights_of_modules = defaultdict(list)
    for name, _ in model.named_parameters():
        if any(f".{name}".endswith(f".{target}") for target in targets):
            module, _, _ = name.rpartition(".")
            weights_of_modules[module].append(name)
    names = {}
    for module, weights in weights_of_modules.items():
        for depth, weight in enumerate(reversed(weights)):
            names[module + depth * ".base_layer"] = weight
    return names
