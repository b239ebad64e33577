"""The shape of a model, counted from its modules: built on the meta device, they take no memory for weights."""

import warnings
from collections.abc import Iterable
from copy import deepcopy

from torch import nn
from transformers import PreTrainedModel

from pi_lora.errors import ModelError
from pi_lora.planning.shape import Adapted, Shape
from pi_lora.recipe.schema import Tuning
from pi_lora.scaling.config import FULL_ATTENTION, LOCAL_ATTENTION, SLIDING_ATTENTION, Config

# Layer types without attention weights: their operations grow linearly with the sequence.
WITHOUT_ATTENTION = {"linear_attention", "conv", "mamba"}


def shape_of(model: PreTrainedModel) -> Shape:
    """Count the shape of a model on any device; raise ModelError if transformers knows no layers, or no head, of it."""
    config, head = model.config, model.get_output_embeddings()
    kinds = model._no_split_modules or ()
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    layers = [layer for modules in lists for layer in modules if type(layer).__name__ in kinds]
    if head is None or not layers:
        raise ModelError(f"model of type {config.model_type}: has no decoder layers with a head; no plan for it")
    hidden, heads = config.hidden_size, config.num_attention_heads
    per_token = getattr(config, "num_experts_per_tok", None)
    experts = [_experts(layer, per_token) for layer in layers]
    # `qk_head_dim` is that of multi-head latent attention, whose `head_dim` is the rotary part alone.
    head_dim = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None) or hidden // heads
    local = _local_layers(config.to_dict(), len(layers))
    norms = _norms(model)
    modules = model.named_modules()
    linears = {name: module for name, module in modules if isinstance(module, nn.Linear) and module is not head}
    attention = _adapted(module for name, module in linears.items() if _in_attention(name))
    all_linear = _adapted(linears.values())
    names = sorted({name.rpartition(".")[2] for name in linears})
    by_name = {own: _adapted(module for name, module in linears.items() if name.endswith(f".{own}")) for own in names}
    if per_token:
        # Imported here: PEFT takes seconds, and models without experts do without.
        from pi_lora.models.adapter import prepare_for_tuning

        with warnings.catch_warnings():
            # PEFT 0.21 warns that it adapts the tensors of experts as such.
            warnings.simplefilter("ignore")
            tuned = prepare_for_tuning(deepcopy(model).to("meta"), Tuning(rank=1), "")
        of_lora = (weight.numel() for name, weight in tuned.named_parameters() if "lora_" in name)
        all_linear = Adapted(sum(of_lora), all_linear.outputs)
    return Shape(
        parameters=_numbers(model),
        layers=len(layers),
        layer=max(map(_numbers, layers)),
        hidden=hidden,
        intermediate=max(_mlp_width(layer, hidden, used) for layer, (_, used) in zip(layers, experts, strict=True)),
        queries=heads * head_dim,
        keys=(getattr(config, "num_key_value_heads", None) or heads) * head_dim,
        vocabulary=head.out_features,
        tied=head.weight is model.get_input_embeddings().weight,
        linear_weights=sum(module.weight.numel() for module in linears.values()),
        lora={"all-linear": all_linear, "attention": attention, **by_name},
        experts=sum(numbers for numbers, _ in experts),
        active_experts=sum(used for _, used in experts),
        norms=max(sum(not _in_attention(name) for name in _norms(layer)) for layer in layers),
        norm_weights=_numbers(nn.ModuleList(norms.values())),
        head_normed=any(map(_in_attention, norms)),
        **local,
    )


def _adapted(linears: Iterable[nn.Linear]) -> Adapted:
    shapes = [(module.in_features, module.out_features) for module in linears]
    return Adapted(sum(map(sum, shapes)), sum(outputs for _, outputs in shapes))


def _numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _in_attention(name: str) -> bool:
    return "attn." in name or "attention." in name


def _norms(module: nn.Module) -> dict[str, nn.Module]:
    return {name: norm for name, norm in module.named_modules() if "Norm" in type(norm).__name__}


def _experts(layer: nn.Module, per_token: int | None) -> tuple[int, int]:
    """Return the weights of a layer's experts, in tensors of (experts, rows, columns), and those that a token uses."""
    weights = [weight for name, weight in layer.named_parameters() if weight.dim() == 3 and "conv" not in name]
    active = (weight[0].numel() * min(per_token or len(weight), len(weight)) for weight in weights)
    return sum(weight.numel() for weight in weights), sum(active)


def _mlp_width(layer: nn.Module, hidden: int, active_experts: int) -> int:
    """Return the width inside a layer's MLPs: the inputs of what projects back to hidden states, outside attention.

    An expert has three matrices of hidden x width. Where everything is as wide as the hidden states, so is the MLP.
    """
    back = (
        module.in_features
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear) and not _in_attention(name) and module.out_features == hidden
    )
    return sum(width for width in back if width != hidden) + active_experts // (3 * hidden) or hidden


def _local_layers(config: Config, layers: int) -> dict[str, int]:
    """Return how many layers attend to everything, how many to a window, and its length in tokens."""
    window = config.get("sliding_window") or config.get("attention_chunk_size") or 0
    kinds = config.get("layer_types") or [SLIDING_ATTENTION if window else FULL_ATTENTION] * layers
    sliding = sum(kind in LOCAL_ATTENTION for kind in kinds)
    full = layers - sliding - sum(kind in WITHOUT_ATTENTION for kind in kinds)
    return {"full_layers": full, "sliding_layers": sliding, "sliding_window": window}
